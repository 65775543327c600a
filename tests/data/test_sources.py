"""Sources: mixtures, and the split of one source into training and held-out rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import load_rows, mix, prepare_sft, rows_from
from postgrad.errors import DataError, RecipeError
from postgrad.testing import tiny_tokenizer

CHAT = ChatFormat(tiny_tokenizer())
ROWS = [{"prompt": str(number), "completion": "x"} for number in range(400)]


def fields(source):
    return [row.fields["prompt"] for row in source.read()]


def test_a_split_loses_no_row_and_holds_out_about_the_share():
    rest, held = rows_from(ROWS).split_off(0.25, seed=0)
    assert sorted(fields(rest) + fields(held), key=int) == [str(number) for number in range(400)]
    assert 70 <= len(fields(held)) <= 130  # 100 expected, standard deviation 8.7


def test_equal_rows_are_never_on_both_sides():
    for seed in range(3):
        rest, held = rows_from(ROWS * 3).split_off(0.5, seed)
        assert not set(fields(rest)) & set(fields(held))


def test_the_order_of_columns_and_of_rows_does_not_move_a_row_to_the_other_side():
    _, held = rows_from(ROWS).split_off(0.3, seed=1)
    swapped = [{"completion": row["completion"], "prompt": row["prompt"]} for row in reversed(ROWS)]
    assert set(fields(rows_from(swapped).split_off(0.3, seed=1)[1])) == set(fields(held))


def test_another_seed_holds_out_other_rows():
    assert fields(rows_from(ROWS).split_off(0.3, seed=1)[1]) != fields(rows_from(ROWS).split_off(0.3, seed=2)[1])


def test_every_process_splits_alike():
    """Python salts the hash of strings anew in each process."""
    code = (
        "import json; from postgrad.data import rows_from\n"
        "rows = [{'prompt': str(n), 'completion': 'x'} for n in range(400)]\n"
        "print(json.dumps([row.fields['prompt'] for row in rows_from(rows).split_off(0.3, 1)[1].read()]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == fields(rows_from(ROWS).split_off(0.3, 1)[1])


def test_unreadable_rows_are_counted_on_one_side_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n{broken\n" for row in ROWS[:40]))
    rest, held = load_rows(path, max_bad=40).split_off(0.5, seed=0)
    reports = [prepare_sft(side, CHAT, max_length=99).report for side in (rest, held)]
    assert [report.dropped for report in reports] == [{"rejected": 40}, {}]
    assert sum(report.kept for report in reports) == 40


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1])
def test_a_share_that_is_none_is_a_recipe_error(share):
    with pytest.raises(RecipeError, match="not between 0 and 1"):
        rows_from(ROWS).split_off(share, seed=0)


def test_a_side_without_rows_says_what_to_do():
    _, held = rows_from(ROWS[:1]).split_off(0.0001, seed=0)
    with pytest.raises(DataError, match="no row is left on this side of the split") as error:
        prepare_sft(held, CHAT, max_length=99)
    assert "another share" in str(error.value.hint)


def test_a_mixture_keeps_order_names_and_formats():
    mixture = mix([rows_from(ROWS[:2], name="a"), rows_from([{"text": "hello"}], name="b")])
    data = prepare_sft(mixture, CHAT, max_length=99)
    assert data.row_names == ["a:1", "a:2", "b:1"]
    assert (mixture.name, mixture.format) == ("a + b", "prompt+completion, text")
    assert data.report.tally.parts == [2, 1]


def test_files_of_one_name_are_told_apart_by_their_folder(tmp_path):
    for folder in ("math", "code"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(json.dumps(ROWS[len(folder)]) + "\n{broken\n")
    mixture = mix([load_rows(tmp_path / name / "train.jsonl", max_bad=1) for name in ("math", "code")], max_bad=2)
    data = prepare_sft(mixture, CHAT, max_length=99)
    assert data.row_names == ["math/train.jsonl:1", "code/train.jsonl:1"]
    assert [item.name for item in data.report.rejected] == ["math/train.jsonl:2", "code/train.jsonl:2"]


def test_a_file_named_twice_is_a_recipe_error_that_offers_a_weight(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    with pytest.raises(RecipeError, match="named twice") as error:
        mix([load_rows(path), load_rows(path)])
    assert "weight of 2" in str(error.value.hint)


def test_each_file_of_a_mixture_has_its_own_columns_map():
    parts = [rows_from([{"q": "one", "a": "two"}], columns={"prompt": "q", "completion": "a"}, name="a"), rows_from(ROWS[:1], name="b")]
    assert len(prepare_sft(mix(parts), CHAT, max_length=99).rows) == 2


def test_bad_rows_of_all_files_count_together():
    bad = {"prompt": "a", "completion": ""}
    parts = [rows_from([ROWS[0], bad], name="a"), rows_from([ROWS[1], bad], name="b")]
    assert prepare_sft(mix(parts, max_bad=2), CHAT, max_length=99).report.dropped == {"rejected": 2}
    with pytest.raises(DataError, match=r"2 rows rejected, data\.max_bad is 1"):
        prepare_sft(mix(parts, max_bad=1), CHAT, max_length=99)


def test_a_file_with_many_bad_rows_is_not_read_to_its_end_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("postgrad.data.files.CHUNK_BYTES", 60)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n{broken\n" * 50)
    with pytest.raises(DataError, match="rows rejected so far") as error:
        prepare_sft(load_rows(path), CHAT, max_length=99)
    assert "data check" in str(error.value.hint)
