import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.base import view_of
from postgrad.rewards.check.mutate import LAYERS, disguise, mutants, wrong
from postgrad.rewards.check.samples import Draft, say, token_ids
from postgrad.types import Message, Prompt, StopReason, ToolCall

AGENT = Draft(
    (
        Message("assistant", "<think>I add 12 and 34.</think>", tool_calls=(ToolCall("add", {"a": 12, "b": [34, "x"], "c": True}),)),
        Message("tool", "46"),
        Message("assistant", "<think>The tool says 46.</think>It is 46."),
    )
)


def view(draft):
    return view_of(Prompt("r", (Message("user", "q"),)), draft.rollout())


def layers(draft):
    """What each layer looks like, so that a change can be traced to one of them."""
    seen = view(draft)
    contents = [message.content for message in draft.messages if message.role == "assistant" and message != Message("assistant", "")]
    return {
        "structure": (seen.stop, [m.role for m in draft.messages], [re.sub(r"[^<>/]|think", "", text) for text in contents]),
        "reasoning": [re.findall(r"<think>(.*?)</think>", text) for text in contents],
        "tool_calls": [message.tool_calls for message in draft.messages if message.tool_calls],
        "tool_results": [(result.content, result.error) for result in seen.tool_results],
        "final": draft.final.rpartition("</think>")[2].strip(),
        "length": seen.sampled_tokens,
    }


def test_each_mutant_changes_its_own_layer_and_no_other():
    before = layers(AGENT)
    tried = list(mutants(AGENT))
    assert {layer for layer, _, _ in tried} == set(LAYERS)
    for layer, name, changed in tried:
        after = layers(changed)
        if name == "a second </think>":
            after["reasoning"] = before["reasoning"]
        assert {key for key in before if after[key] != before[key]} == {layer}, name


def test_a_layer_that_is_not_there_has_no_mutant():
    assert {layer for layer, _, _ in mutants(say("42"))} == {"structure", "final", "length"}
    assert {layer for layer, _, _ in mutants(Draft(()))} == {"structure"}


@given(st.text(min_size=1).filter(lambda text: any(c.isascii() and c.isalnum() for c in text)))
def test_a_disguise_differs_and_has_as_many_pieces(text):
    assert disguise(text) != text
    assert len(token_ids(disguise(text))) == len(token_ids(text))


@given(st.integers(0, 10**12))
def test_a_disguised_number_is_another_number_of_as_many_digits(number):
    other = disguise(str(number))
    assert int(other) != number
    assert len(other) == len(str(number))
    assert other == "0" or other[0] != "0"


def test_wrong_json_keeps_its_form():
    other = json.loads(wrong('{"name": "Ada", "age": 36, "tags": ["x", null, true]}'))
    assert list(other) == ["name", "age", "tags"]
    assert other["name"] != "Ada"
    assert other["age"] != 36
    assert other["tags"] == ["k", None, True]


def test_wrong_keeps_the_thinking():
    assert wrong("<think>7</think>7").startswith("<think>7</think>")


@pytest.mark.parametrize("draft", [say(""), Draft(()), Draft((Message("assistant", "x"), Message("tool", "y")))])
def test_every_draft_becomes_a_rollout(draft):
    for changed in (draft, *(item for _, _, item in mutants(draft))):
        assert view(changed).turns == sum(message.role == "assistant" for message in changed.messages)


def test_results_are_paired_with_their_calls():
    calls = (ToolCall("a", {}, "1"), ToolCall("b", {}, "2"))
    draft = Draft(
        (Message("assistant", "", calls), Message("tool", "for b", tool_call_id="2"), Message("tool", "for a", tool_call_id="1")),
        errors=((1, "no"),),
    )
    assert [(result.call.name, result.content, result.error) for result in view(draft).tool_results] == [
        ("b", "for b", ""),
        ("a", "for a", "no"),
    ]


def test_a_cut_rollout_is_as_long_as_a_finished_one():
    cut = next(changed for _, name, changed in mutants(say("one two")) if name == "cut by a limit")
    assert view(cut).stop is StopReason.TURN_TOKENS
    assert view(cut).sampled_tokens == view(say("one two")).sampled_tokens
    assert view(cut).token_ids != view(say("one two")).token_ids
