"""The two layouts of a flat row of tokens that a sampler needs, both writing keys and values as they go.

`ChunkLayout`   several sequences, each reading a run of tokens (prompts, tool results): one attention call per sequence.
`StepLayout`    one token of every live rollout: one attention call per stack of prefixes, one per stack of own tokens.

Only live rollouts have a place in the flat row. Those that finished keep their slot in a stack, unused, until it is rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from postgrad.models.kv import (
    KEYS_MULTIPLE,
    QUERIES_MULTIPLE,
    KVBlock,
    Prefix,
    Row,
    Stack,
    attend_part,
    causal_mask,
    merge,
    round_up,
)

Parts = tuple[Tensor, Tensor]
"""(output [..., D], log-sum-exp [...]) of attention over a part of the keys."""


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
        padded = pad(query, (0, 0, 0, -self.length % QUERIES_MULTIPLE))
        own = self._own(layer, padded, scaling)
        if self.prefix is not None:
            keys, values = self._memory(self.prefix.block, layer, len(self.prefix.ids), padded)
            return merge(own, attend_part(padded, keys, values, scaling=scaling))[:, :, : self.length]
        return own[0][:, :, : self.length]

    def _own(self, layer: int, query: Tensor, scaling: float | None) -> Parts:
        end = self.start + self.length
        keys, values = self._memory(self.block, layer, end, query)
        if self.start == 0:
            return attend_part(query, keys, values, scaling=scaling, causal=True)
        if self.mask is None:
            self.mask = causal_mask(query.shape[2], end, query, before=self.start)
        return attend_part(query, keys, values, scaling=scaling, mask=self.mask)

    @staticmethod
    def _memory(block: KVBlock, layer: int, length: int, query: Tensor) -> Parts:
        """Keys and values [length, H_kv, D] as views [H_kv, G, length, D]: the G query heads of a key head share its memory."""
        keys, values = (
            tensors[layer][:length].transpose(0, 1).unsqueeze(1).expand(-1, query.shape[1], -1, -1)
            for tensors in (block.keys, block.values)
        )
        return keys, values


class ChunkLayout:
    """Pieces one after the other in a flat row; tokens behind the last piece are padding."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        grouped = query.reshape(len(key), -1, *query.shape[1:])
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


class StackedAttention:
    """Attention of n queries, each over one slot of one of several stacks. Queries are gathered by slot, attended, and put back."""

    def __init__(
        self, stacks: Sequence[Stack], members: Sequence[Sequence[Sequence[int]]], device: torch.device, *, query_multiple: int = 1
    ) -> None:
        """members[s][i]: which of the n queries look at slot i of stack s. Each query looks at exactly one slot.

        query_multiple: the queries of a slot are padded to a multiple of it. Needed where their number changes with the batch.
        """
        self._stacks = stacks
        self._query_multiple = query_multiple
        self._per_slot = [max(1, *(len(queries) for queries in slots)) for slots in members]
        gather = [
            query
            for slots, room in zip(members, self._per_slot, strict=True)
            for queries in slots
            for query in (*queries, *[0] * (room - len(queries)))  # unused places repeat query 0 and are dropped
        ]
        filled = [
            used
            for slots, room in zip(members, self._per_slot, strict=True)
            for queries in slots
            for used in [True] * len(queries) + [False] * (room - len(queries))
        ]
        back = [0] * sum(filled)
        for place, (query, used) in enumerate(zip(gather, filled, strict=True)):
            if used:
                back[query] = place
        in_place = gather == list(range(len(back)))
        self._gather = None if in_place else torch.tensor(gather, device=device)
        self._back = None if in_place else torch.tensor(back, device=device)

    def __call__(self, layer: int, query: Tensor, *, scaling: float | None) -> Parts:
        """query [n, H_kv, G, D] -> (output like it, log-sum-exp [n, H_kv, G])."""
        gathered = query if self._gather is None else query[self._gather]
        outputs, totals, at = [], [], 0
        for stack, room in zip(self._stacks, self._per_slot, strict=True):
            count = room * len(stack.blocks)
            output, total = self._one(stack, layer, gathered[at : at + count], room, scaling)
            outputs.append(output)
            totals.append(total)
            at += count
        output, total = (outputs[0], totals[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(totals))
        return (output, total) if self._back is None else (output[self._back], total[self._back])

    def _one(self, stack: Stack, layer: int, query: Tensor, room: int, scaling: float | None) -> Parts:
        """All queries of a slot, and the query heads of each, are one run of Q = room x G queries over the slot's keys."""
        heads, group, width = query.shape[1:]
        count = room * group
        runs = query.reshape(-1, room, heads, group, width).transpose(1, 2).reshape(-1, heads, count, width)
        output, total = stack.attend(layer, pad(runs, (0, 0, 0, -count % self._query_multiple)), scaling=scaling)
        return (
            output[:, :, :count].reshape(-1, heads, room, group, width).transpose(1, 2).flatten(0, 1),
            total[:, :, :count].reshape(-1, heads, room, group).transpose(1, 2).flatten(0, 1),
        )


def own_stacks(rows: Sequence[Row]) -> list[tuple[Stack, list[Row]]]:
    """Stacks of rows of similar own length: no row is padded to more than about twice its length. Rows keep their order inside."""
    lanes: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.own_length):
        if not lanes or row.own_length > 2 * lanes[-1][0].own_length + 64:
            lanes.append([])
        lanes[-1].append(row)
    place = {row: index for index, row in enumerate(rows)}
    return [_own_stack(sorted(lane, key=place.__getitem__), lane[-1].own_length) for lane in lanes]


