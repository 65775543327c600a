"""What the audit sees in one row while it is encoded. Everything lands in the tally; nothing here changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from postgrad.chat import ChatFormat
from postgrad.data.encoded import EncodedRow
from postgrad.data.examples import Example
from postgrad.data.files import Row
from postgrad.data.messages import has_null_arguments
from postgrad.data.tally import Tally

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def observe_row(tally: Tally, chat: ChatFormat, row: Row, made: Sequence[EncodedRow], kept: Sequence[EncodedRow]) -> None:
    """A source row of which something is trained: `made` is all of it, `kept` what the limit left."""
    tally.kept += 1
    tally.made += len(kept)
    tally.see(row.place, (token for encoded in made for token in encoded.token_ids), _prompt(made[0]))
    for encoded in kept:
        tally.tokens += len(encoded.token_ids)
        tally.trained += sum(encoded.trained)
        tally.kept_lengths[len(encoded.token_ids)] += 1
        _observe_ends(tally, chat, row, encoded, cut=encoded not in made)


def _observe_ends(tally: Tally, chat: ChatFormat, row: Row, encoded: EncodedRow, *, cut: bool) -> None:
    """Counts trained answers and the end tokens trained in them: an answer ends where a trained stretch of it does."""
    answer = [flag and source == "assistant" for flag, source in zip(encoded.trained, encoded.source, strict=True)]
    ended = [
        encoded.token_ids[place] in chat.stop_ids for place, (now, after) in enumerate(pairwise((*answer, False))) if now and not after
    ]
    tally.answers += len(ended)
    tally.ends += sum(ended)
    if len(ended) - sum(ended) > cut:  # only the answer that the limit cut may be without one
        tally.mark("no_end_token", row.name)
    if chat.unk_id is not None and chat.unk_id in encoded.token_ids:
        tally.mark("unknown_token", row.name)


def _prompt(row: EncodedRow) -> tuple[int, ...]:
    return row.token_ids[: row.prompt_tokens]


def observe_texts(tally: Tally, chat: ChatFormat, row: Row, example: Example) -> None:
    """What the texts of a row hold."""
    texts = list(example.raw) if example.raw is not None else [message.content for message in example.messages]
    special = next((text for text in texts if chat.special_in_text(text)), None)
    if special is not None:
        tally.mark("special_text", row.name)
    if any(REPLACEMENT in text for text in texts):
        tally.mark("replacement_character", row.name)
    if has_null_arguments(row.fields.get("messages") or row.fields.get("conversations")):
        tally.mark("null_arguments", row.name)
    if example.raw is not None and example.raw[0] and chat.merges_at(*example.raw):
        tally.mark("boundary_merge", row.name)
    if example.raw is None:
        _observe_template(tally, chat, row, example)


def _observe_template(tally: Tally, chat: ChatFormat, row: Row, example: Example) -> None:
    if example.tools and chat.tool_protocol == "text":
        tally.mark("tools_as_text", row.name)
    roles = {message.role for message in example.messages}
    for role in ("system", "tool"):
        if role in roles and not chat.prints_role(role):
            tally.mark(f"{role}_as_user", row.name)


def observe_ids(tally: Tally, chat: ChatFormat, row: EncodedRow) -> None:
    """Token rows that somebody else made."""
    if chat.bos_id is not None and row.token_ids[:2] == (chat.bos_id, chat.bos_id):
        tally.mark("double_bos", row.name)
