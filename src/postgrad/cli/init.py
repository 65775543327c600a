"""`postgrad init METHOD DIR`: a commented recipe and its files, ready to run."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

from postgrad.cli.console import stdout
from postgrad.errors import RecipeError

_DATA_OF = {"ppo": "grpo"}
"""Methods that are shown on another method's data."""


def run_init(method: str, folder: Path) -> None:
    templates = Path(str(resources.files("postgrad.cli") / "templates"))
    known = sorted(path.name for path in templates.iterdir() if path.is_dir())
    if method not in known:
        raise RecipeError(f"no template for {method!r}", where="command line", hint=f"one of {', '.join(known)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError("the folder is not empty", where=str(folder), hint="name a new folder; nothing was written")
    for name in (_DATA_OF.get(method, method), method):
        shutil.copytree(templates / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    if method == "agent":
        _write_agent_task(folder)
    if method in ("reward", "dpo"):
        _write_pairs(folder)
    for path in sorted(folder.iterdir()):
        stdout.print(str(path), markup=False)
    if method in ("agent", "grpo", "ppo"):
        stdout.print(f'next: postgrad rewards check "{folder / "recipe.yaml"}"', markup=False)
    stdout.print(f'next: postgrad train "{folder / "recipe.yaml"}" --dry-run', markup=False)


def _write_pairs(folder: Path) -> None:
    """Courteous and curt answers to the same questions."""
    from postgrad.demo import preferences

    preferences.write(folder, seed=0, train=160, heldout=40)


def _write_agent_task(folder: Path) -> None:
    """The demo's word problems, calculator and rewards, in small. Beside each prompt a good completion, to check the rewards on."""
    from postgrad.demo import task

    task.write(folder, seed=0, train=90, heldout=30, unseen=12, warm=64)
    (folder / "sft.jsonl").rename(folder / "conversations.jsonl")
    prompts = (folder / "train.jsonl").rename(folder / "prompts.jsonl")
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    for row, problem in zip(rows, task.train_problems(0, count=90), strict=True):
        row["completion"] = task.conversation(problem)[1:]
    prompts.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
