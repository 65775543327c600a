"""Which library makes the fp32 matrix products of training on a CPU: the one PyTorch was built with (MKL), or oneDNN.

MKL may leave half of a processor unused that is not Intel's: on a Zen 5 oneDNN reaches 480 GFLOP/s where MKL reaches 225. On others MKL is
ahead. So both are timed once per machine, and the answer is kept in the cache folder: a run that is resumed computes as it began.

1. `fast_products`      the context in which forward and backward run.
2. `OneDNNProducts`     sends every large fp32 `mm`, `addmm` and `addmm_` (gradients) to oneDNN, whatever model they come from.
3. `onednn_is_faster`   the measured answer.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from postgrad.cache import cache_folder

_LARGE = 1 << 24
"""Multiplications from which on a product is worth sending: smaller ones are over before the detour pays."""
_TOKENS, _WIDTH, _INNER, _ROUNDS = 1024, 576, 1536, 5
_CLEARLY = 0.9
"""oneDNN must need at most this part of the time: near a tie the answer would be chance."""


def fast_products(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """`dtype`: the autocast dtype; bf16 products are oneDNN's already."""
    if device.type != "cpu" or dtype is not None or not onednn_is_faster():
        return nullcontext()
    return OneDNNProducts()  # type: ignore[no-untyped-call]


class OneDNNProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so the products of the backward come here too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.mm.default and _suits(*args[:2]):
            return onednn_product(*args)
        if func is torch.ops.aten.addmm.default and not kwargs and args[0].ndim == 1 and _suits(*args[1:]):
            return onednn_product(args[1], args[2], args[0])
        if func is torch.ops.aten.addmm_.default and not kwargs and _suits(*args[1:]):
            return args[0].add_(onednn_product(*args[1:]))
        return func(*args, **(kwargs or {}))


def onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [m, k] @ right [k, n] + bias [n]; any strides."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], ""))


def _suits(left: Tensor, right: Tensor) -> bool:
    plain = left.dtype == right.dtype == torch.float32 and left.device.type == "cpu"
    return plain and left.shape[0] * left.shape[1] * right.shape[1] >= _LARGE


@functools.cache
def onednn_is_faster() -> bool:
    """Measured at the first call on a machine with this processor, PyTorch and number of threads; read from the cache folder later."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    key = hashlib.blake2b(f"{_processor()} {torch.__version__} {torch.get_num_threads()}".encode(), digest_size=8).hexdigest()
    record = cache_folder() / "processor" / f"{key}.txt"
    with suppress(OSError):
        return record.read_text(encoding="ascii") == "onednn"
    faster = measure(onednn_product) < _CLEARLY * measure(torch.mm)
    with suppress(OSError):  # a read-only cache costs time, nothing else
        record.parent.mkdir(parents=True, exist_ok=True)
        written = record.with_name(f"{record.name}.{os.getpid()}")
        written.write_text("onednn" if faster else "mkl", encoding="ascii")
        written.replace(record)
    return faster


def measure(product: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Seconds of a linear layer's three products, forward and both of the backward; the fastest of a few rounds."""
    hidden, weight, grad = torch.ones(_TOKENS, _WIDTH), torch.ones(_INNER, _WIDTH), torch.ones(_TOKENS, _INNER)
    pairs = ((hidden, weight.t()), (grad, weight), (grad.t(), hidden))
    rounds = []
    with torch.no_grad():
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            for left, right in pairs:
                product(left, right)
            rounds.append(time.perf_counter() - started)
    return min(rounds)


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith("model name")), "") + platform.machine()
    return platform.processor() + platform.machine()
