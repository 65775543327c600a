"""The tools of an MCP server. `mcp_session` keeps the connection; here a server becomes tools, and what it answers becomes text.

is_error in a result, or an error code of the server's own   the model reads what the server says
invalid parameters                                           the model reads it, as wrong arguments
no answer in time                                            the model reads that; the session goes on
a connection that is lost, or any other protocol error       `InfrastructureError`, and the next call finds a new session
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcp_types as types

from postgrad.errors import RecipeError
from postgrad.protocols import InfrastructureError
from postgrad.rollout.declare import Tool, ToolOptions
from postgrad.rollout.environments import Environment
from postgrad.rollout.failures import ToolError
from postgrad.rollout.functions import Made
from postgrad.rollout.items import MCPServer
from postgrad.rollout.mcp_session import Connection, Server
from postgrad.rollout.schema import SchemaArguments
from postgrad.rollout.secrets import Secrets, read_secrets, read_variables
from postgrad.rollout.signature import compact_schema
from postgrad.rollout.sources import chosen
from postgrad.types import ToolSpec


def from_server(item: MCPServer, base: Path) -> Made:
    """Connect, and take over the tools that the server lists. Raises `RecipeError` when it cannot be reached."""
    variables = read_variables(item.env, key="env")
    headers = read_secrets(item.headers_from_env, key="headers_from_env")
    server = Server(
        command=tuple(item.command or ()), folder=base.resolve(), variables=variables, url=item.url or "", headers=headers,
        start_s=item.start_s, keeps_sessions=item.session == "rollout",
    )  # fmt: skip
    connection = Connection(server, Secrets([*variables.values(), *headers.values()]))
    with ExitStack() as stack:
        stack.callback(connection.close)
        listed = chosen(_listed(connection, item), include=item.include, exclude=item.exclude)
        if item.session == "run":
            tools = [_tool(tool, _OnConnection(connection, tool.name), item) for tool in listed.values()]
            stack.pop_all()
            return Made(tuple(tools), close=connection.close)
        tools = [_tool(tool, _OnOwnConnection(tool.name), item, environment=0) for tool in listed.values()]
    return Made(tuple(tools), (Environment(connection.another, f"MCP server {server.name}", open_s=item.start_s),))


def _listed(connection: Connection, item: MCPServer) -> dict[str, types.Tool]:
    try:
        found = connection.tools()
    except InfrastructureError as error:
        hint = "start the command by hand to see what it says" if item.command else "is the server running, and is this its URL?"
        raise RecipeError(str(error), hint=hint) from error
    listed = {tool.name: tool for tool in found}
    if len(listed) < len(found):
        names = [tool.name for tool in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecipeError(f"the server lists two tools called {twice!r}", hint="which one would be called, nobody can say")
    if not listed:
        raise RecipeError("the server has no tools", hint="leave the entry out")
    return listed


def _tool(listed: types.Tool, function: Callable[..., Any], item: MCPServer, *, environment: int | None = None) -> Tool:
    name = item.prefix + listed.name
    description = listed.description or listed.title or listed.name
    hints = listed.annotations
    idempotent = hints is not None and bool(hints.idempotent_hint or hints.read_only_hint)
    arguments = SchemaArguments(listed.input_schema, tool=name)
    spec = ToolSpec(name, description, compact_schema(listed.input_schema))
    return Tool(spec, arguments, function, ToolOptions(idempotent=idempotent), environment)


@dataclass(frozen=True, slots=True)
class _OnConnection:
    """Calls one tool on the session that all rollouts share."""

    connection: Connection
    name: str

    def __call__(self, /, **arguments: Any) -> str:
        return _text(self.connection.call(self.name, arguments), self.connection.secrets)


@dataclass(frozen=True, slots=True)
class _OnOwnConnection:
    """Calls one tool on the session of the rollout, which is bound as the first argument."""

    name: str

    def __call__(self, connection: Connection, /, **arguments: Any) -> str:
        return _text(connection.call(self.name, arguments), connection.secrets)


def _text(result: types.CallToolResult, secrets: Secrets) -> str:
    """What the model reads of a result: its texts, a note for what is no text; its structured content where it has nothing else."""
    text = secrets.hide("\n".join(_block(block) for block in result.content))
    if not text and result.structured_content is not None:
        text = secrets.hide(json.dumps(result.structured_content, ensure_ascii=False))
    if result.is_error:
        raise ToolError(text or "failed", transient=True)
    return text


def _block(block: types.ContentBlock) -> str:
    if isinstance(block, types.TextContent):
        return block.text
    if isinstance(block, types.EmbeddedResource):
        held = block.resource
        return held.text if isinstance(held, types.TextResourceContents) else f"[{held.uri}: {held.mime_type or 'binary'}]"
    if isinstance(block, types.ResourceLink):
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type}: {block.mime_type}]"
