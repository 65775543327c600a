"""What is saved opens everywhere and is the same model, the same tokens and the same end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from postgrad.errors import ModelError
from postgrad.models import saving
from postgrad.models.loading import LanguageModel, fingerprint, from_memory, load, load_tokenizer
from postgrad.models.lora import Lora
from postgrad.models.saving import save
from postgrad.testing.tiny import ARCHITECTURES, tiny_model, tiny_tokenizer

IDS = torch.tensor([[1, 40, 41, 42, 43, 44]])
MESSAGES = [{"role": "user", "content": "is 12 the\n\n12?"}, {"role": "assistant", "content": "in a (a)b"}]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def adapted(architecture="llama", *, targets="all-linear") -> LanguageModel:
    """A model whose adapter does something."""
    lm = from_memory(tiny_model(architecture), tiny_tokenizer(), adapter=Lora(rank=4, dropout=0.3, targets=targets))
    torch.manual_seed(0)
    for name, parameter in lm.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return lm


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_folder_opens_in_transformers_with_equal_logits(architecture, tmp_path):
    lm = from_memory(tiny_model(architecture), tiny_tokenizer())
    folder = save(lm, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert torch.equal(logits(model), logits(lm.model))
    assert model.config.tie_word_embeddings == lm.model.config.tie_word_embeddings


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    folder = save(from_memory(tiny_model(), tiny_tokenizer()), tmp_path / "model")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert [name for name in file.keys() if "embed" in name or "lm_head" in name] == ["model.embed_tokens.weight"]  # noqa: SIM118
    model = load(folder).model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_tokenizer_and_template_are_identical_after_reload(tmp_path):
    lm = from_memory(tiny_model(), tiny_tokenizer())
    folder = save(lm, tmp_path / "model")
    expected = lm.tokenizer.apply_chat_template(MESSAGES)["input_ids"]
    for tokenizer in (AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)[0]):
        assert tokenizer.apply_chat_template(MESSAGES)["input_ids"] == expected
        assert tokenizer.chat_template == lm.tokenizer.chat_template
        assert tokenizer.get_vocab() == lm.tokenizer.get_vocab()
        assert tokenizer.special_tokens_map == lm.tokenizer.special_tokens_map
        assert tokenizer.backend_tokenizer.to_str() == lm.tokenizer.backend_tokenizer.to_str()


def test_generation_config_lists_every_end_token(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = [0, 7]
    folder = save(from_memory(model, tiny_tokenizer()), tmp_path / "model")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 2, 7]
    assert load(folder).stop_ids == {0, 2, 7}
    assert model.generation_config.eos_token_id == [0, 7]


def test_sampling_settings_of_the_base_survive(tmp_path):
    """transformers refuses to save a temperature without do_sample; released models ship exactly that."""
    model = tiny_model()
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, None
    config = GenerationConfig.from_pretrained(save(from_memory(model, tiny_tokenizer()), tmp_path / "model"))
    assert config.temperature == 0.7


def test_quantization_config_is_not_written_and_the_live_model_is_untouched(tmp_path):
    lm = from_memory(tiny_model(), tiny_tokenizer())
    lm.model.config.quantization_config = {"quant_method": "gguf"}
    before = (fingerprint(lm.model), lm.model.config.to_dict())
    folder = save(lm, tmp_path / "model", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (fingerprint(lm.model), lm.model.config.to_dict()) == before
    AutoModelForCausalLM.from_pretrained(folder)


def test_stored_dtype_can_be_chosen_and_is_stated(tmp_path):
    lm = from_memory(tiny_model(), tiny_tokenizer())
    folder = save(lm, tmp_path / "model", dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    expected = {name: parameter.bfloat16() for name, parameter in tiny_model().named_parameters()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapter_is_merged_into_the_model_and_kept_beside_it(architecture, tmp_path):
    lm = adapted(architecture)
    before = fingerprint(lm.model)
    folder = save(lm, tmp_path / "model")
    assert fingerprint(lm.model) == before
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(merged), logits(lm.model), atol=1e-4)
    assert not torch.allclose(logits(merged), logits(tiny_model(architecture)), atol=1e-2)
    assert not any("lora" in name for name, _ in merged.named_parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_adapter_folder_opens_in_peft(tmp_path):
    from peft import AutoPeftModelForCausalLM

    base = save(from_memory(tiny_model(), tiny_tokenizer()), tmp_path / "base")
    lm = load(base, adapter=Lora(rank=4))
    for name, parameter in lm.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.05)
    folder = save(lm, tmp_path / "model") / "adapter"
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(model), logits(lm.model), atol=1e-6)
    note = json.loads((folder / "adapter_config.json").read_text())["auto_mapping"]["postgrad"]
    assert note == {"base": str(base.resolve()), "base_fingerprint": lm.fingerprint}


def test_untied_embedding_can_carry_an_adapter(tmp_path):
    lm = from_memory(tiny_model(tie_word_embeddings=False), tiny_tokenizer(), adapter=Lora(rank=4, targets=["embed_tokens", "lm_head"]))
    for name, parameter in lm.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    merged = load(save(lm, tmp_path / "model")).model
    assert torch.allclose(logits(merged), logits(lm.model), atol=1e-4)
    assert torch.allclose(logits(load(adapter_on_disk(lm, tmp_path)).model), logits(lm.model), atol=1e-5)


def adapter_on_disk(lm: LanguageModel, tmp_path: Path) -> Path:
    """The adapter of `lm`, with its base on disk."""
    base = save(from_memory(tiny_model(tie_word_embeddings=False), tiny_tokenizer()), tmp_path / "base")
    folder = save(lm, tmp_path / "again") / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    config["auto_mapping"]["postgrad"]["base"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_model_card_names_facts_and_end_tokens(tmp_path):
    card = (save(adapted(), tmp_path / "model", facts={"Method": "SFT, 3 steps"}) / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for text in ("- Method: SFT, 3 steps", "`<|im_end|>` (2)", "adapter/", "AutoModelForCausalLM"):
        assert text in card
    assert "base_model:" not in card  # the hub takes hub ids only


def test_model_card_names_the_hub_model_through_saved_stages_and_no_path(tmp_path):
    lm = replace(from_memory(tiny_model(), tiny_tokenizer()), base_name="smollm2-135m")
    first = save(lm, tmp_path / "sft")
    card = (save(load(first), tmp_path / "grpo") / "README.md").read_text()
    assert 'base_model: "HuggingFaceTB/SmolLM2-135M-Instruct"' in card
    assert str(tmp_path) not in card


def test_earlier_model_is_replaced_and_stays_when_saving_fails(tmp_path, monkeypatch):
    lm = from_memory(tiny_model(), tiny_tokenizer())
    folder = save(lm, tmp_path / "model")
    save(from_memory(tiny_model(seed=1), tiny_tokenizer()), folder)
    assert torch.equal(logits(load(folder).model), logits(tiny_model(seed=1)))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "_write_tokenizer", full)
    with pytest.raises(ModelError, match="no space left"):
        save(lm, folder)
    assert torch.equal(logits(load(folder).model), logits(tiny_model(seed=1)))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folder_with_other_files_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("three years of work")
    with pytest.raises(ModelError, match="other files"):
        save(from_memory(tiny_model(), tiny_tokenizer()), tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    with pytest.raises(ModelError, match="this is a file"):
        save(from_memory(tiny_model(), tiny_tokenizer()), tmp_path / "thesis.tex")


def test_saved_files_are_readable_by_others(tmp_path):
    folder = save(from_memory(tiny_model(), tiny_tokenizer()), tmp_path / "model")
    modes = {file.stat().st_mode & 0o777 for file in folder.iterdir() if file.is_file()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}
