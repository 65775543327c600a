"""`DPO.step` and `KTO.step` against `DPOTrainer.train` and `KTOTrainer.train`: the same pairs, policy and reference give the same tokens,
loss and gradients, for every loss that both have.

The reference is another model than the policy, so that no loss is at its trivial start. TRL pads; postgrad packs and shares prompts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from postgrad.chat import ChatFormat
from postgrad.data import LabelledAnswer, Pair, load_rows, prepare_preferences, prepare_unpaired
from postgrad.data.preferences import Answer
from postgrad.testing.tiny import Architecture, tiny_model, tiny_tokenizer
from postgrad.train.dpo import DPO
from postgrad.train.kto import KTO
from postgrad.train.recipe import PAIR_LOSSES, DPORecipe

from . import same, trl_side

from datasets import Dataset  # isort: skip  (after trl_side, which skips the module where TRL is absent)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer  # isort: skip

pytestmark = [pytest.mark.conformance, *trl_side.QUIET]

END_IS_LAST = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""Prints nothing behind the end token of the last answer."""


def random_pairs(*, level: bool = False) -> list[Pair]:
    """Ragged pairs of arbitrary tokens; one answer is a single token.

    level: both answers of a pair are equally long, so that the tokens and not the lengths decide the order of the differences.
    """
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 200, (length,), generator=generator).tolist())

    lengths = ((4, 2, 9), (2, 5, 1), (11, 3, 3), (3, 12, 2), (7, 2, 6), (1, 8, 4))
    return [
        Pair(f"rows:{n}", ids(prompt), *(Answer(ids(length), (True,) * length) for length in (sides[:1] * 2 if level else sides)))
        for n, (prompt, *sides) in enumerate(lengths)
    ]


def policy_and_reference(architecture: Architecture = "llama", *, size: float = 0.03) -> tuple[Any, Any]:
    reference = tiny_model(architecture)
    same.drift(size, seed=9)(reference)
    return tiny_model(architecture), reference


def recipe_of(loss: dict[str, Any], count: int, budget: int) -> DPORecipe:
    return DPORecipe.model_validate(
        {
            "method": "dpo", "model": "given", "run_dir": "unused", "max_steps": 1, "data": {"train": "given.jsonl", "shuffle": False},
            "batch": {"pairs": count, "tokens_per_micro_batch": budget}, "loss": loss,
        }
    )  # fmt: skip


def our_step(policy: nn.Module, reference: nn.Module, pairs: Sequence[Pair], loss: dict[str, Any], *, budget: int = 40) -> same.Step:
    engine = same.RecordingEngine(policy, reference=same.FrozenReference(reference), tokens_per_micro_batch=budget)
    metrics = DPO(recipe_of(loss, len(pairs), budget), None, engine, pairs, []).step(1)  # type: ignore[arg-type]
    assert (engine.micro_batches > 1) is not ("aot" in str(loss)), "a batch should not fit one micro-batch unless the loss sorts it"
    return same.Step(metrics["loss"], engine.gradients[0], metrics)


class _GivenPairs(DPOTrainer):
    """With the tokens that are there already; everything after preparing the text is TRL's."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset if "prompt_ids" in dataset.column_names else super()._prepare_dataset(dataset, *args, **kwargs)


def trainer_of(
    policy: Any, reference: Any, rows: Sequence[dict[str, Any]], folder: Path, *, accumulate: int = 1, tokenizer: Any = None, **config: Any
) -> DPOTrainer:
    batching = {"per_device_train_batch_size": len(rows) // accumulate, "gradient_accumulation_steps": accumulate, "max_steps": 1}
    return _GivenPairs(
        policy,
        ref_model=reference,
        args=DPOConfig(str(folder / "trl"), **trl_side._COMMON | batching | config),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer or tiny_tokenizer(),
    )


def their_step(trainer: Any) -> same.Step:
    return trl_side._recorded(trainer, lambda model: None)[0]


def tokenised(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {"prompt_ids": list(pair.prompt_ids), "chosen_ids": list(pair.chosen.token_ids), "rejected_ids": list(pair.rejected.token_ids)}
        for pair in pairs
    ]


def both(
    folder: Path, ours: dict[str, Any], architecture: Architecture = "llama", *, accumulate: int = 1, **theirs: Any
) -> tuple[same.Step, same.Step]:
    sorts = "aot" in str(ours) or "aot" in str(theirs)
    policy, reference = policy_and_reference(architecture, size=0.1 if sorts else 0.03)
    pairs = random_pairs(level=sorts)
    trainer = trainer_of(copy.deepcopy(policy), copy.deepcopy(reference), tokenised(pairs), folder, accumulate=accumulate, **theirs)
    return our_step(policy, reference, pairs, ours), their_step(trainer)


# every loss ------------------------------------------------------------------------------------------------------------------------

SMOOTHED = ("exo_pair", "robust")


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_loss_and_every_gradient(kind: str, beta: float, tmp_path: Path) -> None:
    smoothing = 0.1 if kind in SMOOTHED else 0.0
    ours, theirs = both(
        tmp_path, {"kind": kind, "beta": beta, "label_smoothing": smoothing}, loss_type=[kind], beta=beta, label_smoothing=smoothing
    )
    same.assert_same_step(ours, theirs)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_label_smoothing(kind: str, tmp_path: Path) -> None:
    same.assert_same_step(*both(tmp_path, {"kind": kind, "label_smoothing": 0.2}, loss_type=[kind], label_smoothing=0.2))


def test_the_sigmoid_loss_reads_label_smoothing(tmp_path: Path) -> None:
    """The difference: TRL's `sigmoid` ignores the key. Its `aot` does not, and sorts nothing in micro-batches of one pair: that is cDPO."""
    smoothed = {"kind": "sigmoid", "label_smoothing": 0.2}
    ours, theirs = both(tmp_path / "1", smoothed, accumulate=6, loss_type=["aot"], label_smoothing=0.2)
    same.assert_same_step(ours, theirs)
    _, plain = both(tmp_path / "2", smoothed, loss_type=["sigmoid"], label_smoothing=0.2)
    same.assert_same_step(both(tmp_path / "3", {"kind": "sigmoid"})[0], plain)


