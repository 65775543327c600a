"""What makes two chat formats the same: a digest of everything that decides which ids a conversation gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from postgrad.chat.encoder import rust_backend
from postgrad.chat.tokens import Tokenizer


def digest(tokenizer: Tokenizer, decided: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the tokenizer's serialisation and `decided` (JSON values; others by their repr)."""
    parts = {"tokenizer": _serialised(tokenizer), "special": dict(tokenizer.special_tokens_map), **decided}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _serialised(tokenizer: Any) -> Any:
    """A fast tokenizer's `tokenizer.json`; of any other, all that its interface shows.

    Truncation and padding are part of that text but set per call, so they are cleared first, as every call of `encode` does.
    """
    backend = rust_backend(tokenizer)
    if backend is None:
        added = {index: repr(token) for index, token in tokenizer.added_tokens_decoder.items()}
        return [type(tokenizer).__qualname__, dict(tokenizer.get_vocab()), added]
    backend.no_truncation()
    backend.no_padding()
    return backend.to_str()
