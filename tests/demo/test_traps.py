"""The four traps: data that can be held out, rewards that do what their claims say, recipes that differ in the remedy alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from postgrad.cli.demo_traps import STAGES, TRAPS, changes
from postgrad.demo import traps
from postgrad.demo.traps import rewards, weekdays
from postgrad.demo.traps.weekdays import DAYS, FAR, NEAR, days_on_the_way, is_heldout
from postgrad.rewards.check import Sample, check_rewards, say
from postgrad.rewards.load import load_rewards
from postgrad.train.recipe import GRPORecipe, Pipeline
from postgrad.train.recipe_file import load_recipe
from postgrad.types import Message, Prompt

RECIPES = Path(traps.__file__).parent


def answer(text: str) -> SimpleNamespace:
    return SimpleNamespace(final_answer=text)


# the data ------------------------------------------------------------------------------------------------------------------------------


def test_the_answer_is_the_last_day_on_the_way():
    for row in (*weekdays.questions(0, "train", 200), *weekdays.questions(0, "heldout", 100, FAR)):
        days = days_on_the_way(row["day"], row["n"])
        assert (len(days), days[-1]) == (row["n"], row["answer"])
        assert DAYS.index(row["answer"]) == (DAYS.index(row["day"]) + row["n"]) % 7
        assert f" {row['n']} days" in row["prompt"][0]["content"]
        assert row["day"] in row["prompt"][0]["content"]


@pytest.mark.parametrize("ahead", [NEAR, FAR])
def test_held_out_questions_share_no_pair_and_no_wording_with_what_is_trained_on(ahead):
    trained, heldout = ({(row["day"], row["n"]) for row in weekdays.questions(3, kind, 400, ahead)} for kind in ("train", "heldout"))
    assert not trained & heldout
    assert {n for _, n in trained} == {n for _, n in heldout} == set(range(ahead[0], ahead[1] + 1))
    assert {day for day, _ in trained} == {day for day, _ in heldout} == set(DAYS)
    wordings = [set(weekdays.WORDINGS[kind]) for kind in ("train", "heldout", "warm start")]
    assert sum(map(len, wordings)) == len(set.union(*wordings))


def test_the_warm_start_knows_no_held_out_pair_and_answers_in_both_ways():
    rows = weekdays.warm_start(0, 160)
    answers = [row["messages"][1]["content"] for row in rows]
    assert [len(rewards.named(text)) == 1 for text in answers] == [False, True] * 80
    for row in rows:
        asked, found = row["messages"][0]["content"], rewards.named(row["messages"][1]["content"])
        (day,), n = rewards.named(asked), int(next(word for word in asked.replace(".", " ").split() if word.isdigit()))
        assert not is_heldout(day, n)
        assert found in (days_on_the_way(day, n), days_on_the_way(day, n)[-1:])


def test_the_seed_decides_every_byte(tmp_path):
    places = (("a", 3), ("b", 3), ("c", 4))
    files = [{path.name: path.read_bytes() for path in weekdays.write(tmp_path / name, seed)} for name, seed in places]
    assert files[0] == files[1]
    assert [name for name in files[0] if files[0][name] == files[2][name]] == ["rewards.py"]


# the rewards ---------------------------------------------------------------------------------------------------------------------------


def test_naming_every_day_fools_the_reward_that_looks_anywhere_and_not_the_one_that_reads_the_end():
    every = ", ".join(DAYS)
    assert [rewards.mentioned(answer(every), day) for day in DAYS] == [1.0] * 7
    assert [rewards.right(answer(every), day) for day in DAYS] == [0.0] * 6 + [1.0]
    assert rewards.right(answer("Tuesday, Wednesday. It is Wednesday!"), "Wednesday") == 1.0
    assert rewards.right(answer(""), "Wednesday") == rewards.mentioned(answer(""), "Wednesday") == 0.0


def test_the_whole_way_is_all_or_nothing_and_progress_is_in_parts():
    four = "Tuesday, Wednesday, Thursday, Friday"
    cases = {
        four: (1.0, 1.0), f"{four}, Saturday": (0.0, 0.8), "Tuesday, Wednesday": (0.0, 0.5), "Tuesday, Thursday": (0.0, 0.25),
        "": (0.0, 0.0),
    }  # fmt: skip
    for text, expected in cases.items():
        assert (rewards.counted(answer(text), "Monday", 4), rewards.progress(answer(text), "Monday", 4)) == expected, text


def test_showing_the_work_and_being_brief_pull_apart():
    day, half, all_ = "Friday", "Tuesday, Wednesday", "Tuesday, Wednesday, Thursday, Friday"
    assert [rewards.shows_work(answer(text), 4) for text in (day, half, all_)] == [0.25, 0.5, 1.0]
    assert [rewards.brief(answer(text)) for text in (day, half, all_)] == pytest.approx([0.8, 0.6, 0.2])
    assert [rewards.brief_where_shown(answer(text), 4) for text in (day, half, all_)] == pytest.approx([0.0, 0.0, 0.2])
    assert [rewards.on_the_way(answer(text), "Monday", 4) for text in (day, half, all_)] == [0.0, 0.5, 1.0]
    assert rewards.brief(answer("word " * 30)) == 0.0


def test_the_check_before_training_shows_who_is_fooled_by_a_list(tmp_path):
    """`postgrad rewards check` finds the trap without a model."""
    weekdays.write(tmp_path, train=40)
    loaded = load_rewards([{"use": f"rewards.py:{name}"} for name in ("mentioned", "right")], tmp_path)
    samples = []
    for place, row in enumerate(weekdays.questions(0, "train", 24), start=1):
        columns = {name: row[name] for name in ("day", "n", "answer")}
        prompt = Prompt(f"near.jsonl:{place}", (Message("user", row["prompt"][0]["content"]),), columns)
        samples.append(Sample(prompt, say(row["answer"] + ".")))
    board = {standing.name: standing.by_reward for standing in check_rewards(loaded, samples).board}
    mentioned, right = board["list"]
    assert mentioned == 1.0
    assert right < 0.5


# the recipes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("hacking", ["rewards"]),
        ("sparsity", ["rewards"]),
        ("collapse", ["batch.prompts", "rollout.group_size", "rollout.temperature"]),
        ("conflict", ["rewards"]),
    ],
)
def test_before_and_after_differ_in_the_remedy_alone(name, changed):
    loaded = load_recipe(RECIPES / f"{name}.yaml").recipe
    assert isinstance(loaded, Pipeline)
    assert list(loaded.stages) == ["warm_start", *STAGES]
    before, after = (loaded.stages[stage] for stage in STAGES)
    assert isinstance(before, GRPORecipe)
    assert isinstance(after, GRPORecipe)
    assert sorted(line.partition(":")[0] for line in changes(before, after)) == changed
    assert before.batch.prompts * before.rollout.group_size == after.batch.prompts * after.rollout.group_size
    for stage in (before, after):
        assert (stage.max_steps or 0) * stage.batch.prompts >= 2 * 32  # two windows of the doctor
        assert {reward.use.partition(":")[2] for reward in stage.rewards} >= set(TRAPS[name].measures)


def test_all_start_from_the_same_warm_start():
    starts = [load_recipe(RECIPES / f"{name}.yaml").recipe.stages["warm_start"].model_dump(exclude={"run_dir"}) for name in TRAPS]
    assert starts == starts[:1] * 4
