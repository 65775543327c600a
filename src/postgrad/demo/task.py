"""Word problems of one operation, and the warm start that shows a model how a call looks.

1. `train_problems`    three-digit numbers, a few templates per operator, operators in balance.
2. `heldout_problems`  the same templates with pairs of numbers that no training set of any seed contains.
3. `unseen_problems`   templates that are never trained on, with held-out pairs.
4. `warm_start`        conversations for SFT: bare two-digit arithmetic in other words, with the call, its result and the answer.
5. `write`             all four as JSON lines, with `tools.py` and `rewards.py`.

Every choice comes from a generator made from the seed: the same seed gives the same files, and no global state is read or changed.

What makes the task work for a model of 135 million parameters in minutes (each point was measured):
- The warm start is short and in other words. A long one leaves nothing to explore, symbols alone ("12 + 34") collapse to one operator.
- Every three problems in a row hold each operator once (train with `shuffle: false`): in unbalanced batches the operator drifts.
- One operation. With two, a right answer is too rare to be found.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATORS = ("+", "-", "*")

TEMPLATES: dict[str, tuple[str, ...]] = {
    "+": (
        "A farm has {left} hens and buys {right} more. How many hens does it have now?",
        "Mia drove {left} miles on Monday and {right} miles on Tuesday. How many miles did she drive in total?",
        "There are {left} red and {right} blue balloons. How many balloons are there altogether?",
        "Tom saved {left} dollars and then earned {right} dollars. How many dollars does he have?",
        "A baker made {left} rolls in the morning and {right} in the afternoon. How many rolls did he make?",
        "{left} boys and {right} girls go to this school. How many pupils does it have?",
        "A tree was {left} inches tall and grew by {right} inches. How tall is it?",
        "A hotel housed {left} guests before {right} others arrived. How many guests does it house?",
    ),
    "-": (
        "A shop had {left} lamps and sold {right} of them. How many lamps are left?",
        "Ana had {left} stamps and gave {right} away. How many stamps does she still have?",
        "A train carried {left} people and {right} got off. How many people stayed on?",
        "Ben needs {left} points and has {right}. How many more points does he need?",
        "A pool held {left} gallons until {right} gallons were pumped out. How many gallons are in it?",
        "Of {left} eggs, {right} broke. How many eggs are whole?",
        "A board is {left} inches long. How long is it after {right} inches are sawn off?",
        "A jar of {left} coins lost {right} of them. How many coins does it contain?",
    ),
    "*": (
        "A hall has {left} rows with {right} seats each. How many seats are there?",
        "Each of {left} boxes holds {right} pens. How many pens are there in all the boxes?",
        "A printer makes {left} pages an hour. How many pages does it make in {right} hours?",
        "One ticket costs {left} dollars. How much do {right} tickets cost?",
        "A school has {left} classes with {right} pupils in every class. How many pupils is that?",
        "Every crate weighs {left} pounds. What do {right} crates weigh?",
        "A clerk sorts {left} letters a day. How many letters does she sort in {right} days?",
        "A wall is {left} bricks wide and {right} bricks high. How many bricks is that?",
    ),
}
UNSEEN: dict[str, tuple[str, ...]] = {
    "+": (
        "{left} children and {right} adults came to the fair. How many people came?",
        "A library owned {left} books before it received {right} new ones. What is the size of its collection?",
    ),
    "-": (
        "A tank held {left} liters until {right} liters leaked out. How much water remains?",
        "A rope is {left} feet long. After cutting off {right} feet, how long is it?",
    ),
    "*": (
        "A gardener plants {left} beds with {right} tulips in every bed. How many tulips does she plant?",
        "A machine fills {left} bottles a day. How many bottles does it fill in {right} days?",
    ),
}
BARE: dict[str, tuple[str, ...]] = {
    "+": ("What is the sum of {left} and {right}?", "Add {left} and {right}.", "Find the total of {left} and {right}."),
    "-": ("What is {left} minus {right}?", "Find the difference of {left} and {right}.", "Take {right} from {left}."),
    "*": ("What is the product of {left} and {right}?", "Multiply {left} by {right}.", "What is {left} times {right}?"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question. `template` names its wording, for example `unseen *0`."""

    question: str
    operator: str
    left: int
    right: int
    template: str

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def answer(self) -> int:
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.operator]


def is_heldout(left: int, right: int) -> bool:
    """Whether this pair, in either order and under any operator, is kept for evaluation: one pair in five, whatever the seed."""
    low, high = sorted((left, right))
    return random.Random(low * 1000 + high).random() < 0.2


