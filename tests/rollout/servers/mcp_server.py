"""A small MCP server for the tests: `python mcp_server.py` on stdin and stdout, `python mcp_server.py PORT` on HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.utilities.types import Image
from mcp_types import ToolAnnotations

server = MCPServer("of the tests")
state = {"here": 0}


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def mine(by: int, context: Context) -> str:
    """Count up, in this session."""
    key = str((context.headers or {}).get("mcp-session-id", "the only one"))
    state[key] = state.get(key, 0) + by
    return str(state[key])


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "rested"


@server.tool()
async def meet(others: int) -> str:
    """Wait until so many call."""
    state["here"] += 1
    while state["here"] < others:
        await asyncio.sleep(0.01)
    return "met"


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool()
def die() -> str:
    """End the server."""
    print("the server is leaving", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """What the server sees of its environment."""
    return os.environ.get(name, "nothing")


@server.tool()
def header(name: str, context: Context) -> str:
    """What the client sent."""
    return str((context.headers or {}).get(name, "nothing"))


@server.tool()
def folder() -> str:
    """Where the server runs."""
    return os.getcwd()


@server.tool()
def image() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def rows() -> dict[str, Any]:
    """Structured."""
    return {"rows": [1, 2]}


@server.tool()
def pid() -> int:
    """The process."""
    return os.getpid()


def main() -> None:
    print("a banner on stderr", file=sys.stderr, flush=True)
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
