"""A DPO step and a reward-model step beside TRL: same rows, same model, interleaved processes, medians; and the memory each needs.

    python benchmarks/bench_preferences.py --method dpo --repeats 3            reference computed in every step
    python benchmarks/bench_preferences.py --method dpo --cached               reference log-probs computed before
    python benchmarks/bench_preferences.py --method reward

Run it with a Python that has both postgrad and trl (`pip install 'postgrad[conformance]'`). Each measurement is a process of its own, so
that memory is its own: the peak while training over what the loaded model took. Both compute in bf16 with fp32 weights.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 4
WORDS = (
    *("the", "model", "reads", "a", "row", "and", "writes", "what", "it", "should", "say", "next", "because"),
    *("every", "token", "that", "is", "trained", "must", "be", "one"),
)


def pairs(count: int, words: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts and answers of `words` words each, which SmolLM2's tokenizer reads as about one token a word."""
    rng = random.Random(seed)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=words))

    def turn(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text()}]

    return [{"prompt": turn("user"), "chosen": turn("assistant"), "rejected": turn("assistant")} for _ in range(count)]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(method: str, rows: list[dict[str, Any]], batch: int, *, cached: bool) -> tuple[list[float], float]:
    from postgrad.train.build import build
    from postgrad.train.loop import SilentReporter
    from postgrad.train.recipe_file import parse_recipe
    from postgrad.train.run_directory import RunDirectory

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = {"method": method, "model": "smollm2-135m", "run_dir": name, "max_steps": STEPS, "dtype": "bfloat16",
                  "data": {"train": "pairs.jsonl"}, "batch": {"pairs": batch}, "optimizer": {"learning_rate": 1e-6}}  # fmt: skip
        if method == "dpo":
            recipe["loss"] = {"reference": "precomputed" if cached else "live"}
        with build(parse_recipe(recipe), folder, RunDirectory(folder), SilentReporter()) as built:
            loaded = peak_mib()
            times = [_timed(built.method.step, step) for step in range(1, STEPS + 1)]
        return times, peak_mib() - loaded


def _timed(step: Any, number: int) -> float:
    start = time.perf_counter()
    step(number)
    return time.perf_counter() - start


def theirs(method: str, rows: list[dict[str, Any]], batch: int, *, cached: bool) -> tuple[list[float], float]:
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

    from postgrad.models.locate import locate

    folder = str(locate("smollm2-135m").folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = AutoModelForCausalLM if method == "dpo" else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype="float32", **({} if method == "dpo" else {"num_labels": 1}))
    model.config.pad_token_id = tokenizer.pad_token_id
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as out:
        common = {"output_dir": out, "per_device_train_batch_size": batch, "max_steps": STEPS, "bf16": True, "use_cpu": True,
                  "gradient_checkpointing": False, "learning_rate": 1e-6, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
                  "logging_steps": 1000}  # fmt: skip
        config = trl.DPOConfig(**common, precompute_ref_log_probs=cached) if method == "dpo" else trl.RewardConfig(**common)
        trainer_kind = trl.DPOTrainer if method == "dpo" else trl.RewardTrainer
        trainer = trainer_kind(
            model=model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Clock()]
        )
        loaded = peak_mib()
        trainer.train()
    return times, peak_mib() - loaded


def one(args: argparse.Namespace) -> None:
    rows = pairs(args.pairs * STEPS, args.words)
    times, memory = (ours if args.side == "postgrad" else theirs)(args.method, rows, args.pairs, cached=args.cached)
    print(json.dumps({"step_s": statistics.median(times[1:]), "memory_mib": memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=["dpo", "reward"], default="dpo")
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=["postgrad", "trl"])
    args = parser.parse_args()
    if args.side:
        one(args)
        return
    results: dict[str, list[dict[str, float]]] = {"postgrad": [], "trl": []}
    flags = ["--method", args.method, "--pairs", str(args.pairs), "--words", str(args.words), *(["--cached"] if args.cached else [])]
    for _ in range(args.repeats):
        for side, collected in results.items():
            done = subprocess.run([sys.executable, __file__, *flags, "--side", side], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            collected.append(json.loads(done.stdout.splitlines()[-1]))
    ratios = [trl["step_s"] / own["step_s"] for own, trl in zip(results["postgrad"], results["trl"], strict=True)]
    memory = {side: statistics.median(item["memory_mib"] for item in collected) for side, collected in results.items()}
    step = {side: statistics.median(item["step_s"] for item in collected) for side, collected in results.items()}
    title = f"{args.method}{' cached' if args.cached else ''}, {args.pairs} pairs of {args.words} + {args.words} words"
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{title}: step postgrad {step['postgrad']:.2f} s, trl {step['trl']:.2f} s, time ratio {spread}")
    ratio = memory["trl"] / memory["postgrad"]
    print(f"memory over the loaded model: {memory['postgrad']:.0f} and {memory['trl']:.0f} MiB, ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
