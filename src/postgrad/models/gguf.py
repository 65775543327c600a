"""Turns a `.gguf` file into a transformers folder, once, in the cache: fp32 safetensors, tokenizer, generation config.

transformers reads the file and dequantises it. Two things it gets wrong are put right here:
1. The split of text before BPE. transformers ignores the file's `tokenizer.ggml.pre` for several families and falls back to GPT-2's
   split, which makes other tokens than the model was trained on ("\\n\\n1." for one). We set the split of the families that cut
   digits one by one, and refuse a family that neither we nor transformers know: other tokens would be trained silently.
2. It leaves a `quantization_config` in the config of the dequantised model, which no longer holds and breaks a later save.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.errors import ModelError
from postgrad.models.cache import build_once, cache_folder
from postgrad.models.quiet import no_gguf_bar, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONVERSION = 1
"""Part of the cache key: raise it when the conversion changes."""

_DIGIT_SPLIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of tokenizer.ggml.pre that mean: each digit alone, then GPT-2's split."""
_GPT2_SPLIT = frozenset({"gpt-2", "mpt", "olmo", "jais"})
"""Values that mean GPT-2's split, which transformers uses by default."""


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
    import torch
    from transformers import AutoModelForCausalLM

    _need_gguf(file)
    try:
        with quiet(), no_gguf_bar():
            tokenizer = _read_tokenizer(file)
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, dtype=torch.float32, local_files_only=True
            )
    except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot read this GGUF file: {error}", where=str(file), hint="use the model's transformers folder"
        ) from error
    _forget_quantization(model)
    with quiet():
        model.save_pretrained(folder, state_dict={name: tensor.float() for name, tensor in model.state_dict().items()})
        tokenizer.save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    """The weights are plain fp32 now; what still calls the model quantised would be written to config.json."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.config._name_or_path = ""


def _need_gguf(file: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the package gguf", where=str(file), hint="pip install 'postgrad[gguf]'") from error


def _read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    kind, pre = (_text_field(file, key) for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind == "gpt2":
        _set_split(tokenizer, pre, file)
    for leftover in ("gguf_file", "is_local", "local_files_only", "vocab_file", "name_or_path"):
        tokenizer.init_kwargs.pop(leftover, None)
    return tokenizer  # type: ignore[no-any-return]


def _set_split(tokenizer: Any, pre: str, file: Path) -> None:
    """Give a byte-level BPE tokenizer the split of text that its merges were learned with."""
    from tokenizers import pre_tokenizers

    if pre in _DIGIT_SPLIT:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif pre not in _GPT2_SPLIT and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise ModelError(
            f"its tokenizer splits text in a way ({pre or 'not stated'}) that transformers does not read from GGUF: tokens would be wrong",
            where=str(file),
            hint="use the model's transformers folder, which has tokenizer.json",
        )


def _text_field(file: Path, key: str) -> str:
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get(key)
    return str(field.contents()) if field is not None else ""
