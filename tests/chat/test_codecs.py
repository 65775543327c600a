"""Reading tool calls out of sampled text: never raises, never takes half a call for a call, gives back what was written."""

from __future__ import annotations

import ast
import json
import keyword
import re
import time
import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from postgrad.chat.codecs import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_V11,
    PYTHONIC,
    STYLES,
    XML,
    CannotWrite,
    describe_tools,
)
from postgrad.types import MalformedCall, ToolCall, ToolSpec

every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)

MARKERS = sorted(
    {marker for style in STYLES.values() for marker in style.markers} | {"<|python_tag|>", "```", '{"name": "x", "parameters": {'}
)
TRICKY = [
    *MARKERS,
    '"',
    "'",
    "\\",
    "\n",
    '"""',
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    ",",
    ";",
    "é",
    "😀",
    "\u2028",
    " ",
    "\x00",
    "\r",
    "true",
    "None",
]
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.lists(st.sampled_from(TRICKY), max_size=5).map("".join)
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
json_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8)
NAMES = {
    "hermes": texts.filter(bool),
    "llama3": texts.filter(bool),
    "mistral": texts.filter(bool),
    "pythonic": st.from_regex(r"[a-z_é]\w{0,5}(\.[a-z_]\w{0,5})?", fullmatch=True)
    .map(lambda name: unicodedata.normalize("NFKC", name))
    .filter(lambda name: all(re.fullmatch(r"\w+", part) and part.isidentifier() for part in name.split(".")))
    .filter(lambda name: not any(map(keyword.iskeyword, name.split(".")))),
    "mistral_v11": st.from_regex(r"[\w.:/-]{1,10}", fullmatch=True),
    "deepseek_v3": st.from_regex(r"[\w.:/-]{1,10}", fullmatch=True),
    "deepseek_v31": st.from_regex(r"[\w.:/-]{1,10}", fullmatch=True),
    "xml": st.from_regex(r"[\w.:/-]{1,10}", fullmatch=True),
}
KEYS = {name: NAMES["pythonic"].filter(lambda name: "." not in name) if name == "pythonic" else texts for name in STYLES}


def spec(name: str, *parameters: str) -> ToolSpec:
    return ToolSpec(
        name, "", {"type": "object", "properties": {key: {"type": "string"} for key in parameters}, "required": list(parameters)}
    )


def typed_spec(call: ToolCall) -> ToolSpec:
    """A tool whose parameters are text where this call's are, and anything else otherwise."""
    properties = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in call.arguments.items()}
    return ToolSpec(call.name, "", {"type": "object", "properties": properties})


@every_style
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_a_style_writes_it_reads_back(style, data):
    """Several calls in a turn, text before them kept, nested values, quotes and markers inside strings."""
    one = st.tuples(NAMES[style.name], st.dictionaries(KEYS[style.name], json_values, max_size=3))
    pairs = data.draw(st.lists(one, min_size=1, max_size=3, unique_by=(lambda pair: pair[0]) if style.typed else None))
    content = data.draw(st.sampled_from(["", "I look it up.", "Ich schaue nach:\n\n- é [1] (2)", '{"answer": 3} is no call']))
    calls = tuple(ToolCall(name, values, id=f"call_{index}") for index, (name, values) in enumerate(pairs))
    try:
        text = style.write(content, calls)
    except CannotWrite:
        assume(style is not XML)
        raise
    found, read = style.read(text, [typed_spec(call) for call in calls])
    assert (found, read) == (content, calls)
    assert json.dumps([call.arguments for call in read], sort_keys=True) == json.dumps([call.arguments for call in calls], sort_keys=True)


@every_style
def test_text_after_the_calls_is_kept(style):
    calls = (ToolCall("add", {"a": 1}, id="call_0"), ToolCall("sub", {}, id="call_1"))
    assert style.read(style.write("Before.", calls) + "\nAfter.", ()) == ("Before.\nAfter.", calls)


@every_style
@settings(deadline=None)
@given(st.text(max_size=50))
def test_a_turn_without_calls_is_its_text(style, text):
    assert style.write(text, ()) == text
    content, calls = style.parse(text)
    if not calls:
        assert content == text


