"""A connection to an MCP server that is opened again after it was lost. Calls come from many threads; the protocol runs in one of its own.

The `mcp` package is asynchronous, and what opens a session must also close it, in one task: `_Session` is that task. All sessions of a
process share one event loop, in a daemon thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from postgrad.protocols import InfrastructureError
from postgrad.rollout.deadline import DeadlineError, seconds_left
from postgrad.rollout.failures import ToolError
from postgrad.rollout.results import ErrorKind, exception_text
from postgrad.rollout.secrets import Secrets
from postgrad.rollout.signature import ArgumentError

if logging.getLogger("mcp").level == logging.NOTSET:
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it prints a traceback for every line that is no message; we say what went wrong

_T = TypeVar("_T")
_GRACE_S = 1.0
_END_S = 10.0
"""Seconds in which a program that does not answer is certainly ended: it is asked first, then told, then killed."""
_PROBES = 3
"""A server that is silent when asked for the newest protocol is asked for an older one, all within its time to start."""
_SAID_CHARS = 500
_PAGES = 100
_OF_THE_PROTOCOL = frozenset(
    {types.PARSE_ERROR, types.INVALID_REQUEST, types.METHOD_NOT_FOUND, types.INTERNAL_ERROR, types.CONNECTION_CLOSED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How to reach a server: a program (`command`, in `folder`, with `variables`), or a `url` (with `headers`).

    keeps_sessions: a server behind a URL is asked for a session of its own. Only versions of the protocol before 2026 have them there.
    """

    command: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str]
    url: str
    headers: Mapping[str, str]
    start_s: float
    keeps_sessions: bool = False

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)


