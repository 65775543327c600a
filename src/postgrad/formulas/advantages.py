"""How much better a rollout is than its siblings: advantages from rewards, without a critic.

Rewards come flat, [N] with N = B prompts × G rollouts, the G of one prompt side by side. NaN is an abstention: that rollout's advantage
is 0 and it is left out of every mean and standard deviation. Infinite rewards raise `NonFiniteError`.
Rewards of a group that differ by no more than `tie_tolerance` · max(1, max |r|) are equal, and give exactly 0: dividing rounding noise
by the standard deviation of rounding noise would make it a signal (RL#4161). Everything is computed in fp64 and returned in the rewards'
width. Advantages are constants of the loss: no gradient flows through any of these functions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from postgrad.formulas._numeric import counted, read, require, require_finite, select, widen

TIE_TOLERANCE = 1e-6


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    tie_tolerance: float = TIE_TOLERANCE,
) -> Tensor:
    """Rewards minus their group's mean, divided by a standard deviation.

        A = (r − mean_group) / (std + 1e-4)

    `scale`: "group" divides by the group's std, "batch" by the std of all rewards of the batch, "none" by nothing (Dr. GRPO).
    Shapes: rewards [N] -> [N]; N must be a whole number of groups (else `ValueError`).
    Edge cases: std is the sample std (n − 1). A group of one, with one reward left, constant or all NaN has advantage exactly 0, and so
    no learning signal. A literal nanstd of one value is NaN, not the 0 that the articles state.
    Correction of the articles: with two reward levels in a group, "the punishment must exceed the reward" does nothing at scale "group":
    {1, 0}, {1, −1} and {1, −5} give the same advantages. It acts with three levels or more, across several rewards, at "none",
    or with `weight_positive`.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    tensor([ 0.8659, -0.8659, -0.8659,  0.8659])

    Source: the articles; GRPO, arXiv 2402.03300; "none": Dr. GRPO, arXiv 2503.20783; "batch": arXiv 2508.08221.
    """
    require(eps >= 0, f"eps must not be negative, got {eps}")
    require(scale in ("group", "batch", "none"), f"scale must be group, batch or none, got {scale!r}")
    groups = _groups(rewards, group_size, tie_tolerance)
    if scale == "none":
        return _flat(groups.deviation, rewards)
    spread = groups.std if scale == "group" else _groups(rewards, rewards.numel(), tie_tolerance).std
    return _flat(groups.deviation / torch.where(groups.deviation == 0, 1.0, spread + eps), rewards)  # 0 stays 0 at eps = 0


def leave_one_out_advantages(rewards: Tensor, group_size: int, *, tie_tolerance: float = TIE_TOLERANCE) -> Tensor:
    """Each reward minus the mean of the other rewards of its group (RLOO).

        A_i = r_i − (1/(n − 1)) Σ_{j≠i} r_j = n/(n − 1) · (r_i − mean_group)

    n counts the rewards that did not abstain. Shapes and edge cases: as `group_advantages`; equal rewards and groups of one give exactly 0.

    >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0]), 3)
    tensor([ 1.0000, -0.5000, -0.5000])

    Source: RLOO, arXiv 2402.14740.
    """
    groups = _groups(rewards, group_size, tie_tolerance)
    return _flat(groups.deviation * groups.known / (groups.known - 1).clamp(min=1), rewards)


def normalize_then_sum(rewards: Tensor, weights: Tensor, group_size: int, *, eps: float = 1e-4) -> Tensor:
    """Group-normalise each reward on its own, add them up by weight, then normalise over the batch (GDPO).

        A_k = (r_k − mean_group) / (std_group + eps),   S = Σ_k w_k · A_k,   A = (S − mean_batch) / (std_batch + eps)

    A reward of large scale cannot hide the others, and rewards that cancel in the sum still count (trl#4785).
    Shapes: rewards [K, N], weights [K] -> [N]. Edge cases: a reward that abstains (NaN) adds 0 for that rollout; a rollout for which every
    reward with a weight abstains has advantage 0 and is left out of the batch's mean and std; a constant reward adds nothing.

    >>> normalize_then_sum(torch.tensor([[1.0, 0.0], [0.0, 10.0]]), torch.tensor([1.0, 2.0]), 2)
    tensor([-0.7070,  0.7070])

    Source: GDPO, arXiv 2601.05242.
    """
    if rewards.dim() != 2 or weights.shape != rewards.shape[:1]:
        raise ValueError(f"rewards {tuple(rewards.shape)} and weights {tuple(weights.shape)} must be [K, N] and [K]")
    parts = torch.stack([group_advantages(row, group_size, eps=eps) for row in rewards])
    total = require_finite("normalize_then_sum", (weights.unsqueeze(-1) * parts).sum(0))
    abstained = rewards[weights != 0].isnan().all(0)
    whole = torch.where(abstained, torch.nan, total)
    return group_advantages(whole, whole.numel(), eps=eps).to(widen(rewards).dtype)


def weight_positive(advantages: Tensor, *, positive_weight: float) -> Tensor:
    """Weigh what went well by λ and leave what went badly as it is: λ < 1 learns more from mistakes than from successes.

        A' = λ·A where A > 0, else A

    Shapes: any -> the same. Edge cases: λ = 1 changes nothing, λ = 0 learns from negative advantages only. This is a way to make "the
    punishment must exceed the reward" act when a group has two reward levels (see `group_advantages`).

    >>> weight_positive(torch.tensor([2.0, -1.0]), positive_weight=0.1)
    tensor([ 0.2000, -1.0000])

    Source: W-REINFORCE, arXiv 2506.01347.
    """
    require(positive_weight >= 0, f"positive_weight must not be negative, got {positive_weight}")
    a = read("advantages", advantages)
    return torch.where(a > 0, positive_weight * a, a)


def whiten(x: Tensor, mask: Tensor, *, center: bool = True, eps: float = 1e-8) -> Tensor:
    """Give the counted values variance 1, and mean 0 unless `center` is False.

        (x − mean) / √(var + eps)   (+ mean with center=False: the mean is kept as it is)

    Shapes: x and mask [N, T] (any, but equal) -> the same, 0 outside the mask. Mean and sample variance (n − 1) see counted values only.
    Edge cases: values that are all equal (within 1e-6 · max(1, max |x|)), and a single one, whiten to exactly 0 (to the mean with
    center=False); no counted value raises; non-finite inside raises `NonFiniteError`.

    >>> whiten(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1, 1, 0]))
    tensor([-0.7071,  0.7071,  0.0000])

    Source: PPO as in arXiv 1909.08593 (lm-human-preferences `whiten`); on whitening over padding arXiv 2403.17031.
    """
    counts = counted(mask, x.shape)
    require(bool(counts.any()), "no counted value to whiten")
    abstaining = torch.where(counts, read("whiten", x, mask), torch.nan)
    stats = _groups(abstaining.flatten(), x.numel(), TIE_TOLERANCE)
    white = stats.deviation / torch.sqrt(stats.std**2 + eps)
    return select(((white if center else white + stats.mean).reshape(x.shape)).to(widen(x).dtype), mask)


class _Groups(NamedTuple):
    """Statistics over the rewards that did not abstain. deviation [B, G] is 0 for abstentions and in groups without spread."""

    deviation: Tensor
    mean: Tensor
    std: Tensor
    known: Tensor


def _groups(rewards: Tensor, group_size: int, tie_tolerance: float) -> _Groups:
    require(tie_tolerance >= 0, f"tie_tolerance must not be negative, got {tie_tolerance}")
    if rewards.dim() != 1 or group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"{tuple(rewards.shape)} rewards are not a whole number of groups of {group_size}")
    grouped = rewards.detach().double().reshape(-1, group_size)
    present = ~grouped.isnan()
    known = require_finite("rewards", torch.where(present, grouped, 0.0))
    count = present.sum(-1, keepdim=True)
    mean = known.sum(-1, keepdim=True) / count  # NaN in a group of abstentions, where nothing varies and nothing reads it
    varies = present & _varies(known, present, tie_tolerance)
    deviation = torch.where(varies, known - mean, 0.0)
    variance = (deviation**2).sum(-1, keepdim=True) / (count - 1).clamp(min=1)
    return _Groups(deviation, mean, require_finite("standard deviation of the rewards", variance.sqrt()), count)


def _varies(known: Tensor, present: Tensor, tie_tolerance: float) -> Tensor:
    """[B, 1]: True where the largest and smallest reward of a group differ by more than the tolerance."""
    highest = torch.where(present, known, -torch.inf).amax(-1, keepdim=True)
    lowest = torch.where(present, known, torch.inf).amin(-1, keepdim=True)
    return highest - lowest > tie_tolerance * known.abs().amax(-1, keepdim=True).clamp(min=1)


def _flat(grouped: Tensor, like: Tensor) -> Tensor:
    return require_finite("advantages", grouped.reshape(-1).to(widen(like).dtype))
