"""Reward modelling: the probability that the chosen answer beats the rejected one."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from postgrad.formulas._numeric import read, require, require_finite, require_same_shape


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center_coef: float = 0.0) -> Tensor:
    """Negative log-likelihood, per pair, that the chosen answer scores higher by more than the margin.

        loss_RM = −log σ(r_chosen − r_rejected − m) + center_coef · (r_chosen + r_rejected)²

    Shapes: chosen, rejected and margin [N] -> [N]. The centering term keeps the scale of the scores around 0 (they are only defined up
    to a constant); 0.01 is the usual weight.
    Edge cases: equal scores give ln 2; a pair without a margin has margin 0; other shapes raise ([N, 1] − [N] would be [N, N]);
    non-finite scores raise `NonFiniteError`.

    >>> import torch
    >>> bradley_terry_loss(torch.tensor([1.2]), torch.tensor([0.5]))
    tensor([0.4032])

    Source: the articles, "Reward Model Loss"; margin arXiv 2307.09288; centering arXiv 2312.09244.
    """
    require(center_coef >= 0, f"center_coef must not be negative, got {center_coef}")
    require_same_shape(chosen=chosen, rejected=rejected, margin=chosen if margin is None else margin)
    high, low = read("chosen scores", chosen), read("rejected scores", rejected)
    difference = high - low if margin is None else high - low - read("margin", margin)
    return require_finite("bradley_terry_loss", -logsigmoid(difference) + center_coef * (high + low) ** 2)
