"""Every example in the documentation is executed, and generated pages are up to date."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.train.metrics import docs_page
from postgrad.train.recipe import PAIR_LOSSES, REFERENCE_FREE_LOSSES, DPORecipe, GRPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from postgrad.train.recipe_file import load_recipe
from postgrad.train.recipe_page import page as recipe_page

ROOT = Path(__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", READMES)
def test_recipes_in_the_readme_are_valid(name, tmp_path):
    kinds = []
    for text in blocks(name, "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        kinds.append(type(load_recipe(tmp_path / "recipe.yaml").recipe))
    assert kinds == [SFTRecipe, GRPORecipe]


@pytest.mark.parametrize("name", READMES)
def test_tool_and_reward_in_the_readme_work(name, tmp_path):
    from postgrad.rewards.load import load_rewards
    from postgrad.rollout import load_tools

    for text in blocks(name, "python"):
        file = re.match(r"# (\w+\.py)\n", text)
        assert file is not None
        (tmp_path / file[1]).write_text(text, encoding="utf-8")
    assert load_tools(["tools.py:calculator"], tmp_path).specs[0].parameters["required"] == ["expression"]
    (reward,) = load_rewards([{"use": "rewards.py:called"}], tmp_path)
    assert reward.range == (0, 1)


@pytest.mark.slow
@pytest.mark.real_model
def test_commands_in_the_readme_run(tmp_path):
    commands = [line.split("#")[0] for block in blocks("README.md", "") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(commands) >= 4
    for command in commands:
        arguments = shlex.split(command)
        if arguments[1] == "train" and "--dry-run" not in arguments:
            arguments.append("max_steps=2")
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=tmp_path, input="Where is my parcel?\n", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)


@pytest.fixture
def data_files(tmp_path):
    """The files that docs/data.md names."""
    turn = [{"role": "user", "content": "Where is my parcel?"}, {"role": "assistant", "content": "On its way."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turn}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kinds"), [("data", [SFTRecipe, SFTRecipe]), ("preferences", [RewardRecipe, DPORecipe]), ("ppo", [PPORecipe])]
)
def test_recipes_in_the_pages_are_valid(tmp_path, name, kinds):
    found = []
    for text in blocks(f"docs/{name}.md", "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        found.append(type(load_recipe(tmp_path / "recipe.yaml").recipe))
    assert found == kinds


@pytest.mark.slow
@pytest.mark.real_model
def test_commands_in_the_preferences_page_run(tmp_path):
    commands = [line for block in blocks("docs/preferences.md", "") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(commands) == 3
    for line in commands:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line, comments=True)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr)


def test_preferences_page_names_every_loss():
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    assert [name for name in (*PAIR_LOSSES, *REFERENCE_FREE_LOSSES, "kto") if f"`{name}`" not in page] == []


@pytest.mark.real_model
def test_examples_in_the_data_page_run(data_files, monkeypatch, capsys):
    monkeypatch.chdir(data_files)
    commands = [line for block in blocks("docs/data.md", "") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(commands) == 3
    for line in commands:
        done = subprocess.run([sys.executable, "-m", *shlex.split(line, comments=True)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)
    (code,) = blocks("docs/data.md", "python")
    exec(code, {})
    assert "1 kept" in capsys.readouterr().out


def test_data_page_names_every_format_and_finding():
    from typing import get_args

    from postgrad.data import formats

    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    source = (ROOT / "src" / "postgrad" / "data" / "audit.py").read_text(encoding="utf-8")
    findings = set(re.findall(r'Finding\(\s*"(\w+)"', source)) | set(re.findall(r'^    "(\w+)": _Rule\(', source, re.MULTILINE))
    assert len(findings) > 15
    assert [name for name in [*get_args(formats.Format), *findings] if f"`{name}`" not in page] == []


def test_both_readmes_show_the_same_commands():
    pages = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    english, chinese = (re.findall(r"^(?:make|postgrad) [^#\n]*", page, re.MULTILINE) for page in pages)
    assert [command.strip() for command in english] == [command.strip() for command in chinese]


def test_links_in_the_docs_lead_somewhere():
    for page in [ROOT / name for name in READMES] + sorted((ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_metrics_page_is_generated_from_the_registry():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == docs_page()


def test_recipe_page_is_generated_from_the_models():
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == recipe_page()


def test_version_is_in_the_changelog():
    from postgrad import __version__

    assert re.search(rf"^## (Unreleased|{re.escape(__version__)})", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_gsm8k_rows_fit_the_recipe_of_the_readme(shared_data, tmp_path):
    """The README's column map turns the file, as people have it, into prompts with the gold answer for the reward."""
    from postgrad.data import load_rows
    from postgrad.rewards.library import gold_number

    (tmp_path / "recipe.yaml").write_text(blocks("README.md", "yaml")[1], encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert isinstance(recipe, GRPORecipe)
    rows = load_rows(shared_data / "gsm8k_test_first660.jsonl", columns=recipe.data.columns)
    raw = [json.loads(line) for line in (shared_data / "gsm8k_test_first660.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows.read()) == len(raw)
    assert all(gold_number(row["answer"]) is not None for row in raw)
