"""Which weekday is it in n days? A task that SmolLM2-135M can learn in minutes, because it can count from day to day.

1. `questions`    everyday questions ("The parcel arrives in 3 days …"). Held-out ones have other wordings and other (day, n) pairs.
2. `warm_start`   conversations for SFT, in other words than any question. Half of the answers name every day on the way, half only the day.
3. `write`        the questions, two to six days ahead and eight to twelve, the warm start, and rewards.py.

The model knows which day follows which, so one that names the days on the way only has to learn when to stop. The day alone would have to
be remembered for each (day, n), and stays near chance, 1/7. After the warm start the model mixes both; which of them it comes to prefer is
up to the reward, and that is what the four traps are about.
Every choice comes from a generator made from the seed: the same seed gives the same files, and no global state is read or changed.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NEAR, FAR = (2, 6), (8, 12)
"""Days ahead, from and to."""
WORDINGS: Mapping[str, tuple[str, ...]] = {
    "train": (
        "Today is {day}. The parcel arrives in {n} days. Which day is that?",
        "It is {day}. The exam is in {n} days. On which day of the week is it?",
        "The tickets were booked on {day} and are valid for {n} days. On which day do they expire?",
        "We start on {day} and finish {n} days later. On which day do we finish?",
        "My rent is due {n} days from now, and today is {day}. On which day is it due?",
        "The milk was opened on {day} and keeps for {n} days. Until which day?",
    ),
    "heldout": (
        "A plant was watered on {day} and needs water again in {n} days. On which day?",
        "Her cast comes off {n} days after {day}. Which day is that?",
    ),
    "warm start": ("Which day is {n} days after {day}?", "{day} plus {n} days?", "Count {n} days on from {day}."),
}


def days_on_the_way(day: str, n: int) -> list[str]:
    """The n days after `day`; the last is the answer.

    >>> days_on_the_way("Saturday", 3)
    ['Sunday', 'Monday', 'Tuesday']
    """
    start = DAYS.index(day)
    return [DAYS[(start + step) % 7] for step in range(1, n + 1)]


def is_heldout(day: str, n: int) -> bool:
    """Whether this pair is kept for evaluation: about one in four, of every day and every n, whatever the seed."""
    return (DAYS.index(day) - n) % 4 == 0


def questions(seed: int, kind: str, count: int, ahead: tuple[int, int] = NEAR) -> list[dict[str, Any]]:
    """`count` rows with `prompt` (one user message), `day`, `n` and `answer`, `ahead` days from and to; the wordings in turn.

    `kind`: train or heldout. Questions repeat: there are few pairs.
    """
    rng = random.Random(f"weekdays {kind} {seed} {ahead}")
    rows = []
    for number in range(count):
        day, n = _pair(rng, ahead, heldout=kind == "heldout")
        text = WORDINGS[kind][number % len(WORDINGS[kind])].format(day=day, n=n)
        rows.append({"prompt": [{"role": "user", "content": text}], "day": day, "n": n, "answer": days_on_the_way(day, n)[-1]})
    return rows


def warm_start(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows with `messages`: bare questions, answered in turn by every day on the way and by the day alone."""
    rng = random.Random(f"weekdays warm start {seed}")
    rows = []
    for number in range(count):
        day, n = _pair(rng, NEAR, heldout=False)
        days = days_on_the_way(day, n)
        asked = rng.choice(WORDINGS["warm start"]).format(day=day, n=n)
        answer = ", ".join(days if number % 2 == 0 else days[-1:]) + "."
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    return rows


def _pair(rng: random.Random, ahead: tuple[int, int], *, heldout: bool) -> tuple[str, int]:
    while True:
        day, n = rng.choice(DAYS), rng.randint(*ahead)
        if is_heldout(day, n) is heldout:
            return day, n


def write(folder: Path, seed: int = 0, *, sft: int = 160, train: int = 360, heldout: int = 120) -> list[Path]:
    """Write sft.jsonl, near.jsonl, near-heldout.jsonl, far.jsonl, far-heldout.jsonl and rewards.py into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"sft.jsonl": warm_start(seed, sft)}
    for name, ahead in (("near", NEAR), ("far", FAR)):
        files |= {
            f"{name}.jsonl": questions(seed, "train", train, ahead),
            f"{name}-heldout.jsonl": questions(seed, "heldout", heldout, ahead),
        }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    script = Path(shutil.copyfile(Path(__file__).with_name("rewards.py"), folder / "rewards.py"))
    return [*(folder / name for name in files), script]
