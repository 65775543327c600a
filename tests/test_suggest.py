"""Hints for names and files that are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from postgrad.suggest import did_you_mean_file


@pytest.mark.parametrize(
    ("there", "asked", "meant"),
    [
        (["rows.jsonl", "recipe.yaml"], "nope.jsonl", None),
        (["train.jsonl", "train.log", "train.py"], "trian.jsonl", "train.jsonl"),
        (["rows.jsonl.gz"], "rows.jsonl", "rows.jsonl.gz"),
        (["recipe.yaml"], "recipes.yaml", "recipe.yaml"),
        (["recipe.yaml"], "recipe.yml", "recipe.yaml"),
        (["recipe.yaml"], "recipe.yaml", None),  # it is there, and something else is wrong with it
        ([".hidden"], "x.yaml", None),
        ([], "x.yaml", None),
    ],
)
def test_the_nearest_file_of_the_same_kind(tmp_path, there, asked, meant):
    for name in there:
        (tmp_path / name).touch()
    hint = did_you_mean_file(tmp_path / asked, "otherwise")
    assert hint == ("otherwise" if meant is None else f"did you mean {tmp_path / meant}?")


@pytest.mark.parametrize("path", [Path("a" * 300, "x.yaml"), Path("no", "such", "x.yaml"), Path(os.devnull, "x.yaml")])
def test_a_folder_that_cannot_be_looked_into_is_no_fault(path):
    assert did_you_mean_file(path, "otherwise") == "otherwise"
