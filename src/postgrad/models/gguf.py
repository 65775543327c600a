"""Turns a `.gguf` file into a transformers folder, once, in the cache: fp32 safetensors, tokenizer, generation config.

transformers reads the file and dequantises it. What it gets wrong without a word is put right here, or refused:
1. The split of text before BPE. For several families transformers ignores the file's `tokenizer.ggml.pre` and uses GPT-2's split,
   which makes other tokens than the model was trained on ("\\n\\n1." for one). We set the split of the families that cut digits one
   by one, and refuse a family that neither we nor transformers know.
2. Scaled rotary positions that it did not read are refused: the model would run, with wrong attention.
3. Every end token of the file goes into the generation config (end of turn may differ from end of text).
4. `quantization_config` is removed: the weights are plain now, and it would break a later save.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from postgrad.cache import build_once, cache_folder
from postgrad.errors import ModelError
from postgrad.models.quiet import no_gguf_bar, quiet

_CONVERSION = 2
"""Part of the cache key: raise it when the conversion changes."""

_DIGIT_SPLIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of tokenizer.ggml.pre that mean: each digit alone, then GPT-2's split."""
_GPT2_SPLIT = frozenset({"gpt-2", "mpt", "olmo", "jais"})
"""Values that mean GPT-2's split, which transformers uses by default."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def convert(file: Path) -> Path:
    """The cached transformers folder of this `.gguf` file, made at the first call. Raises `ModelError` for a file that is none."""
    with file.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise ModelError("not a GGUF file (it does not start with GGUF)", where=str(file), hint="was the download interrupted?")
        handle.seek(0)
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{file.stem}-v{_CONVERSION}-{digest[:16]}"
    return build_once(folder, lambda temporary: _convert(file, temporary))


def _convert(file: Path, folder: Path) -> None:
    reader = _open(file)
    try:
        with quiet(), no_gguf_bar():
            tokenizer, model = _read(file)
    except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
        what = f"transformers cannot read this GGUF file: {error}"
        raise ModelError(what, where=str(file), hint="use the model's transformers folder") from error
    _set_split(tokenizer, reader, file)
    _refuse_lost_rope(model.config, reader, file)
    tokenizer.model_max_length = int(getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length)
    model.generation_config.eos_token_id = _end_ids(reader) or None
    _forget_source(model, tokenizer)
    with quiet():
        model.save_pretrained(folder, state_dict={name: tensor.float() for name, tensor in model.state_dict().items()})
        tokenizer.save_pretrained(folder)


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the package gguf", where=str(file), hint="pip install 'postgrad[gguf]'") from error
    try:
        return GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OSError) as error:
        size = file.stat().st_size
        raise ModelError(
            f"truncated or damaged GGUF file ({size:,} bytes): {error}", where=str(file), hint="fetch the file again"
        ) from error


def _read(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, output_loading_info=True, **place)
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"it lacks {len(info['missing_keys'])} weights (first: {min(info['missing_keys'])})")
    return tokenizer, model


def _set_split(tokenizer: Any, reader: Any, file: Path) -> None:
    """Give a byte-level BPE tokenizer the split of text that its merges were learned with."""
    from tokenizers import pre_tokenizers

    pre = _value(reader, "tokenizer.ggml.pre", "")
    if _value(reader, "tokenizer.ggml.model", "") != "gpt2":
        return
    if pre in _DIGIT_SPLIT:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif pre not in _GPT2_SPLIT and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        what = (
            f"its tokenizer splits text in a way ({pre or 'not stated'}) that transformers does not read from GGUF: tokens would be wrong"
        )
        raise ModelError(what, where=str(file), hint="use the model's transformers folder, which has tokenizer.json")


def _refuse_lost_rope(config: Any, reader: Any, file: Path) -> None:
    architecture = _value(reader, "general.architecture", "")
    stated = _value(reader, f"{architecture}.rope.scaling.type", "none")
    scaled = stated != "none" or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)
    if scaled and (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") == "default":
        what = "the file scales its rotary positions, which transformers did not read: attention would be wrong"
        raise ModelError(what, where=str(file), hint="use the model's transformers folder")


def _end_ids(reader: Any) -> list[int]:
    values = (_value(reader, f"tokenizer.ggml.{key}", None) for key in _END_KEYS)
    return sorted({int(value) for value in values if value is not None})


def _value(reader: Any, key: str, default: Any) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _forget_source(model: Any, tokenizer: Any) -> None:
    """The weights are plain fp32 now; what still calls the model quantised, or names the file, must not be written."""
    for key in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.hf_quantizer = None
    model.config._name_or_path = ""
    for leftover in ("gguf_file", "is_local", "local_files_only", "vocab_file", "name_or_path"):
        tokenizer.init_kwargs.pop(leftover, None)
