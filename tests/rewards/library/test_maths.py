import threading
import time

import pytest

pytest.importorskip("math_verify")

from postgrad.rewards.base import view_of
from postgrad.rewards.library import math_accuracy
from postgrad.rewards.library.maths import answers, gold_text
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason


def view(text, *, prompt="q", reasoning=""):
    segments = (Segment(Source.PROMPT, (0,)), Segment(Source.MODEL, (1,), (-0.1,)))
    messages = (Message("assistant", text, reasoning=reasoning),)
    return view_of(Prompt("r", (Message("user", prompt),)), Rollout(segments, messages, StopReason.END, text=text))


RIGHT = [
    ("42", "42"),
    ("so 6 * 7 = 42 #### 42", r"It is \boxed{42}."),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac12", r"The answer is $\frac{2}{4}$."),
    (r"hence $\boxed{x^2-1}$", r"so we get $(x-1)(x+1)$"),
    ("3", r"\boxed{x = 3}"),
    ("3", r"\boxed{3} and again \boxed{3.0}"),
    ("1000", r"\boxed{1,000}"),
    (r"\{1,2\}", r"\boxed{2, 1}"),
    ("(1, 2)", r"\boxed{(1,2)}"),
    ("3", "<think>4?</think>The answer is 3."),
    ("3", r"\boxed{3\text{ cm}}"),
    (r"\sqrt{2}", r"\[ \boxed{\sqrt{2}} \]"),
    ("7", "first 3, then 4, so in the end 7"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_equal_expressions_are_right(gold, text):
    assert math_accuracy(view(text), gold) == 1.0


WRONG = [
    ("42", ""),
    ("42", "I am sure."),
    ("42", r"\boxed{41}"),
    ("42", r"\boxed{41} or \boxed{42}"),
    ("42", r"\boxed{41, 42}"),
    ("42", r"\boxed{41 \text{ or } 42}"),
    ("42", "The answer is 41 or 42"),
    ("42", "the answer is 42. the answer is 41."),
    ("3", r"\boxed{\pm 3}"),
    ("42", "<think>42</think>"),
    ("42", r"<think>\boxed{42}</think>\boxed{41}"),
    ("42", "<think>it is 42"),
    ("2", r"either $2$ or $3$"),
    ("8", r"\boxed{2**3}"),
    ("8", r"\boxed{2^3}"),
    ("6", r"\boxed{3!}"),
    ("42", r"\boxed{40 + 2}"),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{42 = 41}"),
    (r"\sqrt{2}", r"\boxed{1.41}"),
    ("42", "\\boxed{" + "42 " * 1000 + "}"),
]


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_other_and_several_answers_are_wrong(gold, text):
    assert math_accuracy(view(text), gold) == 0.0


def test_a_worker_thread_gives_the_same_values_as_the_main_one():
    """verl#5635: math-verify's own time-out needs signals, and off the main thread everything silently became 0."""
    rows = [*RIGHT, *WRONG]
    found = []
    thread = threading.Thread(target=lambda: found.extend(math_accuracy(view(text), gold) for gold, text in rows))
    thread.start()
    thread.join(60)
    assert found == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


@pytest.mark.parametrize("gold", [None, "", "####", r"\boxed{}", "???"])
def test_a_gold_that_is_no_mathematics_abstains(gold):
    assert math_accuracy(view("42"), gold) is None


def test_reading():
    assert gold_text(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert answers(r"\boxed{\frac{1}{2}}") == [r"\frac{1}{2}"]
    assert answers("no idea") == []


@pytest.mark.parametrize("text", [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{9**9**9}", r"\boxed{2^{1000000}}", r"\boxed{99999!}", r"\boxed{3!!!}"])
@pytest.mark.parametrize("gold", ["9", "x^2"])
def test_an_answer_that_cannot_be_computed_is_wrong_at_once_in_any_thread(text, gold):
    results = []
    began = time.monotonic()
    thread = threading.Thread(target=lambda: results.append(math_accuracy(view(text), gold)))
    thread.start()
    thread.join(20)
    assert results == [0.0]
    assert time.monotonic() - began < 10


def test_a_gold_that_explodes_costs_one_row_its_deadline():
    """The worker is killed, the row abstains, and the next one is scored."""
    rollouts = [Rollout((Segment(Source.MODEL, (1,), (-0.1,)),), (Message("assistant", r"\boxed{3}"),), StopReason.END)]
    golds = [r"9^{9^{9^{9^{9}}}}", "3"]
    with Scorer(load_rewards([{"use": "math_accuracy", "deadline_s": 3}], ".")) as scorer:
        scores = scorer.score([Group(Prompt(f"f:{i}", (), {"answer": gold}), tuple(rollouts)) for i, gold in enumerate(golds)])
    assert scores.values[1, 0] == 1.0
    assert scores.values[0, 0] != 1.0
    assert scores.counts["math_accuracy"].seconds < 15
