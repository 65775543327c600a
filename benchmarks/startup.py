"""From nothing to the end of the first step: `postgrad train` beside a script that does the same with TRL. One row of 64 tokens.

Each repeat is a new process on both sides, so imports, model, data and the step itself are all in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import results
from benchmarks.ours import JOBS, common
from benchmarks.worker import Worker, environment


def compare(their_command: Sequence[str], dtype: str, threads: int, repeats: int) -> dict[str, Any]:
    """A `results.paired`; memory is left out."""
    steps: dict[str, list[dict[str, Any]]] = {"postgrad": [], "trl": []}
    for _ in range(repeats):
        ours, theirs = _ours(threads), _theirs(their_command, threads)
        results.check_equal(ours, theirs, dtype)
        steps["postgrad"].append(ours)
        steps["trl"].append(theirs)
    found = results.paired(results.side(steps["postgrad"]), results.side(steps["trl"]))
    return found | {"check": {name: {key: of[0][key] for key in ("loss", "grad_norm")} for name, of in steps.items()}}


def _theirs(command: Sequence[str], threads: int) -> dict[str, Any]:
    start = time.perf_counter()
    with Worker(command, threads, {}) as worker:
        answer = worker.ask("step")
        return answer | {"seconds": time.perf_counter() - start}


def _ours(threads: int) -> dict[str, Any]:
    job = JOBS["startup"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text(json.dumps(job.rows()[0]) + "\n", encoding="utf-8")
        (folder / "recipe.yaml").write_text(yaml.safe_dump(common("run") | dict(job.recipe)), encoding="utf-8")
        metrics = folder / "run" / "metrics.jsonl"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "postgrad", "train", "recipe.yaml", "max_steps=1"], cwd=folder, env=environment(threads),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while not (found := _first_step(metrics)) and process.poll() is None:
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        errors = process.communicate()[1]
        if not found:
            raise SystemExit(errors)
        return {"seconds": seconds, "parts": {}, "loss": found["loss"], "grad_norm": found["grad_norm"]}


def _first_step(file: Path) -> dict[str, Any] | None:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return next((record for record in records if record["step"] == 1), None)
