"""`postgrad doctor`: text without colour, JSON, exit codes; and its page, whose examples run."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.cli.main import main
from postgrad.rewards.doctor.catalogue import RULES, table

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def postgrad(monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["postgrad", *arguments])
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def write(path: Path, *, wrong_outranks: bool) -> Path:
    """64 groups of 4: one right answer each; format pays more than it, or less."""
    run = {
        "rewards": [
            {"name": "correct", "weight": 1.0, "role": "outcome", "range": [0, 1]},
            {"name": "format", "weight": 1.5 if wrong_outranks else 0.1, "role": "shaping", "range": [0, 1]},
        ]
    }
    lines = [json.dumps({"run": run})]
    for place in range(256):
        rewards = {"correct": float(place % 4 == 0), "format": float(place % 4 in (1, 2) or place % 8 == 0)}
        lines.append(json.dumps({"step": 1 + place // 32, "group": f"train.jsonl:{place // 4}", "rewards": rewards}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_critical_finding_ends_in_exit_code_4_after_the_whole_text(tmp_path, monkeypatch):
    file = write(tmp_path / "run.jsonl", wrong_outranks=True)
    code, out, _ = postgrad(monkeypatch, "doctor", str(file))
    assert code == 4
    lines = out.splitlines()
    assert lines[0] == f"{file}: method unknown, 64 groups of 4 rollouts, steps 1–8, 2 windows"
    words = [line.split("  ")[0] for line in lines if line.split("  ")[0] in ("CRITICAL", "WARNING", "note")]
    assert words == sorted(words, key=["CRITICAL", "WARNING", "note"].index)
    assert words[0] == "CRITICAL"
    assert any(
        re.match(r"  change     rewards\[\]\.weight: 0\.5 × for the shaping rewards .* on the same rollouts 0\.333 becomes 0$", x)
        for x in lines
    )
    assert "\x1b" not in out
    assert lines.index("passed") < lines.index("skipped")


def test_without_anything_critical_it_ends_in_0(tmp_path, monkeypatch):
    code, out, err = postgrad(monkeypatch, "doctor", str(write(tmp_path / "run.jsonl", wrong_outranks=False)))
    assert (code, err) == (0, "")
    assert "  R4  sacrificed objective: the advantages were not written (needs advantage)" in out.splitlines()


def test_json_is_the_whole_diagnosis(tmp_path, monkeypatch):
    code, out, _ = postgrad(monkeypatch, "doctor", str(write(tmp_path / "run.jsonl", wrong_outranks=True)), "--json")
    record = json.loads(out)
    assert code == 4
    found = {finding["id"]: finding for finding in record["findings"]}
    assert found["R7"]["severity"] == "critical"
    assert found["R7"]["fixes"][0]["verified"] is True
    everything = [entry["id"] for kind in ("findings", "passed", "skipped") for entry in record[kind]]
    assert sorted(everything) == sorted(RULES)


def test_the_outcome_and_weights_can_be_named(tmp_path, monkeypatch):
    file = write(tmp_path / "run.jsonl", wrong_outranks=True)
    code, _, _ = postgrad(monkeypatch, "doctor", str(file), "--weight", "format=0.1")
    assert code == 0
    _, out, _ = postgrad(monkeypatch, "doctor", str(file), "--outcome", "format", "--json")
    assert "R2" in {entry["id"] for entry in json.loads(out)["findings"] + json.loads(out)["passed"]}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing.jsonl"], 3, "does not exist"),
        (["run.jsonl", "--weight", "format"], 2, "is no NAME=NUMBER"),
        (["run.jsonl", "--outcome", "fomat"], 2, "no reward 'fomat' in this run"),
        (["run.jsonl", "--nonsense"], 2, ""),
        ([], 2, ""),
    ],
)
def test_mistakes_have_their_exit_codes(arguments, code, words, tmp_path):
    write(tmp_path / "run.jsonl", wrong_outranks=True)
    done = subprocess.run(
        [sys.executable, "-m", "postgrad", "doctor", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_imports_no_torch():
    code = "import sys; import postgrad.rewards.doctor, postgrad.cli.doctor; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & {"torch", "transformers", "pydantic", "scipy", "pyarrow"}


# the page -----------------------------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_pages_table_is_the_catalogue():
    (shown,) = re.findall(r"<!-- checks -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown == table()


def test_the_pages_lines_and_python_examples_run(tmp_path, monkeypatch, capsys):
    """The lines in the page are a file that can be read; the examples run on it."""
    (lines,) = blocks("json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts.jsonl").write_text(lines, encoding="utf-8")
    for code in blocks("python"):
        exec(code, {})
    assert "'R18'" in capsys.readouterr().out
    from postgrad.rewards.doctor import observe

    observed = observe(Path("rollouts.jsonl"))
    assert (observed.group_count, observed.group_size, len(observed.failures)) == (1, 2, 1)
    assert observed.settings == {"loss.kl_coef": 0.04}


def test_the_pages_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rollouts.jsonl", wrong_outranks=False)
    lines = [line.split("#")[0].split() for block in blocks("") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(lines) == 3
    assert [postgrad(monkeypatch, *line[1:])[0] for line in lines if "rollouts.jsonl" in line] == [0, 0]


def test_the_page_says_how_many_simulations_there_are():
    from postgrad.testing.simulate import FAULTS, HEALTHY

    page = PAGE.read_text(encoding="utf-8")
    numbers = {11: "eleven", 33: "thirty-three"}
    assert f"healthy ones of {numbers[len(HEALTHY)]} kinds, and {numbers[len(FAULTS)]} with one fault each" in page
