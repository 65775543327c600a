"""The result of `rewards check`, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from postgrad.rewards.check.finding import Finding
from postgrad.rewards.check.mutate import LAYERS
from postgrad.rewards.check.scale import Line
from postgrad.rewards.check.scope import Matrix
from postgrad.rewards.check.scoreboard import Standing
from postgrad.rewards.load import LoadedReward


@dataclass(frozen=True)
class Report:
    """rows: good answers that each reward's contract was tested on (fewer for a slow one). tried: those with mutants and lazy strategies.
    costs: seconds of a typical call, per reward. Board, matrix and sheet are missing when no reward could be called."""

    rewards: tuple[LoadedReward, ...]
    findings: tuple[Finding, ...]
    rows: tuple[int, ...]
    tried: int
    board: tuple[Standing, ...] = ()
    matrix: Matrix | None = None
    sheet: tuple[Line, ...] = ()
    costs: tuple[float, ...] = ()
    seconds: float = 0.0

    @property
    def critical(self) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.severity == "critical")

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": "critical" if self.critical else "passed",
            "rows": max(self.rows),
            "tried": self.tried,
            "seconds": round(self.seconds, 3),
            "rewards": [_reward_json(*known) for known in zip(self.rewards, self.rows, self.costs, strict=True)],
            "findings": [found.to_json() for found in self.findings],
            "scoreboard": [_finite(asdict(standing)) for standing in self.board],
            "matrix": None if self.matrix is None else self.matrix.moved,
            "scale": [_finite(asdict(line)) for line in self.sheet],
        }

    def lines(self) -> Iterator[str]:
        """The whole report, readable without colour."""
        count = f"{len(self.rewards)} reward{'s' if len(self.rewards) > 1 else ''}"
        yield f"{count} on {max(self.rows)} good answers, {self.tried} of them changed and cheated; {self.seconds:.1f} s"
        for reward, rows, cost in zip(self.rewards, self.rows, self.costs, strict=True):
            if rows < max(self.rows):
                yield f"{reward.name} takes {1000 * cost:.0f} ms a call and was tried on {rows} of them"
        yield from self.matrix_lines()
        yield from self._board_lines()
        yield from self._sheet_lines()
        yield ""
        for found in self.findings:
            yield from _finding_lines(found)
        yield "verdict: " + (f"{len(self.critical)} critical findings" if self.critical else "nothing critical")

    def matrix_lines(self) -> Iterator[str]:
        if self.matrix is None:
            return
        yield ""
        yield "scope: how far each reward moves when one layer of a good answer changes (share of its range; * declared scope; – not there)"
        cells = [["", *LAYERS]]
        for reward in self.rewards:
            moved = self.matrix.moved.get(reward.name)
            if moved is not None:
                cells.append([reward.name, *(_share(moved[layer]) + ("*" if layer == reward.scope else "") for layer in LAYERS)])
        yield from table(cells)

    def _board_lines(self) -> Iterator[str]:
        if not self.board:
            return
        names = [line.name for line in self.sheet]
        yield ""
        yield "lazy strategies: what each earns on average (of good: share of the good answer's outcome or total)"
        cells = [["", *names, "total", "of good"]]
        cells += [[s.name, *map(_number, s.by_reward), _number(s.total), _share(s.ratio)] for s in self.board]
        yield from table(cells)

    def _sheet_lines(self) -> Iterator[str]:
        if not self.sheet:
            return
        yield ""
        yield "scale: how far each reward can move the total"
        cells = [["", "role", "weight", "range", "moves"]]
        for line in self.sheet:
            if math.isnan(line.moves):
                cells.append([line.name, line.role, f"{line.weight:g}", "none seen", "–"])
                continue
            limits = f"{line.range[0]:g} … {line.range[1]:g}" + (" (seen)" if line.observed else "")
            cells.append([line.name, line.role, f"{line.weight:g}", limits, f"{line.moves:g}"])
        yield from table(cells)


def _finding_lines(found: Finding) -> Iterator[str]:
    about = f"{found.reward}: " if found.reward else ""
    yield f"{found.severity}: {found.id}: {about}{found.message}"
    if found.rows:
        yield f"    rows: {', '.join(found.rows)}"
    if found.hint:
        yield f"    hint: {found.hint}"


def table(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *padded[1:]])


def _share(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.0%}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _reward_json(reward: LoadedReward, rows: int, cost: float) -> dict[str, Any]:
    facts = {name: getattr(reward, name) for name in ("name", "where", "role", "scope", "claim", "range", "weight")}
    return {**facts, "rows": rows, "seconds_per_call": round(cost, 6)}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN, where something could not be said, as null."""
    return {name: _null(value) for name, value in values.items()}


def _null(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_null(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
