"""Preference losses beside DPO: without a reference (SimPO, CPO, ORPO), on labelled single answers (KTO), with less regard to length."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from postgrad.formulas._numeric import counted, read, require, require_finite, require_same_shape, select


def simpo_loss(
    chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor, *, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """The chosen answer should be likelier per token than the rejected one, by more than a margin. No reference.

        loss_SimPO = −log σ( β·(log π(chosen)/|chosen| − log π(rejected)/|rejected|) − γ )

    Shapes: summed log-probs and token counts [N] -> [N].
    Edge cases: equal answers and γ = 0 give ln 2; an answer without tokens raises; non-finite raises `NonFiniteError`.

    >>> simpo_loss(torch.tensor([-2.0]), torch.tensor([-6.0]), torch.tensor([2]), torch.tensor([3]), beta=2.0, gamma=1.0)
    tensor([0.3133])

    Source: arXiv 2405.14734, eq. 6. TRL writes γ as beta · (gamma / beta), which is the same.
    """
    _require_beta(beta)
    require(math.isfinite(gamma), f"gamma must be finite, got {gamma}")
    per_token = _per_token(chosen, chosen_tokens) - _per_token(rejected, rejected_tokens)
    return require_finite("simpo_loss", -logsigmoid(beta * per_token - gamma))


def cpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """DPO's loss with a uniform reference: the contrastive part of CPO.

        loss_CPO = −log σ( β·(log π(chosen) − log π(rejected)) )

    Shapes: summed log-probs [N] -> [N]. CPO adds the negative log-likelihood of the chosen answer: the loss `sft` beside this one.
    Edge cases: equal log-probs give ln 2; non-finite raises `NonFiniteError`.

    >>> cpo_loss(torch.tensor([-2.0]), torch.tensor([-6.0]), beta=0.5)
    tensor([0.1269])

    Source: arXiv 2401.08417, eq. 6.
    """
    _require_beta(beta)
    require_same_shape(chosen=chosen, rejected=rejected)
    return require_finite("cpo_loss", -logsigmoid(beta * (read("chosen", chosen) - read("rejected", rejected))))


def orpo_loss(chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor) -> Tensor:
    """The odds of the chosen answer against those of the rejected one, each from its mean log-prob per token.

        loss_OR = −log σ( log odds(chosen) − log odds(rejected) ),   odds(y) = p/(1 − p),  log p = log π(y)/|y|

    Shapes: summed log-probs and token counts [N] -> [N]. ORPO adds this, times λ, to the negative log-likelihood of the chosen answer:
    the loss `sft` beside this one. Edge cases: an answer that is certain (p = 1) has infinite odds and raises `NonFiniteError`.

    >>> orpo_loss(torch.tensor([-1.0]), torch.tensor([-4.0]), torch.tensor([2]), torch.tensor([2]))
    tensor([0.0967])

    Source: arXiv 2403.07691, eq. 5 to 7.
    """
    odds = [_log_odds(_per_token(answer, tokens)) for answer, tokens in ((chosen, chosen_tokens), (rejected, rejected_tokens))]
    return -logsigmoid(odds[0] - odds[1])


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Labelled single answers: a desirable one should be likelier than under the reference by more than the KL, an undesirable one less.

        loss_KTO = λ_D·(1 − σ(β·(r − z)))  where desirable,  λ_U·(1 − σ(β·(z − r)))  where not,   r = log π(y)/π_ref(y),  z = max(kl, 0)

    Shapes: summed log-probs [N], `desirable` bool [N], `kl` a scalar tensor (no gradient goes through it) -> [N]. `kl` is the mean of
    log π(y')/π_ref(y') over prompts with other prompts' answers. Edge cases: policy = reference gives half of each weight;
    non-finite raises `NonFiniteError`.

    >>> zero = torch.zeros(2)
    >>> kto_loss(zero, zero, torch.tensor([True, False]), torch.tensor(0.0), undesirable_weight=2.0)
    tensor([0.5000, 1.0000])

    Source: arXiv 2402.01306, eq. 8.
    """
    _require_beta(beta)
    require(desirable_weight > 0 and undesirable_weight > 0, f"weights must be positive, got {desirable_weight} and {undesirable_weight}")
    require_same_shape(policy=policy, reference=reference, desirable=desirable)
    gain = read("policy", policy) - read("reference", reference)
    baseline = read("kl", kl).detach().clamp(min=0)
    good = counted(desirable, gain.shape)
    distance = torch.where(good, gain - baseline, baseline - gain)
    weight = torch.where(good, desirable_weight, undesirable_weight)
    return weight * (1 - torch.sigmoid(beta * distance))


def length_desensitized_sum(logprobs: Tensor, mask: Tensor, shared: Tensor, *, alpha: float) -> Tensor:
    """The log-prob of an answer in which the tokens beyond the other answer's length count less.

        log π_LD(y) = Σ_{t ≤ l} log π(y_t) + α·Σ_{t > l} log π(y_t),   l = min(|chosen|, |rejected|)

    Shapes: logprobs and mask [N, T], `shared` [N] = l -> [N]. α = 1 is the plain sum, α = 0 cuts both answers to one length. Counted
    tokens are numbered by themselves, whatever stands between them. Edge cases: outside the mask nothing counts, whatever is there;
    non-finite values inside raise `NonFiniteError`.

    >>> length_desensitized_sum(torch.tensor([[-1.0, -2.0, -4.0]]), torch.ones(1, 3, dtype=torch.bool), torch.tensor([2]), alpha=0.5)
    tensor([-5.])

    Source: LD-DPO, arXiv 2409.06411, eq. 10.
    """
    require(0 <= alpha <= 1, f"alpha must lie in [0, 1], got {alpha}")
    counts = counted(mask, logprobs.shape)
    beyond = counts.cumsum(-1) > shared[:, None]
    values = select(logprobs, mask)
    return require_finite("length_desensitized_sum", torch.where(beyond, alpha * values, values).sum(-1))


def _require_beta(beta: float) -> None:
    require(0 < beta < math.inf, f"beta must be positive and finite, got {beta}")


def _per_token(logprobs: Tensor, tokens: Tensor) -> Tensor:
    require_same_shape(logprobs=logprobs, tokens=tokens)
    require(bool((tokens > 0).all()), "an answer has no tokens")
    return read("log-probs", logprobs) / tokens


def _log_odds(mean_logprob: Tensor) -> Tensor:
    return require_finite("log odds", mean_logprob - torch.log(-torch.expm1(mean_logprob)))
