"""What a chat format tells about itself, and that it survives the way to another process."""

from __future__ import annotations

import pickle

import pytest

from postgrad.chat import ChatFormat
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer
from postgrad.types import Message, ToolCall, ToolSpec

USER, ANSWER = Message("user", "hi <|im_end|>"), Message("assistant", "yo")
ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
CALL = ToolCall("add", {"a": 2}, id="call_0")
USERS_ONLY = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SWITCHED = "{% if shout %}{{ '!' }}{% endif %}" + CHATML


def without_end(template):
    """A tokenizer whose end token was never set."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.eos_token = None
    return tokenizer


def adding_bos(template):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    return tokenizer


class TestPickle:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"stop_ids": [7], "tool_protocol": "text"},
            {"template": "qwen", "tool_protocol": "template"},
            {"template": SWITCHED, "template_options": {"shout": True}},
        ],
    )
    def test_a_copy_in_another_process_does_the_same(self, options):
        format = ChatFormat(tiny_tokenizer(), **options)
        copy = pickle.loads(pickle.dumps(format))
        assert copy.prompt_ids([USER], [ADD]) == format.prompt_ids([USER], [ADD])
        conversation = [USER, Message("assistant", "", (CALL,)), Message("tool", "4", tool_call_id="call_0"), ANSWER]
        encoded = format.conversation(conversation, [ADD])
        assert copy.conversation(conversation, [ADD]) == encoded
        written = [token for token, message in zip(encoded.token_ids, encoded.message, strict=True) if message == 1]
        assert copy.parse(written) == format.parse(written)
        assert (copy.stop_ids, copy.tool_protocol, copy.notes) == (format.stop_ids, format.tool_protocol, format.notes)
        assert copy.fingerprint == format.fingerprint

    def test_stop_ids_given_as_an_iterator_survive(self):
        assert pickle.loads(pickle.dumps(ChatFormat(tiny_tokenizer(), stop_ids=iter([7])))).stop_ids == {2, 7}


class TestFingerprint:
    def test_two_loads_of_one_tokenizer_agree_whatever_was_done_with_them(self):
        first, second = ChatFormat(tiny_tokenizer()), ChatFormat(tiny_tokenizer())
        second.conversation([USER, ANSWER])
        second._tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
        assert first.fingerprint == second.fingerprint
        assert len(first.fingerprint) == 64

    @pytest.mark.parametrize(
        ("options", "changed"),
        [
            ({}, {"template": CHATML + " "}),
            ({}, {"template_options": {"shout": True}}),
            ({}, {"stop_ids": [5]}),
            ({"template": "qwen"}, {"template": "qwen", "tool_protocol": "text"}),
        ],
    )
    def test_it_differs_when_an_option_does(self, options, changed):
        assert ChatFormat(tiny_tokenizer(), **options).fingerprint != ChatFormat(tiny_tokenizer(), **changed).fingerprint

    def test_naming_the_template_that_the_tokenizer_has_changes_nothing(self):
        assert ChatFormat(tiny_tokenizer(CHATML)).fingerprint == ChatFormat(tiny_tokenizer(CHATML), template=CHATML).fingerprint

    def test_it_differs_when_one_special_token_does(self):
        changed = tiny_tokenizer()
        changed.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|new|>"]})
        assert ChatFormat(changed).fingerprint != ChatFormat(tiny_tokenizer()).fingerprint

    def test_it_differs_when_the_template_sees_another_bos(self):
        changed = tiny_tokenizer()
        changed.bos_token = "<|endoftext|>"
        assert ChatFormat(changed).fingerprint != ChatFormat(tiny_tokenizer()).fingerprint

    def test_a_tokenizer_with_code_of_its_own_has_one_too(self):
        class Own:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

        first, second = ChatFormat(Own(tiny_tokenizer())), ChatFormat(Own(tiny_tokenizer()))
        assert first.fingerprint == second.fingerprint != ChatFormat(Own(tiny_tokenizer(CHATML + " "))).fingerprint


class TestFacts:
    def test_what_the_template_prints_itself(self):
        def facts(own, **options):
            format = ChatFormat(tiny_tokenizer(own), **options)
            return format.prints_system_role, format.prints_tool_role, format.prints_tools

        assert facts(CHATML) == (True, True, False)
        assert facts(USERS_ONLY) == (False, False, False)
        assert facts(None, template="qwen") == (True, True, True)
        assert facts(None, template="qwen", tool_protocol="text") == (True, True, True)
        assert facts(None, template="gemma") == (True, False, False)
        assert facts(None) == (False, False, False)

    def test_ids_of_the_tokenizer(self):
        format = ChatFormat(tiny_tokenizer())
        assert (format.bos_id, format.unk_id) == (1, 0)
        bare = tiny_tokenizer()
        bare.bos_token = bare.unk_token = None
        assert (ChatFormat(bare).bos_id, ChatFormat(bare).unk_id) == (None, None)

    def test_vocabulary_size_counts_to_the_largest_id_added_tokens_included(self):
        tokenizer = tiny_tokenizer()
        before = ChatFormat(tokenizer).vocabulary_size
        assert before == max(tokenizer.get_vocab().values()) + 1
        tokenizer.add_tokens(["<think>"])
        format = ChatFormat(tokenizer)
        assert format.vocabulary_size == before + 1 == max(format.encode("<think>")) + 1

    @pytest.mark.parametrize(("text", "holds"), [("a<|im_end|>", True), ("<|im_end", False), ("", False), ("<|endoftext|>", True)])
    def test_special_token_strings_are_seen_in_text(self, text, holds):
        assert ChatFormat(tiny_tokenizer()).special_in_text(text) is holds

    @pytest.mark.parametrize(
        ("prompt", "answer", "merges"),
        [
            ("a\n", "\n", True),
            ("a\n", "\nb", False),
            ("t", "he", True),
            ("Q:", " the", False),
            ("", "the", False),
            ("the", "", False),
            ("<|im_", "end|>", False),
        ],
    )
    def test_a_token_over_the_border_of_raw_texts_is_seen(self, prompt, answer, merges):
        assert ChatFormat(tiny_tokenizer()).merges_at(prompt, answer) is merges


class TestNoEndToken:
    def test_nothing_that_trains_works_without_any_end_token(self):
        format = ChatFormat(without_end(NO_END))
        assert format.stop_ids == frozenset()
        for refused in (
            lambda: format.conversation([USER, ANSWER]),
            lambda: format.conversation([USER]),
            lambda: format.last_turn([USER, ANSWER]),
            lambda: format.raw_conversation("a", "b"),
            format.require_end,
        ):
            with pytest.raises(DataError, match="no end token") as error:
                refused()
            assert "eos_token" in str(error.value.hint)
        assert any("no" in note and "end token" in note for note in format.notes)

    def test_a_template_that_prints_one_is_enough_for_conversations_and_not_for_raw_text(self):
        format = ChatFormat(without_end(CHATML))
        assert format.stop_ids == {2}
        assert format.conversation([USER, ANSWER]).token_ids[-2] == 2
        format.require_end()
        with pytest.raises(DataError, match="no end token"):
            format.raw_conversation("a", "b")

    def test_an_end_token_that_the_template_does_not_print_is_no_end_of_a_turn(self):
        format = ChatFormat(tiny_tokenizer(NO_END))
        assert format.stop_ids == {2}
        for refused in (format.conversation, format.last_turn):
            with pytest.raises(DataError, match="no end token"):
                refused([USER, ANSWER])


class TestBeginningOfSequence:
    @pytest.mark.parametrize("writes", ["{{ bos_token }}", "{{ bos_token + bos_token }}"])
    def test_a_note_says_when_one_was_removed(self, writes):
        format = ChatFormat(adding_bos(writes + CHATML))
        assert [note for note in format.notes if "beginning-of-sequence" in note and "removed" in note]
        assert format.prompt_ids([USER]).count(0) == 1
        assert format.conversation([USER, ANSWER]).token_ids[:2] == format.last_turn([USER, ANSWER]).token_ids[:2] == (0, 1)

    @pytest.mark.parametrize("tokenizer", [adding_bos(CHATML), tiny_tokenizer("{{ bos_token }}" + CHATML)])
    def test_no_note_when_only_one_of_them_writes_it(self, tokenizer):
        assert ChatFormat(tokenizer).notes == ()
