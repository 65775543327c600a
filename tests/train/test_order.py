"""Every row once per epoch, the same order after a resume."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postgrad.train.order import positions_in_run, row_at
from postgrad.train.recipe import Optimizer
from postgrad.train.schedule import learning_rate
from postgrad.train.statistics import mean_interval, wilson


@given(size=st.integers(1, 50), seed=st.integers(0, 2**63), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_every_row_comes_exactly_once_per_epoch(size, seed, epoch, shuffle):
    rows = [row_at(position, size=size, seed=seed, shuffle=shuffle) for position in range(epoch * size, (epoch + 1) * size)]
    assert sorted(rows) == list(range(size))


def test_epochs_and_seeds_are_shuffled_differently():
    def order(seed: int, epoch: int) -> list[int]:
        return [row_at(position, size=100, seed=seed, shuffle=True) for position in range(epoch * 100, epoch * 100 + 100)]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_without_shuffle_rows_come_as_they_stand():
    assert [row_at(position, size=3, seed=9, shuffle=False) for position in range(5)] == [0, 1, 2, 0, 1]


def test_last_partial_batch_of_the_last_epoch_is_not_dropped():
    assert positions_in_run(size=10, epochs=1, per_step=4, max_steps=None) == (3, 10)
    assert positions_in_run(size=1, epochs=1, per_step=8, max_steps=None) == (1, 1)


def test_schedules_start_with_the_warm_up_and_end_near_zero():
    linear = Optimizer(learning_rate=1.0, warmup_steps=2, schedule="linear")
    assert [round(learning_rate(step, 6, linear), 3) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = Optimizer(learning_rate=1.0, schedule="cosine")
    assert [round(learning_rate(step, 4, cosine), 3) for step in range(1, 5)] == [1.0, 0.854, 0.5, 0.146]


def test_wilson_interval_of_a_known_case():
    interval = wilson(223, 240)
    assert (round(interval.mean, 3), round(interval.low, 3), round(interval.high, 3)) == (0.929, 0.89, 0.955)


def test_mean_interval_leaves_out_abstentions_and_widens_for_other_values():
    assert mean_interval([1.0, 0.0, float("nan")]).count == 2
    interval = mean_interval([0.2, 0.4, 0.6])
    assert round(interval.high - interval.mean, 4) == 0.2263
