"""Decoders: they keep the caches of rollouts and turn tokens into next-token logits.

1. `Decoder`        what the sampler asks of one: open rows at a context, step them by a token, close them, forget them.
2. `FlatDecoder`    any standard decoder of transformers: flat rows of tokens, shared prefixes, keys and values kept here.
3. `CacheDecoder`   every other causal model: one row at a time, with the model's own cache. Slow and plain.

A cache is found by comparing token ids, so it can be missed but never wrong. Closed rows are kept until the next turn, least
recently used first out once they take more than the budget.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from postgrad.errors import ModelError
from postgrad.models.attention import Layout
from postgrad.models.decode_layout import ChunkLayout, Piece, StepLayout, own_stacks, prefix_stacks
from postgrad.models.kv import KVBlock, Prefix, Row, Stack, common_length
from postgrad.models.serving import Serving
from postgrad.protocols import SampleKey, TurnRequest

_TOKENS_AT_ONCE = 4096
"""Prompts and tool results are read in flat rows of about this many tokens."""
_WORTH_SHARING = 32
"""Different contexts that start with at least this many common tokens (a system prompt, tool descriptions) read them once."""


def common_start(contexts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The start that different contexts have in common, shorter than each of them; empty unless there are two different ones.

    >>> common_start([(1, 2, 3), (1, 2, 4, 5), (1, 2, 3)])
    (1, 2)
    >>> common_start([(1, 2, 3), (1, 2, 3)])
    ()
    """
    distinct = {tuple(context) for context in contexts}
    if len(distinct) < 2:
        return ()
    first, last = min(distinct), max(distinct)  # in dictionary order: they differ the most
    return first[: min(common_length(first, last), min(map(len, distinct)) - 1)]


RowT = TypeVar("RowT")
"""A decoder's handle on one rollout."""


class Decoder(Protocol[RowT]):
    def open(self, requests: Sequence[TurnRequest]) -> tuple[list[RowT], Tensor]:
        """Read the contexts. Returns a row for each request and the logits [n, V] of the token behind its context."""
        ...

    def step(self, rows: Sequence[RowT], tokens: Sequence[int]) -> Tensor:
        """Append one token to each row; logits [n, V] of the token behind it. Rows not named have finished."""
        ...

    def close(self, row: RowT) -> None:
        """The row's turn ended; keep what was computed for its next turn."""
        ...

    def release(self) -> None:
        """No row is open any more (also after an error, with rows that were never closed): free what only open rows need."""
        ...

    def forget(self) -> None:
        """Drop everything."""
        ...

    def ready(self, shared: Sequence[int]) -> AbstractContextManager[None]:
        """The model made ready for the calls above, and itself again afterwards. `shared`: a start that new contexts have in common."""
        ...


class LruRows(OrderedDict[SampleKey, Row]):
    """Closed rows, the least recently used first."""

    def nbytes(self) -> int:
        """Bytes of keys and values; a prefix counts once."""
        prefixes = {row.prefix for row in self.values()}
        return sum(row.own.nbytes for row in self.values()) + sum(prefix.block.nbytes for prefix in prefixes)

    def evict(self, budget: int) -> None:
        excess = self.nbytes() - budget
        if excess <= 0:
            return
        while self and excess > 0:
            _, row = self.popitem(last=False)
            excess -= row.own.nbytes
            if all(other.prefix is not row.prefix for other in self.values()):
                excess -= row.prefix.block.nbytes
        for prefix in {row.prefix for row in self.values()}:
            prefix.leave_stack()  # which would keep its evicted neighbours' memory


class _Switch:
    """The layout that the model attends with, changed from one forward call to the next."""

    current: Layout | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        assert self.current is not None
        return self.current.attend(layer, query, key, value, scaling=scaling, dropout=dropout)


@dataclass(eq=False)
class _Run:
    """Tokens to read into one block, and whoever wants the hidden state behind the last of them."""

    ids: tuple[int, ...]
    piece: Piece
    position: int
    hidden: Tensor | None = None


