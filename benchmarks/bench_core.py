"""Seconds and peak memory of one forward and backward pass: `LocalEngine` against the stock transformers model on padded rows.

    python benchmarks/bench_core.py [--model smollm2-135m] [--workload grpo|sft] [--dtype bfloat16|float32] [--repeats 3]

The two run alternately in one process, so a busy machine slows both; read the ratio. Stock means: rows padded on the right in
micro-batches of 4, the model's own attention and head, log-softmax in fp32. The losses are printed and must agree.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from postgrad.models.engine import LocalEngine
from postgrad.models.loading import load
from postgrad.protocols import Rows
from postgrad.types import TrainRow

SFT_LENGTHS = [(24, 40), (40, 88), (60, 60), (30, 170), (100, 156), (60, 260), (120, 300), (200, 312)]


def grpo_rows(rng: random.Random, *, prompts: int = 9, group: int = 8, prompt: int = 150, completion: int = 45) -> list[TrainRow]:
    """`prompts` groups whose completions are between half and one and a half times `completion` tokens long."""
    rows = []
    for number in range(prompts):
        prefix = [rng.randrange(100, 40_000) for _ in range(prompt)]
        for _ in range(group):
            own = [rng.randrange(100, 40_000) for _ in range(rng.randrange(completion // 2, completion + completion // 2))]
            trained = (False,) * prompt + (True,) * len(own)
            rows.append(TrainRow((*prefix, *own), trained, group=number, shared_prefix=prompt, per_row={"advantage": rng.gauss(0, 1)}))
    return rows


def sft_rows(rng: random.Random) -> list[TrainRow]:
    rows = []
    for prompt, completion in SFT_LENGTHS:
        ids = tuple(rng.randrange(100, 40_000) for _ in range(prompt + completion))
        rows.append(TrainRow(ids, (False,) * prompt + (True,) * completion, per_row={"advantage": 1.0}))
    return rows


def stock(model: torch.nn.Module, rows: list[TrainRow], dtype: torch.dtype | None, total: int, size: int = 4) -> float:
    """The plain computation: padded rows, all logits, log-softmax in fp32."""
    loss_sum = 0.0
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = max(len(row.token_ids) for row in part)
        ids = torch.tensor([[*row.token_ids, *[0] * (width - len(row.token_ids))] for row in part])
        seen = torch.tensor([[1] * len(row.token_ids) + [0] * (width - len(row.token_ids)) for row in part])
        mask = torch.tensor([[*row.trained, *[False] * (width - len(row.trained))] for row in part])[:, 1:]
        advantage = torch.tensor([row.per_row["advantage"] for row in part])[:, None]
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(logprobs * advantage * mask).sum() / total
        loss.backward()
        loss_sum += loss.item()
    return loss_sum


def peak_megabytes(run: Callable[[], object]) -> float:
    """Peak resident memory above what was resident before (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workload", choices=("grpo", "sft"), default="grpo")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens_per_micro_batch")
    parser.add_argument("--prompts", type=int, default=9, help="groups of 8 in the grpo workload")
    parser.add_argument("--only", choices=("stock", "packed"))
    arguments = parser.parse_args()

    torch.set_num_threads(2)
    rng = random.Random(0)
    rows = grpo_rows(rng, prompts=arguments.prompts) if arguments.workload == "grpo" else sft_rows(rng)
    total = sum(row.trained_tokens for row in rows)
    loaded = load(arguments.model, dtype=arguments.dtype)
    model = loaded.model
    engine = LocalEngine(model, autocast=loaded.autocast, tokens_per_micro_batch=arguments.tokens)

    def loss(logprobs: Tensor, batch: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprobs.sum(1) * batch.per_row["advantage"]).sum() / total, {}

    ways = {"stock": lambda: stock(model, rows, loaded.autocast, total), "packed": lambda: engine.forward_backward(rows, loss).loss}
    ways = {name: way for name, way in ways.items() if arguments.only in (None, name)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory, losses = {}, {}
    for repeat in range(arguments.repeats + 1):
        for name, way in ways.items():
            model.zero_grad()
            started = time.perf_counter()
            if repeat == 0:  # warm-up: measures memory, not time
                memory[name] = peak_megabytes(lambda name=name, way=way: losses.__setitem__(name, way()))
            else:
                way()
                seconds[name].append(time.perf_counter() - started)
    print(f"{arguments.workload} {arguments.dtype}: {len(rows)} rows, {sum(len(row.token_ids) for row in rows)} tokens, {total} trained")
    for name in ways:
        times = sorted(seconds[name])
        print(f"{name:7} loss {losses[name]:.5f}  {statistics.median(times):6.2f} s (from {times[0]:.2f})  {memory[name]:6.0f} MB")
    if len(ways) == 2:
        ratio = statistics.median(seconds["stock"]) / statistics.median(seconds["packed"])
        print(f"{ratio:.2f} times faster, memory divided by {memory['stock'] / memory['packed']:.1f}")


if __name__ == "__main__":
    main()
