"""What a process in the sandbox may use."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """memory_mb: of each process. disk_mb: of all its files together, which are in memory, and of each file.
    processes: at the same time, threads included. cpu_s: seconds of processor time of each process."""

    cpu_s: float
    memory_mb: int = 512
    disk_mb: int = 64
    processes: int = 16

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cpu_s) and self.cpu_s > 0) or self.memory_mb < 64 or self.disk_mb < 1 or self.processes < 1:
            raise ValueError(f"needs positive limits and memory_mb ≥ 64, got {self}")
