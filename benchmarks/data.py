"""Reading, checking and tokenising conversations: rows per second beside `datasets.map`, and memory on a large file.

    python -m benchmarks.data --model smollm2-135m                      the ratio, interleaved, medians
    python -m benchmarks.data --model smollm2-135m --gigabytes 1        peak memory of one pass over a file of this size

`datasets` reads the same JSONL file and maps `apply_chat_template(..., tokenize=True)` with as many processes, row by row and in batches of
1000 rows, which gives the ids of the whole conversation; postgrad also finds the trained spans and audits every row.
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
    work = Work(helpers=processes - 1)
    data = prepare_sft(load_rows(file), ChatFormat(tokenizer, stop_ids=stop_ids), max_length=2048, work=work)
    return data.report.tokens


def theirs(file: Path, model: str, processes: int, *, batched: bool = False) -> int:
    import datasets

    from postgrad.models.loading import load_tokenizer

    datasets.disable_progress_bars()
    tokenizer, _ = load_tokenizer(model)
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)

        def encode(row: dict[str, Any]) -> dict[str, object]:  # or rows, as a dict of lists
            encoded: Any = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
            return {"input_ids": encoded["input_ids"]}

        workers = processes if processes > 1 else None
        mapped = rows.map(encode, batched=batched, num_proc=workers, remove_columns=rows.column_names)
        return sum(len(ids) for ids in mapped["input_ids"])


def timed(run: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


READERS: dict[str, Callable[[Path, str, int], int]] = {
    "postgrad": ours,
    "datasets.map": theirs,
    "datasets.map(batched=True)": partial(theirs, batched=True),
}


def ratio(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "rows.jsonl", Path(folder) / "small.jsonl"
        rows = write_rows(file, int(args.megabytes * 2**20))
        write_rows(small, 2**16)
        for processes in (1, os.cpu_count() or 1):
            times: dict[str, list[float]] = {name: [] for name in READERS}
            for path in (small, *[file] * args.repeats):  # the small file is read first and not counted: it imports the libraries
                done = {name: timed(partial(read, path, args.model, processes)) for name, read in READERS.items()}
                if len({tokens for _, tokens in done.values()}) > 1:
                    raise SystemExit(f"not the same tokens: {', '.join(f'{name} {tokens}' for name, (_, tokens) in done.items())}")
                for name, (seconds, _) in done.items() if path == file else ():
                    times[name].append(seconds)
            print(f"{processes} {'process' if processes == 1 else 'processes'}, {rows} rows:")
            for name, taken in times.items():
                pairs = [b / a for a, b in zip(times["postgrad"], taken, strict=True)]
                spread = f"ratio {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})" if name != "postgrad" else ""
                print(f"  {name:<28}{rows / statistics.median(taken):>7.0f} rows/s  {spread}".rstrip())


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
