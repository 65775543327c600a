"""Rows to preference data: pairs of answers to one prompt, or single answers with a label.

The prompt's ids are those that inference would see, the same for both sides. An answer is encoded apart from its prompt and ends with its
end token; a header belongs to the prompt. Too long is what the longer side makes too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from postgrad.chat import ChatFormat, EncodedConversation, Printed, TemplateRefuses, TemplateRewritesHistory
from postgrad.data.cache import Cache
from postgrad.data.encoded import EncodedRow, encoded_row, read_name, text_array
from postgrad.data.examples import Example, PairExample, TextPrompts, effective_text_prompts, pair_example, unpaired_example
from postgrad.data.files import Row
from postgrad.data.formats import Format, require
from postgrad.data.limit import Limit, Overlong
from postgrad.data.messages import BadRow
from postgrad.data.observe import observe_row, observe_texts
from postgrad.data.pipeline import DEFAULT_WORK, Draft, Work, encode_all
from postgrad.data.report import DataReport
from postgrad.data.sources import RowSource
from postgrad.data.table import Record, View
from postgrad.data.tally import Tally
from postgrad.errors import DataError


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's ids after its prompt; `scored`: the tokens an assistant wrote (all of them, unless the answer spans several turns)."""

    token_ids: tuple[int, ...]
    scored: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`name` is file:line. Both answers continue `prompt_ids`; `margin` is the column of that name."""

    name: str
    prompt_ids: tuple[int, ...]
    chosen: Answer
    rejected: Answer
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """One answer, and whether it is a desirable one."""

    name: str
    prompt_ids: tuple[int, ...]
    answer: Answer
    label: bool


@dataclass(frozen=True, slots=True)
class PreferenceData:
    pairs: Sequence[Pair]
    report: DataReport


@dataclass(frozen=True, slots=True)
class UnpairedData:
    answers: Sequence[LabelledAnswer]
    report: DataReport


def prepare_preferences(
    rows: RowSource, chat: ChatFormat, *, max_length: int, overlong: Overlong = "drop", text_prompts: TextPrompts = "chat",
    work: Work = DEFAULT_WORK, cache: Cache | None = None,
) -> PreferenceData:  # fmt: skip
    """Every pair as ids, each side with its prompt within `max_length` tokens. Raises `DataError` as `prepare_sft` does."""
    require_only(rows, "preference")
    encoder = PairEncoder(chat=chat, limit=Limit(max_length, overlong), text_prompts=effective_text_prompts(text_prompts, chat))
    table, report = encode_all(rows, "dpo", encoder, work=work, cache=cache)
    report.verify()
    return PreferenceData(View(table, read_pair), report)


def prepare_unpaired(
    rows: RowSource, chat: ChatFormat, *, max_length: int, overlong: Overlong = "drop", text_prompts: TextPrompts = "chat",
    work: Work = DEFAULT_WORK, cache: Cache | None = None,
) -> UnpairedData:  # fmt: skip
    """Every labelled answer as ids. Raises `DataError` as `prepare_sft` does."""
    require_only(rows, "unpaired")
    encoder = UnpairedEncoder(chat=chat, limit=Limit(max_length, overlong), text_prompts=effective_text_prompts(text_prompts, chat))
    table, report = encode_all(rows, "dpo", encoder, work=work, cache=cache)
    report.verify()
    return UnpairedData(View(table, read_labelled), report)


def require_only(rows: RowSource, format: Format) -> None:
    """Pairs and single labelled answers are trained with different losses, so one set never holds both."""
    other = next((part for part in rows.parts if part.format != format), None)
    if other is not None:
        require(other.format, "dpo", where=other.name)
        raise DataError(f"expected {format} rows, and these are {other.format} rows", where=other.name, hint="train them apart")


@dataclass(frozen=True, kw_only=True)
class _AnswerEncoder:
    chat: ChatFormat
    limit: Limit
    text_prompts: TextPrompts = "chat"

    def printed(self, row: Row, example: Example) -> Printed:
        """Prompt and answer as one text."""
        try:
            if example.raw is not None:
                return self.chat.print_raw(*example.raw)
            alone = _answers(example) == {len(example.messages) - 1}
            whole = self.chat.print_last_turn if alone else self.chat.print_conversation
            return whole(example.messages, example.tools)
        except TemplateRewritesHistory:
            raise BadRow("an answer of several turns, and the template prints earlier turns differently later") from None
        except TemplateRefuses as error:
            raise BadRow(error.what) from None
        except DataError as error:
            raise DataError(error.what, where=row.name, hint=error.hint) from error


def _side(row: Row, example: Example, conversation: EncodedConversation) -> EncodedRow:
    """Prompt and answer in one row, with the answer's own tokens as the trained ones; ends with the last of them."""
    encoded = encoded_row(row.name, conversation, _answers(example))
    if not encoded.trained_tokens:
        raise BadRow("the answer has no token to score")
    return encoded.until_trained()


def _answers(example: Example) -> set[int]:
    """Indices of the assistant's messages in the answer."""
    if example.raw is not None:
        return {0}
    messages = example.messages
    return {index for index in range(example.answer_from, len(messages)) if messages[index].role == "assistant"}


