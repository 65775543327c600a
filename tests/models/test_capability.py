"""Which models take the packed path is decided by what they compute, not by their name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from postgrad.errors import ModelError
from postgrad.models.capability import check_head, packed_refusal
from postgrad.testing import ARCHITECTURES, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model_of(config: str, **overrides: Any) -> Any:
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**(SMALL | overrides))).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_standard_decoders_are_packed(architecture: Any) -> None:
    model = tiny_model(architecture)
    check_head(model)
    assert packed_refusal(model) is None
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("MistralConfig", {"sliding_window": None}),
        ("GemmaConfig", {"head_dim": 8}),
        ("GPTNeoXConfig", {}),
        ("Phi3Config", {}),
        ("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("GraniteConfig", {"logits_scaling": 4.0}),
        ("CohereConfig", {}),
        (
            "Gemma2Config",
            {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 0.5, "layer_types": ["full_attention"] * 2},
        ),
    ],
)
def test_other_decoders_are_packed_too(config: str, overrides: dict[str, Any]) -> None:
    """Experts, logit scales, other norms and fused projections need no code of ours."""
    model = model_of(config, **overrides)
    check_head(model)
    assert packed_refusal(model) is None


@pytest.mark.parametrize(
    ("config", "overrides", "reason"),
    [
        ("MistralConfig", {"sliding_window": 4096}, "sliding window of 4096"),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, "sliding_attention"),
        ("Gemma2Config", {"head_dim": 8}, "attn_logit_softcapping"),
        ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4}, "sliding_attention"),
        ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}, "s_aux"),
        ("BloomConfig", {"n_head": 4, "n_layer": 2}, "does not let its attention be replaced"),
        ("JambaConfig", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, "linear_attention"),
    ],
)
def test_attention_that_a_flat_row_cannot_express_is_refused(config: str, overrides: dict[str, Any], reason: str) -> None:
    assert reason in (packed_refusal(model_of(config, **overrides)) or "")


def test_a_model_that_mixes_tokens_outside_attention_is_found_by_the_probe() -> None:
    """No config says so: each token's embedding leaks into the next, as a convolution or a recurrence would."""

    class Leaky(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            embedded = super().forward(ids)
            return embedded + 0.1 * nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]

    model = tiny_model()
    leaky = Leaky(288, 32)
    leaky.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = leaky
    assert packed_refusal(model) == "packed rows come out different from the same rows one at a time"


def test_attention_that_never_asks_the_interface_is_found() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    assert packed_refusal(model) == "its attention does not go through transformers' AttentionInterface"


def test_a_head_that_does_more_than_a_linear_map_is_refused() -> None:
    model = tiny_model("qwen3")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 3 * torch.tanh(plain(hidden))
    with pytest.raises(ModelError, match="computes its logits in a way"):
        check_head(model)


def test_checks_leave_the_model_as_it_was() -> None:
    model = tiny_model(dropout=0.5).train()
    model.model.layers[0].eval()
    model.config.use_cache = True
    check_head(model)
    packed_refusal(model)
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training
    assert all(parameter.grad is None for parameter in model.parameters())
