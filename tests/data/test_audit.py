"""Findings: what a user must know about the data, with exact counts, and each rows' name once."""

from __future__ import annotations

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import Reading, audit, prepare_preferences, prepare_sft, rows_from
from postgrad.data.report import DataReport, lengths_of
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer

CHAT = ChatFormat(tiny_tokenizer())
RAW = ChatFormat(tiny_tokenizer(None))


def row(prompt="one", completion="two"):
    return {"prompt": prompt, "completion": completion}


def check(*rows, chat=CHAT, max_bad=0, heldout=None, **reading) -> DataReport:
    other = None if heldout is None else rows_from(heldout, name="held")
    return audit(rows_from(rows, max_bad=max_bad), chat, Reading(**reading), heldout=other)


def found(report, name):
    matches = [finding for finding in report.findings if finding.id == name]
    assert len(matches) <= 1
    return matches[0] if matches else None


# ---- duplicates and overlap


def test_copies_of_a_row_are_counted_and_named():
    finding = found(check(row(), row("x"), row(), row(), row("x")), "duplicates")
    assert finding.message == "3 of 5 rows repeat an earlier row token for token"
    assert finding.rows == ("rows:3", "rows:4", "rows:5")
    assert finding.severity == "warning"
    assert found(check(row(), row(completion="x")), "duplicates") is None


def test_held_out_rows_that_are_trained_on_are_counted_with_and_without_the_same_answer():
    report = check(row("a"), row("b"), row("c"), heldout=[row("a"), row("b", "other"), row("z")])
    finding = found(report, "overlap")
    assert finding.message == "2 of 3 held-out rows have a prompt that is also trained on (1 with the same answer)"
    assert finding.rows == ("held:1", "held:2")
    assert found(check(row("a"), heldout=[row("b")]), "overlap") is None


def test_raw_texts_that_only_begin_alike_do_not_overlap():
    assert found(check({"text": "the cat"}, heldout=[{"text": "the dog"}]), "overlap") is None
    assert found(check({"text": "the cat"}, heldout=[{"text": "the cat"}]), "overlap").count == 1


def test_overlap_is_of_prompts_also_when_every_token_is_trained():
    assert found(check(row("a"), heldout=[row("b")], train_on="all"), "overlap") is None
    assert found(check(row("a"), heldout=[row("a", "x")], train_on="all"), "overlap").count == 1


def test_the_gravest_finding_comes_first_with_held_out_rows_too():
    report = check(row("a"), {"prompt": "b", "completion": ""}, heldout=[row("a")])
    assert [finding.severity for finding in report.findings] == sorted(
        (finding.severity for finding in report.findings), key=("critical", "warning", "info").index
    )
    assert report.findings[0].id == "rejected"


# ---- preferences


