"""Rows and audit reports as people and programs read them: brackets in the terminal, parts of one kind for a page, JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postgrad.chat import ChatFormat
    from postgrad.data import DataReport, Reading, RowSource


@dataclass(frozen=True, slots=True)
class Opened:
    """What both commands look at: training rows, held-out rows, and how they are read."""

    rows: RowSource
    heldout: RowSource | None
    chat: ChatFormat
    reading: Reading
    model: str

    @property
    def encoder(self) -> Any:
        return self.reading.encoder(self.rows, self.chat)


def item_json(opened: Opened, item: Any) -> dict[str, Any]:
    from postgrad.data.encoded import read_row
    from postgrad.data.preferences import read_labelled, read_pair
    from postgrad.types import Prompt

    if isinstance(item, Prompt):
        ids = _prompt_ids(opened, item)
        return {"row": item.row, "token_ids": ids, "train": [0] * len(ids), "source": ["context"] * len(ids)}
    if "chosen" in item:
        pair = read_pair(item)
        record = {
            "row": pair.name,
            "prompt_ids": pair.prompt_ids,
            "chosen_ids": pair.chosen.token_ids,
            "rejected_ids": pair.rejected.token_ids,
        }
        return record | ({} if pair.margin is None else {"margin": pair.margin})
    if "label" in item:
        row = read_labelled(item)
        return {"row": row.name, "prompt_ids": row.prompt_ids, "completion_ids": row.answer.token_ids, "label": row.label}
    encoded = read_row(item)
    train = [int(flag) for flag in encoded.trained]
    return {"row": encoded.name, "token_ids": encoded.token_ids, "train": train, "source": encoded.source}


def _prompt_ids(opened: Opened, prompt: Any) -> tuple[int, ...]:
    if prompt.raw_text is not None:
        return opened.chat.raw_prompt_ids(prompt.raw_text)
    return opened.chat.prompt_ids(prompt.messages, (*opened.reading.tools, *prompt.tools))


Part = tuple[str, str]
"""(kind: trained | context | glue | padding, text)."""


def item_parts(opened: Opened, item: Any) -> tuple[str, list[tuple[str, list[Part]]]]:
    """(title, [(label, parts)]): a row as stretches of one kind; a pair has three of them."""
    from postgrad.data.encoded import read_row
    from postgrad.data.preferences import read_labelled, read_pair
    from postgrad.types import Prompt

    chat = opened.chat
    if isinstance(item, Prompt):
        ids = _prompt_ids(opened, item)
        title = f"{item.row}: {len(ids)} tokens; columns for the rewards: {', '.join(item.columns) or 'none'}"
        return title, [("", [("context", chat.decode_raw(ids))])]
    if "chosen" in item:
        pair = read_pair(item)
        sides = [("chosen", pair.chosen), ("rejected", pair.rejected)]
        counts = f"prompt {len(pair.prompt_ids)}, chosen {len(pair.chosen.token_ids)}, rejected {len(pair.rejected.token_ids)} tokens"
        answers = [(label, stretches(chat, side.token_ids, side.scored)) for label, side in sides]
        return f"{pair.name}: {counts}", [("prompt", [("context", chat.decode_raw(pair.prompt_ids))]), *answers]
    if "label" in item:
        row = read_labelled(item)
        label = "desirable" if row.label else "undesirable"
        title = f"{row.name}: prompt {len(row.prompt_ids)}, answer {len(row.answer.token_ids)} tokens"
        answer = (label, stretches(chat, row.answer.token_ids, row.answer.scored))
        return title, [("prompt", [("context", chat.decode_raw(row.prompt_ids))]), answer]
    encoded = read_row(item)
    title = f"{encoded.name}: {len(encoded.token_ids)} tokens, {sum(encoded.trained)} trained"
    return title, [("", stretches(chat, encoded.token_ids, encoded.trained, encoded.source))]


def item_text(opened: Opened, item: Any) -> str:
    title, blocks = item_parts(opened, item)
    return "\n".join([title, *((f"{label}: " if label else "") + bracketed(parts) for label, parts in blocks)])


def stretches(chat: ChatFormat, token_ids: tuple[int, ...], trained: tuple[bool, ...], source: tuple[str, ...] = ()) -> list[Part]:
    """Neighbouring tokens of one kind as text, in order."""
    origins = source or ("context",) * len(token_ids)
    kinds = ["trained" if flag else "glue" if origin == "glue" else "context" for flag, origin in zip(trained, origins, strict=True)]
    grouped = groupby(zip(kinds, token_ids, strict=True), key=lambda pair: pair[0])
    return [(kind, chat.decode_raw([token for _, token in stretch])) for kind, stretch in grouped]


def bracketed(parts: list[Part]) -> str:
    """Trained text in ⟦ ⟧, glue in ‹ ›; readable without colour."""
    brackets = {"trained": ("⟦", "⟧"), "glue": ("‹", "›"), "context": ("", "")}
    return "".join(brackets[kind][0] + visible(text) + brackets[kind][1] for kind, text in parts)


def marked(chat: ChatFormat, token_ids: tuple[int, ...], trained: tuple[bool, ...], source: tuple[str, ...] = ()) -> str:
    """A row's text with its trained and glue stretches in brackets."""
    return bracketed(stretches(chat, token_ids, trained, source))


