"""What a policy's sampler does to its model: nothing where it is trained, all it likes where it is not."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from postgrad.models.dtype import resolve_autocast
from postgrad.models.serving import can_pack, serving_dtype
from postgrad.protocols import SampleKey, SamplingParams, TurnRequest
from postgrad.train.recipe import SFTRecipe
from postgrad.train.setup import Policy, load_frozen_policy, load_policy

REQUEST = TurnRequest(SampleKey(0, 0, 0, 0), 0, (5, 6, 7), 8)
CPU = torch.device("cpu")
LAID_OUT = serving_dtype(CPU, resolve_autocast("auto", CPU))


def linears(policy: Policy) -> list[nn.Linear]:
    return [module for module in policy.model.model.modules() if type(module) is nn.Linear]


def trained(folder: Path) -> Policy:
    values = {"method": "sft", "model": str(folder), "run_dir": "unused", "max_steps": 1, "data": {"train": "unused.jsonl"}}
    return load_policy(SFTRecipe.model_validate(values))


def test_the_sampler_of_a_frozen_policy_takes_the_model_over(tiny_folder: Path) -> None:
    policy = load_frozen_policy(str(tiny_folder))
    assert linears(policy)
    sampler = policy.sampler()
    answers = []
    for _ in range(2):
        answers.append(sampler.generate([REQUEST], SamplingParams()))
        sampler.forget()
    assert answers[0] == answers[1]
    assert bool(linears(policy)) == (LAID_OUT is None or not can_pack(CPU, LAID_OUT))


def test_the_sampler_of_a_policy_that_is_trained_leaves_it_as_it_is_and_follows_it(tiny_folder: Path) -> None:
    policy = trained(tiny_folder)
    layers = linears(policy)
    sampler = policy.sampler()
    first = sampler.generate([REQUEST], SamplingParams())
    assert first == load_frozen_policy(str(tiny_folder)).sampler().generate([REQUEST], SamplingParams())
    assert linears(policy) == layers
    assert all(weight.requires_grad for weight in policy.model.model.parameters())
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(1.5)
    assert sampler.generate([REQUEST], SamplingParams()) != first
