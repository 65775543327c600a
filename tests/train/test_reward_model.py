"""Reward models: one term per pair, the margin of its own pair, numbers by hand, findings when they should, and whole runs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad import formulas
from postgrad.chat import ChatFormat
from postgrad.data import Pair
from postgrad.data.preferences import Answer
from postgrad.errors import RecipeError
from postgrad.formulas import NonFiniteError
from postgrad.models.engine import LocalEngine
from postgrad.models.scalar import load_scalar
from postgrad.protocols import BackwardResult
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train.metrics import find
from postgrad.train.recipe import RewardRecipe
from postgrad.train.recipe_file import load_recipe
from postgrad.train.reward_model import (
    RewardModelling,
    calibration_error,
    heldout_metrics,
    reward_loss,
    reward_model_findings,
    score_rows,
)
from postgrad.train.run import resume, run
from postgrad.train.run_directory import read_jsonl
from postgrad.train.setup import Policy
from postgrad.train.statistics import spearman

from .conftest import write_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", vocab_size=268).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def answer(*ids: int) -> Answer:
    return Answer(ids, (True,) * len(ids))


def random_pairs(count: int = 8, margins: bool = False) -> list[Pair]:
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 260, (length,), generator=generator).tolist())

    return [
        Pair(f"rows:{n}", ids(2 + n), answer(*ids(1 + 2 * n % 7), 2), answer(*ids(1 + 3 * n % 5), 2), n / 4 if margins and n % 2 else None)
        for n in range(1, count + 1)
    ]


# the loss --------------------------------------------------------------------------------------------------------------------------


def backward(
    folder: Path, pairs: list[Pair], *, center: float = 0.0, budget: int = 10_000, padded: bool = False
) -> tuple[BackwardResult, dict[str, torch.Tensor]]:
    model = load_scalar(folder, dtype="float32").model
    engine = LocalEngine(model, reads="values", max_grad_norm=None, tokens_per_micro_batch=budget)
    if padded:
        engine._refusals[id(model)] = "for this test"
    result = engine.forward_backward(score_rows(pairs), reward_loss([p.margin for p in pairs], center_coef=center, pairs=len(pairs)))
    return result, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def scores_of(folder: Path, pairs: list[Pair]) -> tuple[list[float], list[float]]:
    """Chosen and rejected, row by row from the plain model: its head on the last hidden state."""
    model: Any = load_scalar(folder, dtype="float32").model
    scores = []
    for pair in pairs:
        for side in (pair.chosen, pair.rejected):
            with torch.no_grad():
                hidden = model.model(input_ids=torch.tensor([pair.prompt_ids + side.token_ids])).last_hidden_state
                scores.append((hidden[0, -1] @ model.score.weight[0]).item())
    return scores[0::2], scores[1::2]


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_the_loss_is_the_mean_over_pairs_each_with_its_own_margin(base, center):
    """ms-swift#9927: a missing margin is 0 and moves no other; there is one term per pair, never one per pair of pairs."""
    pairs = random_pairs(margins=True)
    chosen, rejected = scores_of(base, pairs)
    terms = [
        math.log1p(math.exp(-(c - r - (pair.margin or 0.0)))) + center * (c + r) ** 2
        for c, r, pair in zip(chosen, rejected, pairs, strict=True)
    ]
    result, _ = backward(base, pairs, center=center)
    assert result.loss == pytest.approx(sum(terms) / len(pairs), rel=1e-5)
    assert result.sums["accuracy"] == sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert result.sums["margin"] == pytest.approx(sum(chosen) - sum(rejected), rel=1e-4, abs=1e-5)
    assert result.sums["mean_reward"] == pytest.approx((sum(chosen) + sum(rejected)) / 2, rel=1e-4, abs=1e-5)
    assert result.sums["square_reward"] == pytest.approx(sum(value**2 for value in chosen + rejected) / 2, rel=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_eight_pairs_are_the_same_in_one_micro_batch_and_in_eight(base, padded):
    pairs = random_pairs(margins=True)
    one, expected = backward(base, pairs, center=0.1)
    eight, gradients = backward(base, pairs, center=0.1, budget=1, padded=padded)
    assert eight.loss == pytest.approx(one.loss, rel=1e-6)
    for name in ("accuracy", "margin", "mean_reward", "square_reward"):
        assert eight.sums[name] == pytest.approx(one.sums[name], rel=1e-5, abs=1e-5)
    largest = max(1.0, *(gradient.abs().max().item() for gradient in expected.values()))
    assert all((gradients[name] - expected[name]).abs().max() < 2e-6 * largest for name in expected)


def test_two_equal_sides_are_ln_2_and_the_margin_is_asked_of_the_difference():
    rows: Any = type("Rows", (), {"per_row": {"index": torch.tensor([3.0, 0.0, 2.0, 1.0])}})()
    values = torch.tensor([[1.0], [0.2], [1.0], [0.5]])  # pair 0: 0.2 against 0.5; pair 1: 1.0 against 1.0
    loss, sums = reward_loss([None, 2.0], center_coef=0.0, pairs=2)(values, rows)
    assert loss.item() == pytest.approx((math.log1p(math.exp(0.3)) + math.log1p(math.exp(2.0))) / 2, rel=1e-6)
    assert sums["accuracy"] == 0.0  # equal scores are not right
    assert reward_loss([None, None], center_coef=0.0, pairs=1)(values[[0, 2]], _two())[0].item() == pytest.approx(math.log(2))


def _two() -> Any:
    return type("Rows", (), {"per_row": {"index": torch.tensor([1.0, 0.0])}})()


def test_a_margin_that_is_not_finite_raises():
    with pytest.raises(NonFiniteError):
        reward_loss([math.nan], center_coef=0.0, pairs=1)(torch.tensor([[1.0], [0.0]]), _two())


def test_both_sides_are_read_at_their_last_token_behind_one_prompt():
    pair = Pair("rows:1", (1, 5), answer(6, 2), answer(7, 8, 2))
    rows = score_rows([pair, pair])
    assert [row.token_ids[:-1] for row in rows[:2]] == [(1, 5, 6, 2), (1, 5, 7, 8, 2)]
    assert [row.trained.index(True) for row in rows] == [4, 5, 4, 5]
    assert [(row.group, row.shared_prefix, row.per_row["index"]) for row in rows] == [(0, 2, 0), (0, 2, 1), (1, 2, 2), (1, 2, 3)]


# one run ---------------------------------------------------------------------------------------------------------------------------


def method_of(folder: Path, pairs: list[Pair], heldout: list[Pair], notes: list[str] | None = None, **options: Any) -> RewardModelling:
    recipe = RewardRecipe.model_validate(
        {
            "method": "reward", "model": "given", "run_dir": "unused", "data": {"train": "given.jsonl", "shuffle": False},
            "batch": {"pairs": 8}, "optimizer": {"learning_rate": 1e-2}, "max_steps": 6,
        } | options
    )  # fmt: skip
    lm = load_scalar(folder, dtype="float32")
    note = (lambda text: None) if notes is None else notes.append
    return RewardModelling(recipe, Policy(lm, ChatFormat(lm.tokenizer)), LocalEngine(lm.model, reads="values"), pairs, heldout, note)


def test_a_steps_metrics_by_hand(base):
    pairs = random_pairs()
    chosen, rejected = scores_of(base, pairs)
    every = [*chosen, *rejected]
    mean = sum(every) / 16
    metrics = method_of(base, pairs, []).step(1)
    assert metrics["accuracy"] == sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 8
    assert metrics["margin"] == pytest.approx((sum(chosen) - sum(rejected)) / 8, abs=1e-5)
    assert metrics["mean_reward"] == pytest.approx(mean, abs=1e-5)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in every) / 16), rel=1e-3)
    assert metrics["num_tokens"] == sum(2 * len(p.prompt_ids) + len(p.chosen.token_ids) + len(p.rejected.token_ids) for p in pairs)


