"""Keys and values that the sampler keeps, and attention over parts of them.

1. `KVBlock`       keys and values of consecutive tokens of one sequence, layer by layer.
2. `Prefix`        the context that a rollout started with: stored once, however many rollouts start with it.
3. `Row`           one rollout: its prefix, and its own block behind it (what it sampled, and what tools answered).
4. `Stack`         blocks of several sequences side by side, padded, so that one call attends to all of them.
5. `attend_part`   softmax attention over a part of the keys, with its log-sum-exp, so that parts add up exactly (`merge`).

Attention is always split at the same place, prefix | own, and each part is computed in a shape that does not change a row's bits
when other rows come and go: keys in multiples of 16 behind a mask, queries in multiples of 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.protocols import SampleKey

KEYS_MULTIPLE = 16
QUERIES_MULTIPLE = 4


def round_up(count: int, multiple: int) -> int:
    """
    >>> round_up(17, 16), round_up(32, 16)
    (32, 32)
    """
    return -(-count // multiple) * multiple


class KVBlock:
    """Room for the keys and values of up to `capacity` tokens: per layer [capacity, H_kv, D], made when a layer first writes.

    Unused room is zero, never uninitialised: a NaN there would reach the output even with weight 0.
    """

    __slots__ = ("capacity", "keys", "values")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, H_kv, D] of tokens start … start + T. Layers must come in order the first time."""
        if layer == len(self.keys):
            self.keys.append(key.new_zeros(self.capacity, *key.shape[1:]))
            self.values.append(value.new_zeros(self.capacity, *value.shape[1:]))
        self.keys[layer][start : start + len(key)] = key
        self.values[layer][start : start + len(value)] = value

    def copied(self, length: int, capacity: int) -> KVBlock:
        """A block of its own with the first `length` tokens of this one."""
        fresh = KVBlock(capacity)
        for old, new in ((self.keys, fresh.keys), (self.values, fresh.values)):
            for tensor in old:
                room = tensor.new_zeros(capacity, *tensor.shape[1:])
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

    @classmethod
    def of(cls, ids: tuple[int, ...]) -> Prefix:
        return cls(ids, KVBlock(round_up(len(ids), 2 * KEYS_MULTIPLE)))

    def leave_stack(self) -> None:
        """Give the block memory of its own if it is a slot of a stack."""
        if any(tensor.untyped_storage().nbytes() > tensor.nbytes for tensor in self.block.keys):
            self.block = self.block.copied(len(self.ids), self.block.capacity)


@dataclass(eq=False)
class Row:
    """One rollout's cache. `ids` are the tokens whose keys and values exist: the prefix's, then `own_length` in its own block."""

    key: SampleKey
    prefix: Prefix
    own: KVBlock
    ids: list[int]

    @classmethod
    def behind(cls, key: SampleKey, prefix: Prefix) -> Row:
        return cls(key, prefix, KVBlock(0), list(prefix.ids))

    @property
    def own_length(self) -> int:
        return len(self.ids) - len(self.prefix.ids)


