"""Per-token losses of the policy: what each token contributes before aggregation.

1. `clipped_surrogate`             PPO, GRPO, DAPO, Dr. GRPO; with a sequence ratio GSPO.
2. `two_sided_clip_surrogate`      the same with an upper bound for negative advantages.
3. `reinforce_surrogate`           RLOO and plain policy gradient.
4. `cispo_surrogate`               the clipped ratio is a weight, so no token loses its gradient.
5. `soft_gate_surrogate`, `gamma_weight_surrogate`   SAPO and VESPO: smooth instead of clipped.
6. `clip_fractions`                how often the clip is active.

Advantages are per token (the ratio's shape) or per row (without the ratio's last dimension: [N] for [N, T], or [N, 1]).
All raise `NonFiniteError` rather than return NaN or inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.formulas._numeric import read, require, require_finite, select
from postgrad.formulas.aggregate import token_mean


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """The clipped objective of PPO and GRPO, as a loss: no reward for moving a token's ratio out of the trust region.

        per_token_loss = −min( r(θ)·A,  clip(r(θ), 1 − ε_low, 1 + ε_high)·A )

    Shapes: ratio [N, T], advantages [N, T], [N, 1] or [N] -> [N, T]. For GSPO, ratio [N, 1] or [N] from `sequence_ratio`.
    Edge cases: A > 0 with r > 1 + ε_high, and A < 0 with r < 1 − ε_low: constant, gradient exactly 0. The other two sides are not
    clipped: min takes the worse value, so a token that moved the wrong way is always pulled back. ε = 0.2 clips to [0.8, 1.2].
    On policy (r = 1) and with centred advantages the mean is 0 while the gradient is not: a loss of 0 is no sign of not learning.

    >>> clipped_surrogate(torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    tensor([-1.2000,  1.5000, -0.5000,  0.8000])

    Source: PPO, arXiv 1707.06347; separate bounds DAPO, arXiv 2503.14476.
    """
    _require_clip(clip_low, clip_high)
    r, a = _aligned(ratio, advantages)
    return require_finite("clipped_surrogate", -torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a))


def two_sided_clip_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, max_ratio: float = 4.0
) -> Tensor:
    """`clipped_surrogate` with an upper bound δ on the ratio, so that one token with A < 0 cannot dominate the loss.

        per_token_loss = −min( min(r(θ), δ)·A,  clip(r(θ), 1 − ε_low, 1 + ε_high)·A )

    Shapes: as `clipped_surrogate`. Edge cases: δ must exceed 1 + ε_high (else it would clip A > 0 as well); for A < 0 and r > δ the loss
    is −δ·A with gradient 0, for A > 0 nothing changes.

    >>> two_sided_clip_surrogate(torch.tensor([50.0]), torch.tensor([-1.0]))
    tensor([4.])

    Source: dual clip, arXiv 1912.09729; `delta` in INTELLECT-2, arXiv 2505.07291 (default here; dual-clip code uses 3).
    """
    require(max_ratio > 1 + clip_high, f"max_ratio must exceed 1 + clip_high = {1 + clip_high}, got {max_ratio}")
    return clipped_surrogate(read("ratio", ratio).clamp(max=max_ratio), advantages, clip_low=clip_low, clip_high=clip_high)


def reinforce_surrogate(logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """The plain policy gradient.

        per_token_loss = −A · log π_θ(y_t)

    Shapes: logprobs and mask [N, T], advantages [N, T], [N, 1] or [N] -> [N, T]. Edge cases: 0 outside the mask. The value means
    nothing (it depends on how likely the text is), only its gradient −A·∇log π does; on policy that is `clipped_surrogate`'s.

    >>> reinforce_surrogate(torch.tensor([[-1.0, -0.5]]), torch.tensor([2.0]))
    tensor([[2., 1.]])

    Source: Williams 1992; RLOO, arXiv 2402.14740.
    """
    logp, a = _aligned(select(logprobs, mask), advantages)
    return require_finite("reinforce_surrogate", -a * logp)


def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, mask: Tensor | None = None, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """CISPO: the clipped ratio weighs the policy gradient as a constant, so that clipped tokens keep a gradient.

        per_token_loss = −sg[ clip(r(θ), 1 − ε_low, 1 + ε_high) ] · A · log π_θ(y_t),   sg = no gradient

    Shapes: logprobs and mask [N, T], ratio [N, T] (or [N, 1]), advantages as elsewhere -> [N, T].
    Edge cases: clip_low = 1 means no lower bound, as the authors use it. The defaults weigh by at most 5. Note that TRL's cispo reads
    `epsilon_high` as the bound itself: with its default 0.2 every ratio above 0.2 is cut to 0.2 and the ratio no longer matters.

    >>> cispo_surrogate(torch.tensor([9.0, 0.5]), torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0]))
    tensor([5.0000, 0.5000])

    Source: MiniMax-M1, arXiv 2506.13585; bound of 5 as in ScaleRL, arXiv 2510.13786.
    """
    require(0 <= clip_low <= 1, f"clip_low must lie in [0, 1], got {clip_low}")
    require(clip_high >= 0, f"clip_high must not be negative, got {clip_high}")
    logp = select(logprobs, mask)
    weight, a = _aligned(read("ratio", ratio.detach()).clamp(1 - clip_low, 1 + clip_high), advantages)
    weighted, logp = _aligned(weight * a, logp)
    return require_finite("cispo_surrogate", -weighted * logp)


def soft_gate_surrogate(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """SAPO: a sigmoid gate in place of the clip; the gradient fades as the ratio leaves 1 instead of stopping.

        per_token_loss = −(4/τ) · σ( τ·(r(θ) − 1) ) · A,   τ = τ_positive where A > 0, else τ_negative

    Shapes: as `clipped_surrogate`. Edge cases: at r = 1 the gradient is that of −r·A and the value −(2/τ)·A.

    >>> soft_gate_surrogate(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    tensor([-2.0000, -3.5232])

    Source: SAPO, arXiv 2511.20347.
    """
    for value in (temperature_positive, temperature_negative):
        require(value > 0, f"gate temperatures must be positive, got {value}")
    r, a = _aligned(ratio, advantages)
    tau = torch.where(a > 0, a.new_tensor(temperature_positive), a.new_tensor(temperature_negative))
    return require_finite("soft_gate_surrogate", -torch.sigmoid(tau * (r - 1)) * 4 / tau * a)


def gamma_weight_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    *,
    shape_positive: float = 2.0,
    rate_positive: float = 3.0,
    shape_negative: float = 3.0,
    rate_negative: float = 2.0,
) -> Tensor:
    """VESPO: the policy gradient weighed by a gamma-shaped function of the whole sequence's ratio.

        per_token_loss = −sg[φ(w)] · A · log π_θ(y_t),   φ(w) = w^k · e^{λ(1 − w)},   w = exp( Σ_t log_ratio_t )

    (k, λ) = (shape, rate)_positive where A ≥ 0, else _negative. w is the product of the token ratios, not their geometric mean.
    Shapes: log_ratio, logprobs and mask [N, T], advantages [N] or [N, 1] -> [N, T]. Edge cases: φ(1) = 1; φ tends to 0 on both sides,
    so extreme ratios give weight 0 and no overflow.

    >>> gamma_weight_surrogate(torch.tensor([[-0.2]]), torch.tensor([1.0]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    tensor([[1.1547]])

    Source: VESPO, arXiv 2602.10693.
    """
    log_w = read("log_ratio", log_ratio.detach(), mask).sum(-1, keepdim=True)
    log_w, a = _aligned(log_w, advantages)
    shape = torch.where(a >= 0, a.new_tensor(shape_positive), a.new_tensor(shape_negative))
    rate = torch.where(a >= 0, a.new_tensor(rate_positive), a.new_tensor(rate_negative))
    weight = torch.exp(shape * log_w + rate * (1 - torch.exp(log_w)))
    return require_finite("gamma_weight_surrogate", -weight * a * select(logprobs, mask))


class ClipFractions(NamedTuple):
    """Shares of counted tokens: `low` and `high` where that bound is active, `region` where either is."""

    low: Tensor
    high: Tensor
    region: Tensor


def clip_fractions(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float | None = None,
    denominator: float | Tensor | None = None,
) -> ClipFractions:
    """Share of counted tokens whose gradient the clip sets to zero.

        low: r < 1 − ε_low and A < 0       high: r > 1 + ε_high and A > 0, or r > δ and A < 0 (δ = max_ratio)

    Edge cases: a ratio outside the bounds on the other side is not clipped and not counted (trl#3032); nor is A = 0.
    Shapes: ratio [N, T] or [N, 1], advantages as elsewhere, mask [N, T] -> three scalars. `denominator` as in `token_mean`.

    >>> clip_fractions(torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4)).region
    tensor(0.5000)

    Source: TRL's `clip_ratio/low_mean`, `clip_ratio/high_mean` and `clip_ratio/region_mean`.
    """
    _require_clip(clip_low, clip_high)
    r, a = _aligned(ratio, advantages)
    low = (r < 1 - clip_low) & (a < 0)
    high = (r > 1 + clip_high) & (a > 0)
    if max_ratio is not None:
        high = high | ((r > max_ratio) & (a < 0))
    low_share, high_share = (token_mean(_per_token(side, mask), mask, denominator=denominator) for side in (low, high))
    return ClipFractions(low_share, high_share, low_share + high_share)


def _per_token(flags: Tensor, mask: Tensor) -> Tensor:
    """[N, 1] spread over the tokens of its row; a bare [N] is not taken for [T]."""
    if flags.dim() != mask.dim():
        raise ValueError(f"ratio {tuple(flags.shape)} does not fit mask {tuple(mask.shape)}: unsqueeze a sequence ratio to [N, 1]")
    return flags.expand(mask.shape)


def _require_clip(clip_low: float, clip_high: float) -> None:
    require(0 <= clip_low < 1, f"clip_low must lie in [0, 1), got {clip_low}")
    require(clip_high >= 0, f"clip_high must not be negative, got {clip_high}")


def _aligned(values: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp32 or fp64, with advantages per row given a last dimension. Nothing else broadcasts: [N] is never taken for [T]."""
    wide, a = read("ratio or log-probs", values), read("advantages", advantages)
    if a.shape != wide.shape and a.shape == wide.shape[:-1]:
        a = a.unsqueeze(-1)
    rows_agree = a.dim() == wide.dim() and a.shape[:-1] == wide.shape[:-1]
    if not (rows_agree and (a.shape == wide.shape or 1 in (a.shape[-1], wide.shape[-1]))):
        raise ValueError(f"advantages {tuple(advantages.shape)} do not fit values {tuple(values.shape)}")
    return wide, a
