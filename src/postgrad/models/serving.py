"""The weights that a sampler reads: the live model itself, or a copy with its linear layers laid out for speed.

1. `Serving.live`      the live model, as it is: nothing is copied, every update is seen at once. Its linear layers are computed by
                       `few_rows` while it serves.
2. `Serving.laid_out`  a copy in `dtype` (bf16: half the memory traffic, twice the arithmetic), or the model itself where nothing else uses
                       it. Adapters are folded into it in fp32. On a CPU its linear layers hold oneDNN's blocked weights.
3. `serving_dtype`     which of the two a model of this process is best sampled through.
4. `fingerprint`       changes when the weights do, so that a copy and everything computed from it can be known to be current.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from postgrad.models.attention import Layout, attend_with, body, logits_of, output_head, pretrained, saved_in_use
from postgrad.models.forward import mode
from postgrad.models.linears import computed_by

_FULL_TILE = 16
"""MKL's matrix products round differently below about ten rows, and a sample must not depend on how many others are still running: what
is computed by it is padded to this many. oneDNN's packed products have been found to round alike (`PackedLinear` tries it)."""
_FEW_ROWS = 128
"""Up to here `few_rows` turns the product round."""
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' decoders keep linear layers that read the same input, in the order in which they are called."""


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear(x, weight, bias)`, for few rows on a CPU as (weight @ x.T).T.

    The other way round two threads of MKL are no faster than one up to about 48 rows (two cores of a Xeon, SmolLM2-135M, 16 rows: 171 ms
    for all layers and the head; this way 62, and from 16 rows on the same bits).
    """
    rows = x.flatten(0, -2)
    if len(rows) > _FEW_ROWS or x.device.type != "cpu":
        return linear(x, weight, bias)
    product = weight @ rows.t() if bias is None else torch.addmm(bias[:, None], weight, rows.t())
    return product.t().contiguous().view(*x.shape[:-1], -1)


_LAID_OUT = "_laid_out_by_postgrad"


class PackedLinear(nn.Module):
    """A linear layer whose weight is kept in oneDNN's blocked layout: same result as `nn.Linear`, faster for few rows.

    Each row is computed alike however many there are: where this machine's product of so few rows ends in other last bits, they are padded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous(), _FULL_TILE)
        self._bias = None if bias is None else bias.detach().to(dtype)
        self._kind = (*weight.shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) >= _FULL_TILE or self._alike(len(rows)):
            return self._product(x)
        return self._product(_tile(rows))[: len(rows)].view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]

    def _alike(self, rows: int) -> bool:
        """Whether the product of so few rows is that of a full tile, bit for bit. Tried once for each kind of layer."""
        key = (*self._kind, rows, torch.get_num_threads())
        if key not in _ALIKE:
            tile = torch.randn(_FULL_TILE, self._kind[1], generator=torch.Generator().manual_seed(0)).to(self._kind[2])
            _ALIKE[key] = torch.equal(self._product(tile)[:rows], self._product(tile[:rows]))
        return _ALIKE[key]


_ALIKE: dict[tuple[object, ...], bool] = {}
"""(out, in, dtype, rows, threads) -> whether so few rows may be multiplied as they are."""


def _tile(rows: Tensor) -> Tensor:
    return pad(rows, (0, 0, 0, max(0, _FULL_TILE - len(rows))))


class FusedLinears(nn.Module):
    """Linear layers that read the same input, as one: a decode step is bound by the number of products and by reading weights."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        super().__init__()
        first: Tensor | None = getattr(layers[0], "bias", None)
        joined = None if first is None else torch.cat([layer.bias.detach() for layer in layers])
        self._product = PackedLinear(torch.cat([layer.weight.detach() for layer in layers]), joined, dtype)
        self._widths = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def output(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` makes of x. All are made at the first call; the others take theirs when they are called with the same x."""
        if self._input is not x:
            self._input, self._outputs = x, list(self._product(x).split(self._widths, -1))
        result = self._outputs[index]
        if index == len(self._widths) - 1:
            self._input, self._outputs = None, []
        return result


class FusedPart(nn.Module):
    """One layer of `FusedLinears`, in the place of the original."""

    def __init__(self, fused: FusedLinears, index: int) -> None:
        super().__init__()
        self._fused, self._index = fused, index

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.output(self._index, x)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes linear layers of this dtype."""
    if device.type != "cpu" or not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def serving_dtype(device: torch.device, autocast: torch.dtype | None) -> torch.dtype | None:
    """What a copy to sample from is best made in; None: sample from the live weights.

    Without autocast a copy pays on a CPU only, whose packed products need no padding. SmolLM2-135M on two cores of an EPYC, tokens per
    second from the live weights and from the copy: 1 row 8 and 13, 16 rows 91 and 117, 64 rows 204 and 211; the copy takes 0.6 s.
    """
    return autocast or (torch.float32 if can_pack(device, torch.float32) else None)


