"""An OpenEnv server (openenv 0.10: `reset`, `step`, one session per websocket) as an environment with the tool `step`.

    # tools.py
    Game = openenv_environment("http://localhost:8000", show="text")
    # the recipe                                      tools: [tools.py:Game], rewards: [{use: environment}]

The tool's parameters are the fields of the server's action. Each rollout has a session of its own, reset with the seed of its prompt.
The environment's `done` ends the rollout and its rewards are those of the calls. Needs `pip install openenv`. For a server whose actions
are MCP tools, name its MCP address in `tools:` instead.
"""

from __future__ import annotations

import inspect
import json
import keyword
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from postgrad.errors import RecipeError
from postgrad.protocols import InfrastructureError
from postgrad.rollout.failures import ToolError
from postgrad.rollout.results import exception_text

_CONNECT_S = 10.0
_TYPES: Mapping[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list[Any], "object": dict[str, Any],
}  # fmt: skip
_LIMITS: Mapping[str, Any] = {
    "minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt", "minLength": "min_length",
    "maxLength": "max_length", "minItems": "min_length", "maxItems": "max_length", "pattern": "pattern",
}  # fmt: skip
_NOT_SHOWN = ("done", "reward", "metadata")


def openenv_environment(
    url: str, *, show: str | None = None, columns: Sequence[str] = (), description: str = "", answer_s: float = 60.0
) -> type:
    """An environment class. The server is asked for its action now; `RecipeError` when it does not answer, or openenv is not installed.

    show:        the field of an observation that the model reads; None = all of it, as JSON.
    columns:     the dataset's columns that `reset` on the server gets, beside `seed`.
    description: of the tool, for the model; "" = the action's own.
    answer_s:    seconds in which the server must answer a message; a call that must end earlier is ended by `tool_deadline_s`.
    """
    action = _action(url)
    client = _client_class()

    class OpenEnv:
        def __init__(self) -> None:
            self._client = client(base_url=url, connect_timeout_s=_CONNECT_S, message_timeout_s=answer_s).sync()
            self.done = False
            self.reward: float | None = None

        def reset(self, seed: int, row: Mapping[str, Any]) -> str:
            return self._read(self._client.reset(seed=seed, **{name: row[name] for name in columns}))

        def close(self) -> None:
            self._client.close()

        def _read(self, result: Any) -> str:
            self.done, self.reward = bool(result.done), result.reward
            seen = {name: value for name, value in result.observation.items() if name not in _NOT_SHOWN}
            return json.dumps(seen, ensure_ascii=False) if show is None else str(seen[show])

        def _step(self, action: Mapping[str, Any]) -> str:
            try:
                result = self._client.step(dict(action))
            except Exception as error:
                if "code: VALIDATION_ERROR" in str(error):
                    raise ToolError(str(error)) from error
                raise InfrastructureError(f"{url}: {exception_text(error)}") from error
            return self._read(result)

    setattr(OpenEnv, "step", _method(action, description or str(action.get("description", "Act in the environment."))))  # noqa: B010
    return OpenEnv


def _action(url: str) -> Mapping[str, Any]:
    """The JSON schema of the server's action."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=_CONNECT_S) as answer:
            schema: Mapping[str, Any] = json.loads(answer.read())["action"]
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"no OpenEnv server answers at {url}: {exception_text(error)}", hint="start it before the run") from error
    return schema


def _client_class() -> Callable[..., Any]:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise RecipeError(f"an OpenEnv server needs the package openenv ({error})", hint="pip install openenv") from error
    found: Callable[..., Any] = GenericEnvClient
    return found


def _method(action: Mapping[str, Any], description: str) -> Callable[..., str]:
    """`step` with the action's fields as typed parameters, those without a default first."""
    fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
    if wrong := next((name for name in fields if not name.isidentifier() or keyword.iskeyword(name)), None):
        raise RecipeError(f"a field of the server's action is called {wrong!r}, which cannot be a parameter")
    required = [name for name in fields if name in action.get("required", ())]
    order = [*required, *(name for name in fields if name not in required)]

    def step(self: Any, **given: Any) -> str:
        answer: str = self._step(given)
        return answer

    texts = [f"    {name}: {text}" for name in order if (text := " ".join(str(fields[name].get("description", "")).split()))]
    step.__doc__ = "\n".join([description, *(["", "Args:", *texts] if texts else [])])
    step.__annotations__ = {name: _type(fields[name]) for name in order} | {"return": str}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=_type(fields[name]))
        if name in required
        else inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].get("default"), annotation=_type(fields[name]))
        for name in order
    ]
    self_first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    step.__signature__ = inspect.Signature([self_first, *parameters])  # type: ignore[attr-defined]
    return step


def _type(field: Mapping[str, Any]) -> Any:
    if "enum" in field:
        return Literal[tuple(field["enum"])]
    if "anyOf" in field:
        kinds = [_type(kind) for kind in field["anyOf"] if kind.get("type") != "null"]
        return kinds[0] | None if len(kinds) == 1 else Any
    limits = {argument: field[name] for name, argument in _LIMITS.items() if name in field}
    kind = _TYPES.get(field.get("type", ""), Any)
    return Annotated[kind, Field(**limits)] if limits else kind
