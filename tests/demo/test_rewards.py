import pytest

from postgrad.demo.rewards import correctness, malformed, query, structure
from postgrad.rewards.base import call_form, declaration_of, view_of
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult

LEFT, RIGHT, ANSWER = 123, 45, "168"


def episode(*calls, result="168", error="", answer="168", stop=StopReason.END, raw=""):
    """One turn with `calls` (expressions, or whole arguments), one tool message per call, then the answer (None = no last turn)."""
    made = tuple(ToolCall("calculator", {"expression": call} if isinstance(call, str) else call) for call in calls)
    messages = []
    if made:
        messages += [Message("assistant", "", tool_calls=made), *(Message("tool", result) for _ in made)]
    if answer is not None:
        messages.append(Message("assistant", answer))
    segments = (Segment(Source.PROMPT, (1,)), Segment(Source.MODEL, (2,), (-0.1,)))
    results = tuple(ToolResult(call, result, error) for call in made)
    return view_of(Prompt("r", (Message("user", "q"),)), Rollout(segments, tuple(messages), stop, tool_results=results, raw_text=raw))


def scores(view):
    return (structure(view), query(view, LEFT, RIGHT), correctness(view, LEFT, RIGHT, ANSWER), malformed(view))


TRUTH = {
    "perfect": (episode("123 + 45"), (1, 1, 1, 0)),
    "perfect sentence": (episode("123+45", answer="The answer is 168."), (1, 1, 1, 0)),
    "numbers swapped": (episode("45 + 123"), (1, 1, 1, 0)),
    "wrong operator": (episode("123 * 45", result="5535", answer="5535"), (1, 1, 0, 0)),
    "one number copied wrong": (episode("123 + 46", result="169", answer="169"), (1, 0, 0, 0)),
    "result copied wrong": (episode("123 + 45", answer="186"), (1, 1, 0, 0)),
    "no call, right": (episode(), (0, 0, 1, 0)),
    "no call, nothing said": (episode(answer=""), (0, 0, 0, 0)),
    "call without an answer": (episode("123 + 45", answer=None), (0, 1, 0, 0)),
    "call with an empty answer": (episode("123 + 45", answer=" "), (0, 1, 0, 0)),
    # ways to be paid for less
    "one number only": (episode("123", answer="123"), (1, 0, 0, 0)),
    "both numbers, no operator": (episode("123 45", error="raised"), (1, 0, 1, -1)),
    "one number twice": (episode("123 + 123", answer="246"), (1, 0, 0, 0)),
    "power of both": (episode("123 ** 45", error="raised"), (1, 0, 1, -1)),
    "both numbers and more": (episode("123 + 45 + 0"), (1, 0, 1, 0)),
    "both numbers in a list": (episode("123 + 45, 123 * 45", error="raised"), (1, 0, 1, -1)),
    "answer inside the call": (episode("168"), (1, 0, 1, 0)),
    "two calls": (episode("123 + 45", "123 * 45"), (0, 0, 1, 0)),
    "other argument": (episode({"query": "123 + 45"}, error="arguments"), (1, 0, 1, -1)),
    "argument and another": (episode({"expression": "123 + 45", "note": "x"}, error="arguments"), (1, 0, 1, -1)),
    "number as expression": (episode({"expression": 12345}, error="arguments"), (1, 0, 1, -1)),
    "several answers": (episode("123 + 45", answer="168 or 5535"), (1, 1, 0, 0)),
    "several answers, right one last": (episode("123 + 45", answer="78 5535 168"), (1, 1, 0, 0)),
    "right answer, then another": (episode("123 + 45", answer="168, no, 169"), (1, 1, 0, 0)),
    "question repeated": (episode("123 + 45", answer="123 + 45 = 168"), (1, 1, 1, 0)),
    "question repeated without an answer": (episode("123 + 45", answer="123 + 45"), (1, 1, 0, 0)),
    "thousands": (episode("123 + 45", answer="1,168"), (1, 1, 0, 0)),
    "digits around the answer": (episode("123 + 45", answer="11680"), (1, 1, 0, 0)),
    "decimals after the answer": (episode("123 + 45", answer="168.5"), (1, 1, 0, 0)),
    "cut in the answer": (episode("123 + 45", answer="168", stop=StopReason.TURN_TOKENS), (0, 1, 1, 0)),
    "cut inside the call": (episode(answer='<tool_call>{"name"', stop=StopReason.TURN_TOKENS, raw='<tool_call>{"name"'), (0, 0, 0, -1)),
}


@pytest.mark.parametrize(("view", "expected"), TRUTH.values(), ids=TRUTH.keys())
def test_truth_table(view, expected):
    assert scores(view) == expected


def test_malformed_call_is_punished_though_nothing_was_called():
    broken = ToolResult(None, "error: not JSON", error="malformed")
    segments = (Segment(Source.PROMPT, (1,)), Segment(Source.MODEL, (2,), (-0.1,)))
    messages = (Message("assistant", ""), Message("tool", "error: not JSON"), Message("assistant", "168"))
    view = view_of(
        Prompt("r", ()), Rollout(segments, messages, StopReason.END, tool_results=(broken,), raw_text="<tool_call>{</tool_call>")
    )
    assert scores(view) == (0, 0, 1, -1)


def test_large_answers_may_be_written_with_commas():
    assert correctness(episode(answer="998,001"), 999, 999, "998001") == 1.0
    assert correctness(episode(answer="The answer is 998,001."), 999, 999, "998001") == 1.0


def test_each_reward_looks_at_a_layer_of_its_own():
    declared = [declaration_of(function) for function in (structure, query, correctness, malformed)]
    assert len({one.scope for one in declared}) == 4
    assert [one.role for one in declared] == ["shaping", "shaping", "outcome", "shaping"]
    assert all(one.claim for one in declared)


def test_no_wrong_answer_outranks_a_right_one_of_the_same_shape():
    weights = (0.2, 0.3, 1.0, 0.5)
    totals = {name: sum(w * s for w, s in zip(weights, expected, strict=True)) for name, (_, expected) in TRUTH.items()}
    right = [total for name, total in totals.items() if TRUTH[name][1][2]]
    wrong = [total for name, total in totals.items() if not TRUTH[name][1][2]]
    assert max(totals, key=totals.get) == "perfect"
    assert max(wrong) <= min(right)


def test_rewards_read_only_columns_that_the_data_has():
    columns = {"operator", "left", "right", "answer", "template"}
    assert all(set(call_form(function).required) <= columns for function in (structure, query, correctness, malformed))
