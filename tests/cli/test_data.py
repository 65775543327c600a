"""`postgrad data show` and `check`: what they print, as text and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from postgrad.chat import ChatFormat
from postgrad.cli.data import app
from postgrad.errors import CheckFailed, DataError, RecipeError
from postgrad.testing import tiny_tokenizer
from postgrad.types import Message

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


# ---- other formats


@pytest.fixture
def write(tmp_path):
    def make(name: str, *rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return make


PAIR = {"prompt": "one", "chosen": "two", "rejected": "three"}


def test_a_pair_is_shown_as_one_prompt_and_two_answers(run, write):
    path = write("pairs.jsonl", {**PAIR, "margin": 0.5}, {**PAIR, "prompt": "x"})
    records = [json.loads(line) for line in run("show", path, "--json").stdout.splitlines()]
    chat = ChatFormat(tiny_tokenizer())
    assert [list(record) for record in records] == [
        ["row", "prompt_ids", "chosen_ids", "rejected_ids", "margin"],
        ["row", "prompt_ids", "chosen_ids", "rejected_ids"],
    ]
    assert records[0]["prompt_ids"] == list(chat.prompt_ids([Message("user", "one")]))
    assert [chat.decode_raw(records[0][name]) for name in ("chosen_ids", "rejected_ids")] == ["two<|im_end|>", "three<|im_end|>"]
    text = run("show", path, "--rows", 1).stdout
    assert "chosen: ⟦two<|im_end|>⟧\nrejected: ⟦three<|im_end|>⟧" in text
    assert "prompt: <|im_start|>user⏎\none<|im_end|>⏎\n<|im_start|>assistant⏎\n" in text


def test_a_labelled_answer_is_shown_with_its_label(run, write):
    path = write("kto.jsonl", {"prompt": "one", "completion": "two", "label": False})
    record = json.loads(run("show", path, "--json").stdout)
    assert set(record) == {"row", "prompt_ids", "completion_ids", "label"}
    assert record["label"] is False
    assert "undesirable: ⟦two<|im_end|>⟧" in run("show", path).stdout


def test_token_rows_are_shown_as_they_are(run, write):
    path = write("t.jsonl", {"input_ids": [60, 61, 2], "labels": [-100, 61, 2]})
    record = json.loads(run("show", path, "--json").stdout)
    assert (record["token_ids"], record["train"]) == ([60, 61, 2], [0, 1, 1])


# ---- check


def test_check_says_why_the_data_are_not_fit_and_ends_with_its_own_exit_code(run, write):
    path = write("bad.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""})
    with pytest.raises(CheckFailed, match="the completion is empty") as error:
        run("check", path)
    assert error.value.exit_code == 4
    assert error.value.where == "bad.jsonl"
    run("check", path, "--max-bad", 1)


def test_a_failed_check_has_printed_its_report_first(run, write):
    path = write("bad.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""})
    result = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert isinstance(result.exception, CheckFailed)
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["findings"][0]["id"] == "rejected"
    assert report["findings"][0]["severity"] == "critical"


def test_check_in_words_has_every_count(run, file):
    lines = run("check", file, "--max-length", 100).stdout
    for part in (
        "2: 1 kept, 1 dropped, 0 cut",
        "dropped 1: too_long",
        "1 are trained, 1 of them with their end token",
        "over the limit",
        "verdict   pass",
    ):
        assert part in lines


def test_check_compares_with_held_out_rows(run, file, write):
    held = write("held.jsonl", ROWS[0])
    report = json.loads(run("check", file, "--json", "--eval", held).stdout)
    assert [finding["rows"] for finding in report["findings"] if finding["id"] == "overlap"] == [["held.jsonl:1"]]


def test_unlimited_prompts_have_no_limit_in_the_report(run, write):
    read = {"source": "prompt", "token_ids": [60], "logprobs": []}
    wrote = {"source": "model", "token_ids": [61, 2], "logprobs": [-1, -1]}
    path = write("r.jsonl", {"prompt": {"row": "a"}, "rollouts": [{"stop": "end", "segments": [read, wrote]}]})
    report = json.loads(run("check", path, "--json").stdout)
    assert (report["format"], report["lengths"]["limit"], report["trained_tokens"]) == ("rollouts", None, 2)
    assert "⟦" in run("show", path).stdout


def test_a_prompt_is_never_cut_also_when_no_method_is_named(run, write):
    with pytest.raises(RecipeError, match="never cut"):
        run("check", write("p.jsonl", {"prompt": "a"}), "--overlong", "cut")


def test_a_file_whose_rows_the_method_cannot_train_on_is_a_data_error(run, write):
    with pytest.raises(DataError, match="dpo needs preference or unpaired rows"):
        run("check", write("p.jsonl", {"prompt": "a"}), "--method", "dpo")


# ---- pages and long files


def test_show_stops_early_in_the_terminal_and_says_so(run, write):
    path = write("many.jsonl", *[{"prompt": str(number), "completion": "x"} for number in range(5)])
    output = run("show", path)
    assert output.stdout.count("⟦x<|im_end|>⟧") == 3
    assert "the first 3 rows; `postgrad data check` reads all of them" in output.stderr
    assert "5 of 5 rows shown" in run("show", path, "--rows", 5).stderr


def test_both_commands_write_a_page(run, file, tmp_path):
    for command in ("show", "check"):
        page = tmp_path / f"{command}.html"
        assert f"page written to {page}" in run(command, file, "--html", page).stderr.replace("\n", "")
        assert '<span class="trained">two&lt;|im_end|&gt;</span>' in page.read_text()


def test_a_page_that_cannot_be_written_names_its_place(run, file, tmp_path):
    with pytest.raises(RecipeError, match="the page cannot be written") as error:
        run("show", file, "--html", tmp_path / "missing" / "page.html")
    assert "missing" in str(error.value.where)
