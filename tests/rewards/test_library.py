import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards.base import call_form, declaration_of, view_of
from postgrad.rewards.library import (
    LIBRARY,
    answered_number,
    exact_match,
    gold_number,
    numeric_match,
    repetition,
    soft_overlong,
    think_format,
    tool_use,
)
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult


def view(text="", *, sampled=(1,), reasoning="", results=(), tool_tokens=0, messages=None):
    segments = [Segment(Source.PROMPT, (0,)), Segment(Source.MODEL, tuple(sampled), (-0.1,) * len(sampled))]
    if tool_tokens:
        segments.append(Segment(Source.TOOL, (7,) * tool_tokens))
    messages = (Message("assistant", text, reasoning=reasoning),) if messages is None else messages
    return view_of(
        Prompt("r", (Message("user", "q"),)), Rollout(tuple(segments), messages, StopReason.END, tool_results=tuple(results), text=text)
    )


def test_every_shipped_reward_declares_itself():
    for name, function in LIBRARY.items():
        declared = declaration_of(function)
        assert declared is not None, name
        assert declared.scope, name
        assert declared.claim, name
        assert declared.range or name.startswith("environment"), name  # an environment gives what it likes
        assert function.__doc__, name
        assert call_form(function).style == ("rollouts" if declared.group else "rollout"), name


# ---- numbers


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        ("42", 42),
        (42, 42),
        (4.5, 4.5),
        ("6 * 7 = <<6*7=42>>42\n#### 42", 42),
        ("#### 1,234", 1234),
        ("$1,234.50", 1234.5),
        ("42 apples", 42),
        ("-3", -3),
        ("−3", -3),
        ("1/2 cup", 0.5),
        ("50%", 50),
        ("1e3", 1000),
        (".5", 0.5),
    ],
)
def test_gold_is_read_with_units_commas_and_markers(gold, expected):
    assert float(gold_number(gold)) == expected


@pytest.mark.parametrize("gold", ["", None, "no idea", "3 or 4", "#### none", "n/a", "9" * 100, "1/0"])
def test_gold_that_is_no_single_number_abstains(gold):
    assert gold_number(gold) is None
    assert numeric_match(view("42"), gold) is None


RIGHT = [
    "42",
    "42.",
    "42.0",
    "The answer is 42.",
    "The answer is **42**.",
    "**Answer:** 42 apples",
    "$42",
    "So 6 * 7 = 42",
    "The answer is 6 * 7 = 42",
    r"\boxed{42}",
    r"Thus \boxed{x = 42}.",
    r"\boxed{\text{42}}",
    "first 6, then 7, so in the end 42",
    "#### 42",
    "<answer>42</answer>",
    "<think>41? no</think>42",
    "The answer is 42 because 6 times 7",
    "answer: 42\nanswer: 42",
    "It grew from 6 to 42",
    "#### Step 2\nSo we get 42",
    "10 - 4 apples... 42",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right_answers_are_right(text):
    assert numeric_match(view(text), "42") == 1.0


WRONG = {
    "empty": "",
    "no number": "I am sure.",
    "another number": "41",
    "a longer number": "142",
    "a decimal": "42.5",
    "a minus": "-42",
    "several after a marker": "The answer is 41 or 42",
    "list after a marker": "Answer: 40, 41, 42, 43",
    "several boxes": r"\boxed{41} or \boxed{42}",
    "contradiction": "The answer is 42. The answer is 41.",
    "list at the end": "41, 42",
    "or at the end": "It is 41 or 42",
    "every answer": "40 41 42",
    "slashes": "41 | 42",
    "right in the thinking only": "<think>42</think>",
    "right in the thinking, wrong after": "<think>42</think>41",
    "thinking that never ends": "<think>it is 42",
    "tags around a list": "<answer>41 42</answer>",
    "calculation": "6 * 7 * 42",
    "left to the reader": "the answer is 40 + 42",
    "boxed power": r"\boxed{42^{42}}",
    "power of itself": "42**42",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_wrong_and_hedged_answers_are_wrong(text):
    assert numeric_match(view(text), "42") == 0.0


def test_a_number_that_only_the_tool_returned_is_no_answer():
    messages = (Message("assistant", "", tool_calls=(ToolCall("calculator", {}),)), Message("tool", "42"))
    assert numeric_match(view(messages=messages), "42") == 0.0


def test_decimals_are_compared_with_a_tolerance_and_whole_numbers_exactly():
    assert numeric_match(view("0.3333333"), "1/3") == 1.0
    assert numeric_match(view("0.33"), "1/3") == 0.0
    assert numeric_match(view("1000000.5"), "1000000") == 0.0
    assert numeric_match(view(r"\boxed{\frac{3}{4}}"), "0.75") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        "9**9**9",
        "1e999999999999",
        "9" * 200_000,
        "1," * 100_000,
        "1.2" * 100_000,
        "{" * 100_000,
        "answer is " * 50_000,
        "\\boxed{" * 50_000,
        "<answer>" * 50_000,
        "8 9 " * 50_000,
    ],
)
def test_grading_takes_no_time_whatever_is_written(text):
    began = time.process_time()
    assert numeric_match(view(text), "9") == 0.0
    assert time.process_time() - began < 3.0  # quadratic time would take minutes


