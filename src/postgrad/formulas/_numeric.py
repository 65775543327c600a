"""What every formula does to its numbers before and after the mathematics.

1. `widen`            half precision is computed in fp32; fp32 and fp64 stay what they are.
2. `counted`          a mask becomes a bool tensor of exactly the expected shape (True = counts).
3. `select`           values under the mask become 0 *before* any function sees them, so that NaN, inf or 1e30 there reaches neither
                      the value nor the gradient (multiplying afterwards would give NaN * 0 = NaN).
4. `require_finite`, `read`   one rule for the rest: a number that counts and is not finite raises `NonFiniteError`, it is never returned.
5. `exp_with_tangent` (and `expm1_…`): the exponential, continued by its tangent where it would otherwise overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Default of every `max_log_ratio`: beyond it (a ratio of 4.9e8) the exponential is continued by its tangent."""


class NonFiniteError(ValueError):
    """A number that counts is NaN or infinite, in an input of a formula or in its result."""


def widen(x: Tensor) -> Tensor:
    """fp64 stays fp64; everything else (half precision, integers, bool) becomes fp32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def counted(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask as bool. Its shape must be `shape`: a mask that broadcasts is a mask that counts the wrong tokens."""
    if mask.shape != shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the values have {tuple(shape)}")
    return mask.to(torch.bool)


def select(x: Tensor, mask: Tensor | None) -> Tensor:
    """x in fp32 or fp64, with 0 where the mask is False. The backward of `where` sends exactly 0 to those places."""
    wide = widen(x)
    return wide if mask is None else torch.where(counted(mask, x.shape), wide, 0.0)


def require_finite(what: str, x: Tensor) -> Tensor:
    """x itself; raises `NonFiniteError` when any of it is NaN or infinite."""
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        raise NonFiniteError(f"{what}: {int((~finite).sum())} of {x.numel()} values are not finite")
    return x


def read(what: str, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`select`, then `require_finite`: for inputs whose infinity a clip, a sigmoid or a comparison would hide."""
    return require_finite(what, select(x, mask))


def require_same_shape(**tensors: Tensor) -> None:
    """Raises unless all shapes are equal: [N, 1] against [N] would silently broadcast to [N, N]."""
    if len({x.shape for x in tensors.values()}) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items()))


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless the condition holds. Conditions are written so that NaN fails them."""
    if not condition:
        raise ValueError(message)


def exp_with_tangent(x: Tensor, max_log_ratio: float) -> Tensor:
    """exp(x) up to `max_log_ratio` = c, above it the tangent e^c · (1 + x − c): continuous, increasing, gradient e^c, never flat."""
    head = _up_to(x, max_log_ratio)
    return torch.exp(head) * (1 + (x - head))


def expm1_with_tangent(x: Tensor, max_log_ratio: float) -> Tensor:
    """`exp_with_tangent(x) − 1`, without losing the digits near 0."""
    head = _up_to(x, max_log_ratio)
    return torch.expm1(head) + torch.exp(head) * (x - head)


def _up_to(x: Tensor, max_log_ratio: float) -> Tensor:
    require(0 < max_log_ratio < math.inf, f"max_log_ratio must be positive and finite, got {max_log_ratio}")
    return x.clamp(max=max_log_ratio)