def test_the_margin_grows_and_centering_holds_the_scores_near_0(base):
    results = {}
    for center in (0.0, 0.5):
        method = method_of(base, random_pairs(), [], loss={"center_coef": center}, max_steps=40)
        results[center] = [method.step(step) for step in range(1, 41)][-1]
        assert results[center]["accuracy"] == 1.0
    assert abs(results[0.5]["mean_reward"]) < 0.1
    assert results[0.5]["loss"] < 0.5


def test_findings_are_told_after_the_last_step_and_not_before(base):
    notes: list[str] = []
    method = method_of(base, random_pairs(), random_pairs(3), notes)
    method.evaluate(0)
    method.evaluate(3)
    assert notes == []
    method.evaluate(method.total_steps)
    assert notes == ["3 held-out pairs are too few to judge the reward model by; hold out at least 20"]


def test_without_held_out_pairs_there_is_nothing_to_evaluate(base):
    method = method_of(base, random_pairs(), [])
    assert method.evaluate(6) == {}


# held-out numbers by hand ----------------------------------------------------------------------------------------------------------


def test_held_out_metrics_by_hand():
    pairs = [Pair(str(n), (1,), answer(*range(c)), answer(*range(r))) for n, (c, r) in enumerate(((3, 1), (2, 4), (5, 6)))]
    metrics = heldout_metrics(pairs, [1.0, 0.0, 0.5, 0.5, 2.0, 3.0], center_coef=0.0)
    margins = (1.0, 0.0, -1.0)
    assert metrics["eval/accuracy"] == pytest.approx(1 / 3)  # a tie is not right
    assert (metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]) == pytest.approx((0.0615, 0.7923), abs=1e-3)
    assert metrics["eval/loss"] == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins) / 3)
    assert metrics["eval/margin"] == 0.0
    assert metrics["eval/mean_reward"] == pytest.approx(7 / 6)
    assert metrics["eval/reward_std"] == pytest.approx(torch.tensor([1.0, 0.0, 0.5, 0.5, 2.0, 3.0]).std(correction=0).item())
    assert metrics["eval/pairs"] == 3
    # lengths 3 1 2 4 5 6 rank 3 1 2 4 5 6; scores 1 0 .5 .5 2 3 rank 4 1 2.5 2.5 5 6
    deviations = [(a - 3.5) * (b - 3.5) for a, b in zip((3, 1, 2, 4, 5, 6), (4, 1, 2.5, 2.5, 5, 6), strict=True)]
    assert metrics["eval/length_correlation"] == pytest.approx(sum(deviations) / math.sqrt(17.5 * 17.0))


