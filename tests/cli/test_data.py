"""`postgrad data show` and `check`: what they print, as text and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from postgrad.cli.data import app
from postgrad.errors import DataError, RecipeError
from postgrad.testing import tiny_tokenizer

ROWS = [
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x" * 300}]},
]


@pytest.fixture
def run(monkeypatch):
    """Run the command with the tiny tokenizer in the place of the model's; errors of postgrad are raised."""
    monkeypatch.setattr("postgrad.models.loading.load_tokenizer", lambda name: (tiny_tokenizer(), frozenset({2})))

    def invoke(*arguments: object):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_json_is_one_object_per_row_with_flag_and_source_per_token(run, file):
    lines = [json.loads(line) for line in run("show", file, "--json").stdout.splitlines()]
    assert [line["row"] for line in lines] == ["rows.jsonl:1", "rows.jsonl:2"]
    first = lines[0]
    assert set(first) == {"row", "token_ids", "train", "source"}
    assert len(first["token_ids"]) == len(first["train"]) == len(first["source"])
    trained = [token for token, flag in zip(first["token_ids"], first["train"], strict=True) if flag]
    assert tiny_tokenizer().decode(trained) == "two<|im_end|>"
    assert {source for source, flag in zip(first["source"], first["train"], strict=True) if flag} == {"assistant"}


def test_the_terminal_view_brackets_what_is_trained(run, file):
    output = run("show", file)
    assert "⟦two<|im_end|>⟧" in output.stdout
    assert "‹<|im_start|>assistant⏎\n›" in output.stdout
    assert "2 of 2 rows shown" in output.stderr
    assert "data: rows.jsonl, messages: 2 rows, 2 kept" in output.stderr


def test_rows_limits_what_is_shown(run, file):
    assert len(run("show", file, "--json", "--rows", 1).stdout.splitlines()) == 1


def test_the_over_long_policy_is_applied_and_counted(run, file):
    drop = run("show", file, "--json", "--max-length", 100)
    assert len(drop.stdout.splitlines()) == 1
    assert "1 too_long" in drop.stderr
    cut = [json.loads(line) for line in run("show", file, "--json", "--max-length", 100, "--overlong", "cut").stdout.splitlines()]
    assert len(cut[1]["token_ids"]) == 100
    assert cut[1]["token_ids"][-1] != 2
    with pytest.raises(DataError, match="max_length is 100"):
        run("show", file, "--max-length", 100, "--overlong", "error")


def test_train_on_changes_the_flags(run, file):
    record = json.loads(run("show", file, "--json", "--rows", 1, "--train-on", "all").stdout)
    assert record["train"] == [0] + [1] * (len(record["train"]) - 1)


def test_check_gives_the_counts_as_json(run, file):
    report = json.loads(run("check", file, "--json", "--max-length", 100).stdout)
    assert report["format"] == "messages"
    assert (report["rows"], report["kept"], report["dropped"], report["cut"]) == (2, 1, {"too_long": 1}, 0)
    assert report["trained_tokens"] == 4
    assert [finding["message"] for finding in report["findings"]] == ["1 of 2 rows are left out because they are too long"]


def test_check_names_rejected_rows(run, file):
    file.write_text(file.read_text() + "{broken\n")
    report = json.loads(run("check", file, "--json", "--max-bad", 1).stdout)
    assert report["dropped"] == {"rejected": 1}
    assert report["findings"][0]["rows"] == ["rows.jsonl:3"]
    assert "broken JSON" in report["findings"][0]["message"]


def test_prompts_are_shown_as_the_model_reads_them(run, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "2+2?", "answer": "4"}\n')
    output = run("show", path, "--method", "grpo", "--columns", "prompt=question")
    assert "columns for the rewards: answer" in output.stdout
    assert "2+2?<|im_end|>⏎\n<|im_start|>assistant⏎\n" in output.stdout
    record = json.loads(run("show", path, "--method", "grpo", "--columns", "prompt=question", "--json").stdout)
    assert set(record["train"]) == {0}
    with pytest.raises(RecipeError, match="never cut"):
        run("show", path, "--method", "grpo", "--columns", "prompt=question", "--overlong", "cut")


def test_columns_join_several(run, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"instruction": "Add.", "input": "1 2", "output": "3"}]))
    output = run("show", path, "--columns", "user=instruction,input", "--columns", "assistant=output")
    assert "Add.⏎\n⏎\n1 2<|im_end|>" in output.stdout


@pytest.mark.parametrize(
    "arguments", [["--method", "dance"], ["--overlong", "keep"], ["--train-on", "first"], ["--columns", "prompt"], ["--columns", "promt=x"]]
)
def test_a_wrong_option_names_what_is_possible(run, file, arguments):
    with pytest.raises(RecipeError) as error:
        run("show", file, *arguments)
    assert error.value.hint


def test_escape_sequences_in_data_do_not_reach_the_terminal(run, tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"prompt": "a\u001b[2J", "completion": "b"}))
    output = run("show", path).stdout
    assert "\u001b" not in output
    assert "a\\x1b[2J" in output


def test_a_recipe_brings_its_own_settings(run, tmp_path, file):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "method: sft\nmodel: smollm2-135m\nrun_dir: runs/x\nmax_steps: 1\n"
        "data: {train: rows.jsonl, max_length: 100, overlong: cut, train_on: last}\n"
    )
    lines = [json.loads(line) for line in run("show", recipe, "--json").stdout.splitlines()]
    assert [len(line["token_ids"]) for line in lines][1] == 100


@pytest.mark.real_model
def test_the_built_in_model_is_the_default(file):
    result = CliRunner().invoke(app, ["show", str(file)])
    assert result.exit_code == 0
    assert "⟦two<|im_end|>⟧" in result.stdout
