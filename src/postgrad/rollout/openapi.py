"""The operations of an HTTP API as tools, from its OpenAPI document.

    2xx                                    the model reads the body
    401 although a secret was sent, 408,
    429, 502, 503, 504, no connection      `InfrastructureError`
    any other status                       the model reads the status and the body, as an error

The model fills in parameters and body. Where requests go, and the secrets that they carry, come from the recipe; a parameter that the
recipe fills in is not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

import yaml

from postgrad.errors import RecipeError, reason
from postgrad.protocols import InfrastructureError
from postgrad.rollout.deadline import DeadlineError, deadline
from postgrad.rollout.declare import Tool, ToolOptions
from postgrad.rollout.failures import ToolError
from postgrad.rollout.functions import Made
from postgrad.rollout.http_call import Reply, send
from postgrad.rollout.items import OpenAPI
from postgrad.rollout.openapi_operation import Body, Operation, Parameter, read_operations
from postgrad.rollout.schema import SchemaArguments
from postgrad.rollout.secrets import Secrets, read_secrets
from postgrad.rollout.signature import ArgumentError
from postgrad.rollout.sources import chosen
from postgrad.suggest import did_you_mean_file
from postgrad.types import ToolSpec

_FETCH_S = 30.0
_IDEMPOTENT = frozenset({"get", "put", "delete"})  # RFC 9110, 9.2.2
_NOT_THE_MODELS = frozenset({408, 429, 502, 503, 504})


def from_document(item: OpenAPI, base: Path) -> Made:
    """One tool per operation. Raises `RecipeError` for a document that cannot be read or that asks for what is not supported."""
    headers = read_secrets(item.headers_from_env, key="headers_from_env")
    query = read_secrets(item.query_from_env, key="query_from_env")
    document, place = _read(item.document, base)
    operations = read_operations(document, where=item.document, given=(frozenset(map(str.lower, headers)), frozenset(query)))
    kept = chosen(operations, include=item.include, exclude=item.exclude)
    service = _Service(headers, query, Secrets([*headers.values(), *query.values()]))
    tools = []
    for read in kept.values():
        operation = read()
        url = item.base_url or _server(operation.servers, place)
        if urlsplit(url).scheme not in ("http", "https"):
            raise RecipeError(f"{url!r} is not an http or https URL", key="base_url", hint="write https://…")
        tools.append(_tool(operation, _Call(operation, url.rstrip("/"), service), item.prefix, where=item.document))
    return Made(tuple(tools))


def _tool(operation: Operation, call: _Call, prefix: str, *, where: str) -> Tool:
    name = prefix + operation.name
    spec = ToolSpec(name, operation.description, operation.schema)
    options = ToolOptions(idempotent=operation.method in _IDEMPOTENT)
    return Tool(spec, SchemaArguments(operation.schema, tool=name, where=where), call, options)


# ---- the document


def _read(name: str, base: Path) -> tuple[Mapping[str, Any], str]:
    """The document, and the URL that its relative URLs start from ("" for a file)."""
    if urlsplit(name).scheme in ("http", "https"):
        text, place = _fetch(name), name
    else:
        try:
            text, place = (base / name).read_text(encoding="utf-8"), ""
        except (OSError, UnicodeDecodeError) as error:
            hint = did_you_mean_file(base / name, "the path is relative to the recipe")
            raise RecipeError(f"the OpenAPI document cannot be read: {reason(error)}", where=name, hint=hint) from error
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else json.loads(json.dumps(yaml.safe_load(text), default=str))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:  # what YAML has beyond JSON: dates are text, keys are text
        raise RecipeError(f"the OpenAPI document is neither JSON nor YAML: {error}", where=name) from error
    version = str(document.get("openapi", "")) if isinstance(document, dict) else ""
    if not version.startswith(("3.0", "3.1")):
        found = f"it says openapi: {version}" if version else "it has no `openapi: 3.…`"
        raise RecipeError(f"this is no OpenAPI 3.0 or 3.1 document: {found}", where=name, hint="convert older documents to 3.0 first")
    return document, place


def _fetch(url: str) -> str:
    try:
        with deadline(_FETCH_S):
            reply = send("GET", url, headers={"Accept": "application/json, application/yaml, text/yaml"})
    except (DeadlineError, InfrastructureError, ToolError) as error:
        why = f"no answer within {_FETCH_S:g} s" if isinstance(error, DeadlineError) else str(error)
        raise RecipeError(f"the OpenAPI document cannot be fetched: {why}", where=url) from error
    text = reply.text
    if reply.status != 200 or text is None:
        hint = f"it moved to {reply.location}" if reply.location else "save it as a file and name that"
        raise RecipeError(f"the OpenAPI document cannot be fetched: HTTP {reply.status}", where=url, hint=hint)
    return text


def _server(servers: list[Any], place: str) -> str:
    """The first server's URL, with the defaults of its variables."""
    try:
        first: Any = servers[0] if servers else {}
        url = str(first.get("url", ""))
        for name, variable in (first.get("variables") or {}).items():
            url = url.replace(f"{{{name}}}", str(variable.get("default", "")))
    except (AttributeError, KeyError, TypeError) as error:
        what = "`servers` is not a list of mappings with a url"
        raise RecipeError(what, key="base_url", hint="write https://…") from error
    full = urljoin(place, url or "/") if place else url
    if not urlsplit(full).scheme:
        raise RecipeError("the document does not say where the API is", key="base_url", hint="write https://…")
    return full


