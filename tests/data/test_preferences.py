"""Preference pairs in every shape people write them, and what may never happen to a pair."""

from __future__ import annotations

import math

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import mix, prepare_preferences, prepare_unpaired, rows_from
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer
from postgrad.types import Message

TOKENIZER = tiny_tokenizer()
CHAT = ChatFormat(TOKENIZER)
RAW = ChatFormat(tiny_tokenizer(None))
END = 2


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def pairs(*rows, chat=CHAT, max_length=1024, max_bad=0, **options):
    return prepare_preferences(rows_from(rows, max_bad=max_bad), chat, max_length=max_length, **options)


def texts(pair):
    return tuple(TOKENIZER.decode(list(ids)) for ids in (pair.prompt_ids, pair.chosen.token_ids, pair.rejected.token_ids))


PROMPT = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
SAME = (PROMPT, "two<|im_end|>", "three<|im_end|>")

SHAPES = {
    "text beside a prompt": {"prompt": "one", "chosen": "two", "rejected": "three"},
    "text beside a question": {"question": "one", "chosen": "two", "rejected": "three"},
    "alpaca columns": {"instruction": "one", "input": "", "chosen": "two", "rejected": "three"},
    "messages beside a prompt of messages": {"prompt": [user("one")], "chosen": [answer("two")], "rejected": [answer("three")]},
    "single messages": {"conversations": [{"from": "human", "value": "one"}], "chosen": {"from": "gpt", "value": "two"},
                        "rejected": {"from": "gpt", "value": "three"}},
    "implicit prompt": {"chosen": [user("one"), answer("two")], "rejected": [user("one"), answer("three")]},
    "implicit prompt under other names": {"chosen_messages": [user("one"), answer("two")],
                                          "rejected_messages": [user("one"), answer("three")]},
    "prompt text and full lists": {"prompt": "one", "chosen": [user("one"), answer("two")], "rejected": [user("one"), answer("three")]},
    "prompt messages repeated in the sides": {"prompt": [user("one")], "chosen": [user("one"), answer("two")],
                                              "rejected": [user("one"), answer("three")]},
    "dialogue text": {"chosen": "\n\nHuman: one\n\nAssistant: two", "rejected": "\n\nHuman: one\n\nAssistant: three"},
}  # fmt: skip


@pytest.mark.parametrize("row", SHAPES.values(), ids=list(SHAPES))
def test_every_shape_of_a_pair_gives_the_same_ids(row):
    assert texts(pairs(row).pairs[0]) == SAME


def test_both_sides_share_the_prompt_that_inference_sees():
    """trl#2054, alignment-handbook#116: the header belongs to the prompt, and no token spans its border."""
    for prompt in ("Q t", "Q t "):
        pair = pairs({"prompt": prompt, "chosen": "he 1", "rejected": "h"}).pairs[0]  # this tokenizer has the merges "th" and "the"
        assert pair.prompt_ids == CHAT.prompt_ids([Message("user", prompt)])
        assert pair.chosen.token_ids == (*CHAT.encode("he 1"), END)
        assert pair.rejected.token_ids == (*CHAT.encode("h"), END)


def test_raw_pairs_are_prompt_then_answer_then_end_token():
    """trl#2054: `t` and `he` would be one token together."""
    pair = pairs({"prompt": "Q t", "chosen": "he", "rejected": " a"}, chat=RAW).pairs[0]
    assert pair.prompt_ids == RAW.encode("Q t")
    assert pair.chosen.token_ids == (*RAW.encode("he"), END)
    assert pair.rejected.token_ids == (*RAW.encode(" a"), END)


def test_no_null_enters_the_ids_when_the_tokenizer_has_no_beginning_token():
    """trl#1073."""
    tokenizer = tiny_tokenizer(None)
    tokenizer.bos_token = None
    pair = pairs({"prompt": "Q", "chosen": "a", "rejected": "b"}, chat=ChatFormat(tokenizer)).pairs[0]
    assert all(isinstance(token, int) for token in (*pair.prompt_ids, *pair.chosen.token_ids, *pair.rejected.token_ids))


