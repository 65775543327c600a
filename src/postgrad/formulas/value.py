"""The critic's loss in PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from postgrad.formulas._numeric import require, require_finite, require_same_shape, select


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor | None = None, *, clip: float) -> Tensor:
    """Squared error of the value, with the value held within `clip` of the one it had at sampling.

        per_token_loss = ½ · max( (V − R)²,  (clip(V, V_old − c, V_old + c) − R)² )

    Shapes: values, old_values, returns (and mask) [N, T] -> [N, T]. Edge cases: `clip=math.inf` is the plain ½(V − R)²; where the
    clipped term is the larger one the gradient is exactly 0; 0 outside the mask; non-finite inside raises `NonFiniteError`.

    >>> clipped_value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), clip=0.2)
    tensor([1.6200])

    Source: PPO as in OpenAI baselines `ppo2`; arXiv 2005.12729 on what it does.
    """
    require(clip >= 0, f"clip must not be negative, got {clip}")
    require_same_shape(values=values, old_values=old_values, returns=returns)
    v, old, target = select(values, mask), select(old_values, mask), select(returns, mask)
    near = torch.clamp(v, old - clip, old + clip)
    return require_finite("clipped_value_loss", 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2))
