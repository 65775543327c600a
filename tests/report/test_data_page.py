"""The HTML page of `postgrad data`: inert against what the rows hold, and complete without a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from postgrad.chat import ChatFormat
from postgrad.data import Reading, audit, rows_from
from postgrad.report.data_page import report_page, rows_page
from postgrad.testing import tiny_tokenizer

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)> \"' &amp; \u202egnp.exe \x1b[31m \x00"
CHAT = ChatFormat(tiny_tokenizer())


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data


def pages():
    yield rows_page(HOSTILE, [(HOSTILE, [(HOSTILE, [("trained", HOSTILE), ("context", "plain\nnext")])])])
    rows = rows_from([{"prompt": "a", "completion": HOSTILE, HOSTILE: 1}, {"prompt": HOSTILE, "completion": ""}], name=HOSTILE)
    yield report_page(audit(rows, CHAT, Reading()), [(HOSTILE, [("", [("glue", HOSTILE)])])])


def test_nothing_that_a_row_or_a_name_holds_becomes_a_tag():
    for page in pages():
        tags = Tags(page)
        assert not {"script", "img", "iframe", "a", "link"} & set(tags.names)
        assert not [name for name, _ in tags.attributes if name.startswith("on")]
        assert tags.text.count("<script>alert(1)</script>") >= 2  # visible as text


def test_characters_that_would_reorder_or_hide_text_are_written_out():
    for page in pages():
        assert not [letter for letter in page if not letter.isprintable() and letter != "\n"]
        assert "\\u202e" in page
        assert "\\x1b" in page


def test_the_page_needs_nothing_but_itself():
    for page in pages():
        assert not re.search(r"(src|href|url|@import|fetch)\s*[=(:]\s*[\"']?\s*(https?:)?//", page)
        assert "<script" not in page


def test_line_ends_stay_line_ends_and_kinds_are_classes():
    page = next(pages())
    assert '<span class="context">plain\nnext</span>' in page
    assert '<span class="trained">' in page


def test_a_report_shows_its_numbers_and_findings():
    rows = rows_from([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "x" * 200}])
    text = " ".join(Tags(report_page(audit(rows, CHAT, Reading(max_length=90)), [])).text.split())
    assert "3: 2 kept, 1 dropped, 0 cut" in text
    assert "dropped 1: too_long" in text
    assert "duplicates: 1 of 2 rows repeat an earlier row token for token" in text
    assert "rows: rows:2" in text


def test_a_report_without_any_row_left_is_a_page_too():
    page = report_page(audit(rows_from([{"prompt": "a", "completion": ""}]), CHAT, Reading()), [])
    assert "fail" in Tags(page).text
