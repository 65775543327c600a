"""What a reward can do wrong and must not spread: memory, threads, leftovers, hidden constants. Others are in `test_score`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from postgrad.rewards.base import bind, call_form, view_of
from postgrad.rewards.child import CONCURRENT
from postgrad.rewards.doctor import Monitor, RewardInfo, examine
from postgrad.rewards.doctor.assemble import About, Sample, Sampled, assemble
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason

HEAD = "import asyncio, os, threading, time\nfrom postgrad.rewards import reward\n"


def group(size, **columns):
    segments = (Segment(Source.PROMPT, (1, 2)), Segment(Source.MODEL, (3, 4), (-0.1, -0.2)))
    rollouts = tuple(Rollout(segments, (Message("assistant", str(i)),), StopReason.END, sample=i, text=str(i)) for i in range(size))
    return Group(Prompt("data.jsonl:1", (Message("user", "q"),), columns), rollouts)


def score(folder, source, batch, **spec):
    (folder / "rewards.py").write_text(HEAD + source)
    with Scorer(load_rewards([{"use": "rewards.py:r", **spec}], folder)) as scorer:
        return scorer.score([batch])


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def test_ten_gigabytes_are_refused_and_the_trainer_stays_as_small_as_it_was(tmp_path):
    before = resident_mb()
    scores = score(tmp_path, "def r(completion):\n    return len(bytearray(10 << 30)) if completion == '1' else 0.5\n", group(3))
    assert [failure.kind for failure in scores.failures] == ["memory"]
    assert np.isnan(scores.values[:, 0]).tolist() == [False, True, False]
    assert resident_mb() - before < 50


def test_async_rows_wait_side_by_side_but_not_all_at_once(tmp_path):
    source = (
        "waiting = 0\n"
        "async def r(completion):\n"
        "    global waiting\n"
        "    waiting += 1\n"
        "    await asyncio.sleep(0.02)\n"
        "    seen, waiting = waiting, waiting - 1\n"
        "    return seen\n"
    )
    values = score(tmp_path, source, group(3 * CONCURRENT)).values
    assert 2 <= values.max() <= CONCURRENT


def test_tasks_and_threads_that_a_reward_leaves_behind_end_with_it_and_say_nothing(tmp_path, capfd):
    source = (
        "def forever():\n    while True: time.sleep(0.05)\n"
        "async def r(completion):\n"
        "    asyncio.get_running_loop().create_task(asyncio.sleep(60))\n"
        "    threading.Thread(target=forever).start()\n"
        "    return os.getpid()\n"
    )
    began = time.monotonic()
    pid = int(score(tmp_path, source, group(2)).values[0, 0])
    assert time.monotonic() - began < 10
    assert not Path(f"/proc/{pid}").exists()
    assert "Task was destroyed" not in capfd.readouterr().err


def test_an_interrupted_trainer_leaves_no_worker_behind(tmp_path):
    """Ctrl-C while an async reward waits: the block ends, and the process in which the reward runs with it."""
    (tmp_path / "rewards.py").write_text(
        HEAD + "async def r(completion):\n    print('worker', os.getpid(), flush=True)\n    await asyncio.sleep(60)\n    return 1\n"
    )
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have started the tests with it ignored
        "from postgrad.rewards.load import load_rewards\nfrom postgrad.rewards.score import Scorer\nfrom postgrad.types import *\n"
        "rollout = Rollout((Segment(Source.PROMPT, (1,)),), (Message('assistant', 'x'),), StopReason.END)\n"
        "try:\n"
        "    with Scorer(load_rewards([{'use': 'rewards.py:r', 'deadline_s': 60.0}], '.')) as scorer:\n"
        "        scorer.score([Group(Prompt('r', ()), (rollout,))])\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(130)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert trainer.stderr is not None
    with trainer:
        pid = int(next(line for line in trainer.stderr if line.startswith("worker")).split()[1])
        began = time.monotonic()
        trainer.send_signal(signal.SIGINT)
        rest = trainer.stderr.read()
    assert trainer.returncode == 130
    assert time.monotonic() - began < 5
    assert rest == ""
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("raw", [False, True])
def test_completions_have_one_type_whatever_the_data_is(raw):
    """Chat or plain text: a completion is a list of messages, and `completion` its text."""
    messages = () if raw else (Message("user", "q"),)
    view = view_of(Prompt("r", messages, {}, "q" if raw else None), group(1).rollouts[0])
    (_, named) = bind(call_form(lambda completions: 0), [(view, {})], {})
    assert named["completions"] == [[{"role": "assistant", "content": "0"}]]
    ((text,), _) = bind(call_form(lambda completion: 0), [(view, {})], {})
    assert text == "0"


def constant(step, prompts):
    """A batch of groups in which every rollout earns 0.7."""
    return [Sampled(step, f"data.jsonl:{place}", (Sample({"r": 0.7}, total=0.7, advantage=0.0),) * 4) for place in range(prompts)]


def test_a_constant_reward_is_found_within_twenty_steps(monkeypatch):
    """With the default of eight prompts it is an alarm; with few prompts per step at least a finding."""
    monitor = Monitor([RewardInfo("r", 1.0, "outcome", (0, 1))], method="grpo", recipe={})
    monkeypatch.setattr("postgrad.rewards.doctor.monitor.group_of", lambda record: record)
    found = {step: [(f.id, f.severity) for f in monitor.see(constant(step, 8))] for step in range(1, 21)}
    assert next(step for step, findings in found.items() if ("R1", "critical") in findings) <= 20
    few = assemble([sampled for step in range(1, 21) for sampled in constant(step, 2)], About("x", "grpo", (RewardInfo("r"),)))
    assert "R1" in {finding.id for finding in examine(few).findings}