@every_style
@settings(max_examples=100, deadline=None)
@example(parts=["[" * 3000])
@example(parts=["[f(a=" + "-" * 5000 + "1)]"])
@example(parts=["[f(a=" + "(" * 150 + ")" * 150 + ")]"])
@example(parts=["[f(a=" + "9" * 5000 + ")]"])
@given(
    parts=st.lists(
        st.sampled_from(
            [
                *MARKERS, '{"name": "a", "arguments": {}}', '{"name": "a", "parameters": ', "{", "}", '"', "'", "x", "\n", "[", "]", "null",
                "[f(a=1)]", "[f(", "[f(a=", "g", "(", ")", ",", "=", "*", "\\", "\0", "function", "1e999", "\\ud800", "lambda: 0", "f'{x}'",
            ]
        )
    )
)  # fmt: skip
def test_no_text_makes_a_reader_raise(style, parts):
    content, calls = style.parse("".join(parts))
    assert isinstance(content, str)
    for call in calls:
        if isinstance(call, ToolCall):
            json.dumps(call.arguments, allow_nan=False).encode()
        else:
            assert isinstance(call, MalformedCall)
            assert call.error


BAD_ARGUMENTS = [("null", "null"), ("[1, 2]", "a list"), ("3", "a number"), ('"{\\"a\\": 1}"', "a string"), ("true", "a boolean")]
WRITTEN = {
    "hermes": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
    "llama3": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": %s}]',
    "mistral_v11": "[TOOL_CALLS]add[ARGS]%s",
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("arguments", "what"), BAD_ARGUMENTS)
def test_arguments_that_are_no_object_are_no_call(name, arguments, what):
    """Null, lists, numbers and JSON encoded twice are told to the model, not repaired (verifiers#960, nano-rlm#40, miles#2709)."""
    assert STYLES[name].parse(WRITTEN[name] % '{"a": 1}')[1] == (ToolCall("add", {"a": 1}, id="call_0"),)
    _, (call,) = STYLES[name].parse(WRITTEN[name] % arguments)
    assert isinstance(call, MalformedCall)
    assert f"must be a JSON object, not {what}" in call.error


