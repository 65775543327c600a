import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from postgrad.errors import RecipeError, RunError
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason

HEAD = "import os, sys, time, ctypes, re, asyncio, math\nfrom postgrad.rewards import reward\n"


def rollout(text, sample, stop=StopReason.END):
    segments = (Segment(Source.PROMPT, (1, 2)), Segment(Source.MODEL, (3, 4), (-0.1, -0.2)))
    return Rollout(segments, (Message("assistant", text),), stop, sample=sample, text=text, raw_text=text + "<end>")


def groups(*texts, **columns):
    """One group per tuple of completion texts."""
    return [
        Group(
            Prompt(f"data.jsonl:{number}", (Message("user", f"question {number}"),), columns),
            tuple(rollout(text, i) for i, text in enumerate(group)),
        )
        for number, group in enumerate(texts, start=1)
    ]


@pytest.fixture
def scored(tmp_path):
    """score(source of a reward file, groups, *names or specs) -> Scores"""

    def score(source, batch, *specs, memory_gb=4.0):
        (tmp_path / "rewards.py").write_text(HEAD + source)
        named = [{"use": f"rewards.py:{spec}", "deadline_s": 1.0} if isinstance(spec, str) else spec for spec in specs]
        with Scorer(load_rewards(named, tmp_path), memory_gb=memory_gb) as scorer:
            return scorer.score(batch)

    return score


def column(scores, index=0):
    return [None if np.isnan(value) else float(value) for value in scores.values[:, index]]


BATCH = groups(("a", "bb"), ("ccc", "dddd"), answer="a")


def test_values_come_in_the_order_of_the_rollouts(scored):
    source = "def size(completion):\n    return len(completion)\ndef right(completion, answer):\n    return completion == answer\n"
    scores = scored(source, BATCH, "size", {"use": "rewards.py:right", "weight": 2.0})
    assert scores.values.tolist() == [[1, 1], [2, 0], [3, 0], [4, 0]]
    assert (scores.names, scores.weights, scores.roles, scores.group_size) == (("size", "right"), (1.0, 2.0), ("outcome", "outcome"), 2)
    assert scores.totals.tolist() == [3, 2, 3, 4]
    assert scores.counts["size"].scored == 4
    assert scores.failures == ()


def test_trl_functions_are_called_with_one_prompts_lists(scored):
    source = (
        "def sizes(prompts, completions, answer, **kwargs):\n"
        "    return [len(completions) + (c[0]['content'] == a) for c, a in zip(completions, answer)]\n"
    )
    assert column(scored(source, BATCH, "sizes")) == [3, 2, 2, 2]


def test_none_abstains_and_is_no_failure(scored):
    scores = scored("def some(completion):\n    return None if completion == 'bb' else 1\n", BATCH, "some")
    assert column(scores) == [1, None, 1, 1]
    assert (scores.counts["some"].abstained, scores.counts["some"].failed, scores.failures) == (1, 0, ())


def test_nan_abstains_and_is_counted_as_a_failure(scored):
    scores = scored("def some(completion):\n    return math.nan if completion == 'bb' else 1\n", BATCH, "some")
    assert column(scores) == [1, None, 1, 1]
    assert [(f.kind, f.row, f.sample) for f in scores.failures] == [("nan", "data.jsonl:1", 1)]
    assert scores.counts["some"].failed == 1


def test_infinite_value_stops_the_run_unless_told_otherwise(scored):
    source = "def big(completion):\n    return -math.inf if completion == 'ccc' else 1\n"
    with pytest.raises(RunError, match=r"reward big: returned -inf, at data.jsonl:2, sample 0"):
        scored(source, BATCH, "big")
    scores = scored(source, BATCH, {"use": "rewards.py:big", "on_nonfinite": "abstain"})
    assert column(scores) == [1, 1, None, 1]
    assert scores.failures[0].kind == "infinite"


@pytest.mark.parametrize(
    ("body", "got"),
    [
        (
            "def bad(completion):\n    return 'high' if completion == 'bb' else 1",
            r"str 'high', expected a number or None, at data.jsonl:1, sample 1",
        ),
        ("def bad(completion):\n    return {'score': 1}", r"dict \{'score': 1\}, expected a number or None"),
        ("def bad(rollout):\n    return [1.0]", r"list \[1.0\], expected a number or None"),
        ("def bad(completions, **kwargs):\n    return [1.0]", r"a list of 1, expected 2 numbers"),
        ("def bad(completions, **kwargs):\n    return [1.0] * 3", r"a list of 3, expected 2 numbers"),
        ("def bad(completions, **kwargs):\n    return 1.0", r"float 1.0, expected a list of 2 numbers"),
        ("def bad(completions, **kwargs):\n    return {0: 1, 1: 2}", r"dict .* expected a list of 2 numbers"),
        ("def bad(completions, **kwargs):\n    return [1.0, 'x']", r"str 'x', expected a number or None, at data.jsonl:1, sample 1"),
        ("@reward(group=True)\ndef bad(rollouts):\n    return []", r"a list of 0, expected 2 numbers"),
    ],
)
def test_what_is_no_reward_stops_the_run_naming_function_and_value(scored, body, got):
    with pytest.raises(RunError, match=f"reward bad returned {got}") as caught:
        scored(body, BATCH, "bad")
    assert caught.value.where.endswith("rewards.py:bad")


