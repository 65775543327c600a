"""One micro-batch through a model: from token ids to one number per trained token.

The number is the token's log-prob, or, for a model with a scalar head, the head's value at the token before it: the value of what had been
read when the trained token was about to come. A reward model's score is the value at the last real token, found by its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from postgrad.models.attention import attend_with, body, output_head, scalar_head
from postgrad.models.dtype import autocast
from postgrad.models.heads import selected_logprobs
from postgrad.models.linears import has_gradient
from postgrad.models.micro_batch import MicroBatch


def read_logprobs(
    model: nn.Module, batch: MicroBatch, *, temperature: float, dtype: torch.dtype | None, gradient: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] and entropies [N] in nats at the temperature, differentiable. `dtype`: of the matrix products.

    gradient [N]: the loss's derivative by each log-prob where it is known before they are; see `heads.selected_logprobs`. The head's
    weight has its gradient added to the one that has accumulated, if there is one (in fp32).
    """
    device = batch.input_ids.device
    if not batch.trained_tokens:
        return torch.zeros(0, device=device, requires_grad=torch.is_grad_enabled()), torch.zeros(0, device=device)
    with autocast(dtype, device):
        hidden = hidden_states(model, batch)[batch.source]
        head = output_head(model)
        into = head.weight.grad if has_gradient(head.weight) else None
        return selected_logprobs(
            hidden, head.weight, batch.targets, temperature=temperature,
            bias=head.bias, scale=head.scale, softcap=head.softcap, gradient=gradient, into=into,
        )  # fmt: skip


def read_values(model: nn.Module, batch: MicroBatch, *, temperature: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Values [N] of a scalar head (differentiable), fp32, and zeros in the place of entropies. The temperature means nothing here."""
    device = batch.input_ids.device
    zeros = torch.zeros(batch.trained_tokens, device=device)
    if not batch.trained_tokens:
        return torch.zeros(0, device=device, requires_grad=torch.is_grad_enabled()), zeros
    with autocast(dtype, device):
        hidden = hidden_states(model, batch)[batch.source]
    weight, bias = scalar_head(model)
    values = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).squeeze(1)
    return values, zeros


class Readout(Protocol):
    """What is read off a micro-batch: (numbers [N], entropies [N])."""

    def __call__(self, model: nn.Module, batch: MicroBatch, *, temperature: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]: ...


def hidden_states(model: nn.Module, batch: MicroBatch) -> Tensor:
    """[B·T, width]: what the model's body makes of every token of the micro-batch."""
    if batch.layout is None:
        return body(model, batch.input_ids, batch.position_ids, attention_mask=batch.attention_mask)
    with attend_with(model, batch.layout):
        return body(model, batch.input_ids, batch.position_ids)


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train or eval mode (dropout on or off); each module's own mode is restored after."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
