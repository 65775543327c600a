"""AdamW over the weights that are trained: gradient norm, clipping, the step, and state that is stored by weight name.

1. Weight decay acts on matrices only: not on biases and not on the weights of norms.
2. The gradient norm is the 2-norm over all trained weights, in fp32. When it is not finite nothing is changed.
3. A weight without a gradient has gradient zero: a step on a batch in which nothing is trained is a step with zero gradients.
4. `state` and `load` are exact: a run that stores, restores and continues is bit-equal to one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from postgrad.errors import CheckpointError, RunError
from postgrad.models.dtype import at_least_fp32
from postgrad.protocols import OptimizerResult

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019). The learning rate is given at each step."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


class Optimizer:
    """Owns the moments; the gradients lie in the weights' `.grad`."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, max_grad_norm: float | None) -> None:
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.max_grad_norm = max_grad_norm
        decayed = [weight for weight in self.weights.values() if weight.ndim >= 2]
        plain = [weight for weight in self.weights.values() if weight.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        filled = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(filled, lr=0.0, betas=config.betas, eps=config.eps, fused=True) if filled else None

    def gradient_norm(self) -> float:
        """2-norm over all trained weights, before clipping; inf or nan when a gradient is."""
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        if not gradients:
            return 0.0
        norms = [torch.linalg.vector_norm(gradient, dtype=at_least_fp32(gradient.dtype)) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def finite_norm(self) -> float:
        """`gradient_norm`. Raises `RunError`, and drops the gradients, when it is not finite."""
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            names = self.non_finite()
            self.clear()
            where = ", ".join(names[:3]) if names else "their norm only: single values are finite but too large"
            raise RunError(f"the gradient is not finite ({where})", hint="lower optimizer.learning_rate; look at the last batch's rows")
        return norm

    def non_finite(self) -> list[str]:
        """Names of the weights whose gradient is not finite."""
        return [name for name, weight in self.weights.items() if weight.grad is not None and not bool(weight.grad.isfinite().all())]

    def step(self, learning_rate: float) -> OptimizerResult:
        """Clip, step, clear the gradients. Raises `RunError`, with weights and moments untouched, when a gradient is not finite."""
        norm = self.finite_norm()
        self.fill_gradients()
        self._clip(norm)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            # The fused kernel does not count its writes, and a sampler's copy would never learn that the weights have changed.
            torch.autograd.graph.increment_version(list(self.weights.values()))
        self.clear()
        return OptimizerResult(grad_norm=norm, learning_rate=learning_rate)

    def fill_gradients(self) -> None:
        """A zero gradient for every weight without one. Made before a batch they lie side by side; made while its activations are freed
        they would lie in the gaps, and the next batch's activations would need memory beyond them."""
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def clear(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def _clip(self, norm: float) -> None:
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            for weight in self.weights.values():
                if weight.grad is not None:
                    weight.grad *= self.max_grad_norm / norm

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """(moments as `NAME.exp_avg` and `NAME.exp_avg_sq`, number of steps by weight name); weights never stepped are left out."""
        moments: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for name, weight in self.weights.items():
            held = self._held(weight)
            if held:
                moments |= {f"{name}.{moment}": held[moment] for moment in _MOMENTS}
                steps[name] = int(held["step"])
        return moments, steps

    def load(self, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> None:
        """Restore what `state` gave. Raises `CheckpointError`, changing nothing, when it belongs to other weights."""
        self.check(moments, steps)
        self.clear()
        for name, weight in self.weights.items():
            self._restore(weight, name, moments, steps)

    def check(self, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> None:
        """Raises `CheckpointError` unless every moment belongs to a weight of its shape."""
        expected = {f"{name}.{moment}" for name in steps for moment in _MOMENTS}
        if set(moments) != expected or not set(steps) <= set(self.weights):
            raise CheckpointError("the optimizer state belongs to other weights than the model trains")
        for key, moment in moments.items():
            weight = self.weights[key.rpartition(".")[0]]
            if moment.shape != weight.shape:
                raise CheckpointError(f"optimizer state {key} has shape {tuple(moment.shape)}, the weight {tuple(weight.shape)}")

    def _held(self, weight: Tensor) -> dict[str, Tensor]:
        return {} if self._adamw is None else self._adamw.state.get(weight, {})

    def _restore(self, weight: Tensor, name: str, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> None:
        assert self._adamw is not None
        self._adamw.state.pop(weight, None)
        if name in steps:
            restored = {moment: moments[f"{name}.{moment}"].to(weight.device, copy=True) for moment in _MOMENTS}
            self._adamw.state[weight] = {"step": torch.tensor(float(steps[name]), device=weight.device), **restored}
