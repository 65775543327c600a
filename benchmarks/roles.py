"""Memory of PPO's four roles on one base beside GRPO on the same batch: each a process of its own, on the real model with LoRA.

    python -m benchmarks.roles

Both sample 48 rollouts of the demo's task and update once on all of them. PPO has an actor, a critic, a reference and a reward model, all
on the base of the actor; GRPO has the policy and the same reward functions. Peak memory is that of the whole process, libraries and model
included; what each step's time went to is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 2
SPREAD = "def spread(completion):\n    return len(completion) % 7 / 7\n"
"""Differs within every group, so that GRPO trains on all rollouts, as PPO does."""
METHODS = ("grpo", "ppo")


def recipe(method: str, folder: Path) -> dict[str, Any]:
    common: dict[str, Any] = {
        "method": method, "model": "smollm2-135m", "run_dir": str(folder / method), "max_steps": STEPS,
        "adapter": {"kind": "lora", "rank": 16}, "data": {"train": "train.jsonl", "shuffle": False}, "tools": ["tools.py:calculator"],
        "optimizer": {"learning_rate": 1e-5}, "rewards": [{"use": "spread.py:spread"}],
    }  # fmt: skip
    rollout = {"max_tokens": 48, "max_total_tokens": 68, "max_turns": 2}
    if method == "grpo":
        return common | {"batch": {"prompts": 6}, "rollout": rollout | {"group_size": 8}}
    common["rewards"].append({"use": "reward_model", "weight": 0.1})
    return common | {"batch": {"prompts": 6, "epochs": 1}, "rollout": rollout | {"group_size": 8}, "loss": {"kl_coef": 0.05}}


def write_reward_model(folder: Path) -> None:
    """A reward model with an adapter on the base; what it thinks does not matter here."""
    from postgrad.models.lora import Lora
    from postgrad.models.saving import save
    from postgrad.models.scalar import load_scalar

    save(load_scalar("smollm2-135m", adapter=Lora(rank=16), seed=0), folder)


def measure(method: str, folder: Path) -> dict[str, Any]:
    from postgrad.train.build import build
    from postgrad.train.loop import SilentReporter
    from postgrad.train.recipe import Pipeline
    from postgrad.train.recipe_file import parse_recipe
    from postgrad.train.run_directory import RunDirectory

    (folder / method).mkdir()
    parsed = parse_recipe(recipe(method, folder))
    assert not isinstance(parsed, Pipeline)
    with build(parsed, folder, RunDirectory(folder / method), SilentReporter()) as built:
        started = time.perf_counter()
        parts: dict[str, float] = {}
        for step in range(1, STEPS + 1):
            for name, value in built.method.step(step).items():
                if name.startswith("time/"):
                    parts[name[5:-2]] = parts.get(name[5:-2], 0.0) + value
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_mib": peak, "step_s": seconds / STEPS, "parts": {name: value / STEPS for name, value in parts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.method:
        print(json.dumps(measure(args.method, args.folder)))
        return
    from postgrad.demo import task

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task.write(folder, train=48, heldout=12, unseen=6, warm=8)
        (folder / "spread.py").write_text(SPREAD)
        write_reward_model(folder / "reward_model")
        found = {}
        for method in METHODS:
            command = [sys.executable, "-m", "benchmarks.roles", "--method", method, "--folder", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[method] = json.loads(done.stdout.splitlines()[-1])
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found[method]["parts"].items())
            print(f"{method}: peak {found[method]['peak_mib']:.0f} MiB, step {found[method]['step_s']:.1f} s ({parts})")
        print(f"memory of PPO over GRPO: {found['ppo']['peak_mib'] / found['grpo']['peak_mib']:.2f}")


if __name__ == "__main__":
    main()
