"""KTO: labels, the KL from answers to other prompts, weights, batches of one kind, and whole runs."""

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
from torch import Tensor, nn

from postgrad import formulas
from postgrad.chat import ChatFormat
from postgrad.data import LabelledAnswer
from postgrad.data.preferences import Answer
from postgrad.errors import DataError, RecipeError
from postgrad.models.engine import LocalEngine
from postgrad.models.loading import from_memory
from postgrad.models.lora import Lora
from postgrad.protocols import BackwardResult
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train import setup
from postgrad.train.kto import KTO, answer_rows, kto_loss, mismatched
from postgrad.train.metrics import find
from postgrad.train.recipe import DPOLoss, DPORecipe
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import resume, run
from postgrad.train.run_directory import read_jsonl
from postgrad.train.setup import Policy, as_answers

from .conftest import write_rows
from .test_dpo import OtherModel, random_pairs


def labelled(*labels: bool) -> list[LabelledAnswer]:
    pairs = random_pairs(len(labels))
    return [LabelledAnswer(pair.name, pair.prompt_ids, pair.chosen, label) for pair, label in zip(pairs, labels, strict=True)]


MIXED = (True, False, False, True, True, False, True, False)


def sums_of(model: nn.Module, answers: list[LabelledAnswer]) -> Tensor:
    """Σ log π over each answer's scored tokens, from plain logits."""
    totals = []
    for item in answers:
        start = len(item.prompt_ids)
        with torch.no_grad():
            table = model(input_ids=torch.tensor([item.prompt_ids + item.answer.token_ids])).logits[0].log_softmax(-1)
        totals.append(sum(table[start + at - 1, token].item() for at, token in enumerate(item.answer.token_ids) if item.answer.scored[at]))
    return torch.tensor(totals)


def recipe_of(loss: dict[str, Any] | None = None, **options: Any) -> DPORecipe:
    given = {"method": "dpo", "model": "given", "run_dir": "unused", "max_steps": 6, "data": {"train": "given.jsonl", "shuffle": False}}
    fast = {"optimizer": {"learning_rate": 1e-2}, "dtype": "float32", "batch": {"pairs": 8}}
    return DPORecipe.model_validate(given | fast | {"loss": {"kind": "kto"} | (loss or {})} | options)


def method_of(answers: list[LabelledAnswer], loss: dict[str, Any] | None = None, *, reference: Any = None, **options: Any) -> KTO:
    engine = LocalEngine(tiny_model(), reference=reference or OtherModel(), max_grad_norm=None)
    return KTO(recipe_of(loss, **options), None, engine, answers, answers)  # type: ignore[arg-type]


# the KL ----------------------------------------------------------------------------------------------------------------------------


def test_each_prompt_gets_the_answer_of_the_next():
    answers = labelled(True, False, True)
    assert [item.prompt_ids for item in mismatched(answers)] == [item.prompt_ids for item in answers]
    assert [item.answer for item in mismatched(answers)] == [answers[1].answer, answers[2].answer, answers[0].answer]
    assert [item.label for item in mismatched(answers)] == [True, False, True]


def test_the_other_answer_of_a_pair_is_no_answer_to_another_prompt():
    """A file of pairs puts both answers to one prompt side by side."""
    answers = as_answers(random_pairs(2))
    first, second = answers[:2], answers[2:]
    assert [item.answer for item in mismatched(answers)] == [second[0].answer, second[0].answer, first[0].answer, first[0].answer]


def test_a_batch_with_one_prompt_takes_answers_from_the_rest_of_the_data():
    answers = as_answers(random_pairs(3))
    for batch in (answers[:1], answers[:2]):
        assert {item.answer for item in mismatched(batch, answers)} == {answers[2].answer}


def test_the_kl_is_the_mean_log_ratio_of_the_mismatched_answers():
    answers = labelled(*MIXED)
    other = OtherModel()
    swapped = mismatched(answers)
    expected = (sums_of(tiny_model(), swapped) - sums_of(other.model, swapped)).mean().item()
    assert abs(expected) > 0.05
    method = method_of(answers, reference=other)
    assert method._kl(answers) == pytest.approx(expected, abs=1e-4)
    assert method.step(1)["kl"] == pytest.approx(max(expected, 0.0), abs=1e-4)


