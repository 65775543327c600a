"""A `.gguf` file becomes a transformers folder once, with the tokens the model was trained on."""

import multiprocessing
import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from postgrad.cache import build_once, cache_folder
from postgrad.errors import ModelError
from postgrad.models import gguf as conversion
from postgrad.models.loading import load, load_tokenizer
from postgrad.testing.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp stores the two halves of each rotary head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, *, pre: str | None = "smollm", rope_freqs: bool = False, end_of_turn: int | None = None) -> Path:
    """The tiny model as llama.cpp's converter would write it."""
    model, tokenizer = tiny_model(vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges(["t h", "th e", "Ġ t", "Ġ a", "i n", "Ċ Ċ", ") b", "1 2", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = interleaved(weight, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_gives_the_model_it_was_made_from(tmp_path, capfd):
    lm = load(write_gguf(tmp_path / "tiny.gguf"))
    ids = torch.tensor([[1, 40, 41, 42, 43]])
    with torch.no_grad():
        expected = tiny_model(vocab_size=len(tiny_tokenizer()))(ids).logits
        assert torch.allclose(lm.model(ids).logits, expected, atol=1e-5)
    assert lm.model.config.tie_word_embeddings
    assert not hasattr(lm.model.config, "quantization_config")
    assert lm.model.config.max_position_embeddings == lm.tokenizer.model_max_length == 512
    assert lm.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_digits_are_split_first_where_the_file_says_so(tmp_path):
    """GPT-2's split would make "\\n", "\\n", "12" of it."""
    tokenizer, _ = load_tokenizer(write_gguf(tmp_path / "tiny.gguf", pre="smollm"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == ["ĊĊ", "1", "2"]
    tokenizer, _ = load_tokenizer(write_gguf(tmp_path / "other.gguf", pre="gpt-2"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == ["Ċ", "Ċ", "12"]


@pytest.mark.parametrize("pre", ["some-new-split", "default", None])
def test_unknown_split_of_text_is_refused(tmp_path, pre):
    with pytest.raises(ModelError, match="tokens would be wrong"):
        load_tokenizer(write_gguf(tmp_path / "tiny.gguf", pre=pre))


def test_scaled_rotary_positions_that_transformers_drops_are_refused(tmp_path):
    with pytest.raises(ModelError, match="rotary positions"):
        load(write_gguf(tmp_path / "tiny.gguf", rope_freqs=True))


def test_every_end_token_of_the_file_ends_a_turn(tmp_path):
    assert load_tokenizer(write_gguf(tmp_path / "tiny.gguf", end_of_turn=0))[1] == {0, 2}


def test_conversion_happens_once_per_content(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    first = load(file).folder
    assert {path.stat().st_mode & 0o777 for path in first.iterdir()} == {first.stat().st_mode & 0o666}  # other users may share the cache
    monkeypatch.setattr(conversion, "_convert", lambda *args: pytest.fail("converted twice"))
    assert load(file).folder == first
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(pytest.fail.Exception):
        load(file)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"GGUF", b"GGUF" + b"\xff" * 40])
def test_file_that_is_no_gguf_is_a_model_error(tmp_path, content):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ModelError):
        load(tmp_path / "broken.gguf")


def test_truncated_gguf_is_a_model_error_and_leaves_nothing_behind(tmp_path, cache):
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError):
        load(file)
    assert [path for path in (cache / "gguf").iterdir() if path.is_dir()] == []


# --- the cache --------------------------------------------------------------------------------------------------------


def test_half_made_folder_is_never_used(cache):
    def dies(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(cache / "thing", dies)
    assert not (cache / "thing").exists()
    (cache / ".thing.tmp-99-killed").mkdir()  # what SIGKILL would leave
    made = build_once(cache / "thing", lambda folder: (folder / "whole").touch())
    assert {file.name for file in made.iterdir()} == {"whole", "MANIFEST.json"}
    assert sorted(path.name for path in cache.iterdir()) == ["thing", "thing.lock"]


def _builder(target: str, log: str) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as handle:
            handle.write(f"{os.getpid()}\n")
        time.sleep(0.5)  # long enough that the others come while it is being built
        (folder / "whole").touch()

    assert (build_once(Path(target), build) / "whole").exists()


def test_two_processes_build_it_once(cache, tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_builder, args=(str(cache / "thing"), str(log))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_unwritable_cache_names_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "file" / "inside"))
    with pytest.raises(ModelError) as caught:
        build_once(cache_folder() / "thing", lambda folder: None)
    assert "POSTGRAD_CACHE" in caught.value.hint