def test_the_held_out_loss_is_the_loss_that_is_trained():
    """With the margins that pairs ask for and the centring term."""
    pairs = [Pair("1", (1,), answer(5), answer(6), margin=0.5), Pair("2", (1,), answer(5), answer(6))]
    found = heldout_metrics(pairs, [1.0, 0.0, 0.25, 0.5], center_coef=0.01)["eval/loss"]
    by_hand = math.log1p(math.exp(-0.5)) + 0.01 * 1.0 + math.log1p(math.exp(0.25)) + 0.01 * 0.75**2
    assert found == pytest.approx(by_hand / 2)


def test_a_hopeless_margin_has_a_finite_loss():
    pairs = [Pair("1", (1,), answer(5), answer(6))]
    assert heldout_metrics(pairs, [-500.0, 500.0], center_coef=0.0)["eval/loss"] == 1000.0
    assert heldout_metrics(pairs, [500.0, -500.0], center_coef=0.0)["eval/loss"] == 0.0


def test_spearman_by_hand():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)  # 1 − 6·4/(5·24)
    assert spearman([1, 1, 2, 2], [1, 2, 1, 2]) == 0.0
    assert spearman([1, 1, 2, 3], [1, 2, 3, 3]) == pytest.approx(8 / 9)  # ranks 1.5 1.5 3 4 and 1 2 3.5 3.5
    assert spearman([5, 5, 5], [1, 2, 3]) == 0.0


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=12))
def test_spearman_is_the_correlation_of_ranks(points):
    from numpy import corrcoef

    x, y = ([float(point[side]) for point in points] for side in (0, 1))
    ranks = [[sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values] for values in (x, y)]
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert spearman(x, y) == 0.0
    else:
        assert spearman(x, y) == pytest.approx(corrcoef(*ranks)[0, 1])


