"""Free ablation: by hand on a few groups, on simulated runs, and under every way to make advantages."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.ablation import ablate, lines, to_json, verdict
from postgrad.rewards.doctor import RewardInfo, observe
from postgrad.rewards.doctor.numbers import in_parts, pooled_kendall
from postgrad.rewards.doctor.recompute import SCHEMES, Scheme, recomputed
from postgrad.testing.simulate import simulate

OUTCOME = {"name": "right", "role": "outcome", "range": [0, 1]}


def observed(folder, groups, rewards, *, settings=None, method="grpo", step=lambda group: 1, advantages=None, truncated=()):
    """A run as a file of lines. groups: per group, per rollout, a value for each reward (None = abstained)."""
    names = [reward["name"] for reward in rewards]
    lines = [{"run": {"method": method, "rewards": rewards, "settings": settings or {}}}]
    for number, group in enumerate(groups):
        for sample, values in enumerate(group):
            line = {"step": step(number), "group": f"p{number}", "rewards": dict(zip(names, values, strict=True))}
            line |= {} if advantages is None else {"advantage": advantages[number][sample]}
            lines.append(line | {"truncated": (number, sample) in truncated})
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return observe(folder / "run.jsonl")


def of(ablation, name):
    return next(item for item in ablation.dropped if item.reward == name)


def test_the_numbers_are_those_computed_by_hand(tmp_path):
    """Group 0: totals 1, .5, 0, 0 → without `shape` 1, 0, 0, 0. Group 1: totals 1, 1.5, 1, 1.5 → 1, 1, 1, 1. Scale none."""
    groups = [[(1, 0), (0, 0.5), (0, 0), (0, 0)], [(1, 0), (1, 0.5), (1, 0), (1, 0.5)]]
    run = observed(tmp_path, groups, [OUTCOME, {"name": "shape", "role": "shaping"}], settings={"loss": {"scale": "none"}})
    item = of(ablate(run), "shape")
    # before: .625 .125 −.375 −.375 | −.25 .25 −.25 .25; after: .75 −.25 −.25 −.25 | 0 0 0 0
    assert item.flips == pytest.approx(5 / 8)
    # pairs ordered before: 5 + 4, after: 3; the 3 agree
    assert item.tau == pytest.approx(3 / math.sqrt(9 * 3))
    before, after = np.array([0.625, 0.125, -0.375, -0.375] + [-0.25, 0.25] * 2), np.array([0.75, -0.25, -0.25, -0.25] + [0.0] * 4)
    assert item.cosine == pytest.approx(before @ after / np.linalg.norm(before) / np.linalg.norm(after))
    assert item.other_best == 0.0
    assert item.equal == (0.0, 0.5)
    assert item.inverted == (0.0, 0.0)
    # Without the outcome: 0, .5, 0, 0 and 0, .5, 0, .5. The right rollout of group 0 (3 pairs) falls below one of the wrong ones.
    item = of(ablate(run), "right")
    assert item.other_best == pytest.approx(1 / 2)
    assert item.equal == (0.0, 0.0)
    assert item.inverted == pytest.approx((0.0, 1 / 3))
    assert item.visible


def copies(folder, count=40, **settings):
    noise = np.random.default_rng(0)
    groups = []
    for _ in range(count):
        right, style = noise.integers(0, 2, 8).tolist(), noise.random(8).round(2).tolist()
        groups.append([(r, r, s) for r, s in zip(right, style, strict=True)])
    rewards = [OUTCOME, {**OUTCOME, "name": "copy"}, {"name": "style", "role": "shaping", "weight": 0.3}]
    return observed(folder, groups, rewards, **settings)


def test_one_of_two_copies_makes_no_visible_change_and_a_reward_of_its_own_does(tmp_path):
    groups = [[(r, r) for r in row] for row in np.random.default_rng(1).integers(0, 2, (40, 8)).tolist()]
    ablation = ablate(observed(tmp_path, groups, [OUTCOME, {**OUTCOME, "name": "copy", "weight": 0.5}]))
    for name, other in (("right", "copy"), ("copy", "right")):
        item = of(ablation, name)
        assert (item.flips, round(item.tau, 9)) == (0.0, 1.0)
        assert verdict(item) == f"no visible change: not independent ({other} says the same: |ρ| = 1.00 within groups)"
    three = ablate(copies(tmp_path))
    assert of(three, "style").visible
    assert verdict(of(three, "style")).startswith("visible")
    assert [name for name in ("right", "copy") if of(three, name).tau > 0.95 and of(three, name).flips < 0.02] == ["right", "copy"]


def test_why_nothing_changes_is_told_apart(tmp_path):
    rng = np.random.default_rng(2)
    groups = [[(r, 1.0, r * 1.5, 1e-4 * n) for r, n in zip(range(8), rng.random(8).tolist(), strict=True)] for _ in range(40)]
    rewards = [OUTCOME, {"name": "constant"}, {"name": "unweighted", "weight": 0.0}, {"name": "faint", "weight": 0.1}]
    ablation = ablate(observed(tmp_path, groups, rewards))
    assert {item.reward: item.because.split(" (")[0] for item in ablation.dropped} == {
        "right": "",
        "constant": "it never differs within a group of this run",
        "unweighted": "it has weight 0",
        "faint": "not independent",
    }
    assert "its weight may be too small" in of(ablation, "faint").because
    assert of(ablation, "right").visible


@pytest.mark.parametrize("scheme", SCHEMES)
def test_advantages_are_made_as_the_run_made_them(scheme):
    """Whatever a run used is found in its advantages, and used again without the reward."""
    run = simulate("healthy", seed=3)
    made = dataclasses.replace(run, advantages=recomputed(run, scheme))
    ablation = ablate(made, ["format"])
    assert ablation.scheme == scheme
    assert ablation.remarks == ()
    weights = np.array([1.0, 0.0, 0.2])
    (item,) = ablation.dropped
    before, after = recomputed(run, scheme), recomputed(run, scheme, weights=weights)
    assert item.cosine == pytest.approx(before @ after / np.linalg.norm(before) / np.linalg.norm(after))


def test_without_advantages_the_settings_say_how_they_are_made_and_a_remark_says_so(tmp_path):
    for settings, scheme in (
        ({}, Scheme("group")),
        ({"loss": {"scale": "none"}}, Scheme("none")),
        ({"loss": {"normalize": "normalize_then_sum"}}, Scheme("group", "normalize_then_sum")),
    ):
        ablation = ablate(copies(tmp_path, settings=settings))
        assert ablation.scheme == scheme
        assert any("do not tell how they were made" in remark for remark in ablation.remarks)


def test_credit_by_turn_is_said_and_advantages_of_the_users_own_are_refused(tmp_path):
    ablation = ablate(copies(tmp_path, settings={"loss": {"credit": "turn"}}))
    assert "the run credits each turn by itself; here the rollouts are compared as wholes" in ablation.remarks
    with pytest.raises(RecipeError, match="a function of yours made the advantages"):
        ablate(copies(tmp_path, settings={"loss": {"advantages": "rewards.py:mine"}}))


def test_the_filter_of_the_run_is_applied_with_and_without(tmp_path):
    """`a` and `b` cancel: with both, the group is filtered away; without one of them it trains."""
    rewards = [OUTCOME, {"name": "b", "role": "shaping"}]
    groups = [[(1, 0), (0, 1), (1, 0), (0, 1)], [(1, 0), (1, 1), (1, 0), (1, 1)], [(1, 1), (0, 0), (0, 0), (0, 0)]]
    kept = {}
    for mode in ("none", "zero_std", "outcome"):
        ablation = ablate(observed(tmp_path, groups, rewards, settings={"loss": {"filter": mode, "scale": "none"}}))
        assert ablation.filter == mode
        kept[mode] = of(ablation, "b")
    assert kept["none"].equal == kept["outcome"].equal == pytest.approx((1 / 3, 1 / 3))
    # Group 1 has one outcome: under `outcome` it trains neither with b nor without it, otherwise b alone gives it a signal.
    assert kept["none"].flips == kept["zero_std"].flips == pytest.approx(4 / 8)
    assert kept["outcome"].flips == 0.0
    assert kept["outcome"].tau == pytest.approx(3 / math.sqrt(3 * 7))  # the cancelling group is ordered only without b
    assert kept["outcome"].visible


def test_without_its_only_outcome_a_filtered_run_still_leaves_out_equal_groups(tmp_path):
    groups = [[(1, 0), (0, 0), (0, 0)], [(1, 0), (1, 1), (0, 0)]]
    run = observed(tmp_path, groups, [OUTCOME, {"name": "b", "role": "shaping"}], settings={"loss": {"filter": "outcome"}})
    assert of(ablate(run), "right").equal == (0.0, 0.5)


def test_rollouts_that_the_loss_leaves_out_do_not_count(tmp_path):
    groups = [[(1, 0), (0, 0.4), (0, 0)]] * 40
    rewards = [OUTCOME, {"name": "b", "role": "shaping"}]
    cut = [(number, 1) for number in range(40)]
    plain = of(ablate(observed(tmp_path, groups, rewards, truncated=cut)), "b")
    masked = of(ablate(observed(tmp_path, groups, rewards, truncated=cut, settings={"loss": {"mask_truncated": True}})), "b")
    assert plain.visible
    assert (masked.tau, masked.visible) == (1.0, False)


def test_abstentions_are_neutral_as_in_training(tmp_path):
    groups = [[(1, None), (0, None), (0, 1), (None, None)]] * 40
    item = of(ablate(observed(tmp_path, groups, [OUTCOME, {"name": "b"}])), "b")
    assert item.flips == 0.0  # one rollout scored: its mean is itself, so b never moves anything
    assert "never differs" in item.because


def test_ppo_is_compared_within_steps_because_it_has_no_groups(tmp_path):
    groups = [[(place % 2, place % 3)] for place in range(90)]
    run = observed(
        tmp_path, groups, [OUTCOME, {"name": "b", "weight": 0.1}], method="ppo", step=lambda group: 1 + group // 40,
        advantages=[[0.3]] * 90,
    )  # fmt: skip
    ablation = ablate(run)
    assert any("PPO's baseline is the critic" in remark for remark in ablation.remarks)
    assert of(ablation, "right").flips > 0.3
    assert of(ablation, "b").tau < 0.99
    other = of(ablate(simulate("healthy_ppo", seed=0)), "correct")
    assert other.flips > 0.3


def test_the_only_reward_leaves_nothing(tmp_path):
    ablation = ablate(observed(tmp_path, [[(1,), (0,), (0,)]] * 40, [OUTCOME]))
    (item,) = ablation.dropped
    assert (item.flips, item.tau, item.equal) == (1.0, 0.0, (0.0, 1.0))
    assert "right is the only reward with a weight: without it there is nothing to learn" in ablation.remarks


def test_chosen_rewards_only_and_unknown_ones_refused(tmp_path):
    run = copies(tmp_path)
    assert [item.reward for item in ablate(run, ["style", "copy", "style"]).dropped] == ["style", "copy"]
    with pytest.raises(RecipeError, match="no reward 'stlye'") as caught:
        ablate(run, ["stlye"])
    assert "right, copy, style" in caught.value.hint


def test_a_run_without_anything_to_compare_is_refused(tmp_path):
    with pytest.raises(DataError, match="no rollouts with rewards"):
        ablate(simulate("dpo_stuck", seed=0))
    with pytest.raises(DataError, match="one rollout per prompt"):
        ablate(observed(tmp_path, [[(1,)]] * 40, [OUTCOME]))


def test_few_groups_are_said_and_text_and_json_agree(tmp_path):
    ablation = ablate(copies(tmp_path, count=3))
    assert "3 groups: statistics over fewer than 32 say little" in ablation.remarks
    data = json.loads(json.dumps(to_json(ablation), allow_nan=False))
    text = "\n".join(lines(ablation))
    for item in data["dropped"]:
        assert f"{item['reward']}: {item['verdict']}" in text
    unknown = ablate(dataclasses.replace(ablation.observed, rewards=tuple(RewardInfo(r.name) for r in ablation.observed.rewards)))
    assert to_json(unknown)["dropped"][0]["inverted"] == [None, None]


@pytest.mark.parametrize("seed", range(5))
def test_rewards_of_healthy_runs_are_visible_and_a_saturated_one_is_not(seed):
    assert all(item.visible for item in ablate(simulate("healthy", seed=seed)).dropped)
    late = simulate("saturated", seed=seed)
    part = late.join(len(late.windows) - 1, len(late.windows) - 1)
    assert not of(ablate(part), "format").visible


# ---- Kendall's tau

VALUES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, math.nan]), st.sampled_from([0.0, 1.0, 2.0])), min_size=3, max_size=12)


@given(VALUES)
def test_kendall_is_what_counting_pairs_gives(pairs):
    size = len(pairs)
    agreeing = opposite = in_x = in_y = 0
    for i in range(size):
        for j in range(i):
            dx, dy = pairs[i][0] - pairs[j][0], pairs[i][1] - pairs[j][1]
            if math.isnan(dx):
                continue
            agreeing += dx * dy > 0
            opposite += dx * dy < 0
            in_x += dx != 0
            in_y += dy != 0
    x, y = (np.array(column) for column in zip(*pairs, strict=True))
    got = pooled_kendall(x, y, size)
    if in_x and in_y:
        assert got == pytest.approx((agreeing - opposite) / math.sqrt(in_x * in_y))
    else:
        assert math.isnan(got) if not in_x and not in_y else got == 0.0


def test_pairs_of_different_groups_do_not_count():
    assert pooled_kendall(np.array([1.0, 2.0, 10.0, 20.0]), np.array([1.0, 2.0, 0.1, 0.2]), 2) == pytest.approx(1.0)


def test_large_groups_are_compared_in_parts(monkeypatch):
    """PPO compares all rollouts of a step: the pairs of a long run must not be in memory at once."""
    run = simulate("healthy_ppo", seed=0)
    whole = ablate(run)
    parts = []

    def small(rollouts, group_size):
        parts.append(list(in_parts(rollouts, group_size, pairs=group_size**2)))
        return parts[-1]

    monkeypatch.setattr("postgrad.rewards.doctor.numbers.in_parts", small)
    monkeypatch.setattr("postgrad.rewards.ablation.free.in_parts", small)
    assert to_json(ablate(run)) == to_json(whole)
    assert all(len(slices) == 36 for slices in parts)