def test_a_loss_that_sorts_the_batch_sorts_all_of_it(tmp_path: Path) -> None:
    """The difference: TRL sorts each micro-batch by itself, so the loss changes with gradient accumulation; here it never does."""
    _, whole = both(tmp_path / "1", {"kind": "aot"}, loss_type=["aot"])
    ours, apart = both(tmp_path / "2", {"kind": "aot"}, accumulate=6, loss_type=["aot"])
    same.assert_same_step(ours, whole)
    assert same.largest_difference(apart.gradients, whole.gradients) > 0.02


@pytest.mark.parametrize(
    "kind",
    [
        "sigmoid",
        "hinge",
        "exo_pair",
        "robust",
        "discopop",
        "sigmoid_norm",
        "ipo",
    ],
)
@pytest.mark.parametrize(("divergence", "theirs"), [("forward_kl", "forward_kl"), ("js", "js_divergence")])
def test_other_divergences(divergence: str, theirs: str, kind: str, tmp_path: Path) -> None:
    smoothing = 0.1 if kind in SMOOTHED else 0.0
    loss = {"kind": kind, "divergence": divergence, "label_smoothing": smoothing}
    same.assert_same_step(*both(tmp_path, loss, loss_type=[kind], f_divergence_type=theirs, label_smoothing=smoothing))


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "sigmoid_norm", "apo_zero"])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_less_regard_to_length(alpha: float, kind: str, tmp_path: Path) -> None:
    same.assert_same_step(*both(tmp_path, {"kind": kind, "length_alpha": alpha}, loss_type=[kind], ld_alpha=alpha))


MIXES = (
    {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0},
    {"sigmoid": 1.0, "sft": 0.2},
    {"apo_zero": 1.0, "hinge": 0.3, "ipo": 0.01},
)


@pytest.mark.parametrize("kinds", MIXES, ids=[" + ".join(mix) for mix in MIXES])
def test_several_losses_with_weights(kinds: dict[str, float], tmp_path: Path) -> None:
    same.assert_same_step(*both(tmp_path, {"kind": kinds}, loss_type=list(kinds), loss_weights=list(kinds.values())))


@pytest.mark.parametrize("accumulate", [2, 6])
def test_accumulated_micro_batches(accumulate: int, tmp_path: Path) -> None:
    same.assert_same_step(*both(tmp_path, {"kind": "sigmoid"}, accumulate=accumulate))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gpt2"])
def test_another_architecture(architecture: Architecture, tmp_path: Path) -> None:
    same.assert_same_step(*both(tmp_path, {"kind": "sigmoid"}, architecture))


def test_metrics_mean_what_they_mean_in_trl(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, {"kind": "sigmoid"})
    names = (
        "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "entropy",
        "num_tokens",
    )  # fmt: skip
    assert {name: ours.metrics[name] for name in names} == pytest.approx({name: theirs.metrics[name] for name in names}, rel=same.RELATIVE)


# the reference ---------------------------------------------------------------------------------------------------------------------