def train_problems(seed: int, *, count: int = 360) -> list[Problem]:
    """`count` problems (a multiple of 3) on different pairs. Problems 3i, 3i + 1 and 3i + 2 have one operator each, in random order."""
    return _problems(random.Random(f"train {seed}"), TEMPLATES, count, kind="seen", heldout=False)


def heldout_problems(seed: int, *, count: int = 240) -> list[Problem]:
    """The trained templates with held-out pairs."""
    return _problems(random.Random(f"heldout {seed}"), TEMPLATES, count, kind="seen", heldout=True)


def unseen_problems(seed: int, *, count: int = 120) -> list[Problem]:
    """Templates that no training problem uses, with held-out pairs."""
    return _problems(random.Random(f"unseen {seed}"), UNSEEN, count, kind="unseen", heldout=True)


def warm_start(seed: int, *, count: int = 80) -> list[dict[str, Any]]:
    """`count` conversations as rows with `messages`: question, call, result, answer. Two-digit numbers, operators in turn."""
    rng = random.Random(f"warm start {seed}")
    rows = []
    for operator in _balanced(rng, count):
        left, right = _operands(rng, operator, low=11, high=99)
        wording = rng.choice(BARE[operator])
        problem = Problem(wording.format(left=left, right=right), operator, left, right, f"bare {operator}")
        rows.append({"messages": conversation(problem)})
    return rows


def write(folder: Path | str, seed: int = 0, *, train: int = 360, heldout: int = 240, unseen: int = 120, warm: int = 80) -> list[Path]:
    """Write sft.jsonl, train.jsonl, heldout.jsonl, unseen.jsonl, tools.py and rewards.py into `folder` and return their paths.

    Problem rows: prompt (one user message), operator, left, right, answer (text), template.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files = {
        "sft.jsonl": warm_start(seed, count=warm),
        "train.jsonl": [_row(problem) for problem in train_problems(seed, count=train)],
        "heldout.jsonl": [_row(problem) for problem in heldout_problems(seed, count=heldout)],
        "unseen.jsonl": [_row(problem) for problem in unseen_problems(seed, count=unseen)],
    }
    for name, rows in files.items():
        (target / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    scripts = [Path(shutil.copyfile(Path(__file__).with_name(name), target / name)) for name in ("tools.py", "rewards.py")]
    return [*(target / name for name in files), *scripts]


def _problems(rng: random.Random, templates: dict[str, tuple[str, ...]], count: int, *, kind: str, heldout: bool) -> list[Problem]:
    problems: list[Problem] = []
    used: set[tuple[int, int]] = set()
    wordings = {operator: _in_turn(rng, len(templates[operator])) for operator in OPERATORS}
    for operator in _balanced(rng, count):
        left, right = _fresh_pair(rng, operator, used, heldout=heldout)
        wording = next(wordings[operator])
        text = templates[operator][wording].format(left=left, right=right)
        problems.append(Problem(text, operator, left, right, f"{kind} {operator}{wording}"))
    return problems


def _fresh_pair(rng: random.Random, operator: str, used: set[tuple[int, int]], *, heldout: bool) -> tuple[int, int]:
    while True:
        left, right = _operands(rng, operator, low=100, high=999)
        pair = (min(left, right), max(left, right))
        if pair not in used and is_heldout(left, right) is heldout:
            used.add(pair)
            return left, right


def _operands(rng: random.Random, operator: str, *, low: int, high: int) -> tuple[int, int]:
    """Two different numbers, the larger first for a difference, whose difference is neither of them."""
    while True:
        left, right = rng.randint(low, high), rng.randint(low, high)
        if operator == "-" and left < right:
            left, right = right, left
        if left != right and left - right != right:
            return left, right


def _balanced(rng: random.Random, count: int) -> Iterator[str]:
    """`count` operators, shuffled three by three."""
    for start in range(0, count, len(OPERATORS)):
        yield from rng.sample(OPERATORS, len(OPERATORS))[: count - start]


def _in_turn(rng: random.Random, count: int) -> Iterator[int]:
    """Indices of `count` wordings, each used once before any is used again."""
    while True:
        yield from rng.sample(range(count), count)


def conversation(problem: Problem) -> list[dict[str, Any]]:
    """The problem solved as it should be: question, one call, its result, the answer."""
    answer = str(problem.answer)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": problem.expression}}}
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "operator": problem.operator,
        "left": problem.left,
        "right": problem.right,
        "answer": str(problem.answer),
        "template": problem.template,
    }
