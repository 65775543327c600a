"""The short way to token ids gives the ids of the long one, for tokenizers with every peculiarity that could make them differ."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.chat import ChatFormat
from postgrad.chat.encoder import _REMEMBERED_CHARACTERS, _REMEMBERED_PIECES, Encoder, rust_backend
from postgrad.chat.tokens import Guard, Tokens
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer
from postgrad.types import Message


def metaspace(scheme: str):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "<s>", "</s>", "▁", *(chr(code) for code in range(33, 127)), "▁x", "xx"]
    merges = [("▁", "x"), ("x", "x")]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(vocabulary)}, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in vocabulary[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def with_token(content: str, **options):
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(content, **options)], special_tokens=options.get("special", False))
    return tokenizer


def with_normalizer(*, normalized: bool):
    from tokenizers import normalizers

    tokenizer = with_token("<STOP>", special=True, normalized=normalized)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


def with_prefix_space():
    from tokenizers import pre_tokenizers

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_digits():
    from tokenizers import pre_tokenizers

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


TOKENIZERS = {
    "byte level": tiny_tokenizer,
    "byte level with digits apart": with_digits,
    "byte level that puts a space before a text": with_prefix_space,
    "sentencepiece style, space before the first piece": lambda: metaspace("first"),
    "sentencepiece style, space before every piece": lambda: metaspace("always"),
    "sentencepiece style, no space": lambda: metaspace("never"),
    "special token that takes the space after it": lambda: with_token("<STOP>", special=True, rstrip=True, normalized=False),
    "special token that takes the space before it": lambda: with_token("<STOP>", special=True, lstrip=True, normalized=False),
    "special token that must be a word": lambda: with_token("STOP", special=True, single_word=True, normalized=False),
    "special token looked for in normalized text": lambda: with_normalizer(normalized=True),
    "normalizer that leaves special tokens alone": lambda: with_normalizer(normalized=False),
    "ordinary added token": lambda: with_token("<think>"),
    "ordinary added token that takes the beginning of a special one": lambda: with_token("x<|im_", normalized=False),
    "ordinary added token that holds a special one": lambda: with_token("x<|im_end|>x", normalized=False),
    "special token of one character": lambda: with_token("§", special=True, normalized=False),
}


@cache
def tokenizer_of(name: str):
    return TOKENIZERS[name]()


pieces = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<s>",
        "</s>",
        "<STOP>",
        "<stop>",
        "STOP",
        "<think>",
        "§",
        " ",
        "\n",
        "x",
        "É",
        "12",
        "the",
    ]
)
rendered_texts = st.one_of(st.lists(pieces, max_size=10).map("".join), st.text(max_size=20))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=rendered_texts)
def test_a_rendered_text_has_the_ids_that_the_plain_tokenizer_gives_it(name, text):
    tokenizer = tokenizer_of(name)
    tokens = Tokens(tokenizer)
    assert tokens.rendered(text, guard=Guard(tokens)) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(text=rendered_texts, split=st.booleans())
def test_backend_and_wrapper_agree(name, text, split):
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer)
    assert encoder._backend is not None
    assert encoder._straight([text], split) == encoder._wrapped([text], split)


def test_pieces_encoded_together_have_the_ids_they_have_alone():
    tokens = Tokens(tiny_tokenizer())
    texts = ["<|im_start|>user\nthe", "the\n", "\n<|im_end|>", "", "\n<|im_end|>"]
    assert tokens.rendered_many([(texts, Guard(tokens))])[0] == [tokens.rendered(text, guard=Guard(tokens)) for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.tuples(rendered_texts, rendered_texts), min_size=1, max_size=4))
def test_conversations_encoded_together_are_those_they_are_alone(name, texts):
    chat = ChatFormat(tokenizer_of(name), template="chatml")
    turns = [[Message("user", question), Message("assistant", answer)] for question, answer in texts]
    prints = [chat.print_raw, lambda *pair: chat.print_conversation(turns[0]), lambda *pair: chat.print_prompt(turns[-1][:1])]
    printed = [print_(*pair) for pair in texts for print_ in prints]
    expected = [
        conversation
        for pair in texts
        for conversation in (chat.raw_conversation(*pair), chat.conversation(turns[0]), chat.encode_printed([prints[2]()])[0])
    ]
    assert chat.encode_printed(printed) == expected
    assert expected[-1].token_ids == chat.prompt_ids(turns[-1][:1])


def test_a_raw_text_has_the_ids_that_the_plain_tokenizer_gives_its_two_parts():
    tokenizer = tiny_tokenizer()
    chat = ChatFormat(tokenizer)
    for prompt, completion in (("the one", " two"), ("", "two"), ("a<|im_end|>", "b<|im_start|>")):
        encoded = chat.raw_conversation(prompt, completion)
        ids = [tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in (prompt, completion)]
        assert list(encoded.token_ids) == [*ids[0], *ids[1], tokenizer.eos_token_id]
        assert encoded.source == ("context",) * len(ids[0]) + ("assistant",) * (len(ids[1]) + 1)


def test_a_tokenizer_with_an_encode_of_its_own_is_used_as_it_is():
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def encode(self, text, **options):
            return [7, *super().encode(text, **options)]

    plain = tiny_tokenizer()
    own = Own(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    assert rust_backend(plain) is plain.backend_tokenizer
    assert rust_backend(own) is None
    assert Encoder(own).one("the", split=False) == [7, *plain.encode("the", add_special_tokens=False)]


def test_an_encode_set_on_the_object_is_used_as_it_is():
    tokenizer = tiny_tokenizer()
    tokenizer.encode = lambda text, **options: [5]
    assert Encoder(tokenizer).one("the", split=False) == [5]


def test_truncation_and_padding_of_an_earlier_call_change_no_row():
    tokenizer = tiny_tokenizer()
    format = ChatFormat(tokenizer)
    expected = format.encode("one two three")
    tokenizer(["one two four"], truncation=True, max_length=3)
    assert format.encode("one two three!")[: len(expected)] == expected
    tokenizer(["a"], padding="max_length", max_length=64)
    assert len(format.encode("b")) == 1


def test_a_tokenizer_that_splits_special_tokens_by_default_still_gets_them_from_the_template():
    plain, splitting = tiny_tokenizer(), tiny_tokenizer()
    splitting.split_special_tokens = True
    messages = [Message("user", "hi"), Message("assistant", "yo <|im_end|>")]
    assert ChatFormat(splitting).conversation(messages) == ChatFormat(plain).conversation(messages)


def test_a_call_that_splits_special_tokens_leaves_no_trace():
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer)
    assert encoder.one("<|im_end|>", split=True) != encoder.one("<|im_end|>", split=False) == [2]
    assert encoder.one("<|im_end|>x", split=False)[0] == 2


def test_remembered_ids_are_not_the_callers():
    encoder = Encoder(tiny_tokenizer())
    encoder.one("the", split=False).clear()
    assert encoder.one("the", split=False)


def test_memory_is_bounded_in_pieces_and_in_their_length():
    encoder = Encoder(tiny_tokenizer())
    memory = encoder._memories[False]
    encoder.one("x" * (_REMEMBERED_CHARACTERS + 1), split=False)
    assert len(memory) == 0
    encoder.many([f"{number}" for number in range(3 * _REMEMBERED_PIECES)], split=False)
    assert _REMEMBERED_PIECES // 2 <= len(memory) <= _REMEMBERED_PIECES
    assert memory.recall("0") is None


def test_a_piece_in_use_stays_in_memory():
    encoder = Encoder(tiny_tokenizer())
    memory = encoder._memories[False]
    encoder.one("header", split=False)
    for number in range(3 * _REMEMBERED_PIECES):
        assert memory.recall("header") == encoder._straight(["header"], False)[0]
        encoder.one(f"{number}", split=False)
        assert len(memory) <= _REMEMBERED_PIECES


@pytest.mark.parametrize("own_encode", [False, True])
def test_half_a_character_is_refused_in_words(own_encode):
    tokenizer = tiny_tokenizer()
    if own_encode:
        original = tokenizer.encode
        tokenizer.encode = lambda text, **options: original(text, **options)
    with pytest.raises(DataError, match="half a character") as error:
        ChatFormat(tokenizer).conversation([Message("user", "a\ud83d"), Message("assistant", "b")])
    assert error.value.hint


def test_other_type_errors_stay_what_they_are():
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer)

    def broken(texts, split):
        raise TypeError("a bug elsewhere")

    encoder._straight = broken
    with pytest.raises(TypeError, match="a bug elsewhere"):
        encoder.one("x", split=False)
