"""Scalar heads: one score per row, wherever the row stands, whatever pads it, and whoever opens the saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.errors import ModelError
from postgrad.models.engine import LocalEngine, OptimizerConfig
from postgrad.models.loading import LanguageModel, load
from postgrad.models.lora import Lora
from postgrad.models.saving import save
from postgrad.models.scalar import is_reward_model, is_scalar, load_scalar, padding_for
from postgrad.protocols import Loss
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.testing.tiny import ARCHITECTURES
from postgrad.types import TrainRow

END = 2
"""The end token of the tiny tokenizer, which is also its padding token."""
ROWS = (
    (1, 50, 60, 70, END),
    (1, 50, END, END, 61, 71, END),  # end tokens inside the prompt
    (1, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, END),
    (9, 10, 11, 12),  # cut: no end token
    (5,),
)


def write_model(folder: Path, architecture: Any = "llama", **options: Any) -> Path:
    tiny_model(architecture, vocab_size=268, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


def row(ids: tuple[int, ...]) -> TrainRow:
    """Read at its last token: where a next token would be predicted."""
    return TrainRow((*ids, 0), (False,) * len(ids) + (True,))


def values(engine: LocalEngine, *rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([value for (value,) in engine.values([row(ids) for ids in rows])])


def engine_of(lm: LanguageModel, **options: Any) -> LocalEngine:
    return LocalEngine(lm.model, reads="values", optimizer=OptimizerConfig(weight_decay=0.0), **options)


def padded(engine: LocalEngine) -> LocalEngine:
    engine._refusals[id(engine.model)] = "for this test"
    return engine


def step(lm: LanguageModel, learning_rate: float = 0.05, engine: LocalEngine | None = None) -> None:
    engine = engine or engine_of(lm)
    engine.forward_backward([row(ids) for ids in ROWS], lambda scores, rows: (torch.nn.functional.softplus(scores[:, 0]).sum(), {}))
    engine.optimizer_step(learning_rate)


# the score -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_has_one_score_alone_beside_longer_rows_and_padded(architecture, tmp_path):
    """trlx#474, DeepSpeedExamples#316."""
    lm = load_scalar(write_model(tmp_path, architecture))
    engine = engine_of(lm)
    together = values(engine, *ROWS)
    alone = torch.cat([values(engine, ids) for ids in ROWS])
    tight = values(engine_of(lm, tokens_per_micro_batch=1), *ROWS)
    fallback = values(padded(engine_of(lm)), *ROWS)
    for other in (alone, tight, fallback):
        assert (other - together).abs().max() < 1e-5
    assert together.std() > 0.1, "the scores should differ"


def test_the_score_is_the_head_on_the_hidden_state_of_the_last_token(base):
    """gpt-neox#1285: not the token before it, not the one after it."""
    lm = load_scalar(base)
    model: Any = lm.model
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ROWS[2]])).last_hidden_state[0]
        every = hidden @ model.score.weight[0]
    assert values(engine_of(lm), ROWS[2]).item() == pytest.approx(every[-1].item(), abs=1e-5)
    assert every.diff().abs().min() > 1e-3, "a neighbour's score should not pass for it"


def test_what_follows_the_last_token_changes_no_bit(base):
    engine = engine_of(load_scalar(base))
    one, other = (engine.values([TrainRow((*ROWS[0], next_id), (False,) * 5 + (True,))]) for next_id in (3, 200))
    assert one == other


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_gives_the_same_scores_on_a_padded_batch(architecture, side, tmp_path):
    """transformers#35352, trl#2778: the padding token is also the end token of the model that was trained."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    lm = load_scalar(write_model(tmp_path / "base", architecture))
    step(lm)
    save(lm, tmp_path / "saved")
    expected = values(engine_of(lm), *ROWS)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.pad_token_id == theirs.config.pad_token_id not in lm.stop_ids
    batch = tokenizer.pad({"input_ids": [list(ids) for ids in ROWS]}, padding_side=side, return_tensors="pt")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        scores = theirs(**batch, position_ids=positions).logits
    assert scores.shape == (len(ROWS), 1)
    assert (scores[:, 0] - expected).abs().max() < 1e-5


def test_without_an_id_to_spare_transformers_refuses_a_batch_and_scores_single_rows_right(tmp_path):
    """A vocabulary whose only special token ends every answer: any padding id would hide the last token."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    tiny_model(vocab_size=10, bos_token_id=None, eos_token_id=0, pad_token_id=0).save_pretrained(tmp_path / "base")
    vocabulary = {"<end>": 0} | {letter: index for index, letter in enumerate("abcdefghi", 1)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>", unk_token="<end>")
    tokenizer.save_pretrained(tmp_path / "base")
    lm = load_scalar(tmp_path / "base")
    assert padding_for(lm) is None
    save(lm, tmp_path / "saved")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    rows = ((4, 5, 0), (4, 0, 6, 0))
    with torch.no_grad():
        scores = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[0] for ids in rows])
        assert (scores - values(engine_of(lm), *rows)).abs().max() < 1e-5
        with pytest.raises(ValueError, match="padding token"):
            theirs(input_ids=torch.tensor([(4, 5, 0, 0), rows[1]]))


