"""A typed function becomes a schema; arguments are validated against that very schema."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from postgrad.errors import RecipeError
from postgrad.rollout.docstring import parse_docstring
from postgrad.rollout.signature import ArgumentError, read_signature


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: int
    y: float = 0.0


class Options(TypedDict):
    limit: int


class Query(BaseModel):
    text: str
    tags: list[str] = []


@dataclass
class Tree:
    value: int
    children: list[Tree]


def schema(function: Any) -> Any:
    return read_signature(function, name=function.__name__, where="tools.py:f")[0]


def validate(function: Any, arguments: Any) -> Any:
    return read_signature(function, name=function.__name__, where="tools.py:f")[1].validate(arguments)


def refusal(function: Any, arguments: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        validate(function, arguments)
    return str(caught.value)


def test_the_schema_of_plain_types_is_short_and_complete() -> None:
    def search(query: str, limit: int = 5, exact: Optional[bool] = None) -> str:  # noqa: UP045
        """Search the index.

        Args:
            query: what to look for,
                in words
            limit (int): at most so many
        """
        return query

    spec = schema(search)
    assert (spec.name, spec.description) == ("search", "Search the index.")
    assert spec.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "what to look for, in words"},
            "limit": {"type": "integer", "default": 5, "description": "at most so many"},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
        },
    }


def test_rich_types_are_written_out_without_references() -> None:
    def f(unit: Unit, point: Point, options: Options, query: Query, kind: Literal["a", "b"], value: Union[int, list[str]]) -> None:  # noqa: UP007
        """Do."""

    properties = schema(f).parameters["properties"]
    assert properties["unit"] == {"enum": ["m", "ft"], "type": "string"}
    assert properties["kind"] == {"enum": ["a", "b"], "type": "string"}
    assert properties["point"]["properties"]["x"] == {"type": "integer"}
    assert properties["options"]["required"] == ["limit"]
    assert properties["value"]["anyOf"] == [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]
    assert "$ref" not in json.dumps(properties)


def test_a_parameter_called_title_keeps_its_place() -> None:
    def f(title: str, default: int = 1) -> None:
        """Do."""

    assert list(schema(f).parameters["properties"]) == ["title", "default"]


def test_a_type_that_contains_itself_keeps_a_reference_that_resolves() -> None:
    def f(tree: Tree) -> None:
        """Do."""

    parameters = schema(f).parameters
    jsonschema.Draft202012Validator(parameters).validate({"tree": {"value": 1, "children": [{"value": 2, "children": []}]}})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(parameters).validate({"tree": {"value": 1, "children": [{"value": "x", "children": []}]}})


def test_annotated_text_and_pydantic_fields_describe_parameters() -> None:
    def f(a: Annotated[int, "how many"], b: Annotated[int, Field(description="how far", ge=0)]) -> None:
        """Do."""

    properties = schema(f).parameters["properties"]
    assert properties["a"] == {"type": "integer", "description": "how many"}
    assert properties["b"] == {"type": "integer", "description": "how far", "minimum": 0}
    assert "greater than or equal to 0" in refusal(f, {"a": 1, "b": -1})


def test_valid_arguments_arrive_as_python_values_and_defaults_stay_the_functions_own() -> None:
    def f(unit: Unit, point: Point, query: Query, json: str = "x", copy: int = 3) -> None:
        """Do."""

    given_arguments = {"unit": "ft", "point": {"x": 1}, "query": {"text": "q"}, "json": "y"}
    assert validate(f, given_arguments) == {"unit": Unit.FOOT, "point": Point(1), "query": Query(text="q"), "json": "y"}


@pytest.mark.parametrize("value", ["3", 3.0, True, None, [3]])
def test_nothing_is_repaired_into_an_integer(value: Any) -> None:
    def f(n: int) -> None:
        """Do."""

    assert "'n'" in refusal(f, {"n": value})
    assert "integer" in refusal(f, {"n": value})


def test_an_integer_is_a_number_and_a_number_is_no_boolean() -> None:
    def f(x: float, flag: bool) -> None:
        """Do."""

    assert validate(f, {"x": 3, "flag": True}) == {"x": 3.0, "flag": True}
    assert "'flag' is 1" in refusal(f, {"x": 3, "flag": 1})


def test_missing_extra_and_wrong_arguments_are_each_named() -> None:
    def f(a: int, b: str) -> None:
        """Do."""

    text = refusal(f, {"b": 7, "z": 1})
    assert "missing required argument 'a'" in text
    assert "argument 'b' is 7: input should be a valid string" in text
    assert "unexpected argument 'z' (it takes: a, b)" in text


def test_the_path_of_a_nested_fault_has_no_union_branches() -> None:
    def f(items: list[Point], choice: Union[int, list[Point]] = 0) -> None:  # noqa: UP007
        """Do."""

    assert "'items[1].x'" in refusal(f, {"items": [{"x": 1}, {"x": "a"}]})
    assert "missing required argument 'items[0].x'" in refusal(f, {"items": [{}]})
    text = refusal(f, {"items": [], "choice": {"x": 1}})
    assert "argument 'choice' is {\"x\": 1}" in text
    assert "valid integer or input should be a valid list" in text.replace("array", "list")


def test_many_faults_are_cut_to_a_few() -> None:
    def f(items: list[int]) -> None:
        """Do."""

    text = refusal(f, {"items": ["a"] * 50})
    assert text.endswith("and 45 more")
    assert len(refusal(f, {"items": ["a" * 10_000]})) < 200


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    def f(x: Any) -> None:
        """Do."""

    assert "not valid JSON" in refusal(f, {"x": value})


def test_missing_types_and_docstrings_say_what_to_add() -> None:
    def no_type(a, b: int) -> None:  # type: ignore[no-untyped-def]
        """Do."""

    def no_docstring(a: int) -> None: ...

    with pytest.raises(RecipeError, match="parameter `a` has no type") as caught:
        schema(no_type)
    assert "`a: str`" in str(caught.value.hint)
    with pytest.raises(RecipeError, match="has no docstring") as caught:
        schema(no_docstring)
    assert caught.value.where == "tools.py:f"
    assert "one sentence" in str(caught.value.hint)


def test_parameters_that_have_no_name_for_the_model_are_refused() -> None:
    def star(*values: int) -> None:
        """Do."""

    def double_star(**values: int) -> None:
        """Do."""

    def positional(a: int, /) -> None:
        """Do."""

    for function in (star, double_star, positional):
        with pytest.raises(RecipeError, match="cannot be passed by name"):
            schema(function)


def test_a_type_that_json_cannot_carry_is_refused() -> None:
    class Handle:
        pass

    def f(handle: Handle) -> None:
        """Do."""

    f.__annotations__["handle"] = Handle
    with pytest.raises(RecipeError, match="a type without a JSON Schema"):
        schema(f)


def test_an_unknown_type_name_is_the_users_error() -> None:
    def f(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Do."""

    with pytest.raises(RecipeError, match="Nowhere"):
        schema(f)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def shown(a: int, b: list[str] | None = None, c: Literal["x", "y"] | float = "x") -> None:
    """Do."""


