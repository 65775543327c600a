"""From logits to tokens: temperature, filters, and one inverse-CDF draw per row.

1. Every filter is a threshold on the scaled logits, so a row's support is {token : logit / T >= threshold}.
2. The draw is inverse-CDF with one uniform per row, in two levels (blocks of 256 entries, then inside one block) with
   double-precision sums: exact to 1e-7 for the rarest token, and 20 times cheaper than `torch.multinomial` on a CPU.
3. Log-probs are those of softmax(logits / T) over the whole vocabulary, in fp32 or better, whatever the filters kept: the
   trainer computes the same number, so the importance ratio of an on-policy token is 1.

Tokens exactly as likely as the last one a filter keeps are kept too, so the support never depends on the order of ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.errors import RecipeError
from postgrad.protocols import SamplingParams

_BLOCK = 256
_LOGITS_AT_ONCE = 2**19
"""Rows are worked on in parts of about this many logits, whose fp32 copies stay in the processor's cache."""
_CANDIDATES = 1024
"""Top-p first looks at this many tokens, and sorts the whole vocabulary only where they hold too little mass."""

_ROUNDING = 1e-6
"""Mass of a nucleus within this of top_p counts as reached: fp32 weights cannot say more."""


class Picked(NamedTuple):
    """tokens int64 [B]; logprobs float64 [B]; finite bool [B]: False where the logits hold a NaN, +inf, or only -inf."""

    tokens: Tensor
    logprobs: Tensor
    finite: Tensor


def check_params(params: SamplingParams) -> None:
    """Raises `RecipeError` where a setting is outside its range."""
    checks = {
        "temperature": (params.temperature, 0.0 <= params.temperature < math.inf, "0 (greedy) or more"),
        "top_p": (params.top_p, 0.0 < params.top_p <= 1.0, "above 0 and at most 1 (1 = off)"),
        "top_k": (params.top_k, params.top_k >= 0, "0 (off) or more"),
        "min_p": (params.min_p, 0.0 <= params.min_p <= 1.0, "between 0 (off) and 1"),
    }
    for name, (value, good, allowed) in checks.items():
        if not good:
            raise RecipeError(f"{name} is {value}", where="sampling", hint=f"{name} takes a value {allowed}")
    if any(not text for text in params.stop_strings):
        raise RecipeError("a stop string is empty", where="sampling", hint="an empty stop string would end every turn at once")


def pick(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> Picked:
    """logits [B, V] of any float dtype, uniforms float64 [B] in [0, 1) (not read at temperature 0) -> one token per row."""
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    parts = [_pick_rows(logits[at : at + rows].float(), uniforms[at : at + rows], params) for at in range(0, len(logits), rows)]
    tokens, logprobs, finite = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Picked(tokens, logprobs, finite)


def _pick_rows(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> Picked:
    greedy = params.temperature == 0.0
    scaled = logits if greedy or params.temperature == 1.0 else logits / params.temperature
    top = scaled.amax(-1, keepdim=True)
    finite = torch.isfinite(top).squeeze(-1)
    weights = (scaled - top).exp_()
    if not finite.all():
        weights[~finite] = 1.0  # whatever is picked there is reported as not finite; a NaN must not become an index
    normaliser = _blocks(weights).sum(-1).double().sum(-1)
    tokens = scaled.argmax(-1, keepdim=True) if greedy else _inverse_cdf(_kept(weights, normaliser, params), uniforms)
    chosen = (scaled.gather(-1, tokens) - top).squeeze(-1).double() - normaliser.log()
    return Picked(tokens.squeeze(-1), chosen, finite)


def _blocks(weights: Tensor) -> Tensor:
    """[B, V] -> [B, ceil(V / 256), 256], filled up with zeros."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % _BLOCK))
    return padded.reshape(len(weights), -1, _BLOCK)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token where the running sum of the (unnormalised) weights first exceeds uniform x total: int64 [B, 1].

    A token of weight 0 is never returned: its running sum exceeds nothing that the token before it did not.
    """
    padded = _blocks(weights)
    running = padded.sum(-1).double().cumsum(-1)
    target = uniforms.unsqueeze(-1) * running[:, -1:]
    block = _first_above(running, target)
    before = torch.nn.functional.pad(running, (1, 0)).gather(-1, block)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, _BLOCK)).squeeze(1).double().cumsum(-1)
    share = (target - before) / (running.gather(-1, block) - before)
    return block * _BLOCK + _first_above(inside, share * inside[:, -1:])


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """First index whose running sum exceeds the target. Rounding may push a target up to the total: it then counts as just below."""
    below_total = torch.nextafter(running[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(running, torch.minimum(target, below_total), right=True)


def _kept(weights: Tensor, normaliser: Tensor, params: SamplingParams) -> Tensor:
    """The weights, 0 where a filter removes the token. weights [B, V] = exp(scaled logit - largest), normaliser double [B]."""
    floor = weights.new_zeros(len(weights), 1)
    if 0 < params.top_k < weights.shape[-1]:
        floor = weights.topk(params.top_k, dim=-1).values[:, -1:]
    if params.top_p < 1.0:
        floor = torch.maximum(floor, _nucleus_floor(weights, normaliser, floor, params.top_p))
    if params.min_p > 0.0:
        floor = torch.maximum(floor, weights.new_full((), params.min_p))
    return weights if not floor.any() else torch.where(weights >= floor, weights, 0.0)


def _nucleus_floor(weights: Tensor, normaliser: Tensor, floor: Tensor, top_p: float) -> Tensor:
    """Weight of the last token of the smallest set of most likely tokens that holds `top_p` of the mass above `floor`: [B, 1]."""
    mass = torch.where(floor.squeeze(-1) > 0, torch.where(weights >= floor, weights, 0.0).sum(-1).double(), normaliser)
    target = (top_p * mass).unsqueeze(-1)
    width = min(_CANDIDATES, weights.shape[-1])
    ranked = weights.topk(width, dim=-1).values
    if width < weights.shape[-1] and bool((ranked.double().sum(-1, keepdim=True) < target).any()):
        ranked = weights.sort(dim=-1, descending=True).values
    last = (ranked.double().cumsum(-1) < target * (1.0 - _ROUNDING)).sum(-1, keepdim=True)
    return ranked.gather(-1, last.clamp(max=ranked.shape[-1] - 1))
