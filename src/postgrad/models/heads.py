"""Log-probs and entropy of chosen tokens from hidden states, without a [tokens × vocabulary] tensor.

The head's logits are made in tiles. Two passes, for any loss: a tile is every token × a slice of the vocabulary.
1. Forward: each tile gives its own log-normaliser and mean logit; the whole vocabulary's follow from the tiles'. Nothing else is kept.
2. Backward: the tiles are made again, and become the gradient in place (of the log-probs, and of the entropy if the loss reads it).
   A slice of the vocabulary sees every token at once, so its share of the weight's gradient is one matrix product, summed in fp32
   and rounded at most once, however many tokens there are.

One pass, where the loss's derivative by each log-prob is known before the log-probs are (SFT, a policy that is its own π_old): a tile is a
few tokens × the whole vocabulary. It gives its log-probs and becomes the gradient at once, so no logit is made twice.

Precision: under bf16 autocast only the matrix products are bf16. Normalisers, probabilities and the gradient at the target,
g · (1 − p), are fp32: in bf16 `exp(logits − logZ)` is wrong by per cents, and 1 − p of a confident token by 100 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from postgrad.models.dtype import at_least_fp32, product_dtype

_TILE_ELEMENTS = 1 << 23
"""Logits in one tile (16 MB in bf16): large enough for full speed of the matrix product."""
_SMALLEST_SLICE = 256
_BLOCK_ELEMENTS = 1 << 18
"""Logits in one block of elementwise work (1 MB in fp32), so that its steps stay in the processor's cache."""


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    gradient: Tensor | None = None,
    into: Tensor | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs (nats) of `targets` under softmax(z / temperature), and that distribution's entropy.

        z = scale · (hidden @ weight.T + bias), and with a softcap  z = softcap · tanh(scale · (hidden @ weight.T + bias) / softcap)

    hidden [N, width]; weight [V, width], may be frozen or tied; targets [N]; bias [V] or None.
    Returns logprobs [N] and entropy [N] in nats, both differentiable, both fp32 (fp64 for fp64 inputs). A loss that leaves the entropy
    alone pays nothing for its gradient.
    gradient [N]: the loss's derivative by each log-prob, where it is known already: one pass instead of two, and an entropy without a
    gradient. The backward raises `RuntimeError` if the loss turns out to have another derivative.
    into [V, width], at least fp32: where the weight's gradient is added as it is made, instead of being handed to autograd, which would
    hold another tensor of that size through the whole backward. With `gradient` that is before this function returns.
    `tile` is the number of vocabulary entries per tile, with `gradient` the number of tokens (None: by size). Matrix products run in the
    autocast dtype if there is one.

    >>> logprobs, entropy = selected_logprobs(torch.zeros(1, 4), torch.ones(8, 4), torch.tensor([3]), temperature=1.0)
    >>> round(logprobs.item(), 4), round(entropy.item(), 4)   # uniform over 8: -ln 8 and ln 8
    (-2.0794, 2.0794)
    """
    if temperature <= 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    cap = None if softcap is None else _Softcap(softcap, temperature)
    factor = scale / temperature if cap is None else scale
    if factor != 1.0:
        hidden = hidden.to(at_least_fp32(hidden.dtype)) * factor
        bias = None if bias is None else bias * factor
    if into is not None and into.dtype != at_least_fp32(into.dtype):
        raise ValueError(f"a gradient that is added up in {into.dtype} loses digits: give `into` in fp32")
    dtype = product_dtype(hidden)
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    with torch.autocast(hidden.device.type, enabled=False):  # it would take the statistics' dot products to bf16 as well
        if gradient is None:
            width = tile or _slice_width(tokens, vocabulary)
            result = _TwoPasses.apply(hidden, weight, bias, targets, width, dtype, cap, into)  # type: ignore[no-untyped-call]
        else:
            rows = tile or max(1, _TILE_ELEMENTS // vocabulary)
            result = _OnePass.apply(hidden, weight, bias, targets, rows, dtype, cap, into, gradient)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", result)


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, width: int, dtype: torch.dtype,
        softcap: _Softcap | None, into: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        head = _Head(hidden.to(dtype), weight, bias, targets, width, softcap)
        target_logits = torch.empty(targets.shape, dtype=at_least_fp32(hidden.dtype), device=hidden.device)
        normalisers, means = [], []
        for tile in head.tiles():
            target_logits[tile.hit] = tile.logits[tile.hit, tile.column].to(target_logits.dtype)
            normaliser, mean = _tile_statistics(tile.logits, target_logits.dtype)
            normalisers.append(normaliser)
            means.append(mean)
        by_tile = torch.stack(normalisers)
        log_normaliser = torch.logsumexp(by_tile, 0)
        mean_logit = ((by_tile - log_normaliser).exp() * torch.stack(means)).sum(0)
        logprobs, entropy = target_logits - log_normaliser, log_normaliser - mean_logit
        ctx.save_for_backward(head.hidden, weight, bias, targets, log_normaliser, logprobs, entropy)
        ctx.width, ctx.softcap, ctx.into, ctx.hidden_dtype = width, softcap, into, hidden.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        hidden, weight, bias, targets, log_normaliser, logprobs, entropy = ctx.saved_tensors
        head = _Head(hidden, weight, bias, targets, ctx.width, ctx.softcap)
        upstream = _Upstream(log_normaliser, torch.zeros_like(logprobs) if grad is None else grad, grad_entropy, entropy, ctx.softcap)
        at_target = upstream.at_target(logprobs)
        total = _Gradients.begun(head, ctx.needs_input_grad, ctx.into)
        for tile in head.tiles():
            _to_gradient(tile, upstream, at_target)
            total.add(tile, hidden, slice(None))
        return (*total.results(ctx.hidden_dtype, weight, bias, ctx.into), None, None, None, None, None)


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int, dtype: torch.dtype,
        softcap: _Softcap | None, into: Tensor | None, gradient: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        whole = _Head(hidden.to(dtype), weight.to(dtype), bias, targets, weight.shape[0], softcap)
        total = _Gradients.begun(whole, ctx.needs_input_grad, into)
        logprobs, entropies = [], []
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            head = whole._replace(hidden=whole.hidden[part], targets=targets[part])
            (tile,) = head.tiles()
            log_normaliser, mean_logit = _tile_statistics(tile.logits, at_least_fp32(hidden.dtype))
            logprob = tile.logits[tile.hit, tile.column].to(log_normaliser.dtype) - log_normaliser
            entropy = log_normaliser - mean_logit
            upstream = _Upstream(log_normaliser, gradient[part], None, entropy, softcap)
            _to_gradient(tile, upstream, upstream.at_target(logprob))
            total.add(tile, head.hidden, part)
            logprobs.append(logprob)
            entropies.append(entropy)
        ctx.save_for_backward(gradient, *total.results(hidden.dtype, weight, bias, into))
        ctx.set_materialize_grads(False)
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        announced, *gradients = ctx.saved_tensors
        if not torch.equal(grad, announced):
            raise RuntimeError("the loss has another derivative by the log-probs than the one that was announced")
        return (*gradients, None, None, None, None, None, None)


class _Softcap(NamedTuple):
    """logit = cap · tanh(raw / cap) / temperature."""

    cap: float
    temperature: float

    def bend_(self, raw: Tensor) -> Tensor:
        return raw.div_(self.cap).tanh_().mul_(self.cap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor:
        """d logit / d raw."""
        return (1 - (logits * (self.temperature / self.cap)).square()) / self.temperature


class _Tile(NamedTuple):
    """logits [N, C] of a slice of the vocabulary; `hit` are the tokens whose target lies in it, at `column`."""

    vocabulary: slice
    logits: Tensor
    weight: Tensor
    hit: Tensor
    column: Tensor


class _Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    width: int
    softcap: _Softcap | None

    def tiles(self) -> Iterator[_Tile]:
        """Logits [N, C] of one slice of the vocabulary after the other, in the dtype of the matrix products."""
        for start in range(0, self.weight.shape[0], self.width):
            vocabulary = slice(start, min(start + self.width, self.weight.shape[0]))
            weight = self.weight[vocabulary].to(self.hidden.dtype)
            logits = self.hidden @ weight.t()
            if self.bias is not None:
                logits += self.bias[vocabulary].to(logits.dtype)
            if self.softcap is not None:
                self.softcap.bend_(logits)
            hit = ((self.targets >= vocabulary.start) & (self.targets < vocabulary.stop)).nonzero().squeeze(1)
            yield _Tile(vocabulary, logits, weight, hit, self.targets[hit] - start)


def _tile_statistics(logits: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Per token: log Σ exp(logit) over the tile, and the mean logit under the tile's own softmax."""
    normalisers, means = [], []
    for block in torch.split(logits, _block_rows(logits)):
        largest = block.amax(-1, keepdim=True).to(exact)
        below = block - largest
        weights = below.exp()
        total = weights.sum(-1)
        largest = largest.squeeze(-1)
        normalisers.append(total.log() + largest)
        means.append(torch.linalg.vecdot(weights, below) / total + largest)
    return torch.cat(normalisers), torch.cat(means)


