"""Advantages with a critic (PPO): the reward of each token, and generalised advantage estimation over them."""

from __future__ import annotations

import torch
from torch import Tensor

from postgrad.formulas._numeric import counted, require, require_finite, require_same_shape, select, widen


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, *, kl_coef: float = 0.0) -> Tensor:
    """The reward of each token: the KL penalty everywhere, the score on the last token that counts.

        r_t = −kl_coef · kl_t + [t is the last counted token] · score

    Shapes: scores [N], mask and kl [N, T] -> [N, T], 0 outside the mask. `kl` is usually `kl_k1(old, reference, mask)`, no gradient.
    Edge cases: the last counted token, not the last token and not the first pad (trl#3750); a row without counted tokens raises,
    because its score would be lost.

    >>> token_rewards(torch.tensor([2.0]), torch.tensor([[1, 1, 0]]), torch.tensor([[0.5, 0.25, 9.0]]), kl_coef=0.1)
    tensor([[-0.0500,  1.9750,  0.0000]])

    Source: InstructGPT, arXiv 2203.02155.
    """
    if mask.dim() != 2 or scores.shape != mask.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} and mask {tuple(mask.shape)} must be [N] and [N, T]")
    counts = counted(mask, mask.shape)
    require(bool(counts.any(-1).all()), "a row has no counted token to carry its score")
    last = counts & (counts.flip(-1).cumsum(-1).flip(-1) == 1)  # counted, and the only one from here on
    at_end = torch.where(last, widen(scores).unsqueeze(-1), 0.0)
    return require_finite("token_rewards", at_end if kl is None else at_end - kl_coef * select(kl, mask))


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens that count, and the returns to fit the critic to.

        δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1},   R_t = A_t + V_t

    t + 1 is the next *counted* token: tool results and padding are no time steps, so γ and λ do not decay over them.
    Shapes: rewards, values, mask [B, T] -> (advantages [B, T], returns [B, T]), 0 outside the mask. bootstrap [B] is the value after the
    last step, for rollouts that a limit cut off; left out it is 0 (the episode ended).
    Edge cases: λ = 1 gives Σ γ^k r − V, λ = 0 gives δ; whatever stands outside the mask is never read, rewards included; non-finite
    values inside raise `NonFiniteError`.

    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 1]]), gamma=1.0, lam=0.5)
    (tensor([[0.2500, 0.5000]]), tensor([[0.7500, 1.0000]]))

    Source: GAE, arXiv 1506.02438.
    """
    require(0 <= gamma <= 1, f"gamma must lie in [0, 1], got {gamma}")
    require(0 <= lam <= 1, f"lam must lie in [0, 1], got {lam}")
    require(values.dim() == 2, f"values must be [B, T], got {tuple(values.shape)}")
    r, v, counts = select(rewards, mask), select(values, mask), counted(mask, values.shape)
    next_value = torch.zeros_like(v.sum(-1)) if bootstrap is None else widen(bootstrap)
    require_same_shape(bootstrap=next_value, rows=v.sum(-1))
    next_advantage = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(v.shape[-1])):
        advantage = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(counts[:, t], advantage, next_advantage)  # a masked token passes both on unchanged
        next_value = torch.where(counts[:, t], v[:, t], next_value)
        columns.append(torch.where(counts[:, t], advantage, 0.0))
    advantages = torch.stack(columns[::-1], dim=-1) if columns else v
    return advantages, require_finite("gae", advantages + v)  # an advantage that is not finite makes its return so
