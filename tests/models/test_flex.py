"""The fused kernel for accelerators, as far as a CPU goes: who sees whom, the forward, and that it is not believed without a comparison."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from postgrad.models import flex
from postgrad.models.layout import PackedLayout
from postgrad.models.segments import Segment, plain_attention

CPU = torch.device("cpu")
SEGMENTS = (Segment(0, 40), Segment(40, 75, (0, 40)), Segment(75, 76, (0, 40)), Segment(76, 150), Segment(150, 200, (76, 150)))
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _unprobed() -> None:
    flex.agrees.cache_clear()


def operands(query_heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(heads, 200, 16, generator=generator) for heads in (query_heads, key_heads, key_heads)]


def test_tokens_see_their_own_segment_up_to_themselves_and_all_of_their_prefix() -> None:
    mask = flex.visible(SEGMENTS, CPU)
    at = torch.arange(200)
    found = mask(at, at, at[:, None], at[None, :])
    for segment in SEGMENTS:
        for query in range(segment.start, segment.stop):
            seen = {*range(segment.start, query + 1), *(range(*segment.prefix) if segment.prefix else ())}
            assert set(found[query].nonzero().flatten().tolist()) == seen


@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_the_forward_is_that_of_plain_attention(query_heads: int, key_heads: int) -> None:
    query, key, value = operands(query_heads, key_heads)
    output = flex.attend(query, key, value, flex.block_mask(SEGMENTS, CPU), scaling=0.3)
    torch.testing.assert_close(output, plain_attention(query, key, value, SEGMENTS, scaling=0.3, dropout=0.0), rtol=0, atol=1e-5)


def test_a_kernel_that_does_not_run_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU the kernel has no backward: what an old GPU or a missing compiler looks like."""
    with caplog.at_level(logging.WARNING):
        assert not flex.agrees(CPU, torch.float32, (4, 2, 16))
    assert "does not run on cpu" in caplog.text


def test_queries_and_keys_in_fp32_are_taken_beside_values_in_bf16_under_autocast() -> None:
    query, key, value = operands()
    with torch.autocast("cpu", torch.bfloat16):
        output = flex.attend(query, key, value.bfloat16(), flex.block_mask(SEGMENTS, CPU), scaling=0.3)
    assert output.dtype == torch.bfloat16
    expected = plain_attention(query, key, value, SEGMENTS, scaling=0.3, dropout=0.0)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=5e-2)


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_a_kernel_is_used_only_if_its_numbers_agree(
    error: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: object, *, scaling: float | None) -> Tensor:
        return plain_attention(query, key, value * (1 + error), flex._PROBE, scaling=scaling, dropout=0.0)

    monkeypatch.setattr(flex, "attend", kernel)
    with caplog.at_level(logging.WARNING):
        assert flex.agrees(CPU, torch.float32, (4, 2, 16)) is (error == 0.0)
    assert ("other numbers" in caplog.text) is (error != 0.0)


def test_the_comparison_is_the_same_for_a_first_caller_that_only_reads_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: object, *, scaling: float | None) -> Tensor:
        return plain_attention(query, key, value, flex._PROBE, scaling=scaling, dropout=0.0)

    monkeypatch.setattr(flex, "attend", kernel)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert flex.agrees(CPU, torch.float32, (4, 2, 16))


def test_a_layout_asks_the_kernel_where_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = operands()
    layout = PackedLayout(SEGMENTS)
    expected = layout.attend(0, query, key, value, scaling=0.3, dropout=0.0)
    made = []
    build = flex.block_mask
    monkeypatch.setattr("postgrad.models.layout.flash_available", lambda *_: False)
    monkeypatch.setattr(flex, "usable", lambda *_: True)
    monkeypatch.setattr(flex, "block_mask", lambda *given: made.append(given) or build(*given))
    for layer in range(3):
        torch.testing.assert_close(layout.attend(layer, query, key, value, scaling=0.3, dropout=0.0), expected, rtol=0, atol=1e-5)
    assert len(made) == 1, "one mask for all layers"
