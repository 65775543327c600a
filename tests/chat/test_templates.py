"""Which tokens are an answer, for the shapes of chat templates that people use. What is expected is written out as text."""

from __future__ import annotations

from itertools import groupby

import pytest

from postgrad.chat import ChatFormat, TemplateRefuses, TemplateRewritesHistory
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer
from postgrad.types import Message, ToolCall

USER = Message("user", "2 + 2 = 4")
ANSWER = Message("assistant", "4")
AGAIN = Message("user", "and 3")
MORE = Message("assistant", "the\n\nend")

LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=messages | length) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- set thought = message.reasoning_content or '' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
PHI3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "generation": GENERATION, "plain": PLAIN,
    "no_generation_prompt": NO_GENERATION_PROMPT, "default_system": DEFAULT_SYSTEM, "phi3": PHI3,
}  # fmt: skip
SPECIALS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>"]


def chat(template: str, **options) -> ChatFormat:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPECIALS]})
    return ChatFormat(tokenizer, **options)


def answers(format: ChatFormat, encoded) -> list[str]:
    """Text of each stretch of answer tokens."""
    pairs = zip(encoded.source, encoded.message, encoded.token_ids, strict=True)
    stretches = groupby(pairs, key=lambda item: item[:2])
    return [format.decode_raw([token for *_, token in items]) for (source, _), items in stretches if source == "assistant"]


