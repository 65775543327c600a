"""The two layouts of a flat row of tokens that a sampler needs, both writing keys and values as they go.

`ChunkLayout`   several sequences, each reading a run of tokens (prompts, tool results): one attention call per sequence.
`StepLayout`    one token of every live rollout. Own keys lie in `Lane`s, padded blocks of rollouts of similar length, with one
                attention call per lane; shared prefixes get one call each for all the rollouts behind them.

Only live rollouts have a place in the flat row. Those that finished keep their slot in a lane, unused, until it is rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from postgrad.models.kv import KVBlock, Prefix, Row, attend_part, causal_mask, merge


@dataclass(eq=False)
class Piece:
    """`length` new tokens of one sequence: their keys go to block[start : start + length], and they also see `prefix`."""

    block: KVBlock
    start: int
    length: int
    prefix: Prefix | None = None
    mask: Tensor | None = None
    """Which of the block's tokens each new token sees; made in the first layer, the same in all of them."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """query [H_kv, G, T, D], key and value [T, H_kv, D] -> [H_kv, G, T, D]."""
        self.block.write(layer, self.start, key, value)
        end = self.start + self.length
        if self.start and self.mask is None:
            self.mask = causal_mask(self.length, end, query)
        keys, values = (_per_query_head(tensors[layer][:end], query) for tensors in (self.block.keys, self.block.values))
        own = attend_part(query, keys, values, scaling=scaling, mask=self.mask, causal=self.mask is None)
        if self.prefix is None:
            return own[0]
        keys, values = (_per_query_head(tensors[layer], query) for tensors in (self.prefix.block.keys, self.prefix.block.values))
        return merge(own, attend_part(query, keys, values, scaling=scaling))


def _per_query_head(stored: Tensor, query: Tensor) -> Tensor:
    """[S, H_kv, D] -> a view [H_kv, G, S, D]: the G query heads that share a key head see the same memory."""
    return stored.transpose(0, 1).unsqueeze(1).expand(-1, query.shape[1], -1, -1)


