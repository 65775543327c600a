"""Each check on rollouts that were written down by hand, with its numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.rewards.doctor import Finding, Observed, Passed, RewardInfo, Skipped
from postgrad.rewards.doctor.assemble import About, Sample, Sampled, TextFacts, assemble, facts_of_text
from postgrad.rewards.doctor.examine import CHECKS, examine
from postgrad.rewards.doctor.observed import Failure
from postgrad.rewards.doctor.recompute import SCHEMES, recomputed, scheme_of
from postgrad.rewards.doctor.render import summary
from postgrad.rewards.doctor.shares import pushed, signal_shares

RIGHT = RewardInfo("right", 1.0, "outcome", (0.0, 1.0))
HELP = RewardInfo("help", 0.5, "shaping", (0.0, 1.0))
NONE = math.nan
Group = Sequence[Sequence[float]]


def run(
    *groups: Group, rewards: Sequence[RewardInfo] = (RIGHT, HELP), repeat: int = 64, prompts: int | None = None, **about: Any
) -> Observed:
    """The groups, one row of rewards per rollout, over and over: `repeat` groups in all, 8 per step. Advantages as `scale: group` gives."""
    sampled = [
        Sampled(
            1 + place // 8,
            f"p{place if prompts is None else place % prompts}",
            tuple(Sample(dict(zip([r.name for r in rewards], row, strict=True))) for row in groups[place % len(groups)]),
        )
        for place in range(repeat)
    ]
    drawn = assemble(sampled, About("by hand", about.pop("method", "grpo"), tuple(rewards), **about))
    object.__setattr__(drawn, "advantages", recomputed(drawn, SCHEMES[0]))
    return drawn


def finding(name: str, observed: Observed) -> Finding:
    result = CHECKS[name](observed)
    assert isinstance(result, Finding), result
    return result


def passes(name: str, observed: Observed) -> Passed:
    result = CHECKS[name](observed)
    assert isinstance(result, Passed), result
    return result


def skips(name: str, observed: Observed) -> Skipped:
    result = CHECKS[name](observed)
    assert isinstance(result, Skipped), result
    return result


ALL_WRONG = [[0, 0.2]] * 4
ALL_RIGHT = [[1, 0.2]] * 4
MIXED = [[1, 0.2], [0, 0.2], [0, 0.2], [0, 0.2]]
PHANTOM = [[0, 0.2], [0, 0.4], [0, 0.2], [0, 0.2]]

# R1 -----------------------------------------------------------------------------------------------------------------------------------


def test_collapse_counts_groups_by_their_spread_and_names_their_kind():
    found = finding("R1", run(ALL_WRONG, ALL_WRONG, ALL_RIGHT, MIXED, MIXED))
    assert found.severity == "warn"
    assert found.evidence["value"] == pytest.approx(0.6, abs=0.02)
    assert found.evidence["cost"] == pytest.approx(2.5, abs=0.1)
    assert found.evidence["all_fail"] == pytest.approx(2 / 3, abs=0.02)
    assert found.evidence["all_pass"] == pytest.approx(1 / 3, abs=0.02)
    rate = 1.5 / 5
    assert found.evidence["expected"] == pytest.approx(rate**4 + (1 - rate) ** 4, abs=0.02)
    assert found.fixes[0].key == "rollout.temperature"


def test_groups_that_agree_more_often_than_chance_at_a_low_temperature_ask_for_a_higher_one():
    """Half of the prompts always right, half always wrong: p = 1/2, and independent rollouts would agree in 1/8 of the groups."""
    for kinds in ((ALL_WRONG, ALL_WRONG, ALL_RIGHT, MIXED), (ALL_RIGHT, ALL_RIGHT, ALL_WRONG, MIXED)):
        cold = finding("R1", run(*kinds, settings={"rollout.temperature": 0.2}))
        assert (cold.fixes[0].key, cold.fixes[0].value) == ("rollout.temperature", "1.0")
        assert "75 % of the groups agree, independent ones would in" in cold.fixes[0].why
    warm = finding("R1", run(ALL_RIGHT, ALL_RIGHT, ALL_WRONG, MIXED, settings={"rollout.temperature": 1.0}))
    assert warm.fixes[0].value == "harder rows"


def test_as_many_equal_groups_as_chance_gives_are_no_matter_of_the_temperature():
    """p = 1/8 and groups of four: .59 are expected to agree, .5 do; .3 of groups of ten would."""
    found = finding("R1", run(ALL_WRONG, MIXED, settings={"rollout.temperature": 0.7}))
    assert found.evidence["value"] == 0.5
    assert found.fixes[0].value == "higher"
    (size,) = [fix for fix in found.fixes if fix.key == "rollout.group_size"]
    assert size.value == "10"
    assert "(1 − p)^10 = 0.26 of the groups" in size.why


def test_where_no_group_trains_none_has_a_cost():
    found = finding("R1", run([[0, 0], [0, 0]]))
    assert found.evidence["value"] == 1.0
    assert "cost" not in found.evidence
    assert "64 of 64 groups; none trains" in found.arithmetic


def test_rewards_that_cancel_are_equal_totals_of_a_mixed_kind():
    found = finding("R1", run([[1, 0.0], [0, 1.0]], rewards=(RIGHT, RewardInfo("brief", 1.0, "shaping"))))
    assert found.evidence["mixed"] == 1.0
    assert found.fixes[0].key == "rewards"


def test_rounding_is_no_spread():
    assert finding("R1", run([[0, 0.2], [0, 0.2 + 1e-9]])).evidence["value"] == 1.0


# R2 -----------------------------------------------------------------------------------------------------------------------------------


def test_phantom_groups_and_what_the_filter_does_to_them():
    found = finding("R2", run(PHANTOM, MIXED, MIXED, MIXED))
    assert found.evidence["value"] == 0.25
    (fix,) = found.fixes
    assert (fix.key, fix.value, fix.before, fix.after) == ("loss.filter", "outcome", 0.25, 0.0)
    assert "75 % of the groups stay" in fix.why
    assert found.rows[-1] == "step 8, p60"


def test_groups_that_the_filter_left_out_are_no_phantoms():
    observed = run(PHANTOM, MIXED)
    observed.trained[::2] = False
    assert passes("R2", observed).evidence["value"] == 0.0


def test_the_only_reward_with_a_weight_is_the_task():
    observed = run(MIXED, rewards=(RewardInfo("right", 2.0, "shaping"), RewardInfo("help", 0.0)))
    assert [reward.role for reward in observed.rewards] == ["outcome", None]
    assert passes("R2", observed)


def test_without_a_known_outcome_the_check_says_what_would_tell():
    assert skips("R2", run(MIXED, rewards=(RewardInfo("right"), RewardInfo("help")))).key == "rewards[].role (or --outcome NAME)"


# R3 -----------------------------------------------------------------------------------------------------------------------------------


def test_shares_by_hand():
    """S = (1.5, 0, 0.5, 0): Cov(right, S) = 0.25, Cov(0.5·help, S) = 0.125, Var(S) = 0.375."""
    shares = signal_shares(run([[1, 1], [0, 0], [0, 1], [0, 0]]))
    assert shares.tolist() == pytest.approx([2 / 3, 1 / 3])


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.floats(-2, 2), st.floats(0.1, 2))
def test_shares_add_up_to_one(seed, weight, other):
    noise = np.random.default_rng(seed)
    groups = noise.random((8, 4, 3)).round(2)
    groups[noise.random(groups.shape) < 0.2] = np.nan
    rewards = (RIGHT, RewardInfo("a", weight, "shaping"), RewardInfo("b", other, "shaping"))
    shares = signal_shares(run(*groups.tolist(), rewards=rewards, repeat=8))
    assert shares.sum() == pytest.approx(1.0)


def test_shaping_that_owns_the_signal_is_scaled_down_on_the_same_rollouts():
    found = finding("R3", run([[1, 0], [0, 1], [0, 0], [0, 1]], rewards=(RIGHT, RewardInfo("help", 1.6, "shaping"))))
    fix = found.fixes[0]
    assert fix.key == "rewards[].weight"
    assert fix.before == found.evidence["value"] > 0.7
    assert fix.after is not None
    assert fix.after <= 0.5


# R4 -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("windows", "severity"), [(1, "info"), (2, "info"), (3, "warn"), (9, "warn"), (10, "critical")])
def test_a_sacrificed_reward_is_as_grave_as_it_lasts(windows, severity):
    """help is 0 where right is 1: it falls with every update."""
    against, neutral = [[1, 0], [0, 1], [0, 1], [0, 1]], [[1, 1], [0, 0], [0, 0], [0, 0]]
    observed = run(*[against] * (32 * windows), *[neutral] * 64, repeat=32 * windows + 64)
    found = finding("R4", observed)
    assert (found.severity, found.evidence["value"]) == (severity, windows)
    assert found.evidence["high"] < 0
    assert not found.still


def test_a_penalty_is_pushed_up_when_its_count_falls():
    """With a weight below 0 more of the reward is what the weight does not want."""
    penalty = RewardInfo("errors", -0.5, "shaping")
    mean, _, high = pushed(run([[1, 0], [0, 1], [0, 1], [0, 1]], rewards=(RIGHT, penalty)))
    assert mean[1] > 0
    assert high[1] > 0


def test_the_weight_that_ends_it_is_found_on_the_same_rollouts():
    groups = [[[1, 0.2], [0, 1.0], [0, 0.6], [1, 0.0]], [[1, 0.4], [0, 0.8], [0, 0.9], [0, 1.0]]]
    found = finding("R4", run(*groups, repeat=128))
    (fix,) = found.fixes
    assert fix.before is not None
    assert fix.after is not None
    assert fix.before < 0 <= fix.after
    assert float(fix.value.split()[0]) > 0.5


# R5, R6 -------------------------------------------------------------------------------------------------------------------------------


def test_conflict_is_the_correlation_within_groups():
    found = finding("R5", run([[1, 0], [0, 1]], [[0, 1], [1, 0]]))
    assert (found.severity, found.evidence["value"]) == ("critical", pytest.approx(-1.0))
    assert "right and help pull apart" in found.message


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_of_two_that_conflict_the_one_that_helps_the_outcome_less_has_to_give_way(order):
    """Right answers show their work and are long: brief gives way, whichever of the two stands first, although it weighs more."""
    rewards = (RIGHT, RewardInfo("shows_work", 0.3, "shaping"), RewardInfo("brief", 0.5, "shaping"))
    rows = [[1, 1.0, 0.3], [1, 0.9, 0.5], [0, 0.2, 0.9], [0, 0.6, 0.4], [0, 0.1, 0.8]]
    found = finding("R5", run([[row[k] for k in order] for row in rows], rewards=[rewards[k] for k in order]))
    assert [fix.value for fix in found.fixes] == ["brief only where the other holds", "0 for brief"]


def test_a_penalty_that_falls_with_the_outcome_is_no_conflict():
    assert passes("R5", run([[1, 0], [0, 1]], rewards=(RIGHT, RewardInfo("errors", -0.5, "shaping"))))


def test_two_rewards_that_agree_are_redundant_and_two_that_conflict_are_not():
    found = finding("R6", run([[1, 1], [0, 0], [0, 0], [1, 1]]))
    assert (found.severity, found.evidence["value"]) == ("critical", pytest.approx(1.0))
    assert found.fixes[0].value == "0 for help"
    assert found.evidence["sign_flips_without"] == 0.0
    assert passes("R6", run([[1, 0], [0, 1]]))


# R7, R8 -------------------------------------------------------------------------------------------------------------------------------


def test_inversions_are_counted_over_pairs_with_different_outcomes():
    """Totals 1.0, 1.5, 0, 0: of the three pairs (right, wrong) one has the wrong one above."""
    observed = run([[1, 0], [0, 1], [0, 0], [0, 0]], rewards=(RIGHT, RewardInfo("help", 1.5, "shaping")))
    found = finding("R7", observed)
    assert found.evidence["value"] == pytest.approx(1 / 3)
    assert found.rows[-1] == "step 8, p63, sample 1"
    (fix,) = found.fixes
    assert (fix.value, fix.after) == ("0.5 × for the shaping rewards", 0.0)


def test_equal_totals_are_no_inversion():
    assert passes("R7", run([[1, 0], [0, 1]], rewards=(RIGHT, RewardInfo("help", 1.0, "shaping")))).evidence["value"] == 0.0


def test_resolution_counts_vectors_and_advantages():
    """(1, 0), (0, 1), (1, 1), (0, 0) with equal weights: four vectors, three sums."""
    observed = run([[1, 0], [0, 1], [1, 1], [0, 0]], rewards=(RIGHT, RewardInfo("help", 1.0, "shaping")))
    assert passes("R8", observed).evidence["value"] == 0.75
    coarse = run([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], rewards=[RewardInfo(n) for n in "abc"])
    found = finding("R8", coarse)
    assert found.evidence["value"] == pytest.approx(2 / 6)


def test_abstained_vectors_are_not_nan_apart():
    """Two rollouts on which the same reward abstained have the same vector."""
    observed = run([[1, NONE], [1, NONE], [0, 0.5], [0, 0.7]])
    assert passes("R8", observed).evidence["value"] == 1.0


# R9, R10 ------------------------------------------------------------------------------------------------------------------------------


def test_a_prompt_counts_as_solved_once_one_rollout_ever_was_right():
    """Of 8 prompts, 7 are never solved; p = 1/32, so a group of 95 sees a success with probability .95."""
    observed = run(*[ALL_WRONG] * 7, [[1, 0.2], *ALL_WRONG[1:]], prompts=8)
    found = finding("R9", observed)
    assert (found.evidence["value"], found.evidence["prompts"]) == (7 / 8, 8)
    assert found.evidence["seen"] == pytest.approx(1 - (31 / 32) ** 4)
    assert found.evidence["group_size_95"] == 95
    assert {fix.key: fix.value for fix in found.fixes}["rollout.group_size"] == "95"
    assert found.fixes[0].key == "rewards"  # a group of 95 costs more than a reward for a step on the way


def test_a_group_that_is_only_a_little_too_small_is_made_larger_first():
    """p = 1/8: a group of 23 sees a success with probability .95."""
    rows = [ALL_WRONG * 2] * 7 + [[[1, 0.2]] * 8]
    found = finding("R9", run(*rows, prompts=8))
    assert (found.fixes[0].key, found.fixes[0].value) == ("rollout.group_size", "23")


def test_a_score_without_a_scale_tells_no_right_from_wrong():
    noise = np.random.default_rng(0)
    judge = RewardInfo("judge", 1.0, "outcome")
    observed = run(*noise.normal(size=(64, 4, 1)).tolist(), rewards=(judge,))
    assert "continuous score" in skips("R9", observed).reason
    assert skips("R9", observed).key == "@reward(range=...)"


def test_a_reward_at_its_maximum_is_saturated_and_one_at_its_minimum_is_not():
    assert "help stands at its maximum" in finding("R10", run([[1, 1], [0, 1]])).message
    assert finding("R10", run([[1, 1], [0, 1]])).severity == "info"
    assert passes("R10", run([[1, 0], [0, 0]]))
    assert skips("R10", run(MIXED, rewards=(RewardInfo("a"), RewardInfo("b"))))


# R11 ----------------------------------------------------------------------------------------------------------------------------------


def test_none_within_a_group_counts_and_none_for_a_whole_prompt_does_not():
    assert finding("R11", run([[1, NONE], [0, 0.5], [0, 0.5], [0, 0.5]])).evidence["value"] == 0.25
    assert passes("R11", run([[1, NONE]] * 4, MIXED)).evidence["value"] == 0.0


def test_a_reward_that_never_scored_anything_is_critical():
    assert finding("R11", run([[1, NONE], [0, NONE]])).severity == "critical"


def test_failures_are_counted_by_kind_with_their_rows():
    failures = tuple(Failure(1 + place // 8, "help", "timeout", f"p{place}", 2, "5 s") for place in range(0, 64, 2))
    found = finding("R11", run([[1, NONE]] * 4, MIXED, failures=failures))
    assert (found.severity, found.evidence["value"], found.evidence["failed/timeout"]) == ("warn", 32 / 256, 32)
    assert found.rows[-1] == "step 8, p62, sample 2: timeout 5 s"
    assert found.fixes[0].key == "rewards[].deadline_s"


def test_a_reward_that_failed_on_every_rollout_needs_no_statistics():
    failures = tuple(Failure(1, "help", "exception", "d:1") for _ in range(4))
    found = finding("R11", run([[1, NONE], [0, NONE]], repeat=2, failures=failures))
    assert (found.severity, found.evidence["failed/exception"]) == ("critical", 4.0)
    assert skips("R11", run([[1, NONE], [0, NONE]], repeat=2, failures=failures[1:])).key == "max_steps"


def test_a_summary_of_too_little_does_not_sound_healthy():
    assert summary(examine(run(MIXED, repeat=2))).startswith("too little to judge by; ")
    assert summary(examine(logged("sft", loss=[1.0]))) == "no findings; 1 check passed, 0 skipped"
    assert summary(examine(logged("reward", loss=[0.5] * 1000))).startswith("no findings; ")  # held-out rows are missing, not steps
    alone = examine(run([[1, 1]], repeat=100))
    assert len(alone.skipped) > len(alone.passed)  # nothing to compare within a group of one, however long the run is
    assert "too little" not in summary(alone)


# R12, R13 -----------------------------------------------------------------------------------------------------------------------------


def with_columns(observed: Observed, **columns: Sequence[float]) -> Observed:
    for name, values in columns.items():
        object.__setattr__(observed, name, np.tile(np.array(values, dtype=float), len(observed.totals) // len(values)))
    return observed


def test_length_is_ranked_within_groups_and_the_reward_that_carries_it_is_named():
    """help rises with length, right does not."""
    observed = run([[0, 0], [1, 0.3], [0, 0.6], [1, 0.9]], rewards=(RIGHT, RewardInfo("help", 5.0, "shaping")))
    found = finding("R12", with_columns(observed, lengths=[10, 20, 30, 40], truncated=[0, 0, 0, 1]))
    assert (found.severity, found.evidence["value"]) == ("critical", pytest.approx(1.0))
    assert found.evidence["rho/outcome"] == pytest.approx(0.447, abs=1e-3)
    assert found.evidence["truncated_and_rewarded"] == 1.0
    assert found.fixes[0].value == "0 (or less) for help"
    assert found.fixes[0].after == pytest.approx(0.447, abs=1e-3)
    assert found.rows[0].endswith("sample 3")


def test_that_wrong_rollouts_are_long_is_a_note_at_most():
    observed = with_columns(run([[1, 0], [1, 0], [0, 0], [0, 0]]), lengths=[10, 20, 30, 40])
    assert finding("R12", observed).severity == "info"


def test_without_a_group_in_which_both_vary_length_is_not_judged():
    """Correlation has no value there; it used to be a note with ρ = nan."""
    observed = with_columns(run([[0, 0], [0, 0]]), lengths=[10, 20])
    assert "in no group do both" in skips("R12", observed).reason


def test_three_grams_that_come_again():
    text = "the cat sat on the mat and the cat sat on the mat"  # 11 of them; "the cat sat", "cat sat on", "sat on the", "on the mat" twice
    assert facts_of_text(text).repeated == pytest.approx(4 / 11)
    assert facts_of_text("我们我们我们我们我们").repeated == pytest.approx(6 / 8)
    assert math.isnan(facts_of_text("forty two").repeated)
    assert facts_of_text(" \n").empty


def texts(*rows: tuple[float, TextFacts]) -> Observed:
    sampled = [
        Sampled(1 + place // 8, f"p{place}", tuple(Sample({"right": right}, text=text) for right, text in rows)) for place in range(64)
    ]
    return assemble(sampled, About("by hand", "grpo", (RIGHT,)))


LONG = facts_of_text("one two three four five six seven eight nine ten")
SHORT = facts_of_text("forty two")


def test_copies_of_wrong_answers_count_and_copies_of_right_or_short_ones_do_not():
    assert finding("R13", texts((0, LONG), (0, LONG), (0, LONG), (0, LONG))).evidence["value"] == 0.75
    assert passes("R13", texts((1, LONG), (1, LONG), (1, LONG), (1, LONG)))
    assert passes("R13", texts((0, SHORT), (0, SHORT), (0, SHORT), (0, SHORT)))


def test_empty_answers():
    found = finding("R13", texts((0, facts_of_text("")), (0, LONG)))
    assert (found.evidence["value"], found.severity) == (0.5, "info")
    assert found.rows[-1].endswith("sample 0")


# the numbers of the updates -----------------------------------------------------------------------------------------------------------


def logged(method: str = "grpo", recipe: dict[str, Any] | None = None, **series: Sequence[float]) -> Observed:
    """40 steps, two windows, or as many as a series has; `__` in a name stands for `/`."""
    columns = {name.replace("__", "/"): values for name, values in series.items()}
    steps = range(max(40, *map(len, series.values())))
    lines = [(step + 1, {name: float(values[step % len(values)]) for name, values in columns.items()}) for step in steps]
    return assemble([], About("by hand", method, metrics=tuple(lines), settings=recipe or {}))


def test_the_kl_of_a_ppo_rollout_is_divided_by_its_length():
    found = finding("R15", logged("ppo", objective__kl=[30.0], completions__mean_length=[100.0]))
    assert (found.severity, found.evidence["value"]) == ("info", pytest.approx(0.3))
    assert found.evidence["sequence"] == pytest.approx(30.0)


@pytest.mark.parametrize(("kl", "severity"), [(0.11, "info"), (0.51, "warn"), (2.1, "critical")])
def test_kl_limits(kl, severity):
    assert finding("R15", logged(kl=[kl])).severity == severity


def test_a_spike_is_a_note_and_no_kl_is_no_finding():
    found = finding("R15", logged(kl=[0.01] * 39 + [0.6]))
    assert (found.severity, found.evidence["step"]) == ("info", 40)
    assert passes("R15", logged(kl=[0.01]))
    assert skips("R15", logged(entropy=[1.0])).key == "kl"


def test_without_a_reference_a_kl_of_0_is_no_measurement():
    """PPO logs 0 then, and a run that keeps a reference at 0 has a fault."""
    assert skips("R15", logged("ppo", objective__kl=[0.0], objective__kl_coef=[0.0], completions__mean_length=[9.0])).key == "loss.kl_coef"
    assert skips("R15", logged(recipe={"loss.kl_coef": 0.0}, kl=[0.0])).key == "loss.kl_coef"
    found = finding("R15", run(MIXED, repeat=256, metrics=tuple((step, {"kl": 0.0}) for step in range(1, 33))))
    assert (found.severity, found.evidence["value"]) == ("warn", 0.0)


@pytest.mark.parametrize(
    ("method", "recipe", "proposed"),
    [
        ("grpo", {}, {"loss.clip_high", "loss.positive_weight"}),
        ("grpo", {"loss.clip_high": 0.28}, {"loss.positive_weight"}),
        ("grpo", {"loss.preset": "dapo"}, {"loss.positive_weight"}),
        ("grpo", {"loss.preset": "gspo", "loss.positive_weight": 0.1}, set()),
        ("ppo", {}, set()),
    ],
)
def test_a_remedy_of_lost_entropy_is_one_that_the_run_does_not_have(method, recipe, proposed):
    falling = [math.exp(-step / 40) for step in range(160)]
    found = finding("R14", logged(method, recipe, entropy=falling, reward=[0.5, 0.4]))
    assert {fix.key for fix in found.fixes} == proposed | {"loss.kl_coef", "optimizer.learning_rate"}


def test_clipping_means_something_else_in_gspo():
    assert finding("R16", logged(clip_ratio__region_mean=[0.3])).severity == "warn"
    assert "its design" in skips("R16", logged(recipe={"loss.preset": "gspo"}, clip_ratio__region_mean=[0.3])).reason


def test_trls_name_of_the_sampler_mismatch_is_known():
    assert finding("R17", logged(sampling__sampling_logp_difference__mean=[0.06])).severity == "warn"


def test_a_critic_is_judged_by_the_second_half():
    assert passes("P1", logged("ppo", val__explained_variance=[-3.0] * 20 + [0.6] * 20))
    assert passes("P1", logged("ppo", val__explained_variance=[0.6, 0.6, -90.0, 0.6]))  # the median: hardly any variance to explain
    assert skips("P1", logged("grpo", val__explained_variance=[-3.0]))


def test_a_critic_is_not_blamed_for_returns_that_hardly_vary_any_more():
    """A run that has learned its task: there is nothing to explain, and what is left is noise."""
    values, spread = [0.3] * 20 + [-1.0] * 20, [2.0] * 20 + [0.3] * 20
    assert finding("P1", logged("ppo", val__explained_variance=values)).evidence["value"] == -1.0
    assert "nothing is left to explain" in skips("P1", logged("ppo", val__explained_variance=values, val__returns_std=spread)).reason


def evaluated(proxy: Sequence[float], truth: Sequence[float], every: int = 5) -> Observed:
    lines = [
        (step, {"reward": p, **({"eval/rewards/right/mean": truth[step // every - 1]} if step % every == 0 else {})})
        for step, p in enumerate(proxy, start=1)
    ]
    return assemble([], About("by hand", "grpo", (RIGHT,), metrics=tuple(lines)))


def test_paid_and_meant_part_by_their_rises():
    """Thirds of six evaluations, each with the training reward of the steps nearest to it."""
    rising = np.linspace(0.2, 0.8, 30).tolist()
    found = finding("R18", evaluated(rising, [0.3] * 6))
    assert found.severity == "critical"
    assert found.evidence["truth_rise"] == 0.0
    assert found.evidence["value"] == pytest.approx(found.evidence["proxy_rise"])
    assert passes("R18", evaluated(rising, [0.2, 0.3, 0.4, 0.5, 0.6, 0.8]))
    assert passes("R18", evaluated([0.5] * 30, [0.3] * 6))


LENIENT, STRICT = RewardInfo("mentioned", 1.0, "outcome", (0, 1)), RewardInfo("strict", 0.0, "outcome", (0, 1))


def parting(*, strict: Sequence[float], points: Sequence[int] = (), heldout: float = 0.1) -> Observed:
    """Six windows of 32 groups, in which `mentioned` rises from no rollout of four to all, and `strict` is as given.

    Evaluations at `points`: of `mentioned` as the training reward, of `strict` always `heldout`.
    """
    steps = len(strict)
    names = (LENIENT.name, STRICT.name)
    rows = [[(float(sample < 4 * step / (steps - 1)), float(sample < 4 * strict[step])) for sample in range(4)] for step in range(steps)]
    groups = [
        Sampled(1 + step, f"p{place}", tuple(Sample(dict(zip(names, row, strict=True))) for row in rows[step]))
        for step in range(steps)
        for place in range(32)
    ]
    heldout_numbers = [(step, {"eval/rewards/mentioned/mean": step / steps, "eval/rewards/strict/mean": heldout}) for step in points]
    rewards = (LENIENT, STRICT)
    return assemble(groups, About("by hand", "grpo", rewards, tuple(heldout_numbers)))


def test_an_outcome_that_only_watches_is_the_second_judge():
    found = finding("R18", parting(strict=[0.25] * 6))
    assert found.severity == "critical"
    assert "strict, which is not trained on," in found.message
    assert passes("R18", parting(strict=[0.0, 0.25, 0.5, 0.5, 0.75, 1.0]))


def test_a_measure_that_rises_less_but_rises_has_not_parted():
    """As measured: sampled answers went from .47 to 1, the greedy held-out ones from .63 to .97. One that rises a third as much has."""
    sampled = [0.47, 0.66, 0.8, 0.91, 0.97, 0.95, 0.91, 0.97, 1.0, 1.0]
    assert passes("R18", evaluated(sampled, [0.63, 0.87, 0.8, 0.97, 0.95], every=2)).evidence["truth_p"] > 0.05
    assert finding("R18", evaluated(sampled, [0.63, 0.7, 0.66, 0.65, 0.72], every=2))


def test_a_measure_that_rises_late_and_slowly_has_not_parted():
    """As measured: a total of outcome and progress learns progress first. Five held-out values cannot rise more clearly than these."""
    progress = [0.05, 0.1, 0.11, 0.11, 0.28, 0.54, 0.46, 0.74, 0.69, 0.95]
    assert passes("R18", evaluated(progress, [0.0, 0.0, 0.06, 0.14, 0.24], every=2)).evidence["truth_p"] < 0.05


def test_held_out_prompts_are_judged_by_what_is_not_trained_on():
    found = finding("R18", parting(strict=[0.25] * 6, points=range(7)))
    assert "while eval/rewards/strict/mean changed by +0" in found.message


def test_too_few_evaluations_leave_the_word_to_the_judge_that_watches():
    assert "strict, which is not trained on," in finding("R18", parting(strict=[0.25] * 6, points=(0, 6))).message
    assert "2 points of eval/rewards/strict/mean" in skips("R18", parting(strict=[0.25] * 4, points=(0, 4))).reason


def test_without_a_second_measure_it_cannot_tell():
    assert "cannot tell" in skips("R18", logged(reward=[0.1])).reason
    assert "cannot tell" in skips("R18", evaluated([0.1] * 10, [0.3] * 2)).reason


# recomputing --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_scheme_of_a_run_is_found_from_its_advantages(scheme):
    noise = np.random.default_rng(5)
    observed = run(*noise.random((40, 4, 2)).tolist())
    object.__setattr__(observed, "advantages", recomputed(observed, scheme).astype(np.float32).astype(np.float64))
    assert scheme_of(observed) == scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weighed_advantages_are_reproduced_too(scheme):
    weighed = dataclasses.replace(scheme, positive_weight=0.1)
    observed = run(*np.random.default_rng(5).random((40, 4, 2)).tolist(), settings={"loss.positive_weight": 0.1})
    object.__setattr__(observed, "advantages", recomputed(observed, weighed))
    assert scheme_of(observed) == weighed


CANCELLING = [[1, 0.0], [0, 1.0], [0.5, 0.5], [1, 0.0]]
EQUAL_WEIGHTS = (RewardInfo("a", 1.0, "outcome", (0, 1)), RewardInfo("b", 1.0, "shaping", (0, 1)))


def test_rewards_that_cancel_in_the_sum_are_no_collapse_where_each_is_normalised():
    """b in tenths and tenfold: the totals are equal; b's weight of 10 counts once b is normalised by itself."""
    tenths = [[a, b / 10] for a, b in CANCELLING]
    rewards = (EQUAL_WEIGHTS[0], RewardInfo("b", 10.0, "shaping", (0, 0.1)))
    assert finding("R1", run(tenths, rewards=rewards)).evidence["value"] == 1.0
    normalised = run(tenths, rewards=rewards, settings={"loss.normalize": "normalize_then_sum"})
    assert passes("R1", normalised).evidence["value"] == 0.0
    assert signal_shares(normalised) == pytest.approx([-1 / 9, 10 / 9], abs=1e-3)
    assert finding("R7", normalised).evidence["value"] == 1.0  # b outweighs a: every better outcome is ranked lower


