"""The run directory: one process, one recipe, metrics that survive a cut line."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.errors import RecipeError
from postgrad.models.products import onednn_is_faster
from postgrad.train.recipe import SFTRecipe
from postgrad.train.run_directory import RunDirectory, open_run, read_jsonl


def recipe(folder: Path, **changes: object) -> SFTRecipe:
    values = {"method": "sft", "model": "m", "run_dir": str(folder), "max_steps": 3, "data": {"train": "rows.jsonl"}}
    return SFTRecipe.model_validate(values | changes)


def test_run_folder_records_recipe_and_environment(tmp_path):
    folder = tmp_path / "läufe und mehr"
    with open_run(recipe(folder), tmp_path, source_text="method: sft  # mine\n"):
        pass
    assert (folder / "recipe.yaml").read_text() == "method: sft  # mine\n"
    assert json.loads((folder / "resolved.json").read_text())["recipe"]["optimizer"]["learning_rate"] == 1e-5
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert environment["cpu_fp32_products"] == ("onednn" if onednn_is_faster() else "pytorch")


def test_environment_record_holds_no_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    with open_run(recipe(tmp_path / "run"), tmp_path, source_text=""):
        pass
    assert "hf_secret_value" not in (tmp_path / "run" / "environment.json").read_text()


def test_same_recipe_opens_the_run_again(tmp_path):
    for _ in range(2):
        with open_run(recipe(tmp_path / "run"), tmp_path, source_text=""):
            pass


def test_other_recipe_in_the_same_folder_is_refused_with_the_difference(tmp_path):
    with open_run(recipe(tmp_path / "run"), tmp_path, source_text=""):
        pass
    other = recipe(tmp_path / "run", max_steps=4)
    with pytest.raises(RecipeError, match=r"max_steps: 3 -> 4") as caught, open_run(other, tmp_path, source_text=""):
        pass
    assert caught.value.hint is not None
    assert "--overwrite" in caught.value.hint


def test_overwrite_replaces_the_old_run(tmp_path):
    with open_run(recipe(tmp_path / "run"), tmp_path, source_text="") as run:
        run.log(1, {"loss": 1.0})
    with open_run(recipe(tmp_path / "run", max_steps=4), tmp_path, source_text="", overwrite=True) as run:
        assert run.metrics() == []


def test_second_process_is_refused_and_told_who_holds_the_run(tmp_path):
    code = (
        "import sys; from pathlib import Path; from postgrad.train.recipe import SFTRecipe\n"
        "from postgrad.train.run_directory import open_run\n"
        "values = dict(method='sft', model='m', run_dir=sys.argv[1], max_steps=3, data={'train': 'rows.jsonl'})\n"
        "with open_run(SFTRecipe.model_validate(values), Path('.'), source_text=''): print('in', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "in"
    with pytest.raises(RecipeError, match=f"pid {child.pid} on "), open_run(recipe(tmp_path / "run"), tmp_path, source_text=""):
        pass
    child.kill()
    child.communicate()
    with open_run(recipe(tmp_path / "run"), Path("."), source_text=""):
        pass  # the lock died with its process


def test_cut_last_line_of_metrics_is_left_out(tmp_path):
    run = RunDirectory(tmp_path)
    run.log(1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [record["step"] for record in run.metrics()] == [1]


def test_non_finite_metric_stays_visible_in_valid_json(tmp_path):
    run = RunDirectory(tmp_path)
    run.log(1, {"loss": math.nan, "reward": math.inf})
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": "nan", "reward": "inf"}


def test_resuming_forgets_what_the_resumed_run_will_write_again(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        run.log(step, {"loss": 1.0})
        run.write_rollouts(step, [{"step": step}])
    run.forget_after(2)
    assert [record["step"] for record in run.metrics()] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step-000001.jsonl.gz", "step-000002.jsonl.gz"]


def test_rollout_files_are_the_same_bytes_each_time(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_rollouts(1, [{"text": "é"}])
    first = (tmp_path / "rollouts" / "step-000001.jsonl.gz").read_bytes()
    run.write_rollouts(1, [{"text": "é"}])
    assert (tmp_path / "rollouts" / "step-000001.jsonl.gz").read_bytes() == first
    assert json.loads(gzip.decompress(first)) == {"text": "é"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_a_recipe_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RecipeError, match="cannot be created"), open_run(recipe(tmp_path / "run"), tmp_path, source_text=""):
        pass


def begun(folder: Path, tmp_path: Path, **changes: object) -> None:
    with open_run(recipe(folder, **changes), tmp_path / "recipes", source_text="") as run:
        run.begin()
        run.log(1, {"loss": 1.0})


def test_overwrite_deletes_nothing_that_no_run_wrote(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(RecipeError, match="folder is none"), open_run(recipe(folder), tmp_path / "r", source_text="", overwrite=True):
        pass
    (folder / "precious.txt").rename(tmp_path / "kept")
    begun(folder, tmp_path)
    (tmp_path / "kept").rename(folder / "precious.txt")
    with (
        pytest.raises(RecipeError, match=r"files that no run wrote: precious\.txt"),
        open_run(recipe(folder, max_steps=9), tmp_path / "r", source_text="", overwrite=True),
    ):
        pass
    assert (folder / "precious.txt").read_text() == "mine"
    assert read_jsonl(folder / "metrics.jsonl")


def test_a_recipe_that_cannot_start_costs_the_old_run_nothing(tmp_path):
    folder = tmp_path / "run"
    begun(folder, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}
    with pytest.raises(RuntimeError), open_run(recipe(folder, max_steps=9), tmp_path / "r", source_text="new", overwrite=True):
        raise RuntimeError("the model cannot be read")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"} == before
    with open_run(recipe(folder, max_steps=9), tmp_path / "r", source_text="new", overwrite=True) as run:
        run.begin()
    assert (folder / "recipe.yaml").read_text() == "new"
    assert not (folder / "metrics.jsonl").exists()


def test_a_start_that_was_refused_is_not_in_the_way_of_the_mended_recipe(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RecipeError, match="most rows"), open_run(recipe(folder), tmp_path / "r", source_text=""):
        raise RecipeError("most rows are cut")
    begun(folder, tmp_path, max_steps=9)
    with pytest.raises(RecipeError, match="max_steps: 9 -> 3"), open_run(recipe(folder), tmp_path / "r", source_text=""):
        pass


@pytest.mark.parametrize("place", [".", "", "task"])
def test_a_run_directory_is_a_folder_of_its_own(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task").mkdir()
    with pytest.raises(RecipeError, match="folder of its own"), open_run(recipe(Path(place)), tmp_path / "task", source_text=""):
        pass
    assert list((tmp_path / "task").iterdir()) == []


def test_inputs_of_each_kind_are_compared_with_their_own(tmp_path):
    with open_run(recipe(tmp_path / "run"), tmp_path / "r", source_text="") as run:
        run.begin()
        run.check_inputs("files", {"rows.jsonl": "1"})
        run.check_inputs("loaded", {"the model's weights": "a"})
        run.check_inputs("files", {"rows.jsonl": "1"})
        with pytest.raises(RecipeError, match="the model's weights"):
            run.check_inputs("loaded", {"the model's weights": "b"})


def test_a_stage_is_recognised_after_its_pipeline_was_moved(tmp_path):
    begun(tmp_path / "pipe" / "grpo", tmp_path, model=str(tmp_path / "pipe" / "sft" / "model"))
    (tmp_path / "pipe").rename(tmp_path / "moved")
    begun(tmp_path / "moved" / "grpo", tmp_path, model=str(tmp_path / "moved" / "sft" / "model"))
