"""From per-token values [N, T] to one number: the named aggregations.

    token_mean             Σ_it x_it / Σ_it m_it                       every token weighs the same        TRL: bnpo, dapo
    sequence_mean          (1/N) Σ_i (Σ_t x_it / Σ_t m_it)             every sequence weighs the same     TRL: grpo
    constant_length_mean   Σ_it x_it / (N · L)                         no dependence on lengths           TRL: dr_grpo

`denominator` is what the sum is divided by, counted over the whole batch: tokens for `token_mean`, sequences with at least one counted
token for the other two. Given it, micro-batches and ranks add up to the batch's value and gradient exactly, and a micro-batch without a
counted token adds 0 with gradient 0. Left out, the denominator is that of the tensor at hand, and no counted token at all raises:
the mean of nothing is not 0. A sequence without counted tokens is in neither numerator nor denominator.
Correction of the articles: `mean(per_token_loss × mask)` divides by padding too; none of these does.
"""

from __future__ import annotations

from torch import Tensor

from postgrad.formulas._numeric import counted, require, require_finite, select


def token_mean(x: Tensor, mask: Tensor, *, denominator: float | Tensor | None = None) -> Tensor:
    """Mean over counted tokens.

        Σ_it x_it · m_it / denominator,   denominator = Σ_it m_it unless given

    Shapes: x and mask [N, T] (any, but equal) -> scalar. Edge cases: see the module; values outside the mask are never read.

    >>> import torch
    >>> token_mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor(3.)

    Source: DAPO, arXiv 2503.14476, eq. 8.
    """
    total = select(x, mask).sum()
    return require_finite("token_mean", total / _denominator(denominator, counted(mask, x.shape).sum(), "token"))


def sequence_mean(x: Tensor, mask: Tensor, *, denominator: float | Tensor | None = None) -> Tensor:
    """Mean over sequences of each sequence's mean over its counted tokens.

        Σ_i ( Σ_t x_it · m_it / Σ_t m_it ) / denominator,   denominator = number of sequences that count unless given

    Shapes: x and mask [N, T] -> scalar. Edge cases: see the module. A token of a long answer weighs less than one of a short answer:
    long wrong answers are punished less per token (trl#3138).

    >>> import torch
    >>> sequence_mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor(3.7500)

    Source: GRPO, arXiv 2402.03300, eq. 3.
    """
    lengths = counted(mask, x.shape).sum(-1)
    means = select(x, mask).sum(-1) / lengths.clamp(min=1)  # an empty sequence: 0 / 1
    return require_finite("sequence_mean", means.sum() / _denominator(denominator, (lengths > 0).sum(), "sequence"))


def constant_length_mean(x: Tensor, mask: Tensor, length: float, *, denominator: float | Tensor | None = None) -> Tensor:
    """Sum over counted tokens, divided by a constant length and the number of sequences.

        Σ_it x_it · m_it / (denominator · L),   denominator = number of sequences that count unless given

    Shapes: x and mask [N, T], length a positive number (usually the token budget of a completion) -> scalar. Edge cases: see the module.
    length = 1 gives the mean over sequences of their sums (LUSPO).

    >>> import torch
    >>> constant_length_mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]), 10)
    tensor(0.4500)

    Source: Dr. GRPO, arXiv 2503.20783; length 1: LUSPO, arXiv 2602.05261.
    """
    require(length > 0, f"length must be positive, got {length}")
    sequences = mask.any(-1).sum()
    total = select(x, mask).sum()
    return require_finite("constant_length_mean", total / (_denominator(denominator, sequences, "sequence") * length))


def _denominator(given: float | Tensor | None, count: Tensor, unit: str) -> float | Tensor:
    if given is None:
        require(bool(count > 0), f"no counted {unit}: give the whole batch's denominator, or leave this micro-batch out")
        return count
    require(bool(given > 0), f"denominator must be positive, got {given}")
    return given
