"""Which weights are sampled from: the live ones as they are now, adapters included, or a copy that follows them."""

from __future__ import annotations

import copy
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from postgrad.models.linears import computed_by
from postgrad.models.sampler import LocalSampler
from postgrad.models.serving import PackedLinear, Serving, can_pack, few_rows, fingerprint, serving_dtype
from postgrad.protocols import Completion, SampleKey, SamplingParams, TurnRequest
from postgrad.testing.tiny import ARCHITECTURES, Architecture, tiny_model

REQUESTS = [TurnRequest(SampleKey(0, 0, 0, sample), 0, (20, 30, 40), 12) for sample in range(3)]
CPU = torch.device("cpu")
DTYPES = [None, torch.float32, torch.bfloat16]


def sampler_of(model: nn.Module, dtype: torch.dtype | None = None) -> LocalSampler:
    return LocalSampler(model, decode=str, dtype=dtype)


def largest_error(model: nn.Module, answers: list[Completion]) -> float:
    """Between the sampler's log-probs and those of a plain forward call of the live weights, in fp32 or, where it is nearer, in fp64.

    On some processors the call in fp32 is itself further from the truth than the sampler is.
    """
    return min(_error(model, answers), _error(copy.deepcopy(model).double(), answers))


def _error(model: nn.Module, answers: list[Completion]) -> float:
    worst = 0.0
    for request, answer in zip(REQUESTS, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.context + answer.token_ids])).logits[0]
        logprobs = (logits if logits.dtype is torch.float64 else logits.float()).log_softmax(-1)
        expected = logprobs[len(request.context) - 1 : -1].gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(answer.logprobs, dtype=logprobs.dtype) - expected).abs().max()))
    return worst


def tolerance(dtype: torch.dtype | None) -> float:
    return 0.5 if dtype is torch.bfloat16 else 1e-5


def nudge(model: nn.Module, *, only: str = "") -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if only in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)


@pytest.fixture
def adapted() -> Any:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # lora_A starts random
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")
        model = peft.get_peft_model(tiny_model(tie_word_embeddings=False), config)
    nudge(model, only="lora_B")
    return model.eval()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_changed_are_used_at_the_next_call_even_without_forget(dtype: torch.dtype | None) -> None:
    model = tiny_model()
    sampler = sampler_of(model, dtype)
    before = sampler.generate(REQUESTS, SamplingParams())
    nudge(model)
    after = sampler.generate(REQUESTS, SamplingParams())
    assert after != before
    assert after == sampler_of(model, dtype).generate(REQUESTS, SamplingParams())
    assert largest_error(model, after) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_optimizer_step_and_forget_give_the_new_weights(dtype: torch.dtype | None) -> None:
    model = tiny_model("qwen2")
    sampler = sampler_of(model, dtype)
    before = sampler.generate(REQUESTS, SamplingParams())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
    optimizer.step()
    sampler.forget()
    after = sampler.generate(REQUESTS, SamplingParams())
    assert after != before
    assert after == sampler_of(model, dtype).generate(REQUESTS, SamplingParams())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_written_behind_autograds_back_are_noticed_after_forget(dtype: torch.dtype | None) -> None:
    """Through `.data`, or by fused optimizers that do not count their writes."""
    model = tiny_model()
    sampler = sampler_of(model, dtype)
    sampler.generate(REQUESTS, SamplingParams())
    mark = fingerprint(model)
    for weight in model.parameters():
        weight.data.mul_(-1.5)
    assert fingerprint(model) == mark
    sampler.forget()
    assert largest_error(model, sampler.generate(REQUESTS, SamplingParams())) < tolerance(dtype)


