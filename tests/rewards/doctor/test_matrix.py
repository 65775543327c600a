"""Detection and false alarms on simulated runs: each fault on at least 19 of 20 seeds, and no alarm on a healthy run, ever."""

from __future__ import annotations

import pytest

from postgrad.rewards.doctor.examine import CHECKS, examine
from postgrad.rewards.doctor.finding import SEVERITIES
from postgrad.testing.simulate import FAULTS, HEALTHY, simulate

SEEDS = range(20)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name):
    for seed in SEEDS:
        alarms = [(f.id, f.severity, f.message) for f in examine(simulate(name, seed=seed)).findings if f.severity != "info"]
        assert alarms == [], f"seed {seed}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    fault = FAULTS[name]
    wanted = SEVERITIES.index(fault.severity)
    missed = []
    for seed in SEEDS:
        result = CHECKS[fault.check](simulate(name, seed=seed))
        if getattr(result, "severity", None) not in SEVERITIES[wanted:]:
            missed.append((seed, result))
    assert len(missed) <= 1, missed


def test_every_check_but_none_has_a_simulated_fault():
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS)


def test_the_same_seed_gives_the_same_run():
    one, two, other = (examine(simulate("inversion", seed=seed)).findings for seed in (3, 3, 4))
    assert one == two
    assert one != other
