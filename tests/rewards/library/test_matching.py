import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.base import view_of
from postgrad.rewards.library import choice_match
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason


def view(text, *, prompt="q", reasoning=""):
    segments = (Segment(Source.PROMPT, (0,)), Segment(Source.MODEL, (1,), (-0.1,)))
    messages = (Message("assistant", text, reasoning=reasoning),)
    return view_of(Prompt("r", (Message("user", prompt),)), Rollout(segments, messages, StopReason.END, text=text))


RIGHT = [
    "B",
    "b",
    "(B)",
    "B.",
    "B) Paris",
    "B: Paris",
    "**B**",
    "The answer is B.",
    "the answer is (B) because it is so",
    "The answer is B, as A is too small",
    r"\boxed{B}",
    r"\boxed{\text{B}}",
    "<answer>B</answer>",
    "Answer: option B.",
    "<think>A or C?</think>B",
    "It must be (B).",
    "B\nbecause it is",
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_choice_is_read(text):
    assert choice_match(view(text), "B") == 1.0


WRONG = [
    "",
    "A",
    "A B C D",
    "A or B",
    "(A) or (B)",
    "The answer is A or B",
    r"\boxed{A} \boxed{B}",
    "<answer>A B</answer>",
    "<think>B</think>A",
    "<think>B</think>",
    "<think>B",
    "A) no, B) yes",
    "Because",
    "A big dog",
    "I think so",
    "the answer is Berlin",
    "ABCD",
]


@pytest.mark.parametrize("text", WRONG)
def test_no_choice_or_several_are_wrong(text):
    assert choice_match(view(text), "B") == 0.0


def test_an_article_is_no_choice():
    assert choice_match(view("A dog is an animal"), "A") == 0.0
    assert choice_match(view("The answer is a dog"), "A") == 0.0


@pytest.mark.parametrize("gold", [None, "", 1, "Paris", "A or B", "12"])
def test_a_gold_that_is_no_letter_abstains(gold):
    assert choice_match(view("B"), gold) is None


@given(st.text(max_size=100))
def test_no_text_breaks_the_reading_of_choices(text):
    assert choice_match(view(text), "(b)") in (0.0, 1.0)
