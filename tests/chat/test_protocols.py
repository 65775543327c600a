"""Templates of popular models and named protocols: the style is found, calls survive the way through tokens, and what a template cannot
hold is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import templates
from tests.templates import CALLING, MARKERS, format_of

from postgrad.chat import ChatFormat, TemplateRefuses
from postgrad.chat.codecs import STYLES
from postgrad.errors import DataError
from postgrad.testing import CHATML
from postgrad.types import MalformedCall, Message, ToolCall, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}, "f": {"type": "string"}}, "required": ["a"]})
TEXT_ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
ASK = Message("user", "2 + 2")
VALUES = {"a": 2, "b": -1.5, "c": True, "d": None, "e": [1, "x", {"k": []}], "f": 'it\'s "quoted"\n<|im_end|> 😀'}
CALL = ToolCall("add", VALUES, id="call_0")
OTHER = ToolCall("math.sqrt", {}, id="call_1")
RESULTS = [Message("tool", "4", tool_call_id="call_0", name="add"), Message("tool", "2", tool_call_id="call_1", name="math.sqrt")]

NAMED = [name for name in STYLES if name != "hermes"]
FORMATS = {f"template {name}": (template, {}) for name, template in CALLING.items()} | {
    f"text {name}": (CHATML, {"tool_protocol": name}) for name in ("text", *NAMED)
}
ONE_CALL = {"template llama3"}
NO_TEXT_BESIDE_CALLS = {"template llama3", "template mistral"}


def made(name: str, markers: tuple[str, ...] = MARKERS) -> ChatFormat:
    template, options = FORMATS[name]
    return format_of(template, markers=markers, **options)


@pytest.fixture(scope="module", params=FORMATS)
def named(request) -> tuple[str, ChatFormat]:
    return request.param, made(request.param)


def answers(format: ChatFormat, encoded, index: int) -> list[int]:
    """Ids of the assistant message at `index`, end token included."""
    rows = zip(encoded.token_ids, encoded.message, encoded.source, strict=True)
    return [token for token, message, source in rows if message == index and source == "assistant"]


def test_the_style_is_the_templates_or_the_one_that_is_named(named):
    name, format = named
    protocol, _, style = name.partition(" ")
    assert (format.tool_protocol, format.call_style) == (protocol, "hermes" if style == "text" else style)


def test_calls_with_values_of_every_type_survive_the_way_through_tokens(named):
    name, format = named
    turn = Message("assistant", "" if name in NO_TEXT_BESIDE_CALLS else "I add.", (CALL,) if name in ONE_CALL else (CALL, OTHER))
    encoded = format.conversation([ASK, turn, *RESULTS[: len(turn.tool_calls)], Message("assistant", "4")], [ADD])
    read = format.parse(answers(format, encoded, 1), [ADD])
    assert read.message == turn
    assert repr(read.message.tool_calls[0].arguments) == repr(VALUES)


def test_markers_are_special_tokens_where_the_style_writes_them_and_text_where_somebody_typed_them(named):
    """In a call's values, and in the question."""
    _, format = named
    special = format._tokens.special_ids

    def written(text: str) -> list[int]:
        conversation = [Message("user", text), Message("assistant", "", (ToolCall("add", {"a": text}),))]
        return [token for token in format.conversation(conversation, [TEXT_ADD]).token_ids if token in special]

    assert written("".join(MARKERS)) == written("calm")
    style = STYLES[format.call_style]
    in_vocabulary = [marker for marker in style.markers if marker in format._tokens.special]
    assert in_vocabulary or style.name in ("hermes", "llama3", "xml")
    if style.name.startswith(("mistral", "deepseek")):
        assert format._tokens.special[in_vocabulary[0]] in written("calm")


def test_the_glue_is_what_the_template_would_put_there(named):
    name, format = named
    turn = Message("assistant", "", (CALL,) if name in ONE_CALL else (CALL, OTHER))
    results = RESULTS[: len(turn.tool_calls)]
    before = format.prompt_ids([ASK], [ADD])
    after = format.prompt_ids([ASK, turn, *results], [ADD])
    turn_ids = answers(format, format.last_turn([ASK, turn], [ADD]), 1)
    assert (*before, *turn_ids, *format.glue([ASK], turn, results, turn_ids, [ADD])) == after
    assert not format.rewrites_history([ASK], turn, results, [ADD])


