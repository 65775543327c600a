import json

import pytest

from postgrad.errors import RecipeError
from postgrad.rewards.base import view_of
from postgrad.rewards.library import json_schema
from postgrad.rewards.load import load_rewards
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason


def view(text, *, prompt="q", reasoning=""):
    segments = (Segment(Source.PROMPT, (0,)), Segment(Source.MODEL, (1,), (-0.1,)))
    messages = (Message("assistant", text, reasoning=reasoning),)
    return view_of(Prompt("r", (Message("user", prompt),)), Rollout(segments, messages, StopReason.END, text=text))


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
GOOD = '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (GOOD, 1.0),
        (f"  {GOOD}\n", 1.0),
        (f"```json\n{GOOD}\n```", 1.0),
        (f"```\n{GOOD}\n```\n", 1.0),
        (f"<think>hm</think>{GOOD}", 1.0),
        ('{"name": "Ada", "age": "36"}', 0.75),
        ('{"name": "Ada"}', 0.5),
        ("{}", 0.5),
        ("[]", 0.25),
        ("3", 0.25),
        ("", 0.0),
        ("no", 0.0),
        (f"Here it is: {GOOD}", 0.0),
        (f"{GOOD} {GOOD}", 0.0),
        (f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", 0.0),
        ('{"name": "Ada", "age": 36, "age": 37}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ("{'name': 'Ada', 'age': 36}", 0.0),
        ("[" * 100_000, 0.0),
        (f"<think>{GOOD}</think>", 0.0),
    ],
)
def test_levels(text, level):
    assert json_schema(view(text), SCHEMA) == level
    assert json_schema(view(text), json.dumps(SCHEMA)) == level


@pytest.mark.parametrize("schema", [None, "", 3, {}, "not json", {"type": "nonsense"}, {"$ref": "http://localhost:1/x.json"}])
def test_no_schema_or_one_that_points_elsewhere_abstains_and_fetches_nothing(schema):
    assert json_schema(view(GOOD), schema) is None


def test_any_of_several_types_is_right():
    assert json_schema(view("[1]"), {"type": ["array", "null"], "items": {"type": "string"}}) == 0.5
    assert json_schema(view("3"), {"type": ["array", "null"]}) == 0.25


def test_a_schema_bound_in_the_recipe_is_checked_with_it():
    with pytest.raises(RecipeError, match="JSON Schema"):
        load_rewards([{"use": "json_schema", "args": {"schema": {"type": "nonsense"}}}], ".")
