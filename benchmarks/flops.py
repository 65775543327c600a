"""Arithmetic that a step cannot do without, and how fast this machine does arithmetic: together, the share of the limit that is reached.

1. `Shape`        what of a decoder's shape the count needs.
2. `training`     multiply-adds of forward and backward (3 × forward) over the tokens that must be computed, each prompt once, and of the
                  head over the tokens that are trained. Nothing is counted twice for being computed twice.
3. `decoding`     multiply-adds, and the bytes that every step of decoding must read: the weights and the keys and values.
4. `gflops`, `gigabytes`   large matrix products and long reads, measured here and now.

A multiply-add is two operations. Elementwise work is not counted: it is what the limit leaves out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postgrad.types import TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers config."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers, hidden=config.hidden_size, intermediate=config.intermediate_size,
            heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_width=width, vocabulary=config.vocab_size,
        )  # fmt: skip

    @property
    def linear_weights(self) -> int:
        """In all layers, without embedding and head."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_width
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    def attention(self, first: int, last: int) -> float:
        """Operations of one forward pass over tokens first … last − 1 of a sequence: each attends to itself and all before it."""
        pairs = (last * (last + 1) - first * (first + 1)) / 2
        return 4.0 * self.layers * self.heads * self.head_width * pairs


def runs(rows: Sequence[TrainRow]) -> Iterator[tuple[int, int]]:
    """The runs of tokens (first, last) of a batch that must be computed: the shared prefix of a group once, then what each row adds up to
    its last trained token's predecessor."""
    seen = set()
    for row in rows:
        needed = max((place for place, trained in enumerate(row.trained) if trained), default=0)
        first = 0
        if row.group is not None and row.shared_prefix:
            if row.group not in seen:
                seen.add(row.group)
                yield 0, row.shared_prefix
            first = row.shared_prefix
        if needed > first:
            yield first, needed


def forward(shape: Shape, rows: Sequence[TrainRow]) -> float:
    """Of the body."""
    return sum(2.0 * shape.linear_weights * (last - first) + shape.attention(first, last) for first, last in runs(rows))


def training(shape: Shape, rows: Sequence[TrainRow], *, head: bool = True) -> float:
    """Forward and backward of one step over `rows`; `head` False for models with a scalar head, whose own cost is nothing."""
    trained = sum(row.trained_tokens for row in rows)
    return 3.0 * (forward(shape, rows) + (2.0 * shape.head_weights * trained if head else 0.0))


def reading(shape: Shape, rows: Sequence[TrainRow]) -> float:
    """Forward alone: the log-probs of a reference."""
    return forward(shape, rows) + 2.0 * shape.head_weights * sum(row.trained_tokens for row in rows)


def decoding(shape: Shape, prompt: int, completion: int, group: int, prompts: int, width: int) -> tuple[float, float]:
    """(operations, bytes) of sampling `completion` tokens for each of `group` × `prompts` rows. `width`: bytes of a number."""
    rows = group * prompts
    weights = shape.linear_weights + shape.head_weights
    own = [shape.attention(prompt, prompt + completion), 2.0 * weights * completion]
    prefill = prompts * (2.0 * shape.linear_weights * prompt + shape.attention(0, prompt))
    token = 2 * shape.layers * shape.kv_heads * shape.head_width
    cached = sum(prompts * prompt + rows * written for written in range(completion)) * token
    return rows * sum(own) + prefill, float(width * (completion * weights + cached))


# this machine -----------------------------------------------------------------------------------------------------------------------


def gflops(dtype: torch.dtype, size: int = 2048, repeats: int = 7) -> float:
    """The best of PyTorch's ways to multiply two square matrices, in 10⁹ operations a second."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    ways: list[Callable[[], Tensor]] = [lambda: left @ right, lambda: torch.nn.functional.linear(left, right)]
    if torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        packed = torch.ops.mkldnn._reorder_linear_weight(right, size)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""))
    return 2.0 * size**3 / min(_best(way, repeats) for way in ways) / 1e9


def gigabytes(megabytes: int = 1024, repeats: int = 5) -> float:
    """Reading memory that no cache holds, in 10⁹ bytes a second."""
    long = torch.ones(megabytes * 2**20 // 4)
    return long.numel() * 4 / _best(long.sum, repeats) / 1e9


def _best(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
