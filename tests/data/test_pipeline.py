"""The same rows and the same report however a file is divided and however many processes work; no process outlives its work."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import Work, load_rows, prepare_preferences, prepare_prompts, prepare_sft, rows_from
from postgrad.data.limit import Limit
from postgrad.data.pipeline import encode
from postgrad.errors import DataError
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


@dataclass(frozen=True, kw_only=True)
class Dying:
    """An encoder for a helper process: `act` says how it ends."""

    act: str
    chat: ChatFormat = CHAT
    limit: Limit = Limit(99)

    def encode(self, row, format, tally):
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.act == "print":
            print("noise on standard output", flush=True)
        if self.act == "bug":
            raise KeyError("no such thing")
        if self.act == "sleep":
            Path(os.environ["STARTED"]).touch()
            time.sleep(60)
        tally.kept += 1
        return [os.getpid()]


@pytest.fixture
def importable(monkeypatch):
    """Helper processes find this file's encoder by name."""
    monkeypatch.setitem(sys.modules, "pipeline_encoders", sys.modules[__name__])
    monkeypatch.setattr(Dying, "__module__", "pipeline_encoders")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    link = Path(__file__).parent / "pipeline_encoders.py"
    assert not link.exists()


def run_dying(tmp_path, act: str, helpers: int = 2):
    """Encode ten rows with an encoder of its own, in a script: a helper must be able to import the encoder."""
    (tmp_path / "encoders.py").write_text(Path(__file__).read_text().replace("Path(__file__).parent", "Path('.')"))
    sys.path.insert(0, str(tmp_path))
    try:
        import encoders
    finally:
        sys.path.remove(str(tmp_path))
    taken: list[int] = []
    tally = encode(rows_from([{"prompt": "a"}] * 10), "grpo", encoders.Dying(act=act), taken.extend, work=Work(helpers=helpers))
    return taken, tally
