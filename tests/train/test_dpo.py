"""DPO: where it starts, what its losses see, that micro-batches change nothing, and whole runs that are killed and go on."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from postgrad import formulas
from postgrad.chat import ChatFormat
from postgrad.data import Pair
from postgrad.data.preferences import Answer
from postgrad.models.engine import LocalEngine
from postgrad.models.loading import LanguageModel, from_memory, load
from postgrad.models.lora import Lora
from postgrad.models.saving import save
from postgrad.protocols import BackwardResult, Loss, LossFunction, Rows
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train import setup
from postgrad.train.dpo import DPO, pair_loss
from postgrad.train.metrics import find
from postgrad.train.pairs import pair_rows
from postgrad.train.recipe import PAIR_LOSSES, DPOLoss, DPORecipe
from postgrad.train.recipe_file import load_recipe
from postgrad.train.reference_logprobs import precomputed
from postgrad.train.run import resume, run
from postgrad.train.run_directory import read_jsonl
from postgrad.train.setup import Policy
from postgrad.types import TrainRow

from .conftest import write_rows

LN2 = math.log(2.0)


def random_pairs(count: int = 8, seed: int = 0) -> list[Pair]:
    """Ragged pairs; every third chosen answer has a token in its middle that is not scored."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 260, (length,), generator=generator).tolist())

    def answer(length: int, *, gap: bool = False) -> Answer:
        flags = [True] * length
        flags[length // 2] = not (gap and length > 1)
        return Answer(ids(length), tuple(flags))

    return [Pair(f"rows:{n}", ids(2 + n), answer(1 + 2 * n % 7, gap=n % 3 == 0), answer(1 + 3 * n % 5)) for n in range(1, count + 1)]


def recipe_of(loss: dict[str, Any] | None = None, **options: Any) -> DPORecipe:
    given = {"method": "dpo", "model": "given", "run_dir": "unused", "max_steps": 5, "data": {"train": "given.jsonl", "shuffle": False}}
    fast = {"optimizer": {"learning_rate": 1e-2}, "dtype": "float32"}
    return DPORecipe.model_validate(given | fast | {"loss": loss or {}, "batch": {"pairs": 8}} | options)


def drift(model: nn.Module, size: float, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))


@contextmanager
def _given(model: nn.Module) -> Iterator[nn.Module]:
    yield model


class OtherModel:
    """A reference that is not the policy's start, so that no loss is at its trivial value."""

    def __init__(self, architecture: Any = "llama", size: float = 0.03) -> None:
        self.model = tiny_model(architecture)
        drift(self.model, size)

    def active(self) -> Any:
        return _given(self.model)


# the start -------------------------------------------------------------------------------------------------------------------------


def written(folder: Path) -> Path:
    tiny_model("llama", vocab_size=268).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trained_adapter(folder: Path) -> Path:
    """The folder of an adapter that is not zero."""
    lm = load(written(folder / "base"), adapter=Lora(rank=4), dtype="float32")
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    save(lm, folder / "trained")
    return folder / "trained" / "adapter"


def start(kind: str, folder: Path) -> LanguageModel:
    if kind == "dropout":
        return from_memory(tiny_model("gpt2", dropout=0.5).train(), tiny_tokenizer(), dtype="float32")
    if kind == "in memory":
        model = tiny_model()
        model.config._name_or_path = ""  # trl#7071
        return from_memory(model, tiny_tokenizer(), dtype="float32")
    if kind == "trained adapter":
        return load(trained_adapter(folder), dtype="float32")
    return load(written(folder), adapter=Lora(rank=4, dropout=0.5) if kind == "new adapter" else None, dtype="float32")


STARTS = ("full", "dropout", "new adapter", "trained adapter", "in memory")


