"""mask_prompt and masked_cross_entropy: the shift, the denominator, and what must never be trained."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import IGNORE_INDEX, NonFiniteError, mask_prompt, masked_cross_entropy


def _logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("length", "expected"), [(0, [5, 6, 7]), (2, [-100, -100, 7]), (3, [-100, -100, -100])])
def test_prompt_becomes_minus_100_and_nothing_else(length: int, expected: list[int]) -> None:
    ids = torch.tensor([5, 6, 7])
    assert mask_prompt(ids, length).tolist() == expected
    assert ids.tolist() == [5, 6, 7]
    assert mask_prompt(ids.expand(2, -1), length).tolist() == [expected, expected]


def test_each_row_has_its_own_prompt_length() -> None:
    assert mask_prompt(torch.tensor([[5, 6], [7, 8]]), torch.tensor([0, 1])).tolist() == [[5, 6], [-100, 8]]


@pytest.mark.parametrize("length", [-1, 4, torch.tensor([1, 4])])
def test_a_prompt_longer_than_the_row_raises(length: int | torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"prompt_length must lie in 0\.\.3"):
        mask_prompt(torch.tensor([[5, 6, 7], [5, 6, 7]]), length)


def test_prompt_lengths_for_another_number_of_rows_raise() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        mask_prompt(torch.tensor([[5, 6, 7]]), torch.tensor([1, 1]))


def test_logits_at_t_predict_the_label_at_t_plus_one() -> None:
    logits = torch.full((1, 3, 4), -1e4)
    logits[0, 0, 2] = logits[0, 1, 3] = 1e4
    assert masked_cross_entropy(logits, torch.tensor([[0, 2, 3]])).item() == 0.0


def test_hand_numbers() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = math.log(3.0)  # p = 3/6 for token 1
    labels = torch.tensor([[0, 1, -100], [0, 0, 0]])
    total = math.log(2.0) + 2 * math.log(4.0)
    assert masked_cross_entropy(logits, labels).item() == pytest.approx(total / 3)
    assert masked_cross_entropy(logits, labels, "sum").item() == pytest.approx(total)
    assert masked_cross_entropy(logits, labels, denominator=12).item() == pytest.approx(total / 12)
    torch.testing.assert_close(
        masked_cross_entropy(logits, labels, "none"), torch.tensor([[math.log(2.0), 0.0], [math.log(4.0), math.log(4.0)]])
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 5))
def test_matches_torch_on_the_shifted_rows(seed: int, rows: int, length: int) -> None:
    logits = _logits(rows, length, 7, seed=seed)
    labels = torch.randint(0, 7, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels[:, 1 : 1 + seed % (length - 1)] = IGNORE_INDEX
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1), ignore_index=-100)
    torch.testing.assert_close(masked_cross_entropy(logits, labels), expected)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(0, 4))
def test_loss_ignores_padding(seed: int, padding: int) -> None:
    logits, labels = _logits(1, 4, 5, seed=seed), torch.tensor([[0, 1, 2, 3]])
    padded = torch.cat([logits, torch.full((1, padding, 5), math.nan)], 1)
    padded_labels = torch.cat([labels, torch.full((1, padding), IGNORE_INDEX)], 1)
    torch.testing.assert_close(masked_cross_entropy(padded, padded_labels), masked_cross_entropy(logits, labels))


def test_micro_batches_with_the_global_denominator_add_up_to_the_batch() -> None:
    labels = torch.randint(0, 5, (8, 6), generator=torch.Generator().manual_seed(1))
    for row in range(8):
        labels[row, : row + 1] = IGNORE_INDEX  # the last rows train nothing at all
    whole = _logits(8, 6, 5).requires_grad_()
    parts = whole.detach().clone().requires_grad_()
    count = int((labels[:, 1:] != IGNORE_INDEX).sum())
    loss = masked_cross_entropy(whole, labels)
    loss.backward()
    total = 0.0
    for row in range(8):
        part = masked_cross_entropy(parts[row : row + 1], labels[row : row + 1], denominator=count)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("labels", [[[-100, -100, -100]], [[2, -100, -100]]])
def test_no_trained_token_is_an_error_and_not_a_loss_of_zero(labels: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no trained token"):
        masked_cross_entropy(torch.zeros(1, 3, 4), torch.tensor(labels))


def test_one_trained_token_is_enough_and_a_denominator_of_one_is_one() -> None:
    for denominator in (None, 1):
        loss = masked_cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[0, 1]]), denominator=denominator)
        assert loss.item() == pytest.approx(math.log(4.0))


def test_no_trained_token_with_a_global_denominator_adds_nothing() -> None:
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    loss = masked_cross_entropy(logits, torch.full((1, 3), IGNORE_INDEX), denominator=5)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_untrained_positions_reaches_neither_value_nor_gradient(bad: float) -> None:
    logits = torch.zeros(1, 4, 3)
    logits[0, 0] = logits[0, 3] = bad
    logits.requires_grad_()
    loss = masked_cross_entropy(logits, torch.tensor([[0, -100, 1, 2]]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(3.0))
    assert logits.grad is not None
    assert not logits.grad[0, [0, 3]].any()
    assert torch.isfinite(logits.grad).all()


def test_non_finite_logits_of_a_trained_token_raise() -> None:
    with pytest.raises(NonFiniteError):
        masked_cross_entropy(torch.full((1, 2, 3), math.nan), torch.tensor([[0, 1]]))


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_outside_the_vocabulary_raise(label: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.2"):
        masked_cross_entropy(torch.zeros(1, 2, 3), torch.tensor([[0, label]]))


def test_wrong_arguments_raise() -> None:
    logits, labels = torch.zeros(1, 2, 3), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="reduction"):
        masked_cross_entropy(logits, labels, "average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="denominator divides a mean"):
        masked_cross_entropy(logits, labels, "sum", denominator=2)
    with pytest.raises(ValueError, match="denominator must be positive"):
        masked_cross_entropy(logits, labels, denominator=0)
    with pytest.raises(ValueError, match="must be"):
        masked_cross_entropy(logits, torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="must be"):
        masked_cross_entropy(logits[0], labels[0])


def test_bf16_logits_are_computed_in_fp32() -> None:
    logits = _logits(1, 4, 50).bfloat16()
    labels = torch.tensor([[0, 1, 2, 3]])
    loss = masked_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert masked_cross_entropy(logits, labels, "none").dtype == torch.float32
    torch.testing.assert_close(loss, masked_cross_entropy(logits.float(), labels), rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients(reduction: str) -> None:
    labels = torch.tensor([[0, 1, -100, 3], [2, -100, 2, 1]])
    logits = _logits(2, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: masked_cross_entropy(z, labels, reduction), logits)  # type: ignore[arg-type]
