"""Direct preference optimisation: the losses, as functions of four summed log-probs per pair.

With a = log(π_θ(chosen)/π_ref(chosen)), b = log(π_θ(rejected)/π_ref(rejected)) and z = β·(a − b):

    sigmoid      −log σ(z)                                   DPO arXiv 2305.18290; with label_smoothing cDPO
    sigmoid_norm −log σ(β·(a/|chosen| − b/|rejected|))       length-normalised
    hinge        max(0, 1 − z)                               SLiC arXiv 2305.10425
    ipo          ((a − b) − 1/(2β))²                         IPO arXiv 2310.12036; a, b per token when token counts are given
    exo_pair     KL( [σ(z), σ(−z)] ‖ [1 − ε, ε] )            EXO arXiv 2402.00856; needs label_smoothing ε > 0
    robust       ((1 − ε)·−log σ(z) + ε·log σ(−z)) / (1 − 2ε)   robust DPO arXiv 2403.00409; may be negative
    nca_pair     −log σ(βa) − ½·log σ(−βa) − ½·log σ(−βb)    NCA arXiv 2402.05369
    bco_pair     −log σ(βa) − log σ(−βb)                     BCO arXiv 2404.04656, reward shift 0
    sppo_hard    (a − 1/(2β))² + (b + 1/(2β))²               SPPO arXiv 2405.00675
    apo_zero     1 − σ(βa) + σ(βb)                           APO arXiv 2408.06266
    apo_down     σ(βa) + 1 − σ(β(a − b))                     APO arXiv 2408.06266
    aot, aot_unpaired   sigmoid on sorted log-ratios of the batch   AOT arXiv 2406.05882; order and value depend on the batch
    discopop     −log σ(z)·(1 − m) + e^(−z)·m,  m = σ(z/0.05)       DiscoPOP arXiv 2406.08414
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from postgrad.formulas._numeric import read, require, require_finite, require_same_shape
from postgrad.formulas.ratio import log_ratio

Divergence = Literal["reverse_kl", "forward_kl", "js"]
_DISCOPOP_TAU = 0.05


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse_kl",
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> Tensor:
    """How far the policy is from preferring each chosen answer over its rejected one, more than the reference does.

        loss_DPO = −log σ( β · [log(π_θ(chosen)/π_ref(chosen)) − log(π_θ(rejected)/π_ref(rejected))] )

    Shapes: the four are log-probs summed over the answer's tokens, [N]; `chosen_tokens`, `rejected_tokens` [N] their token counts
    -> [N]. `loss` is a name of the module's table (`DPO_LOSSES`); another raises `ValueError` with the names.
    `label_smoothing` ε: the share of labels believed flipped, for sigmoid, aot, aot_unpaired, robust (< ½) and exo_pair (> 0).
    `divergence`: what holds policy to reference (f-DPO, arXiv 2309.16240), for losses of z. An option that the loss does not read
    raises. Token counts are read by sigmoid_norm (required) and ipo: with them ipo works on per-token averages, as its authors
    confirmed and as TRL does; without, on what it is given.
    Edge cases: policy = reference gives ln 2 = 0.693147, not 0. Correction of the articles: −log σ is never negative; a training loss
    below ln 2, not below 0, says that the margin grows. Large |z| is exact (no exp overflows); non-finite raises `NonFiniteError`.

    >>> zero = torch.zeros(1)
    >>> dpo_loss(zero - 3, zero - 4, zero - 3, zero - 4, beta=0.1)
    tensor([0.6931])

    Source: the articles, DPO; arXiv 2305.18290; papers of the variants in the module's table.
    """
    if loss not in _LOSSES:
        raise ValueError(f"unknown DPO loss {loss!r}; known are {', '.join(DPO_LOSSES)}")
    require(0 < beta < math.inf, f"beta must be positive and finite, got {beta}")
    require(0 <= label_smoothing <= 0.5, f"label_smoothing must lie in [0, 0.5], got {label_smoothing}")
    require(divergence in _DIVERGENCES, f"unknown divergence {divergence!r}; known are {', '.join(_DIVERGENCES)}")
    _refuse_unread(loss, label_smoothing=label_smoothing != 0, divergence=divergence != "reverse_kl")
    require_same_shape(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    pair = _Pair(
        policy_chosen=read("policy_chosen", policy_chosen),
        policy_rejected=read("policy_rejected", policy_rejected),
        reference_chosen=read("reference_chosen", reference_chosen),
        reference_rejected=read("reference_rejected", reference_rejected),
        beta=beta,
        smoothing=label_smoothing,
        divergence=divergence,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    return require_finite(f"dpo_loss ({loss})", _LOSSES[loss](pair))


def implicit_reward(policy: Tensor, reference: Tensor, *, beta: float) -> Tensor:
    """The reward that a DPO policy stands for.

        r(x, y) = β · log( π_θ(y) / π_ref(y) )

    Shapes: summed log-probs [N] -> [N]. `rewards/chosen`, `rewards/rejected`, and their difference `rewards/margins` are these.
    Edge cases: policy = reference gives 0; non-finite log-probs raise `NonFiniteError`.

    >>> implicit_reward(torch.tensor([-3.0]), torch.tensor([-4.0]), beta=0.1)
    tensor([0.1000])

    Source: the articles, DPO; arXiv 2305.18290, eq. 5 (up to a term of the prompt alone).
    """
    return beta * log_ratio(policy, reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    policy_chosen: Tensor
    policy_rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    beta: float
    smoothing: float
    divergence: str
    chosen_tokens: Tensor | None
    rejected_tokens: Tensor | None

    @property
    def a(self) -> Tensor:
        return self.policy_chosen - self.reference_chosen

    @property
    def b(self) -> Tensor:
        return self.policy_rejected - self.reference_rejected

    @property
    def scores(self) -> tuple[Tensor, Tensor]:
        """f'(ratio) of both sides, 0 where policy = reference; the log-ratios for the reverse KL."""
        score = _DIVERGENCES[self.divergence]
        return score(self.a), score(self.b)

    @property
    def delta(self) -> Tensor:
        chosen, rejected = self.scores
        return chosen - rejected

    @property
    def delta_per_token(self) -> Tensor:
        if self.chosen_tokens is None or self.rejected_tokens is None:
            raise ValueError("this loss averages over tokens: give chosen_tokens and rejected_tokens")
        require_same_shape(chosen=self.a, chosen_tokens=self.chosen_tokens, rejected_tokens=self.rejected_tokens)
        require(bool((torch.minimum(self.chosen_tokens, self.rejected_tokens) > 0).all()), "an answer has no tokens")
        chosen, rejected = self.scores
        return chosen / self.chosen_tokens - rejected / self.rejected_tokens

    def smoothed(self, z: Tensor) -> Tensor:
        return -(1 - self.smoothing) * logsigmoid(z) - self.smoothing * logsigmoid(-z)


