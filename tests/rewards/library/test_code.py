import os
import socket
import time

import pytest

from postgrad.errors import RecipeError
from postgrad.rewards.base import view_of
from postgrad.rewards.library import code_exec
from postgrad.rewards.library.code import program_in
from postgrad.rewards.library.sandbox import bwrap_problem
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason


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


ATTACKS = {
    "nothing": "",
    "wrong": "def add(a, b):\n    return 4",
    "syntax error": "def add(a, b)",
    "raises": "def add(a, b):\n    raise ValueError",
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "exit in a call": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "os._exit in a call": "import os\ndef add(a, b):\n    os._exit(0)",
    "equals everything": "class T:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return T()",
    "a number that equals everything": (
        "class T(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\ndef add(a, b):\n    return T(9)"
    ),
    "skips": "import unittest\ndef add(a, b):\n    raise unittest.SkipTest('later')",
    "replaces builtins": (
        "import builtins\nbuiltins.AssertionError = ValueError\ndef isinstance(*a):\n    return True\ndef add(a, b):\n    return 4"
    ),
    "raises AssertionError": "def add(a, b):\n    raise AssertionError",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "writes a verdict": (
        'import os\nfor fd in range(1, 20):\n    try:\n        os.write(fd, b\'{"passed": 2, "total": 2}\' + bytes([10]))\n'
        "    except OSError:\n        pass"
    ),
    "reads frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        f = f.f_back\n    return 4",
    "too much memory": "def add(a, b):\n    return len(bytearray(10**11))",
}


@pytest.mark.parametrize("tests", [TESTS, UNITTEST, "\n".join(TESTS)], ids=["statements", "unittest", "text"])
@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS.keys())
def test_wrong_and_cheating_programs_pass_nothing(program, tests):
    assert run(program, tests) == 0.0


def test_a_program_cannot_replace_what_the_test_uses():
    assert run("def abs(x):\n    return 0\ndef f():\n    return 9.0", ["assert abs(f() - 2.0) < 1e-6"]) == 0.0
    assert (
        run("class math:\n    isclose = staticmethod(lambda *a: True)\ndef f():\n    return 9.0", ["assert math.isclose(f(), 2.0)"]) == 0.0
    )


def test_skipped_and_expected_failures_do_not_pass():
    skipping = "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('x')\n    def test_a(self):\n        add(1, 2)\nadd(1, 2)"
    assert run(ADD, skipping) == 0.0
    assert run(ADD, "import unittest\nclass T(unittest.TestCase):\n    pass\nadd(1, 2)") == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        None,
        "",
        [],
        3,
        [3],
        ["assert add(1,"],
        ["assert True"],
        "x = 1",
        [{"input": "1", "output": ""}],
        ["assert add(lambda: 1, 2) == 3"],
        [{"input": "1"}],
    ],
)
def test_tests_that_can_say_nothing_abstain(tests):
    assert run(ADD, tests) is None


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


def test_no_sandbox_where_one_is_demanded_is_a_failure_and_not_a_zero():
    if bwrap_problem() is None:
        pytest.skip("bwrap works here")
    with pytest.raises(RuntimeError, match="bwrap"):
        run(ADD, sandbox="bwrap")
    assert run(ADD, sandbox="rlimits") == 1.0


def test_with_bwrap_there_is_no_network():
    if (problem := bwrap_problem()) is not None:
        pytest.skip(problem)
    program = (
        "import socket\ndef f(port):\n    try:\n        socket.create_connection(('127.0.0.1', port), timeout=1)\n"
        "    except OSError:\n        return 'none'\n    return 'network'"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run(program, [f"assert f({port}) == 'none'"], sandbox="bwrap") == 1.0
        assert run(program, [f"assert f({port}) == 'network'"], sandbox="rlimits") == 1.0


@pytest.mark.parametrize("args", [{"credit": "some"}, {"sandbox": "docker"}, {"timeout_s": 0}, {"memory_mb": 1}])
def test_settings_are_checked(args):
    with pytest.raises(RecipeError, match="needs"):
        load_rewards([{"use": "code_exec", "args": args}], ".")


def test_in_the_worker_the_deadline_ends_program_and_worker():
    """A deadline of the recipe below the sandbox's own: the worker is killed, and what it started dies with it."""
    loops = "```python\nimport os\nopen('/tmp/' + str(os.getpid()) + '.postgrad-test', 'w').close()\nwhile True: pass\n```"
    rollout = Rollout((Segment(Source.MODEL, (1,), (-0.1,)),), (Message("assistant", loops),), StopReason.END)
    rewards = load_rewards([{"use": "code_exec", "deadline_s": 1.0, "args": {"sandbox": "rlimits"}}], ".")
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
