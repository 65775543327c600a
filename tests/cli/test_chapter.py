"""The folder of a chapter of `postgrad demo`."""

from __future__ import annotations

import pytest

from postgrad.cli.chapter import folder_of
from postgrad.errors import RecipeError
from postgrad.train.run_directory import lock


def overwritten(folder):
    return folder_of("demo-x", folder, quick=False, overwrite=True)


def test_overwrite_empties_the_folder_of_a_chapter(tmp_path):
    for name in ("task", "run", "evaluations"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("old")
    assert list(overwritten(tmp_path).iterdir()) == []
    assert overwritten(tmp_path / "new") == tmp_path / "new"


def test_overwrite_touches_no_folder_with_other_things_in_it(tmp_path):
    """`--run-dir ~ --overwrite` must not empty a home."""
    (tmp_path / "task").mkdir()
    (tmp_path / "letters").mkdir()
    with pytest.raises(RecipeError, match="no demo wrote: letters"):
        overwritten(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"task", "letters"}
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="this is a file"):
        overwritten(tmp_path / "file")


def test_overwrite_waits_for_no_run_that_goes_on(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}")
    with lock(run), pytest.raises(RecipeError, match="in use by pid"):
        overwritten(tmp_path)
    assert (run / "metrics.jsonl").exists()
