"""Writes a model that opens everywhere: transformers, vLLM, llama.cpp's converter, and `load`.

    FOLDER/  model.safetensors  config.json  generation_config.json   the full model (an adapter is merged into it)
             tokenizer.json  tokenizer_config.json  chat_template.jinja
             README.md  postgrad.json                                 model card; where it came from
             adapter/  adapter_model.safetensors  adapter_config.json only when an adapter was trained

The folder appears complete or not at all. An existing folder is replaced only if `save` wrote it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from postgrad import __version__
from postgrad.cache import make_readable, temporary_beside
from postgrad.errors import ModelError, reason
from postgrad.models.builtin import BUILTIN
from postgrad.models.hub import looks_like_id
from postgrad.models.loading import LanguageModel
from postgrad.models.lora import base_of, is_peft, merged_weights, save_adapter
from postgrad.models.quiet import quiet
from postgrad.models.scalar import is_scalar, set_padding
from postgrad.models.serving import refuse_laid_out
from postgrad.models.weights import read_json

if TYPE_CHECKING:
    import torch

RECORD = "postgrad.json"
"""Says that `save` wrote the folder: {"postgrad": version, "origin": hub id or null, "base": name, "base_fingerprint": sha256}."""


def save(
    lm: LanguageModel,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    facts: Mapping[str, str] | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write the model to `folder` and return it.

    chat_template: Jinja text to store with the tokenizer; None or "" = the tokenizer's own.
    dtype: of the stored weights, default fp32 as trained. facts: lines for the model card, e.g. {"Method": "GRPO, 60 steps"}.
    Raises `ModelError` when the folder holds something else or cannot be written; an earlier model there then stays as it was.
    """
    refuse_laid_out(lm.model)
    target = Path(folder)
    _refuse_foreign(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(target)
        try:
            _write(lm, temporary, dtype, facts or {})
            if chat_template:
                (temporary / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
            make_readable(temporary)
            _put_in_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the model: {reason(error)}", where=str(target), hint="is the disk full or read-only?") from error
    return target


def _refuse_foreign(target: Path) -> None:
    if target.is_file():
        raise ModelError("this is a file", where=str(target), hint="name a new folder")
    if target.is_dir() and any(target.iterdir()) and not (target / RECORD).is_file():
        raise ModelError(
            "the folder holds other files, which saving would replace", where=str(target), hint="name a new or an empty folder"
        )


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    old = temporary_beside(target) / target.name
    target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old.parent, ignore_errors=True)


def _write(lm: LanguageModel, folder: Path, dtype: torch.dtype | None, facts: Mapping[str, str]) -> None:
    _write_weights(lm, folder, dtype)
    _write_tokenizer(lm, folder)
    if is_scalar(lm.model):
        set_padding(folder, lm)
    else:
        _write_generation_config(lm, folder)
    if is_peft(lm.model):
        place = {"base_name": lm.base_name, "base_folder": lm.folder, "base_fingerprint": lm.fingerprint}
        save_adapter(lm.model, folder / "adapter", **place)  # type: ignore[arg-type]
    record = {"postgrad": __version__, "origin": origin_of(lm), "base": lm.base_name, "base_fingerprint": lm.fingerprint}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(lm, facts), encoding="utf-8")


def _write_weights(lm: LanguageModel, folder: Path, dtype: torch.dtype | None) -> None:
    """Through transformers, which drops tied duplicates; under configs of our own, so that the live ones stay untouched.

    The generation config is left out here: transformers refuses to write some that released models have.
    """
    import torch
    from transformers import GenerationConfig

    stored = dtype or torch.float32
    weights = {name: tensor.to(stored) if tensor.is_floating_point() else tensor for name, tensor in merged_weights(lm.model).items()}
    base: Any = base_of(lm.model)
    live = base.config, getattr(base, "generation_config", None)
    base.config, base.generation_config = _clean_config(base.config, stored), GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with quiet():
            base.save_pretrained(folder, state_dict=weights)
    finally:
        base.config, base.generation_config = live
    _set_dtype(folder / "config.json", stored)


def _clean_config(config: Any, dtype: torch.dtype) -> Any:
    clean = copy.deepcopy(config)
    if hasattr(clean, "quantization_config"):
        del clean.quantization_config
    clean.dtype = dtype
    return clean


def _set_dtype(file: Path, dtype: torch.dtype) -> None:
    """transformers writes the dtype of the live model; the file must state the dtype of the weights beside it."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_generation_config(lm: LanguageModel, folder: Path) -> None:
    """All end ids, so that whoever opens the model stops where we did."""
    config: Any = copy.deepcopy(base_of(lm.model).generation_config)
    ends = sorted(lm.stop_ids)
    if ends:
        config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if config.pad_token_id is None:
        config.pad_token_id = lm.tokenizer.pad_token_id if lm.tokenizer.pad_token_id is not None else (ends[0] if ends else None)
    config.to_json_file(folder / "generation_config.json", use_diff=True)


def _write_tokenizer(lm: LanguageModel, folder: Path) -> None:
    """The class is stated as PreTrainedTokenizerFast, which every transformers version builds from tokenizer.json alone."""
    lm.tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for local in ("is_local", "local_files_only", "backend", "name_or_path"):
        config.pop(local, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def origin_of(lm: LanguageModel) -> str | None:
    """The hub id that the model descends from, through any number of saved runs; None when it is not known."""
    if lm.base_name in BUILTIN:
        return BUILTIN[lm.base_name].hub_id
    if lm.folder is not None and (lm.folder / RECORD).is_file():
        origin = read_json(lm.folder / RECORD).get("origin")
        return str(origin) if origin else None
    return lm.base_name if lm.folder is not None and looks_like_id(lm.base_name) else None


def model_card(lm: LanguageModel, facts: Mapping[str, str]) -> str:
    """README.md of the saved folder, with the front matter that the hub reads. Paths of this machine stay out of it."""
    origin = origin_of(lm)
    base = origin or Path(lm.base_name).name
    scalar = is_scalar(lm.model)
    tag = "text-classification" if scalar else "text-generation"
    front = ["library_name: transformers", f"pipeline_tag: {tag}", "tags: [postgrad]"]
    front += [f"base_model: {json.dumps(origin)}"] if origin else []
    ends = ", ".join(f"`{lm.tokenizer.convert_ids_to_tokens(token)}` ({token})" for token in sorted(lm.stop_ids))
    lines = {"Base model": base, **facts, "End tokens": ends, "Trained with": f"postgrad {__version__}"}
    adapter = ["", "`adapter/` holds the LoRA adapter alone, for use on the base model with peft."] if is_peft(lm.model) else []
    title = [f"# A model post-trained from {base}", "", *(f"- {key}: {value}" for key, value in lines.items())]
    return "\n".join(
        [
            "---",
            *front,
            "---",
            "",
            *title,
            *adapter,
            "",
            _USAGE.format(kind="AutoModelForSequenceClassification" if scalar else "AutoModelForCausalLM"),
        ]
    )


_USAGE = """\
```python
from transformers import {kind}, AutoTokenizer

model = {kind}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""
