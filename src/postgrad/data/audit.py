"""Findings: what a user must know about the data before training on it, each with a number, rows to look at and advice.

critical   training is refused: the model would learn something else than the user thinks
warning    probably a mistake, worth a look
info       what was decided, so that nothing happens silently
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from postgrad.chat import ChatFormat
from postgrad.data.sources import RowSource
from postgrad.data.table import Array
from postgrad.data.tally import EXAMPLES, Tally

Severity = Literal["critical", "warning", "info"]
MANY_ROWS = 20  # from here on, "more than half of the rows" says something about the data


@dataclass(frozen=True, slots=True)
class Finding:
    """`id` is stable; `count` rows, the first of which are named in `rows`; `message` is one sentence with its numbers."""

    id: str
    severity: Severity
    message: str
    count: int = 0
    rows: tuple[str, ...] = ()
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        record = {"id": self.id, "severity": self.severity, "count": self.count, "rows": list(self.rows), "message": self.message}
        return record | ({"hint": self.hint} if self.hint else {})


@dataclass(frozen=True, slots=True)
class _Rule:
    """`message` takes {n}, the number of rows, and {detail}."""

    severity: Severity
    message: str
    hint: str | None = None


MARKS: dict[str, _Rule] = {
    "no_end_token": _Rule(
        "critical",
        "{n} rows have a trained answer without an end token: the model would learn not to stop",
        "end each trained answer with the tokenizer's end token",
    ),
    "double_bos": _Rule("warning", "{n} rows start with two BOS tokens", "make the token rows without adding special tokens twice"),
    "unknown_token": _Rule(
        "warning",
        "{n} rows hold characters that the tokenizer has no token for; they are lost",
        "use a model whose tokenizer covers the text",
    ),
    "replacement_character": _Rule(
        "warning",
        "{n} rows hold U+FFFD, the mark of text that was damaged when it was decoded",
        "make the file again from the source, as UTF-8",
    ),
    "special_text": _Rule(
        "info", "{n} rows have a special-token string such as <|im_end|> typed in their text; it is read as plain text, never as the token"
    ),
    "null_arguments": _Rule("info", "{n} rows had null arguments in tool calls, as Arrow adds them; they were left out"),
    "boundary_merge": _Rule(
        "info", "{n} rows have a prompt whose end would merge with the answer; both are encoded apart, as when the model writes"
    ),
    "rewrites_history": _Rule("info", "{n} conversations became one row per turn, because the template rewrites earlier turns"),
    "tools_as_text": _Rule(
        "info",
        "{n} rows bring tools, which the chat template ignores; they are described in the system message, and calls are text ({detail})",
    ),
    "system_lost": _Rule(
        "warning",
        "{n} rows have a system message, which the template does not print: the model never reads it",
        "put its text into the first user message, or use another chat template",
    ),
    "tool_lost": _Rule(
        "warning",
        "{n} rows have tool results, which the template does not print: the model never reads them",
        "use another chat template",
    ),
    "tool_as_user": _Rule("info", "{n} rows have tool results, which the template does not print; they are user messages"),
    "schema_types": _Rule(
        "info", "{n} rows have tool schemas with Python's names of types ({detail} in the first); they became JSON Schema's names"
    ),
    "row_tools": _Rule("info", "{n} prompts bring tools that nothing runs: the model is shown them too, and calling one ends the rollout"),
}


def findings_of(source: RowSource, tally: Tally, kept: int, chat: ChatFormat) -> tuple[Finding, ...]:
    """Everything the tally of one pass shows, the gravest first."""
    found = [
        *_rejected(tally, source),
        *_limits(tally, kept),
        *_marks(tally, source),
        *_repeats(tally),
        *_pairs(tally),
        *_decisions(source, tally, chat),
    ]
    return gravest_first(found)


def gravest_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = ("critical", "warning", "info")
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def _rejected(tally: Tally, source: RowSource) -> Iterator[Finding]:
    if tally.rejected_count:
        rows = "1 row" if tally.rejected_count == 1 else f"{tally.rejected_count} rows"
        severity: Severity = "critical" if tally.rejected_count > source.max_bad else "warning"
        first = tally.rejected[0]
        message = f"{rows} cannot be used; the first, {first.name}: {first.reason}"
        names = tuple(item.name for item in tally.rejected[:EXAMPLES])
        hint = f"mend the rows, or allow them with data.max_bad: {tally.rejected_count}" if severity == "critical" else None
        yield Finding("rejected", severity, message, tally.rejected_count, names, hint)


def _roomier(tally: Tally) -> str:
    """Advice with the limit that would keep nearly every row."""
    total, seen = tally.lengths.total(), 0
    for length, rows in sorted(tally.lengths.items()):
        seen += rows
        if seen >= 0.95 * total:
            return f"max_length: {length} keeps 95 % of the rows whole"
    return "raise max_length"


def _limits(tally: Tally, kept: int) -> Iterator[Finding]:
    if tally.cut:
        severity: Severity = (
            "critical" if tally.cut > 0.5 * kept and kept >= MANY_ROWS else "warning" if tally.cut > 0.05 * kept else "info"
        )
        message = f"{tally.cut} of {kept} rows are cut; a cut answer has no end token"
        if severity == "critical":
            message = f"{tally.cut} of {kept} rows are cut at the limit: the model would rarely see an end token"
        yield Finding("cut", severity, message, tally.cut, hint=_roomier(tally))
    too_long = tally.dropped["too_long"]
    if too_long > 0.05 * tally.rows:
        message = f"{too_long} of {tally.rows} rows are left out because they are too long"
        yield Finding("too_long", "warning", message, too_long, hint=_roomier(tally))
    if turns := tally.counts["dropped_turns"]:
        yield Finding("dropped_turns", "info", f"{turns} single turns of kept conversations are too long and left out", turns)


def _marks(tally: Tally, source: RowSource) -> Iterator[Finding]:
    for name, mark in tally.marks.items():
        rule = MARKS[name]
        message = rule.message.format(n=mark.count, detail=mark.detail)
        yield Finding(name, rule.severity, message, mark.count, tuple(mark.rows), rule.hint)


def _repeats(tally: Tally) -> Iterator[Finding]:
    prints = tally.table_of_prints()
    repeated, examples = _again(tally, prints)
    if repeated:
        severity: Severity = "warning" if repeated > 0.01 * len(prints) else "info"
        message = f"{repeated} of {len(prints)} rows repeat an earlier row token for token"
        yield Finding("duplicates", severity, message, repeated, examples, "leave the copies out, unless they are meant as a weight")


def _again(tally: Tally, prints: Array) -> tuple[int, tuple[str, ...]]:
    """How many rows equal an earlier one, and the first of them by name."""
    if not len(prints):
        return 0, ()
    _, first = np.unique(prints[:, 0], return_index=True)
    later = np.ones(len(prints), bool)
    later[first] = False
    return int(later.sum()), tuple(tally.place_of(line) for line in prints[later][:EXAMPLES])


def overlap(train: Tally, heldout: Tally) -> Finding | None:
    """Held-out rows that are also trained on, or whose prompt is."""
    ours, theirs = train.table_of_prints(), heldout.table_of_prints()
    if not len(ours) or not len(theirs):
        return None
    prompts = np.isin(theirs[:, 1], ours[:, 1])
    if not prompts.any():
        return None
    rows = int(np.isin(theirs[:, 0], ours[:, 0]).sum())
    names = tuple(heldout.place_of(line) for line in theirs[prompts][:EXAMPLES])
    count = int(prompts.sum())
    message = f"{count} of {len(theirs)} held-out rows have a prompt that is also trained on ({rows} with the same answer)"
    return Finding("overlap", "warning", message, count, names, "leave them out of one side; data.eval as a share never splits equal rows")


LENGTH_BIAS = 0.65
"""Share of pairs whose chosen answer is the longer one from which length alone would predict the preference rather well."""


def _pairs(tally: Tally) -> Iterator[Finding]:
    pairs, longer, shorter = (tally.counts[name] for name in ("pairs", "chosen_longer", "chosen_shorter"))
    if not pairs:
        return
    chosen, rejected = tally.counts["chosen_tokens"] / pairs, tally.counts["rejected_tokens"] / pairs
    share = max(longer, shorter) / pairs
    word = "longer" if longer >= shorter else "shorter"
    severity: Severity = "warning" if share >= LENGTH_BIAS and pairs >= MANY_ROWS else "info"
    message = f"the chosen answer is {word} in {100 * share:.0f} % of {pairs} pairs (on average {chosen:.0f} tokens against {rejected:.0f})"
    hint = (
        "the model may learn length instead of quality: balance the pairs, or use a length-normalised loss"
        if severity == "warning"
        else None
    )
    yield Finding("length_bias", severity, message, max(longer, shorter), hint=hint)


def _decisions(source: RowSource, tally: Tally, chat: ChatFormat) -> Iterator[Finding]:
    for note in (*source.notes, *chat.notes):
        yield Finding("template", "info", note)
    if wrapped := tally.counts["wrapped"]:
        yield Finding("wrapped", "info", f"{wrapped} text prompts became user messages of the chat template", wrapped)
    if raw := tally.counts["raw"]:
        why = "the tokenizer has no chat template" if not chat.has_template else "as asked"
        yield Finding("raw", "info", f"{raw} rows are raw text without a chat template ({why})", raw)
    if answered := tally.counts["answered"]:
        message = f"{answered} conversations end in an assistant turn, which is left out of the prompt"
        yield Finding("answered", "info", message, answered)
