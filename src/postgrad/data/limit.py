"""The over-long policy: what happens to a row with more than `max_length` tokens, and the count of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from postgrad.data.encoded import EncodedRow
from postgrad.data.tally import Tally
from postgrad.errors import DataError

Overlong = Literal["drop", "cut", "error"]
UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Limit:
    """drop: the row is left out. cut: its end is, when a trained token stays; a cut answer gets no end token. error: `DataError`."""

    max_length: int
    overlong: Overlong = "drop"

    def apply(self, rows: Sequence[EncodedRow], tally: Tally) -> list[EncodedRow]:
        """The rows of one source row that stay. The source row counts as dropped when none of them stays."""
        limited = [self._limit(row, tally) for row in rows]
        kept = [row for row in limited if row is not None]
        if rows and not kept:
            tally.dropped["too_long"] += 1
        tally.cut += any(after is not None and after is not before for before, after in zip(rows, limited, strict=True))
        if kept:
            tally.counts["dropped_turns"] += len(rows) - len(kept)
        return kept

    def _limit(self, row: EncodedRow, tally: Tally) -> EncodedRow | None:
        if len(row) <= self.max_length:
            return row
        if self.overlong == "error":
            what = f"the row has {len(row)} tokens, max_length is {self.max_length}"
            raise DataError(what, where=row.name, hint="raise max_length, or choose overlong: drop or cut")
        answer_inside = row.prompt_tokens < self.max_length
        tally.counts["hopeless"] += not answer_inside
        tally.need(row.prompt_tokens + 1 if self.overlong == "cut" else len(row))
        return row.first(self.max_length) if self.overlong == "cut" and answer_inside else None
