"""LoRA adapters, through peft: attach a new one, continue a trained one, and read the merged weights.

Only adapter weights are trained, in fp32. peft accepts a target that matches nothing as long as another one matches; here every
target must match, and weights that are tied to the embedding cannot be a target (merging would change the embedding too).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from postgrad.errors import ModelError, RecipeError
from postgrad.models.locate import ADAPTER_CONFIG, PROVENANCE
from postgrad.models.quiet import quiet
from postgrad.models.weights import check_weights, read_json

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name of the adapter that is trained. The frozen copy of a continued adapter is called `reference`."""
_UNMERGEABLE = ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias", "megatron_config", "alora_invocation_tokens")
"""Settings of a foreign adapter that are more than W + B @ A."""


class LoraConfigLike(Protocol):
    """What `load` needs of a recipe's `adapter:` section. alpha None means 2 * rank. targets: names of modules, or "all-linear"."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def dropout(self) -> float: ...
    @property
    def targets(self) -> Literal["all-linear"] | Sequence[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A `LoraConfigLike` for use without a recipe."""

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: Literal["all-linear"] | Sequence[str] = "all-linear"


def need_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise RecipeError("adapters need the package peft", key="adapter", hint="pip install 'postgrad[lora]'") from error


def attach(model: PreTrainedModel, config: LoraConfigLike, *, seed: int = 0, leave_out: Sequence[str] = ()) -> PeftModel:
    """Put a new adapter on the model: it starts as zero, so the outputs do not change. `seed` fixes its random half.

    `leave_out` names modules that never get one (a scalar head is trained whole).
    """
    need_peft()
    import torch
    from peft import LoraConfig, get_peft_model

    _check(config)
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    if not isinstance(targets, str):
        _check_targets(model, targets)
    alpha: Any = alpha_of(config)  # peft's annotation says int; it divides
    peft_config = LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=targets, bias="none",
        task_type=None if leave_out else "CAUSAL_LM", exclude_modules=list(leave_out) or None,
    )  # fmt: skip
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(seed)
        return get_peft_model(model, peft_config, adapter_name=ADAPTER)


def alpha_of(config: LoraConfigLike) -> float:
    """The factor `alpha / rank` scales the adapter's output; alpha defaults to 2 * rank."""
    return 2 * config.rank if config.alpha is None else config.alpha


def _check(config: LoraConfigLike) -> None:
    if config.rank < 1:
        raise RecipeError(f"must be at least 1, got {config.rank}", key="adapter.rank")
    if not 0 <= config.dropout < 1:
        raise RecipeError(f"must be in [0, 1), got {config.dropout}", key="adapter.dropout")


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Full name -> module, for each module that a LoRA adapter can be put on."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | Conv1D)}


def _check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    modules = candidates(model)
    for target in targets:
        matched = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not matched:
            names = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
            raise RecipeError(
                f"{target!r} matches no module of the model", key="adapter.targets", hint=f"candidates: {names}, or all-linear"
            )
        if tied := _tied(model, modules, matched):
            what = f"{target!r} would change {tied}, whose weights are tied to another module's"
            raise RecipeError(what, key="adapter.targets", hint="leave it out: an adapter on tied weights cannot be merged")


def _tied(model: Any, modules: dict[str, nn.Module], matched: Sequence[str]) -> str | None:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or getattr(embeddings, "weight", None) is not getattr(head, "weight", None):
        return None
    return next((name for name in matched if modules[name] in (embeddings, head)), None)