def test_a_reward_that_a_larger_scale_hides_is_heard_when_each_is_normalised():
    """The score goes from 0 to 1000, tidiness from 0 to 1: without normalisation it owns nothing, with it a half."""
    rewards = (RewardInfo("score", 1.0, "outcome", (0, 1000)), RewardInfo("tidy", 1.0, "shaping", (0, 1)))
    observed = run([[0, 0], [1000, 1], [0, 1], [1000, 0]], rewards=rewards)
    found = finding("R3", observed)
    fix = found.fixes[0]
    assert (fix.key, fix.value) == ("loss.normalize", "normalize_then_sum")
    assert fix.before == pytest.approx(0.0, abs=1e-3)
    assert fix.after == pytest.approx(0.5, abs=1e-3)
    passes("R3", run([[0, 0], [1000, 1], [0, 1], [1000, 0]], rewards=rewards, settings={"loss.normalize": "normalize_then_sum"}))


def test_normalising_is_not_advised_where_it_changes_nothing():
    """`help` never varies: no normalisation gives it a say."""
    found = finding("R3", run([[0, 0.5], [1, 0.5]]))
    assert [fix.key for fix in found.fixes] == ["rewards[].weight"]


def test_advantages_of_a_critic_have_no_scheme():
    observed = run(MIXED)
    object.__setattr__(observed, "advantages", np.random.default_rng(0).normal(size=len(observed.totals)))
    assert scheme_of(observed) is None


def test_too_few_groups_are_no_statistics():
    for name in ("R1", "R2", "R3", "R5", "R7", "R9", "R11"):
        assert "pooled over at least 32" in skips(name, run(MIXED, repeat=31)).reason


def test_one_rollout_per_prompt_has_nothing_to_compare():
    assert skips("R1", run([[1, 0.5]])).key == "rollout.group_size"
