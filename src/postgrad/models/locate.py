"""From the name in a recipe to a folder on disk that holds a whole model. Nothing is loaded here.

A name is, in this order:
1. a built-in name (`smollm2-135m`);
2. a path that exists: a `.gguf` file, a transformers folder, a run directory (its `model/` is meant), or a PEFT adapter folder;
3. a hub id (`org/name`): taken from the hub's cache or downloaded. The only case that uses the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.errors import ModelError
from postgrad.models import builtin, gguf, hub
from postgrad.models.weights import check_weights, folder_fingerprint, read_json
from postgrad.suggest import nearest

ADAPTER_CONFIG = "adapter_config.json"
PROVENANCE = "postgrad"
"""Our note in adapter_config.json, inside `auto_mapping`, a free-form field that peft keeps and does not read for language models:
{"base": name, "base_fingerprint": sha256 over the base's weights}. A key of our own would make peft warn at every load."""
_EXPECTED = (
    "a transformers folder (config.json, *.safetensors, tokenizer files), a run directory, an adapter folder, a .gguf file or a hub id"
)
_RUN_FILES = ("recipe.yaml", "resolved.json")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model lies: `folder` is the full model's, `adapter` the PEFT adapter's that goes on top of it (or None).

    name: what the user wrote. base_name: how the full model is named, so that it can be found again (differs for an adapter).
    fingerprint: sha256 over the full model's weights.
    """

    name: str
    base_name: str
    folder: Path
    adapter: Path | None = None

    @property
    def fingerprint(self) -> str:
        return folder_fingerprint(check_weights(self.folder))


def locate(name: str | Path) -> Location:
    """Find the model. Raises `ModelError` saying what was expected there."""
    folder = _resolve(str(name))
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        return _locate_adapter(str(name), folder)
    return Location(str(name), _stable_name(str(name), folder), folder)


def _stable_name(name: str, folder: Path) -> str:
    """A built-in name and a hub id stay what they are; a path becomes absolute, so that it works from another directory."""
    return str(folder.resolve()) if Path(name).expanduser().exists() and name not in builtin.BUILTIN else name


def _resolve(name: str) -> Path:
    if name in builtin.BUILTIN:
        return _resolve_builtin(builtin.BUILTIN[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return _resolve_folder(path)
    if path.is_file():
        return _resolve_file(path)
    if not hub.looks_like_id(name):
        raise ModelError("no such file or folder", where=name, hint=_suggest(name) or f"expected {_EXPECTED}")
    return hub.fetch(name, hint=_suggest(name))


def _suggest(name: str) -> str | None:
    near = nearest(name.lower(), builtin.BUILTIN)
    return f"did you mean the built-in model {near}?" if near else None


def _resolve_builtin(model: builtin.Builtin) -> Path:
    if file := builtin.packaged_gguf(model):
        return gguf.convert(file)
    return hub.fetch(model.hub_id, hint=model.install)


def _resolve_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return gguf.convert(path)
    raise ModelError("this is a file", where=str(path), hint=f"expected {_EXPECTED}")


def _resolve_folder(path: Path) -> Path:
    if (path / "config.json").is_file() or (path / ADAPTER_CONFIG).is_file():
        return path
    if any((path / file).is_file() for file in _RUN_FILES):
        return _resolve_run(path)
    if not any(path.iterdir()):
        raise ModelError("the folder is empty", where=str(path), hint=f"expected {_EXPECTED}")
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"did you mean {ggufs[0]}?" if ggufs else f"expected {_EXPECTED}"
    raise ModelError("the folder holds no model: config.json is missing", where=str(path), hint=hint)


def _resolve_run(path: Path) -> Path:
    model = path / "model"
    if (model / "config.json").is_file():
        return model
    raise ModelError("this run has not written its model/ yet", where=str(path), hint=f"finish it with `postgrad resume {path}`")


def _locate_adapter(name: str, folder: Path) -> Location:
    config = read_json(folder / ADAPTER_CONFIG)
    base = _locate_base(folder, config)
    location = Location(name, base.base_name, base.folder, folder)
    _check_base(folder, config, location)
    return location


def _note(config: dict[str, Any]) -> dict[str, Any]:
    return (config.get("auto_mapping") or {}).get(PROVENANCE) or {}


def _locate_base(folder: Path, config: dict[str, Any]) -> Location:
    """The base by our own note first (a built-in name is good on every machine), then by PEFT's field."""
    note = _note(config)
    names = [str(value) for value in (note.get("base"), config.get("base_model_name_or_path")) if value]
    if not names:
        raise ModelError(
            "the adapter does not say which model it belongs to", where=str(folder / ADAPTER_CONFIG), hint="set base_model_name_or_path"
        )
    failures = []
    for candidate in dict.fromkeys(names):
        try:
            base = locate(candidate)
        except ModelError as error:
            failures.append(error)
            continue
        if base.adapter is None:
            return base
        raise ModelError(f"its base {candidate} is an adapter itself", where=str(folder), hint="merge that adapter first")
    raise ModelError(f"the adapter's base model was not found: {failures[0]}", where=str(folder), hint=failures[0].hint) from failures[0]


def _check_base(folder: Path, config: dict[str, Any], location: Location) -> None:
    trained_on = _note(config).get("base_fingerprint")
    if trained_on and trained_on != location.fingerprint:
        raise ModelError(
            f"the adapter was trained on another base: sha256 {trained_on}, but {location.base_name} has {location.fingerprint}",
            where=str(folder),
            hint="load it on the model it was trained on, or use the merged model beside it",
        )
