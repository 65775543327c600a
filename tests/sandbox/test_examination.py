"""Programs against hidden tests: what passes, and that no trick does. Real processes."""

import os
import time

import pytest

from postgrad.sandbox import Isolation, Limits, SandboxError, examination
from postgrad.sandbox.examination import Job, Verdict, run
from postgrad.sandbox.guest import Guest

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 3)"


def examine(program, tests, *, isolation=Isolation.BUBBLEWRAP, timeout_s=20.0, memory_mb=512):
    kind = "text" if isinstance(tests, str) else "script" if isinstance(tests[0], tuple) else "statements"
    job = Job(program, kind, (tests,) if isinstance(tests, str) else tuple(tests))
    return run(job, isolation=isolation, timeout_s=timeout_s, memory_mb=memory_mb)


@pytest.mark.parametrize("isolation", Isolation)
@pytest.mark.parametrize("tests", [TESTS, UNITTEST, "\n".join(TESTS)], ids=["statements", "unittest", "text"])
def test_a_right_program_passes_with_and_without_a_sandbox(request, isolation, tests):
    if isolation is Isolation.BUBBLEWRAP:
        request.getfixturevalue("confined")
    assert examine(ADD, tests, isolation=isolation) == Verdict(2, 2) if tests is TESTS else Verdict(1, 1)


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
    "prints a pass": "print('OK')\nprint('2 passed')\nprint('{\"passed\": 2, \"total\": 2}')\nimport sys\nsys.exit(0)",
    "kills all it can": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "looks for the tests": (
        "import os, gc\nfound = [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o]\n"
        "for folder, _, files in os.walk('/tmp/home'):\n    found += files\ndef add(a, b):\n    return 3 if found else 4"
    ),
    "leaves a child that writes": (
        "import os, time\nif os.fork() == 0:\n    for fd in range(3, 1024):\n        try:\n            os.write(fd, b'x' * 100)\n"
        "        except OSError:\n            pass\n    os._exit(0)\ndef add(a, b):\n    time.sleep(0.2)\n    return 4"
    ),
    "sends what cannot be read": (
        "import os, struct\ndata = b'\\x80\\x04' + b']' * 10**6\nfor fd in range(3, 1024):\n    try:\n"
        "        os.write(fd, struct.pack('<Q', len(data)) + data)\n    except OSError:\n        pass"
    ),
    "reads frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        f = f.f_back\n    return 4",
    "too much memory": "def add(a, b):\n    return len(bytearray(10**11))",
}


@pytest.mark.parametrize("tests", [TESTS, UNITTEST, "\n".join(TESTS)], ids=["statements", "unittest", "text"])
@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS.keys())
def test_wrong_and_cheating_programs_pass_nothing(confined, program, tests):
    assert examine(program, tests).passed == 0


SCRIPTS = [("1 2", "3"), ("2 2", "4")]


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 2),
        ("print(3)", 1),
        ("print('OK')\nprint('passed')", 0),
        ("import os\nprint(3, flush=True)\nos._exit(0)", 1),
        ("print(3)\nraise ValueError", 0),  # it printed the answer and failed
        ("import os\nprint(3, flush=True)\nos.kill(os.getpid(), 9)", 0),
        ("import sys\nsys.exit(0)", 0),
        ("while True:\n    print('3')", 0),
        ("import os\nfor fd in range(3, 1024):\n    try:\n        os.write(fd, b'3')\n    except OSError:\n        pass", 0),
        ("import os, time\nif os.fork() == 0:\n    time.sleep(30)\nprint(3)", 1),
    ],
)
def test_scripts_are_judged_by_what_they_print_before_they_end_well(confined, program, passed):
    assert examine(program, SCRIPTS) == Verdict(passed, 2)


def test_one_test_cannot_prepare_the_next(confined):
    program = "import os\nprint(os.path.exists('/tmp/note'))\nopen('/tmp/note', 'w').close()"
    assert examine(program, [("", "False"), ("", "False")]) == Verdict(2, 2)


@pytest.mark.parametrize("tests", [TESTS, SCRIPTS])
def test_a_program_that_never_ends_is_wrong_within_a_second_of_its_time(confined, tests):
    began = time.monotonic()
    assert examine("while True:\n    pass", tests, timeout_s=0.5) == Verdict(0, 2)
    assert time.monotonic() - began < 4.0


def test_an_examiner_that_the_machine_killed_is_asked_again(confined, monkeypatch):
    asked, killed = examination._calls, [b""]
    monkeypatch.setattr(examination, "_calls", lambda *job: killed.pop() if killed else asked(*job))
    assert examine(ADD, TESTS) == Verdict(2, 2)


def test_a_program_that_kills_every_examiner_passes_nothing(confined, monkeypatch):
    monkeypatch.setattr(examination, "_calls", lambda *job: b"")
    assert examine(ADD, TESTS) == Verdict(0, 2)


def test_a_sandbox_that_does_not_start_is_an_error_and_says_why(confined, monkeypatch):
    monkeypatch.setattr("postgrad.sandbox.bubblewrap._SYSTEM", ())
    with pytest.raises(SandboxError, match="bwrap: "):
        examine(ADD, TESTS)


def test_nothing_is_left_open(confined):
    examine(ADD, TESTS)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        examine(ADD, TESTS)
        examine("print(3)", SCRIPTS)
        with Guest("nothing", {}, isolation=confined, limits=Limits(cpu_s=5)):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("many_files")
def test_a_run_with_a_thousand_files_open_examines(confined):
    assert examine("def add(a, b):\n    return a + b", TESTS).passed == len(TESTS)
    assert examine("print(3)", SCRIPTS) == Verdict(1, 2)
