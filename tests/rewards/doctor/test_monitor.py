"""The monitor says what the audit says, once, with bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from postgrad.rewards.doctor import Finding, Monitor, examine
from postgrad.rewards.doctor.monitor import WINDOWS
from postgrad.rewards.doctor.observed import WINDOW_GROUPS, Observed
from postgrad.testing.simulate import FAULTS, HEALTHY, simulate

UNDER_WAY = ("R19", "P1", "D1", "M1")


def lines(observed: Observed, step: int) -> list[dict[str, Any]]:
    """The rollout file of a step."""
    names = [reward.name for reward in observed.rewards]
    groups = [group for group, own in enumerate(observed.steps) if own == step]
    return [
        {
            "step": step, "dropped": "" if observed.trained[group] else "outcome_constant", "prompt": {"row": observed.prompts[group]},
            "rollouts": [rollout(observed, n) for n in members(observed, group)],
            "scores": [
                {
                    "rewards": {name: None if value != value else value for name, value in zip(names, observed.values[n], strict=True)},
                    "total": observed.totals[n], "advantage": observed.advantages[n],
                }
                for n in members(observed, group)
            ],
        }
        for group in groups
    ]  # fmt: skip


def members(observed: Observed, group: int) -> range:
    return range(group * observed.group_size, (group + 1) * observed.group_size)


def rollout(observed: Observed, n: int) -> dict[str, Any]:
    tokens = list(range(n, n + int(observed.lengths[n])))
    stop = "turn_tokens" if observed.truncated[n] else "end"
    return {"stop": stop, "segments": [{"source": "model", "token_ids": tokens}], "text": "x", "tool_results": []}


def watched(observed: Observed) -> dict[int, list[Finding]]:
    """Findings by the step at which they were returned."""
    monitor = Monitor(observed.rewards, method=observed.method, recipe=dict(observed.settings))
    numbers = dict(observed.metrics)
    found = {}
    for step in range(1, int(observed.steps[-1]) + 1):
        failures = [
            {"event": "reward_failure", "step": f.step, "reward": f.reward, "kind": f.kind, "row": f.row, "sample": f.sample}
            for f in observed.failures
            if f.step == step
        ]
        metrics = [{"step": step - 1, **numbers.get(step - 1, {})}]
        found[step] = monitor.see(lines(observed, step), metrics=metrics, failures=failures)
    return {step: findings for step, findings in found.items() if findings}


@pytest.mark.parametrize("name", [name for name in HEALTHY if name not in ("healthy_dpo", "healthy_reward")])
def test_nothing_is_said_of_a_healthy_run(name):
    for seed in range(2):
        assert watched(simulate(name, seed=seed)) == {}


@pytest.mark.parametrize(
    "name",
    ["all_fail", "phantom", "conflict", "redundant", "inversion", "sparse", "failing_grader", "length_hacking", "mismatch"],
)
def test_a_lasting_fault_is_said_after_two_windows_and_not_again(name):
    found = watched(simulate(name, seed=1))
    ids = [(finding.id, finding.severity) for findings in found.values() for finding in findings]
    assert FAULTS[name].check in [i for i, _ in ids]
    assert len(ids) == len(set(ids))
    assert min(found) == 8  # 8 groups in a step


def test_a_finding_is_said_again_when_it_has_become_graver():
    found = [f for findings in watched(simulate("kl_runaway", seed=0)).values() for f in findings if f.id == "R15"]
    assert [finding.severity for finding in found] == ["warn", "critical"]


def test_the_monitor_says_what_an_audit_of_the_same_groups_says():
    observed = simulate("inversion", seed=5)
    (said,) = {f.id: f for findings in watched(observed).values() for f in findings if f.id == "R7"}.values()
    audit = {f.id: f for f in examine(observed).findings}["R7"]
    assert said.title == audit.title
    assert said.evidence["value"] == pytest.approx(audit.evidence["value"], abs=0.08)


def test_memory_is_bounded_by_windows():
    observed = simulate("healthy", seed=0)
    monitor = Monitor(observed.rewards, method="grpo", recipe={})
    for round_ in range(2):
        for step in range(1, 37):
            own = round_ * 36 + step
            monitor.see([{**line, "step": own} for line in lines(observed, step)], metrics=[{"step": own, "kl": 0.1, "time/step_s": 2.0}])
    assert len(monitor._groups) <= (WINDOWS + 2) * WINDOW_GROUPS
    assert all(set(numbers) == {"kl"} for _, numbers in monitor._metrics)  # only what is looked at


def test_one_step_with_very_many_groups_is_kept_whole():
    observed = simulate("healthy", seed=0)
    monitor = Monitor(observed.rewards, method="grpo", recipe={})
    everything = [{**line, "step": 1} for step in range(1, 37) for line in lines(observed, step)]
    assert monitor.see([line for _ in range(3) for line in everything]) == []
    assert len(monitor._groups) == 3 * 288