def _sigmoid(pair: _Pair) -> Tensor:
    return pair.smoothed(pair.beta * pair.delta)


def _sigmoid_norm(pair: _Pair) -> Tensor:
    return -logsigmoid(pair.beta * pair.delta_per_token)


def _hinge(pair: _Pair) -> Tensor:
    return torch.relu(1 - pair.beta * pair.delta)


def _ipo(pair: _Pair) -> Tensor:
    summed = pair.chosen_tokens is None and pair.rejected_tokens is None
    return ((pair.delta if summed else pair.delta_per_token) - 1 / (2 * pair.beta)) ** 2


def _exo_pair(pair: _Pair) -> Tensor:
    require(pair.smoothing > 0, "exo_pair compares with the labels 1 − ε and ε: label_smoothing must be > 0 (1e-3 is usual)")
    z = pair.beta * pair.delta
    win = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-pair.smoothing))
    return win + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(pair.smoothing))


def _robust(pair: _Pair) -> Tensor:
    require(pair.smoothing < 0.5, "robust divides by 1 − 2ε: label_smoothing must be < 0.5")
    z = pair.beta * pair.delta
    return (-(1 - pair.smoothing) * logsigmoid(z) + pair.smoothing * logsigmoid(-z)) / (1 - 2 * pair.smoothing)


def _nca_pair(pair: _Pair) -> Tensor:
    chosen, rejected = pair.beta * pair.a, pair.beta * pair.b
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(pair: _Pair) -> Tensor:
    return -logsigmoid(pair.beta * pair.a) - logsigmoid(-pair.beta * pair.b)


def _sppo_hard(pair: _Pair) -> Tensor:
    target = 0.5 / pair.beta
    return (pair.a - target) ** 2 + (pair.b + target) ** 2


def _apo_zero(pair: _Pair) -> Tensor:
    return 1 - torch.sigmoid(pair.beta * pair.a) + torch.sigmoid(pair.beta * pair.b)


def _apo_down(pair: _Pair) -> Tensor:
    return torch.sigmoid(pair.beta * pair.a) + 1 - torch.sigmoid(pair.beta * (pair.a - pair.b))


def _aot(pair: _Pair) -> Tensor:
    policy = (pair.policy_chosen - pair.policy_rejected).sort().values
    reference = (pair.reference_chosen - pair.reference_rejected).sort().values
    return pair.smoothed(pair.beta * (policy - reference))


def _aot_unpaired(pair: _Pair) -> Tensor:
    return pair.smoothed(pair.beta * (pair.a.sort().values - pair.b.sort().values))


def _discopop(pair: _Pair) -> Tensor:
    z = pair.beta * pair.delta
    log_mix = logsigmoid(z / _DISCOPOP_TAU)
    exponential = torch.exp(log_mix - z)  # one exponent: e^(−z) alone overflows where its weight is 0
    return -logsigmoid(z) * torch.sigmoid(-z / _DISCOPOP_TAU) + exponential


_LOSSES: dict[str, Callable[[_Pair], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "robust": _robust,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "discopop": _discopop,
}
DPO_LOSSES = tuple(_LOSSES)
"""The names `dpo_loss` knows."""
WHOLE_BATCH_DPO_LOSSES = ("aot", "aot_unpaired")
"""Losses whose value for one pair depends on the others: all pairs of a batch must be given in one call."""

_READS = {
    "label_smoothing": ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"),
    "divergence": ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"),
}

_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_kl": lambda log_ratio: log_ratio,
    "forward_kl": lambda log_ratio: -torch.expm1(-log_ratio),
    "js": lambda log_ratio: math.log(2.0) + logsigmoid(log_ratio),
}


def _refuse_unread(loss: str, **given: bool) -> None:
    for option, is_given in given.items():
        if is_given and loss not in _READS[option]:
            raise ValueError(f"the {loss} loss does not read {option}; only {', '.join(_READS[option])} do")
