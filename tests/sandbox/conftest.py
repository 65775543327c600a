import os
import resource
from contextlib import ExitStack

import pytest

from postgrad.sandbox import Isolation, Limits, problem
from postgrad.sandbox.interpreter import Interpreter


@pytest.fixture
def confined():
    """Skips where this machine cannot confine anything, and says why."""
    if (found := problem()) is not None:
        pytest.skip(f"NOTHING IS TESTED HERE: no sandbox on this machine, {found[0]}; {found[1]}")
    return Isolation.BUBBLEWRAP


@pytest.fixture
def inside(confined):
    """Runs a cell in a sandbox of its own."""

    def run(code, *, deadline_s=20.0, **limits):
        interpreter = Interpreter(isolation=confined, limits=Limits(**({"cpu_s": 20} | limits)))
        try:
            return interpreter.run(code, deadline_s=deadline_s)
        finally:
            interpreter.close()

    return run


@pytest.fixture
def many_files():
    """This process has so many files open that the next one's number is above 1,024, where `select` ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))  # a machine that allows less fails here, in the open
    try:
        with ExitStack() as opened:
            for _ in range(1030):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
