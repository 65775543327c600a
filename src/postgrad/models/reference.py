"""The reference: the policy as it was at the start of the run, whatever happens to the policy afterwards.

- all weights trained: a frozen copy of the model, made in memory (no path is needed);
- a new adapter: the same model with the adapter switched off, which costs nothing;
- a trained adapter: a frozen copy of the adapter beside it, on the same base (the base alone is not the policy's start; trl#6591).

Ask for it before the first update and before a checkpoint is restored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postgrad.models.loading import LanguageModel, Start
from postgrad.models.lora import ADAPTER
from postgrad.models.quiet import quiet

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

REFERENCE_ADAPTER = "reference"


@dataclass(frozen=True, slots=True)
class Reference:
    """`model` computes the reference's outputs inside `active()`. Outside of it, it may be the policy itself."""

    model: PreTrainedModel | PeftModel
    start: Start

    @contextmanager
    def active(self) -> Iterator[PreTrainedModel | PeftModel]:
        """Reference weights, dropout off, no gradient. The policy's state (which weights train, train or eval mode) is restored after."""
        import torch

        with _restored(self.model), self._adapter(), torch.no_grad():
            self.model.eval()
            yield self.model

    def _adapter(self) -> AbstractContextManager[Any]:
        if self.start is Start.NEW_ADAPTER:
            return self.model.disable_adapter()  # type: ignore[operator]
        if self.start is Start.TRAINED_ADAPTER:
            return _switched(self.model)
        return nullcontext()


def reference_of(lm: LanguageModel) -> Reference:
    """The reference of this policy, as it is now."""
    if lm.start is Start.FULL:
        return Reference(frozen_copy(lm.model), lm.start)
    if lm.start is Start.TRAINED_ADAPTER:
        _copy_adapter(lm.model)
    return Reference(lm.model, lm.start)


def frozen_copy(model: Any) -> Any:
    """A copy in memory that shares no weights with `model`, in eval mode, without gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def _copy_adapter(model: Any) -> None:
    """Add the adapter `reference`: the same numbers as the trained one now, never trained."""
    import torch

    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.random.fork_rng(), quiet():
        model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[ADAPTER]))
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(flags.get(name, False))
        if f".{REFERENCE_ADAPTER}." in name:
            parameter.data.copy_(parameters[name.replace(f".{REFERENCE_ADAPTER}.", f".{ADAPTER}.")].data)


@contextmanager
def _switched(model: Any) -> Iterator[None]:
    model.set_adapter(REFERENCE_ADAPTER)
    try:
        yield
    finally:
        model.set_adapter(ADAPTER)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """peft turns gradients on and off when it switches adapters, and `eval()` reaches every module: put both back exactly."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
        for module, mode in training:
            module.training = mode