def margin_of(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_calibration_error_by_hand():
    """10 bins over 0.5 to 1. Four pairs at confidence 0.76, three of them right: honest to 0.01. Two at 0.96, one right: off by 0.46."""
    sure, fair = margin_of(0.96), margin_of(0.76)
    assert calibration_error([fair, fair, fair, -fair]) == pytest.approx(0.01)
    assert calibration_error([sure, -sure]) == pytest.approx(0.46)
    assert calibration_error([fair, fair, fair, -fair, sure, -sure]) == pytest.approx((4 * 0.01 + 2 * 0.46) / 6)
    assert calibration_error([0.0, 0.0]) == 0.5  # a tie is confidence ½ and never right
    assert calibration_error([1e9]) == pytest.approx(0.0)
    assert calibration_error([-1e9]) == pytest.approx(1.0)


def test_pairs_of_different_confidence_do_not_make_up_for_each_other():
    """0.55 and always right, 0.95 and always wrong: on average right half the time at confidence 0.75, and honest nowhere."""
    low, high = margin_of(0.55), margin_of(0.95)
    assert calibration_error([low, -high]) == pytest.approx((0.45 + 0.95) / 2)


HONEST = {
    "eval/pairs": 20.0,
    "eval/accuracy": 0.75,
    "eval/accuracy_low": 0.6,
    "eval/accuracy_high": 0.85,
    "eval/length_correlation": 0.3,
    "eval/calibration_error": 0.1,
    "eval/mean_reward": 0.5,
    "eval/reward_std": 1.0,
}


def test_nothing_is_found_in_a_handful_of_pairs():
    """Two points always correlate perfectly."""
    (only,) = reward_model_findings(HONEST | {"eval/pairs": 19.0, "eval/length_correlation": 1.0})
    assert "19 held-out pairs are too few" in only


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"eval/accuracy_low": 0.5}, "not clear of chance"),
        ({"eval/accuracy_low": 0.501}, None),
        ({"eval/length_correlation": 0.61}, "follow the answers' length"),
        ({"eval/length_correlation": -0.61}, "follow the answers' length"),
        ({"eval/length_correlation": -0.6}, None),
        ({"eval/calibration_error": 0.151}, "σ(margin) is off by 15 %"),
        ({"eval/calibration_error": 0.149}, None),
        ({"eval/mean_reward": -3.1}, "drifted far from 0"),
        ({"eval/mean_reward": 2.9}, None),
        ({"eval/mean_reward": 0.01, "eval/reward_std": 0.0}, "drifted far from 0"),
    ],
)
def test_a_finding_is_said_when_and_only_when_it_holds(changed, words):
    found = reward_model_findings(HONEST | changed)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


# whole runs ------------------------------------------------------------------------------------------------------------------------

RECIPE = """\
method: reward
model: {model}
run_dir: {run_dir}
seed: 3
dtype: float32
max_steps: 10
data: {{train: pairs.jsonl, eval: heldout.jsonl, max_length: 200}}
batch: {{pairs: 4, tokens_per_micro_batch: 100}}
optimizer: {{learning_rate: {rate}, warmup_steps: 2, schedule: cosine}}
loss: {{center_coef: 0.01}}
evaluation: {{every: 4}}
checkpoint: {{every: 3}}
{adapter}
"""
ADAPTER = "adapter: {kind: lora, rank: 4}"


