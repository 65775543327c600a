"""The engine against the plain computation: one row at a time through the stock model, log-softmax over all logits."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from postgrad.errors import CheckpointError, ModelError, RunError
from postgrad.models.engine import LocalEngine, OptimizerConfig
from postgrad.protocols import Loss, Rows
from postgrad.testing import ARCHITECTURES, tiny_model
from postgrad.types import TrainRow

PREFIXES = (0, 1, 5, 9)


def rows_of(seed: int = 0, *, group_size: int = 3) -> list[TrainRow]:
    """Groups behind prompts of 0, 1, 5 and 9 tokens, completions of 1 to 8 tokens, about 60 % trained, one row without any."""
    rng = random.Random(seed)
    rows = []
    for group, prefix in enumerate(PREFIXES):
        prompt = [rng.randrange(3, 288) for _ in range(prefix)]
        for _ in range(group_size):
            ids = prompt + [rng.randrange(3, 288) for _ in range(rng.randrange(1, 9) + (prefix == 0))]
            trained = [at >= max(prefix, 1) and rng.random() < 0.6 for at in range(len(ids))]
            rows.append(row(ids, trained, group=group, prefix=prefix, advantage=rng.gauss(0, 1)))
    rows.append(row([5, 6, 7], [False] * 3, group=len(PREFIXES), prefix=0, advantage=1.0))
    rng.shuffle(rows)
    return rows


def row(ids: Sequence[int], trained: Sequence[bool], *, group: int | None = None, prefix: int = 0, advantage: float = 1.0) -> TrainRow:
    old = [-0.1 * (token % 7) for token in ids]
    return TrainRow(tuple(ids), tuple(trained), group=group, shared_prefix=prefix, per_token={"old": old}, per_row={"advantage": advantage})


def loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Curved in the log-probs, so that a wrong upstream gradient shows; denominators are constants."""
    per_token = -logprobs * rows.per_row["advantage"][:, None] + 0.5 * (logprobs - rows.per_token["old"]) ** 2
    return (per_token * rows.mask).sum() / 37, {"counted": rows.mask.sum(), "rows": torch.tensor(len(rows.mask))}