EXPECTED = {
    "chatml": ["4<|im_end|>", "the\n\nend<|im_end|>"],
    "llama3": ["4<|eot_id|>", "the\n\nend<|eot_id|>"],
    "mistral": [" 4<|im_end|>", " the\n\nend<|im_end|>"],
    "gemma": ["4<end_of_turn>", "the\n\nend<end_of_turn>"],
    "generation": ["4<|im_end|>", "the\n\nend<|im_end|>"],
    "plain": ["4<|im_end|>", "the\n\nend<|im_end|>"],
    "no_generation_prompt": ["4<|im_end|>", "the\n\nend<|im_end|>"],
    "default_system": ["4<|im_end|>", "the\n\nend<|im_end|>"],
    "phi3": ["4<|end|>", "the\n\nend<|end|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_content_and_end_token_of_every_assistant_turn_are_answers(name):
    """The answer `4` also stands in the question; axolotl#2089, SkyRL#710, trl#7230."""
    format = chat(TEMPLATES[name])
    encoded = format.conversation([USER, ANSWER, AGAIN, MORE])
    assert answers(format, encoded) == EXPECTED[name]
    assert {message for source, message in zip(encoded.source, encoded.message, strict=True) if source == "assistant"} == {1, 3}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_before_the_first_answer_are_the_inference_prompt(name):
    format = chat(TEMPLATES[name])
    encoded = format.conversation([USER, ANSWER, AGAIN, MORE])
    prompt = format.prompt_ids([USER])
    assert encoded.token_ids[: len(prompt)] == prompt
    assert encoded.source[len(prompt)] == "assistant"
    assert "assistant" not in encoded.source[: len(prompt)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_row_is_the_whole_conversation_as_the_template_prints_it(name):
    format = chat(TEMPLATES[name])
    messages = [USER, ANSWER, AGAIN, MORE]
    rendered = format._template.render(format._template.dicts(messages))
    assert format.decode_raw(format.conversation(messages).token_ids) == rendered


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "generation", "plain"])
def test_header_and_what_follows_the_end_token_are_glue(name):
    format = chat(TEMPLATES[name])
    encoded = format.conversation([USER, ANSWER])
    glue = [token for token, source in zip(encoded.token_ids, encoded.source, strict=True) if source == "glue"]
    header = format._facts.header
    assert format.decode_raw(glue).startswith(header)
    assert format.decode_raw(glue).removeprefix(header) in ("\n", "\n\n", "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_turn_is_the_prompt_and_one_answer(name):
    format = chat(TEMPLATES[name])
    encoded = format.last_turn([USER, ANSWER, AGAIN, MORE])
    assert answers(format, encoded) == EXPECTED[name][1:]
    prompt = format.prompt_ids([USER, ANSWER, AGAIN])
    assert encoded.token_ids[: len(prompt)] == prompt


def test_no_token_spans_the_border_of_prompt_and_answer():
    """The header ends with a newline and the answer begins with one: the tokenizer would merge them into one token."""
    format = chat(CHATML)
    encoded = format.conversation([USER, Message("assistant", "\nx")])
    newline = format.encode("\n")
    first = encoded.source.index("assistant")
    assert encoded.token_ids[first - 1] == encoded.token_ids[first] == newline[0]
    assert format.encode("\n\n") != newline * 2


def test_an_answer_that_repeats_the_question_word_for_word_is_the_only_answer():
    format = chat(CHATML)
    text = "the <|im_start|>assistant\nthe"
    encoded = format.conversation([Message("user", text), Message("assistant", text)])
    assert answers(format, encoded) == [text + "<|im_end|>"]
    assert encoded.source.index("assistant") == len(format.prompt_ids([Message("user", text)]))


def test_the_end_of_turn_is_found_in_the_template_not_taken_from_the_tokenizer():
    """axolotl#3754: the template ends turns with another token than the tokenizer's end-of-sequence."""
    format = chat(LLAMA3)
    end = format._tokens.special["<|eot_id|>"]
    assert format.end_of_turn == (end,)
    assert format.stop_ids == {end, 2}


def test_of_two_end_tokens_in_a_row_the_one_the_model_stops_at_ends_the_turn():
    """Cohere's templates: the answer's own end token, then the end of the turn."""
    template = CHATML.replace("<|im_end|>", "<|end|><|im_end|>")
    format = chat(template)
    assert format.end_of_turn == (2,)
    assert answers(format, format.conversation([USER, ANSWER])) == ["4<|end|><|im_end|>"]


def test_every_given_stop_id_stays_a_stop_id():
    assert chat(CHATML, stop_ids=[0, 7]).stop_ids == {0, 2, 7}


def test_a_trimmed_answer_is_trained_as_the_template_prints_it():
    format = chat(LLAMA3)
    assert answers(format, format.conversation([USER, Message("assistant", "  4 \n")])) == ["4<|eot_id|>"]


def test_a_conversation_that_starts_with_the_assistant_keeps_its_default_system_prompt():
    format = chat(DEFAULT_SYSTEM)
    encoded = format.conversation([ANSWER, USER, MORE])
    assert format.decode_raw(encoded.token_ids).startswith("<|im_start|>system\nBe kind.")
    assert answers(format, encoded) == ["4<|im_end|>", "the\n\nend<|im_end|>"]


def test_text_after_the_last_answer_is_context():
    format = chat(CHATML)
    encoded = format.conversation([USER, ANSWER, AGAIN])
    assert format.decode_raw(encoded.token_ids).endswith("and 3<|im_end|>\n")
    assert encoded.source[-1] == "context"


def test_a_template_without_generation_prompt_uses_the_header_it_prints():
    format = chat(NO_GENERATION_PROMPT)
    assert format.decode_raw(format.prompt_ids([USER])).endswith("<|im_start|>assistant\n")
    assert "no generation prompt" in format.notes[0]


def test_a_template_without_end_token_is_refused():
    """A model trained on it would never stop (trl#1623)."""
    format = chat(CHATML.replace("<|im_end|>", ""))
    assert format.end_of_turn == ()
    with pytest.raises(DataError, match="no end token") as error:
        format.conversation([USER, ANSWER])
    assert error.value.hint


def test_a_template_that_prints_no_assistant_turn_is_refused():
    with pytest.raises(DataError, match="prints nothing for an assistant turn"):
        chat("{% for message in messages %}{% if message.role == 'user' %}{{ message.content + eos_token }}{% endif %}{% endfor %}")


def test_a_generation_prompt_that_the_conversation_does_not_print_is_refused():
    template = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    with pytest.raises(DataError, match="generation prompt is not how it prints"):
        chat(template).conversation([USER, ANSWER])


def test_a_template_that_drops_earlier_thinking_is_detected():
    format = chat(QWEN3)
    thought = Message("assistant", "4", reasoning="easy")
    with pytest.raises(TemplateRewritesHistory, match="earlier turns"):
        format.conversation([USER, thought, AGAIN, MORE])
    with pytest.raises(TemplateRewritesHistory):
        format.conversation([USER, thought, AGAIN])
    assert answers(format, format.last_turn([USER, thought])) == ["<think>\neasy\n</think>\n\n4<|im_end|>"]


def test_a_thinking_turn_inside_a_tool_loop_is_kept_and_dropped_after_the_next_question():
    format = chat(QWEN3)
    turn = Message("assistant", "4", reasoning="easy")
    assert format.rewrites_history([USER], turn, [AGAIN])
    assert not format.rewrites_history([USER], turn, [Message("tool", "5")])
    assert not chat(CHATML).rewrites_history([USER], ANSWER, [AGAIN])


def test_reasoning_that_the_template_would_lose_is_refused():
    with pytest.raises(DataError, match="prints no `reasoning`"):
        chat(CHATML).conversation([USER, Message("assistant", "4", reasoning="easy")])


def test_a_generation_prompt_that_opens_thinking_counts_as_rewriting():
    """The DeepSeek-R1 way: sampling works, and every later rendering differs from what the model read."""
    template = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}") + "{# </think> #}"
    format = chat(template)
    assert format.decode_raw(format.prompt_ids([USER])).endswith("assistant\n<think>\n")
    assert format.parse(format.encode("hm\n</think>\n\n4")).message == Message("assistant", "4", reasoning="hm")
    assert format.rewrites_history([USER], ANSWER, [AGAIN])


def test_template_options_reach_the_template():
    template = (
        CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n") + "{% if not polite %}{{ raise_exception('rude') }}{% endif %}"
    )
    assert chat(template, template_options={"polite": True}).prompt_ids([USER])
    with pytest.raises(TemplateRefuses, match="rude"):
        chat(template)


def test_a_refused_order_of_roles_names_the_templates_own_words():
    with pytest.raises(TemplateRefuses, match="roles must alternate"):
        chat(MISTRAL).conversation([USER, AGAIN, ANSWER])


def test_two_answers_in_a_row_are_two_answers_where_the_template_allows_it():
    format = chat(CHATML)
    assert answers(format, format.conversation([USER, ANSWER, MORE])) == ["4<|im_end|>", "the\n\nend<|im_end|>"]


def test_messages_without_chat_template_name_the_built_in_ones():
    with pytest.raises(DataError, match="no chat template") as error:
        ChatFormat(tiny_tokenizer(None)).prompt_ids([USER])
    assert "chatml" in str(error.value.hint)


def test_built_in_chatml_prints_what_chatml_prints():
    own, built_in = chat(CHATML), ChatFormat(tiny_tokenizer(None), template="chatml")
    assert built_in.conversation([USER, ANSWER, AGAIN, MORE]) == own.conversation([USER, ANSWER, AGAIN, MORE])


def test_built_in_chatml_ends_turns_with_the_tokenizers_end_token_where_im_end_is_unknown():
    format = ChatFormat(_tokenizer_without_im_end(), template="chatml")
    assert format.end_of_turn == (0,)
    assert answers(format, format.conversation([USER, ANSWER])) == ["4<|endoftext|>"]


def _tokenizer_without_im_end():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(["<|endoftext|>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def test_template_gets_no_null_and_only_keys_that_say_something():
    seen = []

    class Spy:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def apply_chat_template(self, conversation, **options):
            seen.extend(conversation)
            return self._inner.apply_chat_template(conversation, **options)

    format = ChatFormat(Spy(tiny_tokenizer()))
    seen.clear()
    format.conversation([USER, Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}),)), Message("tool", "1"), ANSWER])
    assert all(isinstance(message["content"], str) for message in seen)
    assert {key for message in seen for key in message} == {"role", "content"}
