"""Tools of real MCP servers, over stdin and stdout and over HTTP: what they say, and what happens when they fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postgrad.chat import ChatFormat
from postgrad.errors import RecipeError
from postgrad.protocols import InfrastructureError, SamplingParams, TurnRequest
from postgrad.rollout import ErrorKind, RolloutConfig, collect, load_tools
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.tools import Toolbox, ToolSession
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.types import Message, Prompt, StopReason, ToolCall, ToolResult

pytest.importorskip("mcp")

START_S = 120.0  # on a busy machine
PROGRAM = [sys.executable, str(Path(__file__).parent / "servers" / "mcp_server.py")]


def test_a_list_of_tools_that_names_one_twice_or_never_ends_is_refused() -> None:
    from types import SimpleNamespace

    from postgrad.rollout.items import MCPServer
    from postgrad.rollout.mcp_session import _Session
    from postgrad.rollout.mcp_tools import _listed

    twice = SimpleNamespace(tools=lambda: [SimpleNamespace(name="look"), SimpleNamespace(name="look")])
    with pytest.raises(RecipeError, match="the server lists two tools called 'look'"):
        _listed(twice, MCPServer(command=["x"]))  # type: ignore[arg-type]

    async def page(cursor: str | None) -> SimpleNamespace:
        return SimpleNamespace(tools=[], next_cursor="more")

    session = _Session()
    session._client = SimpleNamespace(list_tools=page)  # type: ignore[assignment]
    with pytest.raises(ConnectionError, match="more than 100 pages"):
        asyncio.run(session.tools())


class HTTPServer:
    """The test server on a port of this machine; it can be killed and started again there."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, str(self.port)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(1200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def http() -> Iterator[HTTPServer]:
    server = HTTPServer()
    yield server
    server.kill()


@pytest.fixture(scope="module", params=["stdio", "http"])
def toolbox(request: pytest.FixtureRequest) -> Iterator[Toolbox]:
    how = {"command": PROGRAM} if request.param == "stdio" else {"url": request.getfixturevalue("http").url}
    with load(how) as toolbox:
        yield toolbox


def load(server: dict[str, Any], folder: Path = Path(), **options: Any) -> Toolbox:
    return load_tools([{"mcp": {"start_s": START_S, **server}, **options}], folder)


def session(toolbox: Toolbox) -> ToolSession:
    return toolbox.open([{} for _ in toolbox.environments])


def run(tools: ToolSession, *calls: ToolCall, deadline_s: float = 100.0) -> tuple[ToolResult, ...]:
    return execute([(tools, calls)], ToolLimits(deadline_s=deadline_s))[0]


def ask(toolbox: Toolbox, name: str, /, *, deadline_s: float = 100.0, **arguments: Any) -> ToolResult:
    return run(session(toolbox), ToolCall(name, arguments), deadline_s=deadline_s)[0]


def eventually(toolbox: Toolbox, name: str) -> ToolResult:
    """The first answer that is no infrastructure error."""
    for _ in range(600):
        result = ask(toolbox, name)
        if result.error != ErrorKind.INFRASTRUCTURE:
            return result
        time.sleep(0.1)
    raise AssertionError(result.content)


# ---- what the model is told, and what it reads


def test_names_descriptions_and_schemas_are_the_servers(toolbox: Toolbox) -> None:
    spec = toolbox.by_name["add"].spec
    assert spec.description == "Add two numbers."
    assert spec.parameters["properties"] == {"a": {"type": "integer"}, "b": {"default": 1, "type": "integer"}}
    assert spec.parameters["required"] == ["a"]


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", {"a": 1, "b": 2}, "3"),
        ("add", {"a": 1}, "2"),
        ("image", {}, "[image: image/png]"),
        ("rows", {}, '{\n  "rows": [\n    1,\n    2\n  ]\n}'),
    ],
)
def test_results_become_text(toolbox: Toolbox, name: str, arguments: dict[str, Any], content: str) -> None:
    result = ask(toolbox, name, **arguments)
    assert (result.content, result.error) == (content, "")


def test_an_error_of_a_tool_is_read_by_the_model(toolbox: Toolbox) -> None:
    result = ask(toolbox, "fail", text="no such city")
    assert result.error == ErrorKind.RAISED
    assert result.content.startswith("error: fail: Error executing tool fail")


