"""The demo's rewards: one layer of the rollout each, in the order in which a model learns them.

    structure     0.2   one call, then one answer
    query         0.3   the call holds the two numbers of the question, and an operator between them
    correctness   1.0   the last answer is the right number
    malformed     0.5   × −1 for a call that cannot be executed

A reward is a function from one rollout to a number. It reads the rollout, and the columns of the row by their names.
"""

from __future__ import annotations

import re

from postgrad.rewards import RolloutView, reward

EXPRESSION = re.compile(r"\s*(\d+)\s*[-+*/]\s*(\d+)\s*")
NUMBER = re.compile(r"(?<![\d.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\d.,]*\d)")


@reward(scope="structure", claim="the model calls a tool exactly once, then answers", range=(0, 1))
def structure(rollout: RolloutView) -> float:
    roles = [message.role for message in rollout.messages]
    if roles != ["assistant", "tool", "assistant"] or rollout.stop.truncated:
        return 0.0
    first, _, last = rollout.messages
    return float(len(first.tool_calls) == 1 and not last.tool_calls and bool(last.content.strip()))


@reward(scope="tool_calls", claim="the call computes with the two numbers of the question and nothing else", range=(0, 1))
def query(rollout: RolloutView, left: int, right: int) -> float:
    # All or nothing, and an operator is required. Two thirds of the reward for one right number was soon earned by calls that hold only
    # one number. Which operator is right, is not judged here: that is what correctness is for.
    calls = [call for message in rollout.messages for call in message.tool_calls]
    if len(calls) != 1 or set(calls[0].arguments) != {"expression"}:
        return 0.0
    written = EXPRESSION.fullmatch(str(calls[0].arguments["expression"]))
    return float(written is not None and sorted(map(int, written.groups())) == sorted((left, right)))


@reward(scope="final", claim="the last answer is the right number", range=(0, 1), role="outcome")
def correctness(rollout: RolloutView, left: int, right: int, answer: str) -> float:
    # Repeating the question's own numbers is fine ("12 + 34 = 46"); naming any other number beside the answer is guessing.
    found = [number.replace(",", "") for number in NUMBER.findall(rollout.final_answer)]
    guesses = set(found) - {str(left), str(right)}
    return float(bool(found) and found[-1] == answer and guesses <= {answer})


@reward(scope="tool_results", claim="every call could be executed", range=(-1, 0))
def malformed(rollout: RolloutView) -> float:
    unfinished = rollout.raw_text.count("<tool_call>") > rollout.raw_text.count("</tool_call>")
    return -float(unfinished or any(result.error for result in rollout.tool_results))