def test_the_copy_is_not_made_again_while_the_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Serving]] = []
    original = Serving.laid_out

    def counted(*arguments: Any, **options: Any) -> Serving:
        serving = original(*arguments, **options)
        made.append(weakref.ref(serving))
        return serving

    monkeypatch.setattr(Serving, "laid_out", counted)
    model = tiny_model()
    sampler = sampler_of(model, torch.bfloat16)
    for _ in range(3):
        sampler.generate(REQUESTS, SamplingParams())
    assert len(made) == 1
    nudge(model)
    sampler.generate(REQUESTS, SamplingParams())
    assert [copy() is None for copy in made] == [True, False]
    sampler.forget()  # while the model is trained a copy takes no memory
    assert [copy() is None for copy in made] == [True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sampler_that_owns_the_model_samples_the_same_without_a_copy(architecture: Architecture, dtype: torch.dtype | None) -> None:
    model = tiny_model(architecture)
    expected = sampler_of(model, dtype).generate(REQUESTS, SamplingParams())
    sampler = LocalSampler(model, decode=str, dtype=dtype, owned=True)
    for _ in range(2):
        assert sampler.generate(REQUESTS, SamplingParams()) == expected
        sampler.forget()
    if dtype is not None:
        plain = [module for module in model.modules() if type(module) is nn.Linear]
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        assert bool(plain) != can_pack(CPU, dtype)


@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {"hidden_size": 256, "intermediate_size": 768}), ("gpt2", {"n_embd": 256})]
)
def test_a_wide_layer_that_is_packed_or_not_gives_a_row_the_same_bits_alone(
    architecture: Architecture, options: dict[str, int], request: pytest.FixtureRequest
) -> None:
    """GPT-2's layers are no `nn.Linear`: their products are MKL's, which need a full tile."""
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # with several attention itself rounds by the number of rows
    model = tiny_model(architecture, scale=0.05, **options)
    requests = [TurnRequest(SampleKey(0, 0, 0, sample), 0, tuple(range(5, 20)), 24) for sample in range(16)]
    together = sampler_of(model, torch.float32).generate(requests, SamplingParams())
    for rows in (1, 2, 3, 8):
        assert sampler_of(model, torch.float32).generate(requests[:rows], SamplingParams()) == together[:rows]


def test_a_model_that_was_laid_out_is_neither_saved_nor_sampled_from_again(tmp_path: Path) -> None:
    from postgrad.models.loading import from_memory
    from postgrad.models.saving import save
    from postgrad.testing.tiny import tiny_tokenizer

    language_model = from_memory(tiny_model(vocab_size=268), tiny_tokenizer(), dtype="float32")
    sampler = LocalSampler(language_model.model, decode=str, dtype=torch.float32, owned=True)
    sampler.generate(REQUESTS, SamplingParams())
    with pytest.raises(ValueError, match="neither saved nor given to another sampler"):
        save(language_model, tmp_path / "model")
    with pytest.raises(ValueError, match="neither saved nor given to another sampler"):
        LocalSampler(language_model.model, decode=str)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_sampler_that_owns_an_adapted_model_folds_the_adapter_as_a_copy_does(adapted: Any, dtype: torch.dtype) -> None:
    expected = sampler_of(adapted, dtype).generate(REQUESTS, SamplingParams())
    assert LocalSampler(adapted, decode=str, dtype=dtype, owned=True).generate(REQUESTS, SamplingParams()) == expected


def test_what_a_policy_is_sampled_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving_dtype(CPU, torch.bfloat16) is torch.bfloat16
    monkeypatch.setattr("postgrad.models.serving.can_pack", lambda device, dtype: dtype is torch.float32)
    assert serving_dtype(CPU, None) is torch.float32
    monkeypatch.setattr("postgrad.models.serving.can_pack", lambda device, dtype: False)
    assert serving_dtype(CPU, None) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_fp32_copy_computes_what_the_model_computes(architecture: Architecture) -> None:
    model = tiny_model(architecture)
    assert largest_error(model, sampler_of(model, torch.float32).generate(REQUESTS, SamplingParams())) < 1e-5


def test_a_bf16_copy_reports_the_logprobs_it_sampled_with() -> None:
    """The behaviour policy is the bf16 model: its own forward call gives the same numbers, the fp32 model slightly others."""
    model = tiny_model()
    answers = sampler_of(model, torch.bfloat16).generate(REQUESTS, SamplingParams())
    lowered = copy.deepcopy(model).to(torch.bfloat16)
    assert largest_error(lowered, answers) < 0.3
    assert 1e-5 < largest_error(model, answers) < 0.5


