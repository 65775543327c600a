"""The shipped environment `reasoning_gym`: a problem for each prompt, made from its seed, and a tool to answer it.

A row names the `task` and may bring its `config`; the question ends the prompt. Every time a prompt is drawn it gets another problem, and
all of its samples the same one. The reward `environment` pays what the task's verifier gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from postgrad import tasks
from postgrad.errors import RecipeError
from postgrad.protocols import InfrastructureError


class ReasoningGym:
    def __init__(self) -> None:
        self.done = False
        self.reward: float | None = None

    def reset(self, task: str, seed: int, config: Mapping[str, Any] | None = None) -> str:
        try:
            (self._entry,) = tasks.entries(task, size=1, seed=seed, config=config)
        except RecipeError as error:
            raise InfrastructureError(f"{error} ({error.hint})" if error.hint else str(error)) from error
        return str(self._entry["question"])

    def answer(self, text: str) -> str:
        """Give the final answer. There is one try.

        Args:
            text: the answer alone, in the form that the question asks for
        """
        self.reward = tasks.score(text, self._entry)
        self.done = True
        return "The answer was received."
