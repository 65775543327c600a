"""From a sampled turn to the next one: parsing, and the tokens between turns, in the text protocol and in templates with tool support."""

from __future__ import annotations

import json

import pytest

from postgrad.chat import ChatFormat
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer
from postgrad.types import MalformedCall, Message, ToolCall, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
ASK = [Message("user", "2 + 2")]
CALL = ToolCall("add", {"a": 2}, id="call_0")

HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ '<|im_start|>assistant\n{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + ('ipython' if m.role == 'tool' else m.role) + '\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == asked[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('tool call ids must have length 9') }}{% endif %}"
    "{{ ({'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson) + (']' if loop.last else ', ') }}"
    "{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('tool call ids must have length 9') }}{% endif %}"
    "{{ '[TOOL_RESULTS] ' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
UNKNOWN = HERMES.replace("'\n<tool_call>\n' + (", "'\n<function>' + (").replace("'\n</tool_call>'", "'</function>'")
ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(template: str = CHATML, *, specials: tuple[str, ...] = (), **options) -> ChatFormat:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *specials]})
    return ChatFormat(tokenizer, **options)


def sampled(format: ChatFormat, text: str, *, end: int | None = 2) -> tuple[int, ...]:
    return (*format.encode(text), *([end] if end is not None else []))


class TestTextProtocol:
    def test_a_template_without_tool_support_gets_it(self):
        assert chat().tool_protocol == "text"
        assert chat(HERMES, tool_protocol="text").tool_protocol == "text"
        with pytest.raises(DataError, match="no tool support"):
            chat(tool_protocol="template")

    def test_tools_stand_in_the_system_message_and_keep_its_text(self):
        format = chat()
        own = format.decode_raw(format.prompt_ids([Message("system", "Be brief."), *ASK], [ADD]))
        assert own.startswith("<|im_start|>system\nBe brief.\n\nTools:\nadd(a: integer): Adds.\n")
        assert format.decode_raw(format.prompt_ids(ASK, [ADD])).startswith("<|im_start|>system\nTools:\nadd(")
        assert "Tools" not in format.decode_raw(format.prompt_ids(ASK))

    def test_a_template_without_system_role_gets_tools_before_the_question(self):
        format = chat(ALTERNATING)
        text = format.decode_raw(format.prompt_ids(ASK, [ADD]))
        assert text.startswith("<|im_start|>user\nTools:\nadd(")
        assert text.endswith("\n\n2 + 2<|im_end|>\n<|im_start|>assistant\n")

    def test_calls_of_a_training_conversation_are_text_that_parses_back(self):
        format = chat()
        conversation = [
            *ASK,
            Message("assistant", "I add.", (CALL,)),
            Message("tool", "4", tool_call_id="call_0"),
            Message("assistant", "4"),
        ]
        encoded = format.conversation(conversation, [ADD])
        turn = [token for token, index in zip(encoded.token_ids, encoded.message, strict=True) if index == 1]
        written = [token for token, index, source in zip(encoded.token_ids, encoded.message, encoded.source, strict=True)
                   if index == 1 and source == "assistant"]  # fmt: skip
        assert len(turn) > len(written)
        assert format.parse(written).message == Message("assistant", "I add.", (CALL,))

    def test_the_prompt_for_one_simple_tool_is_short(self):
        format = chat()
        assert (
            len(format.prompt_ids(ASK, [ADD])) - len(format.prompt_ids([Message("system", ""), *ASK])) < 140
        )  # bytes here, about 35 real tokens


