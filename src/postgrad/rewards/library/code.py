"""The outcome of programming: hidden tests that the answer's program passes. The program runs in a sandbox that neither the
tests nor the verdict are in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part
from postgrad.sandbox import isolation
from postgrad.sandbox.examination import Job, run

_BLOCK = re.compile(r"^```[ \t]*(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)

Credit = Literal["all", "share"]


def _check_code(credit: str = "all", timeout_s: float = 8.0, memory_mb: int = 512, **_: Any) -> None:
    if credit not in get_args(Credit):
        raise ValueError(f"needs credit all or share, got {credit!r}")
    if not (math.isfinite(timeout_s) and timeout_s > 0) or memory_mb < 64:
        raise ValueError(f"needs a positive timeout_s and memory_mb ≥ 64, got {timeout_s} and {memory_mb}")


@reward(
    scope="final", claim="the program passes the hidden tests", range=(0.0, 1.0), role="outcome", deadline_s=20.0, check_args=_check_code,
    runs_code=True,
)  # fmt: skip
def code_exec(
    rollout: RolloutView,
    tests: Any,
    entry_point: str | None = None,
    *,
    credit: Credit = "all",
    timeout_s: float = 8.0,
    memory_mb: int = 512,
) -> float | None:
    """1 when the Python program in the answer passes every test (credit: share = the share that it passes), else 0.

    The program is the last fenced block, or the whole answer where there is none. tests, one of:
    a list of statements   ["assert add(1, 2) == 3", …], each one test
    a text                 asserts, unittest classes, `test_…` functions, or `check(candidate)` for the column `entry_point`: one test
    a list of objects      [{"input": "1 2", "output": "3"}, …]: what a script reads and must print, each one test

    Tests run in a sandbox of their own: the program is asked over a pipe and answers with plain data, so `sys.exit(0)`, a skipped test and
    an object that equals everything pass nothing. Abstains when the tests are none, cannot run, or never ask the program. Where there is
    no sandbox, the recipe must say `allow_unsafe_exec: true`.
    """
    job = job_of(program_in(answer_part(rollout.final_answer)), tests, entry_point)
    if job is None:
        return None
    verdict = run(job, isolation=isolation(), timeout_s=timeout_s, memory_mb=memory_mb)
    if verdict is None or not verdict.total:
        return None
    return verdict.passed / verdict.total if credit == "share" else float(verdict.passed == verdict.total)


def program_in(text: str) -> str:
    """The last fenced block of Python, or of no named language; the text itself when it has no fence.

    >>> program_in("First:\\n```python\\nx = 1\\n```\\nand then\\n```\\nx = 2\\n```")
    'x = 2\\n'
    """
    blocks = [body for name, body in _BLOCK.findall(text) if name.lower() in ("", "python", "py", "python3")]
    return blocks[-1] if blocks else "" if "```" in text else text


def job_of(program: str, tests: Any, entry_point: str | None) -> Job | None:
    """The tests in the form that the sandbox runs; None when they are none."""
    if isinstance(tests, str):
        return Job(program, "text", (tests,), entry_point or "") if tests.strip() else None
    if not isinstance(tests, Sequence) or not tests:
        return None
    if all(isinstance(test, str) for test in tests):
        return Job(program, "statements", tuple(tests), entry_point or "")
    if all(isinstance(test, Mapping) and "output" in test for test in tests):
        # Printing nothing is no achievement, so an empty output is no test.
        pairs = tuple((str(test.get("input") or ""), str(test["output"])) for test in tests if str(test["output"] or "").strip())
        return Job(program, "script", pairs, "") if pairs else None
    return None
