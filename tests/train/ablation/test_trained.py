"""Short runs without one reward: common random numbers, nothing made twice, and what the comparison says."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from postgrad.errors import Interrupted, RecipeError
from postgrad.rewards.score import Scores
from postgrad.train.ablation import ablate_by_training, runs
from postgrad.train.ablation.compare import compared, sentence
from postgrad.train.ablation.plan import ALL, Entry, Plan, plan
from postgrad.train.ablation.runs import LOOKS, behaviour, carry_out
from postgrad.train.evaluate import Evaluation
from postgrad.train.loop import SilentReporter
from postgrad.train.run import load_run
from postgrad.train.run_directory import RunDirectory, read_jsonl
from postgrad.train.statistics import paired_interval, student_t
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason, ToolResult


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
def test_a_copy_makes_no_visible_change_and_a_reward_of_its_own_does(make_run, tmp_path):
    path = make_run(tmp_path, steps=1, change=lambda text: text.replace("weight: 0.5", "weight: 1.0"))
    result = ablate_by_training(path, SilentReporter(), dropped=["again", "low"], steps=20)
    again, low = result.left_out
    assert again.verdict == "no visible change"
    assert sentence(result.plan, again).startswith("no visible change (20 steps, 3 seeds): not independent")
    assert low.verdict == "visible"
    (change,) = low.visible
    assert change.behaviour == "reward low"
    assert change.difference.high < -0.5
    written = json.loads((path / "ablation" / "20-steps" / "result.json").read_text())
    assert [item["verdict"] for item in written["left_out"]] == ["no visible change", "visible"]


@pytest.fixture(scope="module")
def carried_out(make_run, tmp_path_factory):
    """(plan, notes) of one-step runs without `low`."""
    path = make_run(tmp_path_factory.mktemp("trained"), steps=1)
    planned, reporter = plan(path, dropped=["low"], seeds=3, steps=1), Notes()
    carry_out(planned, reporter)
    return planned, reporter


def test_runs_of_one_seed_have_the_same_prompts_and_noise(carried_out):
    planned, _ = carried_out
    texts = {}
    for arm in planned.arms:
        for seed in planned.seeds:
            records = RunDirectory(planned.directory(arm, seed)).read_rollouts(1)
            texts[arm, seed] = [(record["prompt"]["row"], rollout["text"]) for record in records for rollout in record["rollouts"]]
    for seed in planned.seeds:
        assert texts[ALL, seed] == texts["low", seed]
    assert texts[ALL, 0] != texts[ALL, 1] != texts[ALL, 2]


def test_what_is_left_out_trains_nothing_and_is_still_scored(carried_out):
    planned, _ = carried_out
    for record in RunDirectory(planned.directory("low", 0)).read_rollouts(1):
        assert all(score["rewards"]["low"] is not None for score in record["scores"])
        assert all(score["advantage_by_reward"]["low"] == 0.0 for score in record["scores"])
    recipe = load_run(planned.directory("low", 1)).recipe
    assert [reward.weight for reward in recipe.rewards] == [1.0, 0.5, 0.0]
    assert (recipe.seed, recipe.max_steps) == (1, 1)


def test_numbers_and_rollouts_are_kept_weights_are_not(carried_out):
    planned, reporter = carried_out
    assert [note for note in reporter.notes if note.startswith("run ")] == [
        f"run {place} of 6: {arm}, seed {seed}"
        for place, (seed, arm) in enumerate(((s, a) for s in (0, 1, 2) for a in ("all rewards", "without low")), start=1)
    ]
    for arm in planned.arms:
        for seed in planned.seeds:
            folder = planned.directory(arm, seed)
            assert folder.parent.name == ("all" if arm == ALL else "without-low")
            assert {"rollouts", "metrics.jsonl", "measured.json", "summary.json"} <= {path.name for path in folder.iterdir()}
            assert not list(folder.rglob("*.safetensors"))
            values = json.loads((folder / "measured.json").read_text())["values"]
            assert set(values) == {"reward even", "reward again", "reward low", *LOOKS}
            assert all(len(column) == 6 for column in values.values())


def test_the_same_command_makes_nothing_twice(carried_out, monkeypatch):
    planned, _ = carried_out

    def never(*args, **kwargs):
        raise AssertionError("measured twice")

    monkeypatch.setattr(runs, "evaluate", never)
    reporter = Notes()
    numbers = carry_out(planned, reporter)
    assert set(numbers) == {(arm, seed) for arm in planned.arms for seed in planned.seeds}
    assert sum("already finished" in note for note in reporter.notes) == 6


def test_an_interrupted_ablation_goes_on_where_it_stopped(carried_out, monkeypatch):
    planned, _ = carried_out
    wider = replace(planned, seeds=(0, 1, 2, 3))
    begun = []

    def interrupted(loaded, reporter):
        begun.append(Path(loaded.recipe.run_dir).parts[-2:])
        if loaded.recipe.seed == 3:
            raise Interrupted("stopped after step 1; everything is saved", signal=15)

    monkeypatch.setattr(runs, "run", interrupted)
    with pytest.raises(Interrupted) as stopped:
        carry_out(wider, Notes())
    assert stopped.value.exit_code == 143
    assert stopped.value.hint == "the same command goes on from here: 6 of 8 runs are finished"
    assert begun[-1] == ("all", "seed-3")


def test_a_signal_while_a_run_is_measured_ends_after_it(carried_out, monkeypatch):
    """Nothing that was trained is lost: the numbers are written first."""
    planned, _ = carried_out
    one = replace(planned, seeds=(7,), dropped=())

    def signalled(recipe, base, *, model, reporter):
        os.kill(os.getpid(), signal.SIGTERM)
        return Evaluation((Group(Prompt("r:1", ()), (rollout(),)),), Scores(("r",), (1.0,), ("outcome",), np.ones((1, 1)), 1), {}, {})

    monkeypatch.setattr(runs, "evaluate", signalled)
    monkeypatch.setattr(runs, "run", lambda loaded, reporter: Path(loaded.recipe.run_dir).mkdir(parents=True, exist_ok=True))
    with pytest.raises(Interrupted) as stopped:
        carry_out(one, Notes())
    assert stopped.value.exit_code == 143
    monkeypatch.setattr(runs, "evaluate", None)
    assert carry_out(one, Notes())[ALL, 7]["tokens"] == [4.0]


def test_held_out_data_that_has_changed_since_is_not_mixed(carried_out, make_run, tmp_path):
    path = make_run(tmp_path, steps=1)
    planned = replace(plan(path, dropped=["low"], seeds=3, steps=1), seeds=(0,))
    carry_out(planned, Notes())
    with (tmp_path / "heldout.jsonl").open("a") as file:
        file.write('{"prompt": "one more?"}\n')
    with pytest.raises(RecipeError, match="the held-out data has changed since this run was measured"):
        carry_out(planned, Notes())
    (tmp_path / "rewards.py").write_text((tmp_path / "rewards.py").read_text() + "\n")
    with pytest.raises(RecipeError, match=r"changed since this run started: rewards\.py"):
        carry_out(planned, Notes())


def test_a_run_without_held_out_prompts_holds_some_out(make_run, tmp_path):
    path = make_run(tmp_path, steps=1, change=lambda text: text.replace(", eval: heldout.jsonl", ""))
    planned = replace(plan(path, dropped=["low"], seeds=3, steps=1), seeds=(0,))
    numbers = carry_out(planned, Notes())
    held_out = len(numbers[ALL, 0]["tokens"])
    assert 1 <= held_out < 8
    events = read_jsonl(planned.directory(ALL, 0) / "metrics.jsonl")
    assert all("eval/reward" in line for line in events)  # the same prompts, held out of training


@pytest.mark.slow
def test_ppo_runs_are_ablated_too(make_run, tmp_path):
    def as_ppo(text):
        return text.replace("method: grpo", "method: ppo").replace("prompts: 4}", "prompts: 8, epochs: 1}").replace("group_size: 8, ", "")

    path = make_run(tmp_path, steps=1, change=as_ppo)
    result = ablate_by_training(path, SilentReporter(), dropped=["low"], steps=1)
    assert len(result.left_out[0].changes) == 4


# ---- the plan


def test_without_its_only_outcome_a_run_cannot_filter_by_it(make_run, tmp_path):
    path = make_run(tmp_path, steps=1, more="loss: {filter: outcome}")
    planned = plan(path, dropped=[], seeds=3, steps=4)
    assert planned.dropped == ("even", "again", "low")
    assert planned.trained("even", 0).loss.filter == "zero_std"
    assert planned.trained("low", 0).loss.filter == planned.trained(ALL, 0).loss.filter == "outcome"
    assert planned.full(2).loss.filter == "outcome"


@pytest.mark.parametrize(
    ("change", "dropped", "words"),
    [
        (lambda text: text, ["lwo"], "no reward 'lwo' with a weight"),
        (lambda text: text.replace("weight: 2.0", "weight: 0.0"), ["low"], "no reward 'low' with a weight"),
        (lambda text: text.replace("weight: 2.0", "weight: 0.0").replace("weight: 0.5", "weight: 0.0"), [], "one reward with a weight"),
    ],
)
def test_what_cannot_be_left_out_is_refused(change, dropped, words, make_run, tmp_path):
    with pytest.raises(RecipeError, match=words):
        plan(make_run(tmp_path, steps=1, change=change), dropped=dropped, seeds=3, steps=1)


def test_only_runs_with_rewards_can_be_ablated(tmp_path):
    recipe = {"method": "sft", "model": "m", "run_dir": "r", "max_steps": 1, "data": {"train": "x.jsonl"}}
    (tmp_path / "resolved.json").write_text(json.dumps({"base": ".", "recipe": recipe}))
    with pytest.raises(RecipeError, match="only runs of GRPO and PPO"):
        plan(tmp_path, dropped=[], seeds=3, steps=1)


def test_advantages_of_the_users_own_do_not_depend_on_weights(tmp_path):
    recipe = {
        "method": "grpo", "model": "m", "run_dir": "r", "max_steps": 1, "data": {"train": "x.jsonl"},
        "rewards": [{"use": "tool_use"}, {"use": "tool_error"}], "loss": {"advantages": "rewards.py:mine"},
    }  # fmt: skip
    (tmp_path / "resolved.json").write_text(json.dumps({"base": ".", "recipe": recipe}))
    with pytest.raises(RecipeError, match="a function of yours makes the advantages"):
        plan(tmp_path, dropped=[], seeds=3, steps=1)


def test_a_run_with_an_ablation_can_still_be_replaced(carried_out, make_run):
    """RUN/ablation is the run's own."""
    from postgrad.train.recipe_file import load_recipe
    from postgrad.train.run import run

    planned, _ = carried_out
    run(load_recipe(planned.base / "recipe.yaml"), overwrite=True)
    assert not (planned.path / "ablation").exists()