def visible(text: str) -> str:
    """Line ends shown as ⏎ (and kept), other control characters escaped, so a data file cannot drive the terminal.

    >>> visible("a\\n\\x1b[31mb")
    'a⏎\\n\\\\x1b[31mb'
    """
    return "".join("⏎\n" if letter == "\n" else letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


# ---- the report


def report_json(report: DataReport) -> dict[str, Any]:
    return {
        "format": report.format,
        "rows": report.rows,
        "kept": report.kept,
        "dropped": dict(report.dropped),
        "cut": report.cut,
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "answers": report.answers,
        "answers_with_end_token": report.ends,
        "lengths": {"shortest": report.lengths.shortest, "median": report.lengths.median, "p95": report.lengths.p95,
                    "longest": report.lengths.longest, "limit": report.max_length},
        "columns": list(report.columns),
        "findings": [finding.to_json() for finding in report.findings],
        "passed": report.passed,
    }  # fmt: skip


def report_lines(report: DataReport, *, method: str, model: str) -> Iterator[str]:
    """The report for a reader of the terminal."""
    yield f"{report.source}: {report.format} rows, read for {method} with the tokenizer and template of {model}"
    yield ""
    yield f"rows      {report.rows}: {report.kept} kept, {report.rows - report.kept} dropped, {report.cut} cut"
    for reason, count in report.dropped.items():
        yield f"          dropped {count}: {reason}"
    share = 100 * report.trained_tokens / max(report.tokens, 1)
    trained = f", {report.trained_tokens} of them trained ({share:.1f} %)" if report.trained_tokens else ""
    yield f"tokens    {report.tokens} in kept rows{trained}"
    if report.answers:
        yield f"answers   {report.answers} are trained, {report.ends} of them with their end token"
    yield f"columns   {', '.join(report.columns)}"
    yield from _histogram(report)
    yield ""
    for finding in report.findings:
        yield f"{finding.severity:<9} {finding.id}: {finding.message}"
        if finding.rows:
            more = ", …" if finding.count > len(finding.rows) else ""
            yield f"          rows: {', '.join(finding.rows)}{more}"
        if finding.hint:
            yield f"          hint: {finding.hint}"
    yield f"verdict   {'pass' if report.passed else 'fail: ' + why(report)}"


def _histogram(report: DataReport) -> Iterator[str]:
    limit = report.max_length
    yield f"lengths   tokens per row before the limit{'' if limit is None else f' of {limit}'}:"
    bins = report.length_bins()
    most = max((count for *_, count in bins), default=1)
    for low, high, count in bins:
        over = "  over the limit" if limit is not None and low > limit else ""
        yield f"  {low:>7} to {high:>7}  {count:>8}  {'█' * -(-30 * count // most)}{over}"


def why(report: DataReport) -> str:
    if report.fail is not None:
        return report.fail.what
    return next(finding.message for finding in report.findings if finding.severity == "critical")
