"""Engines of roles that share one base: every call runs while the role is active."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.models.engine import LocalEngine
from postgrad.models.reader import Reader
from postgrad.models.roles import Role
from postgrad.protocols import BackwardResult, LossFunction, OptimizerResult
from postgrad.types import TrainRow


class RoleEngine(LocalEngine):
    """A `LocalEngine` over a role's adapter and head, read as values. Arguments as in `LocalEngine`."""

    def __init__(self, role: Role, **options: Any) -> None:
        self._role = role
        with role.active():
            super().__init__(role.model, reads="values", **options)

    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        with self._role.active():
            return super().values(rows)

    def forward_backward(self, rows: Sequence[TrainRow], loss: LossFunction, *, temperature: float = 1.0) -> BackwardResult:
        with self._role.active():
            return super().forward_backward(rows, loss, temperature=temperature)

    def optimizer_step(self, learning_rate: float) -> OptimizerResult:
        with self._role.active():
            return super().optimizer_step(learning_rate)

    def save_state(self, folder: Path) -> None:
        with self._role.active():
            super().save_state(folder)

    def load_state(self, folder: Path) -> None:
        with self._role.active():
            super().load_state(folder)


class RoleReader(Reader):
    """A `Reader` of a role's values."""

    def __init__(self, role: Role, **options: Any) -> None:
        self._role = role
        with role.active():
            super().__init__(role.model, reads="values", **options)

    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        with self._role.active():
            return super().values(rows)
