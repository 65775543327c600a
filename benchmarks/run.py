"""postgrad beside TRL: each a process of its own, loaded once, then taking turns step by step.

    python -m benchmarks.run --trl-python .venv-bench/bin/python [--method grpo] [--quick]

1. Both do one step on forced samples: loss and gradient norm must agree, else nothing is measured. It warms up too.
2. Timed steps in turn. What counts is the ratio of each pair of steps; medians of them are written, with their range.
3. The machine's limits, measured by our process; the share of them that our training reaches.
4. The same in other `WAYS` to run TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import results, startup
from benchmarks.worker import Worker

METHODS = tuple(results.TITLES)
REPEATS, QUICK_REPEATS = 3, 1
SLOW, SLOW_REPEATS = ("grpo", "agent"), 1
"""Methods with one warm-up step, and whose other ways are measured with fewer steps: a step of TRL takes a minute or two."""
ONE_WAY = ("decoding", "startup")
"""Methods in which the ways do not differ."""


@dataclass(frozen=True)
class Way:
    """How TRL is run: environment of its process, and options of `benchmarks.theirs`."""

    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


PLAIN = Way()
WAYS = {
    # Keeps what is freed, as `postgrad.models.allocator` does in its own process: much of TRL's time on a CPU is page faults.
    "tuned_allocator": Way({"MALLOC_TOP_PAD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483647"}),
    "whole_batch": Way(options=("--whole-batch",)),
}
TRAINED = {"grpo": "train", "agent": "train"}
"""The part of the step that the share of the limit is about, where it is not the whole step."""


def compare(method: str, args: argparse.Namespace, repeats: int, way: Way) -> dict[str, Any]:
    """A `results.paired` with what both found in the check, the limits, and what ran."""
    facts = model_facts()
    command = [args.trl_python, "-m", "benchmarks.theirs", method, "--model", facts["model"], "--dtype", facts["dtype"]]
    command += ["--config", args.trl_config, *way.options]
    if method == "startup":
        return startup.compare(command, facts["dtype"], args.threads, repeats) | {"limits": None, "dtype": facts["dtype"]}
    with ExitStack() as stack:
        theirs = stack.enter_context(Worker(command, args.threads, way.environment))
        mine = [sys.executable, "-m", "benchmarks.ours", method]
        if "template" in theirs.hello:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "template.jinja"
            file.write_text(theirs.hello["template"], encoding="utf-8")
            mine += ["--template", str(file)]
        ours = stack.enter_context(Worker(mine, args.threads, {}))
        sides = {"postgrad": ours, "trl": theirs}
        checked = {name: worker.ask("check") for name, worker in sides.items()}
        if method != "decoding":
            results.check_equal(checked["postgrad"], checked["trl"], facts["dtype"])
        if method not in (*SLOW, "decoding"):
            for worker in sides.values():
                worker.ask("check")
        steps: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, worker in sides.items():
                steps[name].append(worker.ask("step"))
        limits = ours.ask("limits")
    found = results.paired(*(results.side(steps[name], worker.hello["loaded_mib"]) for name, worker in sides.items()))
    check = {name: {key: step[key] for key in ("loss", "grad_norm", "tokens") if key in step} for name, step in checked.items()}
    versions = ours.hello["versions"] | theirs.hello["versions"]
    return found | {"check": check, "limits": limits, "versions": versions, "dtype": facts["dtype"]}


def model_facts() -> dict[str, str]:
    """Where the model lies and what this machine computes it in, asked of postgrad itself."""
    import torch

    from benchmarks.ours import MODEL
    from postgrad.models.dtype import resolve_autocast
    from postgrad.models.locate import locate

    autocast = resolve_autocast("auto", torch.device("cpu"))
    return {"model": str(locate(MODEL).folder), "dtype": "float32" if autocast is None else "bfloat16"}


def measure(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one method."""
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    found = compare(method, args, repeats, PLAIN)
    others: dict[str, Any] = dict.fromkeys(WAYS)
    for name in ways(method, args):
        again = compare(method, args, args.repeats or (SLOW_REPEATS if method in SLOW else REPEATS), WAYS[name])
        others[name] = {key: again[key] for key in ("time_ratio", "time_ratio_range", "memory_ratio", "postgrad", "trl")}
    ours, limits = found["postgrad"], found["limits"]
    seconds = ours["parts_s"][TRAINED[method]] if method in TRAINED else ours["median_s"]
    noisy = max(ours["others"], found["trl"]["others"]) > results.NOISY
    measured = {name: found.pop(name) for name in ("time_ratio", "time_ratio_range", "memory_ratio")}
    return {
        "method": method, **measured, "limit_share": None if limits is None else results.limit_share(limits, seconds),
        **others, "quick": args.quick, "noisy": noisy, "repeats": repeats, "threads": args.threads,
        "date": date.today().isoformat(), "machine": machine(), **found,
    }  # fmt: skip


def ways(method: str, args: argparse.Namespace) -> Sequence[str]:
    """The other ways to run TRL that are measured."""
    return () if args.quick or method in ONE_WAY else args.way or ("tuned_allocator",)


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), platform.processor())
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {gibibytes:.0f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="a Python that has trl")
    parser.add_argument("--method", choices=METHODS, action="append", help="left out = all")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} timed step, and TRL run in one way only")
    parser.add_argument("--way", choices=tuple(WAYS), action="append", help="also TRL run in this way; left out = tuned_allocator")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-config", default="{}", help="JSON: other settings for TRL's config")
    parser.add_argument("--print", action="store_true", dest="only_print", help="write no file")
    args = parser.parse_args()
    for method in args.method or METHODS:
        row = measure(method, args)
        if not args.only_print:
            results.write(row)
        print(results.table([row]).splitlines()[-1], flush=True)
        if args.only_print:
            print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