class Connection:
    """One session with a server, as long as it lasts; a call that finds it lost begins another, for the calls after it."""

    def __init__(self, server: Server, secrets: Secrets) -> None:
        self._server, self.secrets = server, secrets
        self._lock = threading.Lock()
        self._opening: Future[_Session] | None = None

    def another(self) -> Connection:
        """A new session with the same server, open. Raises `InfrastructureError`."""
        connection = Connection(self._server, self.secrets)
        connection._session(self._server.start_s + _END_S)
        return connection

    def tools(self) -> list[types.Tool]:
        """What the server lists. Raises `InfrastructureError`."""
        session = self._session(self._server.start_s + _END_S)
        return self._ask(session, session.tools(), self._server.start_s)

    def call(self, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """What a tool answers, `is_error` included. Takes as long as the caller's deadline allows.

        Raises `DeadlineError`, `ArgumentError` or `ToolError` for what the model may read, `InfrastructureError` for the rest.
        """
        seconds = seconds_left()
        # Waiting for a lost session to come back is not the model's fault, so it ends before the deadline does.
        session = self._session(0.8 * seconds)
        seconds = min(seconds, seconds_left(), threading.TIMEOUT_MAX)
        return self._ask(session, session.call(name, dict(arguments), seconds), seconds)

    def close(self) -> None:
        """End the session, and the program that is the server."""
        with self._lock:
            opening, self._opening = self._opening, None
        if opening is None:
            return
        with contextlib.suppress(Exception):
            session = opening.result(self._server.start_s + _END_S)
            _loop().run(session.end()).result(_END_S)

    def _session(self, seconds: float) -> _Session:
        opening = self._begun()
        try:
            return opening.result(min(seconds, threading.TIMEOUT_MAX))
        except FutureTimeout:
            raise self._failure(f"is not there again after {seconds:g} s") from None
        except Exception as error:
            self._forget(opening)
            raise self._failure(f"cannot be reached: {_cause(error)}") from error

    def _begun(self) -> Future[_Session]:
        with self._lock:
            if self._opening is None:
                self._opening = _loop().run(_Session.begin(self._server))
            return self._opening

    def _ask(self, session: _Session, question: Coroutine[Any, Any, _T], seconds: float) -> _T:
        try:
            return _loop().run(question).result(min(seconds + _GRACE_S, threading.TIMEOUT_MAX))
        except FutureTimeout:
            raise DeadlineError from None
        except MCPError as error:
            if error.code == types.REQUEST_TIMEOUT:
                raise DeadlineError from error
            text = self.secrets.hide(error.message)
            if error.code == types.INVALID_PARAMS:
                raise ArgumentError(text) from error
            if error.code not in _OF_THE_PROTOCOL:
                raise ToolError(text, transient=True) from error
            self._lost(session)
            raise self._failure(f"failed: {text}{session.said()}") from error
        except RuntimeError as error:  # of the client: the result does not fit the schema that the server gave for it
            raise ToolError(self.secrets.hide(str(error)), kind=ErrorKind.OUTPUT) from error
        except Exception as error:
            self._lost(session)
            raise self._failure(f"failed: {exception_text(error)}{session.said()}") from error

    def _lost(self, session: _Session) -> None:
        """Begin another session now, so that it is there for the next call; unless somebody else has done so."""
        with self._lock:
            opening = self._opening
            if opening is None or not opening.done() or opening.exception() is not None or opening.result() is not session:
                return
            self._opening = _loop().run(_Session.begin(self._server))
        _loop().run(session.end())

    def _forget(self, opening: Future[_Session]) -> None:
        with self._lock:
            if self._opening is opening:
                self._opening = None

    def _failure(self, text: str) -> InfrastructureError:
        return InfrastructureError(self.secrets.hide(f"MCP server {self._server.name} {text}"))


class _Session:
    """A session that is open. Lives in the event loop."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._leave = asyncio.Event()
        self._said = bytearray()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, server: Server) -> _Session:
        """Raises whatever keeps the session from opening, with what the program said last."""
        session, opened = cls(), asyncio.get_running_loop().create_future()
        session._task = asyncio.create_task(session._hold(server, opened))
        try:
            async with asyncio.timeout(server.start_s):
                await asyncio.shield(opened)
        except BaseException as error:
            opened.cancel()
            session._task.cancel()
            with contextlib.suppress(BaseException):
                await session._task
            what = f"not ready within {server.start_s:g} s" if isinstance(error, TimeoutError) else _cause(error)
            raise ConnectionError(f"{what}{session.said()}") from error
        return session

    async def tools(self) -> list[types.Tool]:
        assert self._client is not None
        found: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ConnectionError(f"lists its tools on more than {_PAGES} pages, and no end is in sight")

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> types.CallToolResult:
        assert self._client is not None
        return await self._client.call_tool(name, arguments, read_timeout_seconds=seconds)

    async def end(self) -> None:
        self._leave.set()
        if self._task is not None:
            with contextlib.suppress(BaseException):
                await self._task

    def said(self) -> str:
        """The end of what the program wrote to stderr, for an error message."""
        text = " ".join(self._said.decode("utf-8", "replace").split())
        return f" (it said: {text[-_SAID_CHARS:]})" if text else ""

    async def _hold(self, server: Server, opened: asyncio.Future[None]) -> None:
        """Open, stay until told to leave, close."""
        try:
            async with self._transport(server) as transport, self._opened(server, transport) as self._client:
                opened.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
            elif isinstance(error, asyncio.CancelledError):
                raise
            # After that it is the transport that broke: the call that is being made, or the next one, hears of it.

    @staticmethod
    def _opened(server: Server, transport: Any) -> Client:
        mode = "legacy" if server.url and server.keeps_sessions else "auto"
        return Client(transport, mode=mode, read_timeout_seconds=server.start_s / _PROBES)

    @contextlib.asynccontextmanager
    async def _transport(self, server: Server) -> AsyncIterator[Any]:
        if server.url:
            async with httpx2.AsyncClient(headers=dict(server.headers), timeout=httpx2.Timeout(server.start_s, read=None)) as client:
                yield streamable_http_client(server.url, http_client=client)
            return
        command = StdioServerParameters(
            command=server.command[0], args=list(server.command[1:]), cwd=server.folder, env=dict(server.variables)
        )
        async with self._listening() as errors:
            yield stdio_client(command, errlog=errors)

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[Any]:
        """A file for the program's stderr, of which the end is kept."""
        reading, writing = os.pipe()
        pipe = os.fdopen(reading, "rb", buffering=0)
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        keeping = asyncio.create_task(self._keep(stream))
        try:
            with os.fdopen(writing, "w") as errors:
                yield errors
        finally:
            keeping.cancel()
            transport.close()

    async def _keep(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(4096):
            self._said = (self._said + chunk)[-4 * _SAID_CHARS :]


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="postgrad-mcp", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


@cache
def _loop() -> _Loop:
    return _Loop()


def _cause(error: BaseException) -> str:
    """What went wrong in the end: task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ConnectionError) and str(error) else exception_text(error)
