"""Which number format the arithmetic runs in. Weights that are trained are always fp32; only the compute can be bf16.

1. `resolve_autocast`  a recipe's `dtype:` -> the autocast dtype, or None for plain fp32.
2. `bf16_supported`    whether this processor multiplies bf16 in hardware.
3. `autocast`          the context manager that applies the answer.
4. `product_dtype`     what a matrix product of these numbers is made in here; `at_least_fp32` what its statistics are kept in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from postgrad.errors import RecipeError

DtypeName = Literal["auto", "float32", "bfloat16"]


def default_device() -> torch.device:
    """The accelerator of this process when there is one (`cuda:LOCAL_RANK` is what `torch.cuda.set_device` chose), else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def bf16_supported(device: torch.device) -> bool:
    """True where bf16 matrix products run in hardware (x86: avx512_bf16 or AMX; ARM: bf16; CUDA: compute capability 8).

    Emulated bf16 is slower than fp32, so it does not count.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    features = torch.cpu.get_capabilities()
    return any(features.get(name) is True for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def resolve_autocast(dtype: str, device: torch.device) -> torch.dtype | None:
    """`auto` is bf16 where the processor has it, else fp32. Returns None for fp32. Raises `RecipeError` for what cannot run here.

    >>> resolve_autocast("float32", torch.device("cpu")) is None
    True
    """
    if dtype == "auto":
        return torch.bfloat16 if bf16_supported(device) else None
    if dtype == "float32":
        return None
    if dtype == "bfloat16":
        if bf16_supported(device):
            return torch.bfloat16
        raise RecipeError(
            f"this processor ({device.type}) has no bfloat16 arithmetic", key="dtype", hint="use dtype: auto or dtype: float32"
        )
    if dtype in ("float16", "fp16", "half"):
        reason = "fp16 gradients underflow without loss scaling" if device.type == "cuda" else "fp16 does not run on a CPU"
        raise RecipeError(f"{dtype} is not supported: {reason}", key="dtype", hint="use dtype: auto, which is bfloat16 where it is fast")
    choices = ", ".join(get_args(DtypeName))
    raise RecipeError(f"unknown dtype {dtype!r}", key="dtype", hint=f"one of: {choices}")


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Autocast to `dtype`; does nothing for None."""
    if dtype is None:
        return nullcontext()
    return cast("AbstractContextManager[None]", torch.autocast(device.type, dtype=dtype))


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16 and fp16; fp64 stays.

    >>> at_least_fp32(torch.bfloat16), at_least_fp32(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)
