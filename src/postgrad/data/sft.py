"""Rows to training rows for supervised fine-tuning: tokens, and which of them are trained.

1. Every assistant turn is trained: its content, its calls and its end token; never a header, nor what follows the end token. `train_on`
   narrows that to the last turn or widens it to every token, and `train: false` on a message leaves that message out.
2. A row longer than `max_length` is dropped (default), cut, or an error. A cut row ends inside an answer, on ids, without an end token.
3. Where the template prints earlier turns differently later (thinking models), a conversation becomes one row per trained turn: what the
   model would really have read, and its answer.
4. Every row is accounted for in the report; no trainable token at all is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from postgrad.chat import ChatFormat, EncodedConversation, TemplateRefuses, TemplateRewritesHistory, TokenSource
from postgrad.data.examples import Example, TextPrompts, effective_text_prompts, is_text_prompt, training_example
from postgrad.data.files import Rejected, Row
from postgrad.data.messages import BadRow
from postgrad.data.report import DataReport, lengths_of
from postgrad.data.rows import RowSet, check_rejected
from postgrad.errors import DataError
from postgrad.types import Message, ToolSpec, TrainRow

TrainOn = Literal["assistant", "last", "all"]
Overlong = Literal["drop", "cut", "error"]

MANY_ROWS = 20  # from here on, "more than half of the rows" says something about the data


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One training row with where each token came from. Four values of one length (`name` apart)."""

    name: str
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    source: tuple[TokenSource, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first trained one."""
        return self.trained.index(True)


@dataclass(frozen=True, slots=True)
class SFTData:
    """`row_names[i]` (file:line) and `sources[i]` (per token) belong to `rows[i]`."""

    rows: list[TrainRow]
    row_names: list[str]
    sources: list[tuple[TokenSource, ...]]
    report: DataReport


def prepare_sft(
    rows: RowSet,
    chat: ChatFormat,
    *,
    max_length: int,
    overlong: Overlong = "drop",
    train_on: TrainOn = "assistant",
    tools: Sequence[ToolSpec] = (),
    text_prompts: TextPrompts = "chat",
) -> SFTData:
    """Every row as tokens and train flags, within `max_length` tokens.

    `tools` are offered in every conversation that brings no `tools` column of its own.
    Raises `DataError`: prompt-only rows, more rejected rows than `rows.max_bad`, an over-long row under `overlong="error"`,
    a template whose answers cannot be told from its context, nothing left to train.
    """
    if rows.format == "prompt":
        raise DataError(
            "the rows have prompts but no answers, so there is nothing to imitate", where=rows.source, hint="add a completion column"
        )
    builder = _Builder(chat=chat, train_on=train_on, tools=tuple(tools), text_prompts=effective_text_prompts(text_prompts, chat))
    limiter = _Limiter(max_length=max_length, overlong=overlong)
    rejected = list(rows.rejected)
    encoded: list[EncodedRow] = []
    for row in rows.rows:
        try:
            built = builder.build(row, rows.format)
        except BadRow as error:
            rejected.append(Rejected(row.name, str(error)))
            continue
        encoded += limiter.limit(row.name, built)
    check_rejected(rejected, rows.max_bad)
    report = _report(rows, encoded, rejected, limiter, builder)
    limiter.check(report)
    trained = [TrainRow(row.token_ids, row.trained) for row in encoded]
    return SFTData(trained, [row.name for row in encoded], [row.source for row in encoded], report)


def _report(rows: RowSet, encoded: Sequence[EncodedRow], rejected: Sequence[Rejected], limiter: _Limiter, builder: _Builder) -> DataReport:
    dropped = Counter(limiter.dropped)
    if builder.untrained:
        dropped["nothing marked for training"] = builder.untrained
    if rejected:
        dropped["rejected"] = len(rejected)
    return DataReport(
        source=rows.source,
        format=rows.format,
        rows=len(rows),
        kept=len(rows) - sum(dropped.values()),
        dropped=dict(dropped),
        cut=limiter.cut,
        trained_tokens=sum(sum(row.trained) for row in encoded),
        tokens=sum(len(row.token_ids) for row in encoded),
        lengths=lengths_of([len(row.token_ids) for row in encoded]),
        rejected=tuple(rejected),
        notes=(*rows.notes, *builder.chat.notes, *builder.notes(), *limiter.notes(len(encoded))),
    )


@dataclass(kw_only=True)
class _Builder:
    """One row to encoded rows (one, or one per turn), counting what is worth a note."""

    chat: ChatFormat
    train_on: TrainOn
    tools: tuple[ToolSpec, ...]
    text_prompts: TextPrompts
    wrapped: int = 0
    raw: int = 0
    split: int = 0
    untrained: int = 0

    def build(self, row: Row, format: str) -> list[EncodedRow]:
        """Raises `BadRow` for what is wrong with this row, `DataError` (with its name) for what is wrong with the template."""
        example = training_example(row, format, self.text_prompts)
        try:
            rows = [encoded for encoded in self._encode(example) if any(encoded.trained)]
        except TemplateRefuses as error:
            raise BadRow(error.what) from None
        except DataError as error:
            raise DataError(error.what, where=row.name, hint=error.hint) from error
        self.untrained += not rows
        self.raw += example.raw is not None
        self.wrapped += example.raw is None and is_text_prompt(row, format)
        return rows

    def notes(self) -> list[str]:
        notes = []
        if self.wrapped:
            notes.append(f"{self.wrapped} text prompts became user messages of the chat template")
        if self.raw:
            why = "the tokenizer has no chat template" if not self.chat.has_template else "as asked"
            notes.append(f"{self.raw} rows are raw text without a chat template ({why})")
        if self.split:
            notes.append(f"{self.split} conversations became one row per turn, because the template rewrites earlier turns")
        return notes

    def _encode(self, example: Example) -> list[EncodedRow]:
        if example.raw is not None:
            return [self._row(example.row, self.chat.raw_conversation(*example.raw), {0})]
        messages, tools = example.messages, example.tools or self.tools
        chosen = _chosen(messages, self.train_on)
        if self.train_on == "all":
            return [self._all(example, tools)]
        if not chosen:
            return []
        last = max(chosen)
        if chosen == {last}:
            return [self._row(example.row, self.chat.last_turn(messages[: last + 1], tools), chosen)]
        try:
            return [self._row(example.row, self.chat.conversation(messages, tools), chosen)]
        except TemplateRewritesHistory:
            self.split += 1
            turns = [(index, self.chat.last_turn(messages[: index + 1], tools)) for index in sorted(chosen)]
            return [self._row(f"{example.row} message {index}", turn, chosen) for index, turn in turns]

    def _all(self, example: Example, tools: tuple[ToolSpec, ...]) -> EncodedRow:
        if any(message.train is False and message.role != "assistant" for message in example.messages):
            raise BadRow("train_on: all cannot leave out a message that is not the assistant's (train: false or weight 0)")
        conversation = self.chat.conversation(example.messages, tools)
        skipped = {index for index, message in enumerate(example.messages) if message.train is False}
        flags = tuple(position > 0 and message not in skipped for position, message in enumerate(conversation.message))
        return EncodedRow(example.row, conversation.token_ids, flags, conversation.source)

    def _row(self, name: str, conversation: EncodedConversation, chosen: set[int]) -> EncodedRow:
        flags = [
            source == "assistant" and message in chosen for source, message in zip(conversation.source, conversation.message, strict=True)
        ]
        if self.train_on == "all":
            flags = [True] * len(flags)
        flags[0] = False  # nothing precedes the first token of a row, so nothing can predict it
        return EncodedRow(name, conversation.token_ids, tuple(flags), conversation.source)


def _chosen(messages: Sequence[Message], train_on: TrainOn) -> set[int]:
    """Indices of the assistant messages to train: by the recipe's rule, then each message's own `train`."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    chosen = set(answers[-1:] if train_on == "last" else answers)
    chosen |= {index for index in answers if messages[index].train}
    return chosen - {index for index in answers if messages[index].train is False}


@dataclass(kw_only=True)
class _Limiter:
    """The over-long policy, and the count of what it did."""

    max_length: int
    overlong: Overlong
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    hopeless: int = 0
    needed: int | None = None

    def limit(self, name: str, rows: Sequence[EncodedRow]) -> list[EncodedRow]:
        """The rows of one source row that stay. A source row counts as dropped when none of its rows stays."""
        kept = [limited for row in rows if (limited := self._limit(row)) is not None]
        if rows and not kept:
            self.dropped["too_long"] += 1
        self.cut += any(len(limited.token_ids) == self.max_length and limited not in rows for limited in kept)
        if len(kept) < len(rows) and kept:
            self.dropped_turns += len(rows) - len(kept)
        return kept

    dropped_turns: int = 0

    def _limit(self, row: EncodedRow) -> EncodedRow | None:
        if len(row.token_ids) <= self.max_length:
            return row
        if self.overlong == "error":
            what = f"the row has {len(row.token_ids)} tokens, max_length is {self.max_length}"
            raise DataError(what, where=row.name, hint="raise max_length, or choose overlong: drop or cut")
        answer_inside = row.prompt_tokens < self.max_length
        self.hopeless += not answer_inside
        needed = row.prompt_tokens + 1 if self.overlong == "cut" else len(row.token_ids)
        self.needed = needed if self.needed is None else min(self.needed, needed)
        if self.overlong == "drop" or not answer_inside:
            return None
        end = self.max_length
        return replace(row, token_ids=row.token_ids[:end], trained=row.trained[:end], source=row.source[:end])

    def notes(self, kept: int) -> list[str]:
        notes = []
        if self.cut > 0.05 * kept:
            notes.append(f"{self.cut} of {kept} rows are cut; a cut answer has no end token")
        if self.dropped_turns:
            notes.append(f"{self.dropped_turns} single turns of kept conversations are too long and left out")
        return notes

    def check(self, report: DataReport) -> None:
        """Raises `DataError` when nothing is left, or when most answers are cut."""
        if not report.kept:
            raise self._nothing(report)
        if self.cut > 0.5 * report.kept and report.kept >= MANY_ROWS:
            what = f"{self.cut} of {report.kept} rows are cut at max_length={self.max_length}: the model would rarely see an end token"
            raise DataError(what, where=report.source, hint="raise max_length, or use overlong: drop")

    def _nothing(self, report: DataReport) -> DataError:
        too_long = self.dropped["too_long"]
        if too_long == report.rows and (self.overlong == "cut" or self.hopeless >= too_long):
            what = f"{too_long} of {report.rows} rows have no completion token inside max_length={self.max_length}"
        elif too_long == report.rows:
            what = f"{too_long} of {report.rows} rows are longer than max_length={self.max_length}"
        else:
            reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
            return DataError(
                f"no row is left to train on: {reasons} of {report.rows}", where=report.source, hint="see `postgrad data show`"
            )
        return DataError(f"{what}; the shortest needs {self.needed}", where=report.source, hint=f"set max_length to {self.needed} or more")