# ---- a call


@dataclass(frozen=True)
class _Service:
    """What every request carries besides what the model fills in."""

    headers: Mapping[str, str]
    query: Mapping[str, str]
    secrets: Secrets


class _Call:
    """Called with the arguments of one operation, makes its request."""

    def __init__(self, operation: Operation, url: str, service: _Service) -> None:
        self._operation, self._url, self._service = operation, url, service

    def __call__(self, /, **arguments: Any) -> str | bytes:
        operation, service = self._operation, self._service
        path, query = operation.path, list(service.query.items())
        headers: dict[str, str] = {}
        encoded = [urlencode(query)] if query else []
        for name, parameter in operation.parameters.items():
            if name not in arguments:
                continue
            value = arguments[name]
            if parameter.place == "path":
                path = path.replace(f"{{{parameter.name}}}", _in_path(parameter, value, name))
            elif parameter.place == "query":
                encoded += [f"{quote(key, safe='')}={text}" for key, text in _in_query(parameter, value)]
            else:
                headers[parameter.name] = _in_header(parameter, value, name)
        body, kind = _body(operation.body, arguments)
        sent = {"Accept": "application/json, text/*;q=0.9, */*;q=0.1", "User-Agent": "postgrad", **kind, **headers, **service.headers}
        target = self._url + path + (f"?{'&'.join(encoded)}" if encoded else "")
        try:
            reply = send(operation.method.upper(), target, headers=sent, body=body)
        except InfrastructureError as error:
            raise InfrastructureError(service.secrets.hide(f"{self._url}: {error}")) from error
        return self._result(reply)

    def _result(self, reply: Reply) -> str | bytes:
        hide = self._service.secrets.hide
        text = reply.text
        if 200 <= reply.status < 300:
            if not reply.body:
                return f"HTTP {reply.status}"
            return reply.body if text is None else hide(text)
        status = f"HTTP {reply.status}"
        if reply.status in _NOT_THE_MODELS or (reply.status == 401 and (self._service.headers or self._service.query)):
            raise InfrastructureError(f"{self._url}: {status}")
        said = f" to {hide(reply.location)}" if reply.location else f": {hide(text)}" if text else ""
        raise ToolError(status + said, transient=reply.status >= 500)


def _body(body: Body | None, arguments: Mapping[str, Any]) -> tuple[bytes | None, dict[str, str]]:
    if body is None or body.argument not in arguments:
        return None, {}
    value: Any = arguments[body.argument]
    headers = {"Content-Type": body.kind}
    if body.kind == "application/x-www-form-urlencoded":
        return urlencode([(key, _text(item)) for key, held in value.items() for item in _listed(held)]).encode(), headers
    if body.kind == "text/plain":
        return _text(value).encode(), {"Content-Type": "text/plain; charset=utf-8"}
    return json.dumps(value, ensure_ascii=False).encode(), headers


# ---- parameters as OpenAPI writes them (style and explode)


def _in_path(parameter: Parameter, value: Any, argument: str) -> str:
    text = _simple(parameter, value)
    if not text or {".", ".."} & set(re.split(r"[/\\]", unquote(text))):  # servers and proxies may take it for another path
        raise ArgumentError(f"argument '{argument}' is {json.dumps(value)}: it stands in a path and cannot be empty or a step of dots")
    return text


def _in_header(parameter: Parameter, value: Any, argument: str) -> str:
    text = _simple(parameter, value, encode=False)
    if not text.isprintable() or not text.isascii():
        raise ArgumentError(f"argument '{argument}' is {json.dumps(value)}: it stands in a header, which holds printable ASCII only")
    return text


def _simple(parameter: Parameter, value: Any, *, encode: bool = True) -> str:
    def write(item: Any) -> str:
        return quote(_text(item), safe="") if encode else _text(item)

    if parameter.as_json:
        return write(json.dumps(value))
    if isinstance(value, list):
        return ",".join(write(item) for item in value)
    if isinstance(value, dict):
        between = "=" if parameter.explode else ","
        return ",".join(f"{write(key)}{between}{write(item)}" for key, item in value.items())
    return write(value)


_BETWEEN = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C"}


def _in_query(parameter: Parameter, value: Any) -> Iterator[tuple[str, str]]:
    """(name, encoded value) pairs."""

    def write(item: Any) -> str:
        return quote(_text(item), safe="")

    if parameter.as_json:
        yield parameter.name, write(json.dumps(value))
    elif isinstance(value, list):
        items = [write(item) for item in value]
        yield from (
            [(parameter.name, item) for item in items] if parameter.explode else [(parameter.name, _BETWEEN[parameter.style].join(items))]
        )
    elif isinstance(value, dict):
        if parameter.style == "deepObject":
            yield from [(f"{parameter.name}[{key}]", write(item)) for key, item in value.items()]
        elif parameter.explode:
            yield from [(key, write(item)) for key, item in value.items()]
        else:
            yield parameter.name, ",".join(f"{write(key)},{write(item)}" for key, item in value.items())
    else:
        yield parameter.name, write(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    """A string as it is, null as nothing, anything else as JSON (`true`, `1.5`)."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
