import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.errors import RecipeError
from postgrad.rewards.filter import cancelling_rewards, keep_groups
from postgrad.rewards.ledger import weighted_total

NAN = float("nan")
TOTALS = [1.0, 0.0, 0.5, 0.5, 0.4, 0.6, NAN, NAN, 3.0, NAN]
OUTCOME = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, NAN, NAN, 1.0, NAN]
CAUSES = (None, "all_equal", "outcome_constant", "all_abstained", "all_equal")


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("none", (True,) * 5), ("zero_std", (True, False, True, False, False)), ("outcome", (True, False, False, False, False))],
)
def test_each_mode_drops_whole_groups_and_names_the_cause(mode, kept):
    result = keep_groups(TOTALS, OUTCOME, 2, mode=mode)
    assert result.kept == kept
    assert result.causes == CAUSES


def test_dropped_groups_are_counted_by_cause():
    assert keep_groups(TOTALS, OUTCOME, 2, mode="outcome").dropped == {"all_equal": 2, "outcome_constant": 1, "all_abstained": 1}
    assert keep_groups(TOTALS, OUTCOME, 2, mode="none").dropped == {}


def test_group_with_one_winner_stays_whole():
    """Dropping its equal members would turn [1, 0, 0, 0] into [0, 0, 0]."""
    assert keep_groups([1.0, 0.0, 0.0, 0.0], None, 4, mode="zero_std").kept == (True,)


def test_continuous_group_of_middling_mean_and_no_spread_is_dropped():
    assert keep_groups([0.5] * 4, None, 4, mode="zero_std").kept == (False,)


def test_saturated_mean_with_spread_is_kept():
    assert keep_groups([1.0, 1.0, 1.0, 0.9], None, 4, mode="zero_std").kept == (True,)


def test_outcome_mode_needs_an_outcome_reward():
    with pytest.raises(RecipeError, match="role outcome"):
        keep_groups([1.0, 0.0], None, 2, mode="outcome")


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=6, max_size=6), st.floats(-5, 5))
def test_filter_looks_at_spread_and_not_at_level(totals, shift):
    moved = np.array(totals) + shift
    assert keep_groups(totals, totals, 3, mode="outcome") == keep_groups(moved, moved, 3, mode="outcome")


def test_rewards_that_cancel_are_named():
    values = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [1.0, 1.0, 2.0]])
    weights = [0.5, 0.5, 1.0]
    totals = weighted_total(values, weights, 2)
    assert cancelling_rewards(values, weights, totals, ["short", "long", "same"], 2) == {0: ("short", "long")}


def test_group_that_is_equal_throughout_is_no_cancellation():
    values = np.array([[1.0, 1.0], [1.0, 1.0]])
    assert cancelling_rewards(values, [1.0, 1.0], weighted_total(values, [1.0, 1.0], 2), ["a", "b"], 2) == {}
