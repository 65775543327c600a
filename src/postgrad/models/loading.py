"""`load` gives a model that is ready to train: fp32 weights, its tokenizer, its end tokens, and the dtype to compute in.

1. `locate` finds the folder (built-in, path, run, adapter, hub id, GGUF) and checks that its files are whole.
2. The weights are read from safetensors. A weight that the file lacks is an error here, never a random tensor.
3. The tokenizer's ids are checked against the embedding rows.
4. The adapter, if any, goes on top; then only its weights are trainable.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.errors import ModelError, reason
from postgrad.models.dtype import default_device, resolve_autocast
from postgrad.models.locate import Location, locate
from postgrad.models.lora import LoraConfigLike, attach, base_of, continue_adapter, is_peft
from postgrad.models.quiet import quiet
from postgrad.models.tokenizer import check_vocabulary, load_tokenizer, merge_stop_ids, read_tokenizer, stop_ids
from postgrad.models.weights import check_weights, folder_fingerprint, read_json, tensor_fingerprint

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


_log = logging.getLogger("postgrad")


class Start(StrEnum):
    """What the policy is at the start of the run. It decides what the reference is."""

    FULL = "full"
    """All weights are trained; the reference is a frozen copy."""
    NEW_ADAPTER = "new_adapter"
    """A new adapter, which starts as zero; the reference is the model without it."""
    TRAINED_ADAPTER = "trained_adapter"
    """An adapter that was trained before; the reference is a frozen copy of that adapter on the same base."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model and what belongs to it.

    model:       fp32 weights in eval mode; a `PeftModel` when it has an adapter.
    stop_ids:    every id that ends a turn.
    name:        what the user wrote. base_name: how the full model is named (differs for an adapter folder).
    folder:      where the full model lies; None for a model that was handed over in memory.
    fingerprint: sha256 over the full model's weights as loaded, adapter excluded.
    autocast:    the dtype to compute in (bf16), or None for fp32.
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerFast
    stop_ids: frozenset[int]
    name: str
    base_name: str
    folder: Path | None
    fingerprint: str
    autocast: torch.dtype | None
    start: Start

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load(
    name: str | Path,
    *,
    adapter: LoraConfigLike | None = None,
    dtype: str = "auto",
    trainable: bool = True,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> LanguageModel:
    """Load a model by built-in name, folder, run directory, adapter folder, hub id or `.gguf` file.

    adapter:   put a new LoRA adapter on the model; for an adapter folder, must agree with the adapter that is there.
    dtype:     of the computation: `auto` (bf16 where the processor has it), `float32`, `bfloat16`. Weights are fp32 always.
    trainable: False freezes every weight (evaluation, chat, scoring).
    device:    default: the accelerator of this process, else the CPU.
    seed:      of a new adapter's random half.
    Raises `ModelError` (nothing readable there), `DataError` (tokenizer does not fit) or `RecipeError` (dtype, adapter).
    """
    import torch

    place = torch.device(device) if device is not None else default_device()
    autocast = resolve_autocast(dtype, place)
    location = locate(name)
    files = check_weights(location.folder)
    tokenizer = read_tokenizer(location)
    model = _read_model(location)
    check_vocabulary(tokenizer, embedding_rows(model), where=str(name))
    trained, start = _add_adapter(model, location, adapter, trainable=trainable, seed=seed)
    return LanguageModel(
        model=placed(trained, place).eval(),
        tokenizer=tokenizer,
        stop_ids=stop_ids(location.folder, tokenizer),
        name=str(name),
        base_name=location.base_name,
        folder=location.folder.resolve(),
        fingerprint=folder_fingerprint(files),
        autocast=autocast,
        start=start,
    )


def from_memory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    name: str = "in-memory",
    adapter: LoraConfigLike | None = None,
    dtype: str = "auto",
    seed: int = 0,
) -> LanguageModel:
    """The same for a model that exists already (no adapter on it). The model is used as it is, not copied; its weights become fp32."""
    if is_peft(model):
        raise ModelError("the model has an adapter already", where=name, hint="hand over the base model, or load the adapter's folder")
    model = _to_fp32(model)
    check_vocabulary(tokenizer, embedding_rows(model), where=name)
    fingerprint = tensor_fingerprint(model.named_parameters())
    ends = merge_stop_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id)
    autocast = resolve_autocast(dtype, model.device)
    trained = model if adapter is None else attach(model, adapter, seed=seed)
    start = Start.FULL if adapter is None else Start.NEW_ADAPTER
    return LanguageModel(trained.eval(), tokenizer, ends, name, name, None, fingerprint, autocast, start)


