"""Models with a scalar head: reward models and critics. Any decoder of transformers that has a sequence-classification class.

1. `load_scalar`   from a language model: its body and a new head; or a saved reward model, head and all.
2. `saving.save` writes it in transformers' sequence-classification layout: `AutoModelForSequenceClassification` gives the same scores.

transformers scores a row at its last token that is not the padding id. So that this is the last real token, the saved model gets a padding
token of its own that no answer ends with (where the vocabulary has one).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.errors import ModelError, reason
from postgrad.models.dtype import default_device, resolve_autocast
from postgrad.models.loading import LanguageModel, Start, embedding_rows, placed
from postgrad.models.locate import locate
from postgrad.models.lora import LoraConfigLike, attach, base_of
from postgrad.models.quiet import quiet
from postgrad.models.tokenizer import check_vocabulary, read_tokenizer, stop_ids
from postgrad.models.weights import check_weights, folder_fingerprint, read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

HEAD = "score"
"""Name of the head's module in transformers' classes."""


def load_scalar(
    name: str | Path,
    *,
    adapter: LoraConfigLike | None = None,
    dtype: str = "auto",
    trainable: bool = True,
    device: torch.device | str | None = None,
    seed: int = 0,
    new_head: bool = True,
) -> LanguageModel:
    """A model with one score per token. A language model gets a new head, drawn with `seed`; a saved reward model keeps its own.

    The head is trained whenever anything is, beside an adapter too. Arguments and errors as in `loading.load`; with `new_head` False a
    language model is an error, because its scores would be random.
    """
    import torch

    place = torch.device(device) if device is not None else default_device()
    autocast = resolve_autocast(dtype, place)
    location = locate(name)
    if location.adapter is not None:
        raise ModelError("an adapter folder", where=str(name), hint="name the folder of the whole model")
    files = check_weights(location.folder)
    if not new_head and not is_reward_model(location.folder):
        raise ModelError("this is no reward model: it has no scalar head", where=str(name), hint="train one with method: reward")
    tokenizer = read_tokenizer(location)
    model = _read(location.folder, seed)
    check_vocabulary(tokenizer, embedding_rows(model), where=str(name))
    model.requires_grad_(trainable)
    trained: Any = model if adapter is None else _with_adapter(model, adapter, seed)
    return LanguageModel(
        model=placed(trained, place).eval(),
        tokenizer=tokenizer,
        stop_ids=stop_ids(location.folder, tokenizer),
        name=str(name),
        base_name=location.base_name,
        folder=location.folder.resolve(),
        fingerprint=folder_fingerprint(files),
        autocast=autocast,
        start=Start.FULL if adapter is None else Start.NEW_ADAPTER,
    )


def is_scalar(model: Any) -> bool:
    """Whether a live model has a scalar head."""
    return type(base_of(model)).__name__.endswith("ForSequenceClassification")


def is_reward_model(folder: Path) -> bool:
    """Whether the folder holds a model with a scalar head."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    names = config.get("architectures") or []
    return bool(names) and all(str(name).endswith("ForSequenceClassification") for name in names)


def _with_adapter(model: PreTrainedModel, adapter: LoraConfigLike, seed: int) -> Any:
    """The adapter on the body; the head stays a plain weight that is trained whole."""
    wrapped = attach(model, adapter, seed=seed, leave_out=(HEAD,))
    getattr(model, HEAD).requires_grad_(True)
    return wrapped


def _read(folder: Path, seed: int) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForSequenceClassification

    own_head = is_reward_model(folder)
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(seed)
        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                str(folder), num_labels=1, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                output_loading_info=True, ignore_mismatched_sizes=False,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            what = f"transformers cannot read this model with a scalar head: {reason(error)}"
            raise ModelError(what, where=str(folder)) from error
    model, info = loaded
    new = {f"{HEAD}.weight"} if not own_head else set()
    gaps = sorted({str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]]} - new)
    if gaps:
        what = f"{len(gaps)} weights are missing or of the wrong shape (first: {gaps[0]})"
        raise ModelError(what, where=str(folder), hint="the weights and config.json do not belong together, or the head has other outputs")
    return model  # type: ignore[no-any-return]


def padding_for(lm: LanguageModel) -> int | None:
    """A padding id that no answer ends with; None when the vocabulary has no special token to spare."""
    special = sorted(set(lm.tokenizer.all_special_ids) | set(lm.tokenizer.get_added_vocab().values()))
    spare = [index for index in special if index not in lm.stop_ids and index != lm.tokenizer.bos_token_id]
    current = lm.tokenizer.pad_token_id
    return current if current in spare else (spare[0] if spare else None)


def set_padding(folder: Path, lm: LanguageModel) -> None:
    """State the padding id in the saved model's config and tokenizer.

    Without an id to spare the config names none: transformers then refuses a batch, which is better than scoring the wrong token.
    """
    padding = padding_for(lm)
    stated: list[tuple[str, str, Any]] = [("config.json", "pad_token_id", padding)]
    if padding is not None:
        stated.append(("tokenizer_config.json", "pad_token", lm.tokenizer.convert_ids_to_tokens(padding)))
    for name, key, value in stated:
        file = folder / name
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config[key] = value
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
