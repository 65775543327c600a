"""The same rows and the same report however a file is divided and however many processes work; no process outlives its work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import Reading, Work, audit, load_rows, prepare_preferences, prepare_prompts, prepare_sft, rows_from
from postgrad.data.pipeline import encode
from postgrad.errors import DataError, RecipeError, RunError
from postgrad.testing import tiny_tokenizer

CHAT = ChatFormat(tiny_tokenizer())


def lines(count: int) -> list[str]:
    """Rows of all fates: kept, cut, duplicate, damaged, rejected, broken."""
    rows = []
    for number in range(count):
        text = "x" * 300 if number % 11 == 0 else f"answer {number % 40}" + ("\N{REPLACEMENT CHARACTER}" if number % 17 == 0 else "")
        messages = [{"role": "user", "content": f"q{number % 40}"}, {"role": "assistant", "content": text if number % 13 else ""}]
        rows.append("{broken" if number % 19 == 5 else json.dumps({"messages": messages}))
    return rows


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines(300)))
    return path


def prepared(file: Path, helpers: int):
    data = prepare_sft(load_rows(file, max_bad=100), CHAT, max_length=200, overlong="cut", work=Work(helpers=helpers))
    return list(data.rows), list(data.row_names), list(data.sources), data.report, data.report.lines()


def test_helpers_give_the_same_rows_in_the_same_order_and_the_same_report(file, monkeypatch):
    alone = prepared(file, helpers=0)
    monkeypatch.setattr("postgrad.data.files.CHUNK_BYTES", 1500)
    assert prepared(file, helpers=2) == alone
    assert len(alone[0]) > 200
    assert {finding.id for finding in alone[3].findings} >= {"duplicates", "rejected", "cut", "replacement_character"}


@pytest.mark.parametrize("size", [1, 100, 1500])
def test_the_size_of_a_chunk_changes_nothing(file, monkeypatch, size):
    whole = prepared(file, helpers=0)
    monkeypatch.setattr("postgrad.data.files.CHUNK_BYTES", size)
    assert prepared(file, helpers=0) == whole


def test_helpers_prepare_pairs_and_prompts_from_memory_too(monkeypatch):
    monkeypatch.setattr("postgrad.data.files.CHUNK_ROWS", 3)
    pairs = rows_from([{"prompt": str(n), "chosen": "a" * (n + 1), "rejected": "b"} for n in range(20)])
    two = Work(helpers=2)
    alone = prepare_preferences(pairs, CHAT, max_length=99)
    helped = prepare_preferences(pairs, CHAT, max_length=99, work=two)
    assert (list(helped.pairs), helped.report) == (list(alone.pairs), alone.report)
    prompts = rows_from([{"prompt": str(n), "answer": n} for n in range(20)])
    assert prepare_prompts(prompts, CHAT, work=two) == prepare_prompts(prompts, CHAT)


@pytest.mark.parametrize("helpers", [0, 1])
def test_the_first_bad_row_of_the_file_is_the_error_whoever_meets_one_first(monkeypatch, helpers):
    monkeypatch.setattr("postgrad.data.files.CHUNK_ROWS", 1)
    rows = rows_from([{"prompt": "a", "completion": "x" * (99 if number in (1, 8) else 1)} for number in range(9)])
    with pytest.raises(DataError) as error:
        prepare_sft(rows, CHAT, max_length=50, overlong="error", work=Work(helpers=helpers))
    assert error.value.where == "rows:2"


def test_of_two_bad_rows_read_together_the_first_is_the_error():
    """The first is too long, which is known once it is tokens; the second cannot even be tokenised, which is known before."""
    good, half = {"prompt": "a", "completion": "x"}, {"prompt": "a", "completion": "\ud83d"}
    errors = []
    for rows in ([good, good | {"completion": "x" * 99}, half], [good, half, good | {"completion": "x" * 99}]):
        with pytest.raises(DataError) as error:
            prepare_sft(rows_from(rows), CHAT, max_length=50, overlong="error")
        errors.append((error.value.where, error.value.what))
    assert [where for where, _ in errors] == ["rows:2", "rows:2"]
    assert "max_length is 50" in errors[0][1]
    assert "half a character" in errors[1][1]


def test_a_data_error_in_a_helper_keeps_what_where_and_hint(monkeypatch):
    rows = rows_from([{"prompt": "a", "completion": "x"}, {"prompt": "b", "completion": "x" * 99}])
    errors = []
    for helpers in (0, 1):
        with pytest.raises(DataError) as error:
            prepare_sft(rows, CHAT, max_length=50, overlong="error", work=Work(helpers=helpers))
        errors.append((error.value.what, error.value.where, error.value.hint))
    assert errors[0] == errors[1]
    assert errors[0][1] == "rows:2"


# ---- helpers that fail

ENCODER = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

from postgrad.data.pipeline import Draft

@dataclass(frozen=True)
class Acting:
    act: str
    home: int
    chat = None

    def draft(self, row, format):
        return Draft((), self.keep)

    def keep(self, encoded, tally):
        tally.kept += 1
        if os.getpid() == self.home:
            return [self.home]
        if self.act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.act == "print":
            print("noise on standard output", flush=True)
            os.write(1, b"more of it")
        if self.act == "bug":
            raise KeyError("no such thing")
        if self.act == "sleep":
            Path(os.environ["STARTED"], str(os.getpid())).touch()
            time.sleep(float(os.environ["SECONDS"]))
        return [os.getpid()]
"""