class Serving:
    """A model to decode with: `hidden` states of a flat row, and their `logits`. Use it inside `ready()`."""

    def __init__(
        self, model: nn.Module, head: nn.Module | None, *, scale: float = 1.0, softcap: float | None = None, least: int = _FULL_TILE
    ) -> None:
        """head None: the model's own output head, read anew at each use. least: tokens that a flat row is padded to."""
        self._model = model
        self._least = least
        self.module = pretrained(model)
        """The transformers model itself, out of its adapter wrapper."""
        self._head = head
        self._scale, self._softcap = scale, softcap

    @classmethod
    def live(cls, model: nn.Module) -> Serving:
        return cls(model, None)

    @classmethod
    def laid_out(cls, model: nn.Module, dtype: torch.dtype, *, own_head: bool, in_place: bool = False) -> Serving:
        """own_head: whether the model's own forward call makes the logits (False: `logits`, which needs a linear head).

        in_place: the model itself and no copy; afterwards it can be neither trained nor saved.
        """
        inner = pretrained(model)
        made = fold_adapters(inner, inner if in_place else _twin(inner))
        head = None if own_head else output_head(made)  # before its layer is packed and no `nn.Linear` any more
        if can_pack(made.device, dtype):
            _pack_linears(made, dtype)
        _convert(made, dtype)
        vars(made)[_LAID_OUT] = True
        if head is None:
            return cls(made, None)
        layer = cast(Any, made).get_output_embeddings()
        return cls(made, layer, scale=head.scale, softcap=head.softcap, least=_FULL_TILE if _has_plain_products(made) else 1)

    @contextmanager
    def ready(self, layout: Layout | None) -> Iterator[None]:
        """Evaluation mode (dropout off), no gradients, no autocast, attention by `layout` (None: the model's own)."""
        with ExitStack() as stack:
            stack.enter_context(mode(self._model, training=False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self.module.device.type, enabled=False))
            stack.enter_context(computed_by(few_rows, self.module))
            if layout is not None:
                stack.enter_context(attend_with(self._model, layout))
            yield

    def hidden(self, ids: list[int], positions: list[int]) -> Tensor:
        """[T, width] of one flat row of T tokens. Padding behind it has id 0, position 0."""
        room = max(0, self._least - len(ids))
        row = torch.tensor([ids + [0] * room, positions + [0] * room], device=self.module.device)
        return body(self._model, row[:1], row[1:])[: len(ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, width] -> [n, V]."""
        full = pad(hidden, (0, 0, 0, max(0, self._least - len(hidden))))
        if self._head is not None:
            raw, scale, softcap = cast(Tensor, self._head(full)), self._scale, self._softcap
        else:
            weight, bias, scale, softcap = output_head(self._model)
            raw = few_rows(full, weight, bias)
        return logits_of(raw[: len(hidden)], scale, softcap)


def _twin(inner: PreTrainedModel) -> PreTrainedModel:
    """Other modules over the same weights: what is laid out anew or converted takes the place of its share, the rest needs no memory."""
    shared: dict[int, Any] = {id(weight): weight for weight in inner.parameters()}
    return copy.deepcopy(inner, shared)


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the modules frozen weights in `dtype`, one after the other; a weight that has it already stays where it is.

    Buffers that are no weights (rotary frequencies) keep their precision.
    """
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in made:
                value = weight.detach()
                made[id(weight)] = nn.Parameter(value.to(dtype) if value.is_floating_point() else value, requires_grad=False)
            setattr(module, name, made[id(weight)])
    model.train(False)


def _is_adapted(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("get_base_layer", "merge", "disable_adapters"))


def fold_adapters(live: PreTrainedModel, clone: PreTrainedModel) -> PreTrainedModel:
    """Replace each adapted layer of the clone (or of the live model itself) by a plain one that computes what the live layer computes now.

    peft's own merge does the sum, on a throw-away fp32 copy of one layer at a time, so every kind of adapter is covered.
    """
    for name, module in list(live.named_modules()):
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            clone.set_submodule(name, cast(nn.Module, saved_in_use(clone.get_submodule(name))))
        elif _is_adapted(module):
            clone.set_submodule(name, _folded(module))
    vars(clone).pop("peft_config", None)  # what marks a model as adapted
    return clone


def _folded(live: Any) -> nn.Module:
    twin: Any = copy.deepcopy(live).float()
    if twin.disable_adapters and twin.merged:
        twin.unmerge()
    elif not twin.disable_adapters and set(twin.active_adapters) - set(twin.merged_adapters):
        twin.merge()
    return cast(nn.Module, twin.get_base_layer()).requires_grad_(False)


def _pack_linears(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Swap every plain linear layer for a packed one, siblings that read the same input for one together.

    Exact type: a subclass may compute something else.
    """
    # Layers are not held here, so that each is freed as soon as its packed form stands in its place.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for names in _SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if (
                all(type(layer) is nn.Linear for layer in layers)
                and len({layer.bias is None for layer in cast("list[nn.Linear]", layers)}) == 1
            ):
                fused = FusedLinears(cast("list[nn.Linear]", layers), dtype)
                for index, name in enumerate(names):
                    setattr(parent, name, FusedPart(fused, index))
            del layers
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        layer = cast(nn.Linear, model.get_submodule(name))
        model.set_submodule(name, PackedLinear(layer.weight, layer.bias, dtype))


def _has_plain_products(model: PreTrainedModel) -> bool:
    """Whether a layer that was not packed multiplies by a matrix (GPT-2's `Conv1D`, experts)."""
    left = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    return any(weight.ndim > 1 for module in left for weight in module.parameters(recurse=False))


def refuse_laid_out(model: nn.Module) -> None:
    """Raises `ValueError` for a model that a sampler has laid out in place: its weights are no longer what they were."""
    if _LAID_OUT in vars(pretrained(model)):
        raise ValueError("a sampler that owns this model has laid it out: it can be neither saved nor given to another sampler")


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Equal fingerprints = the same weights and the same adapters in use, unless weights were written behind autograd's back.

    Reads no weight: in-place updates are counted by autograd's version counters. Writes through `.data` and by some fused optimizers
    are not.
    """
    weights = [(weight.data_ptr(), -1 if weight.is_inference() else weight._version) for weight in model.parameters()]
    adapters = [_adapter_state(module) for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]
    return (*weights, *adapters)


def _adapter_state(layer: Any) -> tuple[object, ...]:
    scaling = tuple(sorted(getattr(layer, "scaling", {}).items()))
    return (tuple(layer.active_adapters), layer.disable_adapters, tuple(getattr(layer, "merged_adapters", ())), scaling)
