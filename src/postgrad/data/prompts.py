"""Rows to prompts for reinforcement learning: messages the model answers, and the other columns for the rewards.

A prompt is never cut. One that is longer than `max_prompt_tokens` is dropped and counted, or an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from postgrad.chat import ChatFormat, TemplateRefuses
from postgrad.data.examples import TextPrompts, effective_text_prompts, is_text_prompt, other_columns, prompt_messages
from postgrad.data.files import Rejected, Row
from postgrad.data.messages import BadRow
from postgrad.data.report import DataReport, lengths_of
from postgrad.data.rows import RowSet, check_rejected
from postgrad.errors import DataError
from postgrad.types import Message, Prompt, ToolSpec


@dataclass(frozen=True, slots=True)
class PromptData:
    prompts: list[Prompt]
    report: DataReport


def prepare_prompts(
    rows: RowSet,
    chat: ChatFormat,
    *,
    max_prompt_tokens: int | None = None,
    tools: Sequence[ToolSpec] = (),
    system: str | None = None,
    overlong: Literal["drop", "error"] = "drop",
    text_prompts: TextPrompts = "chat",
) -> PromptData:
    """Every row as a prompt. `system` is put before prompts that have no system message; `tools` count towards the length.

    Raises `DataError`: more rejected rows than `rows.max_bad`, an over-long prompt under `overlong="error"`, no prompt left.
    """
    maker = _Maker(chat=chat, system=system, tools=tuple(tools), text_prompts=effective_text_prompts(text_prompts, chat))
    rejected = list(rows.rejected)
    prompts: list[Prompt] = []
    lengths: list[int] = []
    too_long: list[int] = []
    for row in rows.rows:
        try:
            prompt, length = maker.make(row, rows.format)
        except BadRow as error:
            rejected.append(Rejected(row.name, str(error)))
            continue
        if max_prompt_tokens is not None and length > max_prompt_tokens:
            if overlong == "error":
                what = f"the prompt has {length} tokens, the limit is {max_prompt_tokens}"
                raise DataError(what, where=row.name, hint="raise data.max_length, or choose overlong: drop")
            too_long.append(length)
            continue
        prompts.append(prompt)
        lengths.append(length)
    check_rejected(rejected, rows.max_bad)
    if not prompts:
        raise _nothing(rows, too_long, max_prompt_tokens)
    dropped = Counter({"too_long": len(too_long), "rejected": len(rejected)})
    report = DataReport(
        source=rows.source,
        format=rows.format,
        rows=len(rows),
        kept=len(prompts),
        dropped={reason: count for reason, count in dropped.items() if count},
        tokens=sum(lengths),
        lengths=lengths_of(lengths),
        rejected=tuple(rejected),
        notes=(*rows.notes, *chat.notes, *maker.notes()),
    )
    return PromptData(prompts, report)


def _nothing(rows: RowSet, too_long: Sequence[int], limit: int | None) -> DataError:
    if not too_long:
        return DataError("no prompt is left", where=rows.source, hint="see the rejected rows")
    what = f"{len(too_long)} of {len(rows)} prompts are longer than {limit} tokens; the shortest needs {min(too_long)}"
    return DataError(what, where=rows.source, hint=f"set data.max_length to {min(too_long)} or more")


@dataclass(kw_only=True)
class _Maker:
    """One row to a prompt and its length in tokens, counting what is worth a note."""

    chat: ChatFormat
    system: str | None
    tools: tuple[ToolSpec, ...]
    text_prompts: TextPrompts
    wrapped: int = 0
    raw: int = 0
    answered: int = 0

    def make(self, row: Row, format: str) -> tuple[Prompt, int]:
        text = is_text_prompt(row, format)
        columns = other_columns(row.fields)
        if text and self.text_prompts == "raw":
            return self._raw(row, columns)
        messages, answered = prompt_messages(row, format)
        if self.system is not None and messages[0].role != "system":
            messages = (Message("system", self.system), *messages)
        length = self._length(row, messages)
        self.wrapped += text
        self.answered += answered
        return Prompt(row.name, messages, columns), length

    def _raw(self, row: Row, columns: dict[str, object]) -> tuple[Prompt, int]:
        if self.system is not None:
            raise DataError(
                "a system message needs a chat template, and this prompt is raw text", where=row.name, hint="put it into the prompts"
            )
        text = str(row.fields["prompt"])
        length = len(self.chat.raw_prompt_ids(text))
        if not length:
            raise BadRow("the prompt is empty")
        self.raw += 1
        return Prompt(row.name, (), columns, raw_text=text), length

    def _length(self, row: Row, messages: tuple[Message, ...]) -> int:
        try:
            return len(self.chat.prompt_ids(messages, self.tools))
        except TemplateRefuses as error:
            raise BadRow(error.what) from None
        except DataError as error:
            raise DataError(error.what, where=row.name, hint=error.hint) from error

    def notes(self) -> list[str]:
        notes = []
        if self.wrapped:
            notes.append(f"{self.wrapped} text prompts became user messages of the chat template")
        if self.raw:
            why = "the tokenizer has no chat template" if not self.chat.has_template else "as asked"
            notes.append(f"{self.raw} prompts are raw text without a chat template ({why})")
        if self.answered:
            notes.append(f"{self.answered} conversations end in an assistant turn, which is left out of the prompt")
        return notes
