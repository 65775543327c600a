"""What an error says, and where it says that it happened."""

import errno
import os

import pytest

from postgrad.errors import RecipeError, about, reason


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/file"), "no space left on device"),
        (OSError(errno.ENOENT, "Failed to open '/A/File'. Detail: [errno 2]"), "no such file or directory"),
        (OSError("the library says so"), "the library says so"),
        (ValueError("\n first\nsecond"), "first"),
        (ValueError(), "ValueError()"),
    ],
)
def test_a_reason_is_one_line_without_what_python_adds(error, text):
    assert reason(error) == text


def test_an_error_names_line_key_and_file_from_the_recipe_to_the_cause():
    error = RecipeError("has no docstring", where="tools.py:f", key="tools[0]")
    error.line = "recipe.yaml:3"
    assert str(error) == "recipe.yaml:3: tools[0]: tools.py:f: has no docstring"
    assert str(RecipeError("has no docstring")) == "has no docstring"


def test_the_key_of_a_part_comes_before_the_key_within_it():
    with pytest.raises(RecipeError) as caught, about("tools[1]"), about("mcp"):
        raise RecipeError("is not set", key="env")
    assert caught.value.key == "tools[1].mcp.env"
    with pytest.raises(RecipeError) as caught, about("tools[1]"):
        raise RecipeError("is no tool")
    assert caught.value.key == "tools[1]"
