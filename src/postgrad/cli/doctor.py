"""`postgrad doctor`: the reward doctor on a run, ours or another trainer's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from postgrad.errors import CheckFailed, RecipeError


def run_doctor(path: Path, *, outcome: Sequence[str], weights: Sequence[str], json_output: bool) -> None:
    """Print the diagnosis; raises `CheckFailed` (exit 4) when something critical was found."""
    from postgrad.rewards.doctor import examine, observe
    from postgrad.rewards.doctor.render import as_json, as_text

    diagnosis = examine(observe(path, outcome=outcome, weights=dict(parse_weight(text) for text in weights)))
    print(json.dumps(as_json(diagnosis), ensure_ascii=False, indent=1, allow_nan=False) if json_output else as_text(diagnosis))
    if critical := diagnosis.critical:
        names = ", ".join(f"{finding.id} {finding.title}" for finding in critical)
        raise CheckFailed(f"critical: {names}", where=str(path), hint="each finding above names what to change")


def parse_weight(text: str) -> tuple[str, float]:
    """NAME=NUMBER of --weight."""
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise RecipeError(f"{text!r} is no NAME=NUMBER", where="--weight", hint="e.g. --weight format=0.2") from None