def test_numpy_arrays_are_lists_of_numbers(scored):
    assert column(scored("import numpy\ndef r(completions):\n    return numpy.arange(len(completions))\n", BATCH, "r")) == [0, 1, 0, 1]


def test_exception_costs_one_row_and_keeps_its_traceback(scored):
    source = "def picky(completion):\n    if completion == 'bb':\n        raise KeyError('no such unit')\n    return 1\n"
    scores = scored(source, BATCH, "picky")
    assert column(scores) == [1, None, 1, 1]
    (failure,) = scores.failures
    assert (failure.reward, failure.row, failure.sample, failure.kind) == ("picky", "data.jsonl:1", 1, "exception")
    assert failure.message == "KeyError: 'no such unit'"
    assert failure.prompt_head == "question 1"
    assert "raise KeyError" in failure.traceback


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("import yaml\n    yaml.safe_load('a: [1, {b')", "rewards.py:5"),  # more frames of the library than a traceback keeps
        ("raise ValueError('File \"x.py\", line 3, in y')", "rewards.py:4"),
    ],
)
def test_a_failure_names_the_last_line_of_the_users_own_file(scored, body, place):
    failure = scored(f"def f(completion):\n    {body}\n", BATCH, "f").failures[0]
    assert failure.place == place
    assert str(failure).endswith(f" ({place})")


def test_exception_stops_the_run_on_request(scored):
    with pytest.raises(RunError, match=r"ZeroDivisionError.*data.jsonl:1, sample 0 \('question 1'\)") as caught:
        scored("def r(rollout):\n    return 1 / 0\n", BATCH, {"use": "rewards.py:r", "on_error": "stop"})
    assert "return 1 / 0" in str(caught.value)
    assert caught.value.hint


def test_one_bad_row_of_a_list_function_costs_one_row(scored):
    source = "def r(completions, **kwargs):\n    return [10 / (len(c[0]['content']) - 2) for c in completions]\n"
    scores = scored(source, BATCH, "r")
    assert column(scores) == [-10, None, 10, 5]
    assert [(f.row, f.sample) for f in scores.failures] == [("data.jsonl:1", 1)]


def test_group_reward_fails_as_a_whole_group(scored):
    source = "@reward(group=True)\ndef r(rollouts):\n    return [1 / (len(v.text) - 2) for v in rollouts]\n"
    scores = scored(source, BATCH, "r")
    assert column(scores) == [None, None, 1, 0.5]
    assert scores.counts["r"].failed == 2


DISASTERS = {
    "loop": ("while True: pass", "timeout", "deadline of 1 s"),
    "os._exit": ("os._exit(3)", "crash", "exit code 3"),
    "sys.exit": ("sys.exit(0)", "exception", "SystemExit: 0"),
    "sleep": ("time.sleep(60)", "timeout", "deadline of 1 s"),
    "regex": ("re.match(r'(a+)+$', 'a' * 40 + 'b')", "timeout", "deadline of 1 s"),
    "segfault": ("ctypes.string_at(0)", "crash", "SIGSEGV"),
    "killed": ("os.kill(os.getpid(), 9)", "crash", "SIGKILL"),
}


@pytest.mark.parametrize(
    ("form", "disaster"),
    [*(("completion", name) for name in DISASTERS), *((form, name) for form in ("completions", "async") for name in list(DISASTERS)[:3])],
)
def test_hang_or_crash_costs_one_row_and_scoring_goes_on(scored, form, disaster):
    body, kind, message = DISASTERS[disaster]
    if form == "completions":
        loop = f"    for c in completions:\n        if c[0]['content'] == 'bb':\n            {body}\n"
        source = f"def r(completions):\n{loop}    return [1] * len(completions)\n"
    else:
        keyword = "async " if form == "async" else ""
        source = f"{keyword}def r(completion):\n    if completion == 'bb':\n        {body}\n    return 1\n"
    source += "def after(completion):\n    return 2\n"
    scores = scored(source, BATCH, {"use": "rewards.py:r", "deadline_s": 1.0}, "after")
    assert column(scores) == [1, None, 1, 1]
    assert column(scores, 1) == [2, 2, 2, 2]
    (failure,) = scores.failures
    assert (failure.kind, failure.row, failure.sample) == (kind, "data.jsonl:1", 1)
    assert message in failure.message


