"""Which way each reward pulls the weights: the gradient of the policy loss under its share of the advantages, on one stored batch.

1. `stored_batch`  a rollout file of a GRPO run as judged groups, with the split of the advantages that the run recorded.
2. `pulls`         one backward pass per reward, and one under the whole advantages.
3. `of_run`        both, on the model that the run started from or on its newest checkpoint.

The ratio is taken to be 1, as it is on the policy that sampled. The loss is then linear in the advantages, and these add up exactly over
the rewards (`rewards.ledger`); so do the gradients. A KL term is left out: no reward has a share in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from postgrad.errors import CheckpointError, DataError, RecipeError, RunError
from postgrad.models.engine import LocalEngine
from postgrad.rewards.doctor.render import clean
from postgrad.rewards.ledger import Floats
from postgrad.rollout.record import group_from_json
from postgrad.train import checkpoint, setup
from postgrad.train.grpo import grpo_loss, sampler_difference
from postgrad.train.judged import JudgedGroup, split_minibatches
from postgrad.train.presets import LossSettings, loss_settings
from postgrad.train.recipe import GRPORecipe
from postgrad.train.run import load_run
from postgrad.train.run_directory import RunDirectory

At = Literal["start", "final"]
Gradient = Mapping[str, Tensor]
"""By name of a trained weight; a weight without a gradient is left out."""


@dataclass(frozen=True)
class Pulls:
    """K rewards.

    norms [K], total_norm:  2-norms over all trained weights.
    cosines [K + 1, K + 1]: between the rewards' gradients, and last with the whole one; NaN where a gradient is 0.
    parts [K]:              what each adds to the whole gradient along its direction, as a share; they add up to 1. Below 0: it pulls back.
    residual:               |sum of the parts' gradients − whole gradient| / |whole gradient|: rounding.
    """

    names: tuple[str, ...]
    norms: Floats
    total_norm: float
    cosines: Floats
    parts: Floats
    residual: float

    @property
    def norm_shares(self) -> Floats:
        """[K] of the sum of the norms."""
        total = float(self.norms.sum())
        shares: Floats = self.norms / total if total else np.full(len(self.norms), math.nan)
        return shares


@dataclass(frozen=True)
class RunPulls:
    """On which weights and rollouts. trained_weights: how many numbers a gradient has.

    off_policy: mean |log-prob of this model − log-prob of the sampler| over the sampled tokens [nats]; near 0 the batch is the model's own.
    """

    pulls: Pulls
    at: str
    step: int
    groups: int
    rollouts: int
    trained_weights: int
    adapter: bool
    off_policy: float


def stored_batch(records: Sequence[Mapping[str, Any]]) -> list[JudgedGroup]:
    """The groups that were trained, of the lines of a rollout file. Raises `DataError` when the split of the advantages is not in them."""
    return [_judged(record) for record in records if not record.get("dropped")]


def _judged(record: Mapping[str, Any]) -> JudgedGroup:
    scores = record["scores"]
    if any("advantage_by_reward" not in score for score in scores):
        hint = "only GRPO runs record it"
        raise DataError("the rollouts do not say what each reward contributed to the advantages", where=f"step {record['step']}", hint=hint)
    return JudgedGroup(
        group=group_from_json(record),
        rewards={name: [_number(score["rewards"][name]) for score in scores] for name in scores[0]["rewards"]},
        totals=[_number(score["total"]) for score in scores],
        advantages=[float(score["advantage"]) for score in scores],
        shares={name: [float(score["advantage_by_reward"][name] or 0.0) for score in scores] for name in scores[0]["advantage_by_reward"]},
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass(frozen=True)
class _Loss:
    """The run's policy loss on its own samples. Nothing is updated."""

    engine: LocalEngine
    settings: LossSettings
    mask_truncated: bool
    temperature: float

    def gradient(self, groups: Sequence[JudgedGroup]) -> tuple[Gradient, float]:
        """(gradient, mean difference to the sampler's log-probs); nothing and NaN where every advantage is 0."""
        (batch,) = split_minibatches(groups, minibatches=1, mask_truncated=self.mask_truncated, skip_zero=True)
        if not batch.rows:
            return {}, math.nan
        loss = grpo_loss(self.settings, batch.denominators, own_old=True)  # the ratio is 1, whatever the run corrected
        result = self.engine.forward_backward(batch.rows, loss, temperature=self.temperature)
        self.engine.optimizer.finite_norm()
        gradient = {name: weight.grad for name, weight in self.engine.optimizer.weights.items() if weight.grad is not None}
        self.engine.optimizer.clear()
        return gradient, sampler_difference(batch.rows, result.logprobs) / result.sums["tokens"]


