"""Keys and values that the sampler keeps, and the three ways of attending to them while tokens are written.

1. `KVBlock`       keys and values of consecutive tokens of one sequence, layer by layer.
2. `Prefix`        a context that several rollouts start with: its block is stored once, however many of them there are.
3. `Row`           one rollout: the prefix it shares (or none) and its own block behind it.
4. `attend_part`   softmax attention over a part of the keys, with its log-sum-exp, so that parts add up exactly (`merge`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from postgrad.protocols import SampleKey


class KVBlock:
    """Room for the keys and values of up to `capacity` tokens: per layer [capacity, H_kv, D], made when a layer first writes."""

    __slots__ = ("capacity", "keys", "values")

    def __init__(self, capacity: int, keys: list[Tensor] | None = None, values: list[Tensor] | None = None) -> None:
        self.capacity = capacity
        self.keys: list[Tensor] = keys or []
        self.values: list[Tensor] = values or []

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, H_kv, D] of tokens start … start + T. Layers must come in order the first time."""
        if layer == len(self.keys):
            self.keys.append(key.new_empty(self.capacity, *key.shape[1:]))
            self.values.append(value.new_empty(self.capacity, *value.shape[1:]))
        self.keys[layer][start : start + len(key)] = key
        self.values[layer][start : start + len(value)] = value

    def copied(self, length: int, capacity: int) -> KVBlock:
        """A block of its own with the first `length` tokens of this one."""
        fresh = KVBlock(capacity)
        for old, new in ((self.keys, fresh.keys), (self.values, fresh.values)):
            for tensor in old:
                room = tensor.new_empty(capacity, *tensor.shape[1:])
                room[:length] = tensor[:length]
                new.append(room)
        return fresh

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))


@dataclass(eq=False)
class Prefix:
    """A context computed once for all rollouts that start with it. last_hidden [width] predicts the token behind it."""

    ids: tuple[int, ...]
    block: KVBlock
    last_hidden: Tensor | None = None


@dataclass(eq=False)
class Row:
    """One rollout's cache. `ids` are the tokens whose keys and values exist: the prefix's, then `own_length` in its own block."""

    key: SampleKey
    prefix: Prefix | None
    own: KVBlock
    ids: list[int] = field(default_factory=list)

    @property
    def own_length(self) -> int:
        return len(self.ids) - (len(self.prefix.ids) if self.prefix else 0)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences start with alike."""
    limit = min(len(left), len(right))
    if tuple(left[:limit]) == tuple(right[:limit]):
        return limit
    return next(index for index in range(limit) if left[index] != right[index])


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """query [B, H, T, D] over keys and values [B, H, S, D] -> (output [B, H, T, D], log-sum-exp fp32 [B, H, T]).

    mask (added to the scores, broadcast to [B, H, T, S]) must leave every query at least one key; causal needs T = S.
    """
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
    scores = query.float() @ key.float().transpose(-1, -2) * (scaling or 1.0 / math.sqrt(query.shape[-1]))
    if causal:
        mask = causal_mask(query.shape[-2], key.shape[-2], scores)
    if mask is not None:
        scores = scores + mask
    total = scores.logsumexp(-1)
    return (torch.exp(scores - total.unsqueeze(-1)) @ value.float()).to(query.dtype), total


def causal_mask(queries: int, keys: int, like: Tensor) -> Tensor:
    """[queries, keys] of 0 and -inf: the last query sees every key, each earlier one a key less."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(~seen, -math.inf)


def merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two parts' keys: outputs [..., D] weighted by the parts' shares of the softmax's denominator."""
    (first, first_lse), (second, second_lse) = left, right
    share = torch.sigmoid(second_lse - first_lse).unsqueeze(-1)
    return torch.lerp(first.float(), second.float(), share).to(first.dtype)
