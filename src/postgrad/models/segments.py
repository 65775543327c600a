"""Runs of tokens in a flat row, and the attention over them from PyTorch's public function: the plain form that every kernel must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start..stop of the flat row; `prefix` is the run of tokens (start, stop) that comes before them, if it is shared."""

    start: int
    stop: int
    prefix: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"an empty segment: {self.start}..{self.stop}")
        if self.prefix and not 0 <= self.prefix[0] < self.prefix[1] <= self.start:
            raise ValueError(f"prefix {self.prefix} does not lie before segment {self.start}..{self.stop}")


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], *, scaling: float | None, dropout: float
) -> Tensor:
    """query [H, T, D], key and value [H_kv, T, D] -> [T, H, D]: one call per segment, keys of the prefix and its own joined."""
    outputs = []
    for segment in segments:
        own = slice(segment.start, segment.stop)
        joined_key, joined_value, mask = key[:, own], value[:, own], None
        if segment.prefix is not None:
            shared = slice(*segment.prefix)
            joined_key = torch.cat((key[:, shared], joined_key), 1)
            joined_value = torch.cat((value[:, shared], joined_value), 1)
            mask = _continuation_mask(segment, query.device)
        attended = F.scaled_dot_product_attention(
            query[None, :, own], joined_key[None], joined_value[None], attn_mask=mask, dropout_p=dropout,
            is_causal=mask is None, scale=scaling, enable_gqa=query.shape[0] != key.shape[0],
        )  # fmt: skip
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _continuation_mask(segment: Segment, device: torch.device) -> Tensor:
    """[C, P + C], True where a token of the segment may look: the whole prefix, and its own segment up to itself."""
    assert segment.prefix is not None
    own, shared = segment.stop - segment.start, segment.prefix[1] - segment.prefix[0]
    return torch.ones(own, shared + own, dtype=torch.bool, device=device).tril(shared)