SHOWN = read_signature(shown, name="shown", where="here")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "z"]), json_values))
def test_validation_agrees_with_the_schema_that_the_model_was_shown(arguments: dict[str, Any]) -> None:
    spec, signature = SHOWN
    schema_accepts = jsonschema.Draft202012Validator(spec.parameters).is_valid(arguments)
    integral = isinstance(arguments.get("a"), float) and arguments["a"].is_integer()  # JSON Schema calls 3.0 an integer, we do not
    try:
        signature.validate(arguments)
        accepts = True
    except ArgumentError:
        accepts = False
    assert accepts == (schema_accepts and not integral)


def test_numpy_and_rest_docstrings_are_read() -> None:
    numpy = parse_docstring(
        """Add two.

        It really adds.

        Parameters
        ----------
        a : int
            the first
            number
        b
            the second

        Returns
        -------
        c : int
            the sum
        """
    )
    assert numpy.summary == "Add two.\n\nIt really adds."
    assert numpy.parameters == {"a": "the first number", "b": "the second"}
    rest = parse_docstring("Add two.\n\n:param int a: the first\n    number\n:param b: the second\n:type b: int\n:returns: the sum")
    assert rest.summary == "Add two."
    assert rest.parameters == {"a": "the first number", "b": "the second"}


def test_text_that_only_looks_like_a_section_stays_text() -> None:
    parsed = parse_docstring("Args are fine here.\n\nNote: this stays.\n\nArgs:\n    a: one: two\n\nMore text.")
    assert parsed.summary == "Args are fine here.\n\nNote: this stays.\n\nMore text."
    assert parsed.parameters == {"a": "one: two"}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text())
def test_no_docstring_makes_the_reader_fail(text: str) -> None:
    parse_docstring(text)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("math.nothing", "cannot be read: NameError|a type in its signature is unknown"),
        ("int |", "a type in its signature cannot be read: SyntaxError"),
        ("int | 'text'", "a type in its signature cannot be read: TypeError"),
        (Annotated[str, Field(pattern="(")], "a type that cannot be: SchemaError"),
        (Literal[()], "a type that cannot be: "),
    ],
)
def test_a_type_that_cannot_be_is_told_and_is_no_bug(annotation: Any, message: str) -> None:
    def f(x: int) -> int:
        """Do."""
        return x

    f.__annotations__["x"] = annotation
    with pytest.raises(RecipeError, match=message):
        read_signature(f, name="f", where="tools.py:f")


def test_an_async_generator_is_refused() -> None:
    async def f(x: int) -> Any:
        """Do."""
        yield x

    with pytest.raises(RecipeError, match="async generator"):
        read_signature(f, name="f", where="tools.py:f")
