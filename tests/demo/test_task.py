import json
import random
import re
from collections import Counter

import pytest

from postgrad.demo import task
from postgrad.demo.rewards import correctness, malformed, query, structure
from postgrad.demo.tools import calculator
from postgrad.errors import DataError
from postgrad.rewards.load import check_columns, load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult

SEEDS = range(3)


def pairs(problems):
    return {tuple(sorted((problem.left, problem.right))) for problem in problems}


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_pairs_are_in_no_training_set_of_any_seed(seed):
    held_out = pairs(task.heldout_problems(seed)) | pairs(task.unseen_problems(seed))
    for other in SEEDS:
        assert not held_out & pairs(task.train_problems(other))


def test_pairs_are_not_repeated_within_a_set():
    for problems in (task.train_problems(0), task.heldout_problems(0), task.unseen_problems(0)):
        assert len(pairs(problems)) == len(problems)


def test_about_one_pair_in_five_is_held_out_in_either_order():
    rng = random.Random(0)
    drawn = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(2000)]
    assert all(task.is_heldout(a, b) == task.is_heldout(b, a) for a, b in drawn)
    assert 0.17 < sum(task.is_heldout(a, b) for a, b in drawn) / 2000 < 0.23


def wording(text):
    return re.sub(r"\d+", "#", text)


def test_unseen_templates_never_occur_in_training():
    trained = {wording(problem.question) for seed in SEEDS for problem in task.train_problems(seed)}
    warm = {wording(row["messages"][0]["content"]) for seed in SEEDS for row in task.warm_start(seed)}
    unseen = {wording(problem.question) for problem in task.unseen_problems(0)}
    assert len(unseen) == 6
    assert not unseen & (trained | warm)
    assert not trained & warm
    assert {wording(problem.question) for problem in task.heldout_problems(0)} == trained


def test_warm_start_uses_other_words_and_smaller_numbers():
    rows = task.warm_start(0)
    numbers = [int(number) for row in rows for number in re.findall(r"\d+", row["messages"][0]["content"])]
    assert all(11 <= number <= 99 for number in numbers)
    assert not any(re.search(r"\d\s*[-+*×]\s*\d", row["messages"][0]["content"]) for row in rows)
    problems = [*task.train_problems(0), *task.heldout_problems(0), *task.unseen_problems(0)]
    assert all(100 <= number <= 999 for problem in problems for number in (problem.left, problem.right))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [task.train_problems, task.heldout_problems, task.unseen_problems])
def test_every_three_problems_hold_each_operator_once(seed, make):
    operators = [problem.operator for problem in make(seed)]
    assert all(sorted(operators[start : start + 3]) == ["*", "+", "-"] for start in range(0, len(operators), 3))
    assert len({tuple(operators[start : start + 3]) for start in range(0, len(operators), 3)}) == 6  # in every order


def test_templates_are_used_alike():
    used = Counter(problem.template for problem in task.train_problems(0, count=360))
    assert set(used.values()) == {15}
    assert len(used) == 24


def test_answers_are_right_and_positive_and_no_number_of_the_question():
    for problem in [*task.train_problems(1), *task.heldout_problems(1), *task.unseen_problems(1)]:
        assert calculator(problem.expression) == str(problem.answer)
        assert problem.answer > 0
        assert problem.answer not in (problem.left, problem.right)
        assert [int(number) for number in re.findall(r"\d+", problem.question)] == [problem.left, problem.right]


def test_warm_start_conversations_show_calls_that_the_tool_answers_so():
    rows = task.warm_start(0)
    operators = Counter()
    for row in rows:
        user, call, result, answer = row["messages"]
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert calculator(expression) == result["content"] == answer["content"]
        assert sorted(re.findall(r"\d+", expression)) == sorted(re.findall(r"\d+", user["content"]))
        operators[expression.split()[1]] += 1
    assert max(operators.values()) - min(operators.values()) <= 1


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        task.write(tmp_path / name, seed)
    for file in ("sft.jsonl", "train.jsonl", "heldout.jsonl", "unseen.jsonl"):
        first, same, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert first == same
        assert first != other


def test_no_global_randomness_is_touched():
    random.seed(7)
    before = random.getstate()
    task.train_problems(0)
    task.warm_start(0)
    assert random.getstate() == before


def test_files_and_rows(tmp_path):
    paths = task.write(tmp_path / "new" / "folder", 0)
    assert [path.name for path in paths] == ["sft.jsonl", "train.jsonl", "heldout.jsonl", "unseen.jsonl", "tools.py", "rewards.py"]
    counts = [len(path.read_text().splitlines()) for path in paths[:4]]
    assert counts == [80, 360, 240, 120]
    row = json.loads(paths[1].read_text().splitlines()[0])
    assert sorted(row) == ["answer", "left", "operator", "prompt", "right", "template"]
    assert row["prompt"][0]["role"] == "user"
    assert isinstance(row["answer"], str)


def test_the_written_rewards_pay_a_perfect_episode_in_full(tmp_path):
    task.write(tmp_path, 0, train=3)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    specs = [("structure", 0.2), ("query", 0.3), ("correctness", 1.0), ("malformed", 0.5)]
    rewards = load_rewards([{"use": f"rewards.py:{name}", "weight": weight} for name, weight in specs], tmp_path)
    check_columns(rewards, rows[0].keys() - {"prompt"})
    with pytest.raises(DataError, match="left"):
        check_columns(rewards, ["answer"])
    with Scorer(rewards) as scorer:
        scores = scorer.score([Group(_prompt(row), (_perfect(row),)) for row in rows])
    assert scores.values.tolist() == [[1, 1, 1, 0]] * 3
    assert scores.totals.tolist() == [1.5] * 3


def _prompt(row):
    return Prompt(
        "train.jsonl:1", (Message("user", row["prompt"][0]["content"]),), {key: value for key, value in row.items() if key != "prompt"}
    )


def _perfect(row):
    call = ToolCall("calculator", {"expression": f"{row['left']} {row['operator']} {row['right']}"})
    messages = (Message("assistant", "", tool_calls=(call,)), Message("tool", row["answer"]), Message("assistant", row["answer"]))
    segments = (Segment(Source.PROMPT, (1,)), Segment(Source.MODEL, (2,), (-0.1,)))
    return Rollout(segments, messages, StopReason.END, tool_results=(ToolResult(call, row["answer"]),))


def test_the_shipped_files_are_the_ones_that_are_copied(tmp_path):
    task.write(tmp_path, 0)
    namespace = {}
    exec(compile((tmp_path / "rewards.py").read_text(), "rewards.py", "exec"), namespace)
    assert {namespace[function.__name__].__name__ for function in (structure, query, correctness, malformed)} == {
        "structure",
        "query",
        "correctness",
        "malformed",
    }


def test_a_difference_is_never_one_of_its_numbers():
    rng = random.Random(0)
    drawn = {task._operands(rng, "-", low=1, high=6) for _ in range(500)}
    assert all(left > right and left - right != right for left, right in drawn)
    assert {(5, 1), (6, 4)} <= drawn
