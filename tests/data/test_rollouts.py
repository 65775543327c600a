"""Rollout files of a run, read back as rows: what was sampled, and whether finished turns end with an end token."""

from __future__ import annotations

import json

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import Reading, audit, load_rows, prepare_sft
from postgrad.data.encoded import read_row
from postgrad.data.pipeline import DEFAULT_WORK, encode
from postgrad.errors import DataError
from postgrad.rollout.record import group_to_json
from postgrad.testing import tiny_tokenizer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason

CHAT = ChatFormat(tiny_tokenizer())
END = 2


def model(*ids):
    return Segment(Source.MODEL, ids, (-0.5,) * len(ids))


def group(*rollouts: Rollout) -> Group:
    return Group(Prompt("train.jsonl:1", (Message("user", "one"),), {"answer": "two"}), rollouts)


PROMPT = Segment(Source.PROMPT, (60, 61, 62))
FINISHED = Rollout((PROMPT, model(70, END)), (Message("assistant", "x"),), StopReason.END)
WITH_TOOL = Rollout((PROMPT, model(70, END), Segment(Source.TOOL, (80, 81)), model(71, 72)), (), StopReason.TOTAL_TOKENS, sample=1)
UNFINISHED = Rollout((PROMPT, model(70, 71)), (), StopReason.END)


@pytest.fixture
def write(tmp_path):
    def make(*groups):
        path = tmp_path / "step-1.jsonl"
        path.write_text("".join(json.dumps(group_to_json(item)) + "\n" for item in groups))
        return load_rows(path)

    return make


def rows_of(source):
    made = []
    encode(source, None, Reading().encoder(source, CHAT), made.extend, work=DEFAULT_WORK)
    return [read_row(record) for record in made]


def test_each_rollout_is_a_row_whose_trained_tokens_are_those_the_model_sampled(write):
    source = write(group(FINISHED, WITH_TOOL))
    assert source.format == "rollouts"
    first, second = rows_of(source)
    assert (first.token_ids, first.trained) == (FINISHED.token_ids, FINISHED.tool_mask)
    assert (second.token_ids, second.trained) == (WITH_TOOL.token_ids, WITH_TOOL.tool_mask)
    assert second.source == ("context",) * 3 + ("assistant",) * 2 + ("glue",) * 2 + ("assistant",) * 2
    assert [first.name, second.name] == ["step-1.jsonl:1 rollout 0", "step-1.jsonl:1 rollout 1"]


def test_the_audit_counts_finished_turns_and_their_end_tokens(write):
    report = audit(write(group(FINISHED, WITH_TOOL), group(FINISHED)), CHAT, Reading())
    assert (report.rows, report.kept, report.dropped) == (2, 2, {})
    assert (report.tokens, report.trained_tokens) == (5 + 9 + 5, 2 + 4 + 2)
    assert (report.answers, report.ends) == (3, 3)  # the turn that the budget cut is no finished one
    assert report.max_length is None
    assert report.passed


def test_a_finished_turn_without_end_token_is_critical_and_counted_once_per_row(write):
    report = audit(write(group(FINISHED), group(UNFINISHED, UNFINISHED)), CHAT, Reading())
    (finding,) = [finding for finding in report.findings if finding.id == "no_end_token"]
    assert (finding.count, finding.rows, finding.severity) == (1, ("step-1.jsonl:2",), "critical")
    assert (report.answers, report.ends) == (3, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.update(rollouts=[]),
        lambda row: row.update(rollouts="x"),
        lambda row: row["rollouts"].append({"stop": "end"}),
        lambda row: row["rollouts"][0]["segments"][1]["logprobs"].pop(),
        lambda row: row["rollouts"][0]["segments"][0].update(source="elsewhere"),
    ],
)
def test_a_row_that_is_no_group_is_rejected_and_none_of_it_is_counted(tmp_path, spoil):
    good, row = group_to_json(group(FINISHED)), group_to_json(group(FINISHED))
    spoil(row)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(row))
    report = audit(load_rows(path, max_bad=1), CHAT, Reading())
    assert (report.rows, report.dropped, report.tokens) == (2, {"rejected": 1}, 5)


def test_nobody_trains_on_rollouts_by_mistake(write):
    with pytest.raises(DataError, match="these are rollouts rows") as error:
        prepare_sft(write(group(FINISHED)), CHAT, max_length=99)
    assert "data show" in str(error.value.hint)
