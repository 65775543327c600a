"""What must hold of growth, judged by hand numbers."""

from __future__ import annotations

import pytest

from benchmarks import scaling


def found(rule, ratio):
    return {
        rule.axis: [
            {"value": value, "step_s": 1.0, "train_s": 0.5, "peak_mib": mib, "beyond_weights_mib": mib, "tokens": 4096, "trained_tokens": 9}
            for value, mib in ((rule.small, 1000.0), (rule.large, 1000.0 * ratio))
        ]
    }


@pytest.mark.parametrize("rule", scaling.MUST_HOLD, ids=lambda rule: rule.axis)
def test_growth_beyond_the_limit_is_said(rule):
    assert scaling.judged(found(rule, 1.05)) == [(rule, 1.05)]
    assert "1.05" in scaling.tables(found(rule, 1.05))
    assert "does not hold" not in scaling.tables(found(rule, 1.05))
    assert "does not hold" in scaling.tables(found(rule, 1.31))


def test_the_requirements_are_about_points_that_are_measured_and_four_times_as_large():
    for rule in scaling.MUST_HOLD:
        assert {rule.small, rule.large} <= set(scaling.AXES[rule.axis].values)
        assert rule.large == 4 * rule.small