def test_a_trained_adapter_and_its_start_as_reference(tmp_path: Path) -> None:
    """Both take the adapter as it was, not the base: ln 2, and the same gradient."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    policy = peft.get_peft_model(tiny_model(), config)
    same.drift(0.1, seed=5)(policy)
    pairs = random_pairs()
    theirs = their_step(trainer_of(copy.deepcopy(policy), None, tokenised(pairs), tmp_path))
    ours = our_step(copy.deepcopy(policy), policy, pairs, {})
    assert ours.loss == pytest.approx(0.693147, abs=1e-5)
    same.assert_same_step(ours, theirs)


def test_precomputed_log_probs(tmp_path: Path) -> None:
    policy, reference = policy_and_reference()
    pairs = random_pairs()
    theirs = their_step(trainer_of(copy.deepcopy(policy), reference, tokenised(pairs), tmp_path, precompute_ref_log_probs=True))
    same.assert_same_step(our_step(policy, reference, pairs, {}), theirs)


# from text -------------------------------------------------------------------------------------------------------------------------

TEXTS = (
    ("What is 12 + 1?", "13", "the in 12"), ("the capital of Japan", "Tokyo\n\n", "Rome"), ("hi", " a t", "b"),
    ("Ünï ☂?", "ÿes ☂☂", "no 1"),
)  # fmt: skip


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def conversations() -> list[dict[str, Any]]:
    return [{"prompt": _message("user", q), "chosen": _message("assistant", a), "rejected": _message("assistant", b)} for q, a, b in TEXTS]


def prepared(rows: Sequence[dict[str, Any]], folder: Path, template: str | None, **options: Any) -> list[Pair]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(prepare_preferences(load_rows(file), ChatFormat(tiny_tokenizer(template)), **{"max_length": 500} | options).pairs)


def _given(trainer: DPOTrainer) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("prompt_ids", "chosen_ids", "rejected_ids")} for row in trainer.train_dataset]


@pytest.mark.parametrize("shape", ["explicit prompt", "implicit prompt"])
def test_conversations(shape: str, tmp_path: Path) -> None:
    rows = conversations()
    if shape == "implicit prompt":
        rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    policy, reference = policy_and_reference()
    pairs = prepared(rows, tmp_path, END_IS_LAST)
    trainer = trainer_of(copy.deepcopy(policy), copy.deepcopy(reference), rows, tmp_path, tokenizer=tiny_tokenizer(END_IS_LAST))
    assert _given(trainer) == tokenised(pairs)
    same.assert_same_step(our_step(policy, reference, pairs, {}, budget=100), their_step(trainer))


def test_plain_text(tmp_path: Path) -> None:
    """Where no token spans the border between prompt and answer."""
    rows = [{"prompt": f"Q: {question}\nA:", "chosen": f" {good}", "rejected": f" {bad}"} for question, good, bad in TEXTS]
    policy, reference = policy_and_reference()
    pairs = prepared(rows, tmp_path, None)
    trainer = trainer_of(copy.deepcopy(policy), copy.deepcopy(reference), rows, tmp_path, tokenizer=tiny_tokenizer(None))
    assert _given(trainer) == tokenised(pairs)
    same.assert_same_step(our_step(policy, reference, pairs, {}, budget=60), their_step(trainer))


def test_trl_also_scores_what_the_template_prints_behind_the_end_token(tmp_path: Path) -> None:
    """The difference: ChatML prints a newline after every message. A model that has written its end token is never asked for it, so it is
    in no sum here; TRL sums it on both sides. Add it to the answers, and all is equal."""
    rows = conversations()
    policy, reference = policy_and_reference()
    pairs = prepared(rows, tmp_path, tiny_tokenizer().chat_template)
    trainer = trainer_of(copy.deepcopy(policy), copy.deepcopy(reference), rows, tmp_path)
    newline = tiny_tokenizer()("\n").input_ids
    longer = [{key: ids + (newline if key != "prompt_ids" else []) for key, ids in row.items()} for row in tokenised(pairs)]
    assert _given(trainer) == longer
    extended = [
        Pair(p.name, p.prompt_ids, *(Answer((*side.token_ids, *newline), (*side.scored, True)) for side in (p.chosen, p.rejected)))
        for p in pairs
    ]
    theirs = their_step(trainer)
    same.assert_same_step(our_step(copy.deepcopy(policy), reference, extended, {}, budget=100), theirs)
    assert same.largest_difference(our_step(policy, reference, pairs, {}, budget=100).gradients, theirs.gradients) > 1e-3


def test_trl_lets_a_token_span_the_border_of_prompt_and_answer(tmp_path: Path) -> None:
    """The difference: TRL encodes prompt and answer together and cuts where the prompt's tokens end to agree, so the model reads a prompt
    that it never sees at inference (trl#2054). Here the prompt's tokens are those of inference."""
    rows = [{"prompt": "Q t", "chosen": "he", "rejected": " a"}] * 2
    pairs = prepared(rows, tmp_path, None)
    policy, reference = policy_and_reference()
    theirs = _given(trainer_of(policy, reference, rows, tmp_path, tokenizer=tiny_tokenizer(None)))
    assert list(pairs[0].prompt_ids) == tiny_tokenizer(None)("Q t").input_ids
    assert len(theirs[0]["prompt_ids"]) < len(pairs[0].prompt_ids)


# kto -------------------------------------------------------------------------------------------------------------------------------


def labelled(labels: Sequence[bool]) -> list[LabelledAnswer]:
    pairs = random_pairs()
    return [LabelledAnswer(pair.name, pair.prompt_ids, pair.chosen, label) for pair, label in zip(pairs, labels, strict=True)]


class _GivenAnswers(KTOTrainer):
    """With the tokens that are there already. TRL gives each prompt the answer of the row before, postgrad that of the row after: the
    same mismatched answers when the rows come in the opposite order."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        if "prompt_ids" not in dataset.column_names:
            return super()._prepare_dataset(dataset, *args, **kwargs)
        answers = dataset["completion_ids"]
        return dataset.add_column("KL_completion_ids", [answers[-1], *answers[:-1]])


def kto_trainer(
    policy: Any, reference: Any, rows: Sequence[dict[str, Any]], folder: Path, *, tokenizer: Any = None, **config: Any
) -> KTOTrainer:
    batching = {"per_device_train_batch_size": len(rows), "max_steps": 1, "train_sampling_strategy": "sequential"}
    return _GivenAnswers(
        policy,
        ref_model=reference,
        args=KTOConfig(str(folder / "trl"), **trl_side._COMMON | batching | config),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer or tiny_tokenizer(),
    )


def our_kto_step(
    policy: nn.Module, reference: nn.Module, answers: Sequence[LabelledAnswer], loss: dict[str, Any], *, budget: int = 40
) -> same.Step:
    engine = same.RecordingEngine(policy, reference=same.FrozenReference(reference), tokens_per_micro_batch=budget)
    recipe = recipe_of({"kind": "kto"} | loss, len(answers), budget)
    metrics = KTO(recipe, None, engine, answers, []).step(1)  # type: ignore[arg-type]
    assert engine.micro_batches > 1
    return same.Step(metrics["loss"], engine.gradients[0], metrics)


MIXED = (True, False, True, True, False, False)
LABELS = {"mixed": MIXED, "all desirable": (True,) * 6, "all undesirable": (False,) * 6}


@pytest.mark.parametrize("swapped", [False, True], ids=["kl", "negative kl"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_kto_loss_and_every_gradient(beta: float, labels: str, swapped: bool, tmp_path: Path) -> None:
    models = policy_and_reference()
    policy, reference = models[::-1] if swapped else models
    answers = labelled(LABELS[labels])
    rows = [
        {"prompt_ids": list(item.prompt_ids), "completion_ids": list(item.answer.token_ids), "label": item.label} for item in answers[::-1]
    ]
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    trainer = kto_trainer(copy.deepcopy(policy), copy.deepcopy(reference), rows, tmp_path, beta=beta, **weights)
    theirs = their_step(trainer)
    ours = our_kto_step(policy, reference, answers, {"beta": beta} | weights)
    same.assert_same_step(ours, theirs)
    names = [name for name in theirs.metrics if name.startswith(("rewards/", "logps/")) or name in ("kl", "entropy", "num_tokens")]
    assert len(names) >= 5
    assert {name: ours.metrics[name] for name in names} == pytest.approx({name: theirs.metrics[name] for name in names}, rel=same.RELATIVE)


def test_labelled_conversations(tmp_path: Path) -> None:
    rows = [
        {"prompt": _message("user", question), "completion": _message("assistant", good), "label": number % 2 == 0}
        for number, (question, good, _) in enumerate(TEXTS)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = list(prepare_unpaired(load_rows(file), ChatFormat(tiny_tokenizer(END_IS_LAST)), max_length=500).answers)
    policy, reference = policy_and_reference()
    trainer = kto_trainer(copy.deepcopy(policy), copy.deepcopy(reference), rows[::-1], tmp_path, tokenizer=tiny_tokenizer(END_IS_LAST))
    expected = [(row["prompt_ids"], row["completion_ids"], row["label"]) for row in trainer.train_dataset][::-1]
    assert [(list(item.prompt_ids), list(item.answer.token_ids), item.label) for item in answers] == expected
    same.assert_same_step(our_kto_step(policy, reference, answers, {}, budget=60), their_step(trainer))
