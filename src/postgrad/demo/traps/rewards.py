"""The rewards of the four traps. Each of them was written by somebody who wants the right day.

hacking    `mentioned` finds the right day anywhere in the answer: nobody wants to punish an answer for its wording. An answer that names
           every day has it too. `right` reads the last day that is named.
sparsity   `counted` wants the whole way, without a mistake: all or nothing. `progress` pays for the part of it that is right.
collapse   `right` alone; it is the temperature that is wrong.
conflict   `shows_work` wants a day for each day on the way, `brief` few words: each sensible, together a contradiction.
           `brief_where_shown` is brief for answers that show their work, and nothing for others.

A reward is a function from one rollout to a number. It reads the rollout, and the columns of the row by their names. This file is copied
beside the recipe and stands alone, so it has the days and the way once more.
"""

from __future__ import annotations

import re

from postgrad.rewards import RolloutView, reward

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = 5
"""Words from which on an answer is not brief at all."""


def named(text: str) -> list[str]:
    """The days in a text, in order."""
    return re.findall("|".join(DAYS), text)


def way(day: str, n: int) -> list[str]:
    """The n days after `day`."""
    return [DAYS[(DAYS.index(day) + step) % 7] for step in range(1, n + 1)]


def agreeing(found: list[str], wanted: list[str]) -> int:
    """How many days agree before the first that does not."""
    pairs = list(zip(found, wanted, strict=False))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


@reward(scope="final", claim="the right day is in the answer", range=(0, 1), role="outcome")
def mentioned(rollout: RolloutView, answer: str) -> float:
    return float(answer in rollout.final_answer)


@reward(scope="final", claim="the last day that the answer names is the right one", range=(0, 1), role="outcome")
def right(rollout: RolloutView, answer: str) -> float:
    return float(named(rollout.final_answer)[-1:] == [answer])


@reward(scope="final", claim="the answer names the days on the way, each of them and no other", range=(0, 1), role="outcome")
def counted(rollout: RolloutView, day: str, n: int) -> float:
    return float(named(rollout.final_answer) == way(day, n))


@reward(scope="reasoning", claim="the answer counts a part of the way without a mistake, and stops in time", range=(0, 1))
def progress(rollout: RolloutView, day: str, n: int) -> float:
    days = named(rollout.final_answer)
    return agreeing(days, way(day, n)) / max(n, len(days))


@reward(scope="reasoning", claim="the answer names the days on the way, from the first on", range=(0, 1))
def on_the_way(rollout: RolloutView, day: str, n: int) -> float:
    return agreeing(named(rollout.final_answer), way(day, n)) / n


@reward(scope="reasoning", claim="the answer names as many days as there are on the way", range=(0, 1))
def shows_work(rollout: RolloutView, n: int) -> float:
    return min(1.0, len(named(rollout.final_answer)) / n)


@reward(scope="length", claim="the answer has few words", range=(0, 1))
def brief(rollout: RolloutView) -> float:
    return max(0.0, 1.0 - len(re.findall(r"\w+", rollout.final_answer)) / WORDS)


@reward(scope="length", claim="an answer that shows all of its work has few words", range=(0, 1))
def brief_where_shown(rollout: RolloutView, n: int) -> float:
    return brief(rollout) if shows_work(rollout, n) == 1.0 else 0.0
