"""Reading, checking and tokenising conversations: rows per second beside `datasets.map`, and memory on a large file.

    python -m benchmarks.data --model smollm2-135m                      the ratio, interleaved, medians
    python -m benchmarks.data --model smollm2-135m --gigabytes 1        peak memory of one pass over a file of this size

`datasets` reads the same JSONL file and maps `apply_chat_template(..., tokenize=True)` with as many processes, which gives the ids of the
whole conversation; postgrad also finds the trained spans and audits every row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

WORDS = (
    *("the", "model", "reads", "a", "row", "and", "writes", "what", "it", "should", "say", "next", "because", "every", "token"),
    *("that", "is", "trained", "must", "be", "one", "was", "meant", "to"),
)


def write_rows(path: Path, size: int, seed: int = 0) -> int:
    """Conversations of one to three turns, about 200 tokens each, until the file has `size` bytes. Returns the rows."""
    rng = random.Random(seed)
    rows = written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            messages = []
            for _ in range(rng.randint(1, 3)):
                for role, words in (("user", rng.randint(5, 40)), ("assistant", rng.randint(20, 120))):
                    messages.append({"role": role, "content": " ".join(rng.choices(WORDS, k=words))})
            line = json.dumps({"messages": messages, "id": rows}) + "\n"
            file.write(line)
            written += len(line)
            rows += 1
    return rows


def ours(file: Path, model: str, processes: int) -> int:
    from postgrad.chat import ChatFormat
    from postgrad.data import Work, load_rows, prepare_sft
    from postgrad.models.loading import load_tokenizer

    tokenizer, stop_ids = load_tokenizer(model)
    work = Work(helpers=processes if processes > 1 else 0)
    data = prepare_sft(load_rows(file), ChatFormat(tokenizer, stop_ids=stop_ids), max_length=2048, work=work)
    return data.report.tokens


def theirs(file: Path, model: str, processes: int) -> int:
    import datasets

    from postgrad.models.loading import load_tokenizer

    datasets.disable_progress_bars()
    tokenizer, _ = load_tokenizer(model)
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)

        def encode(row: dict[str, Any]) -> dict[str, object]:
            encoded: Any = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
            return {"input_ids": encoded["input_ids"]}

        mapped = rows.map(encode, num_proc=processes if processes > 1 else None, remove_columns=rows.column_names)
        return sum(len(ids) for ids in mapped["input_ids"])


def timed(run: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


def ratio(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        rows = write_rows(file, int(args.megabytes * 2**20))
        for processes in (1, os.cpu_count() or 1):
            times: dict[str, list[float]] = {"postgrad": [], "datasets": []}
            for _ in range(args.repeats):
                a, ours_tokens = timed(partial(ours, file, args.model, processes))
                b, their_tokens = timed(partial(theirs, file, args.model, processes))
                if ours_tokens != their_tokens:
                    raise SystemExit(f"the two do not give the same tokens: {ours_tokens} and {their_tokens}")
                times["postgrad"].append(a)
                times["datasets"].append(b)
            median = {name: statistics.median(values) for name, values in times.items()}
            pairs = [b / a for a, b in zip(times["postgrad"], times["datasets"], strict=True)]
            print(
                f"{processes} processes, {rows} rows: postgrad {rows / median['postgrad']:.0f} rows/s, datasets.map "
                f"{rows / median['datasets']:.0f} rows/s, ratio {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
            )


def memory(args: argparse.Namespace) -> None:
    """Each measurement in a process of its own; the baseline is the libraries and the tokenizer without any rows."""
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "rows.jsonl", Path(folder) / "small.jsonl"
        rows = write_rows(file, int(args.gigabytes * 2**30))
        write_rows(small, 2**16)
        for name, path in (("baseline", small), (f"{args.gigabytes:g} GiB", file)):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.data", "--model", args.model, "--one", str(path), "--cache", folder],
                capture_output=True,
                text=True,
                check=True,
            )
            print(f"{name}: {done.stdout.strip()}")
        print(f"rows: {rows}")


def one(args: argparse.Namespace) -> None:
    from postgrad.chat import ChatFormat
    from postgrad.data import Cache, load_rows, prepare_sft
    from postgrad.models.loading import load_tokenizer

    tokenizer, stop_ids = load_tokenizer(args.model)
    chat = ChatFormat(tokenizer, stop_ids=stop_ids)
    for attempt in ("first pass", "again, cached"):
        start = time.perf_counter()
        data = prepare_sft(load_rows(args.one), chat, max_length=2048, cache=Cache(Path(args.cache) / "cache"))
        seconds = time.perf_counter() - start
        own, helpers = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        rate = len(data.rows) / seconds
        print(f"{attempt}: {len(data.rows)} rows in {seconds:.1f} s ({rate:.0f} rows/s), ", end="")
        print(f"peak {own:.0f} MiB, largest helper {helpers:.0f} MiB; ", end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--one")
    parser.add_argument("--cache")
    args = parser.parse_args()
    if args.one:
        one(args)
    elif args.gigabytes:
        memory(args)
    else:
        ratio(args)


if __name__ == "__main__":
    main()
