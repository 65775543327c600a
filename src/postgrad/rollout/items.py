"""What an entry of `tools:` may say. Reading and checking only; `sources` makes tools of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError


def _no_bool(value: Any) -> Any:
    """`true` is no number, although Python says so."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0.0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


def _refuse(key: str, message: str) -> PydanticCustomError:
    """An error about a combination of keys, reported at `key`; the same form as in `train.recipe`."""
    return PydanticCustomError("combination", "{message}", {"key": key, "message": message})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Isolation(_Section):
    """Limits of the processes in which a function runs. `isolate: process` stands for all defaults."""

    memory_gb: Seconds = 2.0
    """What a process may allocate beyond what is loaded when the function's file has been imported; a call that needs more fails."""
    processes: bool = False
    """Whether the function may start processes of its own; they are killed with it."""
    env: list[Name] = []
    """Names of environment variables that it may read. It gets PATH, HOME, LANG and the like, and nothing else."""

    @model_validator(mode="before")
    @classmethod
    def _by_word(cls, value: Any) -> Any:
        return {} if value == "process" else value


class _Source(_Section):
    include: Annotated[list[Name], Field(min_length=1)] | None = None
    """Names of the tools to take; left out = all."""
    exclude: list[Name] = []
    """Names of tools to leave out."""
    prefix: str = ""
    """Put before the names of its tools, where those of two servers would be the same."""

    @model_validator(mode="after")
    def _one_list(self) -> _Source:
        if self.include is not None and self.exclude:
            raise _refuse("exclude", "write include or exclude, not both")
        return self


class MCPServer(_Source):
    """A server that speaks the Model Context Protocol: a program on stdin and stdout, or a URL (streamable HTTP)."""

    command: Annotated[list[Name], Field(min_length=1)] | None = None
    """The program that is the server, and its arguments; it is started in the recipe's folder."""
    url: str | None = None
    """Where the server listens, such as http://127.0.0.1:8000/mcp."""
    session: Literal["run", "rollout"] = "run"
    """One session for all rollouts, or one for each. With a command that is a process for each rollout; a server behind a url must keep
    the sessions of its clients apart (protocol versions before 2026)."""
    env: list[Name] = []
    """Names of environment variables that the program may read. It gets PATH, HOME, LANG and the like, and nothing else."""
    headers_from_env: dict[Name, Name] = {}
    """Header → name of the environment variable that holds its whole value."""
    start_s: Seconds = 30.0
    """Seconds in which the server must answer that it is ready."""

    @model_validator(mode="after")
    def _one_way(self) -> MCPServer:
        if (self.command is None) == (self.url is None):
            raise _refuse("command", "an MCP server is a command or a url: write one of the two")
        if self.env and self.command is None:
            raise _refuse("env", "is for the program of a command; a server behind a url gets headers_from_env")
        if self.headers_from_env and self.url is None:
            raise _refuse("headers_from_env", "is for a server behind a url; the program of a command gets env")
        return self


class OpenAPI(_Source):
    """The operations of an HTTP API, described by an OpenAPI 3.0 or 3.1 document."""

    document: Name
    """A JSON or YAML file (relative to the recipe), or a URL."""
    base_url: str | None = None
    """What the paths of the document are put after; left out = its first server."""
    headers_from_env: dict[Name, Name] = {}
    """Header → name of the environment variable that holds its whole value."""
    query_from_env: dict[Name, Name] = {}
    """Query parameter → name of the environment variable that holds its value."""


class ToolItem(_Section):
    """One entry of `tools:`: a function or class of yours, an MCP server or an HTTP API. A text stands for `use`."""

    use: Name | None = None
    """`file.py:function` or `file.py:Class` (relative to the recipe), `package.module:name`, or a shipped tool (python, python_session)."""
    mcp: MCPServer | None = None
    openapi: OpenAPI | None = None
    isolate: Isolation | None = None
    """Run the function in processes that can be killed, `process` with all defaults; left out = in a thread of the trainer."""
    deadline_s: Seconds | None = None
    """Seconds one call may take; left out = what `@tool` says, else rollout.tool_deadline_s."""
    max_output_tokens: Count | None = None
    """Tokens of one result, by the model's tokenizer; left out = what `@tool` says, else rollout.max_output_tokens."""
    max_calls: Count | None = None
    """Calls of each of these tools that one rollout may make; the next ones are refused."""
    terminal: bool | None = None
    """Whether a successful call ends the rollout; left out = what `@tool` says."""
    idempotent: bool | None = None
    """Whether calling twice does what calling once does; left out = what `@tool`, the HTTP method or the MCP server says."""
    retry: Annotated[int, BeforeValidator(_no_bool), Field(ge=0)] | None = None
    """How often a failed call is made again, within its deadline. Only for idempotent tools."""
    concurrency: Count | None = None
    """Calls that are made at the same time; a call that waits for its turn spends nothing of its deadline. Left out = 4 workers with
    `isolate`, else no limit."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_kind(self) -> ToolItem:
        kinds = [name for name in ("use", "mcp", "openapi") if getattr(self, name) is not None]
        if len(kinds) != 1:
            said = " and ".join(kinds) or "none"
            raise _refuse(kinds[-1] if kinds else "use", f"an entry of tools is one of use, mcp and openapi (this one has {said})")
        if self.isolate is not None and self.use is None:
            raise _refuse("isolate", f"is for functions of a file; what {kinds[0]} calls runs in another process already")
        if self.concurrency is not None and self.use is not None and self.isolate is None:
            raise _refuse("concurrency", "needs isolate: a call that waits in this process could not be held to its deadline")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> Any:
        said: Mapping[str, Any] = {name: value for name, value in handler(self).items() if value is not None}
        return said["use"] if set(said) == {"use"} else said

    @property
    def files(self) -> tuple[str, ...]:
        """What may be files of the user's: whether they are, and have changed, is for the caller to see."""
        if self.use is not None:
            return (self.use.rpartition(":")[0],)
        if self.openapi is not None:
            return (self.openapi.document,)
        command = self.mcp.command if self.mcp is not None else None
        return tuple(word for word in command or () if not Path(word).is_absolute())