@pytest.mark.parametrize("name", WRITTEN)
def test_broken_json_is_no_call_and_its_text_no_content(name):
    content, (call,) = STYLES[name].parse("Look.\n" + WRITTEN[name] % '{"a": }')
    assert isinstance(call, MalformedCall)
    assert "invalid JSON" in call.error
    assert content == "Look."


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        ("{'name': 'add'}", "invalid JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "invalid JSON"),
        ('{"name": "add", "arguments": [1, 2]}', '"arguments" must be a JSON object, not a list'),
        ('{"name": "add", "arguments": 3}', '"arguments" must be a JSON object, not a number'),
        ('{"name": "add", "arguments": null}', '"arguments" must be a JSON object, not null'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '"arguments" must be a JSON object, not a string'),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": "", "arguments": {}}', 'the call has no "name"'),
        ('{"name": 3, "arguments": {}}', '"name" must be a string'),
        ('{"name": "add"}', 'the call has no "arguments" object'),
        ("[]", "a call is a JSON object, not a list"),
        ("", "invalid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a JSON value"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "a", "arguments": {}} and more', "text follows the JSON object"),
    ],
)
def test_what_is_no_call_says_why(inside, error):
    _, (call,) = HERMES.parse(f"<tool_call>{inside}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert error in call.error


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add", "arguments": {}}', '<tool_call>{"name": "add", ', "<tool_call>"])
def test_a_call_that_is_not_closed_is_malformed(text):
    _, (call,) = HERMES.parse(text)
    assert isinstance(call, MalformedCall)
    assert "not closed" in call.error


def test_a_broken_call_does_not_spoil_the_next_one():
    content, calls = HERMES.parse('a <tool_call>{<tool_call>{"name": "add", "arguments": {}}</tool_call> b')
    assert content == "a\nb"
    assert [type(call) for call in calls] == [MalformedCall, ToolCall]
    assert calls[1].id == "call_1"


def test_a_closing_marker_inside_a_string_does_not_end_the_call():
    _, (call,) = HERMES.parse('<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>')
    assert call == ToolCall("say", {"text": "</tool_call>"}, id="call_0")


@settings(deadline=None)
@given(st.text(max_size=50).filter(lambda text: "<tool_call>" not in text))
def test_text_without_calls_is_content_unchanged(text):
    assert HERMES.parse(text) == (text, ())


class TestLlama3:
    def test_it_reads_bare_objects_and_leaves_other_json_alone(self):
        both = '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}'
        assert LLAMA3.parse(both)[1] == (ToolCall("add", {"a": 1}, id="call_0"), ToolCall("sub", {}, id="call_1"))
        assert LLAMA3.parse(both.replace("; ", "\n")) == LLAMA3.parse(both)
        assert LLAMA3.parse('<|python_tag|>{"name": "sub", "arguments": {}}') == ("", (ToolCall("sub", {}, id="call_0"),))
        assert LLAMA3.parse('{"answer": 3}') == ('{"answer": 3}', ())
        assert isinstance(LLAMA3.parse('{"name": "add", "parameters": {')[1][0], MalformedCall)

    def test_an_object_inside_a_line_or_another_object_is_content(self):
        inside = 'Write {"name": "add", "parameters": {}} to add.'
        nested = '{"calls": [\n  {"name": "add", "parameters": {}}\n]}'
        assert LLAMA3.parse(inside) == (inside, ())
        assert LLAMA3.parse(nested) == (nested, ())


class TestMistral:
    def test_it_reads_the_list_after_its_marker(self):
        text = 'Look. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "sub"}]'
        content, calls = MISTRAL.parse(text)
        assert content == "Look."
        assert calls[0] == ToolCall("add", {"a": 1}, id="call_0")
        assert isinstance(calls[1], MalformedCall)
        assert isinstance(MISTRAL.parse("[TOOL_CALLS] [{")[1][0], MalformedCall)
        assert isinstance(MISTRAL.parse("[TOOL_CALLS] []")[1][0], MalformedCall)

    def test_of_two_lists_none_is_run(self):
        one = '[TOOL_CALLS] [{"name": "add", "arguments": {}}]'
        _, (call,) = MISTRAL.parse(one + one)
        assert isinstance(call, MalformedCall)
        assert "one list" in call.error

    def test_the_newer_style_reads_names_with_and_without_an_id(self):
        with_id = '[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{}'
        assert MISTRAL_V11.parse(with_id) == ("", (ToolCall("add", {"a": 1}, id="call_0"), ToolCall("sub", {}, id="call_1")))
        _, (first, second) = MISTRAL_V11.parse('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]sub[ARGS]{}')
        assert first == MalformedCall('add{"a": 1}', "a call is written [TOOL_CALLS]name[ARGS]{arguments}")
        assert second == ToolCall("sub", {}, id="call_1")


class TestDeepSeek:
    def test_a_call_as_the_published_template_prints_it(self):
        v3 = (
            'Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>sub\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
        both = (ToolCall("add", {"a": 1}, id="call_0"), ToolCall("sub", {}, id="call_1"))
        assert DEEPSEEK_V3.parse(v3) == ("Look.", both)
        assert DEEPSEEK_V3.write("Look.", both) == v3
        v31 = (
            'Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
        assert DEEPSEEK_V31.parse(v31) == ("Look.", both)
        assert DEEPSEEK_V31.write("Look.", both) == v31

    def test_the_other_ones_form_is_no_call(self):
        _, (call,) = DEEPSEEK_V3.parse("<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>")
        assert isinstance(call, MalformedCall)
        assert "a call is written <｜tool▁call▁begin｜>function<｜tool▁sep｜>name" in call.error

    def test_a_call_that_is_not_closed_is_malformed_and_the_end_of_all_calls_is_not_in_it(self):
        _, (call,) = DEEPSEEK_V31.parse("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁calls▁end｜>")
        assert call == MalformedCall("add<｜tool▁sep｜>{}", "the call is not closed with <｜tool▁call▁end｜>")


class TestPythonic:
    def test_calls_as_llama_and_lfm_write_them(self):
        assert PYTHONIC.parse("[add(a=1), math.sqrt(x=-2.5)]")[1] == (
            ToolCall("add", {"a": 1}, id="call_0"),
            ToolCall("math.sqrt", {"x": -2.5}, id="call_1"),
        )
        assert PYTHONIC.parse("Sure.<|tool_call_start|>[f(s='it\\'s')]<|tool_call_end|>") == (
            "Sure.",
            (ToolCall("f", {"s": "it's"}, id="call_0"),),
        )
        assert PYTHONIC.parse("<|python_start|>[f()]<|python_end|>") == ("", (ToolCall("f", {}, id="call_0"),))

    def test_constants_of_json_and_tuples_are_values(self):
        _, (call,) = PYTHONIC.parse("[f(a=true, b=null, c=(1, 2), d=[None, False], e={'k': ()})]")
        assert call == ToolCall("f", {"a": True, "b": None, "c": [1, 2], "d": [None, False], "e": {"k": []}}, id="call_0")

    @pytest.mark.parametrize(
        ("written", "error"),
        [
            ("[f(1)]", "name every argument: f(argument=value)"),
            ("[f(**{'a': 1})]", "name every argument"),
            ("[f(a=x)]", "an argument is a literal value, not x"),
            ("[f(a=__import__('os').system('true'))]", "an argument is a literal value, not __import__"),
            ("[f(a=1 + 1)]", "an argument is a literal value, not 1 + 1"),
            ("[f(a=f'{1}')]", "an argument is a literal value"),
            ("[f(a=b'x')]", "an argument is a literal value"),
            ("[f(a={1: 2})]", "the keys of an object are strings"),
            ("[f(a={1, 2})]", "an argument is a literal value"),
            ("[f(a=-True)]", "an argument is a literal value"),
            ("[f(a=1e999)]", "Out of range float"),
            ("[f(a=1, a=2)]", "the argument 'a' stands twice"),
            ("[f(from=1)]", "not a Python list of calls"),
            ("[f(a='\\ud800')]", "surrogates not allowed"),
            ("[f(a=1) for f in x]", "calls are written [name(argument=value), ...]"),
            ("[f()()]", "only calls stand in the list"),
            ("[f(), 3]", "only calls stand in the list"),
            ("[f(a='x]", "not closed"),
            ("[f(a=1", "not closed"),
        ],
    )
    def test_what_is_no_literal_call_is_told_and_never_evaluated(self, written, error):
        call = PYTHONIC.parse(written)[1][-1]
        assert isinstance(call, MalformedCall)
        assert error in call.error

    @pytest.mark.parametrize("text", ["[1, 2]", "[a, b]", "see [f(a=1)] there", "f(a=1)", "[link](url)", "[]", "[ ]"])
    def test_other_lists_are_content(self, text):
        assert PYTHONIC.parse(text) == (text, ())

    @pytest.mark.parametrize(("name", "arguments"), [("get-weather", {}), ("f", {"from": 1}), ("f", {"a b": 1}), ("ﬁ", {}), ("", {})])
    def test_a_name_that_python_has_no_syntax_for_is_not_written(self, name, arguments):
        with pytest.raises(CannotWrite):
            PYTHONIC.write("", [ToolCall(name, arguments)])

    def test_values_are_written_as_python(self):
        written = PYTHONIC.write("", [ToolCall("f", {"a": True, "b": None, "c": {"k": [1.5, "é\n"]}})])
        assert written == '[f(a=True, b=None, c={"k": [1.5, "é\\n"]})]'
        assert isinstance(ast.parse(written, mode="eval").body, ast.List)


class TestXml:
    ONE = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"

    def read(self, value: str, schema: object) -> object:
        tools = [ToolSpec("f", "", {"type": "object", "properties": {"a": schema}})]
        _, (call,) = XML.read(self.ONE % f"<parameter=a>\n{value}\n</parameter>\n", tools)
        assert isinstance(call, ToolCall)
        return call.arguments["a"]

    @pytest.mark.parametrize(
        ("value", "schema", "read"),
        [
            ("5", {"type": "integer"}, 5),
            ("5", {"type": "number"}, 5),
            ("5", {"type": "string"}, "5"),
            ("null", {"type": "string"}, "null"),
            ("null", {"type": ["string", "null"]}, None),
            ("5", {"type": ["string", "null"]}, "5"),
            ("true", {"type": "boolean"}, True),
            ("five", {"type": "integer"}, "five"),
            ('"5"', {"type": "integer"}, '"5"'),
            ("[1, 2]", {"type": "array"}, [1, 2]),
            ("[1, 2", {"type": "array"}, "[1, 2"),
            ('{"k": 1} x', {"type": "object"}, '{"k": 1} x'),
            ("3", {"enum": [1, 3]}, 3),
            ("3", {"enum": ["3"]}, "3"),
            ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
            ("3", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "3"),
            ("3", {}, 3),
            ("x", {}, "x"),
            ("", {"type": "string"}, ""),
            ("a\n  b\n", {"type": "string"}, "a\n  b\n"),
        ],
    )
    def test_the_schema_says_what_a_value_is(self, value, schema, read):
        found = self.read(value, schema)
        assert (found, type(found)) == (read, type(read))

    @pytest.mark.parametrize(
        ("inside", "error"),
        [
            ('{"name": "f", "arguments": {}}', "a call is written <tool_call>, <function=name>"),
            ("<function=f>\nx\n</function>\n", "something else than parameters"),
            ("<function=f>\n<parameter=a>\n1\n</function>\n", "something else than parameters"),
            ("<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n", "'a' stands twice"),
        ],
    )
    def test_what_is_no_call_is_told(self, inside, error):
        content, (call,) = XML.parse(f"Hm.\n<tool_call>\n{inside}</tool_call>")
        assert isinstance(call, MalformedCall)
        assert error in call.error
        assert content == "Hm."

    @pytest.mark.parametrize(
        "call", [ToolCall("a b", {}), ToolCall("f", {"a>": 1}), ToolCall("f", {"a": "</parameter>"}), ToolCall("f", {"": 1})]
    )
    def test_what_cannot_stand_between_tags_is_not_written(self, call):
        with pytest.raises(CannotWrite):
            XML.write("", [call])


@pytest.mark.parametrize("name", ["mistral_v11", "deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize("bad", ["a b", "a[ARGS]", "", "a<｜tool▁sep｜>", "a\nb"])
def test_a_name_that_cannot_stand_between_markers_is_not_written(name, bad):
    with pytest.raises(CannotWrite):
        STYLES[name].write("", [ToolCall(bad, {})])


def test_every_style_is_found_under_its_own_name():
    assert all(style.name == name for name, style in STYLES.items())


@every_style
def test_the_description_shows_how_this_style_writes_a_call(style):
    text = describe_tools([spec("weather", "city", "day")], style)
    example = text.rpartition("write ")[2]
    assert example == style.write("", [ToolCall("weather", {"city": 1, "day": 2})]).replace("1", "...").replace("2", "...")
    assert text.startswith("Tools:\nweather(city: string, day: string)\n")


def test_the_description_keeps_types_choices_descriptions_and_what_is_optional():
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "in English"},
            "unit": {"enum": ["c", "f"]},
            "days": {"type": "array", "items": {"type": "integer"}},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
            "limit": {"type": "integer", "minimum": 1},
        },
        "required": ["city"],
    }
    text = describe_tools([ToolSpec("weather", "Forecast.", schema), ToolSpec("now", "", {"type": "object", "properties": {}})])
    assert 'weather(city: string (in English), unit?: "c" | "f", days?: array of integer, ' in text
    assert json.dumps(schema["properties"]["where"]) in text
    assert '"minimum": 1' in text
    assert "\nnow()\n" in text
    assert '{"name": "weather", "arguments": {"city": ...}}' in text


# ---- hostile lengths


def test_many_calls_in_a_turn_are_read_in_time_that_grows_with_their_number():
    start = time.process_time()
    _, calls = PYTHONIC.parse(f"[{', '.join('f(a=1)' for _ in range(3000))}]")
    assert len(calls) == 3000
    assert PYTHONIC.parse("\n" * 100_000 + "x")[1] == ()
    assert time.process_time() - start < 5  # it was minutes


def test_the_text_of_a_broken_call_is_its_own_also_behind_line_breaks_and_long_characters():
    _, calls = PYTHONIC.parse('[é(a="é\x0c"),\r  g(\n b=home), "no call"]')
    assert [type(call) for call in calls] == [ToolCall, MalformedCall, MalformedCall]
    assert [call.text for call in calls[1:]] == ["g(\n b=home)", '"no call"']


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "f", "arguments": {"a": 1}}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"x": {"a": 1, "a": 1}}}'),
        ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"a": 1, "a": 2}'),
        ("pythonic", "[f(x={'a': 1, 'a': 2})]"),
    ],
)
def test_a_key_that_stands_twice_is_no_call(style, text):
    _, [call] = STYLES[style].parse(text)
    assert isinstance(call, MalformedCall)
    assert "stands twice" in call.error