def preference(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": f"{number} yes", "rejected": f"{number} no", "margin": 0.1}


def make_task(folder: Path, model: Path, adapter: str = "") -> Path:
    folder.mkdir(parents=True)
    write_rows(folder / "pairs.jsonl", [preference(number) for number in range(20)])
    write_rows(folder / "heldout.jsonl", [preference(number) for number in range(100, 116)])
    rate = "3e-2" if adapter else "5e-3"
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, run_dir=folder / "run", adapter=adapter, rate=rate))
    return folder / "recipe.yaml"


def command(*arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "POSTGRAD_FAULT": fault, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "postgrad", *arguments], env=environment, capture_output=True, text=True, check=False)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """Everything but the clock."""
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(run_dir / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["", ADAPTER], ids=["full", "adapter"])
def test_a_whole_run_learns_is_killed_and_goes_on_bit_for_bit(adapter, base, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    run(load_recipe(make_task(tmp_path / "whole", base, adapter)))
    whole = logged(tmp_path / "whole" / "run")
    assert whole[-1]["accuracy"] == 1.0
    assert whole[-1]["eval/accuracy"] == 1.0
    assert whole[-1]["eval/accuracy_low"] > 0.75
    assert [record["step"] for record in whole if "eval/pairs" in record] == [0, 4, 8, 10]

    done = command("train", str(make_task(tmp_path / "killed", base, adapter)), fault="step:5")
    assert done.returncode == -signal.SIGKILL, done.stderr
    resume(tmp_path / "killed" / "run")
    assert logged(tmp_path / "killed" / "run") == whole
    weights = [tmp_path / which / "run" / "model" / "model.safetensors" for which in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    undefined = [
        name for record in whole for name in record if name != "step" and ((m := find(name)) is None or m.name == "eval/<rollout metric>")
    ]
    assert sorted(set(undefined)) == []


def test_dropout_is_refused_where_scores_are_compared(base, tmp_path):
    with pytest.raises(RecipeError, match=r"adapter\.dropout: acts only in sft"):
        load_recipe(make_task(tmp_path / "task", base, "adapter: {kind: lora, rank: 4, dropout: 0.1}"))


@pytest.mark.slow
def test_the_finished_model_scores_as_it_was_evaluated_here_and_in_transformers(base, tmp_path, monkeypatch):
    """trl#1379, trl#5813: reloaded, with the end token that it was trained with."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    run(load_recipe(make_task(tmp_path / "task", base, ADAPTER)))
    folder = tmp_path / "task" / "run" / "model"
    expected = logged(tmp_path / "task" / "run")[-1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    rows = [preference(number) for number in range(100, 116)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}], tokenize=False
        ).rstrip("\n")
        for side in ("chosen", "rejected")
        for row in rows
    ]
    with torch.no_grad():
        batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        scores = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert float((scores[:16] - scores[16:]).mean()) == pytest.approx(expected["eval/margin"], abs=1e-5)
    assert float(scores.mean()) == pytest.approx(expected["eval/mean_reward"], abs=1e-5)


@pytest.mark.slow
def test_a_dry_run_shows_the_pair_and_writes_nothing(base, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    done = command("train", str(make_task(tmp_path / "task", base)), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "pairs.jsonl:1" in done.stdout
    assert "⟦0 yes<|im_end|>⟧" in done.stdout
    assert "⟦0 no<|im_end|>⟧" in done.stdout
    assert not (tmp_path / "task" / "run").exists()


def test_the_formula_is_the_public_one():
    """`reward_loss` adds nothing of its own to `formulas.bradley_terry_loss`."""
    values = torch.tensor([[0.3], [1.2]])
    loss, _ = reward_loss([0.4], center_coef=0.2, pairs=1)(values, _two())
    expected = formulas.bradley_terry_loss(values[1], values[0], margin=torch.tensor([0.4]), center_coef=0.2)
    assert loss.item() == expected.item()
