"""`RewardModelling.step` against `RewardTrainer.train`: the same pairs give the same tokens, scores, loss and gradients.

TRL pads on the right and finds the last token by its id; postgrad packs, shares prompts, and finds it by its place. TRL is given a padding
token that no answer ends with: with the usual one (padding = end token) it scores another token, which the last test pins.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.chat import ChatFormat
from postgrad.data import Pair, load_rows, prepare_preferences
from postgrad.data.preferences import Answer
from postgrad.models.scalar import load_scalar
from postgrad.testing.tiny import CHATML, Architecture, tiny_model, tiny_tokenizer
from postgrad.train.recipe import RewardRecipe
from postgrad.train.reward_model import RewardModelling

from . import same, trl_side
from .test_dpo import END_IS_LAST

from datasets import Dataset  # isort: skip  (after trl_side, which skips the module where TRL is absent)
from trl import RewardConfig, RewardTrainer  # isort: skip

pytestmark = [pytest.mark.conformance, *trl_side.QUIET]

PADDING = "<|endoftext|>"
TEXTS = (("1 12?", "13", "no the in"), ("the capital", "Rome", "I t"), ("a", "b", "c d e f 12"), ("x", "ÿes ☂", "n"))
MARGINS = (0.5, -0.2, 1.3, 0.0, 2.0, 0.7)


def random_pairs(*, margins: bool = False, end: bool = True) -> list[Pair]:
    """Ragged pairs, each answer with its end token; end tokens stand inside prompts too."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 200, (length,), generator=generator).tolist())

    def answer(length: int) -> Answer:
        tokens = (*ids(length), *([same.EOS] if end else []))
        return Answer(tokens, (True,) * len(tokens))

    lengths = ((4, 1, 9), (2, 5, 2), (11, 3, 3), (3, 12, 1), (7, 2, 6), (1, 8, 4))
    return [
        Pair(f"rows:{n}", (*ids(prompt), same.EOS, *ids(2)), answer(chosen), answer(rejected), MARGINS[n] if margins else None)
        for n, (prompt, chosen, rejected) in enumerate(lengths)
    ]


def scalar_model(folder: Path, architecture: Architecture = "llama") -> Any:
    """With the padding token that both sides then use; its embedding has no gradient in transformers."""
    tiny_model(architecture, pad_token_id=0).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    return load_scalar(folder / "base", dtype="float32", seed=1).model


def our_step(model: Any, pairs: Sequence[Pair], *, center: float = 0.0, budget: int = 40) -> same.Step:
    recipe = RewardRecipe.model_validate(
        {
            "method": "reward", "model": "given", "run_dir": "unused", "max_steps": 1, "data": {"train": "given.jsonl", "shuffle": False},
            "batch": {"pairs": len(pairs), "tokens_per_micro_batch": budget}, "loss": {"center_coef": center},
        }
    )  # fmt: skip
    engine = same.RecordingEngine(model, tokens_per_micro_batch=budget, reads="values")
    metrics = RewardModelling(recipe, None, engine, pairs, []).step(1)  # type: ignore[arg-type]
    assert engine.micro_batches > 1, "the batch should not fit one micro-batch"
    return same.Step(metrics["loss"], engine.gradients[0], metrics)


