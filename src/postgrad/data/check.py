"""The audit on its own: every row is read and encoded, nothing is kept, and no fault of the rows stops it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from postgrad.chat import ChatFormat
from postgrad.data.audit import gravest_first, overlap
from postgrad.data.examples import TextPrompts, effective_text_prompts
from postgrad.data.formats import Format, Method, default_method, require
from postgrad.data.limit import UNLIMITED, Limit, Overlong
from postgrad.data.pipeline import DEFAULT_WORK, Work, encode
from postgrad.data.preferences import PairEncoder, UnpairedEncoder, require_only
from postgrad.data.prompts import PromptEncoder
from postgrad.data.report import DataReport, report_of
from postgrad.data.rollouts import RolloutEncoder
from postgrad.data.sft import SFTEncoder, TrainOn
from postgrad.data.sources import RowSource
from postgrad.types import ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a file is read: what the recipe of a run says, or the command line."""

    method: Method | None = None
    max_length: int = 1024
    overlong: Overlong = "drop"
    train_on: TrainOn = "assistant"
    text_prompts: TextPrompts = "chat"
    tools: tuple[ToolSpec, ...] = ()
    system: str | None = None

    def method_for(self, format: Format) -> Method:
        """The method asked for, or the one that a file of this format is most likely meant for."""
        return self.method or default_method(format)

    def encoder(self, rows: RowSource, chat: ChatFormat) -> Any:
        """What encodes these rows. Raises `DataError` when the method does not train on them."""
        format = rows.parts[0].format
        if format == "rollouts":
            return RolloutEncoder(chat=chat, limit=Limit(UNLIMITED))
        method = self.method_for(format)
        require(format, method, where="--method")
        texts = effective_text_prompts(self.text_prompts, chat)
        limit = Limit(self.max_length, self.overlong)
        if method == "sft":
            return SFTEncoder(chat=chat, limit=limit, train_on=self.train_on, tools=self.tools, text_prompts=texts)
        if method in ("reward", "dpo"):
            require_only(rows, format)
            return (UnpairedEncoder if format == "unpaired" else PairEncoder)(chat=chat, limit=limit, text_prompts=texts)
        return PromptEncoder(chat=chat, limit=limit, system=self.system, tools=self.tools, text_prompts=texts)


def audit(
    rows: RowSource, chat: ChatFormat, reading: Reading, *, heldout: RowSource | None = None, work: Work = DEFAULT_WORK
) -> DataReport:
    """What a run would make of these rows, and everything worth knowing about them; `heldout` is compared with them.

    Raises `DataError` only where the file as a whole cannot be read.
    """
    report = _audit(rows, chat, reading, work)
    if heldout is None:
        return report
    other = overlap(report.tally, _audit(heldout, chat, reading, work).tally)
    return report if other is None else replace(report, findings=gravest_first((other, *report.findings)))


def _audit(rows: RowSource, chat: ChatFormat, reading: Reading, work: Work) -> DataReport:
    format = rows.parts[0].format
    encoder = reading.encoder(rows, chat)
    method = None if format == "rollouts" else reading.method_for(format)
    tally = encode(rows, method, encoder, lambda made: None, work=work, strict=False)
    return report_of(rows, tally, encoder)
