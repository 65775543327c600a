"""A diagnosis as text that needs no colour, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from postgrad.rewards.doctor.examine import Diagnosis
from postgrad.rewards.doctor.finding import Finding, Fix

WORDS = {"critical": "CRITICAL", "warn": "WARNING", "info": "note"}


def heading(diagnosis: Diagnosis) -> str:
    """What was looked at: `runs/x: grpo, 144 groups of 8 rollouts, steps 1–24, 4 windows`."""
    observed = diagnosis.observed
    first, last = observed.step_range
    parts = [observed.method or "method unknown"]
    if observed.group_count:
        parts.append(f"{observed.group_count} groups of {observed.group_size} rollouts")
    parts += [f"steps {first}–{last}", f"{len(observed.windows)} window{'s' if len(observed.windows) > 1 else ''}"]
    return f"{observed.source}: {', '.join(parts)}"


def summary(diagnosis: Diagnosis) -> str:
    """One line: `1 critical (R1), 2 warnings (R6, R13), 3 notes; 9 checks passed, 5 skipped`."""
    parts = []
    for severity, one, many in (("critical", "critical", "critical"), ("warn", "warning", "warnings"), ("info", "note", "notes")):
        ids = [finding.id for finding in diagnosis.findings if finding.severity == severity]
        if ids:
            parts.append(f"{len(ids)} {one if len(ids) == 1 else many} ({', '.join(ids)})")
    passed, skipped = len(diagnosis.passed), len(diagnosis.skipped)
    too_short = sum(item.key == "max_steps" for item in diagnosis.skipped)
    nothing = "too little to judge by" if too_short > passed else "no findings"
    return f"{', '.join(parts) or nothing}; {passed} check{'' if passed == 1 else 's'} passed, {skipped} skipped"


def as_text(diagnosis: Diagnosis) -> str:
    lines = [heading(diagnosis), summary(diagnosis), *(f"remark: {remark}" for remark in diagnosis.observed.remarks)]
    for finding in diagnosis.findings:
        lines += ["", *_finding(finding)]
    if diagnosis.passed:
        lines += ["", "passed", *(f"  {item.id:<3} {item.title}: {item.message}" for item in diagnosis.passed)]
    if diagnosis.skipped:
        lines += ["", "skipped"]
        lines += [f"  {s.id:<3} {s.title}: {s.reason}" + (f" (needs {s.key})" if s.key else "") for s in diagnosis.skipped]
    return "\n".join(lines)


def line_of(finding: Finding) -> str:
    first, last = finding.steps
    when = f"step {first}" if first == last else f"steps {first}–{last}"
    still = "" if finding.still else ", not at the end"
    return f"{finding.id} {finding.title}: {finding.message} ({when}{still})"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{WORDS[finding.severity]}  {line_of(finding)}"
    yield f"  because    {finding.arithmetic}"
    for place, fix in enumerate(finding.fixes):
        yield f"  {'change' if not place else '':<10} {fix_line(fix)}"
    for place, row in enumerate(finding.rows):
        yield f"  {'look at' if not place else '':<10} {row}"
    if finding.reference:
        yield f"  see        {finding.reference}"


def fix_line(fix: Fix) -> str:
    text = f"{fix.key}: {fix.value} – {fix.why}"
    if fix.before is None or fix.after is None:
        return text
    return f"{text}; on the same rollouts {fix.before:.3g} becomes {fix.after:.3g}"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """What doctor.json holds. Numbers that are not finite are null."""
    observed = diagnosis.observed
    return {
        "source": observed.source,
        "method": observed.method,
        "groups": observed.group_count,
        "group_size": observed.group_size,
        "steps": list(observed.step_range),
        "windows": len(observed.windows),
        "summary": summary(diagnosis),
        "remarks": list(observed.remarks),
        "findings": [clean({**asdict(finding), "fixes": [_fix(fix) for fix in finding.fixes]}) for finding in diagnosis.findings],
        "passed": [clean(asdict(item)) for item in diagnosis.passed],
        "skipped": [asdict(item) for item in diagnosis.skipped],
    }


def _fix(fix: Fix) -> dict[str, Any]:
    return {**asdict(fix), "verified": fix.verified}


def clean(value: Any) -> Any:
    """For JSON: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