class ChunkLayout:
    """Pieces one after the other in a flat row; tokens behind the last piece are padding."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        grouped = query.unflatten(0, (len(key), -1))
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        outputs, at = [], 0
        for piece in self._pieces:
            run = slice(at, at + piece.length)
            outputs.append(piece.attend(layer, grouped[:, :, run], keys[run], values[run], scaling=scaling))
            at += piece.length
        joined = torch.cat(outputs, 2).flatten(0, 1).transpose(0, 1)
        return _padded(joined, query.shape[1])


def _padded(output: Tensor, tokens: int) -> Tensor:
    """[n, H, D] -> [tokens, H, D]: padding tokens attend to nothing."""
    return pad(output, (0, 0, 0, 0, 0, tokens - len(output))) if len(output) < tokens else output


class Lane:
    """Own keys and values of rollouts of similar length, one slot each, padded to `capacity` tokens: [slots, capacity, H_kv, D].

    Building it moves the rows' blocks into it layer by layer, so that no more than one layer exists twice. Unused room is
    zero, never uninitialised: a NaN there would reach the output even with weight 0.
    """

    def __init__(self, rows: Sequence[Row], capacity: int) -> None:
        self.rows = list(rows)
        self.capacity = capacity
        self._lengths = [row.own_length for row in rows]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        for layer in range(max(len(row.own.keys) for row in rows)):
            self._keys.append(self._gather(layer, [row.own.keys for row in rows]))
            self._values.append(self._gather(layer, [row.own.values for row in rows]))
        for row in rows:
            row.own.capacity = capacity

    def _gather(self, layer: int, blocks: list[list[Tensor]]) -> Tensor:
        like = next(block[layer] for block in blocks if layer < len(block))
        buffer = like.new_zeros(len(blocks), self.capacity, *like.shape[1:])
        for slot, (block, length) in enumerate(zip(blocks, self._lengths, strict=True)):
            self._adopt(buffer, slot, layer, block, length)
        return buffer

    @staticmethod
    def _adopt(buffer: Tensor, slot: int, layer: int, block: list[Tensor], length: int) -> None:
        if layer < len(block):
            buffer[slot, :length] = block[layer][:length]
            block[layer] = buffer[slot]
        else:  # this rollout has no tokens of its own yet
            block.append(buffer[slot])

    @property
    def full(self) -> bool:
        return any(row.own_length >= self.capacity for row in self.rows)

    def select(self, live: frozenset[Row]) -> list[Row]:
        """Let these rows take part in the coming steps; returns those that lie in this lane, in slot order."""
        self._slots = [slot for slot, row in enumerate(self.rows) if row in live]
        return [self.rows[slot] for slot in self._slots]

    def advance(self, device: torch.device) -> None:
        """Prepare for the next token of every selected row: where it goes and what it sees."""
        lengths = [row.own_length for row in self.rows]
        everyone = len(self._slots) == len(self.rows)
        self._width = max(lengths[slot] for slot in self._slots) + 1
        self._write = torch.tensor([slot * self.capacity + lengths[slot] for slot in self._slots], device=device)
        self._index = None if everyone else torch.tensor(self._slots, device=device)
        self._seen = None if len(set(lengths)) == 1 else torch.tensor(lengths, device=device).unsqueeze(-1)
        self._mask: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> tuple[Tensor, Tensor]:
        """query [n, H_kv, G, D], key and value [n, H_kv, D] of the n selected rows -> output like query, log-sum-exp [n, H_kv, G]."""
        self._store(layer, key, value)
        if self._index is not None:
            query = query.new_zeros(len(self.rows), *query.shape[1:]).index_copy_(0, self._index, query)
        keys, values = (tensors[layer][:, : self._width].transpose(1, 2) for tensors in (self._keys, self._values))
        output, total = attend_part(query, keys, values, scaling=scaling, mask=self._visible(query))
        return (output, total) if self._index is None else (output[self._index], total[self._index])

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        if layer == len(self._keys):  # no rollout of this lane had tokens of its own yet
            for tensors, new in ((self._keys, key), (self._values, value)):
                tensors.append(new.new_zeros(len(self.rows), self.capacity, *new.shape[1:]))
            for slot, row in enumerate(self.rows):
                row.own.keys.append(self._keys[layer][slot])
                row.own.values.append(self._values[layer][slot])
        self._keys[layer].flatten(0, 1).index_copy_(0, self._write, key)
        self._values[layer].flatten(0, 1).index_copy_(0, self._write, value)

    def _visible(self, like: Tensor) -> Tensor | None:
        """[slots, 1, 1, width] of 0 and -inf, or None where all rows are equally long."""
        if self._seen is not None and self._mask is None:
            hidden = torch.arange(self._width, device=like.device) > self._seen
            self._mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)[:, None, None]
        return self._mask


def build_lanes(rows: Sequence[Row]) -> list[Lane]:
    """Sort rows of similar own length into lanes: no row is padded to more than about twice its length."""
    lanes: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.own_length):
        if not lanes or row.own_length > 2 * lanes[-1][0].own_length + 64:
            lanes.append([])
        lanes[-1].append(row)
    place = {id(row): index for index, row in enumerate(rows)}
    return [Lane(sorted(lane, key=lambda row: place[id(row)]), _capacity(lane[-1].own_length)) for lane in lanes]


def _capacity(longest: int) -> int:
    return longest + max(64, longest // 2)


class StepLayout:
    """One token of each of `rows`, in lane order. Built when the set of live rows changes; `advance` before every step."""

    def __init__(self, lanes: Sequence[Lane], rows: Sequence[Row], device: torch.device) -> None:
        members = frozenset(rows)
        selected = [(lane, lane.select(members)) for lane in lanes]
        self._lanes = [(lane, live) for lane, live in selected if live]
        self.rows = [row for _, live in self._lanes for row in live]
        self._device = device
        self._groups(device)

    def _groups(self, device: torch.device) -> None:
        """Rows behind the same prefix next to each other: the order in which prefixes are attended to, and each one's run."""
        shared = [index for index, row in enumerate(self.rows) if row.prefix is not None]
        first: dict[int, int] = {}
        for index in shared:
            first.setdefault(id(self.rows[index].prefix), index)
        shared.sort(key=lambda index: first[id(self.rows[index].prefix)])
        runs = [(prefix, len(list(run))) for prefix, run in groupby(self.rows[index].prefix for index in shared)]
        self._prefixes = [(prefix, count) for prefix, count in runs if prefix is not None]
        in_place = shared == list(range(len(self.rows)))
        self._order = None if in_place else torch.tensor(shared, dtype=torch.long, device=device)

    def advance(self) -> None:
        for lane, _ in self._lanes:
            lane.advance(self._device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        by_token = query.unflatten(0, (len(key), -1)).permute(2, 0, 1, 3)
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        outputs, totals, at = [], [], 0
        for lane, live in self._lanes:
            run = slice(at, at + len(live))
            output, total = lane.attend(layer, by_token[run], keys[run], values[run], scaling=scaling)
            outputs.append(output)
            totals.append(total)
            at += len(live)
        own = (outputs[0], totals[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(totals))
        joined = self._with_prefixes(layer, by_token[:at], own, scaling) if self._prefixes else own[0]
        return _padded(joined.flatten(1, 2), query.shape[1])

    def _with_prefixes(self, layer: int, query: Tensor, own: tuple[Tensor, Tensor], scaling: float | None) -> Tensor:
        if self._order is None:
            return merge(own, self._attend_prefixes(layer, query, scaling))
        part = (own[0][self._order], own[1][self._order])
        merged = merge(part, self._attend_prefixes(layer, query[self._order], scaling))
        return own[0].index_copy(0, self._order, merged)

    def _attend_prefixes(self, layer: int, query: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
        """query [n, H_kv, G, D] in prefix order -> (output like it, log-sum-exp [n, H_kv, G])."""
        heads = query.transpose(0, 1).contiguous()  # [H_kv, n, G, D]: a prefix's rows and their query heads are one run
        outputs, totals, at = [], [], 0
        for prefix, count in self._prefixes:
            run = heads[:, at : at + count].flatten(1, 2).unsqueeze(0)
            keys, values = (tensors[layer].transpose(0, 1).unsqueeze(0) for tensors in (prefix.block.keys, prefix.block.values))
            output, total = attend_part(run, keys, values, scaling=scaling)
            outputs.append(output)
            totals.append(total)
            at += count
        shape = (len(query), query.shape[2])
        output, total = torch.cat(outputs, 2).squeeze(0), torch.cat(totals, 2).squeeze(0)
        return output.unflatten(1, shape).transpose(0, 1), total.unflatten(1, shape).transpose(0, 1)
