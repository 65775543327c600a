"""The cache of tokenised files: found again only while nothing changed, and never half-written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import Cache, load_rows, mix, prepare_preferences, prepare_sft, rows_from
from postgrad.data import cache as cache_module
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer
from postgrad.types import ToolSpec

CHAT = ChatFormat(tiny_tokenizer())


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{number % 7}", "completion": "x" * (number % 30 + 1)} for number in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache", min_bytes=0)


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    """One entry for every time that rows were really encoded."""
    seen: list[str] = []
    original = prepare_sft.__globals__["encode_all"].__globals__["encode"]

    def counting(source, *arguments, **options):
        seen.append(source.name)
        return original(source, *arguments, **options)

    monkeypatch.setattr("postgrad.data.pipeline.encode", counting)
    return seen


def prepare(file, cache, chat=CHAT, max_bad=1, **options):
    rows = load_rows(file, max_bad=max_bad)
    return prepare_sft(rows, chat, **{"max_length": 400, "overlong": "cut", **options}, cache=cache)


SWAPPED = {"prompt": "completion", "completion": "prompt"}


def prepare_rows(rows, cache):
    return prepare_sft(rows, CHAT, max_length=400, overlong="cut", cache=cache)


def everything(data):
    return list(data.rows), list(data.row_names), list(data.sources), data.report, data.report.lines()


def test_a_hit_gives_equal_rows_and_an_equal_report_without_encoding(file, cache, builds):
    plain, built, found = (prepare(file, where, max_length=45) for where in (None, cache, cache))
    assert len(builds) == 2  # without the cache, and into it
    assert everything(plain) == everything(built) == everything(found)
    assert found.report.tally.table_of_prints().tolist() == plain.report.tally.table_of_prints().tolist()
    assert found.report.rejected[0].name == "rows.jsonl:61"
    assert found.report.cut > 0


def test_pairs_are_found_again_with_their_margins(tmp_path, cache):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": str(n), "chosen": "a" * (n + 1), "rejected": "b", **({"margin": n / 2} if n % 2 else {})} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [prepare_preferences(load_rows(path), CHAT, max_length=99, cache=where) for where in (None, cache, cache)]
    assert list(data[0].pairs) == list(data[1].pairs) == list(data[2].pairs)
    assert data[0].report == data[2].report


OTHER_TEMPLATE = ChatFormat(tiny_tokenizer(CHATML.replace("<|im_end|>\n", "<|im_end|>")))


def other_tokenizer() -> ChatFormat:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["zebra"])
    return ChatFormat(tokenizer)


TOOL = ToolSpec("add", "Adds.", {"type": "object", "properties": {}})

MISSES = {
    "a changed file": lambda file, cache: (file.write_text(file.read_text().replace("q1", "q9")), prepare(file, cache))[1],
    "another template": lambda file, cache: prepare(file, cache, chat=OTHER_TEMPLATE),
    "another tokenizer": lambda file, cache: prepare(file, cache, chat=other_tokenizer()),
    "other end tokens": lambda file, cache: prepare(file, cache, chat=ChatFormat(tiny_tokenizer(), stop_ids=(0,))),
    "another limit": lambda file, cache: prepare(file, cache, max_length=401),
    "another policy": lambda file, cache: prepare(file, cache, overlong="drop"),
    "other trained tokens": lambda file, cache: prepare(file, cache, train_on="all"),
    "raw text": lambda file, cache: prepare(file, cache, text_prompts="raw"),
    "tools": lambda file, cache: prepare(file, cache, tools=[TOOL]),
    "another name": lambda file, cache: prepare(file.rename(file.with_name("b.jsonl")), cache),
    "another number of bad rows": lambda file, cache: prepare(file, cache, max_bad=2),
    "another map": lambda file, cache: prepare_rows(load_rows(file, columns=SWAPPED, max_bad=1), cache),
    "a split": lambda file, cache: prepare_rows(load_rows(file, max_bad=1).split_off(0.5, 0)[0], cache),
    "another split": lambda file, cache: prepare_rows(load_rows(file, max_bad=1).split_off(0.5, 1)[0], cache),
}


@pytest.mark.parametrize("change", MISSES.values(), ids=list(MISSES))
def test_whatever_the_tokens_depend_on_is_a_miss_when_it_changes(file, cache, builds, change):
    prepare(file, cache)
    if change is MISSES["another split"]:
        MISSES["a split"](file, cache)
    before = len(builds)
    change(file, cache)
    assert len(builds) == before + 1


def test_other_code_is_a_miss(file, cache, builds, monkeypatch):
    prepare(file, cache)
    monkeypatch.setattr(cache_module, "_code", lambda: "another version")
    prepare(file, cache)
    assert len(builds) == 2


def test_the_code_that_counts_is_that_of_data_and_chat():
    names = {path.name for path in cache_module._sources([*cache_module.postgrad.data.__path__, *cache_module.postgrad.chat.__path__])}
    assert {"pipeline.py", "examples.py", "format.py", "tokens.py"} <= names


def test_a_file_that_only_moved_or_was_touched_is_a_hit(file, cache, builds, tmp_path):
    prepare(file, cache)
    os.utime(file, (1, 1))
    (tmp_path / "elsewhere").mkdir()
    prepare(file.rename(tmp_path / "elsewhere" / file.name), cache)
    assert len(builds) == 1


class Killed(BaseException):
    """Stands for a signal that ends the process."""


def test_a_build_that_is_killed_leaves_nothing_behind_that_could_be_read(file, cache, monkeypatch):
    def killed(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.np, "save", killed)
        with pytest.raises(Killed):
            prepare(file, cache)
    assert not [path for path in cache.folder.iterdir() if path.is_dir()]
    assert everything(prepare(file, cache)) == everything(prepare(file, None))


def test_what_a_killed_process_left_is_removed_by_the_next_build(file, cache):
    folder = prepare_and_find(file, cache)
    left = folder.with_name(f".{folder.name}.tmp-1-abc")
    left.mkdir()
    (left / "ids.bin").write_bytes(b"half")
    import shutil

    shutil.rmtree(folder)
    prepare(file, cache)
    assert [path.name for path in cache.folder.iterdir() if path.is_dir()] == [folder.name]


def prepare_and_find(file, cache) -> Path:
    prepare(file, cache)
    (folder,) = [path for path in cache.folder.iterdir() if path.is_dir()]
    return folder


def test_rows_that_are_refused_are_never_stored(file, cache):
    with pytest.raises(DataError):
        prepare(file, cache, max_bad=0)
    assert not [path for path in cache.folder.iterdir() if path.is_dir()]


def test_entries_that_nobody_used_for_a_month_are_removed(file, cache):
    folder = prepare_and_find(file, cache)
    old = time.time() - 31 * 86400
    os.utime(folder / "tally.json", (old, old))
    prepare(file, cache)  # used again, so it stays
    assert folder.is_dir()
    os.utime(folder / "tally.json", (old, old))
    prepare(file, cache, max_length=401)
    assert not folder.exists()


def test_small_files_and_rows_from_memory_are_not_stored(file, tmp_path):
    assert not Cache(tmp_path).takes(load_rows(file, max_bad=1))
    assert not Cache(tmp_path, min_bytes=0).takes(rows_from([{"text": "a"}]))
    assert not Cache(tmp_path, min_bytes=0).takes(mix([load_rows(file, max_bad=1), rows_from([{"text": "a"}])]))


def test_an_empty_side_of_the_columns_is_read_back(tmp_path, cache):
    """No pair has a margin: the file of that column is empty, which cannot be mapped into memory."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    assert prepare_preferences(load_rows(path), CHAT, max_length=99, cache=cache).pairs[0].margin is None
