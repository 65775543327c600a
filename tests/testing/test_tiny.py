"""The tiny tokenizer behaves as the real ones do where it matters."""

from __future__ import annotations

import pytest

from postgrad.testing import ARCHITECTURES, tiny_model, tiny_tokenizer


def test_the_tiny_tokenizer_has_one_id_for_end_padding_and_turn_end() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]


@pytest.mark.parametrize("text", ["héllo <|im_end|>\n\n", "foo(" + ")bar", "the 12 日本"])
def test_the_tiny_tokenizer_decodes_what_it_encodes(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tokens_merge_across_the_border_of_two_texts() -> None:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer.encode("the", add_special_tokens=False)) == 1
    assert len(tokenizer.encode("t", add_special_tokens=False) + tokenizer.encode("he", add_special_tokens=False)) == 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tiny_model_is_the_same_for_the_same_seed_and_answers_for_every_id(architecture: str) -> None:
    import torch

    first, second = (tiny_model(architecture, seed=3) for _ in range(2))  # type: ignore[arg-type]
    ids = torch.tensor([[1, 5, len(tiny_tokenizer()) - 1]])
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
        assert first(ids).logits.std() > 0.01
