"""Attention over a flat row on an accelerator: one fused kernel (PyTorch's flex attention) instead of one call per segment.

**Not yet run on a GPU.** What a CPU can show is tested: who attends to whom, and the forward. So the kernel is not believed: before its
first use on a device, for each shape of heads, its output and gradients are compared there with `plain_attention`. Where it fails or
differs, plain attention is used, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from postgrad.models.dtype import product_dtype
from postgrad.models.segments import Segment, plain_attention

logger = logging.getLogger("postgrad")

_PROBE = (Segment(0, 40), Segment(40, 75, (0, 40)), Segment(75, 76, (0, 40)), Segment(76, 200))


def block_mask(segments: Sequence[Segment], device: torch.device) -> BlockMask:
    """Which blocks of queries and keys the kernel visits, and which tokens in them see each other."""
    tokens = segments[-1].stop
    return create_block_mask(visible(segments, device), None, None, tokens, tokens, device=device)


def visible(segments: Sequence[Segment], device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(batch, head, query, key) -> whether that query sees that key: its own segment up to itself, and all of its prefix."""
    lengths = torch.tensor([segment.stop - segment.start for segment in segments])
    own, start, stop = (
        values.repeat_interleave(lengths).to(device)
        for values in (
            torch.arange(len(segments)),
            torch.tensor([segment.prefix[0] if segment.prefix else 0 for segment in segments]),
            torch.tensor([segment.prefix[1] if segment.prefix else 0 for segment in segments]),
        )
    )

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((own[query] == own[key]) & (query >= key)) | ((key >= start[query]) & (key < stop[query]))

    return mask


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scaling: float | None) -> Tensor:
    """query [H, T, D], key and value [H_kv, T, D] -> [T, H, D].

    Under autocast in its dtype: queries and keys may be fp32 (from a norm) beside values in bf16, and the kernel wants one dtype.
    """
    dtype = product_dtype(query)
    query, key, value = (tensor[None].to(dtype) for tensor in (query, key, value))
    output = _kernel(query.device)(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return cast(Tensor, output)[0].transpose(0, 1)


def usable(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel gives the right numbers on this device, for these heads. It has no backward on a CPU."""
    if query.device.type == "cpu":
        return False
    return agrees(query.device, product_dtype(query), (query.shape[0], key.shape[0], query.shape[2]))


@cache
def agrees(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> bool:
    """Compare with plain attention on a few tokens; `heads` are (query heads, key heads, width)."""
    query_heads, key_heads, width = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(query_heads, _PROBE[-1].stop, width), *[(key_heads, _PROBE[-1].stop, width)] * 2]
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):  # the first caller may only read, and under autocast
        try:
            ours = _with_gradients(attend(query, key, value, block_mask(_PROBE, device), scaling=None), (query, key, value))
        except Exception as error:  # a compiler's errors have no common type
            logger.warning("the fused attention kernel does not run on %s, which is slower: %s", device, str(error).partition("\n")[0])
            return False
        plain = _with_gradients(plain_attention(query, key, value, _PROBE, scaling=None, dropout=0.0), (query, key, value))
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    agreed = all(bool((one - two).abs().max() <= tolerance * two.abs().max()) for one, two in zip(ours, plain, strict=True))
    if not agreed:
        logger.warning("the fused attention kernel gives other numbers than plain attention on %s and is not used", device)
    return agreed


def _with_gradients(output: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    return [tensor.detach().float() for tensor in (output, *torch.autograd.grad(output, operands, weight))]


@cache
def _kernel(device: torch.device) -> Any:
    """Compiled: only then is it one kernel. On a CPU, where only tests come here, it is not worth a compiler."""
    return flex_attention if device.type == "cpu" else torch.compile(flex_attention, dynamic=True)
