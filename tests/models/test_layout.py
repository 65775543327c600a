"""Attention over flat rows: equal to plain attention, forward and backward, and blind across segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postgrad.models import layout as layouts
from postgrad.models.layout import PackedLayout, flash_available
from postgrad.models.segments import Segment, plain_attention

SEGMENTS = (
    Segment(0, 5),
    Segment(5, 9, (0, 5)),
    Segment(9, 10, (0, 5)),
    Segment(10, 13, (0, 5)),
    Segment(13, 20),
    Segment(20, 21),
    Segment(21, 24, (20, 21)),
)


def inputs(heads: int, key_heads: int, tokens: int, *, dtype: torch.dtype = torch.float32, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads * 100 + key_heads)
    shapes = [(heads, tokens, width), (key_heads, tokens, width), (key_heads, tokens, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_definition(query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scaling: float) -> Tensor:
    """softmax over an explicit [T, T] mask."""
    tokens, repeats = query.shape[1], query.shape[0] // key.shape[0]
    visible = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in segments:
        own = segment.stop - segment.start
        visible[segment.start : segment.stop, segment.start : segment.stop] = torch.ones(own, own, dtype=torch.bool).tril()
        if segment.prefix:
            visible[segment.start : segment.stop, slice(*segment.prefix)] = True
    scores = query @ key.repeat_interleave(repeats, 0).transpose(1, 2) * scaling
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(repeats, 0)).transpose(0, 1)


@pytest.mark.parametrize("path", ["flash", "plain"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_output_and_gradients_are_those_of_masked_softmax(path: str, heads: int, key_heads: int) -> None:
    operands = inputs(heads, key_heads, 24, dtype=torch.float64)
    if path == "flash":
        assert flash_available(*operands)
        output = PackedLayout(SEGMENTS).attend(0, *operands, scaling=0.4, dropout=0.0)
    else:
        output = plain_attention(*operands, SEGMENTS, scaling=0.4, dropout=0.0)
    expected = by_definition(*operands, SEGMENTS, 0.4)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for actual, wanted in zip(torch.autograd.grad(output, operands, weight), torch.autograd.grad(expected, operands, weight), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_gradients_pass_gradcheck() -> None:
    operands = inputs(4, 2, 24, dtype=torch.float64, width=4)
    assert torch.autograd.gradcheck(lambda *given: PackedLayout(SEGMENTS).attend(0, *given, scaling=None, dropout=0.0), operands)


@st.composite
def layouts_of_groups(draw: st.DrawFn) -> PackedLayout:
    """Groups with a prefix of 0 to 4 tokens and rows of 0 to 5 tokens of their own."""
    segments: list[Segment] = []
    end = 0
    for prefix, own in draw(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=4)):
        shared = (end, end + prefix) if prefix else None
        if shared:
            segments.append(Segment(*shared))
            end = shared[1]
        for length in filter(None, own):
            segments.append(Segment(end, end + length, shared))
            end += length
    return PackedLayout(tuple(segments))


@settings(max_examples=40, deadline=None)
@given(layout=layouts_of_groups())
def test_any_layout_equals_masked_softmax(layout: PackedLayout) -> None:
    if layout.tokens:
        operands = inputs(2, 1, layout.tokens)
        output = layout.attend(0, *operands, scaling=0.5, dropout=0.0)
        torch.testing.assert_close(output, by_definition(*operands, layout.segments, 0.5), rtol=0, atol=2e-6)


def test_a_segment_never_sees_another_one() -> None:
    """Not approximately: changing one row leaves every bit of the others as it was."""
    query, key, value = (tensor.detach() for tensor in inputs(4, 2, 24))
    layout = PackedLayout(SEGMENTS)
    before = layout.attend(0, query, key, value, scaling=None, dropout=0.0)
    for tensor in (query, key, value):
        tensor[:, 5:9] = 100.0
    after = layout.attend(0, query, key, value, scaling=None, dropout=0.0)
    others = [token for token in range(24) if not 5 <= token < 9]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[5:9], after[5:9])


def test_long_segments_take_the_narrow_kernel_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 operands are widened for short keys only; both ways must give the same attention to bf16 precision."""
    operands = inputs(4, 2, 24, dtype=torch.bfloat16)
    expected = by_definition(*(tensor.double() for tensor in operands), SEGMENTS, 0.4)
    for limit in (0, 256):
        monkeypatch.setattr(layouts, "_WIDEN_UP_TO", limit)
        output = PackedLayout(SEGMENTS).attend(0, *operands, scaling=0.4, dropout=0.0)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.03)


def test_autocast_keeps_operands_in_the_narrow_dtype() -> None:
    operands = inputs(4, 2, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = PackedLayout(SEGMENTS).attend(0, *operands, scaling=0.4, dropout=0.0)
    assert output.dtype == torch.bfloat16
    assert output.grad_fn is not None
    assert sum(tensor.dtype == torch.float32 for tensor in output.grad_fn.saved_tensors) == 1  # the log-sum-exp
    gradients = torch.autograd.grad(output.float().sum(), operands)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_dropout_takes_the_plain_path_and_drops() -> None:
    operands = inputs(4, 2, 24)
    torch.manual_seed(0)
    noisy = [PackedLayout(SEGMENTS).attend(0, *operands, scaling=None, dropout=0.5) for _ in range(2)]
    assert not torch.equal(*noisy)
    torch.manual_seed(0)
    many = torch.stack([PackedLayout(SEGMENTS).attend(0, *operands, scaling=None, dropout=0.1) for _ in range(200)])
    quiet = PackedLayout(SEGMENTS).attend(0, *operands, scaling=None, dropout=0.0)
    assert (many.mean(0) - quiet).abs().mean() < 0.03


def test_a_value_width_of_its_own_takes_the_plain_path() -> None:
    query, key, _ = inputs(4, 2, 24)
    value = torch.randn(2, 24, 6)
    output = PackedLayout(SEGMENTS).attend(0, query, key, value, scaling=0.4, dropout=0.0)
    torch.testing.assert_close(output, by_definition(query, key, value, SEGMENTS, 0.4), rtol=0, atol=2e-6)


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="does not begin at 3"):
        PackedLayout((Segment(0, 3), Segment(4, 6)))
    with pytest.raises(ValueError, match="empty segment"):
        Segment(3, 3)
    with pytest.raises(ValueError, match="does not lie before"):
        Segment(3, 5, (2, 4))
    with pytest.raises(ValueError, match="describes 24 tokens"):
        PackedLayout(SEGMENTS).attend(0, *inputs(2, 1, 23), scaling=None, dropout=0.0)