@dataclass(frozen=True, kw_only=True)
class PairEncoder(_AnswerEncoder):
    """One row to one record."""

    columns: ClassVar[Mapping[str, str]] = {
        "name": "uint8", "prompt": "int32", "chosen": "int32", "rejected": "int32", "chosen_scored": "uint8", "rejected_scored": "uint8",
        "margin": "float64",
    }  # fmt: skip

    def draft(self, row: Row, format: Format) -> Draft[Record]:
        pair = pair_example(row, self.text_prompts)
        printed = [self.printed(row, side) for side in (pair.chosen, pair.rejected)]
        return Draft(printed, partial(self._keep, row, pair))

    def _keep(self, row: Row, pair: PairExample, encoded: Sequence[EncodedConversation], tally: Tally) -> list[Record]:
        made = [_side(row, side, conversation) for side, conversation in zip((pair.chosen, pair.rejected), encoded, strict=True)]
        prompts = [side.ids[: side.prompt_tokens] for side in made]
        if not np.array_equal(prompts[0], prompts[1]):
            raise BadRow("the template prints the prompt of the two sides differently")
        if np.array_equal(made[0].ids, made[1].ids):
            raise BadRow("chosen and rejected are equal once the template has printed them")
        tally.lengths[max(map(len, made))] += 1
        kept = _limited(self.limit, made, tally)
        if kept is None:
            return []
        observe_texts(tally, self.chat, row, pair.chosen, pair.rejected)
        tally.counts["raw"] += pair.chosen.raw is not None
        _count_pair(tally, *(len(side) - len(prompts[0]) for side in made))
        observe_row(tally, self.chat, row, made, kept)
        start = len(prompts[0])
        record = {
            "name": text_array(row.name),
            "prompt": prompts[0],
            "margin": np.asarray([] if pair.margin is None else [pair.margin]),
        }
        for name, side in zip(("chosen", "rejected"), kept, strict=True):
            record |= {name: side.ids[start:], f"{name}_scored": np.asarray(side.trained[start:])}
        return [record]


@dataclass(frozen=True, kw_only=True)
class UnpairedEncoder(_AnswerEncoder):
    """One row to one record."""

    columns: ClassVar[Mapping[str, str]] = {"name": "uint8", "prompt": "int32", "answer": "int32", "scored": "uint8", "label": "uint8"}

    def draft(self, row: Row, format: Format) -> Draft[Record]:
        example, label = unpaired_example(row, self.text_prompts)
        return Draft([self.printed(row, example)], partial(self._keep, row, example, label))

    def _keep(self, row: Row, example: Example, label: bool, encoded: Sequence[EncodedConversation], tally: Tally) -> list[Record]:
        made = [_side(row, example, encoded[0])]
        tally.lengths[len(made[0])] += 1
        kept = _limited(self.limit, made, tally)
        if kept is None:
            return []
        observe_texts(tally, self.chat, row, example)
        tally.counts["raw"] += example.raw is not None
        tally.counts["desirable" if label else "undesirable"] += 1
        observe_row(tally, self.chat, row, made, kept)
        start, side = made[0].prompt_tokens, kept[0]
        return [{
            "name": text_array(row.name), "prompt": side.ids[:start], "answer": side.ids[start:],
            "scored": np.asarray(side.trained[start:]), "label": np.asarray([label]),
        }]  # fmt: skip


def _limited(limit: Limit, sides: Sequence[EncodedRow], tally: Tally) -> list[EncodedRow] | None:
    """All sides within the limit, or None: a pair stays whole or goes whole, and counts once."""
    counted = Tally()
    kept = [side for row in sides for side in limit.apply([row], counted)]
    if counted.dropped:
        tally.dropped["too_long"] += 1
        tally.counts["hopeless"] += min(counted.counts["hopeless"], 1)
        tally.need(max(len(side) if limit.overlong == "drop" else side.prompt_tokens + 1 for side in sides))
        return None
    if len(kept) == 2 and np.array_equal(kept[0].ids, kept[1].ids):
        tally.dropped["equal once cut"] += 1
        return None
    tally.cut += min(counted.cut, 1)
    return kept


def _count_pair(tally: Tally, chosen: int, rejected: int) -> None:
    tally.counts["pairs"] += 1
    tally.counts["chosen_longer"] += chosen > rejected
    tally.counts["chosen_shorter"] += chosen < rejected
    tally.counts["chosen_tokens"] += chosen
    tally.counts["rejected_tokens"] += rejected


def read_pair(record: Record) -> Pair:
    margin = record["margin"].tolist()
    chosen, rejected = _answer(record, "chosen"), _answer(record, "rejected")
    return Pair(read_name(record), tuple(record["prompt"].tolist()), chosen, rejected, margin[0] if margin else None)


def read_labelled(record: Record) -> LabelledAnswer:
    answer = Answer(tuple(record["answer"].tolist()), tuple(bool(flag) for flag in record["scored"].tolist()))
    return LabelledAnswer(read_name(record), tuple(record["prompt"].tolist()), answer, bool(record["label"][0]))


def _answer(record: Record, name: str) -> Answer:
    return Answer(tuple(record[name].tolist()), tuple(bool(flag) for flag in record[f"{name}_scored"].tolist()))