def method_of(lm: LanguageModel, recipe: DPORecipe, *, known: Path | None = None) -> DPO:
    """As a run builds it."""
    pairs, policy = random_pairs(), Policy(lm, ChatFormat(lm.tokenizer))
    engine = setup.make_engine(recipe, policy, with_reference=known is None)
    reference = None if known is None else precomputed(pairs, policy, engine, folder=known)
    return DPO(recipe, policy, engine, pairs, pairs[:3], reference=reference, heldout_reference=reference and reference[:3])


@pytest.mark.parametrize("reference", ["live", "precomputed"])
@pytest.mark.parametrize("kind", STARTS)
def test_the_first_step_is_ln_2_with_margin_0(kind, reference, tmp_path):
    """direct-preference-optimization#46, trl#5542 (dropout), trl#6591 (a trained adapter), trl#7071 (a model without a path)."""
    method = method_of(start(kind, tmp_path), recipe_of(), known=tmp_path / "known" if reference == "precomputed" else None)
    metrics = method.step(1)
    assert metrics["loss"] == pytest.approx(LN2, abs=1e-6)
    for name in ("rewards/margins", "rewards/chosen", "rewards/rejected"):
        assert metrics[name] == pytest.approx(0.0, abs=1e-6)
    assert metrics["grad_norm"] > 0.01
    later = [method.step(step) for step in range(2, 5)][-1]
    assert later["loss"] < 0.6
    assert later["rewards/accuracies"] == 1.0


@pytest.mark.parametrize("kind", STARTS)
def test_the_reference_stays_bit_for_bit_while_the_policy_trains(kind, tmp_path):
    """trl#1107, trl#6591."""
    method = method_of(start(kind, tmp_path), recipe_of())
    rows = pair_rows(random_pairs())
    before = method.engine.logprobs(rows, model="reference")
    assert before == method.engine.logprobs(rows)
    for step in range(1, 4):
        method.step(step)
    assert method.engine.logprobs(rows, model="reference") == before
    assert method.engine.logprobs(rows) != before


def test_held_out_pairs_keep_the_reference_of_the_start(tmp_path):
    """trl#1107: with the trained model as reference every held-out margin would be 0."""
    results = []
    for known in (None, tmp_path / "known"):
        method = method_of(start("full", tmp_path), recipe_of(), known=known)
        assert method.evaluate(0)["eval/rewards/margins"] == pytest.approx(0.0, abs=1e-6)
        for step in range(1, 4):
            method.step(step)
        results.append(method.evaluate(3))
    assert results[0]["eval/rewards/accuracies"] == 1.0
    assert results[0]["eval/rewards/margins"] > 0.1
    assert results[1] == pytest.approx(results[0], rel=1e-4)


# the loss --------------------------------------------------------------------------------------------------------------------------