class FlatDecoder:
    """Decodes flat rows through `Serving`. Memory: each context that rollouts start with once, each rollout's own tokens once."""

    def __init__(self, serving: Serving, *, cache_bytes: int) -> None:
        self._serving = serving
        self._cache_bytes = cache_bytes
        self._switch = _Switch()
        self.forget()

    def forget(self) -> None:
        self.closed = LruRows()
        self.prefixes: WeakValueDictionary[tuple[int, ...], Prefix] = WeakValueDictionary()
        self.release()

    def release(self) -> None:
        self.own: list[tuple[Stack, list[Row]]] = []
        self._prefixes: list[tuple[Stack, list[Prefix]]] = []
        self._layout: StepLayout | None = None
        self._trunk: KVBlock | None = None
        self._switch.current = None
        self.closed.evict(self._cache_bytes)

    @contextmanager
    def ready(self, shared: Sequence[int]) -> Iterator[None]:
        self._shared = tuple(shared) if len(shared) >= _WORTH_SHARING else ()
        with self._serving.ready(self._switch):
            yield

    # Contexts

    def open(self, requests: Sequence[TurnRequest]) -> tuple[list[Row], Tensor]:
        self.closed.evict(self._cache_bytes)
        rows: list[Row] = []
        first: dict[Prefix, _Run] = {}
        later: dict[Row, _Run] = {}
        new: dict[tuple[int, ...], Prefix] = {}
        for request in requests:
            row = self._continued(request)
            if row is None:
                row = Row.behind(request.key, self._prefix(request.context, new, first))
            else:
                later[row] = self._append(row, request.context)
            rows.append(row)
        self._share_trunk(list(first.values()))
        self._read([*first.values(), *later.values()])
        for prefix, run in first.items():
            prefix.last_hidden = run.hidden
        self.prefixes.update(new)  # only now: one that was not read to its end must never be found
        hidden = [later[row].hidden if row in later else row.prefix.last_hidden for row in rows]
        return rows, self._serving.logits(torch.stack(cast("list[Tensor]", hidden)))

    def _continued(self, request: TurnRequest) -> Row | None:
        """The rollout's own cache, cut back to what it has in common with the context; None where that is less than its prefix."""
        row = self.closed.pop(request.key, None)
        if row is None:
            return None
        common = min(common_length(row.ids, request.context), len(request.context) - 1)  # the last token's hidden state is not kept
        if common < len(row.prefix.ids):
            return None
        del row.ids[common:]
        return row

    def _prefix(self, context: tuple[int, ...], new: dict[tuple[int, ...], Prefix], first: dict[Prefix, _Run]) -> Prefix:
        """The prefix that is this context: one that a rollout still holds, or a new one and the plan to read it."""
        prefix = self.prefixes.get(context) or new.get(context)
        if prefix is None:
            prefix = new[context] = Prefix.of(context)
            first[prefix] = _Run(context, Piece(prefix.block, 0, len(context)), 0)
        return prefix

    def _append(self, row: Row, context: tuple[int, ...]) -> _Run:
        """Plan to read what the row lacks of the context."""
        known, kept = len(row.ids), row.own_length
        new = context[known:]
        row.own = row.own.copied(kept, kept + len(new))
        row.ids.extend(new)
        return _Run(new, Piece(row.own, kept, len(new), row.prefix), known)

    def _share_trunk(self, runs: Sequence[_Run]) -> None:
        """Contexts that begin with what the stream was told they share copy its keys and values. Read once, and always alone: how a
        context is read must not depend on which others come with it."""
        start = self._shared
        sharing = [run for run in runs if len(run.ids) > len(start) and run.ids[: len(start)] == start] if start else []
        if not sharing:
            return
        common = len(start)
        if self._trunk is None:
            self._trunk = KVBlock(common)
            self._read([_Run(start, Piece(self._trunk, 0, common), 0)])
        for run in sharing:
            grown = self._trunk.copied(common, run.piece.block.capacity)
            run.piece.block.keys, run.piece.block.values = grown.keys, grown.values
            run.piece.start, run.piece.length = common, len(run.ids) - common
            run.ids, run.position = run.ids[common:], common

    def _read(self, runs: Sequence[_Run]) -> None:
        for batch in _batches(runs):
            self._switch.current = ChunkLayout([run.piece for run in batch])
            ids = [token for run in batch for token in run.ids]
            positions = [position for run in batch for position in range(run.position, run.position + len(run.ids))]
            hidden = self._serving.hidden(ids, positions)
            end = 0
            for run in batch:
                end += len(run.ids)
                run.hidden = hidden[end - 1].clone()

    # Steps

    def step(self, rows: Sequence[Row], tokens: Sequence[int]) -> Tensor:
        layout = self._arrange(rows)
        layout.advance()
        self._switch.current = layout
        token_of = dict(zip(rows, tokens, strict=True))
        hidden = self._serving.hidden([token_of[row] for row in layout.rows], [len(row.ids) for row in layout.rows])
        for row in layout.rows:
            row.ids.append(token_of[row])
        if layout.rows != list(rows):
            place = {row: index for index, row in enumerate(layout.rows)}
            hidden = hidden[[place[row] for row in rows]]
        return self._serving.logits(hidden)

    def _arrange(self, rows: Sequence[Row]) -> StepLayout:
        """Stacks are rebuilt when a row arrived, a row fills its slot, or half of the slots are unused; otherwise nothing is copied."""
        slots = frozenset(row for _, stacked in self.own for row in stacked)
        full = any(row.own_length >= row.own.capacity for row in rows)
        if full or 2 * len(rows) <= len(slots) or not slots.issuperset(rows):
            self.own = own_stacks(rows)
            self._arrange_prefixes(rows)
            self._layout = None
        if self._layout is None or len(self._layout.rows) != len(rows):
            self._layout = StepLayout(self.own, self._prefixes, rows, self._serving.module.device)
        return self._layout

    def _arrange_prefixes(self, rows: Sequence[Row]) -> None:
        stacked = {prefix for _, prefixes in self._prefixes for prefix in prefixes}
        if stacked != {row.prefix for row in rows}:
            self._prefixes = prefix_stacks(rows)

    def close(self, row: Row) -> None:
        row.own = row.own.copied(row.own_length, row.own_length)
        self.closed[row.key] = row


