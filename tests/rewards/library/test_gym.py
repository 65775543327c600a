import pytest

from postgrad.rewards.base import view_of
from postgrad.rewards.library import reasoning_gym
from postgrad.tasks import packed
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason

pytest.importorskip("reasoning_gym")
ENTRY = {"question": "1 + 1 =", "answer": "2", "metadata": {"source_dataset": "chain_sum", "pair": (1, 1)}}


def view(text):
    return view_of(
        Prompt("r", ()), Rollout((Segment(Source.MODEL, (1,), (-0.1,)),), (Message("assistant", text),), StopReason.END, text=text)
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 1.0),
        (" 2\n", 1.0),
        ("<answer>2</answer>", 1.0),
        ("It is <answer>\n2\n</answer>, I am sure.", 1.0),
        ("<think>3</think>2", 1.0),
        ("3", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>2</answer> or <answer>3</answer>", 0.0),
        ("<answer>2</answer><answer>2</answer>", 0.0),
        ("<think>2", 0.0),
    ],
)
def test_by_hand(text, value):
    assert reasoning_gym(view(text), packed(ENTRY)) == value