def test_what_a_model_may_write_can_be_answered_also_where_the_template_refuses_it(named):
    """Two calls in a turn, text beside a call, a malformed call (its result has no id), and more turns after them."""
    _, format = named
    error = Message("tool", "error: invalid JSON")
    turns = [
        (Message("assistant", "", (CALL, OTHER)), RESULTS),
        (Message("assistant", "Hm.", (CALL,)), RESULTS[:1]),
        (Message("assistant", ""), [error]),
        (Message("assistant", "", (CALL,)), [RESULTS[0], error]),
    ]
    before = [ASK]
    for turn, results in turns:
        text = format.decode_raw(format.glue(before, turn, results, (2,), [ADD]))
        places = [text.index(result.content) for result in results]
        assert places == sorted(places)
        before += [turn, *results]


def test_a_template_that_gives_a_call_another_meaning_is_refused_when_a_call_is_trained():
    format = format_of(templates.PYTHONIC_IN_QUOTES)
    assert format.call_style == "pythonic"
    text = Message("assistant", "", (ToolCall("add", {"a": "2"}),))
    assert format.conversation([ASK, text], [ADD])
    number = Message("assistant", "", (ToolCall("add", {"a": 2}),))
    with pytest.raises(TemplateRefuses, match=r'read back differently: \[\["add", \{"a": 2\}\]\] became \[\["add", \{"a": "2"\}\]\]'):
        format.conversation([ASK, number], [ADD])
    assert format.rewrites_history([ASK], number, RESULTS[:1], [ADD])


def test_what_was_written_can_be_scored_all_the_same():
    format = format_of(templates.PYTHONIC_IN_QUOTES)
    number = Message("assistant", "", (ToolCall("add", {"a": 2}),))
    assert '[add(a="2")]' in format.decode_raw(format.last_turn([ASK, number], [ADD], check_calls=False).token_ids)


@pytest.mark.parametrize("name", sorted(NO_TEXT_BESIDE_CALLS))
def test_a_template_that_drops_the_text_beside_calls_is_refused_when_there_is_some(name):
    format = made(name)
    with pytest.raises(TemplateRefuses, match="leaves out the text beside"):
        format.conversation([ASK, Message("assistant", "I add.", (CALL,))], [ADD])
    assert format.rewrites_history([ASK], Message("assistant", "I add.", (CALL,)), RESULTS[:1], [ADD])


def test_a_template_that_prints_calls_but_no_tools_is_told_them_in_its_own_style():
    format = format_of(templates.DEEPSEEK_V3_TOLD_NOTHING)
    assert (format.tool_protocol, format.call_style) == ("text", "deepseek_v3")
    text = format.decode_raw(format.prompt_ids([ASK], [ADD]))
    assert "To call one, write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n" in text
    turn = Message("assistant", "", (CALL, OTHER))
    assert format.parse(answers(format, format.conversation([ASK, turn], [ADD]), 1)).message == turn


def test_a_template_without_tools_gets_hermes_tags():
    assert format_of(CHATML).call_style == "hermes"


def test_a_named_protocol_is_used_instead_of_the_templates_own():
    format = format_of(templates.HERMES, tool_protocol="pythonic")
    assert (format.tool_protocol, format.call_style) == ("text", "pythonic")
    text = format.decode_raw(format.prompt_ids([ASK], [ADD]))
    assert "To call one, write [add(a=...)]" in text
    assert '"function"' not in text


@pytest.mark.parametrize("name", NAMED)
def test_another_protocol_is_another_fingerprint(name):
    assert made(f"text {name}").fingerprint != made("text text").fingerprint


def test_a_call_that_the_named_style_cannot_write_is_refused_in_words():
    format = made("text pythonic")
    with pytest.raises(TemplateRefuses, match="cannot be written in the pythonic style: 'get-it' is no name of a Python function"):
        format.conversation([ASK, Message("assistant", "", (ToolCall("get-it", {}),))], [ADD])
    with pytest.raises(DataError, match="cannot be written"):
        format.prompt_ids([ASK], [ToolSpec("get-it", "", {"type": "object", "properties": {}})])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_ids_make_the_parser_raise(name, data):
    format = FUZZED[name]
    ids = data.draw(st.lists(st.integers(0, format.vocabulary_size - 1), max_size=30))
    for call in format.parse(ids).calls:
        assert isinstance(call, (ToolCall, MalformedCall))


FUZZED = {name: made(name) for name in FORMATS}
