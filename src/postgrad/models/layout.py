"""Who attends to whom in a flat row of tokens, and the exact attention over it.

1. `PackedLayout`  segments back to back. Rows of one group point to one copy of their prompt.
2. On a CPU each segment is one call of PyTorch's flash kernel. A row that continues a prefix is two calls (its own tokens, the
   prefix), merged through their log-sum-exp: softmax over the union of the keys. The backward gives both calls the merged
   output and log-sum-exp, which makes the gradients exact (tested against plain attention and with gradcheck).
3. On an accelerator all of it is one call of a fused kernel (`flex`).
4. With attention dropout, or where the kernels are missing: `segments.plain_attention`.

The kernels make no tensor of tokens × tokens. Grouped key-value heads are never repeated, and the order of segments changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from postgrad.models import flex
from postgrad.models.dtype import at_least_fp32, product_dtype
from postgrad.models.segments import Segment, plain_attention

_FLASH_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

_WIDEN_UP_TO = 256
"""Keys up to which the CPU kernel is faster in fp32 than in bf16 (backward at 45 keys: 4.5 times; even at 300; 0.7 at 2,000)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the flash kernel: queries attend to keys; `causal` within one segment, everything for a prefix."""

    query: slice
    key: slice
    causal: bool


@dataclass(frozen=True)
class PackedLayout:
    """Segments that cover the flat row without gap or overlap, in order."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        end = 0
        for segment in self.segments:
            if segment.start != end:
                raise ValueError(f"segment {segment.start}..{segment.stop} does not begin at {end}, where the last one ends")
            end = segment.stop

    @property
    def tokens(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        """See `attention.Layout`. query [H, T, D], key and value [H_kv, T, D] -> [T, H, D]."""
        if query.shape[1] != self.tokens:
            raise ValueError(f"the layout describes {self.tokens} tokens but the model was given {query.shape[1]}")
        if dropout == 0.0 and flash_available(query, key, value):
            return cast(Tensor, MergedFlash.apply(query, key, value, self._calls, scaling))  # type: ignore[no-untyped-call]
        if dropout == 0.0 and flex.usable(query, key):
            if query.device not in self._masks:
                self._masks[query.device] = flex.block_mask(self.segments, query.device)
            return flex.attend(query, key, value, self._masks[query.device], scaling=scaling)
        return plain_attention(query, key, value, self.segments, scaling=scaling, dropout=dropout)

    @cached_property
    def _masks(self) -> dict[torch.device, BlockMask]:
        """The fused kernel's, one for all layers."""
        return {}

    @cached_property
    def _calls(self) -> tuple[_Call, ...]:
        """Each segment to itself first; then neighbours that continue one prefix, all at once, to that prefix."""
        own = [_Call(slice(s.start, s.stop), slice(s.start, s.stop), causal=True) for s in self.segments]
        return (*own, *_prefix_calls(self.segments))


def _prefix_calls(segments: Sequence[Segment]) -> Iterator[_Call]:
    for prefix, neighbours in groupby(segments, key=lambda segment: segment.prefix):
        if prefix is not None:
            rows = list(neighbours)
            yield _Call(slice(rows[0].start, rows[-1].stop), slice(*prefix), causal=False)


def flash_available(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """PyTorch's CPU flash kernel exists and takes these tensors (it needs one head width)."""
    if _FLASH_FORWARD is None or _FLASH_BACKWARD is None:
        return False
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] == key.shape[-1]


class MergedFlash(torch.autograd.Function):
    """softmax(scale · q kᵀ) v over each query's segment and prefix, by flash calls merged through log-sum-exp.

    With L the log-sum-exp over all keys of a query, o = Σ_calls exp(l_call − L) · o_call. A flash backward needs only
    (o, L) to restore its share of the softmax, p = exp(scale · q k − L), so each call's gradients are exact and add up.
    Under autocast the inputs are kept in the autocast dtype, as stock attention would do.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[_Call], scale: float | None) -> Tensor:
        kept = [tensor.to(product_dtype(query))[None] for tensor in (query, key, value)]
        output = _by_token(kept[0])
        logsumexp = torch.empty(output.shape[:3], dtype=output.dtype, device=query.device)
        operands = _InTwoWidths(kept)
        for call in calls:
            q, k, v = operands.of(call)
            part, part_lse = _flash_forward(q[:, :, call.query], k[:, :, call.key], v[:, :, call.key], call.causal, scale)
            if call.causal:
                output[:, :, call.query], logsumexp[:, :, call.query] = part, part_lse
            else:
                _merge(output[:, :, call.query], logsumexp[:, :, call.query], part, part_lse)
        output = output.to(kept[0].dtype)
        ctx.save_for_backward(*kept, output, logsumexp)
        ctx.calls, ctx.scale = calls, scale
        ctx.dtypes = (query.dtype, key.dtype, value.dtype)
        return output[0].transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *kept, output, logsumexp = ctx.saved_tensors
        operands = _InTwoWidths([*kept, grad_output.transpose(0, 1)[None], output])
        totals = [_by_token(tensor).zero_() for tensor in kept]
        for call in ctx.calls:
            q, k, v, grad, out = operands.of(call)
            keys = k[:, :, call.key], v[:, :, call.key]
            outer = grad[:, :, call.query], out[:, :, call.query], logsumexp[:, :, call.query]
            parts = _flash_backward(q[:, :, call.query], *keys, *outer, call.causal, ctx.scale)
            for total, part, where in zip(totals, parts, (call.query, call.key, call.key), strict=True):
                total[:, :, where] += part
        return (*(total[0].to(dtype) for total, dtype in zip(totals, ctx.dtypes, strict=True)), None, None)


class _InTwoWidths:
    """Tensors as they are kept and, from the first call with few keys on, in fp32: converted whole, not call by call."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        self._kept = kept
        self._wide: list[Tensor] | None = None

    def of(self, call: _Call) -> Sequence[Tensor]:
        """All tensors, in the width that suits this call."""
        if call.key.stop - call.key.start > _WIDEN_UP_TO:
            return self._kept
        if self._wide is None:
            self._wide = [tensor.to(at_least_fp32(tensor.dtype)) for tensor in self._kept]
        return self._wide


def _by_token(like: Tensor) -> Tensor:
    """An empty [1, H, T, D], at least fp32, laid out token by token as the projections want it."""
    _, heads, tokens, width = like.shape
    return torch.empty(1, tokens, heads, width, dtype=at_least_fp32(like.dtype), device=like.device).transpose(1, 2)


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    assert _FLASH_FORWARD is not None
    return cast("tuple[Tensor, Tensor]", _FLASH_FORWARD(query, key, value, 0.0, causal, scale=scale))


def _flash_backward(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, output: Tensor, logsumexp: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert _FLASH_BACKWARD is not None
    parts = _FLASH_BACKWARD(grad, query, key, value, output, logsumexp, 0.0, causal, scale=scale)
    return cast("tuple[Tensor, Tensor, Tensor]", parts)


def _merge(output: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold one more call into (output, logsumexp), in place."""
    total = torch.logaddexp(logsumexp, part_lse)
    merged = output * (logsumexp - total).exp().unsqueeze(-1) + part * (part_lse - total).exp().unsqueeze(-1)
    output.copy_(merged)
    logsumexp.copy_(total)
