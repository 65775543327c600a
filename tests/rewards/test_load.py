import subprocess
import sys

import pytest

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.load import RewardSpec, check_columns, load_rewards

REWARDS = """
from postgrad.rewards import reward

LIMIT = 3

@reward(scope="final", claim="it is right", range=(0, 1), role="outcome", deadline_s=2.5)
def correct(completion, answer):
    return completion == answer

def plain(rollout, gold, bonus=1.0):
    return bonus

@reward(scope="structure", claim="it is tidy")
def tidy(rollout):
    return 1.0

def odd(answer):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def load(folder, *specs):
    return load_rewards([{"use": spec} if isinstance(spec, str) else spec for spec in specs], folder)


def test_declared_and_recipe_values_are_combined(folder):
    first, second, third, fourth = load(
        folder,
        {"use": "rewards.py:correct", "weight": 2},
        "rewards.py:plain",
        "rewards.py:tidy",
        {"use": "tool_use", "role": "outcome", "name": "called"},
    )
    assert (first.name, first.weight, first.role, first.scope, first.claim, first.range) == (
        "correct",
        2.0,
        "outcome",
        "final",
        "it is right",
        (0.0, 1.0),
    )
    assert (first.deadline_s, first.on_error, first.on_nonfinite, first.group) == (2.5, "abstain", "stop", False)
    assert first.where.endswith("rewards.py:correct")
    assert len(first.sha256) == 64
    assert (second.role, second.scope, second.deadline_s) == ("outcome", None, 5.0)
    assert third.role == "shaping"
    assert (fourth.name, fourth.role, fourth.where) == ("called", "outcome", "tool_use")


def test_recipe_deadline_outranks_the_declared_one(folder):
    (loaded,) = load(folder, {"use": "rewards.py:correct", "deadline_s": 0.5})
    assert loaded.deadline_s == 0.5


def test_spec_objects_are_accepted_as_well(folder):
    (loaded,) = load_rewards([RewardSpec(use="rewards.py:tidy", weight=0.5)], str(folder))
    assert loaded.weight == 0.5


def test_missing_column_is_a_data_error_that_lists_the_columns(folder):
    loaded = load(folder, "rewards.py:plain")
    check_columns(loaded, ["gold"])
    check_columns(loaded, ["other"], given=["gold"])
    with pytest.raises(DataError, match=r"the columns are other$"):
        check_columns(loaded, ["other"], given=["step"])
    with pytest.raises(DataError, match=r"reward plain asks for the column 'gold'; the columns are answer, golden") as caught:
        check_columns(loaded, ["golden", "answer"])
    assert caught.value.hint == "did you mean golden?"
    with pytest.raises(DataError, match="the columns are none") as caught:
        check_columns(loaded, [])
    assert "args" in caught.value.hint


def test_bound_argument_needs_no_column(folder):
    loaded = load(folder, {"use": "rewards.py:plain", "args": {"gold": 3}})
    check_columns(loaded, [])


@pytest.mark.parametrize(
    ("spec", "what", "hint"),
    [
        ("tool_usage", "no shipped reward 'tool_usage'", "did you mean tool_use?"),
        ("zzz", "no shipped reward 'zzz'", "shipped rewards: exact_match"),
        ("rewards.py", "names no function", "rewards.py:correct"),
        ("rewards:correct", "names no function", "rewards.py:correct"),
        ("other.py:correct", "cannot read the reward file", None),
        ("reward.py:correct", "no such file or directory", "rewards.py?"),
        ("rewards.py:corect", "the file has no function corect", "did you mean correct?"),
        ("rewards.py:zzz", "the file has no function zzz", "it defines: correct, plain, tidy, odd"),
        ("rewards.py:LIMIT", "LIMIT is a int, not a function", None),
        ("rewards.py:odd", "odd has the first parameter 'answer'", None),
        ({"use": "tool_use", "wieght": 1.0}, "unknown key 'wieght'", "did you mean weight?"),
        ({"weight": 1.0}, "`use` is missing", "rewards.py:function"),
        ({"use": "tool_use", "weight": float("nan")}, "finite", None),
        ({"use": "tool_use", "weight": True}, "finite", None),
        ({"use": "tool_use", "role": "main"}, "outcome or shaping", None),
        ({"use": "tool_use", "on_error": "zero"}, "abstain or stop", None),
        ({"use": "tool_use", "deadline_s": 0}, "positive", None),
        ({"use": "soft_overlong"}, "needs args", None),
        ({"use": "soft_overlong", "args": {"max_tokens": 10, "buffer": 11}}, "0 ≤ buffer ≤ max_tokens", None),
        ({"use": "tool_use", "args": {"bonus": 1}}, "takes no argument 'bonus'", None),
    ],
)
def test_recipe_mistakes_are_named(folder, spec, what, hint):
    with pytest.raises(RecipeError, match=what) as caught:
        load(folder, spec)
    if hint:
        assert hint in caught.value.hint
    assert caught.value.key.startswith("rewards[0]")


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"use": "zzz"}, "rewards[1].use"),
        ({"use": "rewards.py:zzz"}, "rewards[1].use"),
        ({"use": "other.py:correct"}, "rewards[1].use"),
        ({"use": "tool_use", "weight": True}, "rewards[1].weight"),
        ({"use": "tool_use", "role": "main"}, "rewards[1].role"),
        ({"use": "tool_use", "on_error": "zero"}, "rewards[1].on_error"),
        ({"use": "tool_use", "deadline_s": 0}, "rewards[1].deadline_s"),
        ({"use": "tool_use", "wieght": 1.0}, "rewards[1]"),
        ({"use": "rewards.py:correct"}, "rewards"),  # named twice
    ],
)
def test_a_mistake_is_told_with_its_key(folder, spec, key):
    with pytest.raises(RecipeError) as caught:
        load_rewards([{"use": "rewards.py:correct"}, spec], folder)
    assert caught.value.key == key
    if key != "rewards":
        with pytest.raises(RecipeError) as caught:
            load_rewards({0: {"use": "rewards.py:correct"}, 3: spec}, folder)  # reward models stand between them
        assert caught.value.key == key.replace("[1]", "[3]")


def test_import_error_names_the_last_frame(tmp_path):
    (tmp_path / "broken.py").write_text("def helper():\n    raise KeyError('token')\n\nhelper()\n")
    with pytest.raises(RecipeError, match="KeyError: 'token'") as caught:
        load(tmp_path, "broken.py:reward")
    assert caught.value.where.endswith("broken.py:2")


def test_syntax_error_names_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef reward(rollout:\n    return 1\n")
    with pytest.raises(RecipeError, match="SyntaxError") as caught:
        load(tmp_path, "broken.py:reward")
    assert caught.value.where.endswith("broken.py:2")


def test_exit_while_importing_is_an_error_and_not_an_exit(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RecipeError, match="SystemExit"):
        load(tmp_path, "leaves.py:reward")
    (tmp_path / "dies.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(RecipeError, match="exit code 0"):
        load(tmp_path, "dies.py:reward")


def test_two_rewards_of_one_name_are_refused_until_renamed(folder):
    twice = {"use": "rewards.py:tidy"}
    with pytest.raises(RecipeError, match="two rewards are named 'tidy'") as caught:
        load(folder, twice, twice)
    assert "name" in caught.value.hint
    assert [r.name for r in load(folder, twice, {**twice, "name": "tidy2"})] == ["tidy", "tidy2"]


def test_neighbouring_files_can_be_imported(tmp_path):
    (tmp_path / "helping_numbers.py").write_text("VALUE = 2.0\n")
    (tmp_path / "rewards.py").write_text("from helping_numbers import VALUE\ndef r(rollout):\n    return VALUE\n")
    assert load(tmp_path, "rewards.py:r")[0].name == "r"


def test_rewards_do_not_import_torch():
    code = "import sys, postgrad.rewards.score, postgrad.rewards.advice, postgrad.rewards.child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_user_code_never_runs_in_the_trainer(tmp_path):
    (tmp_path / "rewards.py").write_text("import sys\nsys.modules['a_mark_of_the_reward_file'] = sys\ndef r(rollout):\n    return 1\n")
    load(tmp_path, "rewards.py:r")
    assert "a_mark_of_the_reward_file" not in sys.modules
