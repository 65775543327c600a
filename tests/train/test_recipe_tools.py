"""`tools:` of a recipe: every fault names the key, its line and what was probably meant, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from postgrad.errors import RecipeError
from postgrad.train import setup
from postgrad.train.recipe import GRPORecipe, Reward
from postgrad.train.recipe_file import load_recipe, parse_recipe
from postgrad.train.run_directory import resolved
from postgrad.train.setup import input_hashes

RECIPE = """\
method: grpo
model: nobody-loads-this
run_dir: runs/x
max_steps: 1
data: {train: x.jsonl}
rewards: [{use: rewards.py:f}]
tools:
"""


def load(folder: Path, entry: str) -> GRPORecipe:
    (folder / "recipe.yaml").write_text(RECIPE + entry)
    recipe = load_recipe(folder / "recipe.yaml").recipe
    assert isinstance(recipe, GRPORecipe)
    return recipe


@pytest.mark.parametrize(
    ("entry", "key", "line", "hint"),
    [
        ("  - {use: tools.py:f, deadlin_s: 3}\n", "unknown key tools.0.deadlin_s", 8, "did you mean deadline_s?"),
        ("  - tools.py:g\n  - mcp: {comand: [a]}\n", "unknown key tools.1.mcp.comand", 9, "did you mean command?"),
        ("  - openapi:\n      document: a.yaml\n      base: x\n", "unknown key tools.0.openapi.base", 10, "did you mean base_url?"),
        ("  - {use: tools.py:f, isolate: {memory: 1}}\n", "unknown key tools.0.isolate.memory", 8, "did you mean memory_gb?"),
        ("  - {use: tools.py:f, isolate: thread}\n", "tools.0.isolate is a section of keys", 8, "memory_gb"),
        ("  - mcp: {command: [a], url: b}\n", "an MCP server is a command or a url", 8, ""),
        ("  - mcp: {url: b, env: [A]}\n", "tools.0.mcp.env: is for the program of a command", 8, ""),
        ("  - mcp: {command: [b], headers_from_env: {A: B}}\n", "tools.0.mcp.headers_from_env: is for a server behind a url", 8, ""),
        ("  - mcp: {command: [b], include: [a], exclude: [b]}\n", "tools.0.mcp.exclude: write include or exclude, not both", 8, ""),
        ("  - mcp: {command: [b], session: step}\n", "tools.0.mcp.session", 8, ""),
        ("  - openapi: {base_url: http://x}\n", "tools.0.openapi.document is missing", 8, ""),
        ("  - {use: a.py:f, mcp: {command: [x]}}\n", "one of use, mcp and openapi (this one has use and mcp)", 8, ""),
        ("  - {deadline_s: 3}\n", "one of use, mcp and openapi (this one has none)", 8, ""),
        ("  - {mcp: {command: [x]}, isolate: process}\n", "tools.0.isolate: is for functions of a file", 8, ""),
        ("  - {use: a.py:f, concurrency: 3}\n", "tools.0.concurrency: needs isolate", 8, ""),
        ("  - {use: a.py:f, retry: true}\n", "tools.0.retry", 8, ""),
        ("  - {use: a.py:f, max_calls: 0}\n", "tools.0.max_calls", 8, ""),
        ("  - 3\n", "tools.0 is a section of keys (got 3)", 8, "use"),
    ],
)
def test_a_fault_names_key_line_and_what_was_meant(tmp_path: Path, entry: str, key: str, line: int, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, entry)
    assert key in caught.value.what
    assert caught.value.where == f"{tmp_path / 'recipe.yaml'}:{line}"
    assert hint in (caught.value.hint or "")


def test_a_recipe_reads_the_same_after_it_was_written_down(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "  - tools.py:f\n  - {use: tools.py:g, isolate: process, retry: 2, idempotent: true}\n  - mcp: {command: [a, b.py]}\n",
    )
    written = json.loads(json.dumps(resolved(recipe, tmp_path)["recipe"]))
    assert written["tools"][0] == "tools.py:f"
    assert parse_recipe(written) == recipe


def test_a_change_of_either_of_two_reward_models_of_one_name_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text("x = 1\n")
    recipe = load(tmp_path, "  - tools.py:f\n")
    for name in ("one", "two"):
        (tmp_path / name / "rm").mkdir(parents=True)
        (tmp_path / name / "rm" / "config.json").write_text(name)
    recipe = recipe.model_copy(update={"rewards": [Reward(use="one/rm", name="a"), Reward(use="two/rm", name="b")]})
    monkeypatch.setattr(setup, "names_model", lambda reward, base: base / reward.use)
    hashes = [input_hashes(recipe, tmp_path)["rm"]]
    for name in ("one", "two"):
        (tmp_path / name / "rm" / "config.json").write_text("changed")
        hashes.append(input_hashes(recipe, tmp_path)["rm"])
    assert len(set(hashes)) == 3


def test_files_that_tools_come_from_are_inputs_of_the_run(tmp_path: Path) -> None:
    for name in ("tools.py", "server.py", "shop.yaml", "rewards.py", "helper.py"):
        (tmp_path / name).write_text("import helper\n" if name == "tools.py" else "x = 1\n")
    entries = "  - tools.py:f\n  - mcp: {command: [python, server.py]}\n  - openapi: {document: shop.yaml}\n"
    recipe = load(tmp_path, entries)
    assert {"tools.py", "server.py", "shop.yaml", "rewards.py", "helper.py"} <= set(input_hashes(recipe, tmp_path))


def test_an_environment_variable_is_written_down_by_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "s3cret-value")
    recipe = load(tmp_path, "  - openapi: {document: a.yaml, headers_from_env: {Authorization: SHOP_TOKEN}}\n")
    written = json.dumps(resolved(recipe, tmp_path))
    assert "SHOP_TOKEN" in written
    assert "s3cret" not in written
