"""An engine's state in a folder: what is trained and how far the optimizer got, as safetensors and JSON, exact to the bit.

trained.safetensors     the weights that are trained, by name
optimizer.safetensors   AdamW's moments, `NAME.exp_avg` and `NAME.exp_avg_sq`
engine.json             number of optimizer steps of each weight, and of the engine
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from postgrad.errors import CheckpointError

_VERSION = 2
_WEIGHTS, _MOMENTS, _RECORD = "trained.safetensors", "optimizer.safetensors", "engine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """weights by name; moments and steps as `Optimizer.state` gives them; updates: optimizer steps so far."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    steps: Mapping[str, int]
    updates: int = 0


def write(state: EngineState, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.weights.items()}, folder / _WEIGHTS)
    save_file({name: tensor.contiguous() for name, tensor in state.moments.items()}, folder / _MOMENTS)
    record = {"version": _VERSION, "steps": dict(state.steps), "updates": state.updates}
    (folder / _RECORD).write_text(json.dumps(record))


def read(folder: Path) -> EngineState:
    """Raises `CheckpointError` when a file is missing or cannot be read."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        if record["version"] != _VERSION:
            raise CheckpointError(f"{_RECORD} has version {record['version']}, this postgrad reads {_VERSION}", where=str(folder))
        weights, moments = load_file(folder / _WEIGHTS), load_file(folder / _MOMENTS)
        return EngineState(weights=weights, moments=moments, steps=record["steps"], updates=record["updates"])
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the engine state cannot be read: {error!r}", where=str(folder)) from error