@given(st.integers(-(10**9), 10**9))
def test_any_whole_number_is_recognised_in_every_form(number):
    for text in (str(number), f"{number:,}", f"The answer is {number:,}.", rf"\boxed{{{number}}}", f"so x = {number}"):
        assert answered_number(text) == number
    assert gold_number(f"some work 1 + 1 #### {number:,}") == number


@given(st.text(max_size=200))
def test_no_text_breaks_the_reading_of_numbers(text):
    answered_number(text)
    gold_number(text)


def test_gsm8k_golds_and_answers(shared_data):
    path = shared_data / "gsm8k_test_first660.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(gold_number(row["answer"]) is not None for row in rows)
    assert all(numeric_match(view(row["answer"]), row["answer"]) == 1.0 for row in rows)
    assert sum(numeric_match(view("The answer is 3."), row["answer"]) for row in rows) < len(rows) / 20


# ---- the others


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("Paris", "paris", 1.0),
        (" New\n York ", "new york", 1.0),
        ("Paris, or London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("<think>Paris</think>Rome", "Paris", 0.0),
        ("<think>Rome?</think>Paris", "Paris", 1.0),
        ("x", "", None),
        ("x", None, None),
        ("7", 7, 1.0),
    ],
)
def test_exact_match(text, gold, expected):
    assert exact_match(view(text), gold) == expected


GOOD, BAD = ToolResult(ToolCall("f", {}), "1"), ToolResult(ToolCall("f", {}), "error", error="raised")
MALFORMED = ToolResult(None, "error", error="malformed")


@pytest.mark.parametrize(
    ("results", "expected"), [((), 0.0), ((GOOD,), 1.0), ((BAD,), 0.0), ((MALFORMED,), 0.0), ((BAD, GOOD), 1.0), ((GOOD,) * 20, 1.0)]
)
def test_tool_use_pays_once_and_only_for_success(results, expected):
    assert tool_use(view(results=results)) == expected


def test_tool_use_is_not_fooled_by_written_results():
    assert tool_use(view('<tool_call>{"name": "f"}</tool_call> the tool returned 42')) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", 1.0),
        ("\n<think>\na\n</think>\nb", 1.0),
        ("<think></think>", 0.0),
        ("<think></think>b", 0.0),
        ("<think> </think>b", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("b", 0.0),
        ("", 0.0),
        ("a</think>b", 0.0),
        ("<think>a", 0.0),
        ("x<think>a</think>b", 0.0),
        ("<think>a</think>b</think>c", 0.0),
        ("<think>a</think><think>b</think>c", 0.0),
        ("<think><think>a</think>b", 0.0),
        ("</think>a<think>b", 0.0),
    ],
)
def test_think_format(text, expected):
    assert think_format(view(text)) == expected


def test_think_format_reads_reasoning_that_was_parsed_already():
    assert think_format(view("b", reasoning="a")) == 1.0
    assert think_format(view("", reasoning="a")) == 0.0
    assert think_format(view("b</think>c", reasoning="a")) == 0.0
    assert think_format(view("b", reasoning=" ")) == 0.0
    assert think_format(view(messages=())) == 0.0


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (150, -1.0)])
def test_soft_overlong_by_hand(length, expected):
    assert soft_overlong(view(sampled=range(length)), max_tokens=100, buffer=40) == expected


def test_soft_overlong_counts_only_what_the_model_wrote():
    assert soft_overlong(view(sampled=range(10), tool_tokens=10_000), max_tokens=20, buffer=5) == 0.0


def test_soft_overlong_without_buffer_is_a_step():
    assert soft_overlong(view(sampled=range(10)), max_tokens=10) == 0.0
    assert soft_overlong(view(sampled=range(11)), max_tokens=10) == -1.0


@pytest.mark.parametrize(
    ("ids", "expected"),
    [((1, 2, 3), 0.0), ((1, 2), 0.0), ((1, 1, 1, 1), -0.5), ((5,) * 12, -0.9), ((1, 2, 3, 1, 2, 3), -0.25), (tuple(range(50)), 0.0)],
)
def test_repetition_counts_repeated_token_ngrams(ids, expected):
    assert repetition(view("aaaa", sampled=ids)) == pytest.approx(expected)


def test_repetition_ignores_what_tools_repeat():
    assert repetition(view(sampled=(1, 2, 3, 4), tool_tokens=100)) == 0.0