class TestParse:
    def test_content_without_calls_is_the_text_exactly(self):
        parsed = chat().parse(sampled(chat(), "  two\n "))
        assert parsed.message == Message("assistant", "  two\n ")
        assert parsed.calls == ()

    def test_calls_are_numbered_in_order_and_malformed_ones_kept_in_place(self):
        format = chat()
        good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        text = f"{good}<tool_call>{{</tool_call>{good}"
        parsed = format.parse(sampled(format, text))
        assert [type(call) for call in parsed.calls] == [ToolCall, MalformedCall, ToolCall]
        assert [call.id for call in parsed.message.tool_calls] == ["call_0", "call_2"]

    def test_a_turn_without_end_token_is_read_the_same(self):
        format = chat()
        text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
        assert format.parse(sampled(format, text, end=None)) == format.parse(sampled(format, text))

    def test_sampled_special_tokens_are_no_content(self):
        format = chat()
        assert format.parse((1, *format.encode("hi"), 0, 2)).message.content == "hi"

    def test_markers_that_are_special_tokens_are_still_seen(self):
        format = chat(specials=("<tool_call>", "</tool_call>"))
        opening, closing = format._tokens.special["<tool_call>"], format._tokens.special["</tool_call>"]
        ids = (opening, *format.encode('{"name": "add", "arguments": {"a": 2}}'), closing, 2)
        assert format.parse(ids).calls == (CALL,)

    def test_arbitrary_ids_never_raise(self):
        import random

        generator = random.Random(0)
        format = chat(HERMES)
        for _ in range(200):
            format.parse([generator.randrange(260) for _ in range(20)])


class TestGlue:
    def test_it_is_what_the_template_puts_between_the_end_token_and_the_next_turn(self):
        format = chat()
        turn_ids = sampled(format, "x")
        glue = format.glue(ASK, Message("assistant", "x"), [Message("tool", "4")], turn_ids, [ADD])
        assert format.decode_raw(glue) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"

    @pytest.mark.parametrize("last", [None, 0])
    def test_a_turn_that_did_not_end_with_the_templates_token_gets_it_from_the_glue(self, last):
        format = chat(stop_ids=[0])
        glue = format.glue(ASK, Message("assistant", "x"), [Message("tool", "4")], sampled(format, "x", end=last))
        assert format.decode_raw(glue) == "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"

    def test_prompt_turn_and_glue_are_the_prompt_of_the_next_turn(self):
        """What training sees equals what a fresh rendering would give (verl#3720), for a turn written as the template writes it."""
        format = chat()
        text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
        turn_ids = sampled(format, text)
        turn = format.parse(turn_ids).message
        results = [Message("tool", "4", tool_call_id="call_0")]
        glue = format.glue(ASK, turn, results, turn_ids, [ADD])
        assert format.prompt_ids(ASK, [ADD]) + turn_ids + glue == format.prompt_ids([*ASK, turn, *results], [ADD])

    def test_the_sampled_text_does_not_matter_to_it(self):
        format = chat()
        results = [Message("tool", "4")]
        odd = [Message("assistant", text) for text in ("x", "", "pgSentinel7Q", "<|im_end|>", "  ")]
        glues = {format.glue(ASK, turn, results, (2,)) for turn in odd}
        assert len(glues) == 1

    def test_a_sentinel_in_a_tool_result_or_question_does_not_confuse_it(self):
        format = chat()
        glue = format.glue([Message("user", "pgSentinel7Q")], Message("assistant", ""), [Message("tool", "pgSentinel7Q <|im_end|>")], (2,))
        assert format.decode_raw(glue) == "\n<|im_start|>tool\npgSentinel7Q <|im_end|><|im_end|>\n<|im_start|>assistant\n"
        assert list(glue).count(2) == 1

    def test_results_are_a_user_message_where_the_template_has_no_tool_role(self):
        format = chat(ALTERNATING)
        glue = format.glue(ASK, Message("assistant", "x"), [Message("tool", "4"), Message("tool", "5")], (2,), [ADD])
        expected = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
        assert format.decode_raw(glue) == f"\n<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n"


WRITTEN = {
    "hermes": (HERMES, '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'),
    "llama3": (LLAMA3, '{"name": "add", "parameters": {"a": 2}}'),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "abcdefghi"}]'),
}


