"""What postgrad's compute can do with a model: believed only after a numeric check on the model itself.

1. `packed_refusal`  why a model cannot attend over a flat row, or None. It then takes the padded fallback.
2. `check_head`      whether log-probs can be made from the body's hidden states and the head; a model that fails cannot be trained.

Names and configs alone would miss what they do not list, so both end with a comparison on a few tokens. What a few tokens cannot
show (a sliding window that begins at 4,096) is read from the config.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from postgrad.errors import ModelError
from postgrad.models.attention import attend_with, body, output_head, pretrained
from postgrad.models.forward import mode
from postgrad.models.heads import selected_logprobs
from postgrad.models.layout import PackedLayout
from postgrad.models.segments import Segment

_PREFIX, _FIRST, _SECOND, _ALONE = 3, 4, 2, 5
"""Tokens of the probe: two rows of 4 and 2 tokens behind a shared prefix of 3, and a row of 5 that shares nothing."""


def packed_refusal(model: nn.Module) -> str | None:
    """Why `model` cannot compute packed rows with shared prefixes exactly, in words for the log; None when it can."""
    inner = pretrained(model)
    refusal = _config_refusal(inner.config.get_text_config())
    if refusal is not None:
        return refusal
    if not inner._can_set_attn_implementation():
        return f"{type(inner).__name__} does not let its attention be replaced"
    return _probe_refusal(model)


def check_head(model: nn.Module) -> None:
    """Raises `ModelError` unless the log-probs from `body` and `output_head` are those of the model's own logits."""
    head = output_head(model)
    ids = _probe_ids(model, _ALONE)
    positions = torch.arange(_ALONE, device=ids.device)[None]
    with mode(model, training=False), torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        hidden = body(model, ids, positions)
        logprobs, _ = selected_logprobs(
            hidden, head.weight, ids[0], temperature=1.0, bias=head.bias, scale=head.scale, softcap=head.softcap
        )
    expected = logits.float().log_softmax(-1).gather(1, ids[0][:, None]).squeeze(1)
    if not _close(logprobs, expected, head.weight.dtype):
        raise ModelError(
            f"{type(pretrained(model)).__name__} computes its logits in a way postgrad does not know",
            hint="its logits do not follow from the last hidden states by a linear layer, a scale and a softcap; it cannot be trained here",
        )


def _config_refusal(config: Any) -> str | None:
    """What a short probe cannot show."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(config, "is_causal", True) is False:
        return "its attention is not causal"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it squashes attention scores (attn_logit_softcapping)"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None):
        return f"it attends through a sliding window of {window} tokens"
    return None


def _probe_refusal(model: nn.Module) -> str | None:
    """Compare packed rows with the same rows computed one at a time by the model's own attention."""
    layout, rows = _probe_layout()
    ids = _probe_ids(model, layout.tokens)
    counting = _Counting(layout)
    positions = torch.cat([torch.arange(_PREFIX + _FIRST), _PREFIX + torch.arange(_SECOND), torch.arange(_ALONE)]).to(ids.device)[None]
    with mode(model, training=False), torch.no_grad():
        try:
            with attend_with(model, counting):
                packed = body(model, ids, positions)
        except ModelError as refused:
            return refused.what
        if not counting.calls:
            return "its attention does not go through transformers' AttentionInterface"
        expected = torch.cat([_alone(model, ids[:, row], len(own)) for row, own in rows])
    places = torch.cat([own for _, own in rows]).to(ids.device)
    if not _close(packed[places], expected, next(pretrained(model).parameters()).dtype):
        return "packed rows come out different from the same rows one at a time"
    return None


def _probe_layout() -> tuple[PackedLayout, list[tuple[Tensor, Tensor]]]:
    """The layout, and per row (places of its whole sequence, places of its own tokens) in the flat row."""
    first, second = _PREFIX + _FIRST, _PREFIX + _FIRST + _SECOND
    shared = (0, _PREFIX)
    end = second + _ALONE
    layout = PackedLayout((Segment(*shared), Segment(_PREFIX, first, shared), Segment(first, second, shared), Segment(second, end)))
    prefix, alone = torch.arange(_PREFIX), torch.arange(second, end)
    own = [torch.arange(_PREFIX, first), torch.arange(first, second)]
    return layout, [*((torch.cat((prefix, tokens)), tokens) for tokens in own), (alone, alone)]


def _alone(model: nn.Module, ids: Tensor, last: int) -> Tensor:
    """Hidden states of the last tokens of one plain sequence."""
    return body(model, ids, torch.arange(ids.shape[1], device=ids.device)[None])[-last:]


class _Counting:
    """A layout that counts how often it is asked."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.calls = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        self.calls += 1
        return self.layout.attend(layer, query, key, value, scaling=scaling, dropout=dropout)


def _probe_ids(model: nn.Module, count: int) -> Tensor:
    """[1, count] different ids spread over the vocabulary."""
    inner = pretrained(model)
    vocabulary: int = inner.config.get_text_config().vocab_size
    spread = torch.arange(count, device=next(inner.parameters()).device) * 7919 + 5
    return (spread % vocabulary)[None]


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    actual, expected = actual.float(), expected.float()
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
