"""What became of every row: the numbers that a run prints before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from postgrad.data.files import Rejected


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens per kept row."""

    shortest: int = 0
    median: int = 0
    p95: int = 0
    longest: int = 0


def lengths_of(values: Sequence[int]) -> Lengths:
    """Nearest-rank quantiles.

    >>> lengths_of([5, 1, 3])
    Lengths(shortest=1, median=3, p95=5, longest=5)
    """
    if not values:
        return Lengths()
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95)]
    return Lengths(ordered[0], at[0], at[1], ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """rows = kept + sum of `dropped` (reason: count). `rejected` names the bad rows among the dropped.

    cut:             kept rows whose end was cut off at max_length
    trained_tokens:  tokens that the loss predicts; tokens: all tokens of kept rows
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
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Three lines: rows, tokens, notes (the last only when there is something to note)."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        rows = f"data: {self.source}, {self.format}: {self.rows} rows, {self.kept} kept, {self.rows - self.kept} dropped"
        cut = f", {self.cut} cut" if self.cut else ""
        notes = list(self.notes) + [f"rejected {row.name}: {row.reason}" for row in self.rejected[:3]]
        return [
            rows + (f" ({dropped})" if dropped else "") + cut,
            self._token_line(),
            *(["notes: " + "; ".join(notes)] if notes else []),
        ]

    def _token_line(self) -> str:
        lengths = self.lengths
        spread = f"row length {lengths.shortest} to {lengths.longest}, median {lengths.median}, 95 % up to {lengths.p95}"
        if not self.trained_tokens:
            return f"tokens: {self.tokens}; {spread}"
        share = 100 * self.trained_tokens / self.tokens
        return f"tokens: {self.tokens}, of which {self.trained_tokens} trained ({share:.1f} %); {spread}"
