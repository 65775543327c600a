"""The command line: quick to answer, one clear message per mistake, the exit codes of `errors`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def postgrad(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "postgrad", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def imported_by(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_postgrad_imports_neither_torch_nor_transformers():
    assert not imported_by("import postgrad") & {"torch", "transformers", "numpy"}


def test_help_imports_no_heavy_library():
    heavy = {"torch", "transformers", "numpy", "datasets", "pydantic"}
    code = "sys.argv = ['postgrad', '--help']\ntry:\n    from postgrad.cli.main import main; main()\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}print(*sys.modules, file=sys.stderr)"], capture_output=True, text=True, check=True
    )
    assert "Commands" in done.stdout
    assert not {name.split(".")[0] for name in done.stderr.split()} & heavy


def test_every_command_is_listed_in_help():
    done = postgrad("--help")
    for command in ("demo", "init", "train", "resume", "data", "chat", "generate", "eval", "formulas"):
        assert f"  {command} " in done.stdout


def test_mistake_in_a_recipe_ends_in_one_message_with_a_hint_and_exit_code_2(tmp_path):
    (tmp_path / "r.yaml").write_text("method: sft\nmodel: m\nrun_dir: r\nmax_stepz: 3\ndata: {train: x.jsonl}\n")
    done = postgrad("train", "r.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: r.yaml:4: unknown key max_stepz" in done.stderr
    assert "hint: did you mean max_steps?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train", "missing.yaml"], 2),
        (["resume", "."], 5),
        (["init", "ppo2", "x"], 2),
        (["generate", "no-such-model-folder/", "hi"], 5),
        (["generate", "smollm2-135m"], 2),
        (["eval", "missing.yaml"], 2),
        (["no-such-command"], 2),
    ],
)
def test_exit_codes(tmp_path, arguments, code):
    done = postgrad(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_output_without_a_terminal_is_plain_and_works_in_a_poor_locale(tmp_path):
    done = postgrad("formulas", LANG="C", LC_ALL="C", NO_COLOR="1", COLUMNS="40", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout
    assert "0.693147" in done.stdout


def test_formulas_json_holds_live_numbers():
    lines = {line["name"]: line for line in json.loads(postgrad("formulas", "--json").stdout)}
    assert lines["dpo_loss"]["value"] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.parametrize("method", ["sft", "grpo", "agent"])
def test_init_writes_a_recipe_that_loads(tmp_path, method):
    done = postgrad("init", method, str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    from postgrad.train.recipe_file import load_recipe

    load_recipe(tmp_path / "mine" / "recipe.yaml")
    again = postgrad("init", method, str(tmp_path / "mine"))
    assert again.returncode == 2
    assert "not empty" in again.stderr
