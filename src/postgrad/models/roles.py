"""Several roles on one frozen base: each has a LoRA adapter of its own, and a critic or a reward model a scalar head.

    base (frozen) ─ adapter `default`  the actor
                  ─ adapter `critic`   + head    the critic
                  ─ adapter `reward_…` + head    a reward model that was trained on the same base
                  ─ no adapter                   the reference

A role is active only inside `Role.active()`; outside, the model is the actor's. So four roles need about the memory of one model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from postgrad.errors import ModelError
from postgrad.models.loading import LanguageModel
from postgrad.models.locate import ADAPTER_CONFIG, PROVENANCE
from postgrad.models.lora import ADAPTER, LoraConfigLike, base_of, is_peft
from postgrad.models.quiet import quiet
from postgrad.models.scalar import HEAD

_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Role:
    """One adapter and its head on the actor's base. `trained`: whether the role learns."""

    model: Any
    adapter: str
    head: nn.Linear
    trained: bool

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model as this role; afterwards it is the actor's again, with exactly the weights trained that were."""
        flags = [(weight, weight.requires_grad) for weight in self.model.parameters()]
        inner = base_of(self.model)
        before = getattr(inner, HEAD, None)
        self.model.set_adapter(self.adapter)
        setattr(inner, HEAD, self.head)
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(self.trained and (f".{self.adapter}." in name or weight is self.head.weight))
        try:
            yield self.model
        finally:
            if before is None:
                delattr(inner, HEAD)
            else:
                setattr(inner, HEAD, before)
            self.model.set_adapter(ADAPTER)
            for weight, flag in flags:
                weight.requires_grad_(flag)


def add_critic(lm: LanguageModel, config: LoraConfigLike, *, seed: int) -> Role:
    """A new critic on the base of an actor that has an adapter: it starts as the base, its head is drawn with `seed`."""
    from peft import LoraConfig

    if not is_peft(lm.model):
        raise ModelError("a critic on the same base needs an adapter", where=lm.name, hint="set adapter: {kind: lora}")
    saved: Any = lm.model.peft_config[ADAPTER]
    settings = {"r": saved.r, "lora_alpha": saved.lora_alpha, "lora_dropout": 0.0, "target_modules": saved.target_modules, "bias": "none"}
    return _added(lm, "critic", LoraConfig(**settings), _new_head(lm, seed), seed, trained=True)


def add_reward(lm: LanguageModel, folder: Path, *, name: str) -> Role | None:
    """The reward model's adapter and head on the actor's base; None where it was not trained with an adapter on this very base."""
    file = folder / "adapter" / ADAPTER_CONFIG
    if not is_peft(lm.model) or not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    if ((config.get("auto_mapping") or {}).get(PROVENANCE) or {}).get("base_fingerprint") != lm.fingerprint:
        return None
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    state = load_file(folder / "adapter" / _WEIGHTS)
    heads = [key for key in state if key.endswith(f"{HEAD}.weight")]
    if len(heads) != 1:
        return None
    head = _new_head(lm, 0)
    head.weight.data.copy_(state.pop(heads[0]))
    known = {key: config[key] for key in ("r", "lora_alpha", "target_modules", "bias")}
    role = _added(lm, f"reward_{name}", LoraConfig(lora_dropout=0.0, **known), head, 0, trained=False)
    result: Any = set_peft_model_state_dict(lm.model, state, adapter_name=role.adapter)
    if result.unexpected_keys:
        raise ModelError(f"the reward model's adapter has unknown weights (first: {result.unexpected_keys[0]})", where=str(folder))
    return role


def _new_head(lm: LanguageModel, seed: int) -> nn.Linear:
    """As transformers draws the head of its sequence-classification models."""
    config = base_of(lm.model).config.get_text_config()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = nn.Linear(config.hidden_size, 1, bias=False)
        nn.init.normal_(head.weight, std=getattr(config, "initializer_range", 0.02))
    return head.to(lm.device)


def _added(lm: LanguageModel, adapter: str, config: Any, head: nn.Linear, seed: int, *, trained: bool) -> Role:
    flags = {name: weight.requires_grad for name, weight in lm.model.named_parameters()}
    model: Any = lm.model
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(seed)
        model.add_adapter(adapter, config)
    for name, weight in model.named_parameters():
        weight.requires_grad_(flags.get(name, False))
    return Role(model, adapter, head, trained)
