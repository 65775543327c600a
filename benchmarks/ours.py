"""postgrad's side of a comparison: a recipe, built as `postgrad train` builds it, and its steps one at a time.

    python -m benchmarks.ours METHOD [--template FILE]

The policy samples as ever, with two changes that TRL's side has too: a turn is never ended by the model itself but has its full length, and
in agent runs the first turns are replaced, after they were sampled, by a call of the tool. Our cache then holds other tokens than the
rollout, so that the replaced turns are read again: work that a run whose model calls its tools does not have.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import flops, workloads
from benchmarks.worker import Channel, Meter, peak_mib, resident_mib, restart_peak
from postgrad.chat import ChatFormat
from postgrad.models.attention import scalar_head
from postgrad.models.engine import LocalEngine
from postgrad.models.loading import LanguageModel, load
from postgrad.models.lora import base_of
from postgrad.models.scalar import is_scalar, load_scalar
from postgrad.protocols import (
    Answer,
    BackwardResult,
    BatchStream,
    Completion,
    Finish,
    Sampler,
    SamplingParams,
    Stream,
    TurnRequest,
)
from postgrad.train import setup
from postgrad.train.build import build
from postgrad.train.grpo import GRPO
from postgrad.train.loop import SilentReporter
from postgrad.train.recipe import Pipeline
from postgrad.train.recipe_file import parse_recipe
from postgrad.train.run_directory import RunDirectory
from postgrad.types import TrainRow

MODEL = "smollm2-135m"

DATA = {"train": "rows.jsonl", "text_prompts": "raw", "shuffle": False}
Forced = Callable[[TurnRequest, bool], str | None]
"""(request, whether nothing is sampled) -> the text in the place of what is sampled; None = it stays."""


def forcing(turns: int, longest: int, group: int = workloads.GROUP) -> Forced:
    """Every turn but the last becomes a call; the last becomes a text of at most `longest` tokens where nothing is sampled."""

    def forced(request: TurnRequest, check: bool) -> str | None:
        if request.turn < turns - 1:
            return workloads.CALL
        return workloads.forced_text(request.key.prompt * group + request.key.sample, longest) if check else None

    return forced


@dataclass(frozen=True)
class Job:
    """A recipe without what all have in common, its rows, and, where it samples, what its policy is made to say."""

    recipe: Mapping[str, Any]
    rows: Callable[[], Sequence[Any]]
    forced: Forced | None = None


_PAIRS = {"data": DATA, "batch": {"pairs": workloads.PAIRS}}
GRPO_RECIPE = {
    "method": "grpo", "data": DATA, "batch": {"prompts": workloads.PROMPTS}, "rewards": [{"use": "workloads.py:spread"}],
    "rollout": {"group_size": workloads.GROUP, "max_tokens": workloads.COMPLETION}, "loss": {"old_logprobs": "policy"},
}  # fmt: skip
_AGENT = GRPO_RECIPE | {
    "rollout": {"group_size": workloads.GROUP, "max_tokens": workloads.AGENT_TURN, "max_turns": workloads.AGENT_TURNS},
    "tools": ["workloads.py:multiply"],
}
JOBS = {
    "sft": Job({"method": "sft", "data": DATA, "batch": {"rows": len(workloads.SFT_LENGTHS)}}, workloads.sft_rows),
    "dpo": Job(_PAIRS | {"method": "dpo"}, workloads.pair_rows),
    "dpo_cached": Job(_PAIRS | {"method": "dpo", "loss": {"reference": "precomputed"}}, workloads.pair_rows),
    "reward": Job(_PAIRS | {"method": "reward"}, workloads.pair_rows),
    "grpo": Job(GRPO_RECIPE, workloads.prompt_rows, forcing(1, workloads.COMPLETION)),
    "agent": Job(_AGENT, workloads.question_rows, forcing(workloads.AGENT_TURNS, workloads.AGENT_TURN)),
    "decoding": Job(GRPO_RECIPE, workloads.prompt_rows, forcing(1, workloads.COMPLETION)),
    "startup": Job({"method": "sft", "data": DATA, "batch": {"rows": 1}}, workloads.sft_rows),
}


def common(run_dir: str) -> dict[str, Any]:
    return {"model": MODEL, "run_dir": run_dir, "max_steps": workloads.STEPS, "optimizer": {"learning_rate": 1e-6}}


class ForcedSampler:
    """The real sampler, made to do the benchmark's work: full turns, and what `forced` says, with an `end` token, in the place of some.

    check: do not even sample.
    """

    def __init__(self, sampler: Sampler, chat: ChatFormat, forced: Forced, end: int) -> None:
        self._sampler, self._chat, self._forced, self._end = sampler, chat, forced, end
        self.check = False

    @contextmanager
    def stream(self, params: SamplingParams, *, starts: Sequence[Sequence[int]] = ()) -> Iterator[Stream]:
        if self.check:
            yield BatchStream(lambda requests: [self._replaced(request, None) for request in requests])
            return
        with self._sampler.stream(replace(params, stop_ids=frozenset()), starts=starts) as real:
            yield _ForcedStream(real, self._replaced)

    def generate(self, requests: Sequence[TurnRequest], params: SamplingParams) -> list[Completion]:
        raise NotImplementedError("rollouts are collected through `stream`")

    def forget(self) -> None:
        self._sampler.forget()

    def _replaced(self, request: TurnRequest, sampled: Completion | None) -> Completion:
        text = self._forced(request, self.check)
        if text is None:
            assert sampled is not None
            return sampled
        ids = (*self._chat.raw_prompt_ids(text), self._end)
        return Completion(ids, (-1.0,) * len(ids), Finish.STOP_ID)


class _ForcedStream:
    def __init__(self, real: Stream, replaced: Callable[[TurnRequest, Completion], Completion]) -> None:
        self._real, self._replaced = real, replaced

    @property
    def busy(self) -> bool:
        return self._real.busy

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        self._real.submit(requests)

    def step(self) -> list[Answer]:
        return [(request, self._replaced(request, turn) if isinstance(turn, Completion) else turn) for request, turn in self._real.step()]


class Run:
    """A method that is ready to step.

    loaded_mib: resident memory when its model had been loaded. rows: what the last step trained on.
    """

    def __init__(self, job: Job, stack: ExitStack, **changes: Any) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in job.rows()))
        (folder / "workloads.py").write_text(Path(workloads.__file__).read_text())
        parsed = parse_recipe(common(str(folder)) | dict(job.recipe) | changes)
        assert not isinstance(parsed, Pipeline)
        self.loaded_mib = 0.0
        for name, real in (("load", load), ("load_scalar", load_scalar)):
            stack.enter_context(patch.object(setup, name, self._noting(real)))
        built = stack.enter_context(build(parsed, folder, RunDirectory(folder), SilentReporter()))
        self.method, self.model = built.method, built.policy.model
        self.sampler: ForcedSampler | None = None
        if isinstance(built.method, GRPO):
            assert job.forced is not None
            parts = built.method.parts
            end = self.model.tokenizer.eos_token_id
            assert isinstance(end, int)
            self.sampler = ForcedSampler(parts.sampling.sampler, built.policy.chat, job.forced, end)
            self.method = GRPO(built.method.recipe, replace(parts, sampling=replace(parts.sampling, sampler=self.sampler)))
        self.rows: Sequence[TrainRow] = ()
        self._note_rows()

    def _noting(self, load: Callable[..., LanguageModel]) -> Callable[..., LanguageModel]:
        """`load`, and then what memory is taken: before a reference is copied from the model."""

        def noted(*arguments: Any, **options: Any) -> LanguageModel:
            loaded = load(*arguments, **options)
            if is_scalar(loaded.model):
                torch.manual_seed(0)
                torch.nn.init.normal_(scalar_head(loaded.model)[0], std=0.02)
            self.loaded_mib = resident_mib()
            restart_peak()
            return loaded

        return noted

    def _note_rows(self) -> None:
        engine = self.method.engine
        assert isinstance(engine, LocalEngine)
        real = engine.forward_backward

        def noted(rows: Sequence[TrainRow], *arguments: Any, **options: Any) -> BackwardResult:
            self.rows = rows
            return real(rows, *arguments, **options)

        engine.forward_backward = noted  # type: ignore[method-assign]

    def step(self, number: int, *, check: bool = False) -> dict[str, float]:
        if self.sampler is not None:
            self.sampler.check = check
        return self.method.step(number)

    def decode(self, number: int) -> dict[str, float]:
        """The rollouts of a step alone, a copy of the weights included where the sampler makes one."""
        assert isinstance(self.method, GRPO)
        first = (number - 1) * workloads.PROMPTS
        groups = self.method.parts.sampling.groups(number, range(first, first + workloads.PROMPTS))
        return {"tokens": float(sum(rollout.sampled_tokens for group in groups for rollout in group.rollouts))}

    def limits(self, method: str) -> dict[str, float]:
        """What this machine can do, and what the last step could not do without."""
        shape = flops.Shape.of(base_of(self.model.model).config.get_text_config())
        dtype = self.model.autocast or torch.float32
        found = {"gflops": flops.gflops(dtype), "gigabytes": flops.gigabytes()}
        if method == "decoding":
            sizes = (workloads.PROMPT, workloads.COMPLETION, workloads.GROUP, workloads.PROMPTS)
            operations, read = flops.decoding(shape, *sizes, dtype.itemsize)
            return found | {"flops": operations, "bytes": read}
        needed = flops.training(shape, self.rows, head=method != "reward")
        return found | {"flops": needed + (flops.reading(shape, self.rows) if method == "dpo" else 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=JOBS)
    parser.add_argument("--template", type=Path, help="chat template of the agent's conversations")
    args = parser.parse_args()
    channel = Channel()
    changes = {} if args.template is None else {"chat_template": args.template.read_text(encoding="utf-8")}
    with ExitStack() as stack:
        run = Run(JOBS[args.method], stack, **changes)
        dtype = "float32" if run.model.autocast is None else "bfloat16"
        versions = {name: metadata.version(name) for name in ("postgrad", "torch", "transformers")}
        channel.send({"loaded_mib": run.loaded_mib, "dtype": dtype, "model": str(run.model.folder), "versions": versions})
        number = 0
        while True:
            command = channel.receive()
            if command == "limits":
                channel.send(run.limits(args.method))
                continue
            number += 1
            meter = Meter()
            metrics = run.decode(number) if args.method == "decoding" else run.step(number, check=command == "check")
            answer = meter.read()
            parts = {key.removeprefix("time/").removesuffix("_s"): value for key, value in metrics.items() if key.startswith("time/")}
            kept = {key: metrics[key] for key in ("loss", "grad_norm", "tokens") if key in metrics}
            channel.send(answer | {"parts": parts, "peak_mib": peak_mib()} | kept)


if __name__ == "__main__":
    main()
