"""How postgrad's step time and peak memory grow: one size changes, all others stay. Writes benchmarks/scaling.json and docs/scaling.md.

    python -m benchmarks.scaling [--axis vocabulary] [--threads 2]

Every point is a process of its own: one step to warm up, one timed; memory is the peak over the loaded model. Ends with status 1 when one
of the `MUST_HOLD` does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.results import ROOT, replace_between
from benchmarks.worker import environment, peak_mib

RESULTS, PAGE = ROOT / "benchmarks" / "scaling.json", ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- tables: written by make scaling -->", "<!-- end of tables -->"
STEPS = 2
"""The last one is timed; before it there are no moments."""
COMPLETION, TURN = 64, 32
"""Tokens sampled per rollout, and per turn of an agent, in the points about GRPO."""


@dataclass(frozen=True)
class Axis:
    what: str
    unit: str
    values: tuple[int, ...]


AXES = {
    "batch": Axis("SFT, rows of 256 tokens", "rows", (4, 8, 16, 32)),
    "tokens": Axis("SFT, 2 rows of this length", "tokens a row", (256, 1024, 2048)),
    "vocabulary": Axis("SFT, 8 rows of 256 tokens, random weights of the model's shape", "entries", (49152, 98304, 196608)),
    "group": Axis(f"GRPO, 1 prompt of 256 tokens, {COMPLETION} sampled by each rollout", "rollouts of the prompt", (4, 8, 16)),
    "prompt": Axis(f"GRPO, 1 prompt, 8 rollouts, {COMPLETION} sampled by each", "tokens of the prompt", (128, 512, 1024)),
    "turns": Axis(f"agent GRPO, 1 question, 8 rollouts, {TURN} tokens sampled in each turn", "turns", (1, 2, 4)),
}


@dataclass(frozen=True)
class MustHold:
    """Memory of the point at `large` ÷ that of the point at `small` stays within `at_most`."""

    axis: str
    small: int
    large: int
    memory: str
    at_most: float


MUST_HOLD = (
    MustHold("batch", 8, 32, "peak_mib", 1.1),
    MustHold("vocabulary", 49152, 196608, "beyond_weights_mib", 1.3),
)


def job(axis: str, value: int, folder: Path) -> Any:
    """The `ours.Job` of a point."""
    from benchmarks.ours import DATA, GRPO_RECIPE, Job, forcing

    def sft(lengths: Sequence[tuple[int, int]], **more: Any) -> Job:
        recipe = {"method": "sft", "data": DATA | {"max_length": 4096}, "batch": {"rows": len(lengths)}, **more}
        return Job(recipe, partial(workloads.sft_rows, lengths, STEPS))

    def grpo(group: int, rows: Callable[[], Sequence[Any]], turns: int = 1, **rollout: Any) -> Job:
        tools = {"tools": ["workloads.py:multiply"], "chat_template": "qwen"} if "max_turns" in rollout else {}
        sizes = {"batch": {"prompts": 1}, "rollout": {"group_size": group, "max_tokens": COMPLETION} | rollout}
        return Job(GRPO_RECIPE | sizes | tools, rows, forcing(turns, COMPLETION, group))

    prompts = partial(workloads.prompt_rows, 1, steps=STEPS)
    jobs: Mapping[str, Callable[[], Job]] = {
        "batch": lambda: sft([(64, 192)] * value),
        "tokens": lambda: sft([(value // 4, value - value // 4)] * 2),
        "vocabulary": lambda: sft([(64, 192)] * 8, model=str(_with_vocabulary(value, folder))),
        "group": lambda: grpo(value, partial(prompts, 256)),
        "prompt": lambda: grpo(8, partial(prompts, value)),
        "turns": lambda: grpo(8, workloads.question_rows, value, max_tokens=TURN, max_turns=value),
    }
    return jobs[axis]()


def _with_vocabulary(size: int, folder: Path) -> Path:
    """The model's shape with random weights and a vocabulary of `size`; its tokenizer knows the first entries of it."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    from benchmarks.ours import MODEL
    from postgrad.models.locate import locate

    source = locate(MODEL).folder
    config = AutoConfig.from_pretrained(source, vocab_size=size)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def point(axis: str, value: int) -> dict[str, Any]:
    """Measured in this process."""
    from benchmarks.ours import Run

    with ExitStack() as stack:
        run = Run(job(axis, value, Path(stack.enter_context(tempfile.TemporaryDirectory()))), stack)
        for number in range(1, STEPS + 1):
            start = time.perf_counter()
            metrics = run.step(number)
            seconds = time.perf_counter() - start
        # The gradient and AdamW's two moments: any trainer of all weights has them, however it computes the loss.
        held = 3 * sum(weight.numel() * weight.element_size() for weight in run.model.model.parameters()) / 2**20
        peak = peak_mib() - run.loaded_mib
        return {
            "value": value, "step_s": round(seconds, 3), "train_s": round(metrics["time/train_s"], 3),
            "peak_mib": round(peak, 1), "beyond_weights_mib": round(peak - held, 1),
            "tokens": sum(len(row.token_ids) for row in run.rows), "trained_tokens": sum(row.trained_tokens for row in run.rows),
        }  # fmt: skip


def measure(axis: str, threads: int) -> list[dict[str, Any]]:
    points = []
    for value in AXES[axis].values:
        command = [sys.executable, "-m", "benchmarks.scaling", "--axis", axis, "--value", str(value)]
        done = subprocess.run(command, cwd=ROOT, env=environment(threads), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        points.append(json.loads(done.stdout.splitlines()[-1]))
        print(axis, points[-1], flush=True)
    return points


def judged(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[MustHold, float]]:
    """Each requirement whose axis was measured, and the ratio that was found."""
    ratios = []
    for rule in MUST_HOLD:
        memory = {item["value"]: item[rule.memory] for item in found.get(rule.axis, ())}
        if memory:
            ratios.append((rule, round(memory[rule.large] / memory[rule.small], 3)))
    return ratios


def tables(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    parts = []
    for name, axis in AXES.items():
        if name in found:
            head = f"| {axis.unit} | tokens | step | its training | peak | without gradient and moments |\n|---|---|---|---|---|---|"
            parts.append("\n".join([f"**{axis.what}**", "", head, *map(_line, found[name])]))
    for rule, ratio in judged(found):
        kept = "holds" if ratio <= rule.at_most else "**does not hold**"
        parts.append(f"{rule.axis}, {rule.small:,} → {rule.large:,}: memory × {ratio:.2f}, at most {rule.at_most}: {kept}.")
    return "\n\n".join(parts)


def _line(item: Mapping[str, Any]) -> str:
    seconds = f"{item['step_s']:.2f} s | {item['train_s']:.2f} s"
    return f"| {item['value']:,} | {item['tokens']:,} | {seconds} | {item['peak_mib']:,.0f} MiB | {item['beyond_weights_mib']:,.0f} MiB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axis", choices=AXES, action="append", help="left out = all")
    parser.add_argument("--value", type=int, help="measure this one point in this process")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.value is not None:
        print(json.dumps(point(args.axis[0], args.value)))
        return
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for axis in args.axis or AXES:
        found[axis] = measure(axis, args.threads)
    found = {axis: found[axis] for axis in AXES if axis in found}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    replace_between(PAGE, BEGIN, END, tables(found))
    broken = [rule for rule, ratio in judged(found) if ratio > rule.at_most]
    if broken:
        raise SystemExit(f"does not hold: {broken}")


if __name__ == "__main__":
    main()
