"""What can be learned from a folder's safetensors files without building a model: whether they are whole, and their fingerprint.

Pickle files (`.bin`, `.pt`, `.pth`, `.ckpt`) are looked at by name only; none is ever opened.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from postgrad.cache import cache_folder
from postgrad.errors import ModelError, reason

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FINGERPRINT_VERSION = 1


def check_weights(folder: Path, *, stem: str = "model") -> list[Path]:
    """The folder's weight files, each verified to be whole. Raises `ModelError` naming file and sizes otherwise.

    stem: "model", or "adapter_model" for a PEFT adapter.
    """
    files = _weight_files(folder, stem)
    for file in files:
        _check_whole(file)
    return files


def _weight_files(folder: Path, stem: str) -> list[Path]:
    index = folder / f"{stem}.safetensors.index.json"
    single = folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    if found := sorted(folder.glob("*.safetensors")):
        return found
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"only pickle weights here ({', '.join(pickles[:3])}), and postgrad never opens pickle files: they can run code",
            where=str(folder),
            hint='if you trust the file, convert it once: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\", and copy the tokenizer files beside it",
        )
    raise ModelError("no weights here: expected model.safetensors or its index", where=str(folder), hint="was the download interrupted?")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index has no weight_map", where=str(index), hint="fetch the model again")
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    if absent := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelError(
            f"{len(absent)} of {len(shards)} weight files are missing: {', '.join(absent[:5])}",
            where=str(index.parent),
            hint="fetch the model again",
        )
    return shards


def _check_whole(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            return
    except SafetensorError as error:
        size, expected = file.stat().st_size, _expected_size(file)
        sizes = f"{size:,} bytes" + (f", its header announces {expected:,}" if expected is not None else ", its header cannot be read")
        raise ModelError(f"truncated or damaged safetensors file: {sizes}", where=str(file), hint="fetch or copy the file again") from error


def _expected_size(file: Path) -> int | None:
    """Bytes the file must have by its own header; None when the header itself is damaged. Only used to word an error."""
    with file.open("rb") as handle:
        prefix = handle.read(8)
        if len(prefix) < 8:
            return None
        (length,) = struct.unpack("<Q", prefix)
        if length > file.stat().st_size:
            return 8 + int(length) if length < 1 << 27 else None
        try:
            header = json.loads(handle.read(length))
            return 8 + int(length) + max(int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises `ModelError` when it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read this file: {reason(error)}", where=str(file), hint="fetch or copy the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"expected a JSON object, found a {type(value).__name__}", where=str(file))
    return value


def tensor_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over name, dtype, shape and bytes of each tensor, in the order of their names."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        _add(digest, name, tensor.detach().to("cpu").contiguous(), torch)
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: Tensor, torch: Any) -> None:
    digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())


def folder_fingerprint(files: Iterable[Path]) -> str:
    """`tensor_fingerprint` over the tensors of these files: the same for any sharding. Cached by path, size and modification time."""
    files = sorted(files)
    record = cache_folder() / "fingerprints" / f"{_key(files)}.txt"
    with suppress(OSError):
        return record.read_text(encoding="ascii")
    value = _hash_files(files)
    with suppress(OSError):  # a read-only cache costs time, nothing else
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_suffix(f".tmp-{id(files)}")
        temporary.write_text(value, encoding="ascii")
        temporary.replace(record)
    return value


def _key(files: list[Path]) -> str:
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((_FINGERPRINT_VERSION, stats)).encode()).hexdigest()


def _hash_files(files: list[Path]) -> str:
    """One tensor in memory at a time, in the order of their names over all files."""
    import torch

    homes: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            homes |= dict.fromkeys(handle.keys(), file)
    digest = hashlib.sha256()
    handles: Mapping[Path, Any] = {file: safe_open(file, framework="pt") for file in files}
    for name in sorted(homes):
        _add(digest, name, handles[homes[name]].get_tensor(name), torch)
    return digest.hexdigest()