class Counting(LocalEngine):
    """Counts the calls of the loss function."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, max_grad_norm=None, **options)
        self.calls = 0

    def forward_backward(self, rows: Any, loss: LossFunction, *, temperature: float = 1.0) -> BackwardResult:
        def counted(logprobs: Tensor, seen: Rows) -> tuple[Tensor, dict[str, Tensor]]:
            self.calls += 1
            return loss(logprobs, seen)

        return super().forward_backward(rows, replace(Loss.of(loss), function=counted), temperature=temperature)


KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in PAIR_LOSSES},
    "exo_pair": {"kind": "exo_pair", "label_smoothing": 0.01},
    "robust": {"kind": "robust", "label_smoothing": 0.1},
    "conservative": {"kind": "sigmoid", "label_smoothing": 0.2},
    "forward_kl": {"kind": "sigmoid", "divergence": "forward_kl"},
    "js": {"kind": "hinge", "divergence": "js"},
    "length": {"kind": "sigmoid", "length_alpha": 0.3},
    "simpo": {"kind": {"simpo": 1.0, "sft": 0.5}, "beta": 2.0, "gamma": 0.5},
    "cpo": {"kind": {"cpo": 1.0, "sft": 1.0}},
    "orpo": {"kind": {"sft": 1.0, "orpo": 0.1}},
    "mpo": {"kind": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}},
}


def backward(loss: DPOLoss, pairs: list[Pair], *, budget: int, padded: bool = False) -> tuple[BackwardResult, dict[str, Tensor], int]:
    model = tiny_model()
    engine = Counting(model, reference=OtherModel(), tokens_per_micro_batch=budget)
    if padded:
        engine._refusals[id(model)] = "for this test"
    reference = engine.logprobs(pair_rows(pairs), model="reference") if loss.needs_reference else None
    tokens = sum(sum(pair.chosen.scored) for pair in pairs)
    result = engine.forward_backward(pair_rows(pairs, reference), pair_loss(loss, pairs=len(pairs), chosen_tokens=tokens))
    return result, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, engine.calls


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("aot")])
def test_eight_pairs_are_the_same_in_one_micro_batch_and_in_eight(name):
    loss = DPOLoss(**KINDS[name])
    one, expected, calls = backward(loss, random_pairs(), budget=10_000)
    assert calls == 1
    for padded in (False, True):
        eight, gradients, calls = backward(loss, random_pairs(), budget=1, padded=padded)
        assert calls == 8
        assert eight.loss == pytest.approx(one.loss, rel=1e-6)
        assert eight.sums == pytest.approx(one.sums | {key: eight.sums[key] for key in ("computed_tokens",)}, rel=1e-5, abs=1e-5)
        largest = max(1.0, *(gradient.abs().max().item() for gradient in expected.values()))
        assert all((gradients[name] - expected[name]).abs().max() < 2e-6 * largest for name in expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_a_loss_that_sorts_the_batch_sees_it_whole_whatever_memory_it_takes(name, padded):
    loss = DPOLoss(kind=name)
    whole, expected, _ = backward(loss, random_pairs(), budget=10_000)
    tight, gradients, calls = backward(loss, random_pairs(), budget=1, padded=padded)
    assert calls == 1
    assert tight.loss == pytest.approx(whole.loss, rel=1e-6)
    assert all((gradients[name] - expected[name]).abs().max() < 1e-5 for name in expected)


def test_a_batch_of_one_pair_sorts_nothing():
    """What the test above guards: pair by pair, the sorted losses are other losses."""
    pairs = random_pairs()
    loss = DPOLoss(kind="aot", beta=1.0)
    whole = backward(loss, pairs, budget=10_000)[0].loss
    apart = sum(backward(loss, [pair], budget=10_000)[0].loss for pair in pairs) / len(pairs)
    assert abs(whole - apart) > 1e-3


def sums_of(model: nn.Module, pairs: list[Pair], *, alpha: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(chosen, rejected, tokens of chosen, tokens of rejected), from plain logits row by row."""
    numbers = []
    for pair in pairs:
        shared = min(sum(side.scored) for side in (pair.chosen, pair.rejected))
        for side in (pair.chosen, pair.rejected):
            ids = pair.prompt_ids + side.token_ids
            with torch.no_grad():
                table = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            values = [table[len(pair.prompt_ids) + at - 1, token].item() for at, token in enumerate(side.token_ids) if side.scored[at]]
            numbers.append((sum(values[:shared]) + alpha * sum(values[shared:]), len(values)))
    totals, counts = torch.tensor([number for number, _ in numbers]), torch.tensor([float(count) for _, count in numbers])
    return totals[0::2], totals[1::2], counts[0::2], counts[1::2]


