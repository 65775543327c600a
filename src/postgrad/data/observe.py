"""What the audit sees in one row while it is encoded. Everything lands in the tally; nothing here changes a token."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from postgrad.chat import ChatFormat
from postgrad.data.encoded import TRAINED_ANSWER, EncodedRow
from postgrad.data.examples import Example
from postgrad.data.files import Row
from postgrad.data.formats import PAIR_COLUMNS
from postgrad.data.messages import has_null_arguments, python_types
from postgrad.data.table import Array
from postgrad.data.tally import Tally

_END = re.compile(TRAINED_ANSWER + b"(?!" + TRAINED_ANSWER + b")")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def observe_row(tally: Tally, chat: ChatFormat, row: Row, made: Sequence[EncodedRow], kept: Sequence[EncodedRow]) -> None:
    """A source row of which something is trained: `made` is all of it, `kept` what the limit left."""
    tally.kept += 1
    tally.made += len(kept)
    whole = made[0].ids if len(made) == 1 else np.concatenate([encoded.ids for encoded in made])
    tally.see(row.place, whole, _prompt(made[0]))
    for encoded in kept:
        tally.tokens += len(encoded)
        tally.trained += encoded.trained_tokens
        tally.kept_lengths[len(encoded)] += 1
        _observe_ends(tally, chat, row, encoded, cut=encoded not in made)


def _observe_ends(tally: Tally, chat: ChatFormat, row: Row, encoded: EncodedRow, *, cut: bool) -> None:
    """Counts trained answers and the end tokens trained in them: an answer ends where a trained stretch of it does."""
    ended = [int(encoded.ids[end.start()]) in chat.stop_ids for end in _END.finditer(encoded.marks)]
    tally.answers += len(ended)
    tally.ends += sum(ended)
    if len(ended) - sum(ended) > cut:  # only the answer that the limit cut may be without one
        tally.mark("no_end_token", row.name)
    if chat.unk_id not in {None, chat.bos_id, *chat.stop_ids} and chat.unk_id in encoded.ids:
        tally.mark("unknown_token", row.name)


def _prompt(row: EncodedRow) -> Array:
    """What precedes the assistant's first token; all of a row that has nothing there (raw text), or equal openings would count as equal."""
    return row.ids[: row.context_tokens or len(row)]


def observe_texts(tally: Tally, chat: ChatFormat, row: Row, *examples: Example) -> None:
    """What the texts of a row hold; a pair is two examples. Each is marked once, however often it occurs in the row."""
    texts = [text for example in examples for text in _texts(example) if text]
    conversations = [example for example in examples if example.raw is None]
    roles = {message.role for example in conversations for message in example.messages}
    as_text = chat.tool_protocol == "text"
    seen = {
        "special_text": any(chat.special_in_text(text) for text in texts),
        "replacement_character": any(REPLACEMENT in text for text in texts),
        "null_arguments": any(has_null_arguments(row.fields[name]) for name in _CONVERSATIONS if name in row.fields),
        "boundary_merge": any(example.raw and example.raw[0] and chat.merges_at(*example.raw) for example in examples),
        "tools_as_text": as_text and any(example.tools for example in conversations),
        "system_lost": "system" in roles and not chat.prints_system_role,
        "tool_as_user": "tool" in roles and not chat.prints_tool_role and as_text,
        "tool_lost": "tool" in roles and not chat.prints_tool_role and not as_text,
    }
    for name, found in seen.items():
        if found:
            tally.mark(name, row.name, chat.call_style if name == "tools_as_text" else "")
    if any(example.tools for example in conversations) and (names := python_types(row.fields.get("tools") or row.fields.get("function"))):
        tally.mark("schema_types", row.name, ", ".join(names))


_CONVERSATIONS = ("messages", "conversations", "prompt", "completion", *(name for pair in PAIR_COLUMNS for name in pair))


def _texts(example: Example) -> list[str]:
    if example.raw is not None:
        return list(example.raw)
    return [text for message in example.messages for text in (message.content, message.reasoning)]


def observe_ids(tally: Tally, chat: ChatFormat, row: EncodedRow) -> None:
    """Token rows that somebody else made."""
    if chat.bos_id is not None and row.ids[:2].tolist() == [chat.bos_id, chat.bos_id]:
        tally.mark("double_bos", row.name)
