"""Loading tools from files: every fault is a RecipeError that says what, where and how to repair it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from postgrad.errors import DataError, RecipeError
from postgrad.rollout import load_tools, make_toolbox, tool
from postgrad.types import Prompt


def write(folder: Path, text: str, name: str = "tools.py") -> Path:
    (folder / name).write_text(text)
    return folder


GOOD = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Point:
    x: int

count = 0

def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

def norm(point: Point) -> int:
    """Length of a point."""
    return abs(point.x)

class Counter:
    def __init__(self) -> None:
        self.total = 0
    def reset(self, start: int = 0) -> None:
        self.total = start
    def increase(self, by: int) -> int:
        """Increase the counter."""
        self.total += by
        return self.total
    def _secret(self) -> None: ...
    def close(self) -> None: ...
'''


def test_functions_and_classes_of_a_file_become_tools(tmp_path: Path) -> None:
    toolbox = load_tools(["tools.py:add", "tools.py:Counter", "tools.py:norm"], write(tmp_path, GOOD))
    assert [spec.name for spec in toolbox.specs] == ["add", "increase", "norm"]
    assert len(toolbox) == 3
    assert toolbox.by_name["norm"].signature.validate({"point": {"x": 3}})["point"].x == 3
    assert list(toolbox.by_name["increase"].spec.parameters["properties"]) == ["by"]


def test_tools_of_one_file_share_its_module(tmp_path: Path) -> None:
    toolbox = load_tools(["tools.py:add", "tools.py:norm"], write(tmp_path, GOOD))
    first, second = (item.function for item in toolbox.tools)
    assert first.__globals__ is second.__globals__


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    load_tools(["tools.py:add"], write(tmp_path, GOOD))
    toolbox = load_tools(["tools.py:add"], write(tmp_path, GOOD.replace("Add two numbers.", "Sum.")))
    assert toolbox.specs[0].description == "Sum."


def test_a_file_may_import_its_neighbour_and_shadows_nothing(tmp_path: Path) -> None:
    write(tmp_path, "FACTOR = 3\n", "neighbour_of_tools.py")
    write(tmp_path, "raise AssertionError('shadowed')\n", "json.py")
    text = 'import json\nfrom neighbour_of_tools import FACTOR\ndef f(a: int) -> int:\n    """Scale."""\n    return a * FACTOR\n'
    assert load_tools(["tools.py:f"], write(tmp_path, text)).tools[0].function(a=2) == 6
    sys.path.remove(str(tmp_path))


def test_an_importable_module_can_be_named() -> None:
    with pytest.raises(RecipeError, match=r"no docstring|no type"):  # found and imported; it is no tool
        load_tools(["textwrap:dedent"], Path())


def test_a_missing_file_a_missing_name_and_a_bad_spec_are_named(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(RecipeError, match="does not exist"):
        load_tools(["nowhere.py:add"], tmp_path)
    with pytest.raises(RecipeError, match="does not exist") as caught:
        load_tools(["tool.py:add"], tmp_path)
    assert caught.value.hint == f"did you mean {tmp_path / 'tools.py'}?"
    with pytest.raises(RecipeError, match="has no `ad`") as caught:
        load_tools(["tools.py:ad"], tmp_path)
    assert caught.value.hint == "did you mean add?"
    with pytest.raises(RecipeError, match="names no tool"):
        load_tools(["tools.py"], tmp_path)
    with pytest.raises(RecipeError, match="not callable: it is int"):
        load_tools(["tools.py:count"], tmp_path)


def test_an_import_error_shows_the_last_frame_of_the_users_own_traceback(tmp_path: Path) -> None:
    write(tmp_path, "def inner():\n    return 1 / 0\n\ninner()\n")
    with pytest.raises(RecipeError, match=r"ZeroDivisionError: division by zero \(.*tools\.py:2 in inner\)") as caught:
        load_tools(["tools.py:f"], tmp_path)
    assert caught.value.where == "tools.py:f"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("text", "message"), [("def f(:\n", r"SyntaxError.*tools\.py:1"), ("import sys\nsys.exit(3)\n", r"SystemExit: 3")])
def test_syntax_errors_and_exits_at_import_are_recipe_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_tools(["tools.py:f"], write(tmp_path, text))


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="two tools are called `add`"):
        load_tools(["tools.py:add", "tools.py:add"], write(tmp_path, GOOD))


def test_the_decorator_sets_name_deadline_and_terminal() -> None:
    @tool(terminal=True, deadline_s=2.5, name="final_answer")
    def submit(answer: str) -> str:
        """Give the answer."""
        return answer

    toolbox = make_toolbox([submit])
    assert toolbox.terminal == {"final_answer"}
    assert toolbox.by_name["final_answer"].options.deadline_s == 2.5
    assert submit("x") == "x"
    with pytest.raises(ValueError, match="positive"):
        tool(deadline_s=0)


def test_a_callable_object_is_a_tool_under_its_class_name() -> None:
    class Double:
        """Twice a number."""

        def __call__(self, x: int) -> int:
            return 2 * x

    Double.__call__.__annotations__ = {"x": int, "return": int}
    toolbox = make_toolbox([Double()])
    assert toolbox.specs[0].name == "Double"
    assert list(toolbox.specs[0].parameters["properties"]) == ["x"]


def test_lambdas_and_things_that_cannot_be_called_are_no_tools() -> None:
    with pytest.raises(RecipeError, match="lambda"):
        make_toolbox([lambda x: x])
    with pytest.raises(RecipeError, match="not int"):
        make_toolbox([3])


def test_an_environment_without_tools_or_with_constructor_arguments_is_refused() -> None:
    class Empty:
        def reset(self) -> None: ...

    class Needs:
        def __init__(self, size: int) -> None: ...

        def move(self) -> None:
            """Move."""

    with pytest.raises(RecipeError, match="no public method"):
        make_toolbox([Empty])
    with pytest.raises(RecipeError, match="needs the argument `size`"):
        make_toolbox([Needs])


def test_reset_gets_the_columns_it_names_and_a_missing_one_is_a_data_error() -> None:
    class Game:
        def reset(self, board: str, level: int = 1) -> None: ...

        def move(self) -> None:
            """Move."""

    environment = make_toolbox([Game]).environments[0]
    assert environment.reset_arguments(Prompt("data.jsonl:3", (), {"board": "x", "other": 1})) == {"board": "x"}
    with pytest.raises(DataError, match=r"data.jsonl:3: Game.reset asks for column 'board'.*it has: other"):
        environment.reset_arguments(Prompt("data.jsonl:3", (), {"other": 1}))


def test_an_empty_toolbox_is_false() -> None:
    assert not load_tools([], Path())
