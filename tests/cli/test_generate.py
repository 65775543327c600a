"""`postgrad generate` and `chat` before a model is loaded."""

import pytest

from postgrad.cli.generate import load_writer
from postgrad.errors import RecipeError
from postgrad.protocols import SamplingParams


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("pyton", "--tools: there is no shipped tool 'pyton'"),
        ("tools.py:f", "--tools: tools.py:f: {here}/tools.py does not exist"),
    ],
)
def test_a_tool_that_is_not_there_is_blamed_on_the_option(tool, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_writer("nowhere", tools=[tool], params=SamplingParams(), max_tokens=4)
    assert str(caught.value) == message.format(here=tmp_path)
