"""Decoding speed: `LocalSampler` against `generate` of transformers, on the same weights, interleaved in one process.

    python benchmarks/bench_sampler.py                     # 72 and 16 rows, prompt 150, 48 tokens, bf16
    python benchmarks/bench_sampler.py --dtype float32 --rows 16
    python benchmarks/bench_sampler.py --no-baseline       # only our own figures

Groups of 8 rows share a prompt. Nothing stops early, so both write the same number of tokens. Only ratios within one run count:
a busy neighbour slows everything several times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from postgrad.models.sampler import LocalSampler
from postgrad.protocols import SampleKey, SamplingParams, TurnRequest

GROUP = 8


def the_model() -> Any:
    """SmolLM2-135M if it is installed, else random weights of its shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from postgrad.errors import PostgradError
    from postgrad.models.loading import load

    try:
        return load("smollm2-135m").model
    except PostgradError:
        shape = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
        config = LlamaConfig(**shape, vocab_size=49152, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2)
        return AutoModelForCausalLM.from_config(config).eval()


def prompts(rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 40000, (rows // GROUP, length), generator=generator).tolist()


def ours(model: Any, dtype: torch.dtype | None, rows: int, length: int, tokens: int) -> Callable[[int], int]:
    sampler = LocalSampler(model, decode=str, dtype=dtype)
    sampler.sync()

    def run(step: int) -> int:
        requests = [
            TurnRequest(SampleKey(0, step, prompt, sample), 0, tuple(ids), tokens)
            for prompt, ids in enumerate(prompts(rows, length))
            for sample in range(GROUP)
        ]
        answers = sampler.generate(requests, SamplingParams())
        sampler.forget()
        return sum(len(answer.token_ids) for answer in answers)

    return run


def theirs(model: Any, rows: int, length: int, tokens: int) -> Callable[[int], int]:
    ids = torch.tensor(prompts(rows, length)).repeat_interleave(GROUP, 0)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 2, "use_cache": True}

    def run(step: int) -> int:
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return int(whole.numel() - ids.numel())

    return run


def medians(runs: dict[str, Callable[[int], int]], rounds: int) -> dict[str, float]:
    """Tokens per second of each, interleaved; the first round warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            tokens = run(step)
            if step:
                speeds[name].append(tokens / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 72])
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "live"], default="bfloat16")
    parser.add_argument("--no-baseline", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = None if arguments.dtype == "live" else getattr(torch, arguments.dtype)
    model = the_model()
    baseline = model if dtype in (None, torch.float32) else type(model)(model.config).to(dtype).eval()
    for rows in arguments.rows:
        shape = (rows, arguments.prompt, arguments.tokens)
        runs = {"LocalSampler": ours(model, dtype, *shape)}
        if not arguments.no_baseline:
            runs["transformers generate"] = theirs(baseline, *shape)
        speeds = medians(runs, arguments.rounds)
        figures = {name: round(value, 1) for name, value in speeds.items()}
        ratio = None if arguments.no_baseline else round(speeds["LocalSampler"] / speeds["transformers generate"], 2)
        print(
            json.dumps({"rows": rows, "dtype": arguments.dtype, "threads": arguments.threads, "tokens/s": figures, "ratio": ratio}),
            flush=True,
        )


if __name__ == "__main__":
    main()