@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_every_loss_is_the_mean_of_its_formula_over_plain_sums_of_the_answers(kind):
    """OpenRLHF#235: no prompt token is in any sum."""
    pairs, smoothing = random_pairs(), 0.1 if kind in ("exo_pair", "robust") else 0.0
    chosen, rejected, *counts = sums_of(tiny_model(), pairs)
    reference = sums_of(OtherModel().model, pairs)[:2]
    averaged = dict(zip(("chosen_tokens", "rejected_tokens"), counts, strict=True)) if kind in ("ipo", "sigmoid_norm") else {}
    each = formulas.dpo_loss(chosen, rejected, *reference, beta=0.2, loss=kind, label_smoothing=smoothing, **averaged)
    result, _, _ = backward(DPOLoss(kind=kind, beta=0.2, label_smoothing=smoothing), pairs, budget=50)
    assert result.loss == pytest.approx(each.mean().item(), rel=1e-4)


def test_the_sigmoid_loss_by_hand():
    pairs = random_pairs(2)
    policy, reference = (sums_of(model, pairs) for model in (tiny_model(), OtherModel().model))
    margins = [float(0.1 * ((policy[0][n] - reference[0][n]) - (policy[1][n] - reference[1][n]))) for n in range(2)]
    result, _, _ = backward(DPOLoss(beta=0.1), pairs, budget=50)
    assert result.loss == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins) / 2, rel=1e-4)
    assert result.sums["rewards/margins"] == pytest.approx(sum(margins), rel=1e-3)
    assert result.sums["rewards/accuracies"] == sum(margin > 0 for margin in margins)
    assert result.sums["logps/chosen"] == pytest.approx(policy[0].sum().item(), rel=1e-5)


def test_weighted_losses_add_up():
    pairs = random_pairs()
    parts = {kind: backward(DPOLoss(kind=kind), pairs, budget=50)[0].loss for kind in ("sigmoid", "bco_pair", "hinge")}
    chosen, _, tokens, _ = sums_of(tiny_model(), pairs)
    nll = -(chosen.sum() / tokens.sum()).item()
    mixed, _, _ = backward(DPOLoss(kind={"sigmoid": 0.8, "bco_pair": 0.2, "hinge": 0.5, "sft": 2.0}), pairs, budget=50)
    assert mixed.loss == pytest.approx(0.8 * parts["sigmoid"] + 0.2 * parts["bco_pair"] + 0.5 * parts["hinge"] + 2 * nll, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_tokens_beyond_the_other_answers_length_count_less(alpha):
    pairs = random_pairs()
    policy, reference = (sums_of(model, pairs, alpha=alpha) for model in (tiny_model(), OtherModel().model))
    each = formulas.dpo_loss(*policy[:2], *reference[:2], beta=0.1)
    result, _, _ = backward(DPOLoss(length_alpha=alpha), pairs, budget=50)
    assert result.loss == pytest.approx(each.mean().item(), rel=1e-4)
    assert result.loss != pytest.approx(backward(DPOLoss(), pairs, budget=50)[0].loss, rel=1e-3)


def test_the_reference_free_losses_by_their_formulas():
    pairs = random_pairs()
    chosen, rejected, *counts = sums_of(tiny_model(), pairs)
    expected = {
        "simpo": formulas.simpo_loss(chosen, rejected, *counts, beta=2.0, gamma=0.5),
        "cpo": formulas.cpo_loss(chosen, rejected, beta=2.0),
        "orpo": formulas.orpo_loss(chosen, rejected, *counts),
    }
    for kind, each in expected.items():
        options = {"simpo": {"beta": 2.0, "gamma": 0.5}, "cpo": {"beta": 2.0}, "orpo": {}}[kind]
        loss = DPOLoss(kind=kind, **options)
        assert not loss.needs_reference
        assert backward(loss, pairs, budget=50)[0].loss == pytest.approx(each.mean().item(), rel=1e-4)


def test_numbers_of_the_reference_at_prompt_tokens_are_never_read():
    pairs, model = random_pairs(), tiny_model()
    engine = LocalEngine(model)
    rows = pair_rows(pairs, engine.logprobs(pair_rows(pairs)))
    spoiled = [
        TrainRow(row.token_ids, row.trained, row.group, row.shared_prefix,
                 {"reference_logprobs": [value if flag else 1e30 for value, flag in
                                         zip(row.per_token["reference_logprobs"], row.trained, strict=True)]}, row.per_row)
        for row in rows
    ]  # fmt: skip
    results = [engine.forward_backward(given, pair_loss(DPOLoss(), pairs=8, chosen_tokens=1)).loss for given in (rows, spoiled)]
    assert results[0] == results[1] == pytest.approx(LN2, abs=1e-6)


def test_a_run_against_a_reference_never_goes_without_its_numbers():
    rows = pair_rows(random_pairs())
    with pytest.raises((KeyError, ValueError)):
        LocalEngine(tiny_model()).forward_backward(rows, pair_loss(DPOLoss(), pairs=8, chosen_tokens=1))


# the recipe ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ({"kind": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "exo_pair"}, "label_smoothing"),
        ({"kind": {"sigmoid": 1.0, "bco_pair": 1.0}, "label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "kto", "label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "bco_pair", "divergence": "js"}, "divergence"),
        ({"kind": {"sigmoid": 1.0, "aot": 1.0}, "divergence": "js"}, "divergence"),
        ({"kind": "simpo", "divergence": "js"}, "divergence"),
        ({"kind": "sigmoid", "gamma": 0.5}, "gamma"),
        ({"kind": "cpo", "gamma": 0.5}, "gamma"),
        ({"kind": "sigmoid", "desirable_weight": 2.0}, "desirable_weight"),
        ({"kind": "simpo", "undesirable_weight": 2.0}, "undesirable_weight"),
        ({"kind": "kto", "length_alpha": 0.5}, "length_alpha"),
        ({"kind": "nonsense"}, "kind"),
        ({"kind": {}}, "kind"),
        ({"kind": {"kto": 1.0, "sigmoid": 1.0}}, "kind"),
        ({"kind": "sft"}, "kind"),
        ({"kind": "orpo", "beta": 0.3}, "beta"),
        ({"kind": "simpo", "reference": "precomputed"}, "reference"),
        ({"kind": "kto", "reference": "precomputed"}, "reference"),
    ],
)
def test_a_key_that_the_loss_does_not_read_is_refused(loss, key):
    with pytest.raises(ValidationError) as caught:
        recipe_of(loss)
    assert caught.value.errors()[0]["ctx"]["key"] == key