class Stack:
    """Blocks side by side, one slot each: keys and values per layer [slots, capacity, H_kv, D].

    Building it moves the blocks into it layer by layer (each block's tensors become views of its slot), so no more than one
    layer exists twice.
    """

    def __init__(self, blocks: Sequence[KVBlock], lengths: Sequence[int], capacity: int) -> None:
        self.blocks = list(blocks)
        self.capacity = capacity
        layers = max(len(block.keys) for block in blocks)
        self.keys = [_stacked([block.keys for block in blocks], lengths, layer, capacity) for layer in range(layers)]
        self.values = [_stacked([block.values for block in blocks], lengths, layer, capacity) for layer in range(layers)]
        for block in blocks:
            block.capacity = capacity
        self._width = capacity
        self._lengths = list(lengths)
        self._mask: Tensor | None = None

    def see(self, lengths: Sequence[int], width: int) -> None:
        """From now on slot i shows its first lengths[i] tokens; the longest of interest fits into `width`."""
        self._lengths, self._width, self._mask = list(lengths), round_up(width, KEYS_MULTIPLE), None

    def store(self, layer: int, slots: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key and value [n, H_kv, D] at position places[i] of slot slots[i]."""
        if layer == len(self.keys):  # none of the blocks held a token yet
            for block, tensors in ((key, self.keys), (value, self.values)):
                tensors.append(block.new_zeros(len(self.blocks), self.capacity, *block.shape[1:]))
            for slot, owner in enumerate(self.blocks):
                owner.keys.append(self.keys[layer][slot])
                owner.values.append(self.values[layer][slot])
        flat = slots * self.capacity + places
        self.keys[layer].flatten(0, 1).index_copy_(0, flat, key)
        self.values[layer].flatten(0, 1).index_copy_(0, flat, value)

    def attend(self, layer: int, query: Tensor, *, scaling: float | None) -> tuple[Tensor, Tensor]:
        """query [slots, H_kv, Q, D], each over its own slot -> (output like it, log-sum-exp [slots, H_kv, Q])."""
        keys, values = (tensors[layer][:, : self._width].transpose(1, 2) for tensors in (self.keys, self.values))
        return attend_part(query, keys, values, scaling=scaling, mask=self._visible(query))

    def _visible(self, like: Tensor) -> Tensor:
        """[slots, 1, 1, width] of 0 and -inf: the same in all layers."""
        if self._mask is None:
            hidden = torch.arange(self._width) >= torch.tensor(self._lengths).unsqueeze(-1)
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -math.inf)
            self._mask = mask[:, None, None].to(like.device)
        return self._mask


def _stacked(blocks: Sequence[list[Tensor]], lengths: Sequence[int], layer: int, capacity: int) -> Tensor:
    """One layer of all blocks in one buffer; the blocks become views of it."""
    like = next(block[layer] for block in blocks if layer < len(block))
    buffer = like.new_zeros(len(blocks), capacity, *like.shape[1:])
    for slot, (block, length) in enumerate(zip(blocks, lengths, strict=True)):
        if layer < len(block):
            buffer[slot, :length] = block[layer][:length]
            block[layer] = buffer[slot]
        else:  # this sequence holds no token yet
            block.append(buffer[slot])
    return buffer


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences start with alike.

    >>> common_length([1, 2, 3], (1, 2, 4, 5))
    2
    """
    limit = min(len(left), len(right))
    if tuple(left[:limit]) == tuple(right[:limit]):
        return limit
    return next(index for index in range(limit) if left[index] != right[index])


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """query [B, H, T, D] over keys and values [B, H, S, D] -> (output [B, H, T, D], log-sum-exp fp32 [B, H, T]).

    mask (added to the scores, broadcast to [B, H, T, S]) must leave every query at least one key. causal: query t sees the keys
    up to t, and T may exceed S by padding.
    """
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
    return attend_part_plainly(
        query, key, value, scaling=scaling, mask=causal_mask(query.shape[-2], key.shape[-2], query) if causal else mask
    )


def attend_part_plainly(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`attend_part` written out, for devices without a kernel that returns the log-sum-exp."""
    scores = query.float() @ key.float().transpose(-1, -2) * (scaling or 1.0 / math.sqrt(query.shape[-1]))
    if mask is not None:
        scores = scores + mask
    total = scores.logsumexp(-1)
    return (torch.exp(scores - total.unsqueeze(-1)) @ value.float()).to(query.dtype), total


def causal_mask(queries: int, keys: int, like: Tensor, *, before: int = 0) -> Tensor:
    """[queries, keys] of 0 and -inf: query t sees the keys up to before + t."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(before)
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(~seen, -math.inf)


def merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two parts' keys: outputs [..., D] weighted by the parts' shares of the softmax's denominator.

    The shares are computed in double: a vectorised fp32 exp rounds the last elements of a tensor differently from the others.
    """
    (first, first_lse), (second, second_lse) = left, right
    share = torch.sigmoid((second_lse - first_lse).double()).float().unsqueeze(-1)
    return torch.lerp(first.float().contiguous(), second.float().contiguous(), share).to(first.dtype)
