import os
import time

import pytest

from postgrad.errors import RecipeError
from postgrad.rewards.base import view_of
from postgrad.rewards.library import code_exec
from postgrad.rewards.library.code import program_in
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.sandbox import SandboxError
from postgrad.sandbox.isolation import _Policy
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason


@pytest.fixture(autouse=True)
def runs_anywhere(monkeypatch):
    """Where this machine has no sandbox, these tests run without one; what a sandbox keeps out is tested in tests/sandbox."""
    monkeypatch.setattr(_Policy, "unsafe_exec", True)


def view(text, *, prompt="q", reasoning=""):
    segments = (Segment(Source.PROMPT, (0,)), Segment(Source.MODEL, (1,), (-0.1,)))
    messages = (Message("assistant", text, reasoning=reasoning),)
    return view_of(Prompt("r", (Message("user", prompt),)), Rollout(segments, messages, StopReason.END, text=text))


ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)"


def run(program, tests=TESTS, **settings):
    return code_exec(view(f"Here it is:\n```python\n{program}\n```"), tests, **settings)


@pytest.mark.parametrize(
    ("program", "tests", "settings"),
    [
        (ADD, TESTS, {}),
        (ADD, "assert add(1, 2) == 3\nassert add(1, -1) == 0", {}),
        (ADD, UNITTEST, {}),
        (ADD, "def test_add():\n    assert add(2, 2) == 4", {}),
        (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "add"}),
        ("from collections import Counter\ndef f(x):\n    return Counter(x)", ["assert f('aab') == {'a': 2, 'b': 1}"], {}),
        (
            "class Box:\n    def __init__(self, v):\n        self.v = v\n    def get(self):\n        return self.v",
            ["assert Box([1]).get() == [1]"],
            {},
        ),
        ("def g(n):\n    yield from range(n)", ["assert list(g(3)) == [0, 1, 2]", "assert 2 in g(3)"], {}),
        ("def f(x):\n    return (x, {x}, {'k': [x, 1.5, None, True]})", ["assert f(1) == (1, {1}, {'k': [1, 1.5, None, True]})"], {}),
        ("def f(x):\n    raise ValueError(x)", ["try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False"], {}),
        ("def f(x):\n    return x ** 0.5", ["assert math.isclose(f(2), math.sqrt(2))"], {}),
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "1 2\n", "output": "3"}, {"input": "2 2", "output": "4\n"}], {}),
    ],
)
def test_right_programs_pass(program, tests, settings):
    assert run(program, tests, **settings) == 1.0


def test_credit_can_be_shared():
    assert run("def add(a, b):\n    return 3", credit="share") == 0.5
    assert run("def add(a, b):\n    return 3") == 0.0


def test_scripts_are_compared_by_their_words_line_by_line():
    tests = [{"input": "", "output": "1 2\n3\n"}]
    assert run("print('1  2 ')\nprint(3)\nprint()", tests) == 1.0
    assert run("print('1 2 3')", tests) == 0.0
    assert run("import sys\nprint('1 2')\nprint(3)\nsys.exit(0)", tests) == 1.0
    assert run("import sys\nsys.exit(0)", tests) == 0.0


def test_a_program_that_never_ends_is_wrong_within_its_time():
    began = time.monotonic()
    assert run("def add(a, b):\n    while True:\n        pass", timeout_s=1.0) == 0.0
    assert run("while True:\n    pass", [{"input": "", "output": "1"}], timeout_s=1.0) == 0.0
    assert time.monotonic() - began < 15


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("A_SECRET", "hunter2")
    assert run("import os\ndef f():\n    return os.environ.get('A_SECRET')", ["assert f() is None"]) == 1.0
    assert run("import os\ndef f():\n    return os.listdir('.')", ["assert f() == []"]) == 1.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2\n"),
        ("```bash\nls\n```", ""),
        ("```python\nx = 1", ""),
    ],
)
def test_the_last_program_is_taken(text, program):
    assert program_in(text) == program


def test_without_a_sandbox_it_is_refused_before_anything_runs_unless_the_recipe_allows_it(no_bwrap):
    with pytest.raises(RecipeError, match=r"code_exec: there is no sandbox .*bubblewrap \(bwrap\) is not installed") as raised:
        load_rewards([{"use": "code_exec"}], ".")
    assert raised.value.hint.startswith("install it (apt-get install bubblewrap); or set allow_unsafe_exec: true")
    (loaded,) = load_rewards([{"use": "code_exec"}], ".", allow_unsafe_exec=True)
    rollout = Rollout((Segment(Source.MODEL, (1,), (-0.1,)),), (Message("assistant", f"```python\n{ADD}\n```"),), StopReason.END)
    with Scorer([loaded]) as scorer:
        scores = scorer.score([Group(Prompt("f:1", (), {"tests": TESTS}), (rollout,))])
    assert scores.values.tolist() == [[1.0]]


def test_a_combination_of_it_is_refused_like_itself(no_bwrap, tmp_path):
    text = (
        "from postgrad.rewards.combine import clip\nfrom postgrad.rewards.library import code_exec\nclipped = clip(code_exec, high=0.5)\n"
    )
    (tmp_path / "rewards.py").write_text(text)
    with pytest.raises(RecipeError, match="there is no sandbox"):
        load_rewards([{"use": "rewards.py:clipped"}], tmp_path)
    assert load_rewards([{"use": "rewards.py:clipped"}], tmp_path, allow_unsafe_exec=True)


def test_no_column_of_the_data_can_allow_it():
    assert not set(load_rewards([{"use": "code_exec"}], ".", allow_unsafe_exec=True)[0].form.optional) & {"allow_unsafe_exec", "isolation"}


def test_a_sandbox_that_fails_is_no_zero(monkeypatch):
    def broken(*_, **__):
        raise SandboxError("no process could be started")

    monkeypatch.setattr("postgrad.rewards.library.code.run", broken)
    with pytest.raises(SandboxError):
        run(ADD)


@pytest.mark.parametrize("args", [{"credit": "some"}, {"timeout_s": 0}, {"memory_mb": 1}])
def test_settings_are_checked(args):
    with pytest.raises(RecipeError, match="needs"):
        load_rewards([{"use": "code_exec", "args": args}], ".")


def test_in_the_worker_the_deadline_ends_program_and_worker(no_bwrap):
    """A deadline of the recipe below the reward's own: the worker is killed, and what it started dies with it, also without a sandbox."""
    loops = "```python\nimport os\nopen('/tmp/' + str(os.getpid()) + '.postgrad-test', 'w').close()\nwhile True: pass\n```"
    rollout = Rollout((Segment(Source.MODEL, (1,), (-0.1,)),), (Message("assistant", loops),), StopReason.END)
    rewards = load_rewards([{"use": "code_exec", "deadline_s": 1.0}], ".", allow_unsafe_exec=True)
    with Scorer(rewards) as scorer:
        scores = scorer.score([Group(Prompt("f:1", (), {"tests": TESTS}), (rollout,))])
    assert [failure.kind for failure in scores.failures] == ["timeout"]
    from pathlib import Path

    for mark in Path("/tmp").glob("*.postgrad-test"):
        pid = int(mark.name.split(".")[0])
        mark.unlink()
        end = time.monotonic() + 15
        while _runs(pid) and time.monotonic() < end:
            time.sleep(0.1)
        assert not _runs(pid)


def _runs(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
