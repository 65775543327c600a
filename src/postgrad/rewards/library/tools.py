"""Rewards for tools: that calls succeed, are the right ones and no more than that, and that the answer uses what they returned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from postgrad.gold import GoldCall, gold_calls
from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part, plain
from postgrad.rewards.library.numbers import answered_number, numbers_in
from postgrad.types import ToolCall

_Call = tuple[str, Mapping[str, Any]]
_LONGEST_QUOTE = 200


@reward(scope="tool_calls", claim="a tool was called successfully", range=(0.0, 1.0))
def tool_use(rollout: RolloutView) -> float:
    """1 when at least one call was executed without an error. More calls earn nothing more."""
    return float(any(result.call is not None and not result.error for result in rollout.tool_results))


@reward(scope="tool_calls", claim="the calls are the gold calls", range=(0.0, 1.0))
def tool_match(rollout: RolloutView, tool_calls: Any) -> float | None:
    """How far the calls are the gold calls, in any order: per pair a third each for the name, the parameters' names and their values,
    divided by the number of gold calls, or of calls made where there were more.

    tool_calls: [{"name": …, "arguments": {…}}, …], also in OpenAI's form, as JSON text, or as BFCL's possible answers
    [{name: {parameter: [accepted values]}}, …] (`postgrad.gold`). An empty list says that no call is right; null, or anything else,
    abstains. Calling everything earns little, because what was not asked for counts in the divisor.
    """
    gold = gold_calls(tool_calls)
    if gold is None:
        return None
    made = [(call.name, call.arguments) for call in _calls(rollout)]
    count = len(made) + _malformed(rollout)
    if not gold or not count:
        return float(not gold and not count)
    return _best_pairing(gold, made) / max(len(gold), count)


@reward(scope="tool_calls", claim="the calls are exactly the gold calls", range=(0.0, 1.0), role="outcome")
def tool_exact(rollout: RolloutView, tool_calls: Any) -> float | None:
    """1 when the calls are the gold calls, in any order, and there is no other; else 0. On BFCL's rows it is the accuracy of its checker of
    calls, up to the types of arguments, which the values decide here."""
    score = tool_match(rollout, tool_calls)
    return None if score is None else float(score == 1.0)


def _best_pairing(gold: Sequence[GoldCall], made: Sequence[_Call]) -> float:
    """Greedy from the best pair on: each call pairs once."""
    pairs = sorted(((_likeness(g, m), i, j) for i, g in enumerate(gold) for j, m in enumerate(made)), key=lambda p: (-p[0], p[1], p[2]))
    total, used_gold, used_made = 0.0, set[int](), set[int]()
    for score, i, j in pairs:
        if i not in used_gold and j not in used_made:
            total += score
            used_gold.add(i)
            used_made.add(j)
    return total


def _likeness(gold: GoldCall, made: _Call) -> float:
    """1 for a call that is right. A parameter that may be left out counts only where it was given."""
    if gold.name != made[0]:
        return 0.0
    names = gold.required | set(made[1])
    if not names:
        return 1.0
    shared = set(gold.arguments) & set(made[1])
    right = sum(gold.arguments[name].fits(made[1][name]) for name in shared)
    return (1.0 + (len(shared) + right) / len(names)) / 3.0


def _check_calls(max_calls: int | None = None) -> None:
    if max_calls is not None and max_calls < 1:
        raise ValueError(f"needs max_calls ≥ 1, got {max_calls}")


@reward(scope="tool_calls", claim="no call was one too many", range=(-1.0, 0.0), check_args=_check_calls)
def tool_efficiency(rollout: RolloutView, max_calls: int) -> float:
    """−(share of the calls that repeated an earlier one exactly, or went beyond max_calls). Calling nothing costs and earns nothing."""
    calls = [(call.name, json.dumps(call.arguments, sort_keys=True, default=str)) for call in _calls(rollout)]
    total = len(calls) + _malformed(rollout)
    useful = min(len(set(calls)), max_calls)
    return (useful - total) / total if total > useful else 0.0


def _check_errors(worst: int = 2) -> None:
    if worst < 1:
        raise ValueError(f"needs worst ≥ 1, got {worst}")


@reward(scope="tool_results", claim="every call could be executed", range=(-1.0, 0.0), check_args=_check_errors)
def tool_error(rollout: RolloutView, *, worst: int = 2) -> float:
    """−1/worst for each call that failed or was malformed, at most −1. It counts errors, not their share, so that good calls do not dilute
    bad ones."""
    return -min(1.0, sum(bool(result.error) for result in rollout.tool_results) / worst)


@reward(scope="tool_results", claim="the answer is what a tool returned", range=(0.0, 1.0))
def answer_uses_tool(rollout: RolloutView) -> float | None:
    """1 when the number that the answer commits to, or else the words of a whole result (up to 200 characters), came of a successful call.

    Abstains where that says nothing: the same stood in the question or in a call's arguments, so it need not come from the result.
    """
    answer = answer_part(rollout.final_answer)
    results = [result for result in rollout.tool_results if result.call is not None and not result.error]
    known = [message.content for message in rollout.prompt_messages] + [rollout.prompt_text]
    known += [json.dumps(result.call.arguments, default=str, ensure_ascii=False) for result in results if result.call is not None]
    number = answered_number(answer)
    if number is not None and any(number in numbers_in(result.content) for result in results):
        return None if any(number in numbers_in(text) for text in known) else 1.0
    quotes = {
        quote for result in results if (quote := plain(result.content)) and len(quote) <= _LONGEST_QUOTE and re.search(r"[^\W\d_]", quote)
    }
    found = {quote for quote in quotes if re.search(rf"(?<!\w){re.escape(quote)}(?!\w)", plain(answer))}
    if not found:
        return 0.0
    return None if all(any(quote in plain(text) for text in known) for quote in found) else 1.0


def _calls(rollout: RolloutView) -> Iterator[ToolCall]:
    return (call for message in rollout.messages for call in message.tool_calls)


def _malformed(rollout: RolloutView) -> int:
    return sum(result.call is None for result in rollout.tool_results)