def test_wrong_arguments_never_reach_the_server(toolbox: Toolbox) -> None:
    missing, wrong = run(session(toolbox), ToolCall("add", {}), ToolCall("add", {"a": "1"}))
    assert (missing.error, missing.content) == (ErrorKind.ARGUMENTS, "error: add: missing required argument 'a'")
    assert (wrong.error, wrong.content) == (ErrorKind.ARGUMENTS, "error: add: argument 'a' is \"1\": should be integer")


def test_a_call_that_takes_too_long_is_ended_and_the_session_goes_on(toolbox: Toolbox) -> None:
    before = ask(toolbox, "pid").content
    result = ask(toolbox, "wait", seconds=30.0, deadline_s=0.3)
    assert (result.error, result.content) == (ErrorKind.DEADLINE, "error: wait: no result within 0.3 s")
    assert ask(toolbox, "pid").content == before


def test_calls_of_many_rollouts_run_side_by_side(toolbox: Toolbox) -> None:
    results = run(session(toolbox), *[ToolCall("meet", {"others": 8})] * 8)
    assert [result.content for result in results] == ["met"] * 8


def test_what_the_server_says_of_a_tool_decides_whether_it_may_be_repeated(toolbox: Toolbox) -> None:
    assert toolbox.by_name["wait"].options.idempotent
    assert not toolbox.by_name["mine"].options.idempotent


# ---- which tools, under which names


def test_a_program_is_started_as_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_SERVER", "s3cret-value")
    monkeypatch.setenv("KEY_OF_TRAINER", "another-value")
    server = {"command": PROGRAM, "env": ["KEY_OF_SERVER"], "include": ["environment", "folder"], "prefix": "my_"}
    with load(server, tmp_path, terminal=True, deadline_s=100.0) as toolbox:
        assert [spec.name for spec in toolbox.specs] == ["my_environment", "my_folder"]
        assert toolbox.terminal == {"my_environment", "my_folder"}
        assert toolbox.by_name["my_folder"].options.deadline_s == 100.0
        assert ask(toolbox, "my_environment", name="KEY_OF_SERVER").content == "[secret]"
        assert ask(toolbox, "my_environment", name="KEY_OF_TRAINER").content == "nothing"
        assert ask(toolbox, "my_folder").content == str(tmp_path)


