"""Adapters: what is trained, what the reference is, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from postgrad.errors import CheckpointError, ModelError, RecipeError
from postgrad.models.loading import LanguageModel, Start, fingerprint, from_memory, load
from postgrad.models.lora import Lora, attach, merged_weights
from postgrad.models.reference import reference_of
from postgrad.models.saving import save
from postgrad.models.state import load_trainable_state, trainable_state
from postgrad.testing.tiny import ARCHITECTURES, tiny_model, tiny_tokenizer

IDS = torch.tensor([[1, 40, 41, 42, 43, 44]])


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def base(tmp_path) -> Path:
    return save(from_memory(tiny_model(), tiny_tokenizer()), tmp_path / "base")


@pytest.fixture
def trained(base, tmp_path) -> Path:
    """The adapter folder of a run that has trained an adapter on `base`."""
    lm = load(base, adapter=Lora(rank=4))
    train(lm, steps=3)
    return save(lm, tmp_path / "run" / "model") / "adapter"


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def train(lm: LanguageModel, *, steps: int = 1, learning_rate: float = 0.05) -> None:
    optimizer = torch.optim.SGD([parameter for parameter in lm.model.parameters() if parameter.requires_grad], lr=learning_rate)
    lm.model.train()
    for _ in range(steps):
        lm.model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    lm.model.eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_adapter_changes_no_output_and_only_its_fp32_weights_train(architecture):
    plain = logits(tiny_model(architecture))
    lm = from_memory(tiny_model(architecture), tiny_tokenizer(), adapter=Lora(rank=4))
    assert torch.equal(logits(lm.model), plain)
    trained = {name: parameter for name, parameter in lm.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name and parameter.dtype == torch.float32 for name, parameter in trained.items())
    before = {name: parameter.clone() for name, parameter in lm.model.named_parameters() if "lora_" not in name}
    train(lm)
    assert not torch.equal(logits(lm.model), plain)
    after = dict(lm.model.named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in before.items())


def test_all_linear_means_every_linear_layer_but_the_head(base):
    lm = load(base, adapter=Lora(rank=4))
    with_adapter = {name.split(".")[-2] for name, _ in lm.model.named_modules() if name.endswith("lora_A")}
    assert with_adapter == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_alpha_defaults_to_twice_the_rank_and_scales_the_adapter(base):
    assert load(base, adapter=Lora(rank=4)).model.peft_config["default"].lora_alpha == 8
    outputs = []
    for alpha in (4, 12):
        lm = load(base, adapter=Lora(rank=4, alpha=alpha, targets=["down_proj"]))
        torch.nn.init.ones_(lm.model.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight)
        weight = merged_weights(lm.model)["model.layers.1.mlp.down_proj.weight"]
        outputs.append(weight - lm.model.base_model.model.model.layers[1].mlp.down_proj.base_layer.weight)
    assert torch.allclose(outputs[1], 3 * outputs[0], atol=1e-6)


def test_adapter_start_depends_on_its_seed_only():
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return trainable_state(attach(tiny_model(), Lora(rank=4), seed=seed))

    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(456)
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights(1).items())
    assert any(not torch.equal(tensor, first[name]) for name, tensor in weights(2).items())


@pytest.mark.parametrize("targets", [["q_prj"], ["q_proj", "nothing"], ["proj"]])
def test_target_that_matches_no_module_is_a_recipe_error_with_candidates(base, targets):
    with pytest.raises(RecipeError, match="matches no module") as caught:
        load(base, adapter=Lora(targets=targets))
    assert "q_proj" in caught.value.hint
    assert caught.value.key == "adapter.targets"


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_tied_weights_cannot_carry_an_adapter(base, target):
    with pytest.raises(RecipeError, match="tied"):
        load(base, adapter=Lora(targets=["q_proj", target]))


@pytest.mark.parametrize("bad", [Lora(rank=0), Lora(dropout=1.0), Lora(dropout=-0.1)])
def test_impossible_rank_or_dropout_is_a_recipe_error(base, bad):
    with pytest.raises(RecipeError, match=r"must be"):
        load(base, adapter=bad)


# --- continuing a trained adapter -------------------------------------------------------------------------------------


def test_trained_adapter_continues_where_it_stopped(trained, tmp_path):
    lm = load(trained)
    assert lm.start is Start.TRAINED_ADAPTER
    merged = load(tmp_path / "run" / "model")
    assert torch.allclose(logits(lm.model), logits(merged.model), atol=1e-5)
    assert not torch.allclose(logits(lm.model), logits(tiny_model()), atol=1e-3)
    assert all("lora_" in name for name in trainable_state(lm.model))
    assert trainable_state(lm.model)
    assert not trainable_state(load(trained, trainable=False).model)


def test_recipe_may_state_the_same_adapter_but_not_another(trained):
    assert load(trained, adapter=Lora(rank=4, dropout=0.5)).model.peft_config["default"].lora_dropout == 0.5
    with pytest.raises(RecipeError, match="was trained with 4") as caught:
        load(trained, adapter=Lora(rank=8))
    assert caught.value.key == "adapter.rank"
    with pytest.raises(RecipeError, match=r"adapter\.alpha"):
        load(trained, adapter=Lora(rank=4, alpha=99))


def test_adapter_on_another_base_is_refused_with_both_hashes(trained, base):
    right = load(base).fingerprint
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    wrong = load(base).fingerprint
    with pytest.raises(ModelError, match="trained on another base") as caught:
        load(trained)
    assert right in caught.value.what
    assert wrong in caught.value.what


def test_foreign_adapter_without_a_fingerprint_loads(trained, base):
    edit(trained, lambda config: config.pop("auto_mapping"))
    assert load(trained).folder == base.resolve()


def edit(folder: Path, change) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(base_model_name_or_path=None) or c.pop("auto_mapping"), "does not say which model"),
        (lambda c: c.update(base_model_name_or_path="/gone") or c.pop("auto_mapping"), "base model was not found"),
        (lambda c: c.update(peft_type="IA3"), "IA3"),
        (lambda c: c.update(use_dora=True), "use_dora"),
        (lambda c: c.update(bias="all"), "bias"),
        (lambda c: c.update(modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda c: c.update(invented_in_2030=3), "invented_in_2030"),
        (lambda c: c.update(target_modules=["q_proj"]), "does not fit"),
        (lambda c: c.update(r=8), "does not fit"),
    ],
)
def test_adapter_that_cannot_be_read_exactly_is_refused(trained, change, message):
    edit(trained, change)
    with pytest.raises(ModelError, match=message):
        load(trained)


def test_adapter_lacking_a_weight_is_refused(trained):
    weights = load_file(trained / "adapter_model.safetensors")
    weights.pop(min(weights))
    save_file(weights, trained / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="1 weights are missing"):
        load(trained)


def test_pickle_adapter_is_never_opened(trained):
    (trained / "adapter_model.safetensors").unlink()
    (trained / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="only pickle weights"):
        load(trained)


# --- reference --------------------------------------------------------------------------------------------------------


def starts(base: Path, trained: Path) -> dict[Start, LanguageModel]:
    return {
        Start.FULL: load(base),
        Start.NEW_ADAPTER: load(base, adapter=Lora(rank=4, dropout=0.5)),
        Start.TRAINED_ADAPTER: load(trained, adapter=Lora(rank=4, dropout=0.5)),
    }


@pytest.mark.parametrize("start", list(Start))
def test_reference_is_the_policy_at_the_start_whatever_happens_after(base, trained, start):
    lm = starts(base, trained)[start]
    assert lm.start is start
    at_start = logits(lm.model)
    flags = {name: parameter.requires_grad for name, parameter in lm.model.named_parameters()}
    reference = reference_of(lm)
    assert {name: p.requires_grad for name, p in lm.model.named_parameters() if name in flags} == flags
    assert torch.equal(logits(lm.model), at_start)
    train(lm, steps=2)
    assert not torch.allclose(logits(lm.model), at_start, atol=1e-3)
    lm.model.train()  # dropout 0.5: the reference must not feel it
    with reference.active() as model:
        assert torch.equal(model(IDS).logits, at_start)
        assert not model(IDS).logits.requires_grad


@pytest.mark.parametrize("start", list(Start))
def test_policy_is_as_before_after_the_reference_was_active(base, trained, start):
    lm = starts(base, trained)[start]
    reference = reference_of(lm)
    train(lm)
    before, trainable = logits(lm.model), trainable_state(lm.model)
    lm.model.train()
    lm.model.base_model.requires_grad_(lm.model.base_model.training)  # any pattern of flags must come back
    flags = [parameter.requires_grad for parameter in lm.model.parameters()]
    with reference.active() as model:
        model(IDS)
    assert lm.model.training
    assert [parameter.requires_grad for parameter in lm.model.parameters()] == flags
    lm.model.eval()
    assert torch.equal(logits(lm.model), before)
    assert trainable


def test_policy_returns_even_when_the_reference_forward_fails(trained):
    lm = load(trained)
    reference = reference_of(lm)
    train(lm)
    before = logits(lm.model)
    with pytest.raises(ZeroDivisionError), reference.active():
        raise ZeroDivisionError
    assert torch.equal(logits(lm.model), before)
    assert lm.model.active_adapter == "default"


def test_reference_of_a_trained_adapter_is_not_the_bare_base(base, trained):
    lm = load(trained)
    with reference_of(lm).active() as model:
        assert not torch.allclose(model(IDS).logits, logits(load(base).model), atol=1e-3)


def test_reference_in_memory_shares_no_weight_with_the_policy():
    lm = from_memory(tiny_model(), tiny_tokenizer())
    reference = reference_of(lm)
    ours = {parameter.data_ptr() for parameter in lm.model.parameters()}
    assert ours.isdisjoint(parameter.data_ptr() for parameter in reference.model.parameters())
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


# --- trainable state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", list(Start))
def test_trainable_state_restores_a_run_bit_for_bit(base, trained, start):
    lm = starts(base, trained)[start]
    reference_of(lm)
    train(lm, steps=2)
    stored = {name: tensor.clone() for name, tensor in trainable_state(lm.model).items()}
    assert not any("reference" in name for name in stored)
    again = starts(base, trained)[start]
    reference = reference_of(again)
    with reference.active() as model:
        at_start = model(IDS).logits
    load_trainable_state(again.model, stored)
    assert fingerprint(again.model) == fingerprint(lm.model)
    assert torch.equal(logits(again.model), logits(lm.model))
    with reference.active() as model:
        assert torch.equal(model(IDS).logits, at_start)


def test_tied_weights_are_stored_once(base):
    names = trainable_state(load(base).model)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_state_of_another_model_is_refused_and_changes_nothing(base):
    lm = load(base)
    before = fingerprint(lm.model)
    good = {name: tensor.clone() + 1 for name, tensor in trainable_state(lm.model).items()}
    last = list(good)[-1]
    for bad in (
        {name: tensor for name, tensor in good.items() if name != last},
        good | {"extra": torch.zeros(1)},
        good | {last: torch.zeros(3)},
        good | {last: good[last].to(torch.bfloat16)},
    ):
        with pytest.raises(CheckpointError):
            load_trainable_state(lm.model, bad)
        assert fingerprint(lm.model) == before