def test_only_what_the_assistant_wrote_is_scored_in_an_answer_of_several_turns():
    """OpenRLHF#235."""
    chosen = [user("one"), answer("two"), user("more"), answer("four")]
    pair = pairs({"chosen": chosen, "rejected": [user("one"), answer("five")]}).pairs[0]
    scored = [token for token, flag in zip(pair.chosen.token_ids, pair.chosen.scored, strict=True) if flag]
    assert TOKENIZER.decode(scored) == "two<|im_end|>four<|im_end|>"
    assert "more" in TOKENIZER.decode(list(pair.chosen.token_ids))
    assert all(pair.rejected.scored)


def test_the_implicit_prompt_is_everything_before_the_first_difference():
    shared = [user("one"), answer("two"), user("three")]
    pair = pairs({"chosen": [*shared, answer("x")], "rejected": [*shared, answer("y")]}).pairs[0]
    assert texts(pair)[1:] == ("x<|im_end|>", "y<|im_end|>")
    assert texts(pair)[0].endswith("three<|im_end|>\n<|im_start|>assistant\n")


def test_the_implicit_prompt_of_raw_text_ends_at_white_space():
    pair = pairs({"chosen": "Say it: yes sir", "rejected": "Say it: yesterday"}, chat=RAW).pairs[0]
    assert texts(pair) == ("Say it:", " yes sir<|im_end|>", " yesterday<|im_end|>")


def test_dialogue_text_stays_text_when_raw_text_is_asked_for():
    row = {"chosen": "\n\nHuman: one\n\nAssistant: two", "rejected": "\n\nHuman: one\n\nAssistant: three"}
    for data in (pairs(row, text_prompts="raw"), pairs(row, chat=RAW)):
        assert texts(data.pairs[0]) == ("\n\nHuman: one\n\nAssistant:", " two<|im_end|>", " three<|im_end|>")


def test_a_system_column_is_the_system_message_of_both_sides():
    row = {"system": "kind", "chosen": [user("one"), answer("two")], "rejected": [user("one"), answer("three")]}
    assert texts(pairs(row).pairs[0])[0].startswith("<|im_start|>system\nkind<|im_end|>\n<|im_start|>user\none")


def test_tools_are_told_in_the_prompt_of_both_sides():
    tools = [{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}]
    pair = pairs({"tools": tools, "prompt": "one", "chosen": "two", "rejected": "three"}).pairs[0]
    assert "add" in texts(pair)[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("b")]}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "the rejected answer is empty"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "the chosen answer is empty"),
        ({"prompt": [user("a")], "chosen": [], "rejected": [answer("b")]}, "the chosen answer is empty"),
        ({"prompt": [user("a")], "chosen": [answer(" ")], "rejected": [answer("b")]}, "an assistant turn is empty"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("b")]}, "no common prompt"),
        ({"chosen": [user("x"), user("a"), answer("b")], "rejected": [user("x"), user("c"), answer("b")]}, "differ in a user message"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("b"), user("c"), answer("d")]}, "chosen answer is empty"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c"), user("d")]}, "ends with a user message"),
        ({"chosen": [answer("b")], "rejected": [answer("c")]}, "the pair has no prompt"),
        ({"chosen": "abc", "rejected": "xyz"}, "no common prompt"),
        ({"chosen": "Say it: a", "rejected": "Say it: a b"}, "one side starts with all of the other"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "margin must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.nan}, "margin must be a finite number"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "chosen answer is int"),
    ],
)  # fmt: skip
def test_a_pair_that_teaches_nothing_is_a_rejected_row(row, reason):
    """trl#6472: an empty side is an error that names its row."""
    good = SHAPES["text beside a prompt"]
    with pytest.raises(DataError, match=reason) as error:
        pairs(good, row)
    assert error.value.where == "rows:2"
    assert pairs(good, row, max_bad=1).report.dropped == {"rejected": 1}


def test_sides_that_the_template_prints_alike_are_a_rejected_row():
    trimming = ChatFormat(tiny_tokenizer(CHATML.replace("message['content']", "message['content'] | trim")))
    with pytest.raises(DataError, match="equal once the template has printed them"):
        pairs({"prompt": "a", "chosen": "b", "rejected": "b "}, chat=trimming)


def test_margins_come_along_and_need_not_stand_in_every_row():
    row = SHAPES["text beside a prompt"]
    assert [pair.margin for pair in pairs({**row, "margin": 0.5}, row, {**row, "margin": 0}).pairs] == [0.5, None, 0.0]


