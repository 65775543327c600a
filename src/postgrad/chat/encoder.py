"""Plain text to ids, with as little as possible between the caller and the tokenizer's own code.

1. A fast tokenizer's Rust backend is called directly where transformers' `encode` does nothing but call it: `rust_backend`.
2. Pieces that a batch lacks are encoded in one call.
3. Short pieces are remembered: roles, system prompts, tool descriptions and what stands between turns are the same in every row.

A lone surrogate (half of a character outside the basic plane, as broken exports hold them) is no text and is refused either way.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from postgrad.errors import DataError

_REMEMBERED_CHARACTERS = 4_000
_REMEMBERED_PIECES = 512

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_REPAIR = "write the character whole: the file was cut or escaped inside it"

_ENCODE = {
    "encode": "transformers.tokenization_utils_base",
    "_encode_plus": "transformers.tokenization_utils_tokenizers",
    "set_truncation_and_padding": "transformers.tokenization_utils_tokenizers",
    "_convert_encoding": "transformers.tokenization_utils_tokenizers",
}
"""The methods behind `encode` of a fast tokenizer and the modules of transformers that define them."""


def rust_backend(tokenizer: Any) -> Any | None:
    """The `tokenizers.Tokenizer` inside a fast tokenizer, or None when the tokenizer has none or encodes in a way of its own.

    It has a way of its own when any method between `encode` and the backend is not transformers' (code_llama, custom code).
    """
    kind = type(tokenizer)
    own = any(name in vars(tokenizer) or getattr(getattr(kind, name, None), "__module__", "") != module for name, module in _ENCODE.items())
    return None if own else tokenizer.backend_tokenizer


class Encoder:
    """`tokenizer.encode(text, add_special_tokens=False)` for many texts.

    split: special-token strings in the text stay text (True) or become their ids (False), whatever the tokenizer's own default is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = rust_backend(tokenizer)
        self._memory: OrderedDict[tuple[str, bool], list[int]] = OrderedDict()

    def one(self, text: str, *, split: bool) -> list[int]:
        return self.many([text], split=split)[0]

    def many(self, texts: Sequence[str], *, split: bool) -> list[list[int]]:
        """Ids of each text on its own; the lists are the caller's."""
        found = [self._recall(text, split) for text in texts]
        missing = list(dict.fromkeys(text for text, ids in zip(texts, found, strict=True) if ids is None))
        fresh = dict(zip(missing, self._encode(missing, split), strict=True)) if missing else {}
        for text, ids in fresh.items():
            self._remember(text, split, ids)
        return [list(fresh[text] if ids is None else ids) for text, ids in zip(texts, found, strict=True)]

    def _recall(self, text: str, split: bool) -> list[int] | None:
        if not text:
            return []
        key = (text, split)
        ids = self._memory.get(key)
        if ids is not None:
            self._memory.move_to_end(key)
        return ids

    def _remember(self, text: str, split: bool, ids: list[int]) -> None:
        if len(text) > _REMEMBERED_CHARACTERS:
            return
        self._memory[text, split] = ids
        if len(self._memory) > _REMEMBERED_PIECES:
            self._memory.popitem(last=False)

    def _encode(self, texts: list[str], split: bool) -> list[list[int]]:
        try:
            return self._straight(texts, split) if self._backend is not None else self._wrapped(texts, split)
        except (TypeError, UnicodeEncodeError) as error:  # TypeError is how the Rust binding says it
            if not any(_HALF_CHARACTER.search(text) for text in texts):
                raise
            raise DataError("the text holds half a character (a lone surrogate), which no tokenizer can encode", hint=_REPAIR) from error

    def _straight(self, texts: list[str], split: bool) -> list[list[int]]:
        """What transformers does around the backend call: no truncation, no padding, its switch for special tokens."""
        backend: Any = self._backend
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _wrapped(self, texts: list[str], split: bool) -> list[list[int]]:
        return [list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False, split_special_tokens=split)) for text in texts]
