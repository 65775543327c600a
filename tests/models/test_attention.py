"""A layout reaches the attention of stock models, and nothing stays behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from postgrad.errors import ModelError
from postgrad.models import attention
from postgrad.models.attention import attend_with, body, output_head, pretrained
from postgrad.models.layout import PackedLayout
from postgrad.models.segments import Segment
from postgrad.testing import ARCHITECTURES, tiny_model

IDS = torch.tensor([[5, 9, 200, 31, 8, 77, 3]])
POSITIONS = torch.arange(7)[None]
WHOLE = PackedLayout((Segment(0, 7),))


class Recorder:
    """Notes what each layer asks for, and answers as one causal sequence."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        self.calls.append(
            SimpleNamespace(layer=layer, query=query.shape, key=key.shape, value=value.shape, scaling=scaling, dropout=dropout)
        )
        return WHOLE.attend(layer, query, key, value, scaling=scaling, dropout=0.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layer_of_a_stock_model_asks_the_layout(architecture: str) -> None:
    model = tiny_model(architecture, dropout=0.25)  # type: ignore[arg-type]
    recorder = Recorder()
    with attend_with(model, recorder):
        hidden = body(model, IDS, POSITIONS)
        model.train()
        body(model, IDS, POSITIONS)
    key_heads = 4 if architecture == "gpt2" else 2
    assert [call.layer for call in recorder.calls] == [0, 1, 0, 1]
    assert {call.query for call in recorder.calls} == {(4, 7, 8)}
    assert {call.key for call in recorder.calls} == {call.value for call in recorder.calls} == {(key_heads, 7, 8)}
    assert [call.scaling for call in recorder.calls] == pytest.approx([8**-0.5] * 4)
    assert [call.dropout for call in recorder.calls] == [0.0, 0.0, 0.25, 0.25]
    head = output_head(model)
    torch.testing.assert_close(hidden @ head.weight.T, model.eval()(IDS).logits[0], rtol=0, atol=1e-5)


def test_the_models_own_attention_is_back_afterwards() -> None:
    model = tiny_model()
    before = model(IDS).logits
    with attend_with(model, WHOLE):
        body(model, IDS, POSITIONS)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(IDS).logits, before)


def test_an_exception_leaves_no_layout_behind() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="describes 9 tokens"), attend_with(model, PackedLayout((Segment(0, 9),))):
        body(model, IDS, POSITIONS)
    assert model.config._attn_implementation == "sdpa"
    assert attention._active == {}


def test_an_inner_layout_wins_until_it_ends() -> None:
    model, outer, inner = tiny_model(), Recorder(), Recorder()
    with attend_with(model, outer):
        with attend_with(model, inner):
            body(model, IDS, POSITIONS)
        assert (len(outer.calls), len(inner.calls)) == (0, 2)
        body(model, IDS, POSITIONS)
    assert (len(outer.calls), len(inner.calls)) == (2, 2)


def test_two_models_never_share_a_layout() -> None:
    first, second, mine, other = tiny_model(), tiny_model(seed=1), Recorder(), Recorder()
    with attend_with(first, mine), attend_with(second, other):
        body(first, IDS, POSITIONS)
    assert (len(mine.calls), len(other.calls)) == (2, 0)


def test_gradient_checkpointing_runs_the_forward_again_under_the_same_layout() -> None:
    model = tiny_model().train()
    with attend_with(model, WHOLE):
        body(model, IDS, POSITIONS).sum().backward()
    expected = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recorder = Recorder()
    with attend_with(model, recorder):
        body(model, IDS, POSITIONS).sum().backward()
    assert len(recorder.calls) == 4
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, expected)


@pytest.mark.parametrize("argument", ["sliding_window", "softcap", "s_aux", "position_bias"])
def test_attention_that_a_flat_row_cannot_represent_is_refused(argument: str) -> None:
    model = tiny_model()
    module = model.model.layers[0].self_attn
    operands = [torch.zeros(1, heads, 7, 8) for heads in (4, 2, 2)]
    with attend_with(model, WHOLE), pytest.raises(ModelError, match=argument):
        attention._attention(module, *operands, None, **{argument: 4})


def test_a_padded_batch_never_reaches_a_layout() -> None:
    model = tiny_model()
    with attend_with(model, WHOLE), pytest.raises(ModelError, match="a batch of 2"):
        body(model, IDS.expand(2, -1), POSITIONS.expand(2, -1))


def test_adapters_are_part_of_the_body() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model()
    plain = body(model, IDS, POSITIONS)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with attend_with(adapted, WHOLE):
        hidden = body(adapted, IDS, POSITIONS)
    assert not torch.allclose(hidden, plain)
    with adapted.disable_adapter(), attend_with(adapted, WHOLE):
        torch.testing.assert_close(body(adapted, IDS, POSITIONS), plain, rtol=0, atol=1e-5)


def test_the_head_is_refused_where_its_weight_is_not_the_whole_story() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model("qwen3"), peft.LoraConfig(target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ModelError, match="head of type"):
        output_head(adapted)


def test_a_head_that_is_trained_beside_the_adapter_is_the_one_in_use() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model("qwen3"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    trained = output_head(adapted).weight
    assert trained.requires_grad
    with adapted.disable_adapter():
        assert output_head(adapted).weight is not trained


def test_logit_scales_are_part_of_the_head() -> None:
    model = tiny_model()
    model.config.logits_scaling = 4.0
    assert output_head(model).scale == 0.25
    model.config.logits_scaling, model.config.logit_scale = 1.0, 0.5
    assert output_head(model).scale == 0.5


def test_what_is_no_causal_language_model_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear is no transformers model"):
        pretrained(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no head"):
        output_head(tiny_model().model)
    with pytest.raises(ModelError, match="no body"):
        body(tiny_model().model, IDS, POSITIONS)


def test_prompt_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="virtual tokens"):
        body(adapted, IDS, POSITIONS)