@pytest.mark.parametrize(
    "loss",
    [
        {"beta": 0.0},
        {"label_smoothing": 0.5},
        {"length_alpha": 1.5},
        {"beta": math.inf},
        {"temperature": 1.0},
        {"kind": {"sigmoid": math.nan}},
    ],
)
def test_a_value_out_of_range_is_refused(loss):
    with pytest.raises(ValidationError):
        recipe_of(loss)


@pytest.mark.parametrize("name", KINDS)
def test_every_loss_that_is_known_runs_from_a_recipe(name, tmp_path):
    loss = KINDS[name]
    recipe = recipe_of(loss)
    policy = Policy(from_memory(tiny_model(), tiny_tokenizer(), dtype="float32"), ChatFormat(tiny_tokenizer()))
    engine = setup.make_engine(recipe, policy, with_reference=recipe.loss.needs_reference)
    method = DPO(recipe, policy, engine, random_pairs(), random_pairs(2, seed=4))
    first, *_, last = [method.step(step) for step in range(1, 5)]
    assert last["loss"] < first["loss"]
    assert math.isfinite(method.evaluate(4)["eval/rewards/margins"])


# whole runs ------------------------------------------------------------------------------------------------------------------------

RECIPE = """\
method: dpo
model: {model}
run_dir: {run_dir}
seed: 3
dtype: float32
max_steps: 10
data: {{train: pairs.jsonl, eval: heldout.jsonl, max_length: 200}}
batch: {{pairs: 4, tokens_per_micro_batch: 100}}
optimizer: {{learning_rate: {rate}, warmup_steps: 2, schedule: cosine}}
loss: {{reference: {reference}}}
evaluation: {{every: 4}}
checkpoint: {{every: 3}}
{adapter}
"""


