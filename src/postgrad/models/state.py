"""The weights that a run trains, as a flat dict: what a checkpoint stores and restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from postgrad.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Name -> the live weight (detached, not copied) of each parameter that is trained. Tied weights appear once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_trainable_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the weights into the model, bit for bit.

    Raises `CheckpointError`, changing nothing, unless names, shapes and dtypes all agree.
    """
    here = trainable_state(model)
    absent, unknown = sorted(here.keys() - state.keys()), sorted(state.keys() - here.keys())
    if absent or unknown:
        what = f"the checkpoint holds other weights than the model trains: {len(absent)} missing, {len(unknown)} unknown"
        raise CheckpointError(f"{what} (first: {(absent + unknown)[0]})", hint="does the recipe name the same model and the same adapter?")
    for name, tensor in here.items():
        if (tensor.shape, tensor.dtype) != (state[name].shape, state[name].dtype):
            raise CheckpointError(
                f"{name} is {state[name].dtype} {tuple(state[name].shape)}, the model has {tensor.dtype} {tuple(tensor.shape)}"
            )
    for name, tensor in here.items():
        tensor.copy_(state[name])
