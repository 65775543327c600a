"""Rows to prompts for reinforcement learning: messages the model answers, and the other columns for the rewards.

A prompt is never cut. One that is longer than `max_prompt_tokens` is dropped and counted, or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from postgrad.chat import ChatFormat, Printed, TemplateRefuses
from postgrad.data.examples import Example, PromptExample, TextPrompts, effective_text_prompts, is_text_prompt, prompt_example
from postgrad.data.files import Row
from postgrad.data.formats import Format
from postgrad.data.limit import UNLIMITED, Limit
from postgrad.data.messages import BadRow
from postgrad.data.observe import observe_texts
from postgrad.data.pipeline import DEFAULT_WORK, Draft, Work, encode
from postgrad.data.report import DataReport, report_of
from postgrad.data.sources import RowSource
from postgrad.data.tally import Tally
from postgrad.errors import DataError
from postgrad.types import Message, Prompt, ToolSpec


@dataclass(frozen=True, slots=True)
class PromptData:
    prompts: list[Prompt]
    report: DataReport


def prepare_prompts(
    rows: RowSource,
    chat: ChatFormat,
    *,
    max_prompt_tokens: int | None = None,
    tools: Sequence[ToolSpec] = (),
    system: str | None = None,
    overlong: Literal["drop", "error"] = "drop",
    text_prompts: TextPrompts = "chat",
    work: Work = DEFAULT_WORK,
) -> PromptData:
    """Every row as a prompt. `system` is put before prompts that have no system message; `tools` count towards the length.

    Raises `DataError`: more rejected rows than `rows.max_bad`, an over-long prompt under `overlong="error"`, no prompt left.
    """
    limit = Limit(UNLIMITED if max_prompt_tokens is None else max_prompt_tokens, overlong)
    encoder = PromptEncoder(
        chat=chat, limit=limit, system=system, tools=tuple(tools), text_prompts=effective_text_prompts(text_prompts, chat)
    )
    prompts: list[Prompt] = []
    tally = encode(rows, "grpo", encoder, prompts.extend, work=work)
    report = report_of(rows, tally, encoder)
    report.verify()
    return PromptData(prompts, report)


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """One row to one prompt."""

    chat: ChatFormat
    limit: Limit
    system: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    text_prompts: TextPrompts = "chat"

    def draft(self, row: Row, format: Format) -> Draft[Prompt]:
        example = prompt_example(row, format, self.text_prompts)
        if example.raw_text is not None:
            prompt, ids = self._raw(row, example, example.raw_text)
            return Draft((), lambda _, tally: self._keep(row, format, example, prompt, ids, tally))
        prompt, printed = self._printed(row, example)
        return Draft([printed], lambda encoded, tally: self._keep(row, format, example, prompt, encoded[0].token_ids, tally))

    def _printed(self, row: Row, example: PromptExample) -> tuple[Prompt, Printed]:
        messages = example.messages
        if self.system is not None and messages[0].role != "system":
            messages = (Message("system", self.system), *messages)
        shown = {tool.name for tool in self.tools}
        prompt = Prompt(row.name, messages, example.columns, tools=tuple(tool for tool in example.tools if tool.name not in shown))
        try:
            return prompt, self.chat.print_prompt(messages, (*self.tools, *prompt.tools))
        except TemplateRefuses as error:
            raise BadRow(error.what) from None
        except DataError as error:
            raise DataError(error.what, where=row.name, hint=error.hint) from error

    def _raw(self, row: Row, example: PromptExample, text: str) -> tuple[Prompt, tuple[int, ...]]:
        if self.system is not None:
            raise DataError(
                "a system message needs a chat template, and this prompt is raw text", where=row.name, hint="put it into the prompts"
            )
        return Prompt(row.name, (), example.columns, raw_text=text), self.chat.raw_prompt_ids(text)

    def _keep(self, row: Row, format: Format, example: PromptExample, prompt: Prompt, ids: tuple[int, ...], tally: Tally) -> list[Prompt]:
        tally.lengths[len(ids)] += 1
        if len(ids) > self.limit.max_length:
            self._too_long(row, len(ids), tally)
            return []
        tally.kept += 1
        tally.tokens += len(ids)
        tally.kept_lengths[len(ids)] += 1
        tally.see(row.place, ids, ids)
        tally.counts["raw"] += prompt.raw_text is not None
        tally.counts["wrapped"] += prompt.raw_text is None and is_text_prompt(row, format)
        tally.counts["answered"] += example.answered
        raw = None if prompt.raw_text is None else (prompt.raw_text, "")
        observe_texts(tally, self.chat, row, Example(prompt.messages, example.tools, raw))
        if prompt.tools:
            tally.mark("row_tools", row.name)
        return [prompt]

    def _too_long(self, row: Row, length: int, tally: Tally) -> None:
        if self.limit.overlong == "error":
            what = f"the prompt has {length} tokens, the limit is {self.limit.max_length}"
            raise DataError(what, where=row.name, hint="raise data.max_length, or choose overlong: drop")
        tally.dropped["too_long"] += 1
        tally.need(length)
