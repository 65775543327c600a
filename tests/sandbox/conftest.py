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