def _own_stack(rows: list[Row], longest: int) -> tuple[Stack, list[Row]]:
    capacity = round_up(longest + max(64, longest // 2), KEYS_MULTIPLE)
    return Stack([row.own for row in rows], [row.own_length for row in rows], capacity), rows


def prefix_stacks(rows: Sequence[Row]) -> list[tuple[Stack, list[Prefix]]]:
    """One stack for each length (rounded up) of prefix: the keys that a row is computed with do not depend on other rows' prefixes."""
    by_capacity: dict[int, dict[Prefix, None]] = {}
    for row in rows:
        by_capacity.setdefault(row.prefix.block.capacity, {})[row.prefix] = None
    return [
        (Stack([prefix.block for prefix in prefixes], [len(prefix.ids) for prefix in prefixes], capacity), list(prefixes))
        for capacity, prefixes in by_capacity.items()
    ]


class StepLayout:
    """One token of each live row. Built when the set of live rows changes; `advance` before every step."""

    def __init__(
        self,
        own: Sequence[tuple[Stack, list[Row]]],
        prefixes: Sequence[tuple[Stack, list[Prefix]]],
        live: Sequence[Row],
        device: torch.device,
    ) -> None:
        alive = frozenset(live)
        self.rows = [row for _, rows in own for row in rows if row in alive]
        """The live rows in the order of the flat row."""
        self._own = own
        self._alive = alive
        self._device = device
        place = {row: index for index, row in enumerate(self.rows)}
        self._attend_own = StackedAttention(
            [stack for stack, _ in own], [[[place[row]] if row in alive else [] for row in rows] for _, rows in own], device
        )
        behind: dict[Prefix, list[int]] = {}
        for index, row in enumerate(self.rows):
            behind.setdefault(row.prefix, []).append(index)
        self._attend_prefixes = StackedAttention(
            [stack for stack, _ in prefixes],
            [[behind.get(prefix, []) for prefix in stacked] for _, stacked in prefixes],
            device,
            query_multiple=QUERIES_MULTIPLE,
        )

    def advance(self) -> None:
        """Prepare for the next token of every live row: where it goes, and that it is seen."""
        self._writes = []
        for stack, rows in self._own:
            slots = [slot for slot, row in enumerate(rows) if row in self._alive]
            lengths = [row.own_length for row in rows]
            if slots:
                stack.see([length + 1 for length in lengths], max(lengths[slot] for slot in slots) + 1)
            where = torch.tensor([slots, [lengths[slot] for slot in slots]], dtype=torch.long, device=self._device)
            self._writes.append((stack, where))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        by_token = query.reshape(len(key), -1, *query.shape[1:]).permute(2, 0, 1, 3)[: len(self.rows)]
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        at = 0
        for stack, where in self._writes:
            run = slice(at, at + where.shape[1])
            stack.store(layer, where[0], where[1], keys[run], values[run])
            at += where.shape[1]
        own = self._attend_own(layer, by_token, scaling=scaling)
        joined = merge(own, self._attend_prefixes(layer, by_token, scaling=scaling))
        return _padded(joined.flatten(1, 2), query.shape[1])