# ---- over-long pairs


LONG = {"prompt": "one", "chosen": "a" * 50, "rejected": "b"}
START = len(CHAT.prompt_ids([Message("user", "one")]))


def test_a_pair_goes_whole_when_one_side_is_too_long():
    data = pairs(LONG, SHAPES["text beside a prompt"], max_length=START + 10)
    assert [pair.name for pair in data.pairs] == ["rows:2"]
    assert data.report.dropped == {"too_long": 1}
    assert data.report.cut == 0


def test_a_cut_side_has_no_end_token_and_the_other_is_whole():
    """trl#3382, trl#6548: each side is cut before any padding, and never to nothing."""
    data = pairs(LONG, max_length=START + 10, overlong="cut")
    pair = data.pairs[0]
    assert texts(pair) == (PROMPT, "a" * 10, "b<|im_end|>")
    assert len(pair.chosen.scored) == 10
    assert data.report.cut == 1


def test_a_prompt_that_leaves_no_room_for_an_answer_is_a_counted_drop():
    """trl#5826."""
    data = pairs({**LONG, "prompt": "q" * 100}, SHAPES["text beside a prompt"], max_length=START + 10, overlong="cut")
    assert data.report.dropped == {"too_long": 1}
    assert data.report.cut == 0
    with pytest.raises(DataError, match=rf"no completion token inside max_length={START}; the shortest needs {START + 1}"):
        pairs(LONG, max_length=START, overlong="cut")


def test_sides_that_are_equal_once_cut_are_dropped_and_counted():
    row = {"prompt": "one", "chosen": "same start, good", "rejected": "same start, bad"}
    data = pairs(row, SHAPES["text beside a prompt"], max_length=START + 8, overlong="cut")
    assert data.report.dropped == {"equal once cut": 1}
    assert [pair.name for pair in data.pairs] == ["rows:2"]
    assert data.report.cut == 0


def test_an_over_long_pair_can_be_an_error_with_its_row():
    with pytest.raises(DataError, match="max_length is") as error:
        pairs(SHAPES["text beside a prompt"], LONG, max_length=START + 10, overlong="error")
    assert error.value.where == "rows:2"


# ---- single answers with a label


def labelled(*rows, **options):
    return prepare_unpaired(rows_from(rows, max_bad=options.pop("max_bad", 0)), CHAT, max_length=1024, **options)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one", "completion": "two", "label": False},
        {"prompt": [user("one")], "completion": [answer("two")], "label": 0},
        {"messages": [user("one"), answer("two")], "kto_tag": False},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}], "label": False},
        {"instruction": "one", "completion": "two", "label": False},
    ],
)
def test_labelled_answers_are_read_from_every_shape(row):
    item = labelled(row).answers[0]
    assert (TOKENIZER.decode(list(item.prompt_ids)), TOKENIZER.decode(list(item.answer.token_ids))) == (PROMPT, "two<|im_end|>")
    assert item.label is False
    assert labelled({**row, "label": True} if "label" in row else {**row, "kto_tag": True}).answers[0].label is True


def test_the_text_false_is_no_label():
    """Every text that is not empty is true in Python."""
    good = {"prompt": "one", "completion": "two", "label": True}
    with pytest.raises(DataError, match="label is the text 'false'") as error:
        labelled(good, {**good, "label": "false"})
    assert error.value.where == "rows:2"


def test_pairs_and_labelled_answers_are_never_mixed():
    pair, single = SHAPES["text beside a prompt"], {"prompt": "one", "completion": "two", "label": True}
    with pytest.raises(DataError, match="expected preference rows, and these are unpaired rows"):
        pairs(single)
    with pytest.raises(DataError, match="expected unpaired rows, and these are preference rows"):
        labelled(pair)
    with pytest.raises(DataError, match="expected preference rows") as error:
        prepare_preferences(mix([rows_from([pair], name="a"), rows_from([single], name="b")]), CHAT, max_length=99)
    assert error.value.where == "b"
    with pytest.raises(DataError, match="dpo needs preference or unpaired rows, and these are prompt rows"):
        pairs({"prompt": "one"})