def preference(number: int) -> dict[str, str]:
    return {"prompt": f"{number}?", "chosen": f"yes {number}", "rejected": f"no {number}"}


def make_task(folder: Path, model: Path, *, reference: str = "live", adapter: str = "", rate: str = "3e-3") -> Path:
    folder.mkdir(parents=True)
    write_rows(folder / "pairs.jsonl", [preference(number) for number in range(20)])
    write_rows(folder / "heldout.jsonl", [preference(number) for number in range(100, 116)])
    text = RECIPE.format(model=model, run_dir=folder / "run", reference=reference, adapter=adapter, rate=rate)
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def command(*arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "POSTGRAD_FAULT": fault, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "postgrad", *arguments], env=environment, capture_output=True, text=True, check=False)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """Everything but the clock."""
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(run_dir / "metrics.jsonl")]


ADAPTER = "adapter: {kind: lora, rank: 4}"
CASES = {
    "full, live": ("full", "live", "", "3e-3"),
    "full, precomputed": ("full", "precomputed", "", "3e-3"),
    "new adapter, live": ("full", "live", ADAPTER, "1e-2"),
    "new adapter, precomputed": ("full", "precomputed", ADAPTER, "1e-2"),
    "trained adapter, live": ("adapter", "live", "", "1e-2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_whole_run_learns_is_killed_and_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    start_from, reference, adapter, rate = CASES[name]
    model = trained_adapter(tmp_path) if start_from == "adapter" else written(tmp_path / "base")
    options = {"reference": reference, "adapter": adapter, "rate": rate}
    run(load_recipe(make_task(tmp_path / "whole", model, **options)))
    whole = logged(tmp_path / "whole" / "run")

    first = next(record for record in whole if record["step"] == 1)
    assert first["loss"] == pytest.approx(LN2, abs=1e-6)
    assert whole[-1]["rewards/accuracies"] == 1.0
    assert whole[-1]["eval/rewards/accuracies"] == 1.0
    assert whole[-1]["eval/rewards/accuracies_low"] > 0.75
    assert whole[-1]["eval/rewards/margins"] > 0.1
    assert [record["step"] for record in whole if "eval/pairs" in record] == [0, 4, 8, 10]

    recipe = make_task(tmp_path / "killed", model, **options)
    done = command("train", str(recipe), fault="step:5")
    assert done.returncode == -signal.SIGKILL, done.stderr
    if reference == "precomputed":  # made again before the checkpoint is read, or the trained policy would be the reference
        shutil.rmtree(tmp_path / "cache" / "logprobs")
    resume(tmp_path / "killed" / "run")
    assert logged(tmp_path / "killed" / "run") == whole
    weights = [tmp_path / which / "run" / "model" / "model.safetensors" for which in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_every_logged_number_is_defined(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    run(load_recipe(make_task(tmp_path / "task", written(tmp_path / "base"))), overwrite=False)
    names = {name for record in read_jsonl(tmp_path / "task" / "run" / "metrics.jsonl") for name in record} - {"step"}
    undefined = [name for name in names if (metric := find(name)) is None or metric.name == "eval/<rollout metric>"]
    assert sorted(undefined) == []


@pytest.mark.slow
def test_a_dry_run_shows_the_pair_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    recipe = make_task(tmp_path / "task", written(tmp_path / "base"))
    done = command("train", str(recipe), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "pairs.jsonl:1" in done.stdout
    assert "chosen: ⟦yes 0<|im_end|>⟧" in done.stdout
    assert "rejected: ⟦no 0<|im_end|>⟧" in done.stdout
    assert "ln 2 = 0.693" in done.stdout
    assert not (tmp_path / "task" / "run").exists()