# the loss --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [MIXED, (True,) * 8, (False,) * 8], ids=["mixed", "all desirable", "all undesirable"])
@pytest.mark.parametrize("kl", [-1.0, 0.0, 0.7])
def test_the_loss_is_the_mean_of_the_formula_each_answer_with_its_label_and_weight(labels, kl):
    answers, other = labelled(*labels), OtherModel()
    gain = sums_of(tiny_model(), answers) - sums_of(other.model, answers)
    z = max(kl, 0.0)
    each = [
        1.5 / (1 + math.exp(0.3 * (g - z))) if label else 0.5 / (1 + math.exp(0.3 * (z - g)))
        for g, label in zip(gain.tolist(), labels, strict=True)
    ]
    result, _ = backward(answers, kl, DPOLoss(kind="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5), other)
    assert result.loss == pytest.approx(sum(each) / 8, rel=1e-4)
    good = torch.tensor(labels)
    assert result.sums["chosen"] == pytest.approx(0.3 * gain[good].sum().item(), rel=1e-3, abs=1e-4)
    assert result.sums["rejected"] == pytest.approx(0.3 * gain[~good].sum().item(), rel=1e-3, abs=1e-4)


def backward(
    answers: list[LabelledAnswer], kl: float, loss: DPOLoss, other: OtherModel, *, budget: int = 10_000
) -> tuple[BackwardResult, dict[str, Tensor]]:
    model = tiny_model()
    engine = LocalEngine(model, reference=other, max_grad_norm=None, tokens_per_micro_batch=budget)
    rows = answer_rows(answers, engine.logprobs(answer_rows(answers), model="reference"))
    result = engine.forward_backward(rows, kto_loss([item.label for item in answers], kl, loss, answers=len(answers)))
    return result, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_eight_answers_are_the_same_in_one_micro_batch_and_in_eight():
    answers, loss, other = labelled(*MIXED), DPOLoss(kind="kto", undesirable_weight=2.0), OtherModel()
    one, expected = backward(answers, 0.3, loss, other)
    eight, gradients = backward(answers, 0.3, loss, other, budget=1)
    assert eight.loss == pytest.approx(one.loss, rel=1e-6)
    assert all((gradients[name] - expected[name]).abs().max() < 1e-6 for name in expected)


def test_flipping_a_label_turns_its_gradient_around():
    other, loss = OtherModel(), DPOLoss(kind="kto")
    good, bad = (backward(labelled(label), 0.0, loss, other)[1] for label in (True, False))
    assert max(gradient.abs().max() for gradient in good.values()) > 1e-3
    assert all(torch.allclose(good[name], -bad[name], atol=1e-7) for name in good)


@pytest.mark.parametrize("adapter", [None, Lora(rank=4, dropout=0.5)], ids=["full", "adapter"])
def test_the_first_step_is_half_the_mean_weight(adapter):
    """Policy = reference: every σ is ½, whatever the KL, which is 0."""
    policy = Policy(from_memory(tiny_model(), tiny_tokenizer(), adapter=adapter, dtype="float32"), ChatFormat(tiny_tokenizer()))
    recipe = recipe_of({"desirable_weight": 1.5, "undesirable_weight": 0.5})
    engine = setup.make_engine(recipe, policy, with_reference=True)
    rows = answer_rows(labelled(*MIXED))
    before = engine.logprobs(rows, model="reference")
    method = KTO(recipe, policy, engine, labelled(*MIXED), [])
    metrics = method.step(1)
    assert metrics["loss"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    later = [method.step(step) for step in range(2, 6)][-1]
    assert later["loss"] < 0.5
    assert later["rewards/chosen"] > 0 > later["rewards/rejected"]
    assert engine.logprobs(rows, model="reference") == before


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_kind_logs_only_that_kind(label):
    metrics = method_of(labelled(*(label,) * 8)).step(1)
    assert ("rewards/chosen" in metrics) is label
    assert ("rewards/rejected" in metrics) is not label
    assert "rewards/margins" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_steps_metrics_by_hand():
    answers, other = labelled(*MIXED), OtherModel()
    gain = 0.1 * (sums_of(tiny_model(), answers) - sums_of(other.model, answers))
    good = torch.tensor(MIXED)
    metrics = method_of(answers, reference=other).step(1)
    assert metrics["rewards/chosen"] == pytest.approx(gain[good].mean().item(), rel=1e-3)
    assert metrics["rewards/margins"] == pytest.approx((gain[good].mean() - gain[~good].mean()).item(), rel=1e-3)
    assert metrics["logps/rejected"] == pytest.approx(sums_of(tiny_model(), answers)[~good].mean().item(), rel=1e-4)
    assert metrics["num_tokens"] == sum(len(item.prompt_ids) + len(item.answer.token_ids) for item in answers)


def test_held_out_answers_are_right_when_they_moved_with_their_label():
    answers, other = labelled(*MIXED), OtherModel()
    gain = sums_of(tiny_model(), answers) - sums_of(other.model, answers)
    right = sum((value > 0) == label for value, label in zip(gain.tolist(), MIXED, strict=True))
    metrics = method_of(answers, reference=other).evaluate(0)
    assert metrics["eval/rewards/accuracies"] == right / 8
    assert metrics["eval/rewards/accuracies_low"] < right / 8 < metrics["eval/rewards/accuracies_high"]
    assert metrics["eval/answers"] == 8


def test_the_formula_is_the_public_one():
    answers, other, loss = labelled(*MIXED), OtherModel(), DPOLoss(kind="kto", beta=0.4)
    each = formulas.kto_loss(
        sums_of(tiny_model(), answers), sums_of(other.model, answers), torch.tensor(MIXED), torch.tensor(0.2), beta=0.4
    )
    assert backward(answers, 0.2, loss, other)[0].loss == pytest.approx(each.mean().item(), rel=1e-4)


# what is said and refused ----------------------------------------------------------------------------------------------------------


def notes_of(good: int, bad: int, **weights: float) -> list[str]:
    pairs, notes = random_pairs(2), []
    answers = [LabelledAnswer(str(n), pairs[n % 2].prompt_ids, pairs[0].chosen, n < good) for n in range(good + bad)]
    KTO(recipe_of(weights), None, LocalEngine(tiny_model()), answers, [], notes.append)  # type: ignore[arg-type]
    return notes


def test_balanced_answers_need_no_word():
    assert notes_of(10, 10) == notes_of(4, 3) == notes_of(20, 10, undesirable_weight=2.0) == []


@pytest.mark.parametrize(
    ("good", "bad", "weights", "words"),
    [
        (20, 10, {}, "2.00 to 1; the paper asks for 1 to 1 up to 4 to 3: e.g. loss.undesirable_weight: 2.00"),
        (5, 10, {}, "0.50 to 1; the paper asks for 1 to 1 up to 4 to 3: e.g. loss.desirable_weight: 2.00"),
        (20, 10, {"desirable_weight": 2.0}, "4.00 to 1; the paper asks for 1 to 1 up to 4 to 3: e.g. loss.undesirable_weight: 4.00"),
        (10, 10, {"undesirable_weight": 3.0}, "0.33 to 1; the paper asks for 1 to 1 up to 4 to 3: e.g. loss.desirable_weight: 3.00"),
        (10, 0, {}, "all 10 answers are desirable"),
        (0, 10, {}, "all 10 answers are undesirable"),
    ],
)
def test_the_weights_that_are_advised_balance_the_answers(good, bad, weights, words):
    (note,) = notes_of(good, bad, **weights)
    assert words in note
    if "e.g. loss." in note:
        key, value = note.split("e.g. loss.")[1].split(": ")
        assert notes_of(good, bad, **weights | {key: float(value)}) == []


def test_a_batch_of_one_answer_is_refused():
    with pytest.raises(RecipeError, match="at least 2 answers"):
        method_of(labelled(*MIXED), batch={"pairs": 1})


def test_answers_to_a_single_prompt_are_refused():
    pair = random_pairs(1)[0]
    with pytest.raises(DataError, match="one prompt"):
        method_of(as_answers([pair]))


def test_the_last_batch_of_an_epoch_may_hold_a_single_answer():
    method = method_of(labelled(True, False, True), batch={"pairs": 2}, max_steps=None, epochs=1)
    assert method.total_steps == 2
    assert math.isfinite([method.step(step) for step in (1, 2)][-1]["loss"])


def test_an_answer_without_a_scored_token_is_refused():
    item = LabelledAnswer("rows:1", (1, 5), Answer((6, 2), (False, False)), True)
    with pytest.raises(ValueError, match="no token to score"):
        answer_rows([item])


# whole runs ------------------------------------------------------------------------------------------------------------------------

RECIPE = """\
method: dpo
model: {model}
run_dir: {run_dir}
seed: 3
dtype: float32
max_steps: 10
data: {{train: rows.jsonl, eval: heldout.jsonl, max_length: 200}}
batch: {{pairs: 6, tokens_per_micro_batch: 100}}
optimizer: {{learning_rate: {rate}, warmup_steps: 2, schedule: cosine}}
loss: {{kind: kto}}
evaluation: {{every: 4}}
checkpoint: {{every: 3}}
{adapter}
"""
ADAPTER = "adapter: {kind: lora, rank: 4}"


def rows_of(numbers: range, *, paired: bool) -> list[dict[str, Any]]:
    if paired:
        return [{"prompt": f"{number}?", "chosen": f"yes {number}", "rejected": f"no {number}"} for number in numbers]
    return [{"prompt": f"{n}?", "completion": f"{'no' if n % 2 else 'yes'} {n}", "label": n % 2 == 0} for n in numbers]


def make_task(folder: Path, model: Path, *, adapter: str = "", paired: bool = False) -> Path:
    folder.mkdir(parents=True)
    write_rows(folder / "rows.jsonl", rows_of(range(20), paired=paired))
    write_rows(folder / "heldout.jsonl", rows_of(range(100, 116), paired=paired))
    rate = "1e-2" if adapter else "3e-3"
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, run_dir=folder / "run", adapter=adapter, rate=rate))
    return folder / "recipe.yaml"


def command(*arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "POSTGRAD_FAULT": fault, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "postgrad", *arguments], env=environment, capture_output=True, text=True, check=False)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """Everything but the clock."""
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(run_dir / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "paired"), [("", False), (ADAPTER, False), ("", True)], ids=["full", "adapter", "a file of pairs"])
def test_a_whole_run_learns_is_killed_and_goes_on_bit_for_bit(adapter, paired, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    run(load_recipe(make_task(tmp_path / "whole", tiny_folder, adapter=adapter, paired=paired)))
    whole = logged(tmp_path / "whole" / "run")
    assert next(record for record in whole if record["step"] == 1)["loss"] == pytest.approx(0.5, abs=1e-6)
    assert whole[-1]["eval/rewards/accuracies"] == 1.0
    assert whole[-1]["eval/rewards/accuracies_low"] > 0.75
    assert whole[-1]["eval/answers"] == (32 if paired else 16)

    recipe = make_task(tmp_path / "killed", tiny_folder, adapter=adapter, paired=paired)
    done = command("train", str(recipe), fault="step:5")
    assert done.returncode == -signal.SIGKILL, done.stderr
    resume(tmp_path / "killed" / "run")
    assert logged(tmp_path / "killed" / "run") == whole
    weights = [tmp_path / which / "run" / "model" / "model.safetensors" for which in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    undefined = [
        name for record in whole for name in record if name != "step" and ((m := find(name)) is None or m.name == "eval/<rollout metric>")
    ]
    assert sorted(set(undefined)) == []


@pytest.mark.slow
def test_a_dry_run_shows_the_answer_and_its_label(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    done = command("train", str(make_task(tmp_path / "task", tiny_folder)), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "rows.jsonl:1" in done.stdout
    assert "desirable" in done.stdout
    assert "⟦yes 0<|im_end|>⟧" in done.stdout
    assert not (tmp_path / "task" / "run").exists()
