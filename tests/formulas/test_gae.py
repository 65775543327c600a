"""token_rewards and gae: masked tokens are no time steps, and no score falls into the padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import NonFiniteError, gae, token_rewards


def _naive(rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float) -> list[float]:
    """The definition: A_t = Σ_l (γλ)^l δ_{t+l}, over the steps that exist."""
    following = [*values[1:], bootstrap]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, len(delta))) for t in range(len(delta))]


def test_hand_numbers() -> None:
    rewards, values, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.2]]), torch.ones(1, 3)
    # δ = [0.9·0.4 − 0.5, 0.9·0.2 − 0.4, 1 − 0.2] = [−0.14, −0.22, 0.8], γλ = 0.45
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    expected = [-0.14 + 0.45 * (-0.22 + 0.45 * 0.8), -0.22 + 0.45 * 0.8, 0.8]
    torch.testing.assert_close(advantages, torch.tensor([expected]))
    torch.testing.assert_close(returns, advantages + values)


def test_bootstrap_is_the_value_after_the_last_step() -> None:
    advantages, _ = gae(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1), gamma=0.5, lam=1.0, bootstrap=torch.tensor([2.0, 0.0]))
    assert advantages.tolist() == [[1.0], [0.0]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_masked_tokens_are_no_time_steps(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 6, generator=generator) > 0.4
    rewards, values = (torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    bootstrap = torch.randn(3, dtype=torch.float64, generator=generator)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for row in range(3):
        steps = mask[row]
        expected = _naive(rewards[row][steps].tolist(), values[row][steps].tolist(), gamma, lam, bootstrap[row].item())
        assert advantages[row][steps].tolist() == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(returns[row][steps], advantages[row][steps] + values[row][steps])
        assert not advantages[row][~steps].any()
        assert not returns[row][~steps].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_stands_under_the_mask_is_never_read(bad: float) -> None:
    mask = torch.tensor([[1, 0, 1, 0]])
    rewards, values = torch.tensor([[0.0, bad, 1.0, bad]]), torch.tensor([[0.5, bad, 0.2, bad]], requires_grad=True)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.9 * 0.2 - 0.5 + 0.45 * 0.8, 0.0, 0.8, 0.0]]))
    (advantages.sum() + returns.sum()).backward()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert values.grad[0, [1, 3]].tolist() == [0.0, 0.0]


def test_lambda_one_is_the_articles_return_minus_value() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.3, 0.1, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.ones(1, 3))
    torch.testing.assert_close(advantages, 1 - values)


def test_no_token_at_all_gives_nothing() -> None:
    advantages, returns = gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (2, 0)


@pytest.mark.parametrize(("gamma", "lam"), [(-0.1, 0.5), (1.1, 0.5), (math.nan, 0.5), (0.5, -0.1), (0.5, 1.1), (0.5, math.nan)])
def test_discounts_outside_zero_to_one_raise(gamma: float, lam: float) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        gae(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), gamma=gamma, lam=lam)


def test_discounts_of_zero_and_one_are_allowed() -> None:
    for gamma, lam in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        gae(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), gamma=gamma, lam=lam)


def test_shapes_are_never_broadcast() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    for arguments in ((x[:, :1], x, mask), (x, x[:1], mask), (x, x, mask[:1])):
        with pytest.raises(ValueError, match="shape"):
            gae(*arguments, gamma=1.0, lam=1.0)
    for bootstrap in (torch.zeros(1), torch.zeros(2, 1), torch.tensor(0.0)):
        with pytest.raises(ValueError, match="bootstrap"):
            gae(x, x, mask, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        gae(x[0], x[0], mask[0], gamma=1.0, lam=1.0)


def test_non_finite_numbers_that_count_raise() -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2)
    for arguments in ((x + math.nan, x), (x, x + math.nan)):
        with pytest.raises(NonFiniteError):
            gae(*arguments, mask, gamma=1.0, lam=1.0)
    with pytest.raises(NonFiniteError):
        gae(x, x, mask, gamma=1.0, lam=1.0, bootstrap=torch.tensor([math.inf]))
    with pytest.raises(NonFiniteError):  # the advantage is finite, the return is not
        gae(torch.tensor([[3e38]]), torch.tensor([[3e38]]), torch.ones(1, 1), gamma=1.0, lam=1.0, bootstrap=torch.tensor([3e38]))


def test_score_goes_to_the_last_counted_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert rewards.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3], [4, 0, 0, 0]]


def test_kl_is_subtracted_on_every_counted_token_and_only_there() -> None:
    kl = torch.tensor([[0.5, math.nan, -0.25]])
    rewards = token_rewards(torch.tensor([2.0]), torch.tensor([[1, 0, 1]]), kl, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.0, 2.025]]))
    assert token_rewards(torch.tensor([2.0]), torch.ones(1, 1), torch.ones(1, 1)).item() == 2.0


def test_a_score_that_no_token_could_carry_raises() -> None:
    with pytest.raises(ValueError, match="no counted token"):
        token_rewards(torch.tensor([1.0, 1.0]), torch.tensor([[1, 1], [0, 0]]))


def test_token_rewards_refuses_other_shapes_and_non_finite_scores() -> None:
    for scores, mask in ((torch.zeros(2, 1), torch.ones(2, 3)), (torch.zeros(3), torch.ones(2, 3)), (torch.zeros(3), torch.ones(3))):
        with pytest.raises(ValueError, match="must be"):
            token_rewards(scores, mask)
    with pytest.raises(ValueError, match="mask has shape"):
        token_rewards(torch.zeros(2), torch.ones(2, 3), torch.zeros(2, 1))
    with pytest.raises(NonFiniteError):
        token_rewards(torch.tensor([math.nan]), torch.ones(1, 2))
    assert token_rewards(torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, 2)).dtype == torch.float32


def test_half_precision_is_computed_in_fp32() -> None:
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    for output in gae(x, x, torch.ones(1, 2), gamma=1.0, lam=1.0, bootstrap=torch.ones(1, dtype=torch.bfloat16)):
        assert output.dtype == torch.float32


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(2, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    bootstrap = torch.ones(2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    assert torch.autograd.gradcheck(lambda r, v, b: gae(r, v, mask, gamma=0.9, lam=0.8, bootstrap=b), (rewards, values, bootstrap))