# ---- behaviour and verdicts


def rollout(*, tokens=4, stop=StopReason.END, results=()):
    calls = tuple(ToolResult(None, "", error) for error in results)
    segments = (Segment(Source.PROMPT, (1,)), Segment(Source.MODEL, (5,) * tokens, (-0.1,) * tokens))
    return Rollout(segments, (Message("assistant", "x"),), stop, tool_results=calls)


def test_behaviour_is_the_mean_over_a_prompts_sound_rollouts():
    prompt = Prompt("r:1", ())
    groups = (
        Group(prompt, (rollout(tokens=4, results=["", "bad"]), rollout(tokens=6, stop=StopReason.TURN_TOKENS))),
        Group(prompt, (rollout(tokens=8), rollout(tokens=1, stop=StopReason.INFRASTRUCTURE))),
    )
    scores = Scores(("r",), (1.0,), ("outcome",), np.array([[1.0], [np.nan], [np.nan], [np.nan]]), 2)
    found = behaviour(Evaluation(groups, scores, {}, {}))
    assert found["tokens"] == [5.0, 8.0]
    assert found["cut by a limit"] == [0.5, 0.0]
    assert found["calls"] == [1.0, 0.0]
    assert found["failed calls"] == [0.5, 0.0]
    assert found["reward r"][0] == 1.0
    assert math.isnan(found["reward r"][1])


