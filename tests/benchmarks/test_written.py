"""What `make bench` and `make scaling` wrote: complete, in agreement with itself, and shown on the pages."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import results, scaling

WRITTEN = results.read()


def test_there_is_a_row_for_every_method():
    assert [row["method"] for row in WRITTEN] == list(results.TITLES)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: row["method"])
def test_written_ratios_follow_from_the_written_steps(row):
    assert {"date", "machine", "dtype", "threads", "repeats", "limits", "check"} <= row.keys()
    for part in filter(None, (row, row["tuned_allocator"], row["whole_batch"])):
        ours, theirs = part["postgrad"], part["trl"]
        pairs = [b / a for a, b in zip(ours["step_s"], theirs["step_s"], strict=True)]
        assert part["time_ratio"] == pytest.approx(statistics.median(pairs), abs=0.006)
        if part["memory_ratio"] is not None:
            assert part["memory_ratio"] == pytest.approx(theirs["peak_mib"] / ours["peak_mib"], abs=0.006)
    assert row["limit_share"] is None or 0.0 < row["limit_share"] <= 1.0
    if row["method"] != "decoding":
        results.check_equal(row["check"]["postgrad"], row["check"]["trl"], row["dtype"])


def test_the_page_shows_what_was_measured_beside_trl():
    assert f"{results.BEGIN}\n{results.table(WRITTEN)}\n{results.END}" in results.PAGE.read_text(encoding="utf-8")


@pytest.mark.skipif(not scaling.RESULTS.is_file(), reason="make scaling has not run")
def test_the_page_of_growth_shows_what_was_measured_and_all_of_it_holds():
    measured = json.loads(scaling.RESULTS.read_text(encoding="utf-8"))
    assert list(measured) == list(scaling.AXES)
    for name, axis in scaling.AXES.items():
        assert [item["value"] for item in measured[name]] == list(axis.values)
    assert f"{scaling.BEGIN}\n{scaling.tables(measured)}\n{scaling.END}" in scaling.PAGE.read_text(encoding="utf-8")
    assert all(ratio <= rule.at_most for rule, ratio in scaling.judged(measured))
