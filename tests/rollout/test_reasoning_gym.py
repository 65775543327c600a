"""The shipped environment `reasoning_gym`, with the real package."""

from __future__ import annotations

from pathlib import Path

import pytest

from postgrad import tasks
from postgrad.errors import DataError
from postgrad.protocols import InfrastructureError
from postgrad.rollout.episode import start_seed
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.tools import load_tools
from postgrad.types import Prompt, ToolCall

pytest.importorskip("reasoning_gym")
BOX = load_tools(["reasoning_gym"], Path())


def opened(columns: dict[str, object], *, seed: int = 0):  # type: ignore[no-untyped-def]
    [environment] = BOX.environments
    return BOX.open([environment.reset_arguments(Prompt("d:1", (), columns), seed=seed)])


def test_a_problem_is_asked_and_an_answer_ends_the_rollout_with_what_the_verifier_gives() -> None:
    for answer, reward in ((None, 1.0), ("nonsense", 0.0)):
        session = opened({"task": "chain_sum", "config": {"max_terms": 2}}, seed=5)
        (entry,) = tasks.entries("chain_sum", size=1, seed=5, config={"max_terms": 2})
        assert session.observation == entry["question"]
        [[result]] = execute([(session, [ToolCall("answer", {"text": answer or entry["answer"]})])], ToolLimits(deadline_s=20))
        assert (result.reward, result.done, result.error) == (reward, True, "")
        assert entry["answer"] not in result.content


def test_samples_of_a_prompt_get_one_problem_and_its_next_turn_another() -> None:
    seeds = [start_seed(0, index) for index in (3, 3, 11)]
    first, same, later = (opened({"task": "chain_sum"}, seed=seed).observation for seed in seeds)
    assert first == same != later


def test_a_row_without_a_task_is_a_data_error_and_an_unknown_one_is_no_fault_of_the_model() -> None:
    with pytest.raises(DataError, match="asks for column 'task'"):
        opened({})
    with pytest.raises(InfrastructureError, match=r"has no task 'chain_sums' \(did you mean chain_sum\?\)"):
        opened({"task": "chain_sums"})