def verdicts(carried_out, effect, noise, *, range=(0.0, 1.0), prompts=20):
    """The verdict on reward `low` when leaving it out adds `effect` to it, with this noise between seeds."""
    planned, _ = carried_out
    entry = Entry(0, "shaping", range)
    made: Plan = replace(planned, rewards={"low": entry}, dropped=("low",))
    rng = np.random.default_rng(0)
    numbers = {}
    for seed in made.seeds:
        base = rng.random(prompts)
        other = {look: [1.0] * prompts for look in LOOKS}
        numbers[ALL, seed] = {**other, "reward low": base.tolist()}
        numbers["low", seed] = {**other, "reward low": (base + effect + noise * (seed - 1)).tolist()}
    (item,) = compared(made, numbers)
    return item.verdict, sentence(made, item)


def test_a_change_is_visible_absent_or_not_to_be_told(carried_out):
    assert verdicts(carried_out, -0.5, 0.05)[0] == "visible"
    assert verdicts(carried_out, 0.0, 0.0)[0] == "no visible change"
    unclear, words = verdicts(carried_out, -0.2, 0.4)
    assert unclear == "cannot tell"
    assert words.startswith("cannot tell (1 steps, 3 seeds): reward low -0.2, in [")
    # What is small depends on what the reward can do.
    assert verdicts(carried_out, 0.0, 0.1)[0] == "cannot tell"
    assert verdicts(carried_out, 0.0, 0.1, range=(0.0, 10.0))[0] == "no visible change"


