"""③ score: what the recipe's keys do to the advantages, and that each stays the sum of its parts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from postgrad.rewards.score import Scores
from postgrad.train.judging import judge, score
from postgrad.train.recipe import GRPOLoss


def judged(values, *, weights=(1.0,), size=4, scale="group", roles=None, **loss):
    """Advantages [N], shares [N, K] and dropped groups of a batch with these values [N, K]."""
    table = np.array(values, dtype=float).reshape(-1, len(weights))
    names = tuple(f"r{k}" for k in range(len(weights)))
    scores = Scores(names, tuple(weights), roles or ("outcome",) * len(weights), table, size)
    settings = GRPOLoss(**loss)
    scored = score([SimpleNamespace()] * (len(table) // size), SimpleNamespace(score=lambda groups: scores), settings)
    groups = judge(scored, settings, scale=scale)
    advantages = np.array([value for group in groups for value in group.advantages])
    shares = np.array([[value for group in groups for value in group.shares[name]] for name in names]).T
    return advantages, shares, [group.dropped for group in groups]


@pytest.mark.parametrize("loss", [{}, {"filter": "zero_std"}, {"normalize": "normalize_then_sum"}])
@pytest.mark.parametrize("scale", ["group", "batch", "none", "leave_one_out"])
def test_positive_weight_weighs_what_went_well_and_its_parts(loss, scale):
    values = [[1.0, 0.2], [0.0, 0.0], [0.0, 0.2], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    plain, _, _ = judged(values, weights=(1.0, 0.5), scale=scale, **loss)
    weighed, shares, _ = judged(values, weights=(1.0, 0.5), scale=scale, positive_weight=0.1, **loss)
    assert (plain[:4] > 0).any()
    np.testing.assert_allclose(weighed, np.where(plain > 0, 0.1 * plain, plain))
    np.testing.assert_allclose(shares.sum(axis=1), weighed, atol=1e-9)


def test_a_penalty_that_has_no_effect_gets_one_by_positive_weight():
    """{1, 0}, {1, −1} and {1, −5} give the same advantages; with λ = 0.2 a mistake weighs five times as much as a success."""
    two_levels = [judged([1.0, low, low, 1.0])[0] for low in (0.0, -1.0, -5.0)]
    for advantages in two_levels[1:]:
        np.testing.assert_allclose(advantages, two_levels[0], atol=2e-4)
    weighed, _, _ = judged([1.0, 0.0, 0.0, 1.0], positive_weight=0.2)
    assert abs(weighed[1] / weighed[0]) == pytest.approx(5.0)


def test_only_mistakes_teach_at_zero():
    advantages, _, _ = judged([1.0, 0.0, 0.0, 0.0], positive_weight=0.0)
    assert advantages[0] == 0.0
    assert (advantages[1:] < 0).all()


def test_groups_that_are_equal_only_before_normalising_are_not_left_out():
    """Totals 2 throughout, but each reward normalised by itself differs: with normalize_then_sum there is something to learn."""
    values = [[2.0, 0.0], [1.0, 0.25], [0.0, 0.5], [2.0, 0.0]]
    cancelled, _, dropped = judged(values, weights=(1.0, 4.0), filter="zero_std")
    assert dropped == ["all_equal"]
    assert not cancelled.any()
    kept, shares, dropped = judged(values, weights=(1.0, 4.0), filter="zero_std", normalize="normalize_then_sum")
    assert dropped == [""]
    assert np.abs(kept).min() > 0.1
    np.testing.assert_allclose(shares.sum(axis=1), kept)


def test_the_filter_still_drops_what_is_equal_and_what_nothing_scored():
    values = [1.0, 1.0, 1.0, 1.0, np.nan, np.nan, np.nan, np.nan, 1.0, 0.0, 0.0, 0.0]
    for normalize in ("sum_then_normalize", "normalize_then_sum"):
        _, _, dropped = judged(values, filter="zero_std", normalize=normalize)
        assert dropped == ["all_equal", "all_abstained", ""]


def test_outcome_filter_leaves_out_groups_whose_outcome_is_one():
    values = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    for normalize in ("sum_then_normalize", "normalize_then_sum"):
        advantages, _, dropped = judged(
            values, weights=(1.0, 0.2), roles=("outcome", "shaping"), size=2, filter="outcome", normalize=normalize
        )
        assert dropped == ["outcome_constant", ""]
        assert not advantages[:2].any()
        assert advantages[2] < 0 < advantages[3]