def plain(model: nn.Module, rows: Sequence[TrainRow], temperature: float) -> tuple[Tensor, list[list[float]], float]:
    """(loss, log-probs per row, entropy) by the stock model, one unpadded row at a time."""
    total: Any = 0.0
    found, entropy = [], 0.0
    for one in rows:
        logits = model(input_ids=torch.tensor([one.token_ids])).logits[0].float() / temperature
        everything = logits.log_softmax(-1)
        trained = [at for at, flag in enumerate(one.trained) if flag]
        logprobs = everything[[at - 1 for at in trained], [one.token_ids[at] for at in trained]]
        old = torch.tensor([one.per_token["old"][at] for at in trained])
        total = total + (-logprobs * one.per_row["advantage"] + 0.5 * (logprobs - old) ** 2).sum() / 37
        found.append(logprobs.tolist())
        before = everything[[at - 1 for at in trained]]
        entropy += -(before.exp() * before).sum().item()
    return total, found, entropy


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def flat(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([number for one in values for number in one])


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any gradient, relative to the largest value in that weight's gradient."""
    assert actual.keys() == expected.keys()
    return max(((actual[name] - wanted).abs().max() / wanted.abs().max()).item() for name, wanted in expected.items())


def padded(engine: LocalEngine) -> LocalEngine:
    """The same engine on its fallback."""
    engine._refusals = dict.fromkeys(engine._refusals, "asked for by the test")
    return engine


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_every_gradient_are_those_of_the_plain_computation(architecture: Any, temperature: float, path: str) -> None:
    rows = rows_of()
    model = tiny_model(architecture)
    expected_loss, expected_logprobs, entropy = plain(model, rows, temperature)
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()
    engine = LocalEngine(model, tokens_per_micro_batch=60)
    result = (padded(engine) if path == "padded" else engine).forward_backward(rows, loss, temperature=temperature)
    assert result.loss == pytest.approx(expected_loss.item(), rel=1e-5)
    assert worst(gradients(model), expected) < 1e-5
    assert [len(one) for one in result.logprobs] == [one.trained_tokens for one in rows]
    torch.testing.assert_close(flat(result.logprobs), flat(expected_logprobs), rtol=0, atol=2e-5)
    assert result.sums["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert result.sums["tokens"] == result.sums["counted"] == sum(one.trained_tokens for one in rows)
    assert result.sums["rows"] == len(rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_loss_of_constant_gradient_gives_the_same_in_one_pass(architecture: Any) -> None:
    def weighted(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprobs * rows.per_row["advantage"][:, None] * rows.mask).sum() / 37, {}

    rows, model = [*rows_of(), row([5, 6, 7], [False] * 3)], tiny_model(architecture)
    engine = LocalEngine(model, tokens_per_micro_batch=30)
    two = engine.forward_backward(rows, weighted)
    expected = gradients(model)
    model.zero_grad()
    one = engine.forward_backward(rows, Loss(weighted, constant_gradient=True))
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.sums["entropy"] == pytest.approx(two.sums["entropy"], rel=1e-6)
    assert worst(gradients(model), expected) < 1e-5


@pytest.mark.parametrize("constant", [True, False])
def test_once_a_gradient_has_accumulated_nothing_of_the_heads_size_is_made(constant: bool) -> None:
    model: Any = tiny_model("qwen3")  # whose embedding is a weight of its own
    model.get_input_embeddings().weight.requires_grad_(requires_grad=False)
    engine, head = LocalEngine(model), model.get_output_embeddings().weight

    class NewTensors(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            known = (head.data_ptr(), 0 if head.grad is None else head.grad.data_ptr())
            if isinstance(result, Tensor) and result.shape == head.shape and result.data_ptr() not in known:
                self.made += 1
            return result

    def linear(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs.sum(), {}

    for expected in (True, False):
        with NewTensors() as new:
            engine.forward_backward(rows_of(), Loss(linear, constant_gradient=constant))
        assert (new.made > 0) is expected


def test_a_loss_that_is_not_as_constant_as_it_says_trains_nothing() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="another derivative"):
        LocalEngine(model).forward_backward(rows_of(), Loss(loss, constant_gradient=True))
    assert gradients(model) == {}


def test_a_loss_that_reads_the_entropy_is_not_computed_in_one_pass() -> None:
    """The entropy has no gradient there: its part of the loss would be lost without a word."""

    def with_bonus(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprobs.sum() + rows.entropy.sum()), {}

    model = tiny_model()
    with pytest.raises(RuntimeError, match="may not read the entropy"):
        LocalEngine(model).forward_backward(rows_of(), Loss(with_bonus, constant_gradient=True))
    assert gradients(model) == {}


@pytest.mark.parametrize("tokens", [1, 12, 25, 60])
def test_how_rows_fall_into_micro_batches_changes_nothing(tokens: int) -> None:
    """One large micro-batch and many small ones: same loss, sums and gradients (trl#2175, trl#5619)."""
    rows, model = rows_of(1), tiny_model()
    whole = LocalEngine(model, tokens_per_micro_batch=10_000).forward_backward(rows, loss)
    expected = gradients(model)
    model.zero_grad()
    split = LocalEngine(model, tokens_per_micro_batch=tokens).forward_backward(rows, loss)
    assert worst(gradients(model), expected) < 2e-6
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    packing = {"computed_tokens", "repeated_prefix_tokens"}
    for name in whole.sums.keys() - packing:
        assert split.sums[name] == pytest.approx(whole.sums[name], rel=1e-6), name
    assert split.sums["computed_tokens"] - split.sums["repeated_prefix_tokens"] == whole.sums["computed_tokens"]


def test_gradients_add_up_over_calls() -> None:
    """Eight calls with one row each are one call with eight rows."""
    rows, model = rows_of(2)[:8], tiny_model()
    engine = LocalEngine(model)
    engine.forward_backward(rows, loss)
    expected = gradients(model)
    model.zero_grad()
    for one in rows:
        engine.forward_backward([one], loss)
    assert worst(gradients(model), expected) < 2e-6


def test_changing_one_row_changes_no_bit_of_another() -> None:
    """Same lengths, other tokens in one row of a group: the rest of its group and the other groups stay exactly as they were."""
    rows = rows_of(3)
    engine = LocalEngine(tiny_model(), tokens_per_micro_batch=10_000)
    before = engine.logprobs(rows)
    changed = next(index for index, one in enumerate(rows) if one.shared_prefix == 5 and one.trained_tokens)
    ids = [*rows[changed].token_ids[:5], *((token + 1) % 288 for token in rows[changed].token_ids[5:])]
    other = row(ids, rows[changed].trained, group=rows[changed].group, prefix=5)
    after = engine.logprobs([*rows[:changed], other, *rows[changed + 1 :]])
    assert before[changed] != after[changed]
    assert all(one == two for index, (one, two) in enumerate(zip(before, after, strict=True)) if index != changed)


def test_logprobs_come_in_input_order_and_equal_those_of_the_backward_pass() -> None:
    rows, engine = rows_of(4), LocalEngine(tiny_model(), tokens_per_micro_batch=25)
    scored = engine.logprobs(rows, temperature=0.7)
    assert scored == engine.forward_backward(rows, loss, temperature=0.7).logprobs
    assert (
        scored == [engine.logprobs([one], temperature=0.7)[0] for one in rows]
        or flat(scored).sub(flat([engine.logprobs([one], temperature=0.7)[0] for one in rows])).abs().max() < 1e-5
    )


def test_bf16_autocast_stays_close_to_fp32_and_keeps_fp32_gradients() -> None:
    rows, model = rows_of(5, group_size=6), tiny_model()
    exact = LocalEngine(model).forward_backward(rows, loss)
    expected = gradients(model)
    model.zero_grad()
    narrow = LocalEngine(model, autocast=torch.bfloat16).forward_backward(rows, loss)
    assert narrow.loss == pytest.approx(exact.loss, rel=0.02)
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0) > 0.99, name


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    """1,920 trained tokens × 9,000 entries would be 17 million; tiles (8 million) are the largest."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                self.elements = max(self.elements, tensor.numel() if isinstance(tensor, Tensor) else 0)
            return result

    model = tiny_model(vocab_size=9_000, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    rows = [row([7 * at % 8_999 for at in range(121)], [False] + [True] * 120) for _ in range(16)]
    engine = LocalEngine(model)
    with Largest() as largest:
        engine.forward_backward(rows, loss)
    assert largest.elements <= 1 << 23


def test_a_batch_without_a_trained_token_is_a_step_of_zero_gradients() -> None:
    """No crash (trl#7077), the loss function still sees its rows, and what was masked is counted."""
    rows, model = [row([5, 6, 7], [False] * 3) for _ in range(3)], tiny_model()
    engine = LocalEngine(model, optimizer=OptimizerConfig(weight_decay=0.0))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    result = engine.forward_backward(rows, loss)
    assert (result.loss, result.logprobs) == (0.0, [[], [], []])
    assert (result.sums["tokens"], result.sums["entropy"], result.sums["rows"], result.sums["untrained_rows"]) == (0, 0, 3, 3)
    assert engine.optimizer_step(0.1).grad_norm == 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert engine.forward_backward([], loss).sums["tokens"] == 0.0


def test_a_loss_that_is_not_finite_names_its_micro_batch_and_changes_nothing() -> None:
    rows, model = rows_of(6), tiny_model()
    bad = next(index for index, one in enumerate(rows) if one.trained_tokens)
    rows[bad] = row(rows[bad].token_ids, rows[bad].trained, group=rows[bad].group, prefix=rows[bad].shared_prefix, advantage=float("nan"))
    engine = LocalEngine(model, tokens_per_micro_batch=15)
    engine.forward_backward(rows_of(7), loss)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(RunError, match=r"the loss of micro-batch \d+ of \d+ is nan") as caught:
        engine.forward_backward(rows, loss)
    assert str(bad) in (caught.value.where or "").replace(",", "").split()
    assert gradients(model) == {}  # not even those of the call before: half a batch must never be stepped on
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_derivative_that_is_not_finite_names_its_rows() -> None:
    """sqrt has a finite value and an infinite slope at 0."""

    def steep(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return (logprobs - logprobs.detach()).abs().sqrt().sum(), {}

    model = tiny_model()
    with pytest.raises(RunError, match="the loss of micro-batch 1 of 1 is finite, its derivative by the log-probs is not") as caught:
        LocalEngine(model).forward_backward(rows_of(), steep)
    assert (caught.value.where or "").startswith("rows ")
    assert gradients(model) == {}


@pytest.mark.parametrize("budget", [4096, 15])
def test_a_gradient_that_overflows_in_the_model_names_its_weights(budget: int) -> None:
    def huge(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return ((logprobs - logprobs.detach()) * 3e38).sum(), {}

    model = tiny_model()
    engine, before = LocalEngine(model, tokens_per_micro_batch=budget), [weight.clone() for weight in model.parameters()]
    engine.forward_backward(rows_of(), huge)
    with pytest.raises(RunError, match=r"the gradient is not finite \(model.embed_tokens.weight"):
        engine.optimizer_step(1e-3)
    assert gradients(model) == {}
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))


def test_before_the_first_of_several_micro_batches_every_weight_has_a_gradient() -> None:
    """So that they never lie between activations; a single micro-batch's take the place of its activations."""
    model, seen = tiny_model(), []

    def looking(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(sum(weight.grad is not None for weight in model.parameters()))
        return -logprobs.sum(), {}

    LocalEngine(model).forward_backward(rows_of(), looking)
    model.zero_grad()
    LocalEngine(model, tokens_per_micro_batch=15).forward_backward(rows_of(), looking)
    assert len(seen) > 2
    assert seen[:2] == [0, len(list(model.parameters()))]


def test_weights_that_are_not_finite_are_never_scored_silently() -> None:
    model = tiny_model()
    engine = LocalEngine(model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(RunError, match="a log-prob of the policy is not finite"):
        engine.logprobs(rows_of())
    with pytest.raises(RunError, match="a log-prob of micro-batch 1 of 1 is not finite"):
        engine.forward_backward(rows_of(), lambda logprobs, rows: (torch.zeros((), requires_grad=True), {}))


def test_dropout_is_off_unless_asked_for() -> None:
    rows = rows_of(8)
    model = tiny_model("gpt2", dropout=0.3).train()
    quiet, noisy = LocalEngine(model), LocalEngine(model, dropout=True)
    scored = quiet.logprobs(rows)
    assert quiet.forward_backward(rows, loss).logprobs == scored
    assert noisy.logprobs(rows) == scored
    first, second = (noisy.forward_backward(rows, loss).logprobs for _ in range(2))
    assert first != second
    assert first != scored
    assert model.training  # the caller's mode is back


def test_with_dropout_rows_of_a_group_draw_their_own_noise() -> None:
    """Two equal rows behind one prompt; a shared prompt would share its noise, and with a one-token completion all of it."""
    rows = [row([5, 6, 7, 8], [False, False, False, True], group=0, prefix=3) for _ in range(2)]
    engine = LocalEngine(tiny_model("gpt2", dropout=0.3), dropout=True)
    first, second = engine.forward_backward(rows, loss).logprobs
    assert first != second


class FrozenCopy:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        yield self.model


def test_the_reference_is_scored_with_its_own_weights() -> None:
    rows = rows_of(9)
    policy, reference = tiny_model(seed=0), tiny_model(seed=1)
    engine = LocalEngine(policy, reference=FrozenCopy(reference))
    assert engine.logprobs(rows, model="reference") == LocalEngine(reference).logprobs(rows)
    assert engine.logprobs(rows, model="reference") != engine.logprobs(rows)
    with pytest.raises(ValueError, match="without a reference"):
        LocalEngine(policy).logprobs(rows, model="reference")


def test_a_model_that_cannot_be_packed_is_padded_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BloomConfig(vocab_size=288, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, pad_token_id=2)
        model = AutoModelForCausalLM.from_config(config).eval()
    rows = rows_of(10)
    with caplog.at_level(logging.WARNING, "postgrad"):
        engine = LocalEngine(model, tokens_per_micro_batch=40)
    assert "computed with padding" in caplog.text
    expected_loss, _, _ = plain(model, rows, 0.9)
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()
    assert engine.forward_backward(rows, loss, temperature=0.9).loss == pytest.approx(expected_loss.item(), rel=1e-5)
    assert worst(gradients(model), expected) < 2e-5


def test_a_loss_that_compares_the_rows_of_a_group_gets_them_together() -> None:
    seen: list[list[float]] = []

    def compare(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(rows.per_row["advantage"].tolist())
        return logprobs.sum(), {}

    pairs = [
        row([1 + group, 2, 3, 4, 5], [False] * 3 + [True] * 2, group=group, prefix=3, advantage=10.0 * group + side)
        for group in range(4)
        for side in (0, 1)
    ]
    for fallback in (False, True):
        engine = LocalEngine(tiny_model(), tokens_per_micro_batch=4)
        seen.clear()
        (padded(engine) if fallback else engine).forward_backward(pairs, Loss(compare, whole_groups=True))
        assert sorted(seen) == [[10.0 * group, 10.0 * group + 1] for group in range(4)]


def test_names_that_the_engine_counts_itself_cannot_be_overwritten() -> None:
    with pytest.raises(ValueError, match="entropy, which the engine counts"):
        LocalEngine(tiny_model()).forward_backward(rows_of(), lambda logprobs, rows: (logprobs.sum(), {"entropy": torch.ones(())}))


def test_a_model_whose_head_is_unknown_is_refused_at_once() -> None:
    model = tiny_model("qwen3")
    plain_forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 3 * torch.tanh(plain_forward(hidden))
    with pytest.raises(ModelError, match="computes its logits in a way"):
        LocalEngine(model)


def trained(
    model: nn.Module, steps: Sequence[int], *, dropout: bool = False, load: Path | None = None, save: Path | None = None
) -> LocalEngine:
    engine = LocalEngine(model, optimizer=OptimizerConfig(weight_decay=0.1), dropout=dropout)
    if load:
        engine.load_state(load)
    for step in steps:
        engine.forward_backward(rows_of(step), loss)
        engine.optimizer_step(0.01)
    if save:
        engine.save_state(save)
    return engine


@pytest.mark.parametrize("dropout", [False, True])
def test_a_run_that_is_restored_continues_bit_for_bit(tmp_path: Path, dropout: bool) -> None:
    torch.manual_seed(3)
    straight = tiny_model("gpt2", dropout=0.2)
    trained(straight, range(4), dropout=dropout)
    torch.manual_seed(3)
    trained(tiny_model("gpt2", dropout=0.2), range(2), dropout=dropout, save=tmp_path)
    torch.manual_seed(99)
    resumed = tiny_model("gpt2", dropout=0.2, seed=5)
    trained(resumed, range(2, 4), dropout=dropout, load=tmp_path)
    for (name, one), (_, two) in zip(straight.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_state_before_the_first_step_is_restored_too(tmp_path: Path) -> None:
    trained(tiny_model(seed=4), [], save=tmp_path)
    restored = trained(tiny_model(seed=5), [], load=tmp_path)
    assert torch.equal(restored.model.get_parameter("model.norm.weight"), tiny_model(seed=4).get_parameter("model.norm.weight"))
    assert torch.equal(restored.model.get_parameter("lm_head.weight"), tiny_model(seed=4).get_parameter("lm_head.weight"))


def test_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = tiny_model()
    for name, weight in model.named_parameters():
        weight.requires_grad_("q_proj" in name)
    trained(model, [0], save=tmp_path)
    assert set(load_file(tmp_path / "trained.safetensors")) == {f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.json", "optimizer.safetensors", "trained.safetensors"]


def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trained(tiny_model("qwen3"), [0], save=tmp_path / "other")
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(CheckpointError, match="other weights"):
        LocalEngine(model).load_state(tmp_path / "other")
    trained(tiny_model(), [0], save=tmp_path / "cut")
    file = tmp_path / "cut" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        LocalEngine(model).load_state(tmp_path / "cut")
    with pytest.raises(CheckpointError, match="cannot be read"):
        LocalEngine(model).load_state(tmp_path / "absent")
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_one_process_is_its_own_sum() -> None:
    assert LocalEngine(tiny_model()).global_sum(2.5) == 2.5


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LocalEngine(tiny_model(), tokens_per_micro_batch=0)


def test_each_graph_is_gone_before_the_next_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from postgrad.models import reader

    alive: list[weakref.ref[Tensor]] = []
    plain = reader.read_logprobs

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert all(reference() is None for reference in alive)
        logprobs, entropy = plain(*args, **kwargs)
        alive.append(weakref.ref(logprobs))
        return logprobs, entropy

    monkeypatch.setattr(reader, "read_logprobs", watched)
    LocalEngine(tiny_model(), tokens_per_micro_batch=12).forward_backward(rows_of(), loss)
    assert len(alive) > 3


@pytest.mark.parametrize("largest", [1 << 31, 32 << 20, 1 << 20])
def test_a_c_library_that_refuses_large_blocks_in_the_heap(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    """Older versions of glibc take 32 MiB at most. Where none is taken nothing else may be set: it would fix the threshold at 128 KiB."""
    from postgrad.models import allocator

    taken: dict[int, int] = {}

    def mallopt(parameter: int, value: int) -> int:
        if parameter == -3 and value > largest:
            return 0
        taken[parameter] = value
        return 1

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.31"))
    assert allocator.keep_freed_memory() is (largest > 1 << 20)
    assert taken.get(-3) == {1 << 31: 1 << 30, 32 << 20: 32 << 20, 1 << 20: None}[largest]
    assert set(taken) == (set() if largest == 1 << 20 else {-1, -2, -3})


def test_memory_that_a_step_frees_is_kept_for_the_next() -> None:
    """On glibc; elsewhere nothing is promised. Without it each 16 MB tensor costs 4,000 page faults."""
    import resource

    from postgrad.models.allocator import keep_freed_memory

    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")

    def faults_of_a_tensor() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 22)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults_of_a_tensor() for _ in range(20)) < 100
