"""Which names lead to a model, and what happens with everything that is none."""

import json
import pickle
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

from postgrad.errors import DataError, ModelError, RecipeError
from postgrad.models import dtype as dtypes
from postgrad.models import hub
from postgrad.models.loading import Start, fingerprint, from_memory, load, load_tokenizer
from postgrad.models.saving import save
from postgrad.models.scalar import load_scalar
from postgrad.testing.tiny import tiny_model, tiny_tokenizer

IDS = torch.tensor([[1, 40, 41, 42, 43, 44]])


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder as `transformers` itself writes it."""
    path = tmp_path / "plain"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_transformers_folder_loads_with_the_same_logits(folder):
    lm = load(folder)
    assert torch.equal(logits(lm.model), logits(tiny_model()))
    assert (lm.name, lm.folder, lm.start, lm.stop_ids) == (str(folder), folder.resolve(), Start.FULL, frozenset({2}))
    assert not lm.model.training


@pytest.mark.parametrize("read", [load, load_scalar])
def test_weights_lie_in_memory_of_their_own_on_the_grid_of_64_bytes(folder, read):
    """A file that is mapped puts them where its header ends: products are slower there, differ in last bits and change with the file."""
    file = folder / "model.safetensors"
    model = read(folder).model
    mark = fingerprint(model)
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}
    assert str(file) not in Path("/proc/self/maps").read_text()
    with file.open("r+b") as opened:
        opened.seek(-1000, 2)
        opened.write(bytes(1000))
    assert fingerprint(model) == mark


def test_half_precision_weights_are_trained_in_fp32(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    lm = load(tmp_path / "half")
    assert {parameter.dtype for parameter in lm.model.parameters()} == {torch.float32}
    assert lm.model.config.dtype == torch.float32


@pytest.mark.parametrize("trainable", [True, False])
def test_trainable_decides_which_weights_get_gradients(folder, trainable):
    assert {parameter.requires_grad for parameter in load(folder, trainable=trainable).model.parameters()} == {trainable}


def test_run_directory_means_its_model(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("method: sft\n")
    with pytest.raises(ModelError, match=r"not written its model/ yet") as caught:
        load(run)
    assert "resume" in caught.value.hint
    folder.rename(run / "model")
    assert torch.equal(logits(load(run).model), logits(tiny_model()))


def test_a_relative_path_is_recorded_as_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert load("plain").base_name == str(folder.resolve())


# --- what is no model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "models/nothing.gguf", "a/b/c"])
def test_missing_path_says_what_is_expected_and_asks_no_network(name, monkeypatch):
    monkeypatch.setattr(hub, "fetch", lambda *args, **kwargs: pytest.fail("the hub was asked for a path"))
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        load(name)
    assert "a transformers folder" in caught.value.hint
    assert caught.value.exit_code == 5


def test_misspelt_builtin_name_gets_a_suggestion(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError) as caught:
        load("smolm2-135m")
    assert "smollm2-135m" in caught.value.hint


def test_file_empty_folder_and_folder_without_config_are_named(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="this is a file"):
        load(tmp_path / "weights.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="the folder is empty"):
        load(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path)


class _Trap:
    def __reduce__(self):
        return (Path.touch, (Path("trap-was-opened"),))


def test_pickle_weights_are_refused_and_never_opened(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(ModelError, match="only pickle weights here") as caught:
        load(folder)
    assert "convert" in caught.value.hint
    assert not (tmp_path / "trap-was-opened").exists()


def test_pickle_beside_safetensors_is_ignored(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))
    load(folder)
    assert not (tmp_path / "trap-was-opened").exists()


def test_truncated_weights_name_the_file_and_both_sizes(folder):
    file = folder / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated or damaged") as caught:
        load(folder)
    assert caught.value.where == str(file)
    assert f"{size - 100:,} bytes" in caught.value.what
    assert f"{size:,}" in caught.value.what


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (10**6).to_bytes(8, "little") + b"{", (5).to_bytes(8, "little") + b"[1,2]"])
def test_damaged_weight_header_is_a_model_error(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="truncated or damaged"):
        load(folder)


def test_missing_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path / "m", max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    load(tmp_path / "m")
    victim = sorted((tmp_path / "m").glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"weight files are missing: {victim.name}"):
        load(tmp_path / "m")


def test_weight_absent_from_the_file_is_never_filled_with_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_weights_that_the_model_does_not_use_are_reported(folder, caplog):
    edit_json(folder / "config.json", num_hidden_layers=1)
    load(folder)
    assert "9 weights of the file are not used" in caplog.text
    assert "model.layers.1." in caplog.text


def test_config_of_another_size_is_a_model_error(folder):
    edit_json(folder / "config.json", intermediate_size=48)
    with pytest.raises(ModelError):
        load(folder)


def test_broken_config_is_a_model_error(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read this file"):
        load(folder)


def test_reward_model_is_not_taken_for_a_language_model(folder):
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        load(folder)


def test_python_code_beside_the_model_is_never_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "modeling_evil.py").write_text("import pathlib; pathlib.Path('code-was-run').touch()\n")
    edit_json(
        folder / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"},
    )
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "never runs" in caught.value.hint
    assert not (tmp_path / "code-was-run").exists()


# --- tokenizer --------------------------------------------------------------------------------------------------------


def test_tokenizer_with_more_ids_than_embedding_rows_is_a_data_error(tmp_path):
    ids = len(tiny_tokenizer())
    tiny_model(vocab_size=ids - 1).save_pretrained(tmp_path / "m")  # one too few
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    for call in (load, load_tokenizer):
        with pytest.raises(DataError, match=f"the model has {ids - 1} embedding rows") as caught:
            call(tmp_path / "m")
        assert caught.value.exit_code == 3
    tiny_model(vocab_size=ids).save_pretrained(tmp_path / "fits")
    tiny_tokenizer().save_pretrained(tmp_path / "fits")
    load(tmp_path / "fits")


def test_missing_tokenizer_is_a_model_error(folder):
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(folder)


def test_stop_ids_are_those_of_the_generation_config_and_of_the_tokenizer(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[0, 5])
    assert load_tokenizer(folder)[1] == load(folder).stop_ids == {0, 2, 5}
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=[7, 2])
    assert load_tokenizer(folder)[1] == {2, 7}


def test_load_tokenizer_reads_no_weights(folder):
    (folder / "model.safetensors").unlink()
    tokenizer, _ = load_tokenizer(folder)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer("the cat 12")["input_ids"] == tiny_tokenizer()("the cat 12")["input_ids"]


@pytest.mark.parametrize("stated", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
def test_tokenizer_json_decides_the_split_whatever_class_the_config_names(folder, stated):
    """transformers 5 replaces the split of tokenizer.json for some class names; digits would become other tokens."""
    tokenizer = tiny_tokenizer()
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class=stated)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded, _ = load_tokenizer(folder)
    for text in ("a\n\n12 the", "  12", "in 1  2", "it's the 12)b"):
        assert loaded(text, add_special_tokens=False)["input_ids"] == plain.encode(text, add_special_tokens=False).ids
    assert len(loaded("\n\n12")["input_ids"]) == 3  # "\n\n", "1", "2": the split that a GPT-2 pattern would not make


# --- network ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_without_any_network(folder, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("the network was used"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("a name was looked up"))
    load(folder)
    load_tokenizer(folder)


def test_unreachable_hub_is_a_model_error_with_a_hint(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="the hub cannot be reached") as caught:
        load("some-org/some-model")
    assert "folder on this machine" in caught.value.hint


def test_hub_model_with_only_pickle_weights_is_not_downloaded(monkeypatch):
    class Info:
        sha = "0" * 40
        siblings = (type("File", (), {"rfilename": "pytorch_model.bin"}),)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: Info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("it was downloaded"))
    with pytest.raises(ModelError, match="only pickle weights"):
        load("some-org/some-model")


def test_hub_snapshot_is_used_as_a_folder_and_asks_for_no_pickle(folder, monkeypatch):
    asked = {}

    class Info:
        sha = "f" * 40
        siblings = (type("File", (), {"rfilename": "model.safetensors"}),)

    def download(hub_id, **kwargs):
        asked.update(kwargs, hub_id=hub_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: Info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    lm = load("some-org/some-model")
    assert lm.base_name == "some-org/some-model"
    assert (asked["hub_id"], asked["revision"]) == ("some-org/some-model", "f" * 40)
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


# --- dtype ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_it", "expected"), [(True, torch.bfloat16), (False, None)])
def test_auto_is_bf16_exactly_where_the_processor_has_it(folder, monkeypatch, has_it, expected):
    monkeypatch.setattr(dtypes, "bf16_supported", lambda device: has_it)
    lm = load(folder, device="cpu")
    assert lm.autocast is expected
    assert {parameter.dtype for parameter in lm.model.parameters()} == {torch.float32}
    assert load(folder, dtype="float32", device="cpu").autocast is None


def test_bf16_where_the_processor_lacks_it_is_a_recipe_error_before_loading(monkeypatch):
    monkeypatch.setattr(dtypes, "bf16_supported", lambda device: False)
    with pytest.raises(RecipeError, match="no bfloat16 arithmetic"):
        load("/nowhere", dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("name", ["float16", "fp16", "int8"])
def test_other_dtypes_are_recipe_errors(name):
    with pytest.raises(RecipeError):
        load("/nowhere", dtype=name, device="cpu")


def test_cpu_features_decide_bf16(monkeypatch):
    cpu = torch.device("cpu")
    for features, expected in (
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False}, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        assert dtypes.bf16_supported(cpu) is expected


def test_autocast_computes_in_bf16_and_none_in_fp32():
    a = torch.randn(4, 4)
    with dtypes.autocast(torch.bfloat16, torch.device("cpu")):
        assert (a @ a).dtype == torch.bfloat16
    with dtypes.autocast(None, torch.device("cpu")):
        assert (a @ a).dtype == torch.float32


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprint_depends_on_the_weights_and_not_on_the_files(folder, tmp_path):
    tiny_model().save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(tmp_path / "sharded")
    assert load(folder).fingerprint == load(tmp_path / "sharded").fingerprint == load(folder).fingerprint
    weights = load_file(folder / "model.safetensors")
    before = load(folder).fingerprint
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).fingerprint != before


def test_fingerprint_of_live_weights_sees_one_changed_number(folder):
    model = load(folder).model
    before = fingerprint(model)
    assert fingerprint(model) == before == from_memory(tiny_model(), tiny_tokenizer()).fingerprint
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-4
    assert fingerprint(model) != before


def test_in_memory_model_needs_no_path():
    model = tiny_model()
    lm = from_memory(model, tiny_tokenizer(), dtype="float32")
    assert lm.model is model
    assert (lm.folder, lm.name, lm.stop_ids, lm.autocast) == (None, "in-memory", {2}, None)
    with pytest.raises(DataError):
        from_memory(tiny_model(vocab_size=100), tiny_tokenizer())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2"])
def test_every_architecture_survives_save_and_load(architecture, tmp_path):
    lm = from_memory(tiny_model(architecture), tiny_tokenizer())
    assert torch.equal(logits(load(save(lm, tmp_path / "m")).model), logits(lm.model))