def test_where_everything_abstained_nothing_can_be_told(carried_out):
    assert verdicts(carried_out, math.nan, 0.0)[0] == "cannot tell"


# ---- intervals


@pytest.mark.parametrize(
    ("level", "degrees", "bound"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.95, 3, 3.1824), (0.95, 4, 2.7764), (0.99, 2, 9.9248), (0.99, 5, 4.0321), (0.9, 30, 1.6973)],
)
def test_students_t_has_the_bounds_of_the_tables(level, degrees, bound):
    assert student_t(level, degrees) == pytest.approx(bound, abs=1e-4)


def test_an_interval_covers_the_truth_even_with_three_seeds():
    """Differences that vary by seed alone, by prompt alone and by both; the truth is 0. 200 draws: 95 % ± 3 standard errors."""
    rng = np.random.default_rng(1)
    for seeds, prompts in ((1.0, 0.0), (0.3, 1.0), (0.0, 1.0)):
        inside = 0
        for _ in range(200):
            drawn = rng.normal(0, seeds, (3, 1)) + rng.normal(0, prompts, (3, 20))
            interval = paired_interval(drawn.tolist(), resamples=200)
            inside += interval.low <= 0.0 <= interval.high
        assert inside / 200 > 0.90


def test_equal_pairs_leave_no_doubt_and_missing_ones_are_left_out():
    same = paired_interval([[0.5, 0.5], [0.5, math.nan], [0.5, 0.5]])
    assert (same.mean, same.low, same.high, same.count) == (0.5, 0.5, 0.5, 5)
    assert paired_interval([[0.0, 1.0], [math.nan], [1.0]]).count == 3
    assert math.isnan(paired_interval([[1.0, 2.0]]).low)
    assert math.isnan(paired_interval([[math.nan]]).mean)
    assert paired_interval([[0.0, 1.0], [1.0, 2.0]]) == paired_interval([[0.0, 1.0], [1.0, 2.0]])
