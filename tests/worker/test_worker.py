"""A worker process: killed at its deadline, replaced, bounded; and nothing that its code does gets into the channel."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgrad.worker.parent import Worker, WorkerDied

CODE = """
import ctypes, json, os, resource, struct, subprocess, sys, threading, time
from postgrad.worker.child import HEADER, serve
from postgrad.worker.limits import limit_cpu, limit_memory
from postgrad.worker.processes import forbid_processes

def main(read_fd, write_fd):
    def answer(request):
        kind, value = request
        if kind == "echo":
            return value
        if kind == "sleep":
            time.sleep(value)
        elif kind == "exit":
            os._exit(value)
        elif kind == "segfault":
            ctypes.string_at(0)
        elif kind == "print":
            print("x" * value, flush=True)
            os.write(2, b"noise")
        elif kind == "write":
            os.write(write_fd, value)
            time.sleep(30)
        elif kind == "close":
            os.close(write_fd)
            time.sleep(30)
        elif kind == "memory":
            limit_memory(value)
            try:
                return len(bytearray(value * 2))
            except MemoryError:
                return "MemoryError"
        elif kind == "cpu":
            limit_cpu(value)
            return resource.getrlimit(resource.RLIMIT_CPU)[0]
        elif kind == "forbid":
            assert forbid_processes()
            spawn = lambda: os.posix_spawn("/bin/true", ["true"], {})
            return [attempt(start) for start in (os.fork, lambda: subprocess.run(["true"]), spawn)]
        elif kind == "thread":
            done = threading.Event()
            threading.Thread(target=done.set).start()
            return done.wait(5)
        elif kind == "fork":
            pid = os.fork()
            if not pid:
                time.sleep(60)
            return pid
        elif kind == "environment":
            return dict(os.environ)
        return "done"
    serve(read_fd, write_fd, answer)

def attempt(start):
    try:
        start()
    except OSError as error:
        return error.errno
    return 0
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    (tmp_path / "code_of_a_worker.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    worker = Worker("code_of_a_worker")
    worker.start()
    yield worker
    worker.kill()


def dies(worker: Worker, kind: str, value: object, seconds: float = 20.0) -> WorkerDied:
    with pytest.raises(WorkerDied) as caught:
        worker.ask((kind, value), seconds)
    assert not worker.alive
    return caught.value


def test_requests_are_answered_in_order(worker: Worker) -> None:
    assert [worker.ask(("echo", value), 20) for value in (1, "é", {"a": [None]})] == [1, "é", {"a": [None]}]


def test_large_requests_and_replies_pass(worker: Worker) -> None:
    text = "x" * 5_000_000
    assert worker.ask(("echo", text), 20) == text


def test_a_process_that_does_not_answer_is_killed_at_the_deadline(worker: Worker) -> None:
    worker.ask(("echo", 1), 20)
    started = time.monotonic()
    died = dies(worker, "sleep", 60, seconds=0.2)
    assert (died.kind, str(died)) == ("timeout", "no answer within 0.2 s")
    assert time.monotonic() - started < 5


def test_a_killed_worker_can_be_started_again(worker: Worker) -> None:
    dies(worker, "exit", 3)
    worker.start()
    assert worker.ask(("echo", 1), 20) == 1
    assert worker.starts == 2


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("exit", 3, "the process ended with exit code 3"),
        ("segfault", None, "the process was killed by SIGSEGV"),
        ("close", None, "closed its end of the channel"),
        ("write", b"\x05\x00\x00\x00\x00\x00\x00\x00hello", "the process answered with something that is no JSON"),
        ("write", b"\xff\xff\xff\xff\xff\xff\xff\xff", "the process answered with 18446744073709551615 bytes"),
    ],
)
def test_a_process_that_dies_or_answers_nonsense_has_crashed(worker: Worker, kind: str, value: object, message: str) -> None:
    died = dies(worker, kind, value)
    assert (died.kind, str(died)) == ("crash", message)


def test_what_the_code_prints_is_no_reply(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.start()  # its stderr is the one that capfd reads
    assert worker.ask(("print", 100_000), 20) == "done"
    assert worker.ask(("echo", 1), 20) == 1
    out, err = capfd.readouterr()
    assert (out, len(err)) == ("", 100_006)


def test_memory_is_limited_from_where_the_process_stands(worker: Worker) -> None:
    assert worker.ask(("memory", 100 * 2**20), 20) == "MemoryError"
    assert worker.ask(("echo", 1), 20) == 1


def test_cpu_time_is_limited(worker: Worker) -> None:
    cores = os.cpu_count() or 1
    assert 11 * cores <= worker.ask(("cpu", 1.0), 20) <= 11 * cores + 30  # the deadline and ten seconds of grace on every core


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of system calls")
def test_a_worker_that_may_start_no_process_starts_none_but_threads(worker: Worker) -> None:
    assert worker.ask(("forbid", None), 20) == [1, 1, 1]
    assert worker.ask(("thread", None), 20) is True


def test_what_the_process_started_ends_with_it(worker: Worker) -> None:
    pid = worker.ask(("fork", None), 20)
    os.kill(pid, 0)
    worker.kill()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1]:
            return  # dead, and waiting for init to collect it
        time.sleep(0.02)
    raise AssertionError(f"{pid} still runs")


def test_the_environment_can_be_replaced(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    bare = Worker("code_of_a_worker", environment={"PATH": os.environ["PATH"]})
    bare.start()
    try:
        assert "SECRET_OF_MINE" not in bare.ask(("environment", None), 20)
    finally:
        bare.kill()


def test_an_interrupted_question_kills_the_process(worker: Worker) -> None:
    """Its reply is still to come and would answer the next one."""
    worker.ask(("echo", 1), 20)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        worker.ask(("sleep", 60), 20)
    assert not worker.alive


def test_a_worker_needs_no_torch() -> None:
    code = textwrap.dedent(
        "import sys, postgrad.worker.parent, postgrad.worker.limits, postgrad.worker.processes; sys.exit('torch' in sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
