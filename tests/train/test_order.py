"""Every row once per epoch, the same order after a resume."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postgrad.train.order import CountedBatches, FilledBatches, positions_in_run, row_at
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


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), room=st.integers(40, 90), seed=st.integers(0, 9), shuffle=st.booleans()
)
def test_filled_steps_hold_every_row_once_per_epoch_whole_and_within_the_limit(lengths, room, seed, shuffle):
    """trl#5075, trl#4554: packing left orphan pieces of rows and dropped what did not fit."""
    batches = FilledBatches(lengths, room, seed, shuffle, epochs=2.0)
    steps = [batches.batch(step) for step in range(1, batches.steps + 1)]
    assert all(sum(lengths[index] for index in step) <= room for step in steps)
    assert sorted(index for step in steps for index in step) == sorted([*range(len(lengths))] * 2)
    assert batches.epoch(batches.steps) == 2.0


@given(lengths=st.lists(st.integers(1, 33), min_size=40, max_size=80), room=st.sampled_from([64, 65, 129, 257]))
def test_steps_are_filled_for_any_limit(lengths, room):
    """trl#3887: no packing at all when the limit was 2^k + 1."""
    batches = FilledBatches(lengths, room, 0, True, epochs=1.0)
    fewest = -(-sum(lengths) // room)
    assert batches.steps <= 11 / 9 * fewest + 1


def test_filled_steps_in_file_order_end_where_the_next_row_does_not_fit():
    batches = FilledBatches([4, 5, 3, 10, 1], 10, 0, shuffle=False, max_steps=3)
    assert [batches.batch(step) for step in (1, 2, 3, 4, 5)] == [[0, 1], [2], [3], [4], [0, 1]]
    assert batches.fullness() == 23 / 40


def test_filled_steps_differ_between_epochs_and_seeds():
    lengths = [1 + index % 7 for index in range(60)]
    one, other = (FilledBatches(lengths, 20, seed, True, epochs=2.0) for seed in (0, 1))
    half = one.steps // 2
    assert [one.batch(step) for step in range(1, half + 1)] != [one.batch(step) for step in range(half + 1, one.steps + 1)]
    assert one.batch(1) != other.batch(1)


def test_a_part_of_an_epoch_takes_that_part_of_its_steps():
    batches = FilledBatches([10] * 8, 20, 0, True, epochs=1.5)
    assert batches.steps == 6
    assert batches.epoch(6) == 1.5


def test_counted_steps_take_rows_through_the_end_of_an_epoch():
    batches = CountedBatches(5, 2, 0, shuffle=False, epochs=2.0)
    assert [list(batches.batch(step)) for step in range(1, batches.steps + 1)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert batches.epoch(5) == 2.0
    uneven = CountedBatches(5, 2, 0, shuffle=False, epochs=1.0)
    assert [list(uneven.batch(step)) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4]]