class _Upstream(NamedTuple):
    """The loss's gradient at each token: `grad` [N] by its log-prob, `grad_entropy` [N] by its entropy (None: the loss does not read it).

    By a logit z with p = exp(z − logZ): ∂ log-prob = 1[target] − p, ∂ entropy = −p · (log p + entropy). Both are passed on through the
    softcap to the product that the logit was made from.
    """

    log_normaliser: Tensor
    grad: Tensor
    grad_entropy: Tensor | None
    entropy: Tensor
    softcap: _Softcap | None

    def at_target(self, logprobs: Tensor) -> Tensor:
        """[N]: the gradient at the target."""
        gradient = self.grad * -torch.expm1(logprobs)
        if self.grad_entropy is not None:
            gradient = gradient - self.grad_entropy * logprobs.exp() * (logprobs + self.entropy)
        return gradient if self.softcap is None else gradient * self.softcap.slope(logprobs + self.log_normaliser)

    def rows(self, rows: slice) -> _Upstream:
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        return _Upstream(self.log_normaliser[rows], self.grad[rows], grad_entropy, self.entropy[rows], self.softcap)

    def elsewhere(self, logits: Tensor) -> Tensor:
        """[n, C]: the gradient at tokens that are not the target."""
        log_p = logits - self.log_normaliser[:, None]
        factor = -self.grad[:, None]
        if self.grad_entropy is not None:
            factor = factor - self.grad_entropy[:, None] * (log_p + self.entropy[:, None])
        gradient = log_p.exp_().mul_(factor)
        return gradient if self.softcap is None else gradient.mul_(self.softcap.slope(logits.to(gradient.dtype)))