def pulls(
    engine: LocalEngine, groups: Sequence[JudgedGroup], settings: LossSettings, *, mask_truncated: bool, temperature: float,
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[Pulls, float]:  # fmt: skip
    """(pulls, off_policy). Needs memory for one gradient more than there are rewards.

    Raises `RunError` when no rollout of the batch has an advantage.
    """
    loss = _Loss(engine, replace(settings, kl_coef=0.0), mask_truncated, temperature)
    progress("all rewards")
    whole, off_policy = loss.gradient(groups)
    if not whole:
        raise RunError("no rollout of this batch has an advantage, so there is no gradient", hint="name another one with --step")
    names = tuple(groups[0].shares)
    gradients = []
    for name in names:
        progress(name)
        gradients.append(loss.gradient([replace(group, advantages=group.shares[name]) for group in groups])[0])
    return _compared(names, gradients, whole), off_policy


def _compared(names: tuple[str, ...], gradients: Sequence[Gradient], whole: Gradient) -> Pulls:
    products = np.array([[_dot(a, b) for b in (*gradients, whole)] for a in (*gradients, whole)])
    norms = np.sqrt(np.diag(products))
    scale = np.outer(norms, norms)
    cosines = np.where(scale > 0.0, products / np.where(scale > 0.0, scale, 1.0), np.nan)
    parts = products[-1, :-1] / products[-1, -1]
    return Pulls(names, norms[:-1], float(norms[-1]), cosines, parts, _distance(gradients, whole) / float(norms[-1]))


def _dot(a: Gradient, b: Gradient) -> float:
    return sum(float(torch.dot(a[name].flatten(), b[name].flatten())) for name in a.keys() & b.keys())


def _distance(gradients: Sequence[Gradient], whole: Gradient) -> float:
    """|Σ of the gradients − the whole one|, weight by weight."""
    squares = 0.0
    for name, gradient in whole.items():
        rest = sum((part[name] for part in gradients if name in part), torch.zeros_like(gradient)) - gradient
        squares += float(rest.square().sum())
    return math.sqrt(squares)


# ---- of a run


def of_run(path: Path, *, at: At | None = None, step: int | None = None, note: Callable[[str], None] = lambda text: None) -> RunPulls:
    """at: `start` = the model that the run started from, on the first stored batch that trains; `final` = its newest checkpoint, on the
    last one; None = `final` where there is a checkpoint. step: another stored batch.

    Raises `RecipeError` for a run that is not GRPO's, `DataError` when no stored batch trains, `CheckpointError` without a checkpoint.
    """
    loaded = load_run(path)
    recipe = loaded.recipe
    if not isinstance(recipe, GRPORecipe):
        what = "gradients are split over the rewards as GRPO's advantages are; this run has none"
        raise RecipeError(what, where=str(path), hint="pass the directory of a run with method: grpo, not of a pipeline")
    if recipe.loss.credit != "rollout" or recipe.loss.advantages is not None:
        key = "loss.advantages" if recipe.loss.advantages is not None else f"loss.credit: {recipe.loss.credit}"
        what = f"only an advantage of the whole rollout is split over the rewards, and this run has {key}"
        raise RecipeError(what, where=str(path), hint="look at it without --gradient")
    run = RunDirectory(path)
    newest = checkpoint.newest(run.checkpoints)
    if at == "final" and newest.folder is None:
        raise CheckpointError("the run has no checkpoint", where=str(path), hint="--at start")
    final = at != "start" and newest.folder is not None
    batch_step, groups = _batch(run, step, last=final)
    policy = setup.load_policy(recipe)
    run.check_inputs("loaded", policy.fingerprints)
    engine = setup.make_engine(recipe, policy, with_reference=False)
    if final and newest.folder is not None:
        engine.load_state(newest.folder)
    shown = f"the checkpoint after step {newest.step}" if final else "the model that the run started from"
    note(f"{shown}, on the rollouts of step {batch_step}")
    found, off_policy = pulls(
        engine, groups, loss_settings(recipe.loss, recipe.rollout), mask_truncated=recipe.loss.mask_truncated,
        temperature=recipe.rollout.temperature, progress=lambda name: note(f"gradient of {name}"),
    )  # fmt: skip
    return RunPulls(
        found, shown, batch_step, len(groups), sum(len(group.group.rollouts) for group in groups),
        sum(weight.numel() for weight in engine.optimizer.weights.values()), recipe.adapter is not None, off_policy,
    )  # fmt: skip


def _batch(run: RunDirectory, step: int | None, *, last: bool) -> tuple[int, list[JudgedGroup]]:
    """The stored batch of a step, or the first (or last) one in which a rollout has an advantage."""
    steps = sorted(int(file.name.split(".")[0].removeprefix("step-")) for file in (run.path / "rollouts").glob("step-*.jsonl.gz"))
    if step is not None and step not in steps:
        shown = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise RecipeError(f"there are no rollouts of step {step}", where="--step", hint=f"stored steps: {shown}")
    for number in [step] if step is not None else reversed(steps) if last else steps:
        groups = stored_batch(run.read_rollouts(number))
        if any(advantage for group in groups for advantage in group.advantages) or step is not None:
            return number, groups
    raise DataError("no stored batch trains anything", where=str(run.path / "rollouts"), hint=f"postgrad doctor {run.path} says why")


def to_json(found: RunPulls) -> dict[str, Any]:
    """Numbers that cannot be said are null."""
    result = found.pulls
    record: dict[str, Any] = clean({
        "at": found.at, "step": found.step, "groups": found.groups, "rollouts": found.rollouts, "trained_weights": found.trained_weights,
        "adapter": found.adapter, "off_policy": found.off_policy, "rewards": list(result.names), "norms": result.norms.tolist(),
        "norm_shares": result.norm_shares.tolist(), "parts": result.parts.tolist(), "total_norm": result.total_norm,
        "cosines": result.cosines.tolist(), "residual": result.residual,
    })  # fmt: skip
    return record
