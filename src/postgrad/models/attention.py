"""How a layout of tokens reaches the attention of an unpatched transformers model.

1. `Layout`        says who attends to whom in one flat row of tokens.
2. `attend_with`   makes a model use a layout for the forward (and backward) calls inside the `with`.
3. `body`          runs the model without its head over one flat row.
4. `output_head`   the head that turns the body's hidden states into logits; `scalar_head` the one that turns them into a score.

transformers asks for an attention function by name. One function is registered, "postgrad"; it hands each layer's projected
queries, keys and values to the layout that is active *for that model*, so a policy and a frozen reference never see each
other's layout, and nothing is left behind when a forward call raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from postgrad.errors import ModelError

ATTENTION = "postgrad"

_CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "alibi")
"""Keyword arguments of transformers' attention functions that change the result; no layout can represent them."""


class Layout(Protocol):
    """Who attends to whom in one flat row of T tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        """query [H, T, D], key and value [H_kv, T, D] of one layer (H a multiple of H_kv, positions already applied) -> [T, H, D].

        `scaling` multiplies query · key (None = D^-0.5). `dropout` is the probability of dropping an attention weight.
        """
        ...


_active: dict[int, list[Layout]] = {}
"""Stack of layouts per id of a model's config. Keyed by the model, not the thread: with gradient checkpointing the backward
runs the forward again, on an accelerator in another thread."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: [1, H, T, D] in, ([1, T, H, D], no attention weights) out."""
    unsupported = [name for name in _CHANGES_ATTENTION if kwargs.get(name) is not None]
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        unsupported.append("is_causal=False")
    if unsupported or attention_mask is not None or query.shape[0] != 1:
        cause = ", ".join(unsupported) or f"a mask or a batch of {query.shape[0]}"
        raise ModelError(f"this model's attention needs {cause}, which a flat row of tokens cannot represent")
    stack = _active.get(id(module.config))
    if not stack:
        raise RuntimeError("attention 'postgrad' was called outside attend_with()")
    layer = cast(int, module.layer_idx)
    return stack[-1].attend(layer, query[0], key[0], value[0], scaling=scaling, dropout=dropout).unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def pretrained(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, out of its adapter wrapper. The adapter's layers stay inside it, so forward calls use them."""
    inner = cast(Any, model).get_base_model() if hasattr(model, "peft_config") else model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is no transformers model")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError("adapters that add virtual tokens (prompt or prefix tuning) are not supported", hint="use kind: lora")
    return inner


@contextmanager
def attend_with(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Inside the `with`, `model` attends according to `layout`; afterwards its own attention implementation is back.

    Re-entrant: an inner `with` on the same model wins until it ends. Run the backward inside it as well if the model uses
    gradient checkpointing.
    """
    inner = pretrained(model)
    previous = inner.config._attn_implementation
    keys = {id(part.config) for part in inner.modules() if isinstance(part, PreTrainedModel)}
    for key in keys:
        _active.setdefault(key, []).append(layout)
    try:
        if previous != ATTENTION:
            inner.set_attn_implementation(ATTENTION)
        yield
    finally:
        if previous != ATTENTION:
            inner.set_attn_implementation(previous)
        for key in keys:
            _active[key].pop()
            if not _active[key]:
                del _active[key]


def body(model: nn.Module, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
    """Hidden states after the last norm, without the head: ids and positions [B, T] -> [B·T, width]. No cache is kept.

    One flat row (B = 1) inside `attend_with`; a padded batch with its `attention_mask` outside it.
    """
    inner = pretrained(model)
    if inner.base_model is inner:
        raise ModelError(f"{type(inner).__name__} has no body apart from its head")
    output = inner.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **kwargs)
    return cast(Tensor, output.last_hidden_state).flatten(0, 1)


class OutputHead(NamedTuple):
    """z = scale · (hidden @ weight.T + bias); logits = z, or softcap · tanh(z / softcap). weight [V, width], bias [V] or None."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


def logits_of(raw: Tensor, scale: float, softcap: float | None) -> Tensor:
    """hidden @ weight.T + bias -> logits."""
    scaled = raw if scale == 1.0 else raw * scale
    return scaled if softcap is None else softcap * (scaled / softcap).tanh()


def output_head(model: nn.Module) -> OutputHead:
    """The language-model head. Raises `ModelError` where it is no linear layer."""
    inner = pretrained(model)
    text = inner.config.get_text_config()
    head = saved_in_use(cast(Any, inner).get_output_embeddings())
    if type(head) is not nn.Linear:
        found = "no head" if head is None else f"a head of type {type(head).__name__}"
        raise ModelError(f"{type(inner).__name__} has {found}", hint="keep adapters off lm_head, and use a causal language model")
    return OutputHead(head.weight, head.bias, _logit_scale(text), getattr(text, "final_logit_softcapping", None))


def scalar_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(weight [1, width], bias [1] or None) of a model with one score per token. Raises `ModelError` for any other head."""
    inner = pretrained(model)
    head = saved_in_use(cast("nn.Module | None", getattr(inner, "score", None) or getattr(inner, "classifier", None)))
    if type(head) is not nn.Linear or head.out_features != 1:
        raise ModelError(f"{type(inner).__name__} has no scalar head", hint="name a reward model, or a language model to put a new head on")
    return head.weight, head.bias


def saved_in_use(head: nn.Module | None) -> nn.Module | None:
    """Of a module and the trained copy that peft keeps beside it (`modules_to_save`): the one that is in use now."""
    if head is None or not hasattr(head, "modules_to_save"):
        return head
    if head.disable_adapters:
        return cast(nn.Module, head.original_module)
    (active,) = cast("list[str]", head.active_adapters)
    return cast(nn.ModuleDict, head.modules_to_save)[active]


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits by `logit_scale`, Granite divides them by `logits_scaling`."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