def _to_gradient(tile: _Tile, upstream: _Upstream, at_target: Tensor) -> None:
    """Turn the tile's logits, in place, into the loss's gradient by the products that they were made from."""
    count = _block_rows(tile.logits)
    for start in range(0, len(tile.logits), count):
        rows = slice(start, start + count)
        tile.logits[rows].copy_(upstream.rows(rows).elsewhere(tile.logits[rows]))
    tile.logits[tile.hit, tile.column] = at_target[tile.hit].to(tile.logits.dtype)


class _Gradients(NamedTuple):
    """Sums in fp32 (fp64): of the hidden states, the weight and the bias; None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def begun(cls, head: _Head, needed: tuple[bool, ...], into: Tensor | None) -> _Gradients:
        """Zeros, and `into` for the weight where it is given."""
        zeros = partial(torch.zeros, dtype=at_least_fp32(head.hidden.dtype), device=head.hidden.device)
        by_hidden, by_weight, by_bias = needed[:3]
        return cls(
            zeros(head.hidden.shape) if by_hidden else None,
            (zeros(head.weight.shape) if into is None else into) if by_weight else None,
            zeros(head.weight.shape[:1]) if by_bias else None,
        )

    def add(self, tile: _Tile, hidden: Tensor, rows: slice) -> None:
        """What a tile that holds a gradient adds; `rows` are its tokens, `hidden` their states."""
        if self.hidden is not None:
            _add_product(self.hidden[rows], tile.logits, tile.weight)
        if self.weight is not None:
            _add_product(self.weight[tile.vocabulary], tile.logits.t(), hidden)
        if self.bias is not None:
            self.bias[tile.vocabulary] += tile.logits.sum(0, dtype=self.bias.dtype)

    def results(self, hidden: torch.dtype, weight: Tensor, bias: Tensor | None, into: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd is told, in the inputs' dtypes; of a weight whose gradient is there already, nothing."""
        by_weight = None if self.weight is into else _cast(self.weight, weight.dtype)
        return _cast(self.hidden, hidden), by_weight, _cast(self.bias, weight.dtype if bias is None else bias.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` may be wider than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slice_width(tokens: int, vocabulary: int) -> int:
    return min(vocabulary, max(_SMALLEST_SLICE, _TILE_ELEMENTS // max(tokens, 1)))


def _block_rows(logits: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS // logits.shape[1])


def _cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)
