"""From measured steps to what is written: ratios, benchmarks/results.json, and the table in docs/benchmarks.md. Measures nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- table: written by make bench -->", "<!-- end of table -->"
TITLES = {
    "sft": "SFT step: 8 ragged rows, 2,020 tokens",
    "dpo": "DPO step: 4 pairs of 128 + 128, reference computed",
    "dpo_cached": "DPO step, reference cached",
    "reward": "reward model step: 4 pairs of 128 + 128",
    "grpo": "GRPO step: 2 prompts × 8, 256 + 128",
    "agent": "agent GRPO step: 3 turns, 16 rollouts",
    "decoding": "decoding: 16 rows × 128 tokens behind 256",
    "startup": "start of the program to the end of its first step",
}
"""The rows of the table, in order."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
"""How far loss and gradient norm of the two sides may be apart: relative, and absolute below 1."""
NOISY = 0.15
"""Cores kept busy by other processes above which a measurement is marked."""

Step = Mapping[str, Any]


class NotEqualError(Exception):
    """The two sides did not compute the same."""


def check_equal(ours: Step, theirs: Step, dtype: str) -> None:
    """Raises `NotEqualError` unless loss and gradient norm of one step agree."""
    for name in ("loss", "grad_norm"):
        if not abs(ours[name] - theirs[name]) <= TOLERANCE[dtype] * max(1.0, abs(theirs[name])):
            raise NotEqualError(f"{name} is {ours[name]:.6g} here and {theirs[name]:.6g} in TRL")


def side(steps: Sequence[Step], loaded_mib: float | None = None) -> dict[str, Any]:
    """One side's steps in short. Peak memory is over the loaded model; None where that was not measured.

    >>> side([{"seconds": 3.0, "peak_mib": 90, "parts": {}}, {"seconds": 1.0, "peak_mib": 110, "parts": {}}], 50)["median_s"]
    2.0
    """
    seconds = [step["seconds"] for step in steps]
    names = {name for step in steps for name in step["parts"]}
    return {
        "step_s": [round(value, 4) for value in seconds],
        "median_s": round(statistics.median(seconds), 4),
        "peak_mib": None if loaded_mib is None else round(max(step["peak_mib"] for step in steps) - loaded_mib, 1),
        "loaded_mib": None if loaded_mib is None else round(loaded_mib, 1),
        "parts_s": {name: round(statistics.median(step["parts"].get(name, 0.0) for step in steps), 4) for name in sorted(names)},
        "cpu_s": [round(step["cpu_s"], 3) for step in steps if "cpu_s" in step],
        "others": round(max((step.get("others", 0.0) for step in steps), default=0.0), 2),
    }


def paired(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """TRL ÷ postgrad of two `side`s that took turns: the median of the pairs' ratios of time, its range, and the ratio of the peaks."""
    ratios = [b / a for a, b in zip(ours["step_s"], theirs["step_s"], strict=True)]
    memory = None if ours["peak_mib"] is None else round(theirs["peak_mib"] / ours["peak_mib"], 2)
    return {
        "time_ratio": round(statistics.median(ratios), 2),
        "time_ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "memory_ratio": memory,
        "postgrad": dict(ours),
        "trl": dict(theirs),
    }


def limit_share(limits: Mapping[str, float], seconds: float) -> float:
    """Least seconds that the machine could need ÷ seconds taken.

    >>> limit_share({"gflops": 100.0, "gigabytes": 10.0, "flops": 2e11, "bytes": 1e10}, 4.0)
    0.5
    """
    least = max(limits["flops"] / limits["gflops"], limits.get("bytes", 0.0) / limits["gigabytes"]) / 1e9
    return round(least / seconds, 3)


def write(row: Mapping[str, Any], file: Path = RESULTS, page: Path = PAGE) -> None:
    """Put the row in the place of the earlier one of its method, and the table on the page."""
    rows = {old["method"]: old for old in read(file)} | {row["method"]: row}
    ordered = [rows[method] for method in TITLES if method in rows]
    file.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    replace_between(page, BEGIN, END, table(ordered))


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put `text` between the two marks; the prose around them stays."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def read(file: Path = RESULTS) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| | time | tuned | whole batch | memory | tuned | whole batch | of the limit | postgrad | TRL |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(row) for row in rows])


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["time_ratio_range"]
    ways = [row["tuned_allocator"] or {}, row["whole_batch"] or {}]
    notes = [note for note, applies in (("quick", row["quick"]), ("other processes ran", row["noisy"])) if applies]
    cells = [
        TITLES[row["method"]] + (f" ({', '.join(notes)})" if notes else ""),
        f"**{row['time_ratio']:.2f}** ({low:.2f}–{high:.2f})",
        *(_number(way.get("time_ratio")) for way in ways),
        _number(row["memory_ratio"]),
        *(_number(way.get("memory_ratio")) for way in ways),
        "–" if row["limit_share"] is None else f"{100 * row['limit_share']:.0f} %",
        _side(row["postgrad"]),
        _side(row["trl"]),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _side(measured: Mapping[str, Any]) -> str:
    memory = "" if measured["peak_mib"] is None else f", {measured['peak_mib']:,.0f} MiB"
    return f"{measured['median_s']:.2f} s{memory}"