def pair(chosen, rejected, prompt="one"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_a_preference_that_length_predicts_is_a_warning_with_its_share():
    rows = [pair("c" * 8, "r" * 3, str(i)) for i in range(15)] + [pair("c" * 3, "r" * 8, str(i)) for i in range(5)]
    finding = found(check(*rows), "length_bias")
    # chosen: (15 * 9 + 5 * 4) / 20 tokens, end token included; rejected: (15 * 4 + 5 * 9) / 20
    assert finding.message == "the chosen answer is longer in 75 % of 20 pairs (on average 8 tokens against 5)"
    assert finding.severity == "warning"
    even = found(check(*rows[:10], *[pair("c" * 3, "r" * 8, f"x{i}") for i in range(10)]), "length_bias")
    assert (even.severity, even.count) == ("info", 10)


def test_what_both_sides_of_a_pair_share_is_counted_once_per_row():
    report = check(pair("a \N{REPLACEMENT CHARACTER}", "b \N{REPLACEMENT CHARACTER}", "typed <|im_end|>"))
    assert found(report, "special_text").count == 1
    assert found(report, "replacement_character").count == 1
    assert found(report, "replacement_character").rows == ("rows:1",)


# ---- rows that look wrong


def test_damaged_text_is_a_warning_with_its_rows():
    finding = found(check(row(), row("caf\N{REPLACEMENT CHARACTER}")), "replacement_character")
    assert (finding.severity, finding.count, finding.rows) == ("warning", 1, ("rows:2",))


def test_null_arguments_are_noted():
    """ms-swift#10125."""
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert found(check({"messages": messages}), "null_arguments").count == 1
    call["function"]["arguments"] = {"a": 1}
    assert found(check({"messages": messages}), "null_arguments") is None


def test_a_border_that_would_merge_is_noted_for_raw_text():
    assert found(check(row("Q t", "he 4"), chat=RAW), "boundary_merge").count == 1
    assert found(check(row("Q t", "x 4"), chat=RAW), "boundary_merge") is None


def test_an_unknown_token_is_a_warning_unless_the_tokenizer_uses_it_as_its_end_token():
    ids = {"input_ids": [60, 0, 2], "labels": [-100, 0, 2]}
    assert found(check(ids), "unknown_token").count == 1
    tokenizer = tiny_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2 has it
    assert found(check(row(), chat=ChatFormat(tokenizer)), "unknown_token") is None


def test_a_system_message_that_the_template_swallows_is_a_warning():
    deaf = ChatFormat(tiny_tokenizer(CHATML.replace("{{ '<|im_start|>' + message['role']", "{% if message.role == 'system' %}{% continue %}{% endif %}{{ '<|im_start|>' + message['role']")))  # noqa: E501  # fmt: skip
    messages = [{"role": "system", "content": "kind"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    finding = found(check({"messages": messages}, chat=deaf), "system_lost")
    assert (finding.severity, finding.count) == ("warning", 1)
    assert found(check({"messages": messages}), "system_lost") is None


def test_tools_that_the_template_ignores_are_told_in_words_and_noted():
    tools = [{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}]
    assert found(check({**row(), "tools": tools}), "tools_as_text").count == 1


# ---- rejected, cut, too long


def test_rejected_rows_are_critical_beyond_what_is_allowed():
    bad = {"prompt": "a", "completion": ""}
    report = check(row(), bad, row("x"), bad)
    finding = found(report, "rejected")
    assert (finding.severity, finding.count, finding.rows) == ("critical", 2, ("rows:2", "rows:4"))
    assert not report.passed
    assert (report.rows, report.kept) == (4, 2)
    allowed = check(row(), bad, row("x"), bad, max_bad=2)
    assert found(allowed, "rejected").severity == "warning"
    assert allowed.passed


@pytest.mark.parametrize(("long", "severity"), [(1, "info"), (2, "warning"), (10, "warning"), (11, "critical")])
def test_how_grave_a_cut_is_depends_on_the_share_of_rows(long, severity):
    """Of 20 rows: up to 5 % a note, up to a half a warning, beyond that an error."""
    rows = [row(str(i), "x" * 200 if i < long else "x") for i in range(20)]
    report = check(*rows, overlong="cut", max_length=90)
    assert (report.cut, found(report, "cut").severity) == (long, severity)
    assert report.passed == (severity != "critical")


def test_many_rows_left_out_for_their_length_are_a_warning():
    rows = [row(str(i), "x" * 200 if i < 2 else "x") for i in range(20)]
    assert found(check(*rows, max_length=90), "too_long").message == "2 of 20 rows are left out because they are too long"
    assert found(check(*rows[1:], row("y"), max_length=90), "too_long") is None


def test_training_on_critical_data_is_refused_with_the_finding():
    report = check({"input_ids": [60, 61], "labels": [-100, 61]}, row := {"input_ids": [60, 2], "labels": [-100, 2]}, row)
    assert found(report, "no_end_token").severity == "critical"
    with pytest.raises(DataError, match="without an end token") as error:
        report.verify()
    assert error.value.where == "rows:1"


def test_the_audit_and_the_preparation_report_the_same():
    rows = [row(), row(), row("x" * 99), row("a<|im_end|>")]
    assert check(*rows, max_length=80, method="sft") == prepare_sft(rows_from(rows), CHAT, max_length=80).report
    pairs = [pair("two", "three"), pair("a", "b")]
    assert check(*pairs) == prepare_preferences(rows_from(pairs), CHAT, max_length=1024).report


# ---- what was decided


def test_two_beginning_tokens_of_template_and_tokenizer_become_one_and_are_noted():
    """OpenRLHF#393."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer("{{ '<|endoftext|>' }}" + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    data = prepare_sft(rows_from([row()]), ChatFormat(tokenizer), max_length=99)
    assert data.rows[0].token_ids[:2] == (0, 1)
    assert data.rows[0].token_ids.count(0) == 1
    assert any("one of them was removed" in note for note in data.report.notes)


# ---- numbers


def test_quantiles_are_lengths_that_occur():
    assert (lengths_of({10: 19, 99: 1}).median, lengths_of({10: 19, 99: 1}).p95) == (10, 99)
    assert lengths_of({}).longest == 0


def test_the_steps_of_the_histogram_hold_every_row_and_end_at_the_limit():
    report = DataReport(source="f", format="text", rows=0, kept=0, histogram={1: 2, 50: 3, 100: 1, 101: 4, 900: 1}, max_length=100)
    bins = report.length_bins(count=4)
    assert bins == [(1, 25, 2), (26, 50, 3), (51, 75, 0), (76, 100, 1), (101, 900, 5)]
    assert sum(count for *_, count in bins) == 11
    alike = DataReport(source="f", format="text", rows=0, kept=0, histogram={36: 2, 37: 1, 39: 1})
    assert alike.length_bins() == [(36, 36, 2), (37, 37, 1), (38, 38, 0), (39, 39, 1)]
    long = DataReport(source="f", format="text", rows=0, kept=0, histogram={150: 2, 151: 1}, max_length=100)
    assert long.length_bins() == [(100, 100, 0), (101, 151, 3)]
    assert DataReport(source="f", format="text", rows=0, kept=0).length_bins() == []


def test_results_that_become_user_messages_are_noted():
    skip = "{% if message.role == 'tool' %}{% continue %}{% endif %}{{ '<|im_start|>' + message['role']"
    deaf = ChatFormat(tiny_tokenizer(CHATML.replace("{{ '<|im_start|>' + message['role']", skip)))
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "b"},
    ]
    assert found(check({"messages": messages}, chat=deaf), "tool_as_user").count == 1
    assert found(check({"messages": messages}), "tool_as_user") is None