# the head --------------------------------------------------------------------------------------------------------------------------


def test_a_new_head_follows_from_the_seed_alone(base):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first: Any = load_scalar(base, seed=3).model
    assert torch.equal(torch.get_rng_state(), state), "loading should not move the global generator"
    torch.manual_seed(99)
    again: Any = load_scalar(base, seed=3).model
    other: Any = load_scalar(base, seed=4).model
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert first.score.weight.abs().min() > 0


def test_the_body_is_the_language_models(base):
    scalar, language = (dict(model.named_parameters()) for model in (load_scalar(base).model, load(base).model))
    assert set(language) - {"lm_head.weight"} == set(scalar) - {"score.weight"}
    assert all(torch.equal(scalar[name], language[name]) for name in scalar.keys() - {"score.weight"})


def test_a_saved_reward_model_keeps_its_head_whatever_the_seed(base, tmp_path):
    """trl#1379: a reload that draws a new head gives random scores."""
    lm = load_scalar(base, seed=1)
    step(lm)
    expected = values(engine_of(lm), *ROWS)
    save(lm, tmp_path / "saved")
    again = load_scalar(tmp_path / "saved", seed=2)
    assert torch.equal(values(engine_of(again), *ROWS), expected)
    assert is_reward_model(tmp_path / "saved")
    assert not is_reward_model(base)
    assert is_scalar(again.model)
    assert not is_scalar(load(base).model)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_beside_an_adapter_the_head_is_trained_whole_and_the_body_is_not(base, tmp_path, targets):
    """OpenRLHF#873: no adapter on the head, and no frozen head."""
    lm = load_scalar(base, adapter=Lora(rank=4, targets=targets), seed=1)
    model: Any = lm.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"base_model.model.score.weight"}
    assert not any("score" in name for name in before if "lora_" in name)
    engine = engine_of(lm)
    for _ in range(2):
        step(lm, engine=engine)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == trained
    save(lm, tmp_path / "saved")
    again = load_scalar(tmp_path / "saved", seed=9)
    assert (values(engine_of(again), *ROWS) - values(engine, *ROWS)).abs().max() < 1e-5


def test_a_full_model_trains_body_and_head(base):
    lm = load_scalar(base)
    before = {name: weight.detach().clone() for name, weight in lm.model.named_parameters()}
    step(lm)
    same = {name for name, weight in lm.model.named_parameters() if torch.equal(weight, before[name])}
    assert same == set()


def test_nothing_is_trained_when_only_scores_are_wanted(base):
    assert not any(weight.requires_grad for weight in load_scalar(base, trainable=False).model.parameters())


# what is refused -------------------------------------------------------------------------------------------------------------------


def test_a_language_model_is_no_reward_model_where_scores_are_wanted(base):
    with pytest.raises(ModelError, match="no scalar head"):
        load_scalar(base, new_head=False)


def test_a_body_with_gaps_is_refused_not_filled_with_random_numbers(base, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "layers.1.mlp.up_proj" not in name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        load_scalar(folder)


def test_a_reward_model_without_its_head_is_refused(base, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(load_scalar(base), tmp_path / "saved")
    weights = load_file(folder / "model.safetensors")
    weights.pop("score.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing.*score\.weight"):
        load_scalar(folder)


def test_a_head_of_several_labels_is_refused(tmp_path):
    from transformers import AutoModelForSequenceClassification

    folder = write_model(tmp_path / "base")
    three = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    three.save_pretrained(tmp_path / "three")
    tiny_tokenizer().save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError):
        load_scalar(tmp_path / "three")


def test_an_adapter_folder_is_refused_by_name(base, tmp_path):
    lm = load(base, adapter=Lora(rank=2))
    save(lm, tmp_path / "saved")
    with pytest.raises(ModelError, match="adapter folder"):
        load_scalar(tmp_path / "saved" / "adapter")


def test_an_engine_reads_what_it_was_made_for(base):
    scalar, language = engine_of(load_scalar(base)), LocalEngine(load(base).model)
    with pytest.raises(ValueError, match="reads values"):
        scalar.logprobs([row(ROWS[0])])
    with pytest.raises(ValueError, match="reads logprobs"):
        language.values([row(ROWS[0])])
    with pytest.raises(ModelError, match="no scalar head"):
        LocalEngine(load(base).model, reads="values")


def test_a_loss_of_constant_gradient_reads_values_too(base):
    """One pass is a way to read log-probs, whatever the loss knows of itself."""
    engine = engine_of(load_scalar(base))
    result = engine.forward_backward([row(ROWS[0])], Loss(lambda values, rows: (values.sum(), {}), constant_gradient=True))
    assert result.loss == pytest.approx(values(engine, ROWS[0]).item())


def test_the_model_card_says_what_it_is(base, tmp_path):
    folder = save(load_scalar(base), tmp_path / "saved")
    assert "text-classification" in (folder / "README.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["num_labels"] == 1 if "num_labels" in config else len(config["id2label"]) == 1
