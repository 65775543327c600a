"""Problems of reasoning-gym, with the real package."""

import json

import pytest

from postgrad.errors import RecipeError
from postgrad.tasks import entries, packed, rows, score, unpacked

gym = pytest.importorskip("reasoning_gym")


def test_the_same_seed_gives_the_same_problems():
    first, again, other = (list(entries("chain_sum", size=3, seed=seed)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_rows_are_data_that_can_be_scored_after_a_round_trip_through_a_file():
    for row in rows("chain_sum", size=3, seed=7, config={"min_terms": 2, "max_terms": 2}):
        entry = unpacked(json.loads(json.dumps(row))["reasoning_gym"])
        assert row["prompt"] == entry["question"]
        assert score(row["answer"], entry) == 1.0
        assert score("no number", entry) < 0.1


@pytest.mark.parametrize("task", ["rearc", "sudoku", "countdown", "zebra_puzzles", "simple_equations", "tower_of_hanoi", "letter_jumble"])
def test_verifiers_give_the_same_after_the_round_trip(task):
    (entry,) = entries(task, size=1, seed=3)
    back = unpacked(json.loads(json.dumps(packed(entry))))
    assert back == entry
    assert score(entry["answer"], back) == score(entry["answer"], entry) == 1.0


def test_unknown_tasks_and_settings_are_named():
    with pytest.raises(RecipeError, match="has no task 'chain_sums'") as raised:
        list(entries("chain_sums", size=1, seed=0))
    assert raised.value.hint == "did you mean chain_sum?"
    with pytest.raises(RecipeError, match="refuses the settings of chain_sum"):
        list(entries("chain_sum", size=1, seed=0, config={"terms": 3}))
    with pytest.raises(RecipeError, match="refuses the settings of chain_sum"):
        list(entries("chain_sum", size=1, seed=0, config={"min_terms": -1}))


def test_without_the_package_it_is_refused_with_a_hint(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(RecipeError, match="needs the package reasoning-gym") as raised:
        list(entries("chain_sum", size=1, seed=0))
    assert raised.value.hint == "pip install 'postgrad[tasks]'"
