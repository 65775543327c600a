"""Bin packing: nothing is split, nothing is lost, bins are full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postgrad.packing import fill


@given(sizes=st.lists(st.integers(0, 50), max_size=80), capacity=st.integers(1, 60))
def test_every_index_comes_once_and_no_bin_overflows(sizes, capacity):
    bins = fill(sizes, capacity)
    assert sorted(index for bin in bins for index in bin) == list(range(len(sizes)))
    for bin in bins:
        assert sum(sizes[index] for index in bin) <= capacity or len([index for index in bin if sizes[index]]) == 1


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=80), capacity=st.integers(50, 120))
def test_no_two_bins_could_be_one(sizes, capacity):
    totals = sorted(sum(sizes[index] for index in bin) for bin in fill(sizes, capacity))
    assert len(totals) < 2 or totals[0] + totals[1] > capacity


def test_the_fullest_bin_with_room_is_taken():
    assert fill([7, 6, 3], 10) == [[0, 2], [1]]


def test_a_size_above_the_capacity_stands_alone():
    assert fill([12, 3], 10) == [[0], [1]]