def test_headers_from_the_environment_reach_the_server(http: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_SERVER", "Bearer s3cret-value")
    with load({"url": http.url, "headers_from_env": {"Authorization": "KEY_OF_SERVER"}, "exclude": ["die"]}) as toolbox:
        assert "die" not in toolbox.by_name
        assert ask(toolbox, "header", name="authorization").content == "[secret]"
        assert ask(toolbox, "header", name="user-agent").content.startswith("python-httpx")


# ---- sessions


def test_one_session_of_a_run_is_shared_by_its_rollouts(toolbox: Toolbox) -> None:
    first, second = session(toolbox), session(toolbox)
    counted = [int(run(one, ToolCall("mine", {"by": 1}))[0].content) for one in (first, second, first)]
    assert counted == [counted[0], counted[0] + 1, counted[0] + 2]


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_a_session_of_a_rollout_is_its_own(http: HTTPServer, how: str) -> None:
    server = {"command": PROGRAM} if how == "stdio" else {"url": http.url}
    with load({**server, "session": "rollout", "include": ["mine", "pid"]}) as toolbox:
        assert toolbox.environments[0].open_s == START_S
        first, second = session(toolbox), session(toolbox)
        assert [run(one, ToolCall("mine", {"by": 1}))[0].content for one in (first, second, first)] == ["1", "1", "2"]
        in_order = run(second, *[ToolCall("mine", {"by": 1})] * 4)
        assert [result.content for result in in_order] == ["2", "3", "4", "5"]
        pids = {int(run(one, ToolCall("pid", {}))[0].content) for one in (first, second)}
        first.close()
        second.close()
    assert len(pids) == (2 if how == "stdio" else 1)
    if how == "stdio":
        assert not any(running(pid) for pid in pids)


# ---- servers that fail


def test_a_server_that_dies_fails_the_calls_under_way_and_is_there_for_the_next() -> None:
    with load({"command": PROGRAM, "include": ["wait", "die", "pid"]}) as toolbox:
        before = ask(toolbox, "pid").content
        under_way, died = run(session(toolbox), ToolCall("wait", {"seconds": 60.0}), ToolCall("die", {}))
        assert [under_way.error, died.error] == [ErrorKind.INFRASTRUCTURE] * 2
        assert "the server is leaving" in died.content  # what it wrote to stderr
        after = ask(toolbox, "pid")
        assert (after.error, after.content != before) == ("", True)


def test_a_server_behind_a_url_may_go_away_and_come_back() -> None:
    server = HTTPServer()
    try:
        with load({"url": server.url, "include": ["pid", "die"]}) as toolbox:
            before = ask(toolbox, "pid").content
            server.kill()
            assert ask(toolbox, "pid").error == ErrorKind.INFRASTRUCTURE
            gone = ask(toolbox, "pid")
            assert (gone.error, "cannot be reached" in gone.content) == (ErrorKind.INFRASTRUCTURE, True)
            server.start()
            assert eventually(toolbox, "pid").content not in ("", before)
    finally:
        server.kill()


def test_a_server_that_cannot_be_started_again_is_an_infrastructure_error(tmp_path: Path) -> None:
    once = tmp_path / "once.py"
    once.write_text(
        f"import os, sys\nif os.path.exists('gone'): sys.exit('gone')\nopen('gone', 'w')\nos.execv({PROGRAM[0]!r}, {PROGRAM!r})\n"
    )
    toolbox = load({"command": [sys.executable, "once.py"], "session": "rollout"}, tmp_path)
    with toolbox, pytest.raises(InfrastructureError, match=r"cannot be reached: .*\(it said: gone\)"):
        session(toolbox)


@pytest.mark.slow
def test_in_the_agent_loop_a_lost_server_spoils_its_rollout_alone() -> None:
    """Sample 0 calls what ends its server, twice; sample 1 goes on with its own."""
    tokenizer = tiny_tokenizer()

    def write(request: TurnRequest) -> str:
        name = "die" if request.key.sample == 0 else "mine"
        arguments = {} if name == "die" else {"by": request.turn + 1}
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" if request.turn < 2 else "done"

    with load({"command": PROGRAM, "session": "rollout", "include": ["die", "mine"]}) as toolbox:
        [group] = collect(
            [(0, Prompt("data.jsonl:1", (Message("user", "Count."),)))],
            sampler=ScriptedPolicy(write, tokenizer=tokenizer),
            chat=ChatFormat(tokenizer),
            toolbox=toolbox,
            config=RolloutConfig(group_size=2, max_tokens=300, tool_deadline_s=100.0),
            params=SamplingParams(),
            seed=0,
            step=0,
        )
    lost, counted = group.rollouts
    assert (lost.stop, len(lost.infrastructure_errors)) == (StopReason.INFRASTRUCTURE, 2)
    assert [result.content for result in counted.tool_results] == ["1", "3"]
    assert counted.final_answer == "done"


# ---- faults before the run


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": ["/nowhere/server"]}, "FileNotFoundError"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit('no config')"]}, r"Connection closed \(it said: no config\)"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "Connection closed"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_s": 0.5}, "not ready within 0.5 s"),
        ({"url": "http://127.0.0.1:1/mcp"}, "ConnectError"),
        ({"command": PROGRAM, "env": ["NOT_SET_AT_ALL"]}, "NOT_SET_AT_ALL is not set"),
        ({"url": "http://127.0.0.1:1/mcp", "headers_from_env": {"X-Key": "NOT_SET_AT_ALL"}}, "NOT_SET_AT_ALL is not set"),
    ],
)
def test_a_server_that_is_not_there_or_not_fit_is_a_recipe_error(server: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_tools([{"mcp": server}], Path())
    assert str(caught.value.key).startswith("tools[0].mcp")
    assert caught.value.hint


def test_a_path_that_is_no_server_is_a_recipe_error(http: HTTPServer) -> None:
    with pytest.raises(RecipeError, match="Not Found"):
        load({"url": http.url.replace("/mcp", "/nowhere")})


def test_without_the_package_the_entry_is_a_recipe_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in ("postgrad.rollout.mcp_tools", "postgrad.rollout.mcp_session"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("postgrad.rollout.mcp_tools", raising=False)
    with pytest.raises(RecipeError, match="needs the package mcp") as caught:
        load({"command": PROGRAM})
    assert "postgrad[mcp]" in str(caught.value.hint)


def test_servers_that_were_started_are_ended_when_a_later_entry_is_at_fault(tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(f"import os\nopen('pid', 'w').write(str(os.getpid()))\nos.execv({PROGRAM[0]!r}, {PROGRAM!r})\n")
    with pytest.raises(RecipeError, match="does not exist"):
        load_tools([{"mcp": {"command": [sys.executable, "noted.py"]}}, "nowhere.py:f"], tmp_path)
    assert not running(int((tmp_path / "pid").read_text()))


def running(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1]
