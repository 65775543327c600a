"""What one epoch of a mixture holds, and what the user is told of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import RowSource, mix, prepare_prompts, rows_from
from postgrad.errors import RecipeError
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train.build import build
from postgrad.train.datasets import dataset
from postgrad.train.loop import SilentReporter
from postgrad.train.recipe import Pipeline
from postgrad.train.recipe_file import parse_recipe
from postgrad.train.run_directory import RunDirectory

CHAT = ChatFormat(tiny_tokenizer())


def part(name: str, count: int, weight: float = 1.0) -> RowSource:
    source = rows_from([{"prompt": f"{name}{number}"} for number in range(count)], name=name)
    return replace(source, parts=(replace(source.parts[0], weight=weight),))


def prepare(rows: RowSource):
    data = prepare_prompts(rows, CHAT)
    return data.prompts, data.report


def epoch(*parts: RowSource, seed: int = 0, heldout: RowSource | None = None):
    return dataset(parts[0] if len(parts) == 1 else mix(parts), heldout, prepare, seed=seed)


def test_weights_say_how_often_each_row_comes_in_one_epoch():
    data = epoch(part("a", 10, 2.0), part("b", 8, 0.5), part("c", 4, 1.25))
    rows = Counter(prompt.row for prompt in data.train)
    assert all(rows[f"a:{number}"] == 2 for number in range(1, 11))
    assert sum(count for name, count in rows.items() if name.startswith("b")) == 4
    assert max(count for name, count in rows.items() if name.startswith("b")) == 1
    assert sorted(rows[f"c:{number}"] for number in range(1, 5)) == [1, 1, 1, 2]
    assert len(data.train) == 20 + 4 + 5
    note = next(note for note in data.notes if "mixture" in note)
    assert note == "one epoch of the mixture: a 20 rows, 69 %, b 4 rows, 14 %, c 5 rows, 17 %"


def test_the_seed_chooses_which_rows_a_fraction_takes_and_always_the_same():
    rows = {seed: [prompt.row for prompt in epoch(part("a", 40, 0.5), seed=seed).train] for seed in (0, 1)}
    assert rows[0] == [prompt.row for prompt in epoch(part("a", 40, 0.5), seed=0).train]
    assert rows[0] != rows[1]


def test_a_single_file_without_weight_is_taken_as_it_is():
    data = epoch(part("a", 3))
    assert [prompt.row for prompt in data.train] == ["a:1", "a:2", "a:3"]
    assert not any("mixture" in note for note in data.notes)


def test_rows_held_out_of_a_weighted_source_come_once_and_never_in_training():
    train, heldout = mix([part("a", 60, 2.0), part("b", 60)]).split_off(0.3, seed=0)
    data = dataset(train, heldout, prepare, seed=0)
    held = [prompt.row for prompt in data.heldout]
    assert len(set(held)) == len(held)
    assert not set(held) & {prompt.row for prompt in data.train}
    assert len(set(held) | {prompt.row for prompt in data.train}) == 120


def test_a_held_out_file_that_shares_prompts_is_told():
    notes = epoch(part("a", 5), heldout=rows_from([{"prompt": "a1"}, {"prompt": "new"}], name="held")).notes
    assert any("warning: 1 of 2 held-out rows have a prompt that is also trained on" in note and "held:1" in note for note in notes)
    assert not any("also trained on" in note for note in epoch(part("a", 5), heldout=part("b", 5)).notes)


@pytest.mark.parametrize("index", [-1, 28])
def test_rows_of_a_mixture_can_be_taken_by_index_and_slice(index):
    train = epoch(part("a", 10, 2.0), part("b", 8, 0.5), part("c", 4, 1.25)).train
    assert train[index] == train[28]
    assert [prompt.row for prompt in train[9:11]] == [train[9].row, train[10].row]


def test_a_small_weight_never_rounds_a_part_away():
    data = epoch(part("a", 3, 0.1), part("b", 30))
    assert sum(prompt.row.startswith("a") for prompt in data.train) == 1
    assert "a 1 rows, 3 %" in next(note for note in data.notes if "mixture" in note)


def test_a_prompt_that_leaves_the_model_nothing_to_write_is_refused_before_the_first_step(tmp_path):
    tiny_model(vocab_size=268, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rewards.py").write_text("def zero(completions, **columns):\n    return [0.0 for _ in completions]\n")
    rows = [{"prompt": "short"}, {"prompt": "x" * 80}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = parse_recipe(
        {"method": "grpo", "model": str(tmp_path / "model"), "run_dir": str(tmp_path / "run"), "max_steps": 1, "dtype": "float32",
         "data": {"train": "rows.jsonl"}, "batch": {"prompts": 1}, "rollout": {"group_size": 2, "max_tokens": 4},
         "rewards": [{"use": "rewards.py:zero"}]}
    )  # fmt: skip
    assert not isinstance(recipe, Pipeline)
    with (
        pytest.raises(RecipeError, match=r"a row has \d+ tokens, the model takes 64 with what it writes") as caught,
        build(recipe, tmp_path, RunDirectory(tmp_path / "run"), SilentReporter()),
    ):
        pass
    assert caught.value.hint == "set data.max_length to 63 or less"