def _batches(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Runs in order, about `_TOKENS_AT_ONCE` tokens a batch; a longer run goes alone."""
    batch: list[_Run] = []
    for run in runs:
        if batch and sum(len(other.ids) for other in batch) + len(run.ids) > _TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


class CacheDecoder:
    """Decodes one row at a time with the cache that the model makes itself, so any causal model of transformers will do.

    Every turn reads its whole context again: these caches cannot all be cut back, and recurrent ones cannot all be continued by
    more than one token.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        accepted = inspect.signature(serving.module.forward).parameters
        names = [name for name in ("cache", "past_key_values", "cache_params") if name in accepted]
        if not names:
            what = f"{type(serving.module).__name__} keeps no cache between tokens, so it cannot be sampled from"
            raise ModelError(what, hint="train it on given answers (sft, dpo, reward), or choose another model")
        self._cache_name = names[0]
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def forget(self) -> None:
        """Nothing outlives a turn."""

    def release(self) -> None:
        """A row's cache lives as long as its handle."""

    def close(self, row: CacheRow) -> None:
        row.cache = None

    @contextmanager
    def ready(self, shared: Sequence[int]) -> Iterator[None]:
        with self._serving.ready(None):
            yield

    def open(self, requests: Sequence[TurnRequest]) -> tuple[list[CacheRow], Tensor]:
        computed: dict[tuple[int, ...], tuple[CacheRow, Tensor]] = {}
        for context in dict.fromkeys(request.context for request in requests):
            row = CacheRow()
            computed[context] = row, self._feed(row, context)
        rows = [CacheRow(copy.deepcopy(computed[request.context][0].cache)) for request in requests]
        return rows, torch.cat([computed[request.context][1] for request in requests])

    def step(self, rows: Sequence[CacheRow], tokens: Sequence[int]) -> Tensor:
        return torch.cat([self._feed(row, [token]) for row, token in zip(rows, tokens, strict=True)])

    def _feed(self, row: CacheRow, ids: Sequence[int]) -> Tensor:
        """Logits [1, V] behind the last of the new tokens."""
        module = self._serving.module
        known = {} if row.cache is None else {self._cache_name: row.cache}
        output = module(input_ids=torch.tensor([list(ids)], device=module.device), use_cache=True, **self._last_only, **known)
        row.cache = output[self._cache_name]
        return cast(Tensor, output.logits[:, -1])


@dataclass(eq=False)
class CacheRow:
    """One rollout in the model's own cache."""

    cache: Any = None
