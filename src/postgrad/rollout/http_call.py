"""One HTTP request within a deadline. Standard library only: no redirect is followed, so a secret header goes where it was meant to go."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError

from postgrad.protocols import InfrastructureError
from postgrad.rollout.deadline import DeadlineError, seconds_left
from postgrad.rollout.failures import ToolError
from postgrad.rollout.results import ErrorKind, exception_text

LONGEST_BODY = 16 * 2**20
"""Bytes. A longer answer is an error."""


@dataclass(frozen=True, slots=True)
class Reply:
    """content_type: lower case, without parameters. charset: "" where none is named."""

    status: int
    content_type: str
    charset: str
    location: str
    body: bytes

    @property
    def text(self) -> str | None:
        """The body as text; None when it is of a kind that is none."""
        kind = self.content_type
        if kind and not kind.startswith("text/") and not kind.endswith(("json", "xml", "yaml", "javascript", "x-www-form-urlencoded")):
            return None
        try:
            return self.body.decode(self.charset or "utf-8", "replace")
        except LookupError:  # a charset that nobody knows
            return self.body.decode("utf-8", "replace")


def send(method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Reply:
    """The answer, whatever its status.

    Raises `DeadlineError` when it is not there in time, `InfrastructureError` when the server cannot be reached or breaks off, and
    `ToolError` when the answer is too long.
    """
    left = seconds_left()
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    try:
        with _watched(left), _OPENER.open(request, timeout=None if left == float("inf") else left) as response:
            kind = response.headers
            return Reply(
                response.status, kind.get_content_type() if "content-type" in kind else "", kind.get_content_charset() or "",
                kind.get("location", ""), _body(response),
            )  # fmt: skip
    except (OSError, http.client.HTTPException) as error:  # `URLError` and timeouts are both `OSError`
        seconds_left()  # when the time has passed, that is why it broke
        cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
        if isinstance(cause, TimeoutError):
            raise DeadlineError from error
        raise InfrastructureError(exception_text(cause)) from error


def _body(response: Any) -> bytes:
    received = bytearray()
    while chunk := response.read1(2**16):
        received += chunk
        if len(received) > LONGEST_BODY:
            raise ToolError(f"answered with more than {LONGEST_BODY} bytes", kind=ErrorKind.OUTPUT)
    return bytes(received)


# ---- the deadline: a timeout of a socket counts anew with every byte, so a thread of its own ends the connection

_SOCKETS: ContextVar[list[socket.socket]] = ContextVar("postgrad_http_sockets")


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Connections that are made within this block break after so many seconds."""
    sockets: list[socket.socket] = []
    token = _SOCKETS.set(sockets)
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _break, [sockets])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _SOCKETS.reset(token)


def _break(sockets: list[socket.socket]) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class _Plain(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _SOCKETS.get().append(self.sock)


class _Encrypted(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _SOCKETS.get().append(self.sock)


class _HTTP(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Plain, req)


class _HTTPS(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Encrypted, req)


def _opener() -> urllib.request.OpenerDirector:
    """With the proxies of the environment; without what follows redirects, raises for a status or keeps cookies."""
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), _HTTP(), _HTTPS()):
        opener.add_handler(handler)
    return opener


_OPENER = _opener()