def continue_adapter(model: PreTrainedModel, folder: Path, config: LoraConfigLike | None, *, trainable: bool) -> PeftModel:
    """Put a trained adapter on its base. A `config` must agree with it in rank and alpha; its dropout is used."""
    need_peft()
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    saved = read_json(folder / ADAPTER_CONFIG)
    if saved.get("peft_type") != "LORA":
        raise ModelError(f"a {saved.get('peft_type')} adapter; postgrad reads LoRA adapters", where=str(folder))
    (file,) = check_weights(folder, stem="adapter_model")
    peft_config = _read_config(LoraConfig, saved, folder)
    peft_config.inference_mode = False
    if config is not None:
        _check_agrees(peft_config, config, folder)
        peft_config.lora_dropout = config.dropout
    with quiet():
        peft_model = PeftModel(model, peft_config, adapter_name=ADAPTER)
        try:
            result: Any = set_peft_model_state_dict(peft_model, load_file(file), adapter_name=ADAPTER)
        except RuntimeError as error:
            raise ModelError(f"the adapter does not fit its base model: {error}", where=str(file)) from error
    absent = [name for name in result.missing_keys if f".{ADAPTER}." in name]
    if absent or result.unexpected_keys:
        what = f"the adapter does not fit its base model: {len(absent)} weights are missing, {len(result.unexpected_keys)} are unknown"
        raise ModelError(f"{what} (first: {[*absent, *result.unexpected_keys][0]})", where=str(file))
    if not trainable:
        peft_model.requires_grad_(False)
    return peft_model


def _read_config(kind: Any, saved: dict[str, Any], folder: Path) -> Any:
    """Fields that peft does not know are an error unless they are unset: an ignored one could change the arithmetic."""
    fields = set(kind.__dataclass_fields__)
    if unmergeable := [key for key in _UNMERGEABLE if saved.get(key)] + ["bias"] * (saved.get("bias", "none") != "none"):
        what = f"the adapter uses {', '.join(unmergeable)}, which postgrad cannot continue"
        raise ModelError(what, where=str(folder), hint="merge it with peft's merge_and_unload() and use the result")
    unknown = [key for key, value in saved.items() if key not in fields and key != "peft_type" and value]
    if unknown:
        raise ModelError(
            f"the adapter uses {', '.join(unknown)}, which this peft does not know", where=str(folder), hint="pip install -U peft"
        )
    return kind(**{key: value for key, value in saved.items() if key in fields and key not in ("peft_type", "auto_mapping")})


def _check_agrees(saved: Any, wanted: LoraConfigLike, folder: Path) -> None:
    pairs: dict[str, tuple[float, float]] = {"rank": (saved.r, wanted.rank)}
    if wanted.alpha is not None:
        pairs["alpha"] = (saved.lora_alpha, wanted.alpha)
    for key, (have, want) in pairs.items():
        if have != want:
            what = f"the recipe says {want}, but the adapter in {folder} was trained with {have}"
            raise RecipeError(
                what, key=f"adapter.{key}", hint="leave `adapter:` out to continue it as it is; start from the merged model for a new one"
            )


def is_peft(model: object) -> bool:
    """Whether the model carries an adapter, without importing peft."""
    return any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)


def base_of(model: Any) -> PreTrainedModel:
    """The transformers model itself, with or without an adapter on it."""
    return model.get_base_model() if is_peft(model) else model  # type: ignore[no-any-return]


def merged_weights(model: Any, *, adapter: str = ADAPTER) -> dict[str, Tensor]:
    """The model's state under the names of the plain transformers model, adapters added in: W + (alpha / rank) * B @ A.

    Weights without an adapter are the live tensors (not copies); the model is left as it is.
    """
    if not is_peft(model):
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}
    base = base_of(model)
    weights = {
        name.replace(".base_layer.", "."): tensor.detach() for name, tensor in base.state_dict().items() if not _is_adapter_weight(name)
    }
    for name, module in base.named_modules():
        if any(adapter in getattr(module, matrix, {}) for matrix in ("lora_A", "lora_embedding_A")):
            weights[f"{name}.weight"] = _merge(module, adapter)
    return weights


def _is_adapter_weight(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _merge(module: Any, adapter: str) -> Tensor:
    weight: torch.Tensor = module.base_layer.weight.detach()
    delta: torch.Tensor = module.get_delta_weight(adapter).detach()
    return weight + delta.to(weight.dtype)


def save_adapter(model: PeftModel, folder: Path, *, base_name: str, base_folder: Path | None, base_fingerprint: str) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which names the base and carries its fingerprint."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    state |= {name: weight for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name}
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors", {"format": "pt"}
    )
    config = {key: _jsonable(value) for key, value in model.peft_config[ADAPTER].to_dict().items()}
    config |= {"base_model_name_or_path": str(base_folder or base_name), "inference_mode": True}
    config["auto_mapping"] = {PROVENANCE: {"base": base_name, "base_fingerprint": base_fingerprint}}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _jsonable(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