def test_the_copy_never_touches_the_live_model() -> None:
    model = tiny_model()
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    mark = fingerprint(model)
    sampler_of(model, torch.bfloat16).generate(REQUESTS, SamplingParams())
    assert fingerprint(model) == mark
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    assert all(weight.requires_grad for weight in model.parameters())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_rotary_frequencies_keep_their_precision_in_the_copy() -> None:
    serving = Serving.laid_out(tiny_model(), torch.bfloat16, own_head=False)
    assert {buffer.dtype for name, buffer in serving.module.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert {weight.dtype for weight in serving.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_adapter_is_active(adapted: Any, dtype: torch.dtype | None) -> None:
    answers = sampler_of(adapted, dtype).generate(REQUESTS, SamplingParams())
    assert largest_error(adapted, answers) < tolerance(dtype)
    with adapted.disable_adapter():
        assert largest_error(adapted, answers) > tolerance(dtype)
        plain = sampler_of(adapted, dtype).generate(REQUESTS, SamplingParams())
        assert largest_error(adapted, plain) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_or_disabled_adapter_is_noticed(adapted: Any, dtype: torch.dtype | None) -> None:
    sampler = sampler_of(adapted, dtype)
    first = sampler.generate(REQUESTS, SamplingParams())
    nudge(adapted, only="lora_A")
    assert largest_error(adapted, sampler.generate(REQUESTS, SamplingParams())) < tolerance(dtype)
    with adapted.disable_adapter():
        off = sampler.generate(REQUESTS, SamplingParams())
        assert largest_error(adapted, off) < tolerance(dtype)
    assert off != first
    adapted.merge_adapter()
    assert largest_error(adapted, sampler.generate(REQUESTS, SamplingParams())) < tolerance(dtype)


def test_folding_an_adapter_leaves_the_live_adapter_as_it_is(adapted: Any) -> None:
    state = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    mark = fingerprint(adapted)
    serving = Serving.laid_out(adapted, torch.float32, own_head=False)
    assert fingerprint(adapted) == mark
    assert all(torch.equal(weight, state[name]) for name, weight in adapted.state_dict().items())
    assert not any("lora" in name for name, _ in serving.module.named_modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_layer_is_the_linear_layer(dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Linear(48, 100, bias=bias, dtype=dtype)
    if not can_pack(CPU, dtype):  # then it must be so
        with pytest.raises((RuntimeError, AttributeError)):
            PackedLinear(layer.weight, layer.bias, dtype)
        return
    packed = PackedLinear(layer.weight, layer.bias, dtype)
    x = torch.randn(1, 37, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), layer(x))


@pytest.mark.parametrize("alike", [True, False])
def test_a_row_is_computed_alike_however_few_there_are(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose product of few rows ends in other bits they are padded; it is tried before they are not."""
    original = PackedLinear._product

    def odd(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        product = original(self, x)
        return product if alike or x.numel() // x.shape[-1] >= 16 else product.nextafter(product + 1)

    monkeypatch.setattr(PackedLinear, "_product", odd)
    monkeypatch.setattr("postgrad.models.serving._ALIKE", {})
    layer = nn.Linear(576, 200)
    assert can_pack(CPU, torch.float32), "no oneDNN in this torch: nothing here can be tested"
    packed = PackedLinear(layer.weight, layer.bias, torch.float32)
    x = torch.randn(1, 40, 576, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = packed(x)
        for rows in range(1, 40):
            few = packed(x[:, :rows])
            assert few.shape == (1, rows, 200)
            assert torch.equal(few, whole[:, :rows]), rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 16, 40), (16, 40), (1, 128, 40), (2, 100, 40)])
def test_few_rows_are_the_linear_layer_and_dense(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(40, 24, bias=bias), torch.randn(shape)
    made = few_rows(x, layer.weight, layer.bias)
    torch.testing.assert_close(made, layer(x))
    assert made.is_contiguous()


def test_linear_layers_are_themselves_again_after_serving() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked = model[1].forward = model[1].forward  # as an offloading hook leaves it
    with computed_by(few_rows, model):
        assert "forward" in vars(model[0])
        assert vars(model[1])["forward"] is hooked
    assert "forward" not in vars(model[0])
    assert vars(model[1])["forward"] is hooked


def test_no_product_of_a_decode_step_has_the_few_rows_first() -> None:
    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.first: list[int] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                self.first.append(args[-2].shape[0])
            return func(*args, **(kwargs or {}))

    sampler = sampler_of(tiny_model(num_key_value_heads=4))  # so that no layer is as narrow as the 16 rows
    with Products() as products:
        sampler.generate(REQUESTS, SamplingParams(temperature=1.0))
    assert len(products.first) > 100
    assert min(products.first) >= 32, "16 rows first"
