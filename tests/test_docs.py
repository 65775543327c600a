"""Every example in the documentation is executed, and generated pages are up to date."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from postgrad.chat import ChatFormat
from postgrad.protocols import SamplingParams
from postgrad.rewards.score import Scores
from postgrad.rollout.items import ToolItem
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.train.datasets import open_rows
from postgrad.train.metrics import docs_page
from postgrad.train.recipe import PAIR_LOSSES, REFERENCE_FREE_LOSSES, DPORecipe, GRPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from postgrad.train.recipe_file import load_recipe
from postgrad.train.recipe_page import page as recipe_page
from postgrad.types import Message, Prompt

ROOT = Path(__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", READMES)
def test_recipes_in_the_readme_are_valid(name, tmp_path):
    kinds = []
    for text in blocks(name, "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        kinds.append(type(load_recipe(tmp_path / "recipe.yaml").recipe))
    assert kinds == [SFTRecipe, GRPORecipe]


@pytest.mark.parametrize("name", READMES)
def test_tool_and_reward_in_the_readme_work(name, tmp_path):
    from postgrad.rewards.load import load_rewards
    from postgrad.rollout import load_tools
    from postgrad.rollout.execute import ToolLimits, execute
    from postgrad.types import ToolCall

    for text in blocks(name, "python"):
        file = re.match(r"# (\w+\.py)\n", text)
        assert file is not None
        (tmp_path / file[1]).write_text(text, encoding="utf-8")
    toolbox = load_tools(["tools.py:calculator"], tmp_path)
    assert toolbox.specs[0].parameters["required"] == ["expression"]
    [[result]] = execute([(toolbox.open([]), [ToolCall("calculator", {"expression": "12 + 34"})])], ToolLimits(deadline_s=60))
    assert result.content == "46.0"
    (reward,) = load_rewards([{"use": "rewards.py:called"}], tmp_path)
    assert reward.range == (0, 1)


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.real_model
def test_commands_in_the_readme_run(tmp_path):
    commands = [line.split("#")[0] for block in blocks("README.md", "") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(commands) >= 4
    for command in commands:
        arguments = shlex.split(command)
        if arguments[1] == "train" and "--dry-run" not in arguments:
            arguments.append("max_steps=2")
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=tmp_path, input="Where is my parcel?\n", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)


@pytest.fixture
def data_files(tmp_path):
    """The files that docs/data.md names."""
    turn = [{"role": "user", "content": "Where is my parcel?"}, {"role": "assistant", "content": "On its way."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turn}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("data", [SFTRecipe, SFTRecipe, SFTRecipe]),
        ("preferences", [RewardRecipe, DPORecipe]),
        ("ppo", [PPORecipe]),
        ("rewards", [GRPORecipe]),
    ],
)
def test_recipes_in_the_pages_are_valid(tmp_path, name, kinds):
    found = []
    for text in blocks(f"docs/{name}.md", "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        found.append(type(load_recipe(tmp_path / "recipe.yaml").recipe))
    assert found == kinds


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.real_model
def test_commands_in_the_preferences_page_run(tmp_path):
    commands = [line for block in blocks("docs/preferences.md", "") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(commands) == 3
    for line in commands:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line, comments=True)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr)


def test_preferences_page_names_every_loss():
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    assert [name for name in (*PAIR_LOSSES, *REFERENCE_FREE_LOSSES, "kto") if f"`{name}`" not in page] == []


@pytest.mark.real_model
def test_examples_in_the_data_page_run(data_files, monkeypatch, capsys):
    monkeypatch.chdir(data_files)
    commands = [line for block in blocks("docs/data.md", "") for line in block.splitlines() if line.startswith("postgrad ")]
    assert len(commands) == 3
    for line in commands:
        done = subprocess.run([sys.executable, "-m", *shlex.split(line, comments=True)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)
    (code,) = blocks("docs/data.md", "python")
    exec(code, {})
    assert "1 kept" in capsys.readouterr().out


def test_data_page_names_every_format_and_finding():
    from typing import get_args

    from postgrad.data import formats
    from postgrad.data.columns import FIELDS

    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert [name for name in FIELDS if f"`{name}`" not in page] == []
    source = (ROOT / "src" / "postgrad" / "data" / "audit.py").read_text(encoding="utf-8")
    findings = set(re.findall(r'Finding\(\s*"(\w+)"', source)) | set(re.findall(r'^    "(\w+)": _Rule\(', source, re.MULTILINE))
    assert len(findings) > 15
    assert [name for name in [*get_args(formats.Format), *findings] if f"`{name}`" not in page] == []


# ---- docs/rewards.md


@pytest.fixture
def reward_files(tmp_path, monkeypatch):
    """The reward files, the recipe and the rows that docs/rewards.md names, in the working directory."""
    for text in blocks("docs/rewards.md", "python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text, encoding="utf-8")
    (recipe,) = blocks("docs/rewards.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), **({"needs": 1} if n % 2 else {})} for n in range(10, 60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # other tests load a rewards.py of their own
    return tmp_path


def test_rewards_in_the_rewards_page_do_what_it_says(reward_files):
    from postgrad.rewards.load import load_rewards
    from postgrad.rewards.score import Scorer
    from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason

    def rollout(text: str, sample: int) -> Rollout:
        segments = (Segment(Source.PROMPT, (1,)), Segment(Source.MODEL, (5,) * 12, (-0.1,) * 12))
        return Rollout(segments, (Message("assistant", text),), StopReason.END, sample=sample, text=text)

    columns = {"answer": "4", "needs": 0, "parts": ["4"], "step": 50}
    group = Group(Prompt("r:1", (Message("user", "q"),), columns), tuple(rollout(t, n) for n, t in enumerate(("4", "5, please", "4"))))
    names = ["rewards:correct", "rewards:brief", "rewards:frugal", "turns:calls", "group:majority", "asking:polite"]
    names += ["trl_style:accuracy_reward", *(f"combined:{name}" for name in ("careful", "both", "mixed", "bounded", "fading", "steps"))]
    uses = [{"use": name.replace(":", ".py:")} for name in names]
    with Scorer(load_rewards(uses, reward_files)) as scorer:
        scores = scorer.score([group])
    assert scores.failures == ()
    values = {name: column.round(3).tolist() for name, column in zip(scores.names, scores.values.T, strict=True)}
    assert values == {
        "correct": [1, 0, 1], "brief": [0.75] * 3, "frugal": [0] * 3, "calls": [0] * 3, "majority": [0.667, 0.333, 0.667],
        "polite": [0, 1, 0], "accuracy_reward": [1, 0, 1], "careful": [1.15, 0, 1.15], "both": [0, 0, 0], "mixed": [1.075, 0.075, 1.075],
        "bounded": [1, 0.075, 1], "fading": [0.562] * 3, "steps": [0] * 3,
    }  # fmt: skip
    roles = dict(zip(scores.names, scores.roles, strict=True))
    assert (roles["correct"], roles["brief"], roles["accuracy_reward"]) == ("outcome", "shaping", "outcome")


def test_arithmetic_in_the_rewards_page_is_what_its_code_prints(capsys):
    (code,) = [text for text in blocks("docs/rewards.md", "python") if "recomputed_advantages" in text]
    exec(code, {})
    printed = [list(map(float, re.findall(r"-?\d+(?:\.\d+)?", line))) for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").replace("−", "-")
    cells = re.findall(r"^\| (?:1 / )?(-?\d) \| ([-+\d., |]+) \|$", page, re.MULTILINE)
    shown = [[float(first), *map(float, re.findall(r"[-+]?\d+(?:\.\d+)?", rest))] for first, rest in cells]
    assert len(shown) == 6
    assert printed[:6] == shown
    assert printed[6] == [0.3, -0.5, -0.5, -0.5]


def test_rewards_page_lists_what_ships():
    from postgrad.rewards import combine
    from postgrad.rewards.library.page import table

    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- rewards -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert shown == table(), "python -m postgrad.rewards.library.page writes it"
    named = re.findall(r"^(\w+)\(.*\)  +\S", combine.__doc__ or "", re.MULTILINE)
    assert len(named) == 6
    assert [name for name in named if f"`{name}(" not in page] == []


def write_rollouts(path: Path) -> None:
    lines = [
        {
            "step": 1 + n // 32,
            "group": f"p{n // 4}",
            "rewards": {"correct": float(n % 4 == 0), "copy": float(n % 4 == 0), "brief": n % 3 / 3},
        }
        for n in range(256)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def commands_of_the_rewards_page() -> list[list[str]]:
    lines = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("postgrad ")]


def test_checks_in_the_rewards_page_run(reward_files):
    commands = [command for command in commands_of_the_rewards_page() if command[2] in ("check", "matrix")]
    assert len(commands) == 4
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_ablation_from_python_in_the_rewards_page_runs(reward_files, capsys):
    (code,) = [text for text in blocks("docs/rewards.md", "python") if "import ablate" in text]
    write_rollouts(reward_files / "rollouts.jsonl")
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_ablations_in_the_rewards_page_run(reward_files):
    from postgrad.testing import tiny_model, tiny_tokenizer
    from postgrad.train.run import run

    tiny_model("llama", vocab_size=268).save_pretrained(reward_files / "model")
    tiny_tokenizer().save_pretrained(reward_files / "model")
    recipe = (reward_files / "recipe.yaml").read_text(encoding="utf-8").replace("smollm2-135m", "model").replace("60", "1")
    small = "dtype: float32\nbatch: {prompts: 2}\nrollout: {group_size: 4, max_tokens: 40, max_turns: 1}\n"
    (reward_files / "recipe.yaml").write_text(recipe + small, encoding="utf-8")
    run(load_recipe(reward_files / "recipe.yaml"))
    write_rollouts(reward_files / "rollouts.jsonl")
    commands = [command for command in commands_of_the_rewards_page() if command[2] == "ablate"]
    assert len(commands) == 5
    for command in commands:
        arguments = ["1" if argument == "20" else argument for argument in command]
        done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)


def test_the_page_on_traps_shows_every_trap_and_the_check_that_names_it():
    """That the command runs is shown in tests/cli/test_demo_traps.py."""
    from postgrad.cli.demo_traps import TRAPS
    from postgrad.demo.traps import rewards

    page = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    assert re.findall(r"^postgrad demo (\w+)", page, re.MULTILINE) == list(TRAPS)
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert [section.partition(":")[0].lower() for section in sections] == list(TRAPS)
    for section, trap in zip(sections, TRAPS.values(), strict=True):
        assert re.search(rf"^{trap.check} ", section, re.MULTILINE), trap.check
        assert [name for name in re.findall(r"`(\w+)`", section) if name not in ("before", "after") and not hasattr(rewards, name)] == []


def test_both_readmes_show_the_same_commands():
    pages = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    english, chinese = (re.findall(r"^(?:make|postgrad) [^#\n]*", page, re.MULTILINE) for page in pages)
    assert [command.strip() for command in english] == [command.strip() for command in chinese]


def test_links_in_the_docs_lead_somewhere():
    for page in [ROOT / name for name in READMES] + sorted((ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_metrics_page_is_generated_from_the_registry():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == docs_page()


def test_recipe_page_is_generated_from_the_models():
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == recipe_page()


def test_version_is_in_the_changelog():
    from postgrad import __version__

    assert re.search(rf"^## (Unreleased|{re.escape(__version__)})", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_gsm8k_rows_fit_the_recipe_of_the_readme(shared_data, tmp_path):
    """The README's column map turns the file, as people have it, into prompts with the gold answer for the reward."""
    from postgrad.data import load_rows
    from postgrad.rewards.library import gold_number

    (tmp_path / "recipe.yaml").write_text(blocks("README.md", "yaml")[1], encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert isinstance(recipe, GRPORecipe)
    rows = load_rows(shared_data / "gsm8k_test_first660.jsonl", columns=recipe.data.columns)
    raw = [json.loads(line) for line in (shared_data / "gsm8k_test_first660.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows.read()) == len(raw)
    assert all(gold_number(row["answer"]) is not None for row in raw)


def test_the_tool_the_advantages_and_the_recipe_of_the_page_on_rollouts_work(tmp_path, monkeypatch):
    from postgrad.rollout import RolloutConfig, collect, load_tools
    from postgrad.rollout.load import load_attribute
    from postgrad.train.credit import by_hook

    monkeypatch.chdir(tmp_path)
    for text in blocks("docs/rollouts.md", "python"):
        file = re.match(r"# (\w+\.py)\n", text)
        assert file is not None
        (tmp_path / file[1]).write_text(text, encoding="utf-8")
    (text,) = blocks("docs/rollouts.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    call = '<tool_call>{"name": "order", "arguments": {"item": "tea"}}</tool_call>'
    groups = collect(
        [(0, Prompt("d:1", (Message("user", "Tea, please."),)))],
        sampler=ScriptedPolicy([call, "done"]), chat=ChatFormat(tiny_tokenizer()), toolbox=load_tools(recipe.tools, tmp_path),
        config=RolloutConfig(group_size=2, max_tokens=200), params=SamplingParams(), seed=0, step=1,
    )  # fmt: skip
    assert [path.read_text() for path in (tmp_path / "orders").iterdir()] == ["tea", "tea"]
    values = np.array([[1.0], [0.0]])
    scores = Scores(("correct",), (1.0,), ("outcome",), values, 2)
    credit = by_hook(groups, scores, values, load_attribute("credit.py:only_last_turn", tmp_path))
    first, last = groups[0].rollouts[0].turn_lengths
    assert credit.tokens == [[0.0] * first + [0.5] * last, [0.0] * first + [-0.5] * last]


@pytest.fixture
def agent_files(tmp_path, monkeypatch):
    """The files that docs/agents.md shows, in a folder."""
    for language in ("python", "yaml"):
        for text in blocks("docs/agents.md", language):
            if file := re.match(r"# (\w+\.\w+)\n", text):
                (tmp_path / file[1]).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # `python` of the page is the one that runs the tests
    monkeypatch.setenv("SHOP_TOKEN", "Bearer of-the-tests")
    monkeypatch.setenv("NOTES_TOKEN", "Bearer of-the-tests")
    return tmp_path


def entries_of_the_agents_page() -> list[str]:
    return [text for text in blocks("docs/agents.md", "yaml") if text.startswith("tools:")]


def test_tools_in_the_agents_page_do_what_it_says(agent_files):
    from postgrad.rollout import load_tools
    from postgrad.rollout.execute import ToolLimits, execute
    from postgrad.types import ToolCall

    (agent_files / "recipe.yaml").write_text(next(text for text in blocks("docs/agents.md", "yaml") if text.startswith("method:")))
    recipe = load_recipe(agent_files / "recipe.yaml").recipe
    assert isinstance(recipe, GRPORecipe)
    catastrophe = {"pattern": "(a+)+$", "text": "a" * 40 + "b"}
    calls = [
        ToolCall("population", {"city": "Lyon", "unit": "thousands"}),
        ToolCall("population", {"city": "Atlantis"}),
        ToolCall("search", {"query": "TUR"}),
        ToolCall("match", catastrophe),
        ToolCall("match", {"pattern": "^a", "text": "ab"}),
    ]
    with load_tools(recipe.tools, agent_files) as toolbox:
        assert toolbox.terminal == {"answer"}
        [results] = execute([(toolbox.open([]), calls)], ToolLimits(deadline_s=60))
    assert [result.content for result in results] == [
        "522.25", "error: population: no city is called Atlantis; there are: Lyon, Turin", '{"found": ["Turin"]}',
        "error: match: no result within 1 s", "true",
    ]  # fmt: skip


def test_servers_in_the_agents_page_are_tools(agent_files):
    pytest.importorskip("mcp")
    from postgrad.rollout import load_tools

    found = []
    for text in entries_of_the_agents_page():
        (item,) = yaml.safe_load(text)["tools"]
        if "url" in item.get("mcp", {}):
            ToolItem.model_validate(item)  # nobody listens there
            continue
        if "mcp" in item:
            item["mcp"]["start_s"] = 120.0
        with load_tools([item], agent_files) as toolbox:
            found.append([spec.name for spec in toolbox.specs])
    assert found == [["add_note"], ["getItem"]]


def test_agents_page_names_every_option_and_every_kind_of_failure():
    from postgrad.rollout import ErrorKind
    from postgrad.rollout.items import Isolation, MCPServer, OpenAPI

    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    keys = {*ToolItem.model_fields, *MCPServer.model_fields, *OpenAPI.model_fields, *Isolation.model_fields}
    assert [name for name in (*keys, *ErrorKind) if not re.search(rf"\b{name}\b", page)] == []


def test_sandbox_and_environments_in_the_agents_page(agent_files, monkeypatch):
    from postgrad.rollout import load_tools
    from postgrad.rollout.environments import end_session
    from postgrad.rollout.episode import put_back, take_snapshot
    from postgrad.rollout.execute import ToolLimits, execute
    from postgrad.types import Prompt, ToolCall

    recipes = [text for text in blocks("docs/agents.md", "yaml") if text.startswith("method:")]
    found = []
    for text in recipes:
        (agent_files / "recipe.yaml").write_text(text)
        found.append(load_recipe(agent_files / "recipe.yaml").recipe)
    _, coder, game = found
    assert isinstance(game, PPORecipe)
    assert [spec.name for spec in load_tools(coder.tools, agent_files, to_run=False).specs] == ["python"]

    with load_tools(game.tools, agent_files) as toolbox:
        [environment] = toolbox.environments
        session = toolbox.open([environment.reset_arguments(Prompt("games:1", (), {"level": "easy"}), seed=3)])
        assert session.observation == "Guess my number. The level is easy."
        [instance] = session.instances
        wrong = 1 if instance.secret > 1 else 2
        [results] = execute([(session, [ToolCall("guess", {"number": n}) for n in (wrong, instance.secret)])], ToolLimits(deadline_s=60))
        assert [(result.reward, result.done) for result in results] == [(-0.1, False), (1.0, True)]
        [again] = toolbox.open([{"seed": 4}]).instances
        put_back(again, take_snapshot(instance))
        assert (again.secret, again.tries) == (instance.secret, 2)

    with load_tools(["worlds.py:TRLWordle"], agent_files) as toolbox:
        [environment] = toolbox.environments
        session = toolbox.open([environment.reset_arguments(Prompt("words:1", (), {"word": "crane"}))])
        [[result]] = execute([(session, [ToolCall("guess", {"word": "crane"})])], ToolLimits(deadline_s=60))
        assert (result.content, end_session(session).reward) == ("5", 1.0)


def test_problems_in_the_agents_page_are_written_and_scored(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    from postgrad.tasks import score, unpacked

    monkeypatch.chdir(tmp_path)
    (code,) = [text for text in blocks("docs/agents.md", "python") if "postgrad.tasks" in text]
    exec(code, {})
    written = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert len(written) == 500
    assert score(written[0]["answer"], unpacked(written[0]["reasoning_gym"])) == 1.0


def test_styles_of_calls_in_the_agents_page(capsys):
    from typing import get_args

    from postgrad.chat import ToolProtocol
    from postgrad.chat.codecs import STYLES

    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    assert [name for name in (*STYLES, *get_args(ToolProtocol)) if f"`{name}`" not in page] == []
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)`", page, re.MULTILINE)
    shown = {name: call for name, call in rows if name in STYLES}
    for name in ("hermes", "llama3", "pythonic", "mistral", "mistral_v11", "deepseek_v31"):  # the others stand on several lines
        (call,) = STYLES[name].parse(shown[name])[1]
        assert (call.name, dict(call.arguments)) == ("add", {"a": 1})
    (code,) = [text for text in blocks("docs/agents.md", "python") if "STYLES" in text]
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["I look it up.", '[weather(city="Oslo", days=3)]']
    assert "an argument is a literal value, not home" in printed[2]


def test_bfcl_in_the_agents_page_fits_the_real_files(shared_data, tmp_path):
    from postgrad.train.recipe import Pipeline

    (text,) = [text for text in blocks("docs/agents.md", "yaml") if text.startswith("# bfcl.yaml")]
    (tmp_path / "bfcl.yaml").write_text(text, encoding="utf-8")
    for name in ("bfcl_simple_python.jsonl", "bfcl_simple_python_answers.jsonl"):
        (tmp_path / name).symlink_to(shared_data / name)
    recipe = load_recipe(tmp_path / "bfcl.yaml").recipe
    assert isinstance(recipe, Pipeline)
    heldout = []
    for stage in recipe.stages.values():
        train, held = open_rows(stage, tmp_path)
        assert held is not None
        assert (train.format, len(train.read()) + len(held.read())) == ("question+calls", 400)
        heldout.append([row.name for row in held.read()])
    assert heldout[0] == heldout[1]
