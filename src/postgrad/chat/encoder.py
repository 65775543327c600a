"""Plain text to ids, with as little as possible between the caller and the tokenizer's own code.

1. A fast tokenizer's Rust backend is called directly where transformers' `encode` does nothing but call it: `rust_backend`.
2. Of many pieces, those that are not remembered go to the tokenizer in one call.
3. Short pieces are remembered: roles, system prompts, tool descriptions and what stands between turns are the same in every row.

A lone surrogate (half of a character outside the basic plane, as broken exports hold them) is no text and is refused either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from postgrad.errors import DataError

_REMEMBERED_CHARACTERS = 4_000
_REMEMBERED_PIECES = 512

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


def require_whole(text: str, *, cause: Exception | None = None) -> None:
    """Raises `DataError` when the text holds half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = "the text holds half a character (a lone surrogate), which no tokenizer can encode"
        raise DataError(what, hint=_REPAIR) from cause or error


class Encoder:
    """`tokenizer.encode(text, add_special_tokens=False)` for many texts.

    split: special-token strings in the text stay text (True) or become their ids (False), whatever the tokenizer's own default is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = rust_backend(tokenizer)
        self._memories = {split: Memory() for split in (False, True)}

    def one(self, text: str, *, split: bool) -> list[int]:
        """The list is the caller's."""
        return list(self.many([text], split=split)[0])

    def many(self, texts: Sequence[str], *, split: bool) -> list[Sequence[int]]:
        """Ids of each text on its own."""
        memory = self._memories[split]
        known = {text: memory.recall(text) for text in texts}
        missing = [text for text, ids in known.items() if ids is None]
        if missing:
            for text, ids in zip(missing, self._encode(missing, split), strict=True):
                known[text] = ids
                memory.remember(text, ids)
        return [known[text] for text in texts]  # type: ignore[misc]

    def _encode(self, texts: list[str], split: bool) -> list[list[int]]:
        try:
            return self._straight(texts, split) if self._backend is not None else self._wrapped(texts, split)
        except (TypeError, UnicodeEncodeError) as error:  # TypeError is how the Rust binding says it
            for text in texts:
                require_whole(text, cause=error)
            raise

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


class Memory:
    """Ids of the pieces in use. When the recent ones are half of all that may be remembered, they become the older ones; of these only what
    is asked for again stays."""

    def __init__(self) -> None:
        self._recent: dict[str, Sequence[int]] = {}
        self._older: dict[str, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def recall(self, text: str) -> Sequence[int] | None:
        if not text:
            return ()
        ids = self._recent.get(text)
        if ids is None and (ids := self._older.pop(text, None)) is not None:
            self.remember(text, ids)
        return ids

    def remember(self, text: str, ids: Sequence[int]) -> None:
        if len(text) > _REMEMBERED_CHARACTERS:
            return
        if len(self._recent) >= _REMEMBERED_PIECES // 2:
            self._recent, self._older = {}, self._recent
        self._recent[text] = ids