@pytest.mark.parametrize("style", WRITTEN)
class TestTemplatesWithToolSupport:
    def test_the_style_is_recognised_from_what_the_template_prints(self, style):
        format = chat(WRITTEN[style][0])
        assert format.tool_protocol == "template"
        assert format._style is not None
        assert format._style.name == style

    def test_tools_are_printed_by_the_template(self, style):
        format = chat(WRITTEN[style][0])
        text = format.decode_raw(format.prompt_ids(ASK, [ADD]))
        assert json.dumps(ADD.to_json()) in text
        assert "To call one" not in text

    def test_a_call_in_its_style_is_read(self, style):
        template, written = WRITTEN[style]
        format = chat(template)
        parsed = format.parse(sampled(format, written))
        assert parsed.calls == (CALL,)
        assert parsed.message.content == ""

    def test_the_glue_continues_the_turn_as_the_template_would(self, style):
        template, _ = WRITTEN[style]
        format = chat(template)
        turn = Message("assistant", "", (CALL,))
        results = [Message("tool", "4", tool_call_id="call_0", name="add")]
        before = format.prompt_ids(ASK)
        written = format.last_turn([*ASK, turn]).token_ids[len(before) :]
        turn_ids = written[: written.index(2) + 1]
        glue = format.glue(ASK, turn, results, turn_ids)
        assert before + turn_ids + glue == format.prompt_ids([*ASK, turn, *results])

    def test_a_malformed_call_can_be_answered(self, style):
        format = chat(WRITTEN[style][0])
        glue = format.glue(ASK, Message("assistant", "{"), [Message("tool", "error: no JSON", tool_call_id="call_0")], (2,), [ADD])
        assert "error: no JSON" in format.decode_raw(glue)

    def test_arguments_and_end_token_of_a_call_are_trained(self, style):
        template, _ = WRITTEN[style]
        format = chat(template)
        encoded = format.conversation([*ASK, Message("assistant", "", (CALL,))])
        text = format.decode_raw([token for token, source in zip(encoded.token_ids, encoded.source, strict=True) if source == "assistant"])
        assert text.endswith("<|im_end|>")
        assert format.parse(format.encode(text.removesuffix("<|im_end|>"))).calls == (CALL,)


def test_special_tool_markers_of_a_template_are_ids_and_are_read():
    format = chat(MISTRAL, specials=("[TOOL_CALLS]",))
    marker = format._tokens.special["[TOOL_CALLS]"]
    encoded = format.conversation([*ASK, Message("assistant", "", (CALL,))])
    assert marker in encoded.token_ids
    assert format.parse((marker, *format.encode(' [{"name": "add", "arguments": {"a": 2}}]'), 2)).calls == (CALL,)


def test_an_unknown_style_is_an_error_only_once_tools_are_used():
    format = chat(UNKNOWN)
    assert format.prompt_ids(ASK)
    with pytest.raises(DataError, match="cannot read back") as error:
        format.prompt_ids(ASK, [ADD])
    assert 'tool_protocol="text"' in str(error.value.hint)
    assert chat(UNKNOWN, tool_protocol="text").prompt_ids(ASK, [ADD])


def test_a_template_that_drops_the_tools_once_it_answers_still_serves_without_tools():
    format = chat(HERMES.replace("{% if tools %}", "{% if tools and messages[-1].role == 'user' %}"))
    assert format.prompt_ids(ASK)
    with pytest.raises(DataError, match="cannot read back"):
        format.prompt_ids(ASK, [ADD])


def test_moving_the_tools_to_the_last_question_is_seen_as_rewriting():
    turn = Message("assistant", "4")
    assert chat(MISTRAL).rewrites_history(ASK, turn, [Message("user", "and 3")], [ADD])
    assert not chat(HERMES).rewrites_history(ASK, turn, [Message("user", "and 3")], [ADD])


def test_thinking_is_split_off_only_for_templates_that_know_it():
    thinking = CHATML + "{# </think> #}"
    text = "<think>\nhm\n</think>\n\n4"
    assert chat(thinking).parse(sampled(chat(), text)).message == Message("assistant", "4", reasoning="hm")
    assert chat().parse(sampled(chat(), text)).message == Message("assistant", text)
    assert chat(thinking).parse(sampled(chat(), "<think>\nhm")).message == Message("assistant", "", reasoning="hm")


def test_a_call_inside_the_thinking_is_not_executed():
    format = chat(CHATML + "{# </think> #}")
    parsed = format.parse(sampled(format, '<think><tool_call>{"name": "add", "arguments": {}}</tool_call></think>4'))
    assert parsed.calls == ()
    assert parsed.message.content == "4"
