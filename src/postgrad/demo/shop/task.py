"""The data of the shop: questions about an amount, and conversations that find it with two calls.

1. `problems`     questions. Held-out ones are about things that no training question names; unseen ones have other wordings as well.
2. `warm_start`   SFT conversations in one plain wording that no question has.
3. `write`        all as JSON lines, with tools.py and rewards.py.

Every choice comes from a generator made from the seed; which things are held out does not.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from postgrad.demo.shop.tools import PRICES

Kind = Literal["train", "heldout", "unseen"]

WORDINGS = (
    "How much do {n} {item}s cost?",
    "What do I pay for {n} {item}s?",
    "I would like {n} {item}s. What is the total?",
    "A school orders {n} {item}s. What will the bill be?",
    "{n} {item}s, please. How much is that?",
    "Somebody buys {n} {item}s. How much money is that?",
)
UNSEEN = (
    "We need {n} {item}s for the office. How much should we budget?",
    "If I take {n} {item}s, what will it come to?",
    "Give me the amount due for {n} {item}s.",
)
PLAIN = "Amount for {n} {item}s?"
NAMES = sorted(PRICES)
HELDOUT = frozenset(NAMES[::4])


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    item: str
    number: int

    @property
    def cost(self) -> int:
        """Of one."""
        return PRICES[self.item]

    @property
    def answer(self) -> str:
        return str(self.number * self.cost)


def problems(seed: int, kind: Kind, *, count: int) -> list[Problem]:
    """`count` different questions, the wordings in turn."""
    rng = random.Random(f"shop {kind} {seed}")
    wordings = UNSEEN if kind == "unseen" else WORDINGS
    names = [name for name in NAMES if (name in HELDOUT) == (kind != "train")]
    found: dict[str, Problem] = {}
    while len(found) < count:
        item, number = rng.choice(names), rng.randint(12, 98)
        problem = Problem(wordings[len(found) % len(wordings)].format(n=number, item=item), item, number)
        found.setdefault(problem.question, problem)
    return list(found.values())


def conversation(problem: Problem) -> list[dict[str, Any]]:
    """The problem solved as it should be: look up, multiply, answer."""
    return [
        {"role": "user", "content": problem.question},
        _call("price", {"item": problem.item}),
        {"role": "tool", "name": "price", "content": str(problem.cost)},
        _call("multiply", {"a": problem.number, "b": problem.cost}),
        {"role": "tool", "name": "multiply", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def warm_start(seed: int, *, count: int) -> list[dict[str, Any]]:
    rng = random.Random(f"shop warm start {seed}")
    names = [name for name in NAMES if name not in HELDOUT]
    rows = []
    for _ in range(count):
        item, number = rng.choice(names), rng.randint(2, 11)
        rows.append({"messages": conversation(Problem(PLAIN.format(n=number, item=item), item, number))})
    return rows


def write(folder: Path, seed: int = 0, *, train: int = 240, heldout: int = 120, unseen: int = 120, warm: int = 80) -> list[Path]:
    """Write sft.jsonl, train.jsonl, heldout.jsonl, unseen.jsonl, tools.py and rewards.py into `folder` and return their paths.

    Problem rows: prompt (one user message), item, number, cost (of one), answer (text).
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[Kind, int] = {"train": train, "heldout": heldout, "unseen": unseen}
    files = {"sft.jsonl": warm_start(seed, count=warm)}
    files |= {f"{kind}.jsonl": [_row(problem) for problem in problems(seed, kind, count=count)] for kind, count in counts.items()}
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    scripts = [Path(shutil.copyfile(Path(__file__).with_name(name), folder / name)) for name in ("tools.py", "rewards.py")]
    return [*(folder / name for name in files), *scripts]


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "item": problem.item,
        "number": problem.number,
        "cost": problem.cost,
        "answer": problem.answer,
    }
