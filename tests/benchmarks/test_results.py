"""From steps to ratios, and from ratios to the files, by hand numbers."""

from __future__ import annotations

import doctest

import pytest

from benchmarks import results

STEPS = {"postgrad": [1.0, 2.0, 4.0], "trl": [5.0, 4.0, 12.0]}
PEAKS = {"postgrad": 1100.0, "trl": 4100.0}


def steps(name):
    others = [0.0, 0.05, 0.3]
    peaks = [PEAKS[name] - 500, PEAKS[name], PEAKS[name]]
    return [
        {"seconds": seconds, "peak_mib": peak, "others": other, "parts": {"train": seconds / 2}}
        for seconds, peak, other in zip(STEPS[name], peaks, others, strict=True)
    ]


def a_row(method, **changes):
    found = results.paired(results.side(steps("postgrad"), 100.0), results.side(steps("trl"), 100.0))
    return {
        "method": method,
        **found,
        "tuned_allocator": None,
        "whole_batch": None,
        "limit_share": 0.5,
        "quick": False,
        "noisy": False,
    } | changes


def test_examples_in_the_docstrings_hold():
    found = doctest.testmod(results)
    assert found.attempted >= 2
    assert found.failed == 0


def test_a_side_is_its_median_and_its_highest_peak_over_the_loaded_model():
    found = results.side(steps("postgrad"), 100.0)
    assert found["median_s"] == 2.0
    assert found["peak_mib"] == 1000.0
    assert found["parts_s"] == {"train": 1.0}
    assert found["others"] == 0.3


def test_the_time_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians():
    found = results.paired(results.side(steps("postgrad"), 100.0), results.side(steps("trl"), 100.0))
    assert found["time_ratio"] == 3.0  # of 5, 2 and 3; the medians would give 2.5
    assert found["time_ratio_range"] == [2.0, 5.0]
    assert found["memory_ratio"] == 4.0


def test_sides_that_did_not_take_turns_have_no_ratio():
    with pytest.raises(ValueError, match="argument"):
        results.paired(results.side(steps("postgrad"), 100.0), results.side(steps("trl")[:2], 100.0))


def test_memory_that_was_not_measured_has_no_ratio():
    found = results.paired(results.side(steps("postgrad")), results.side(steps("trl")))
    assert found["memory_ratio"] is None


@pytest.mark.parametrize(
    ("name", "value", "dtype", "equal"),
    [
        ("loss", 0.0009, "float32", True),
        ("loss", 0.0011, "float32", False),
        ("loss", 0.02, "bfloat16", True),
        ("grad_norm", 20.018, "float32", True),
        ("grad_norm", 20.022, "float32", False),
        ("grad_norm", float("nan"), "float32", False),
    ],
)
def test_losses_and_gradients_that_differ_end_the_comparison(name, value, dtype, equal):
    theirs = {"loss": 0.0, "grad_norm": 20.0}
    if equal:
        results.check_equal(theirs | {name: value}, theirs, dtype)
    else:
        with pytest.raises(results.NotEqualError, match=name):
            results.check_equal(theirs | {name: value}, theirs, dtype)


def test_the_limit_is_what_takes_longer_arithmetic_or_memory():
    limits = {"gflops": 100.0, "gigabytes": 10.0, "flops": 3e11}
    assert results.limit_share(limits, 6.0) == 0.5
    assert results.limit_share(limits | {"bytes": 4.5e10}, 6.0) == 0.75


def test_a_new_row_takes_the_place_of_the_old_one_and_the_prose_stays(tmp_path):
    file, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text(f"before\n{results.BEGIN}\nold table\n{results.END}\nafter\n", encoding="utf-8")
    for row in (a_row("grpo"), a_row("sft"), a_row("grpo", limit_share=0.25)):
        results.write(row, file, page)
    assert [(row["method"], row["limit_share"]) for row in results.read(file)] == [("sft", 0.5), ("grpo", 0.25)]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old table" not in text
    assert "25 %" in text
    assert text.count("GRPO step") == 1


def test_a_quick_row_and_a_busy_machine_are_marked():
    line = results.table([a_row("grpo", quick=True, noisy=True)]).splitlines()[-1]
    assert "(quick, other processes ran)" in line
    assert "**3.00** (2.00–5.00)" in line