def trainer_of(
    model: Any,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    *,
    accumulate: int,
    template: str = CHATML,
    padding: str = PADDING,
    **config: Any,
) -> RewardTrainer:
    batching = {"per_device_train_batch_size": len(rows) // accumulate, "gradient_accumulation_steps": accumulate, "max_steps": 1}
    tokenizer = tiny_tokenizer(template)
    tokenizer.pad_token = padding
    return RewardTrainer(
        model,
        args=RewardConfig(str(folder / "trl"), **trl_side._COMMON | batching | config),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
    )


def their_step(trainer: RewardTrainer) -> same.Step:
    return trl_side._recorded(trainer, lambda model: None)[0]


def tokenised(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    rows = []
    for pair in pairs:
        row: dict[str, Any] = {
            "chosen_ids": list(pair.prompt_ids + pair.chosen.token_ids),
            "rejected_ids": list(pair.prompt_ids + pair.rejected.token_ids),
        }
        rows.append(row if pair.margin is None else row | {"margin": pair.margin})
    return rows


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("margins", [False, True])
def test_loss_and_every_gradient(margins: bool, center: float, accumulate: int, tmp_path: Path) -> None:
    pairs = random_pairs(margins=margins)
    model = scalar_model(tmp_path)
    config = {"center_rewards_coefficient": center or None}
    theirs = their_step(trainer_of(copy.deepcopy(model), tokenised(pairs), tmp_path, accumulate=accumulate, **config))
    ours = our_step(model, pairs, center=center)
    same.assert_same_step(ours, theirs)
    assert "score.weight" in ours.gradients
    if accumulate == 1:
        for name in ("accuracy", "margin", "mean_reward", "num_tokens"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=same.RELATIVE, abs=1e-6)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gpt2"])
def test_another_architecture(architecture: Architecture, tmp_path: Path) -> None:
    pairs = random_pairs(margins=True)
    model = scalar_model(tmp_path, architecture)
    theirs = their_step(trainer_of(copy.deepcopy(model), tokenised(pairs), tmp_path, accumulate=1))
    same.assert_same_step(our_step(model, pairs), theirs)


def test_pairs_of_a_file(tmp_path: Path) -> None:
    """From text to gradient, with a template whose last character is the end token."""
    rows = [
        {"prompt": [{"role": "user", "content": question}], "chosen": [{"role": "assistant", "content": good}],
         "rejected": [{"role": "assistant", "content": bad}]}
        for question, good, bad in TEXTS
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = prepare_preferences(load_rows(file), ChatFormat(tiny_tokenizer(END_IS_LAST)), max_length=500).pairs
    model = scalar_model(tmp_path)
    trainer = trainer_of(copy.deepcopy(model), rows, tmp_path, accumulate=2, template=END_IS_LAST)
    assert tokenised(pairs) == [{key: row[key] for key in ("chosen_ids", "rejected_ids")} for row in trainer.train_dataset]
    same.assert_same_step(our_step(model, pairs, budget=100), their_step(trainer))


def test_a_missing_margin_is_0_for_its_own_pair(tmp_path: Path) -> None:
    """TRL takes the column from every row or none (ms-swift#9927 dropped missing ones, and the rest moved up)."""
    pairs = random_pairs(margins=True)
    some = [Pair(p.name, p.prompt_ids, p.chosen, p.rejected, None if n % 2 else p.margin) for n, p in enumerate(pairs)]
    filled = [Pair(p.name, p.prompt_ids, p.chosen, p.rejected, p.margin or 0.0) for p in some]
    model = scalar_model(tmp_path)
    theirs = their_step(trainer_of(copy.deepcopy(model), tokenised(filled), tmp_path, accumulate=1))
    same.assert_same_step(our_step(model, some), theirs)


def test_trl_scores_the_token_before_the_end_where_the_end_is_the_padding(tmp_path: Path) -> None:
    """The difference: transformers takes the last token that is not the padding id, so with padding = end token it never reads the end
    token that the answer was written with (transformers#35352). Cut off the end tokens here, and both read the same."""
    pairs = random_pairs()
    model = scalar_model(tmp_path)
    model.config.pad_token_id = same.EOS
    theirs = their_step(trainer_of(copy.deepcopy(model), tokenised(pairs), tmp_path, accumulate=1, padding="<|im_end|>"))
    ours = our_step(copy.deepcopy(model), pairs)
    assert same.largest_difference(ours.gradients, theirs.gradients) > 0.1
    without = [
        Pair(p.name, p.prompt_ids, *(Answer(side.token_ids[:-1], side.scored[:-1]) for side in (p.chosen, p.rejected))) for p in pairs
    ]
    same.assert_same_step(our_step(model, without), theirs)