def embedding_rows(model: Any) -> int:
    """How many token ids the model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def placed(model: Any, device: torch.device) -> Any:
    """The model on `device`, every tensor in memory of its own.

    transformers maps the file into memory, where a tensor begins at any multiple of 8 bytes. Off the 64-byte grid products are slower (5 to
    12 % for long batches on a processor with AVX2) and end in other last bits, so that a model would not give the same numbers after it was
    saved. Nor does a file that is written again reach into a run.
    """
    there = model.to(device)
    if device.type == "cpu":
        for tensor in (*there.parameters(), *there.buffers()):
            tensor.data = tensor.data.clone()
    return there


def _to_fp32(model: Any) -> PreTrainedModel:
    """In place."""
    return model.float()  # type: ignore[no-any-return]


def fingerprint(model: PreTrainedModel | PeftModel) -> str:
    """sha256 over the live parameters, adapter included: equal before and after means that nothing was changed."""
    return tensor_fingerprint(model.named_parameters())


def _add_adapter(
    model: PreTrainedModel, location: Location, adapter: LoraConfigLike | None, *, trainable: bool, seed: int
) -> tuple[PreTrainedModel | PeftModel, Start]:
    if location.adapter is not None:
        return continue_adapter(model, location.adapter, adapter, trainable=trainable), Start.TRAINED_ADAPTER
    if adapter is not None:
        return attach(model, adapter, seed=seed), Start.NEW_ADAPTER
    return model.requires_grad_(trainable), Start.FULL


def _read_model(location: Location) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    folder = location.folder
    _refuse_other_heads(folder)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        what = f"transformers cannot read this model: {reason(error)}"
        raise ModelError(what, where=str(folder), hint=_remote_code_hint(folder)) from error
    model, info = loaded
    _refuse_gaps(folder, info)
    _report_unused(folder, info)
    return model  # type: ignore[no-any-return]


def _refuse_gaps(folder: Path, info: dict[str, Any]) -> None:
    """transformers fills a missing weight with random numbers and only logs it."""
    gaps = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
    if gaps:
        what = f"{len(gaps)} weights are missing or of the wrong shape (first: {gaps[0]})"
        raise ModelError(what, where=str(folder), hint="the weights and config.json do not belong together, or a file is missing")


def _report_unused(folder: Path, info: dict[str, Any]) -> None:
    """Weights that the architecture does not use: harmless leftovers, or a config.json with fewer layers than the file."""
    if unused := sorted(map(str, info["unexpected_keys"])):
        _log.warning("%s: %d weights of the file are not used by the model (first: %s)", folder, len(unused), unused[0])


def _refuse_other_heads(folder: Path) -> None:
    names = read_json(folder / "config.json").get("architectures") or []
    if names and all(name.endswith(("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")) for name in names):
        raise ModelError(
            f"not a language model but {names[0]}", where=str(folder), hint="a reward model is named under `rewards:`, not `model:`"
        )


def _remote_code_hint(folder: Path) -> str | None:
    if "auto_map" in read_json(folder / "config.json"):
        return "the model brings its own Python code, which postgrad never runs"
    return None


__all__ = ["LanguageModel", "Start", "base_of", "fingerprint", "from_memory", "load", "load_tokenizer"]
