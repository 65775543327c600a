"""From logits to what the other formulas take: the log-prob of given tokens, and the entropy of the distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postgrad.formulas._numeric import require, require_finite, widen


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-prob, in nats, of each given token under softmax(logits / temperature).

        log π(y) = z_y / τ − log Σ_v exp(z_v / τ)

    Shapes: logits [..., V], token_ids [...] -> [...]. No shift: `logits[..., t, :]` must be the logits that predict `token_ids[..., t]`.
    Edge cases: bf16 logits are computed in fp32; a logit of −inf rules a token out. A token that is ruled out itself (log-prob −inf),
    NaN or +inf logits raise `NonFiniteError`; ids outside 0..V−1 (−100 included) raise `ValueError`.
    This is the definition. The engine computes the same numbers in chunks, without a [tokens, V] tensor in fp32.

    >>> token_logprobs(torch.tensor([2.0, 0.0]), torch.tensor(0))
    tensor(-0.1269)

    Source: softmax over the vocabulary; the temperature that sampling used belongs here too (trl#4159).
    """
    require(0 < temperature < math.inf, f"temperature must be positive and finite, got {temperature}")
    if logits.shape[:-1] != token_ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit token_ids {tuple(token_ids.shape)}")
    require_ids_below(logits.shape[-1], token_ids)
    log_softmax = torch.log_softmax(widen(logits) / temperature, dim=-1)
    return require_finite("token_logprobs", log_softmax.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1))


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy, in nats, of softmax(logits / temperature).

        H = −Σ_v π(v) · log π(v)

    Shapes: logits [..., V] -> [...]. Edge cases: a logit of −inf contributes 0 (and gets gradient 0); bf16 is computed in fp32;
    NaN, +inf or a row of only −inf raise `NonFiniteError`.

    >>> entropy_from_logits(torch.zeros(4))  # ln 4
    tensor(1.3863)

    Source: Shannon 1948; as a bonus in the loss, arXiv 1602.01783.
    """
    require(0 < temperature < math.inf, f"temperature must be positive and finite, got {temperature}")
    log_softmax = torch.log_softmax(widen(logits) / temperature, dim=-1)
    possible = torch.where(log_softmax == -math.inf, 0.0, log_softmax)  # 0 · −inf would be NaN, in the gradient too
    return require_finite("entropy_from_logits", -(log_softmax.exp() * possible).sum(-1))


def require_ids_below(vocabulary: int, token_ids: Tensor) -> None:
    """Raises unless all ids lie in 0..vocabulary−1: on a GPU a bad index kills the process instead."""
    wrong = (token_ids < 0) | (token_ids >= vocabulary)
    if bool(wrong.any()):
        raise ValueError(f"{int(wrong.sum())} token ids lie outside 0..{vocabulary - 1}, the first is {int(token_ids[wrong][0])}")
