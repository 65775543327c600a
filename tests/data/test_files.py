"""Reading files: what is accepted, what is a rejected row with file:line, what stops with an error."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import load_rows, prepare_sft, rows_from
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer

GOOD = '{"prompt": "a", "completion": "b"}'


@pytest.fixture
def write(tmp_path):
    def make(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return make


def test_jsonl_rows_keep_their_line(write):
    rows = load_rows(write("a.jsonl", f"{GOOD}\n\n{GOOD}\n"))
    assert [row.name for row in rows.read()] == ["a.jsonl:1", "a.jsonl:3"]
    assert rows.format == "prompt+completion"


def test_byte_order_mark_and_crlf_change_nothing(write):
    clean = load_rows(write("a.jsonl", f"{GOOD}\n{GOOD}\n"))
    odd = load_rows(write("a.jsonl", b"\xef\xbb\xbf" + f"{GOOD}\r\n{GOOD}\r\n".encode()))
    assert odd.read() == clean.read()
    array = load_rows(write("a.json", f"[{GOOD}]")).read()
    assert load_rows(write("a.json", b"\xef\xbb\xbf" + f"[{GOOD}]\r\n".encode())).read() == array


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a", ', "broken JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "a\x00"}', "broken JSON"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": NaN}', "NaN is not a JSON value"),
        (b"[1]", "a row is a JSON object, not list"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_rejected_with_its_place_and_counted(write, line, reason):
    path = write("a.jsonl", GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode())
    with pytest.raises(DataError, match=r"data\.max_bad is 0") as error:
        load_rows(path).read()
    assert error.value.where == "a.jsonl:2"
    assert reason in error.value.what
    rows = load_rows(path, max_bad=1)
    assert [row.name for row in rows.read()] == ["a.jsonl:1", "a.jsonl:3"]
    report = prepare_sft(rows, ChatFormat(tiny_tokenizer()), max_length=99).report
    assert (report.rows, report.kept, report.dropped) == (3, 2, {"rejected": 1})


def test_an_emoji_written_as_two_escapes_is_no_lone_surrogate(write):
    rows = load_rows(write("a.jsonl", '{"prompt": "\\ud83d\\ude00"}'))
    assert rows.read()[0].fields["prompt"] == "\U0001f600"


def test_rows_of_a_json_list_know_the_line_they_start_on(write):
    rows = load_rows(write("a.json", json.dumps([json.loads(GOOD)] * 3, indent=1)))
    assert [row.name for row in rows.read()] == ["a.json:2", "a.json:6", "a.json:10"]


def test_json_lines_in_a_json_file_are_read_as_lines(write):
    assert [row.name for row in load_rows(write("a.json", f"{GOOD}\n{GOOD}\n")).read()] == ["a.json:1", "a.json:2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"prompt": "a"},\n{"prompt": }]', "broken JSON"),
        ("a.json", '[{"prompt": "a"}', "expected , or ]"),
        ("a.json", '[{"prompt": "a"},\n', "the list has no end"),
        ("a.json", '[{"prompt": "a"}]\n[{"prompt": "b"}]', "something follows the list"),
        ("a.json", '{"rows": []}', "expected a JSON list"),
        ("a.json", "[]", "holds no rows"),
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", "\n\n", "holds no rows"),
        ("a.parquet", "not parquet", "not a readable parquet file"),
        ("a.txt", "hello", "cannot read .txt"),
        ("a.csv", 'prompt,completion\n"a,b\n', "broken CSV"),
        ("a.csv", "prompt,completion\n", "holds no rows"),
        ("a.csv", "prompt,prompt\na,b\n", "names the column 'prompt' twice"),
        ("a.arrow", "not arrow", "not a readable Arrow file"),
        ("a.jsonl.gz", "not gzip", "not a readable gzip file"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_data_error_with_its_name(write, name, content, message):
    with pytest.raises(DataError, match=message) as error:
        load_rows(write(name, content)).read()
    assert name in str(error.value.where)
    assert error.value.hint


def test_broken_json_in_a_list_names_its_line(write):
    with pytest.raises(DataError) as error:
        load_rows(write("a.json", '[{"prompt": "a"},\n{"prompt": }]')).read()
    assert error.value.where == "a.json:2"


def test_csv_rows_and_ragged_rows(write):
    rows = load_rows(write("a.csv", 'prompt,completion\n"a, b",c\nd\n'), max_bad=1)
    assert rows.read()[0].fields == {"prompt": "a, b", "completion": "c"}
    assert [row.name for row in rows.read()] == ["a.csv:2"]
    with pytest.raises(DataError, match="the row has 1 cells and the header 2") as error:
        replace(rows, max_bad=0).read()
    assert error.value.where == "a.csv:3"


def test_a_missing_file_names_the_nearest(write, tmp_path):
    write("train.jsonl", GOOD)
    with pytest.raises(DataError, match="no such file") as error:
        load_rows(tmp_path / "trian.jsonl")
    assert "train.jsonl" in str(error.value.hint)


def test_a_folder_is_no_file(write, tmp_path):
    write("train.jsonl", GOOD)
    with pytest.raises(DataError, match="a folder") as error:
        load_rows(tmp_path)
    assert "train.jsonl" in str(error.value.hint)


def test_parquet_rows_equal_jsonl_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(GOOD)] * 2), tmp_path / "a.parquet")
    rows = load_rows(tmp_path / "a.parquet")
    assert [(row.name, row.fields) for row in rows.read()] == [("a.parquet:1", json.loads(GOOD)), ("a.parquet:2", json.loads(GOOD))]


def test_a_cut_off_parquet_file_is_a_data_error(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(GOOD)] * 100), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable parquet file"):
        load_rows(path)


def test_a_hub_id_without_network_fails_within_seconds(monkeypatch, tmp_path):
    import time

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("postgrad.data.hub._reach", lambda name: "ConnectError: refused")
    start = time.monotonic()
    with pytest.raises(DataError, match="neither reachable on the hub") as error:
        load_rows("nobody/nothing-of-this-name")
    assert time.monotonic() - start < 10
    assert error.value.where == "nobody/nothing-of-this-name"
    assert ".jsonl" in str(error.value.hint)


def test_the_hub_is_given_up_on_when_it_does_not_answer(monkeypatch):
    import threading

    import huggingface_hub

    from postgrad.data import hub

    release = threading.Event()
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: type("Api", (), {"dataset_info": lambda self, name, timeout: release.wait(20)})())
    assert "no answer" in hub._reach("a/b")
    release.set()


def test_rows_from_memory_are_numbered():
    assert [row.name for row in rows_from([{"prompt": "a"}] * 2, name="toy").read()] == ["toy:1", "toy:2"]


# ---- more kinds of files


def test_compressed_lines_are_the_same_rows(write):
    plain = load_rows(write("a.jsonl", f"{GOOD}\n\n{GOOD}\n")).read()
    packed = load_rows(write("a.jsonl.gz", gzip.compress(f"{GOOD}\n\n{GOOD}\n".encode()))).read()
    assert [row.fields for row in packed] == [row.fields for row in plain]
    assert [row.name for row in packed] == ["a.jsonl.gz:1", "a.jsonl.gz:3"]
    listed = load_rows(write("b.json.gz", gzip.compress(f"[{GOOD}]".encode()))).read()
    assert listed[0].fields == plain[0].fields


def test_a_cut_off_compressed_file_is_an_error_not_a_shorter_file(write):
    content = gzip.compress("".join(f'{{"prompt": "{i}", "completion": "b"}}\n' for i in range(5000)).encode())
    path = write("a.jsonl.gz", content[: len(content) // 2])
    with pytest.raises(DataError, match="not a readable gzip file") as error:
        load_rows(path).read()
    assert "cut off" in str(error.value.hint)


def arrow_file(path, rows, *, stream):
    import pyarrow
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(rows)
    opener = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_and_streams_are_the_same_rows(tmp_path, stream):
    """`datasets` writes streams; other tools write files."""
    arrow_file(tmp_path / "a.arrow", [{"prompt": str(i), "completion": "b"} for i in range(5)], stream=stream)
    rows = load_rows(tmp_path / "a.arrow").read()
    assert [(row.name, row.fields["prompt"]) for row in rows] == [(f"a.arrow:{i + 1}", str(i)) for i in range(5)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_off_arrow_file_is_an_error(tmp_path, stream):
    path = tmp_path / "a.arrow"
    arrow_file(path, [{"prompt": str(i) * 100, "completion": "b"} for i in range(50)], stream=stream)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(DataError, match=r"not a readable Arrow file|cannot read the file"):
        load_rows(path).read()


def test_rows_of_one_line_are_told_apart(write):
    rows = load_rows(write("a.json", f"[{GOOD},{GOOD},\n {GOOD},{GOOD}]")).read()
    assert [row.name for row in rows] == ["a.json:1", "a.json:1[1]", "a.json:2", "a.json:2[1]"]


def test_half_a_character_spoils_only_its_row_of_a_list(write):
    path = write("a.json", '[{"prompt": "a", "completion": "\\ud800"}, {"prompt": "a", "completion": "\\ud83d\\ude00"}]')
    rows = load_rows(path, max_bad=1).read()
    assert [row.fields["completion"] for row in rows] == ["\U0001f600"]
    with pytest.raises(DataError, match="lone surrogate"):
        load_rows(path).read()


def test_a_line_separator_inside_a_text_is_no_line_end(write):
    row = '{"prompt": "a\u2028b", "completion": "c"}'
    for name in ("a.json", "a.jsonl"):
        rows = load_rows(write(name, f"{row}\n{row}\n")).read()
        assert [row.fields["prompt"] for row in rows] == ["a\u2028b"] * 2


def test_a_quoted_csv_cell_of_several_lines_is_named_by_its_first_line(write):
    rows = load_rows(write("a.csv", 'prompt,completion\n"a\nb\nc",d\n\ne,f\n')).read()
    assert [(row.name, row.fields["prompt"]) for row in rows] == [("a.csv:2", "a\nb\nc"), ("a.csv:6", "e")]


def test_a_row_of_ten_megabytes_is_one_row(write):
    long = json.dumps({"prompt": "a", "completion": "word " * 2_000_000})
    rows = load_rows(write("a.jsonl", f"{GOOD}\n{long}\n{GOOD}\n")).read()
    assert [row.name for row in rows] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert len(rows[1].fields["completion"]) == 10_000_000


def test_lines_keep_their_numbers_across_chunks(write, monkeypatch):
    monkeypatch.setattr("postgrad.data.files.CHUNK_BYTES", 100)
    lines = [f'{{"prompt": "{i}", "completion": "b"}}' if i % 7 else "" for i in range(1, 200)]
    rows = load_rows(write("a.jsonl", "\n".join(lines))).read()
    assert [(row.name, row.fields["prompt"]) for row in rows] == [(f"a.jsonl:{i}", str(i)) for i in range(1, 200) if i % 7]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"PAR1\x15\x04\xff\xfe", "not UTF-8"),
        ("a.jsonl", f"[{GOOD}]", "a row is a JSON object, not list"),
        ("a.jsonl", "prompt,completion\na,b\n", "broken JSON"),
        ("a.parquet", GOOD, "not a readable parquet file"),
    ],
)
def test_a_wrong_extension_is_an_error_that_names_the_file(write, name, content, reason):
    with pytest.raises(DataError, match=reason) as error:
        load_rows(write(name, content))
    assert name in str(error.value.where)
