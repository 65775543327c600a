"""One HTML page about a data file: the audit's numbers and findings, and rows token by token. Needs nothing but the file itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2

from postgrad.data import DataReport

Part = tuple[str, str]
Item = tuple[str, Sequence[tuple[str, Sequence[Part]]]]
"""(title, blocks); a block is (label, parts); a part is (kind: trained | context | glue, text)."""


def rows_page(title: str, items: Sequence[Item]) -> str:
    """Rows in colours, with a legend; the kinds also differ without colour (bold, underlined, grey)."""
    return _page(title=title, report=None, bins=[], items=items)


def report_page(report: DataReport, items: Sequence[Item]) -> str:
    """The audit, then its first rows in colours."""
    bins = report.length_bins()
    most = max((count for *_, count in bins), default=1)
    scaled = [(low, high, count, 100 * count / most) for low, high, count in bins]
    return _page(title=report.source, report=report, bins=scaled, items=items)


def _page(**values: Any) -> str:
    source = files("postgrad.report").joinpath("data_page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_visible)
    return environment.from_string(source).render(**values)


def _visible(value: Any) -> Any:
    """Control characters and those that reorder text written as escapes, so that a row cannot change how the page reads."""
    if not isinstance(value, str) or value.isprintable():
        return value
    shown = "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in value)
    return type(value)(shown)
