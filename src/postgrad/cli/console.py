"""What the command line prints: progress of a run, tables, errors. Data goes to stdout, everything else to stderr.

With a terminal a live bar; without one (a pipe, CI) plain lines that can be read and searched. NO_COLOR is honoured by rich.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from postgrad.errors import PostgradError

stderr = Console(stderr=True, highlight=False, soft_wrap=True)
stdout = Console(highlight=False, soft_wrap=True)

SHORT_NAMES = {
    "completions/mean_length": "tokens",
    "tools/call_frequency": "calls",
    "learning_rate": "lr",
    "grad_norm": "grad",
    "trained_tokens": "trained",
}


def print_error(error: PostgradError) -> None:
    """`error: where: what`, then the hint; readable without colour."""
    stderr.print(f"error: {error}", markup=False, style="bold red")
    if error.hint:
        stderr.print()
        stderr.print(f"hint: {error.hint}", markup=False)


@contextmanager
def from_option(name: str) -> Iterator[None]:
    """What the block finds wrong was said on the command line: the option takes the place of the recipe's key."""
    try:
        yield
    except PostgradError as error:
        error.key = name
        raise


def number(value: float) -> str:
    """Four significant digits, integers as they are."""
    if float(value).is_integer() and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def headline(metrics: Mapping[str, float], names: Sequence[str]) -> str:
    """The numbers that matter on one line: `reward 0.52  correct 0.31  …`."""
    shown = [
        (SHORT_NAMES.get(name, name.removeprefix("rewards/").removesuffix("/mean")), metrics[name]) for name in names if name in metrics
    ]
    return "  ".join(f"{name} {number(value)}" for name, value in shown)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def timing(metrics: Mapping[str, float]) -> str:
    """A step's seconds, and where most of them went.

    >>> timing({"time/step_s": 9.8, "time/rollout_s": 6.0, "time/train_s": 3.1, "time/reward_s": 0.2})
    '9.8 s (rollout 6.0, train 3.1)'
    """
    whole = metrics.get("time/step_s", 0.0)
    parts = {name[5:-2]: value for name, value in metrics.items() if name.startswith("time/") and name != "time/step_s"}
    largest = sorted((name for name in parts if parts[name] >= 0.05 * whole), key=parts.__getitem__, reverse=True)[:4]
    shown = ", ".join(f"{name} {parts[name]:.1f}" for name in largest)
    return f"{whole:.1f} s ({shown})" if len(largest) > 1 else f"{whole:.1f} s"


class PlainReporter:
    """One line per event and step."""

    def __init__(self, console: Console = stderr) -> None:
        self.console = console
        self.names: Sequence[str] = ()
        self.total = 0
        self._clock: tuple[int, float] | None = None

    def started(self, *, name: str, total_steps: int, first_step: int, headline: Sequence[str], notes: Sequence[str]) -> None:
        self.names, self.total = headline, total_steps
        self._clock = (first_step, time.monotonic())
        self._line(f"{name}: {total_steps} steps" + (f", continuing after step {first_step}" if first_step else ""))
        for note in notes:
            self.note(note)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        first, start = self._clock or (0, time.monotonic())
        remaining = (time.monotonic() - start) / max(1, step - first) * (self.total - step)
        self._line(f"step {step}/{self.total}  {headline(metrics, self.names)}  {timing(metrics)}  eta {duration(remaining)}")
        self._evaluation(metrics)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        self._evaluation(metrics)

    def _evaluation(self, metrics: Mapping[str, float]) -> None:
        shown = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if shown:
            self._line("  held out: " + "  ".join(f"{name} {number(value)}" for name, value in shown.items()))

    def working(self, what: str, count: int) -> None:
        """Progress inside a step; lines would drown the log, so only a terminal shows it."""

    def note(self, text: str) -> None:
        self._line(f"note: {text}")

    def finished(self, *, folder: Path) -> None:
        self._line(f"{'model' if folder.is_dir() else 'pairs'} written to {folder}")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False)


class LiveReporter(PlainReporter):
    """The same lines for events, and a live bar with the current numbers and what is being done."""

    def __init__(self, console: Console = stderr) -> None:
        super().__init__(console)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"), console=console, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("", total=None, numbers="", visible=False)
        self.numbers = ""

    def started(self, *, name: str, total_steps: int, first_step: int, headline: Sequence[str], notes: Sequence[str]) -> None:
        super().started(name=name, total_steps=total_steps, first_step=first_step, headline=headline, notes=notes)
        self.progress.reset(self.task, total=total_steps, completed=first_step, description=name, visible=True)
        self.progress.start()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.numbers = headline(metrics, self.names)
        self.progress.update(self.task, completed=step, numbers=self.numbers)
        super().stepped(step, metrics)

    def working(self, what: str, count: int) -> None:
        self.progress.update(self.task, numbers=f"{self.numbers}  [{what}: {count}]")

    def finished(self, *, folder: Path) -> None:
        self.close()
        super().finished(folder=folder)

    def close(self) -> None:
        self.progress.update(self.task, visible=False)
        self.progress.stop()


def reporter() -> PlainReporter:
    return LiveReporter() if sys.stderr.isatty() else PlainReporter()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    built = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        built.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        built.add_row(*row)
    return built


@contextmanager
def working(what: str) -> Iterator[Callable[[float, int], None]]:
    """Progress of one pass over rows: a bar on a terminal (gone at the end), nothing without one."""
    if not stderr.is_terminal:
        yield lambda share, rows: None
        return
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.fields[rows]} rows"), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task(what, total=1.0, rows=0)
        yield lambda share, rows: progress.update(task, completed=share, rows=rows)
