"""Cells in one namespace."""

import os
import time

import pytest

from postgrad.sandbox import Isolation, Limits
from postgrad.sandbox.interpreter import LONGEST_OUTPUT, Cell, Ended, Interpreter, TooSlow


@pytest.fixture(params=list(Isolation))
def interpreter(request):
    if request.param is Isolation.BUBBLEWRAP:
        request.getfixturevalue("confined")
    made = Interpreter(isolation=request.param, limits=Limits(cpu_s=60))
    yield made
    made.close()


def test_what_a_cell_prints_and_the_value_of_its_last_expression(interpreter):
    run = interpreter.run
    assert run("print('a')\n1 + 1", deadline_s=20) == Cell("a\n", "2")
    assert run("x = 3", deadline_s=20) == Cell("")
    assert run("x * 2", deadline_s=20) == Cell("", "6")  # the namespace stays
    assert run("None", deadline_s=20) == Cell("")
    assert run("", deadline_s=20) == Cell("")
    assert run("print('é\\ud800')", deadline_s=20) == Cell("é\\ud800\n")
    assert run("import sys, os\nprint('err', file=sys.stderr)\nos.write(1, b'raw\\n')", deadline_s=20) == Cell("err\nraw\n", "4")
    assert run("def f():\n    return [g for g in (1, 2)]\nf()", deadline_s=20) == Cell("", "[1, 2]")


def test_errors_begin_at_the_cells_own_line(interpreter):
    assert interpreter.run("x = 1\nx / 0", deadline_s=20).error.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<cell 1>", line 2, in <module>',
        "    x / 0",
        "    ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert interpreter.run("def f(:", deadline_s=20).error.splitlines()[-1] == "SyntaxError: invalid syntax"
    assert interpreter.run("import sys; sys.exit(0)", deadline_s=20).error.splitlines()[-1] == "SystemExit: 0"
    assert interpreter.run("input()", deadline_s=20).error.splitlines()[-1].startswith("EOFError")
    bad = "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E"
    assert "E" in interpreter.run(bad, deadline_s=20).error
    assert interpreter.run("class R:\n    def __repr__(self):\n        return 1 / 0\nR()", deadline_s=20).error.endswith("division by zero")
    assert interpreter.run("'still' + ' there'", deadline_s=20).value == "'still there'"


def test_output_is_kept_up_to_a_size_and_the_rest_costs_no_memory(interpreter):
    cell = interpreter.run("for _ in range(50):\n    print('x' * 2**16)", deadline_s=20)
    assert len(cell.printed) == LONGEST_OUTPUT
    assert cell.error is None


def test_a_cell_that_is_too_slow_says_what_it_printed(interpreter):
    began = time.monotonic()
    with pytest.raises(TooSlow) as raised:
        interpreter.run("print('begun')\nwhile True: pass", deadline_s=0.5)
    assert raised.value.printed == "begun\n"
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os; print('last', flush=True); os._exit(3)", 3),
        ("import os; print('last', flush=True); os.kill(os.getpid(), 9)", 137),
        ("import ctypes; print('last', flush=True); ctypes.string_at(0)", 139),
    ],
)
def test_an_interpreter_that_ended_says_what_it_printed(interpreter, code, exit_code):
    with pytest.raises(Ended) as raised:
        interpreter.run(code, deadline_s=20)
    assert (raised.value.printed, raised.value.code) == ("last\n", exit_code)


@pytest.mark.parametrize(
    "data", ["b'garbage' * 10", "struct.pack('<Q', 4) + b'null'", "struct.pack('<Q', 3) + b'{}}'", "struct.pack('<Q', 2**40)"]
)
def test_what_a_cell_writes_on_the_channel_is_no_fault_of_the_run(interpreter, data):
    forge = f"""
import os, struct
for fd in range(3, 1024):
    try:
        os.write(fd, {data})
    except OSError:
        pass
os._exit(0)"""
    with pytest.raises(Ended):
        interpreter.run(forge, deadline_s=5)


def test_nothing_is_left_open(confined):
    def once():
        made = Interpreter(isolation=confined, limits=Limits(cpu_s=5))
        made.run("1", deadline_s=20)
        made.close()
        made.close()

    once()
    before = len(os.listdir("/proc/self/fd"))
    once()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("many_files")
def test_a_run_with_a_thousand_files_open_has_its_interpreter(confined):
    made = Interpreter(isolation=confined, limits=Limits(cpu_s=5))
    try:
        assert made.run("print(1)\n2", deadline_s=20) == Cell("1\n", "2")
    finally:
        made.close()


def test_a_deadline_of_a_hundred_years_is_one(interpreter):
    assert interpreter.run("1 + 1", deadline_s=3e9) == Cell("", "2")
