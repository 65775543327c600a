"""`postgrad formulas`: the articles' cheat sheet, computed live."""

from __future__ import annotations

import json
from dataclasses import asdict

from postgrad.cli.console import stdout


def run_formulas(*, json_output: bool) -> None:
    from postgrad.formulas.sheet import sheet_lines

    lines = sheet_lines()
    if json_output:
        records = [
            {name: value for name, value in asdict(line).items() if not callable(value)} | {"value": line.compute()} for line in lines
        ]
        print(json.dumps(records, ensure_ascii=False, indent=1))
        return
    for line in lines:
        stdout.print(line.name, style="bold", markup=False)
        stdout.print(f"  {line.equation}", markup=False)
        stdout.print(f"  {line.example_call_text} = {line.compute():.6g}", markup=False)
        if line.note:
            stdout.print(f"  note: {line.note}", markup=False)