def test_memory_is_bounded_and_costs_one_row(scored):
    source = "def greedy(completion):\n    if completion == 'bb':\n        hoard = bytearray(3 << 30)\n    return 1\n"
    scores = scored(source, BATCH, "greedy", memory_gb=0.5)
    assert column(scores) == [1, None, 1, 1]
    assert scores.failures[0].kind == "memory"


def test_async_rows_wait_side_by_side(scored):
    began = time.monotonic()
    scores = scored(
        "async def judge(completion):\n    await asyncio.sleep(0.5)\n    return len(completion)\n", groups(("a", "bb") * 4), "judge"
    )
    assert column(scores) == [1, 2] * 4
    assert time.monotonic() - began < 2.5  # one after the other takes 4 seconds


def test_async_row_past_its_deadline_is_cancelled_alone(scored):
    source = "async def judge(completion):\n    await asyncio.sleep(30 if completion == 'bb' else 0)\n    return 1\n"
    scores = scored(source, BATCH, {"use": "rewards.py:judge", "deadline_s": 0.3})
    assert column(scores) == [1, None, 1, 1]
    assert scores.failures[0].kind == "timeout"


def test_a_functions_own_timeout_error_is_an_exception(scored):
    scores = scored("async def judge(completion):\n    raise TimeoutError('socket')\n", BATCH, "judge")
    assert {f.kind for f in scores.failures} == {"exception"}


def test_printing_does_not_reach_the_channel(scored, capfd):
    source = "print('imported')\ndef loud(completion):\n    print('x' * 100_000)\n    os.write(1, b'raw bytes')\n    return 1\n"
    assert column(scored(source, BATCH, "loud")) == [1, 1, 1, 1]
    out, err = capfd.readouterr()
    assert out == ""
    assert "raw bytes" in err


def test_each_call_gets_its_own_copy_of_the_columns(scored):
    source = "def drains(rollout, notes):\n    notes.append(1)\n    return len(notes)\ndef reads(rollout, notes):\n    return len(notes)\n"
    batch = groups(("a", "b"), notes=[7])
    scores = scored(source, batch, "drains", "reads")
    assert scores.values.tolist() == [[2, 1], [2, 1]]
    assert batch[0].prompt.columns["notes"] == [7]


def test_infrastructure_rollouts_are_not_scored(scored):
    group = Group(BATCH[0].prompt, (rollout("a", 0), rollout("bb", 1, StopReason.INFRASTRUCTURE), rollout("ccc", 2)))
    source = "def r(rollout):\n    return 1\ndef lists(completions):\n    return [len(completions)] * len(completions)\n"
    scores = scored(source, [group], "r", "lists")
    assert column(scores) == [1, None, 1]
    assert column(scores, 1) == [2, None, 2]
    assert np.isnan(scores.totals[1])
    assert scores.counts["r"].abstained == 0


