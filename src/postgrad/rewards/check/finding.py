"""What a check found, and how grave it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
_ORDER: dict[str, int] = {"critical": 0, "warning": 1, "info": 2}
_MOST_ROWS = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """id stays the same from run to run. reward: "" when it is about all of them. rows: file:line of rollouts that show it."""

    id: str
    severity: Severity
    reward: str
    message: str
    hint: str = ""
    rows: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", ())}


def finding(id: str, severity: Severity, reward: str, message: str, *, hint: str = "", rows: Sequence[str] = ()) -> Finding:
    """A finding that names its first rows."""
    return Finding(id, severity, reward, message, hint, tuple(dict.fromkeys(rows))[:_MOST_ROWS])


def gravest_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda found: _ORDER[found.severity]))
