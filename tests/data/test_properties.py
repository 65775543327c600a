"""For any small file of good and bad rows: every row is accounted for, exactly the answers are trained, and chunks do not matter."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.chat import ChatFormat
from postgrad.data import Reading, audit, load_rows, prepare_sft
from postgrad.data.files import Rejected, parse_json
from postgrad.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = ChatFormat(TOKENIZER)

texts = st.text(st.sampled_from("abthe12 )\n<|>\N{GREEK SMALL LETTER ALPHA}"), min_size=1, max_size=12).filter(str.strip)
special = st.sampled_from(["<|im_end|>", "a<|im_start|>b", "<|endoftext|>"])
content = texts | special


def conversation(turns):
    return [{"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(turns)]


good = st.lists(content, min_size=1, max_size=3).flatmap(
    lambda turns: st.just({"messages": conversation([text for turn in turns for text in (turn, turn[::-1])])})
)
bad = st.sampled_from(
    [
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": conversation(["a", " "])},
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}]},
    ]
)
silent = st.just({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False}]})
long = st.just({"messages": conversation(["a", "b" * 400])})
lines = st.one_of(good, bad, silent, long).map(json.dumps) | st.sampled_from(["{", "[1]", "", " "])
files = st.tuples(good.map(json.dumps), st.lists(lines, max_size=12)).map(lambda parts: [parts[0], *parts[1]])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("property") / "rows.jsonl"


def prepare(path, overlong):
    return prepare_sft(load_rows(path, max_bad=100), CHAT, max_length=300, overlong=overlong)


def expected(line):
    """What is trained of a line: the assistant's texts, each with its end token; None where the line is no usable row."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    messages = value.get("messages") if isinstance(value, dict) else None
    answers = [item["content"] for item in messages or () if item["role"] == "assistant" and item.get("train") is not False]
    return [f"{text}<|im_end|>" for text in answers]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files, st.sampled_from(["drop", "cut"]))
def test_every_row_is_kept_or_counted_and_exactly_the_answers_are_trained(path, content, overlong):
    path.write_text("\n".join(content), encoding="utf-8")
    data = prepare(path, overlong)
    report = data.report
    assert report.rows == sum(1 for line in content if line.strip())
    assert report.rows == report.kept + sum(report.dropped.values())
    assert report.kept == report.tally.kept == len(data.rows)
    assert report.trained_tokens == sum(row.trained_tokens for row in data.rows)
    assert report.tokens == sum(len(row.token_ids) for row in data.rows)
    for row, name, sources in zip(data.rows, data.row_names, data.sources, strict=True):
        trained = TOKENIZER.decode([token for token, flag in zip(row.token_ids, row.trained, strict=True) if flag])
        wanted = "".join(expected(content[int(name.rpartition(":")[2]) - 1]))
        assert trained == wanted if len(row.token_ids) < 300 else wanted.startswith(trained)
        assert all(source == "assistant" for source, flag in zip(sources, row.trained, strict=True) if flag)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files, st.integers(1, 600))
def test_the_report_is_the_same_for_any_size_of_chunk(path, content, size):
    path.write_text("\n".join(content), encoding="utf-8")
    whole = prepare(path, "cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postgrad.data.files.CHUNK_BYTES", size)
        divided = prepare(path, "cut")
        audited = audit(load_rows(path, max_bad=100), CHAT, Reading(max_length=300, overlong="cut"))
    assert (divided.report, divided.report.lines()) == (whole.report, whole.report.lines())
    assert (audited, audited.lines()) == (whole.report, whole.report.lines())
    assert (list(divided.rows), list(divided.row_names)) == (list(whole.rows), list(whole.row_names))
    assert all(isinstance(item, Rejected) for item in whole.report.rejected)