def test_editing_the_file_during_a_run_changes_nothing(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("import os\ndef r(completion):\n    if completion == 'bb':\n        os._exit(1)\n    return 1\n")
    with Scorer(load_rewards([{"use": "rewards.py:r"}], tmp_path)) as scorer:
        path.write_text("raise SystemExit\n")
        assert column(scorer.score(BATCH)) == [1, None, 1, 1]
        path.unlink()
        assert column(scorer.score(BATCH)) == [1, None, 1, 1]


def test_worker_started_once_serves_several_batches(tmp_path):
    (tmp_path / "rewards.py").write_text("import os\ndef pid(rollout):\n    return os.getpid()\n")
    with Scorer(load_rewards([{"use": "rewards.py:pid"}], tmp_path)) as scorer:
        first, second = scorer.score(BATCH).values, scorer.score(BATCH).values
        pid = int(first[0, 0])
        assert len({*first.ravel(), *second.ravel()}) == 1
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_worker_that_was_killed_between_batches_is_replaced_without_blame(tmp_path):
    (tmp_path / "rewards.py").write_text("import os\ndef pid(rollout):\n    return os.getpid()\n")
    with Scorer(load_rewards([{"use": "rewards.py:pid"}], tmp_path)) as scorer:
        pid = int(scorer.score(BATCH).values[0, 0])
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        scores = scorer.score(BATCH)
        assert scores.failures == ()
        assert int(scores.values[0, 0]) != pid


def test_processes_that_a_reward_started_end_with_it(scored):
    source = (
        "import subprocess\ndef r(completion):\n    child = subprocess.Popen(['sleep', '60'])\n"
        "    open(PATH, 'a').write(f'{child.pid}\\n')\n    if completion == 'bb':\n        os._exit(0)\n    return 1\n"
    )
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"postgrad-pids-{os.getpid()}"
    try:
        assert column(scored(source.replace("PATH", repr(str(path))), BATCH, "r")) == [1, None, 1, 1]
        pids = [int(line) for line in path.read_text().split()]
    finally:
        path.unlink(missing_ok=True)
    time.sleep(0.2)
    assert len(pids) == 4
    assert not [pid for pid in pids if _running(pid)]


def _running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_worker_starts_quickly(tmp_path):
    (tmp_path / "rewards.py").write_text("def r(rollout):\n    return 1\n")
    times = []
    for _ in range(3):
        began = time.monotonic()
        load_rewards([{"use": "rewards.py:r"}], tmp_path)
        times.append(time.monotonic() - began)
    assert min(times) < 2.0  # a worker that imported torch would need several


def test_groups_of_different_sizes_are_refused():
    with Scorer(load_rewards([{"use": "tool_use"}], ".")) as scorer, pytest.raises(ValueError, match=r"sizes \[1, 2\]"):
        scorer.score(groups(("a",), ("b", "c")))


def test_a_reward_model_joins_as_one_more_column():
    with Scorer(load_rewards([{"use": "tool_use", "weight": 0.5}], ".")) as scorer:
        scores = scorer.score(groups(("a", "b")))
    joined = scores.with_reward("judge", weight=2.0, role="outcome", values=[0.25, float("nan")])
    assert joined.names == ("tool_use", "judge")
    assert joined.totals.tolist() == [0.5, 0.5]
    assert joined.outcome_totals[0] == 0.5
    assert np.isnan(joined.outcome_totals[1])
    assert joined.counts["judge"].abstained == 1
    with pytest.raises(RunError, match="shape"):
        scores.with_reward("judge", weight=1.0, role="outcome", values=[1.0])


def test_worker_does_not_outlive_a_trainer_that_was_killed(tmp_path):
    (tmp_path / "rewards.py").write_text("import os\ndef r(rollout):\n    print('pid', os.getpid())\n    while True: pass\n")
    script = (
        "from postgrad.rewards.load import load_rewards\nfrom postgrad.rewards.score import Scorer\nfrom postgrad.types import *\n"
        "rollout = Rollout((Segment(Source.PROMPT, (1,)),), (), StopReason.END)\n"
        "rewards = load_rewards([{'use': 'rewards.py:r', 'deadline_s': 60.0}], '.')\n"
        "Scorer(rewards).score([Group(Prompt('r', ()), (rollout,))])\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    pid = int(next(line for line in trainer.stderr if line.startswith("pid")).split()[1])
    trainer.kill()
    trainer.wait()
    trainer.stderr.close()
    deadline = time.monotonic() + 20
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _running(pid)


def test_a_reward_can_judge_each_turn(scored):
    """The value is the sum over the turns; a turn that abstains earns nothing, and a list of another length is refused."""
    two_turns = rollout("a", 0)
    more = (Segment(Source.TOOL, (9,)), Segment(Source.MODEL, (5,), (-0.1,)))
    two_turns = Rollout((*two_turns.segments, *more), two_turns.messages, StopReason.END, text="a")
    batch = [Group(Prompt("data.jsonl:1", ()), (two_turns, rollout("b", 1), rollout("none", 2), rollout("nan", 3)))]
    source = (
        "@reward(per_turn=True)\n"
        "def steps(rollout):\n"
        "    if rollout.text == 'none': return None\n"
        "    if rollout.text == 'nan': return [math.nan]\n"
        "    return [0.5, None][:rollout.turns] if rollout.turns == 2 else [0.25]\n"
    )
    scores = scored(source, batch, {"use": "rewards.py:steps", "weight": 2.0})
    assert column(scores) == [0.5, 0.25, None, None]
    assert scores.turns == {"steps": {0: [0.5, 0.0], 1: [0.25]}}
    assert [failure.kind for failure in scores.failures] == ["nan"]
    with pytest.raises(RunError, match=r"a list of 2, expected 1 numbers, one for each turn"):
        scored("@reward(per_turn=True)\ndef steps(rollout):\n    return [1, 2]\n", groups(("a",)), "steps")


def test_a_reward_of_turns_takes_one_rollout(scored):
    source = "@reward(per_turn=True)\ndef steps(completions, **kwargs):\n    return []\n"
    with pytest.raises(RecipeError, match="takes one rollout"):
        scored(source, BATCH, "steps")