@pytest.fixture
def act(tmp_path, monkeypatch):
    """Encode ten rows with an encoder that does something in its helper process: (what it made, the pids it was made in)."""
    (tmp_path / "acting_encoder.py").write_text(ENCODER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("postgrad.data.files.CHUNK_ROWS", 1)
    import acting_encoder

    def run(what: str) -> list[int]:
        taken: list[int] = []
        rows = rows_from([{"prompt": str(number)} for number in range(10)])
        encode(rows, "grpo", acting_encoder.Acting(what, os.getpid()), taken.extend, work=Work(helpers=2))
        return taken

    yield run
    sys.modules.pop("acting_encoder")


def gone(pid: int) -> bool:
    """Also true of a zombie that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_rows_are_encoded_here_and_elsewhere_and_helpers_end_with_the_work(act):
    pids = act("nothing")
    assert len(pids) == 10
    assert os.getpid() in pids[4:]  # two helpers with two chunks each have enough to do
    others = set(pids) - {os.getpid()}
    assert pids[0] in others
    assert all(gone(pid) for pid in others)


def test_what_a_helper_prints_does_not_reach_its_answers(act):
    assert len(act("print")) == 10


def test_a_helper_that_dies_is_a_clear_error(act):
    with pytest.raises(RunError, match=r"a helper process ended while it read rows \(exit code -9\)") as error:
        act("die")
    assert "POSTGRAD_DATA_HELPERS=0" in str(error.value.hint)


def test_a_bug_in_a_helper_keeps_its_traceback(act):
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*KeyError: 'no such thing'"):
        act("bug")


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import acting_encoder
from postgrad.data import Work, rows_from
from postgrad.data.pipeline import encode
encode(rows_from([{"prompt": "a"}]), "grpo", acting_encoder.Acting("sleep", os.getpid()), print, work=Work(helpers=1))
"""


@pytest.mark.parametrize(("way", "seconds"), [(signal.SIGINT, "60"), (signal.SIGKILL, "1")])
def test_neither_ctrl_c_nor_the_death_of_the_run_leaves_a_helper_behind(act, tmp_path, way, seconds):
    """Ctrl-C ends a helper in the middle of a row; when the run is killed a helper ends with its row."""
    started = tmp_path / "started"
    started.mkdir()
    environment = {**os.environ, "STARTED": str(started), "SECONDS": seconds}
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], env=environment, stderr=subprocess.DEVNULL)
    try:
        (pid,) = wait_for(lambda: [int(path.name) for path in started.iterdir()])
        process.send_signal(way)
        process.wait(timeout=30)
    finally:
        process.kill()
    wait_for(lambda: gone(pid), seconds=20)


def wait_for(value, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := value()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
    return found


def test_a_helper_whose_run_is_gone_ends_by_itself(act):
    from postgrad.data.worker import Helper

    helper = Helper(b"")
    assert helper._process.stdin is not None
    helper._process.stdin.close()  # what the death of the other side looks like
    assert helper._process.wait(timeout=30) == 0
    helper.stop()


# ---- how many


def test_only_large_files_get_helpers_unless_a_number_is_named(monkeypatch):
    monkeypatch.delenv("POSTGRAD_DATA_HELPERS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert (Work().processes(7 << 20), Work().processes(8 << 20)) == (0, 5)
    assert (Work(helpers=0).processes(8 << 20), Work(helpers=3).processes(0)) == (0, 3)
    monkeypatch.setenv("POSTGRAD_DATA_HELPERS", "0")
    assert (Work().processes(8 << 20), Work(helpers=3).processes(0)) == (0, 3)
    monkeypatch.setenv("POSTGRAD_DATA_HELPERS", "many")
    with pytest.raises(RecipeError, match="'many' is not a number"):
        Work().processes(0)


def test_progress_grows_to_the_whole_and_counts_rows(file, monkeypatch):
    monkeypatch.setattr("postgrad.data.files.CHUNK_BYTES", 2000)
    told: list[tuple[float, int]] = []
    audit(load_rows(file, max_bad=100), CHAT, Reading(), work=Work(progress=lambda share, rows: told.append((share, rows))))
    assert told == sorted(told)
    assert told[-1] == (1.0, 300)
    assert 0 < told[0][0] < 0.5
