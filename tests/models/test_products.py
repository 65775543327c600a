"""fp32 products through oneDNN: the same numbers, taken only where they were measured to be faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from postgrad.cache import cache_folder
from postgrad.models import products
from postgrad.models.engine import LocalEngine
from postgrad.models.products import OneDNNProducts, fast_products, onednn_is_faster
from postgrad.protocols import Rows
from postgrad.testing import tiny_model
from postgrad.types import TrainRow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Left sides of the products that went to oneDNN."""
    shapes: list[torch.Size] = []
    plain = products.onednn_product

    def counted(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(left.shape)
        return plain(left, right, bias)

    monkeypatch.setattr(products, "onednn_product", counted)
    return shapes


def times(monkeypatch: pytest.MonkeyPatch, *, onednn: float, mkl: float) -> list[str]:
    """Pretend that the products take so long; returns what was measured."""
    asked: list[str] = []

    def measure(product: object) -> float:
        asked.append("mkl" if product is torch.mm else "onednn")
        return mkl if product is torch.mm else onednn

    monkeypatch.setattr(products, "measure", measure)
    return asked


@pytest.mark.parametrize("left_strided", [False, True])
@pytest.mark.parametrize("right_strided", [False, True])
def test_products_are_those_of_mm_for_any_strides(left_strided: bool, right_strided: bool) -> None:
    left = torch.randn(300, 256).t() if left_strided else torch.randn(256, 300)
    right = torch.randn(320, 300).t() if right_strided else torch.randn(300, 320)
    bias = torch.randn(320)
    with OneDNNProducts():
        product, shifted = left @ right, torch.addmm(bias, left, right)
    exact = left.double() @ right.double()
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(shifted.double(), exact + bias, rtol=1e-5, atol=1e-4)


def test_the_gradients_of_a_head_are_added_up_through_onednn(sent: list[torch.Size]) -> None:
    left, right, total = torch.randn(256, 300), torch.randn(300, 320), torch.randn(512, 320)
    expected = total.double()
    expected[256:] += left.double() @ right.double()
    with OneDNNProducts():
        total[256:].addmm_(left, right)
        torch.zeros(4, 4).addmm_(torch.ones(4, 4), torch.ones(4, 4))  # too small to be worth the way
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
    assert sent == [left.shape]


def test_gradients_of_a_training_step_are_the_same_through_onednn(monkeypatch: pytest.MonkeyPatch, sent: list[torch.Size]) -> None:
    def through(how: AbstractContextManager[object]) -> dict[str, Tensor]:
        model = tiny_model("gpt2")
        monkeypatch.setattr("postgrad.models.engine.fast_products", lambda *_: how)
        LocalEngine(model).forward_backward([TrainRow(tuple(range(3, 203)), (False, *[True] * 199))], loss)
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    def loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprobs * rows.mask).sum() / 199, {}

    monkeypatch.setattr(products, "_LARGE", 1)
    expected = through(nullcontext())
    assert not sent
    found = through(OneDNNProducts())
    assert len(sent) > 20, "forward and backward, every layer"
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_the_faster_one_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = times(monkeypatch, onednn=0.5, mkl=1.0)
    assert isinstance(fast_products(CPU, None), OneDNNProducts)
    onednn_is_faster.cache_clear()  # another process
    times(monkeypatch, onednn=1.0, mkl=0.5)
    assert isinstance(fast_products(CPU, None), OneDNNProducts)
    assert sorted(asked) == ["mkl", "onednn"]
    assert [file.suffix for file in (cache_folder() / "processor").iterdir()] == [".txt"]


def test_a_tie_stays_with_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, onednn=0.95, mkl=1.0)
    assert not onednn_is_faster()


def test_bf16_and_accelerators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = times(monkeypatch, onednn=0.5, mkl=1.0)
    assert not isinstance(fast_products(CPU, torch.bfloat16), OneDNNProducts)
    assert not isinstance(fast_products(torch.device("cuda"), None), OneDNNProducts)
    assert not asked


def test_a_cache_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "processor").write_text("in the way")
    times(monkeypatch, onednn=0.5, mkl=1.0)
    assert onednn_is_faster()


def test_the_measurement_itself_runs() -> None:
    assert products.measure(products.onednn_product) > 0
    assert products.measure(torch.mm) > 0
