"""The rewards of the shop. `steps` judges each turn by itself, so that the right first call is paid also where the second goes wrong.

steps         0.3   per turn: first one look-up of the thing, then one product of number and price
correctness   1.0   the last answer is the right amount
malformed     0.5   × −1 for a call that cannot be executed
"""

from __future__ import annotations

import re

from postgrad.rewards import RolloutView, reward

NUMBER = re.compile(r"(?<![\d.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\d.,]*\d)")


@reward(scope="tool_calls", claim="the first turn looks up the thing, the second multiplies number and price", range=(0, 2), per_turn=True)
def steps(rollout: RolloutView, item: str, number: int, cost: int) -> list[float]:
    wanted = [("price", {"item": item}), ("multiply", {"a": number, "b": cost}), ("multiply", {"a": cost, "b": number})]
    earned = []
    for turn, message in enumerate(message for message in rollout.messages if message.role == "assistant"):
        made = [(call.name, call.arguments) for call in message.tool_calls]
        expected = wanted[:1] if turn == 0 else wanted[1:] if turn == 1 else []
        earned.append(float(len(made) == 1 and made[0] in expected))
    return earned


@reward(scope="final", claim="the last answer is the right amount", range=(0, 1), role="outcome")
def correctness(rollout: RolloutView, number: int, cost: int, answer: str) -> float:
    found = [text.replace(",", "") for text in NUMBER.findall(rollout.final_answer)]
    return float(bool(found) and found[-1] == answer and set(found) <= {answer, str(number), str(cost)})


@reward(scope="tool_results", claim="every call could be executed", range=(-1, 0))
def malformed(rollout: RolloutView) -> float:
    unfinished = rollout.raw_text.count("<tool_call>") > rollout.raw_text.count("</tool_call>")
    return -float(unfinished or any(result.error for result in rollout.tool_results))
