"""What became of every row: the numbers and findings that a run prints before its first step, and `postgrad data check` in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from postgrad.data.audit import Finding, findings_of
from postgrad.data.files import Rejected
from postgrad.data.limit import UNLIMITED, Limit
from postgrad.data.sources import RowSource, check_rejected
from postgrad.data.tally import Tally
from postgrad.errors import DataError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens per kept row."""

    shortest: int = 0
    median: int = 0
    p95: int = 0
    longest: int = 0


def lengths_of(counts: Mapping[int, int]) -> Lengths:
    """Nearest-rank quantiles of a {length: rows} histogram.

    >>> lengths_of({5: 1, 1: 1, 3: 1})
    Lengths(shortest=1, median=3, p95=5, longest=5)
    """
    if not counts:
        return Lengths()
    total = sum(counts.values())
    ordered = sorted(counts.items())

    def at(share: float) -> int:
        rank, seen = min(total - 1, int(share * total)), 0
        return next(length for length, rows in ordered if (seen := seen + rows) > rank)

    return Lengths(ordered[0][0], at(0.5), at(0.95), ordered[-1][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """rows = kept + sum of `dropped` (reason: count). `rejected` names the first bad rows among the dropped.

    cut:             kept rows whose end was cut off at max_length
    trained_tokens:  tokens that the loss predicts; tokens: all tokens of kept rows
    histogram:       tokens per row before the limit -> rows
    answers, ends:   trained answers, and how many of them end with a trained end token
    fail:            why a run cannot train on this; None = it can
    """

    source: str
    format: str
    rows: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    cut: int = 0
    trained_tokens: int = 0
    tokens: int = 0
    lengths: Lengths = field(default_factory=Lengths)
    histogram: Mapping[int, int] = field(default_factory=dict)
    max_length: int | None = None
    answers: int = 0
    ends: int = 0
    rejected: tuple[Rejected, ...] = ()
    findings: tuple[Finding, ...] = ()
    columns: tuple[str, ...] = ()
    fail: DataError | None = None
    tally: Tally = field(default_factory=Tally, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(finding.message for finding in self.findings)

    @property
    def passed(self) -> bool:
        return self.fail is None and not any(finding.severity == "critical" for finding in self.findings)

    def length_bins(self, count: int = 8) -> list[tuple[int, int, int]]:
        """(shortest, longest, rows) of equal steps from the shortest row to the limit, which is the end of a step, and one beyond it."""
        if not self.histogram:
            return []
        longest = max(self.histogram)
        limit = self.max_length if self.max_length is not None and self.max_length < longest else longest
        first = min(*self.histogram, limit)
        width = -(-(limit - first + 1) // count)
        ends = [*range(first + width - 1, limit, width), limit]
        ends += [longest] if longest > limit else []
        starts = [first, *(end + 1 for end in ends[:-1])]
        rows = [
            sum(number for length, number in self.histogram.items() if low <= length <= high)
            for low, high in zip(starts, ends, strict=True)
        ]
        return list(zip(starts, ends, rows, strict=True))

    def verify(self) -> None:
        """Raises `DataError` when nothing should be trained on this."""
        if self.fail is not None:
            raise self.fail
        for finding in self.findings:
            if finding.severity == "critical":
                raise DataError(finding.message, where=finding.rows[0] if finding.rows else self.source, hint=finding.hint)

    def lines(self) -> list[str]:
        """Three lines: rows, tokens, what was found (the last only when there is something to note)."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        rows = f"data: {self.source}, {self.format}: {self.rows} rows, {self.kept} kept, {self.rows - self.kept} dropped"
        cut = f", {self.cut} cut" if self.cut else ""
        notes = self.notes
        return [
            rows + (f" ({dropped})" if dropped else "") + cut,
            self._token_line(),
            *(["found: " + "; ".join(notes)] if notes else []),
        ]

    def _token_line(self) -> str:
        lengths = self.lengths
        spread = f"row length {lengths.shortest} to {lengths.longest}, median {lengths.median}, 95 % up to {lengths.p95}"
        if not self.trained_tokens:
            return f"tokens: {self.tokens}; {spread}"
        share = 100 * self.trained_tokens / self.tokens
        return f"tokens: {self.tokens}, of which {self.trained_tokens} trained ({share:.1f} %); {spread}"


def report_of(source: RowSource, tally: Tally, encoder: Any) -> DataReport:
    """The report of one pass over `source` with `encoder`, whose chat format and limit it names."""
    limit: Limit = encoder.limit
    dropped: Counter[str] = Counter(tally.dropped)
    if tally.rejected_count:
        dropped["rejected"] = tally.rejected_count
    kept = tally.rows - sum(dropped.values())
    return DataReport(
        source=source.name,
        format=source.format,
        rows=tally.rows,
        kept=kept,
        dropped=dict(dropped),
        cut=tally.cut,
        trained_tokens=tally.trained,
        tokens=tally.tokens,
        lengths=lengths_of(tally.kept_lengths),
        histogram=tally.lengths,
        max_length=None if limit.max_length == UNLIMITED else limit.max_length,
        answers=tally.answers,
        ends=tally.ends,
        rejected=tuple(tally.rejected),
        findings=findings_of(source, tally, kept, encoder.chat),
        columns=tuple(sorted(tally.columns)),
        fail=_failure(source, tally, dropped, kept, limit),
        tally=tally,
    )


def _failure(source: RowSource, tally: Tally, dropped: Mapping[str, int], kept: int, limit: Limit) -> DataError | None:
    try:
        check_rejected(tally.rejected, tally.rejected_count, source.max_bad)
    except DataError as error:
        return error
    return None if kept else _nothing_left(source.name, tally, dropped, limit)


def _nothing_left(name: str, tally: Tally, dropped: Mapping[str, int], limit: Limit) -> DataError:
    """Says why, and which limit would do."""
    too_long = tally.dropped["too_long"]
    if not tally.rows:
        return DataError("no row is left on this side of the split", where=name, hint="choose another share or seed, or name a file")
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if reason != "too_long")
    if not too_long:
        return DataError(f"no row is left to train on: {reasons} of {tally.rows}", where=name, hint="see `postgrad data show`")
    if limit.overlong == "cut" or tally.counts["hopeless"] >= too_long:
        what = f"{too_long} of {tally.rows} rows have no completion token inside max_length={limit.max_length}"
    else:
        what = f"{too_long} of {tally.rows} rows are longer than max_length={limit.max_length}"
    what += f"; the shortest needs {tally.needed}" + (f"; the other rows: {reasons}" if reasons else "")
    return DataError(what, where=name, hint=f"set max_length to {tally.needed} or more")
