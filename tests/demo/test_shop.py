"""The shop: two calls are needed, held-out things are new, and the rewards know what is right."""

from __future__ import annotations

import json

import pytest

from postgrad.chat import ChatFormat
from postgrad.demo.shop import rewards, task, tools
from postgrad.protocols import SamplingParams
from postgrad.rewards.base import view_of
from postgrad.rollout import RolloutConfig, collect, make_toolbox
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.types import Message, Prompt

PROBLEM = task.Problem("How much do 12 lamps cost?", "lamp", 12)


def called(name: str, **arguments: object) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def judged(*turns: str) -> tuple[list[float], float, float]:
    """steps, correctness, malformed of a rollout that wrote these turns."""
    tokenizer = tiny_tokenizer()
    [group] = collect(
        [(0, Prompt("d:1", (Message("user", PROBLEM.question),)))],
        sampler=ScriptedPolicy(list(turns), tokenizer=tokenizer), chat=ChatFormat(tokenizer),
        toolbox=make_toolbox([tools.price, tools.multiply]), config=RolloutConfig(group_size=1, max_tokens=400, max_turns=3),
        params=SamplingParams(), seed=0, step=1,
    )  # fmt: skip
    rollout = view_of(group.prompt, group.rollouts[0])
    return (
        rewards.steps(rollout, PROBLEM.item, PROBLEM.number, PROBLEM.cost),
        rewards.correctness(rollout, PROBLEM.number, PROBLEM.cost, PROBLEM.answer),
        rewards.malformed(rollout),
    )


LOOK, TIMES = called("price", item="lamp"), called("multiply", a=12, b=37)


@pytest.mark.parametrize(
    ("turns", "steps", "correct", "malformed"),
    [
        ((LOOK, TIMES, "444"), [1.0, 1.0, 0.0], 1.0, 0.0),
        ((LOOK, called("multiply", a=37, b=12), "12 lamps cost 444 dollars."), [1.0, 1.0, 0.0], 1.0, 0.0),
        ((LOOK, called("multiply", a=12, b=12), "144"), [1.0, 0.0, 0.0], 0.0, 0.0),
        ((TIMES, LOOK, "444"), [0.0, 0.0, 0.0], 1.0, 0.0),
        ((LOOK + TIMES, "444"), [0.0, 0.0], 1.0, 0.0),
        (("444",), [0.0], 1.0, 0.0),
        (("It is 443 or 444",), [0.0], 0.0, 0.0),
        ((called("price", item="lamps"), "no"), [0.0, 0.0], 0.0, -1.0),
        ((LOOK, LOOK, TIMES), [1.0, 0.0, 0.0], 0.0, 0.0),
    ],
)
def test_each_turn_is_judged_by_itself_and_the_answer_as_a_whole(turns, steps, correct, malformed):
    assert judged(*turns) == (steps, correct, malformed)


def test_held_out_things_are_never_trained_and_unseen_wordings_are_new():
    trained = {problem.item for problem in task.problems(0, "train", count=240)}
    shown = {row["messages"][1]["tool_calls"][0]["function"]["arguments"]["item"] for row in task.warm_start(0, count=200)}
    held = {problem.item for kind in ("heldout", "unseen") for problem in task.problems(0, kind, count=120)}
    assert not held & (trained | shown)
    assert held == task.HELDOUT
    assert not set(task.WORDINGS) & set(task.UNSEEN)
    assert task.PLAIN not in (*task.WORDINGS, *task.UNSEEN)


def test_the_price_cannot_be_guessed_from_the_question_and_the_product_is_no_small_one():
    assert len(set(tools.PRICES.values())) == len(tools.PRICES)
    for problem in task.problems(0, "train", count=240):
        assert str(problem.cost) not in problem.question or problem.cost == problem.number
        assert int(problem.answer) == problem.number * tools.price(problem.item)


def test_the_seed_decides_every_byte(tmp_path):
    files = [{path.name: path.read_bytes() for path in task.write(tmp_path / name, seed)} for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    assert files[0] == files[1]
    assert {name for name in files[0] if files[0][name] == files[2][name]} == {"tools.py", "rewards.py"}
