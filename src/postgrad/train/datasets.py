"""The rows a recipe names: one file or a mixture, and what is held out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, overload

import numpy as np

from postgrad.data import DataReport, RowSource, load_rows, mix, overlap
from postgrad.data.files import EXTENSIONS, extension
from postgrad.data.join import Join
from postgrad.errors import RecipeError
from postgrad.train.recipe import Data, Recipe, Source, TrainData
from postgrad.train.recipe import Join as JoinKeys

T = TypeVar("T")


PAIRS, HELDOUT = "pairs.jsonl", "heldout.jsonl"
"""What a run with `method: pairs` writes into its directory."""


def holds_pairs(folder: Path) -> bool:
    """Whether this is the directory of a finished run with `method: pairs`."""
    return (folder / PAIRS).is_file() and (folder / "resolved.json").is_file()


def data_file(name: str, base: Path, *, wanted: Literal["train", "eval"] = "train") -> str:
    """A path relative to the recipe; or what is wanted of a `pairs` run; or a hub id as it is.

    Raises `RecipeError` when held-out pairs are wanted of a run that held none out.
    """
    if (run := pairs_run(name, base)) is not None:
        return str(_pairs_file(run, wanted))
    path = base / name
    return str(path) if path.exists() or extension(Path(name)) in EXTENSIONS else name


def pairs_run(name: str, base: Path) -> Path | None:
    """The run directory that a data key names: relative to the recipe or, as every `run_dir` is, to the working directory."""
    return next((folder for folder in (base / name, Path(name)) if holds_pairs(folder)), None)


def _pairs_file(run: Path, wanted: Literal["train", "eval"]) -> Path:
    file = run / (PAIRS if wanted == "train" else HELDOUT)
    if not file.is_file():
        what = f"{run} holds no pairs out (it has no {HELDOUT})"
        raise RecipeError(what, key="data.eval", hint="run it again with heldout: 0.2, or give data.eval a share of the pairs")
    return file


def data_files(data: TrainData, base: Path) -> dict[str, Path]:
    """Every local file that the recipe's data section names; under a name that does not change when a run is moved."""
    wanted: list[tuple[str, Literal["train", "eval"]]] = [(source.file, "train") for source in _sources(data)]
    if isinstance(data, Data) and isinstance(data.eval, str):
        wanted.append((data.eval, "eval"))
    wanted += [(join.file, "train") for join in (data.join, *(source.join for source in _sources(data))) if join is not None]
    found: dict[str, Path] = {}
    for name, kind in wanted:
        file = Path(data_file(name, base, wanted=kind))
        run = pairs_run(name, base)
        found[name if run is None else f"{run.name}/{file.name}"] = file
    return {name: file for name, file in found.items() if file.is_file()}


def open_rows(recipe: Recipe, base: Path) -> tuple[RowSource, RowSource | None]:
    """(training rows, held-out rows)."""
    data = recipe.data
    parts = [
        load_rows(
            data_file(source.file, base),
            columns=source.columns or data.columns,
            max_bad=data.max_bad,
            weight=source.weight,
            join=_join(source.join or data.join, base),
        )
        for source in _sources(data)
    ]
    train = parts[0] if len(parts) == 1 else mix(parts, max_bad=data.max_bad)
    held = data.eval if isinstance(data, Data) else None
    if isinstance(held, float):
        return train.split_off(held, recipe.seed)
    return train, None if held is None else open_file(held, recipe, base, wanted="eval")


def open_file(name: str, recipe: Recipe, base: Path, *, wanted: Literal["train", "eval"] = "train") -> RowSource:
    """Another file, read as the recipe reads its own."""
    data = recipe.data
    return load_rows(data_file(name, base, wanted=wanted), columns=data.columns, max_bad=data.max_bad, join=_join(data.join, base))


def _join(join: JoinKeys | None, base: Path) -> Join | None:
    return None if join is None else Join(base / join.file, join.by)


@dataclass(frozen=True)
class Dataset(Generic[T]):
    """What a run trains on in one epoch, what is held out, and what the user is told about both."""

    train: Sequence[T]
    heldout: Sequence[T]
    notes: list[str]


def dataset(
    train: RowSource, heldout: RowSource | None, prepare: Callable[[RowSource], tuple[Sequence[T], DataReport]], *, seed: int
) -> Dataset[T]:
    """Prepares both sides and checks one against the other."""
    rows, report = prepare(train)
    notes = [*report.lines(), *_mixture_notes(train, report)]
    held: Sequence[T] = ()
    if heldout is not None:
        held, held_report = prepare(heldout)
        notes += [f"held out: {line}" for line in held_report.lines()]
        finding = overlap(report.tally, held_report.tally)
        notes += [] if finding is None else [f"{finding.severity}: {finding.message}: {', '.join(finding.rows[:3])}"]
    return Dataset(_one_epoch(rows, train, report, seed), held, notes)


def _one_epoch(rows: Sequence[T], source: RowSource, report: DataReport, seed: int) -> Sequence[T]:
    """The rows of one epoch: those of each part as often as its weight says, a fraction of them chosen by the seed."""
    if all(part.weight == 1.0 for part in source.parts):
        return rows
    chosen: list[int] = []
    start = 0
    for number, (part, size) in enumerate(zip(source.parts, report.tally.parts, strict=True)):
        whole, extra = divmod(_drawn(part.weight, size), size) if size else (0, 0)
        some = np.random.default_rng((seed & 0xFFFFFFFF, number)).permutation(size)[:extra]
        chosen += [start + index for _ in range(whole) for index in range(size)] + sorted(start + int(index) for index in some)
        start += size
    return Picked(rows, chosen)


def _drawn(weight: float, size: int) -> int:
    """Rows of a part in one epoch; at least one of a part that has any."""
    return max(1, round(weight * size)) if size else 0


def _mixture_notes(source: RowSource, report: DataReport) -> list[str]:
    if len(source.parts) == 1 and source.parts[0].weight == 1.0:
        return []
    drawn = [_drawn(part.weight, count) for part, count in zip(source.parts, report.tally.parts, strict=True)]
    total = sum(drawn)
    shares = (f"{part.name} {rows} rows, {100 * rows / total:.0f} %" for part, rows in zip(source.parts, drawn, strict=True))
    return [f"one epoch of the mixture: {', '.join(shares)}"]


class Picked(Sequence[T]):
    """Rows of another sequence by index."""

    def __init__(self, rows: Sequence[T], indices: Sequence[int]) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return Picked(self._rows, self._indices[index])
        return self._rows[self._indices[index]]


def _sources(data: TrainData) -> list[Source]:
    named = [data.train] if isinstance(data.train, str) else data.train
    return [Source(file=item) if isinstance(item, str) else item for item in named]
