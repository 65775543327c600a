"""Gold calls in every form, and which values fit them."""

from __future__ import annotations

import json

import pytest

from postgrad.gold import gold_calls, same_json
from postgrad.types import ToolCall

GOLD = [{"name": "add", "arguments": {"a": 1, "b": 2}}]


@pytest.mark.parametrize(
    "written",
    [
        GOLD,
        json.dumps(GOLD),
        [{"function": GOLD[0]}],
        [{"name": "add", "arguments": '{"a": 1, "b": 2}'}],
        [{"type": "function", "function": GOLD[0]}],
        [{"add": {"a": [1], "b": [2, 2.0], "c": ["", 5]}}],
    ],
)
def test_every_form_has_the_same_example(written):
    found = gold_calls(written)
    assert found is not None
    assert [call.example() for call in found] == [ToolCall("add", {"a": 1, "b": 2})]
    assert found[0].required == {"a", "b"}


@pytest.mark.parametrize(
    "written",
    [None, "", "x", 3, [3], [{"arguments": {}}], [{"name": 3}], [{"name": "f", "arguments": [1]}], {"name": "f"}, [{"f": {"a": 1}}],
     [{"f": {"a": []}}], '{"a": 1, "a": 2}', [{"f": {}, "g": {}}]],
)  # fmt: skip
def test_what_means_no_calls(written):
    assert gold_calls(written) is None


@pytest.mark.parametrize(
    ("accepted", "value", "fits"),
    [
        ([10], 10, True),
        ([10], 10.0, True),
        ([10], "10", False),
        ([1], True, False),
        ([True], True, True),
        ([True], 1, False),
        (["units", ""], "Units", True),
        (["April 1, 2024"], "april 1 2024", True),
        (["it's"], 'it"s', True),
        (["a"], "b", False),
        ([[1, 2]], [1, 2], True),
        ([[1, 2], [2, 1]], [2, 1], True),
        ([[1, 2]], [1, 2, 3], False),
        ([["New York", "Rome"]], ["new york", "ROME"], True),
        ([[[1], [2]]], [[1], [2]], True),
        ([{"width": [20], "height": [12, 13]}], {"width": 20, "height": 13}, True),
        ([{"width": [20], "height": [12]}], {"width": 20}, False),
        ([{"width": [20], "height": [12, ""]}], {"width": 20}, True),
        ([{"width": [20]}], {"width": 20, "depth": 1}, False),
        ([{"width": [20]}], 20, False),
        ([[{"k": ["x"]}, {"k": ["y"]}]], [{"k": "X"}, {"k": "y"}], True),
        ([[{"k": ["x"]}]], [{"k": "y"}], False),
        ([""], "", True),
        (["", 3], "", False),
    ],
)
def test_values_fit_as_bfcls_checker_says(accepted, value, fits):
    found = gold_calls([{"f": {"a": accepted}}])
    assert found is not None
    assert found[0].arguments["a"].fits(value) is fits


def test_an_example_is_right_by_its_own_gold():
    (call,) = gold_calls([{"f": {"a": ["", [1, {"k": ["x", ""], "m": [2]}]], "b": [{"k": ["v", "w"]}], "c": [[{"n": [1]}]]}}]) or []
    assert call.example() == ToolCall("f", {"b": {"k": "v"}, "c": [{"n": 1}]})
    assert all(call.arguments[name].fits(value) for name, value in call.example().arguments.items())


def test_every_row_of_bfcl_has_an_example_that_its_gold_accepts(shared_data):
    rows = [json.loads(line) for line in (shared_data / "bfcl_simple_python_answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 400
    for row in rows:
        (call,) = gold_calls(row["ground_truth"]) or []
        example = call.example()
        assert set(example.arguments) == call.required
        assert all(call.arguments[name].fits(value) for name, value in example.arguments.items())


def test_json_equality_keeps_truth_and_numbers_apart():
    assert same_json({"a": [1, 2.0]}, {"a": (1.0, 2)})
    assert not same_json({"a": 1}, {"a": True})
    assert not same_json({"a": 1}, {"b": 1})
    assert not same_json(1, "1")
