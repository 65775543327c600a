"""Rows to training rows for supervised fine-tuning: tokens, and which of them are trained.

1. Every assistant turn is trained: its content, its calls and its end token; never a header, nor what follows the end token. `train_on`
   narrows that to the last turn or widens it to every token, and `train: false` on a message leaves that message out.
2. A row longer than `max_length` is dropped (default), cut, or an error. A cut row ends inside an answer, on ids, without an end token.
3. Where the template prints earlier turns differently later (thinking models), a conversation becomes one row per trained turn: what the
   model would really have read, and its answer.
4. Every row is accounted for in the report; no trainable token at all is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from postgrad.chat import ChatFormat, EncodedConversation, Printed, TemplateRefuses, TemplateRewritesHistory, TokenSource
from postgrad.data.cache import Cache
from postgrad.data.encoded import COLUMNS, EncodedRow, all_but, encoded_row, read_name, read_source, train_row
from postgrad.data.examples import Example, TextPrompts, effective_text_prompts, is_text_prompt, training_example
from postgrad.data.files import Row
from postgrad.data.formats import Format
from postgrad.data.limit import Limit, Overlong
from postgrad.data.messages import BadRow
from postgrad.data.observe import observe_ids, observe_row, observe_texts
from postgrad.data.pipeline import DEFAULT_WORK, Draft, Work, encode_all
from postgrad.data.pretokenised import read_tokens
from postgrad.data.report import DataReport
from postgrad.data.sources import RowSource
from postgrad.data.table import Record, View
from postgrad.data.tally import Tally
from postgrad.errors import DataError
from postgrad.types import Message, ToolSpec, TrainRow

TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True, slots=True)
class SFTData:
    """`row_names[i]` (file:line) and `sources[i]` (per token) belong to `rows[i]`."""

    rows: Sequence[TrainRow]
    row_names: Sequence[str]
    sources: Sequence[tuple[TokenSource, ...]]
    report: DataReport


def prepare_sft(
    rows: RowSource,
    chat: ChatFormat,
    *,
    max_length: int,
    overlong: Overlong = "drop",
    train_on: TrainOn = "assistant",
    tools: Sequence[ToolSpec] = (),
    text_prompts: TextPrompts = "chat",
    work: Work = DEFAULT_WORK,
    cache: Cache | None = None,
) -> SFTData:
    """Every row as tokens and train flags, within `max_length` tokens.

    `tools` are offered in every conversation that brings no `tools` column of its own. `work` says how many processes help and who is told
    how far they are; with a `cache` the tokens of large files are kept on disk and found again while nothing they depend on changes.
    Raises `DataError`: rows of a format without answers, more rejected rows than `rows.max_bad`, an over-long row under
    `overlong="error"`, a template whose answers cannot be told from its context, nothing left to train.
    """
    encoder = SFTEncoder(
        chat=chat, limit=Limit(max_length, overlong), train_on=train_on, tools=tuple(tools),
        text_prompts=effective_text_prompts(text_prompts, chat),
    )  # fmt: skip
    table, report = encode_all(rows, "sft", encoder, work=work, cache=cache)
    report.verify()
    return SFTData(View(table, train_row), View(table, read_name), View(table, read_source), report)


@dataclass(frozen=True, kw_only=True)
class SFTEncoder:
    """One row to records of a table: one, or one per turn."""

    chat: ChatFormat
    limit: Limit
    train_on: TrainOn = "assistant"
    tools: tuple[ToolSpec, ...] = ()
    text_prompts: TextPrompts = "chat"
    columns = COLUMNS

    def draft(self, row: Row, format: Format) -> Draft[Record]:
        """Raises `BadRow` for what is wrong with this row, `DataError` (with its name) for what is wrong with the template."""
        if format == "tokens":
            return Draft((), lambda _, tally: self._keep_tokens(row, tally))
        example = training_example(row, format, self.text_prompts)
        try:
            texts = self._texts(row, example)
        except TemplateRefuses as error:
            raise BadRow(error.what) from None
        except DataError as error:
            raise DataError(error.what, where=row.name, hint=error.hint) from error

        def keep(encoded: Sequence[EncodedConversation], tally: Tally) -> list[Record]:
            if len(texts) > 1:
                tally.mark("rewrites_history", row.name)
            tally.counts["raw"] += example.raw is not None
            tally.counts["wrapped"] += example.raw is None and is_text_prompt(row, format)
            observe_texts(tally, self.chat, row, example)
            return self._keep(row, [text.marked(conversation) for text, conversation in zip(texts, encoded, strict=True)], tally)

        return Draft([text.printed for text in texts], keep)

    def _keep_tokens(self, row: Row, tally: Tally) -> list[Record]:
        encoded = read_tokens(row, self.chat.vocabulary_size)
        observe_ids(tally, self.chat, encoded)
        return self._keep(row, [encoded], tally)

    def _keep(self, row: Row, rows: Sequence[EncodedRow], tally: Tally) -> list[Record]:
        made = [encoded for encoded in rows if encoded.trained_tokens]
        if not made:
            tally.dropped["nothing marked for training"] += 1
            return []
        for encoded in made:
            tally.lengths[len(encoded)] += 1
        kept = self.limit.apply(made, tally)
        if kept:
            observe_row(tally, self.chat, row, made, kept)
        return [encoded.record() for encoded in kept]

    def _texts(self, row: Row, example: Example) -> list[_Text]:
        """What is trained of a row: one text, or one per turn where the template rewrites earlier ones; none where nothing is chosen."""
        if example.raw is not None:
            raw = self.chat.print_raw(*example.raw)
            return [_all_but(row.name, raw, set()) if self.train_on == "all" else _only(row.name, raw, {0})]
        messages, tools = example.messages, example.tools or self.tools
        if self.train_on == "all":
            return [self._all(row, messages, tools)]
        chosen = _chosen(messages, self.train_on)
        if not chosen:
            return []
        last = max(chosen)
        if chosen == {last}:
            return [_only(row.name, self.chat.print_last_turn(messages[: last + 1], tools), chosen)]
        try:
            return [_only(row.name, self.chat.print_conversation(messages, tools), chosen)]
        except TemplateRewritesHistory:
            turns = [(index, self.chat.print_last_turn(messages[: index + 1], tools)) for index in sorted(chosen)]
            return [_only(f"{row.name} message {index}", turn, chosen) for index, turn in turns]

    def _all(self, row: Row, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> _Text:
        if any(message.train is False and message.role != "assistant" for message in messages):
            raise BadRow("train_on: all cannot leave out a message that is not the assistant's (train: false or weight 0)")
        skipped = {index for index, message in enumerate(messages) if message.train is False}
        return _all_but(row.name, self.chat.print_conversation(messages, tools), skipped)


@dataclass(frozen=True, slots=True)
class _Text:
    """One training row to be: as the template prints it, and how its encoded form is marked."""

    printed: Printed
    marked: Callable[[EncodedConversation], EncodedRow]


def _only(name: str, printed: Printed, chosen: set[int]) -> _Text:
    return _Text(printed, lambda encoded: encoded_row(name, encoded, chosen))


def _all_but(name: str, printed: Printed, skipped: set[int]) -> _Text:
    return _Text(printed, lambda encoded: all_but(name, encoded, skipped))


def _chosen(messages: Sequence[Message], train_on: TrainOn) -> set[int]:
    """Indices of the assistant messages to train: by the recipe's rule, then each message's own `train`."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    chosen = set(answers[-1:] if train_on == "last" else answers)
    chosen |= {index for index in answers if messages[index].train}
    return chosen - {index for index in answers if messages[index].train is False}
