"""Operations of an OpenAPI document against a real HTTP server: what is sent, what the model reads, and what it never sees."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

from postgrad.errors import RecipeError
from postgrad.rollout import ErrorKind, load_tools
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.tools import Toolbox
from postgrad.types import ToolCall, ToolResult

DOCUMENT = """
openapi: 3.0.3
info: {title: Shop, version: "1"}
paths:
  /items/{id}:
    parameters:
      - {$ref: "#/components/parameters/Id"}
      - {name: X-Trace, in: header, schema: {type: string}}
    get:
      operationId: getItem
      summary: Look an item up.
      description: Answers with everything known of it.
      parameters:
        - {name: tags, in: query, schema: {type: array, items: {type: string}}}
        - {name: near, in: query, style: form, explode: false, schema: {type: array, items: {type: integer}}}
        - {name: filter, in: query, style: deepObject, schema: {type: object, additionalProperties: {type: string}}}
        - {name: shape, in: query, content: {application/json: {schema: {type: object}}}}
        - {name: deep, in: query, schema: {type: boolean}, description: Everything.}
        - {name: key, in: query, required: true, schema: {type: string}}
        - {name: session, in: cookie, schema: {type: string}}
        - {name: Authorization, in: header, schema: {type: string}}
    delete: {operationId: deleteItem}
  /items:
    post:
      operationId: makeItem
      requestBody: {$ref: "#/components/requestBodies/Item"}
  /form:
    post:
      operationId: fill
      requestBody:
        required: true
        content:
          application/x-www-form-urlencoded:
            schema: {type: object, properties: {a: {type: string}, b: {type: array, items: {type: integer}}}}
  /status/{status}:
    get: {parameters: [{name: status, in: path, required: true, schema: {type: integer}}]}
  /{odd}:
    get: {operationId: "odd one!", parameters: [{name: odd, in: path, required: true, schema: {type: string}}]}
  /upload:
    post: {operationId: upload, requestBody: {content: {multipart/form-data: {schema: {type: object}}}}}
components:
  parameters:
    Id: {name: id, in: path, required: true, description: Its number., schema: {type: string}}
  requestBodies:
    Item: {required: true, content: {application/json: {schema: {$ref: "#/components/schemas/Item"}}}}
  schemas:
    Item:
      type: object
      required: [id, name]
      properties:
        id: {type: integer, readOnly: true}
        name: {type: string, nullable: true, example: Tea, x-internal: true}
        price: {type: number, minimum: 0, exclusiveMinimum: true}
        kind: {$ref: "#/components/schemas/Kind"}
        parts: {type: array, items: {$ref: "#/components/schemas/Item"}}
    Kind: {type: string, enum: [tea, coffee]}
"""


class API(BaseHTTPRequestHandler):
    """Answers with what it was asked; a path below /status answers with that status, others as their names say."""

    protocol_version = "HTTP/1.1"
    flaky = 0

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        seen = {"method": self.command, "path": parts.path, "query": parse_qsl(parts.query), "headers": dict(self.headers), "body": body}
        status, kind, data = 200, "application/json", json.dumps(seen).encode()
        if parts.path.startswith("/status/"):
            status = int(parts.path.rpartition("/")[2])
            kind, data = "text/plain", b"because" if status != 204 else b""
        elif parts.path == "/slow":
            time.sleep(5)
        elif parts.path == "/drip":
            self.close_connection = True
            try:
                for letter in b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + b"x" * 1000:
                    self.wfile.write(bytes([letter]))
                    time.sleep(0.05)
            except OSError:
                pass
            return
        elif parts.path == "/broken":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        elif parts.path == "/bytes":
            kind, data = "image/png", b"\x89PNG"
        elif parts.path == "/huge":
            kind, data = "text/plain", b"x" * (17 * 2**20)
        elif parts.path == "/latin":
            kind, data = "text/plain; charset=latin-1", "é".encode("latin-1")
        elif parts.path == "/flaky":
            API.flaky += 1
            status = 503 if API.flaky < 3 else 200
        elif parts.path == "/document.yaml":
            kind, data = "application/yaml", DOCUMENT.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status in (301, 302):
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), API)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.yaml").write_text(DOCUMENT)
    return tmp_path


@pytest.fixture
def load(folder: Path, url: str) -> Any:
    def load(options: dict[str, Any] | None = None, **keys: Any) -> Toolbox:
        chosen = {} if {"include", "exclude"} & set(keys) else {"exclude": ["upload"]}
        return load_tools([{"openapi": {"document": "shop.yaml", "base_url": url, **chosen, **keys}, **(options or {})}], folder)

    return load


def ask(toolbox: Toolbox, name: str, /, *, deadline_s: float = 30.0, **arguments: Any) -> ToolResult:
    return execute([(toolbox.open([]), [ToolCall(name, arguments)])], ToolLimits(deadline_s=deadline_s, max_output_chars=10_000))[0][0]


def seen(toolbox: Toolbox, name: str, /, **arguments: Any) -> dict[str, Any]:
    result = ask(toolbox, name, **arguments)
    assert result.error == "", result.content
    return dict(json.loads(result.content))


# ---- what the model is told


def test_operations_become_tools(load: Any) -> None:
    toolbox = load()
    assert [spec.name for spec in toolbox.specs] == ["getItem", "deleteItem", "makeItem", "fill", "get_status_status", "odd_one"]
    spec = toolbox.by_name["getItem"].spec
    assert spec.description == "Look an item up.\nAnswers with everything known of it."
    assert spec.parameters["required"] == ["id", "key"]
    assert list(spec.parameters["properties"]) == ["id", "X-Trace", "tags", "near", "filter", "shape", "deep", "key"]
    assert spec.parameters["properties"]["id"] == {"type": "string", "description": "Its number."}
    assert toolbox.by_name["deleteItem"].spec.description == "DELETE /items/{id}"


def test_schemas_stand_alone_and_are_json_schema(load: Any) -> None:
    schema = load().by_name["makeItem"].spec.parameters
    body = schema["properties"]["body"]
    assert schema["required"] == ["body"]
    assert body["required"] == ["name"]  # id is only in answers
    assert body["properties"]["name"] == {"type": ["string", "null"]}
    assert body["properties"]["price"] == {"type": "number", "exclusiveMinimum": 0}
    assert body["properties"]["kind"] == {"type": "string", "enum": ["tea", "coffee"]}
    assert body["properties"]["parts"]["items"] == {"$ref": "#/$defs/Item"}
    assert schema["$defs"]["Item"]["properties"]["parts"]["items"] == {"$ref": "#/$defs/Item"}


def test_operations_can_be_chosen_and_renamed(load: Any) -> None:
    toolbox = load({"max_calls": 2}, include=["deleteItem", "getItem"], prefix="shop_")
    assert [spec.name for spec in toolbox.specs] == ["shop_getItem", "shop_deleteItem"]
    assert toolbox.by_name["shop_getItem"].options.max_calls == 2


def test_what_http_calls_idempotent_may_be_repeated(load: Any) -> None:
    toolbox = load()
    assert {name for name, one in toolbox.by_name.items() if not one.options.idempotent} == {"makeItem", "fill"}


# ---- what is sent


def test_parameters_are_written_as_the_document_says(load: Any) -> None:
    sent = seen(
        load(), "getItem", id="a b/c?", key="k&=", tags=["x", "y z"], near=[1, 2], filter={"color": "red"}, shape={"r": 1}, deep=True,
        **{"X-Trace": "7"},
    )  # fmt: skip
    assert sent["path"] == "/items/a%20b%2Fc%3F"
    assert sorted(sent["query"]) == sorted(
        [["tags", "x"], ["tags", "y z"], ["near", "1,2"], ["filter[color]", "red"], ["shape", '{"r": 1}'], ["deep", "true"], ["key", "k&="]]
    )
    assert (sent["method"], sent["headers"]["X-Trace"]) == ("GET", "7")


def test_bodies_are_json_or_forms(load: Any) -> None:
    toolbox = load()
    item = {"name": "Té", "price": 2.5, "parts": [{"name": None}]}
    sent = seen(toolbox, "makeItem", body=item)
    assert (json.loads(sent["body"]), sent["headers"]["Content-Type"]) == (item, "application/json")
    sent = seen(toolbox, "fill", body={"a": "x y", "b": [1, 2]})
    assert (parse_qsl(sent["body"]), sent["headers"]["Content-Type"]) == (
        [("a", "x y"), ("b", "1"), ("b", "2")],
        "application/x-www-form-urlencoded",
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("getItem", {"id": "1"}, "missing required argument 'key'"),
        ("getItem", {"id": 1, "key": "k"}, "argument 'id' is 1: should be string"),
        ("getItem", {"id": "1", "key": "k", "x": 1}, "unexpected argument 'x' (it takes: id, X-Trace"),
        ("makeItem", {"body": {"name": "x", "price": 0}}, "argument 'body.price' is 0"),
        ("makeItem", {"body": {"name": "x", "kind": "milk"}}, 'argument \'body.kind\' is "milk": should be "tea" or "coffee"'),
        ("makeItem", {"body": {"name": "x", "parts": [{"name": 3}]}}, "argument 'body.parts[0].name' is 3: should be string or null"),
        ("deleteItem", {"id": ".."}, "argument 'id' is \"..\": it stands in a path and cannot be empty or a step of dots"),
        ("deleteItem", {"id": "x/../../admin"}, "cannot be empty or a step of dots"),
        ("deleteItem", {"id": ""}, "cannot be empty or a step of dots"),
        ("deleteItem", {"id": "1", "X-Trace": "a\r\nX-Admin: 1"}, "it stands in a header, which holds printable ASCII only"),
    ],
)
def test_wrong_arguments_are_not_sent(load: Any, name: str, arguments: dict[str, Any], message: str) -> None:
    result = ask(load(), name, **arguments)
    assert result.error == ErrorKind.ARGUMENTS
    assert message in result.content


# ---- what the model reads


@pytest.mark.parametrize(("path", "content"), [("bytes", "4 bytes, base64: iVBORw=="), ("latin", "é")])
def test_a_body_becomes_text(load: Any, path: str, content: str) -> None:
    assert ask(load(), "odd_one", odd=path).content == content


def test_an_empty_body_is_its_status(load: Any) -> None:
    assert ask(load(), "get_status_status", status=204).content == "HTTP 204"


@pytest.mark.parametrize(
    ("status", "kind", "content"),
    [
        (400, ErrorKind.RAISED, "error: get_status_status: HTTP 400: because"),
        (401, ErrorKind.RAISED, "error: get_status_status: HTTP 401: because"),
        (404, ErrorKind.RAISED, "error: get_status_status: HTTP 404: because"),
        (500, ErrorKind.RAISED, "error: get_status_status: HTTP 500: because"),
        (302, ErrorKind.RAISED, "error: get_status_status: HTTP 302 to http://127.0.0.1:1/elsewhere"),
        (429, ErrorKind.INFRASTRUCTURE, None),
        (503, ErrorKind.INFRASTRUCTURE, None),
    ],
)
def test_a_status_is_the_models_or_not(load: Any, status: int, kind: ErrorKind, content: str | None) -> None:
    result = ask(load(), "get_status_status", status=status)
    assert result.error == kind
    assert content is None or result.content == content


@pytest.mark.parametrize("path", ["slow", "drip"])
def test_an_answer_that_takes_too_long_is_given_up(load: Any, path: str) -> None:
    started = time.monotonic()
    result = ask(load({"concurrency": 1}), "odd_one", odd=path, deadline_s=0.3)  # behind a gate nobody else watches the clock
    assert (result.error, result.content) == (ErrorKind.DEADLINE, "error: odd_one: no result within 0.3 s")
    assert time.monotonic() - started < 4


def test_an_answer_that_is_too_long_is_an_error(load: Any) -> None:
    result = ask(load(), "odd_one", odd="huge")
    assert (result.error, result.content) == (ErrorKind.OUTPUT, "error: odd_one: answered with more than 16777216 bytes")


def test_a_server_that_breaks_off_or_is_not_there_is_infrastructure(load: Any) -> None:
    assert ask(load(), "odd_one", odd="broken").error == ErrorKind.INFRASTRUCTURE
    gone = ask(load(base_url="http://127.0.0.1:1"), "odd_one", odd="x")
    assert gone.error == ErrorKind.INFRASTRUCTURE
    assert "ConnectionRefusedError" in gone.content


def test_a_failure_that_may_pass_is_retried(load: Any) -> None:
    API.flaky = 0
    assert ask(load({"retry": 1}, include=["odd_one"]), "odd_one", odd="flaky").error == ErrorKind.INFRASTRUCTURE
    assert ask(load({"retry": 1}, include=["odd_one"]), "odd_one", odd="flaky").error == ""
    assert API.flaky == 3


# ---- secrets


def test_secrets_are_sent_and_never_seen(load: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "Bearer s3cret-token")
    monkeypatch.setenv("SHOP_KEY", "s3cret-key")
    with caplog.at_level("DEBUG"):
        toolbox = load(headers_from_env={"Authorization": "SHOP_TOKEN"}, query_from_env={"key": "SHOP_KEY"})
        assert "key" not in toolbox.by_name["getItem"].spec.parameters["properties"]
        result = ask(toolbox, "getItem", id="1")
    sent = json.loads(result.content)
    assert (sent["headers"]["Authorization"], dict(sent["query"])["key"]) == ("[secret]", "[secret]")
    assert "s3cret" not in result.content + repr(toolbox) + caplog.text
    denied = ask(toolbox, "get_status_status", status=401)
    assert denied.error == ErrorKind.INFRASTRUCTURE  # the secret is at fault, not the model
    assert "s3cret" not in denied.content


def test_a_secret_does_not_follow_a_redirect(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "Bearer s3cret-token")
    result = ask(load(headers_from_env={"Authorization": "SHOP_TOKEN"}), "get_status_status", status=301)
    assert result.content == "error: get_status_status: HTTP 301 to http://127.0.0.1:1/elsewhere"


def test_a_secret_in_an_error_is_hidden(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "s3cret-key")
    result = ask(load(base_url="http://127.0.0.1:1", query_from_env={"key": "SHOP_KEY"}), "getItem", id="1")
    assert "s3cret" not in result.content


@pytest.mark.parametrize(("value", "message"), [(None, "SHOP_TOKEN is not set"), ("Bearer x", "shorter than 6 characters")])
def test_a_secret_that_is_missing_or_cannot_be_recognised_is_refused(
    load: Any, monkeypatch: pytest.MonkeyPatch, value: str | None, message: str
) -> None:
    if value is not None:
        monkeypatch.setenv("SHOP_TOKEN", value)
    with pytest.raises(RecipeError, match=message):
        load(headers_from_env={"Authorization": "SHOP_TOKEN"})


# ---- where the document and the API are


def test_a_document_may_be_json_or_fetched(folder: Path, url: str) -> None:
    (folder / "shop.json").write_text(json.dumps(yaml.safe_load(DOCUMENT)))
    for document in ("shop.json", f"{url}/document.yaml"):
        with load_tools([{"openapi": {"document": document, "base_url": url, "include": ["deleteItem"]}}], folder) as toolbox:
            assert seen(toolbox, "deleteItem", id="7")["path"] == "/items/7"


@pytest.mark.parametrize(
    ("servers", "document"),
    [
        ("[{url: 'URL/v1/'}]", "file"),
        ("[{url: 'http://{host}/v1', variables: {host: {default: 'HOST'}}}]", "file"),
        ("[{url: '/v1'}]", "url"),
    ],
)
def test_requests_go_to_the_documents_server(folder: Path, url: str, servers: str, document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCUMENT + f"servers: {servers}".replace("URL", url).replace("HOST", url.removeprefix("http://"))
    (folder / "shop.yaml").write_text(text)
    monkeypatch.setitem(globals(), "DOCUMENT", text)
    named = "shop.yaml" if document == "file" else f"{url}/document.yaml"
    with load_tools([{"openapi": {"document": named, "include": ["deleteItem"]}}], folder) as toolbox:
        assert seen(toolbox, "deleteItem", id="7")["path"] == "/v1/items/7"


def test_openapi_31_schemas_are_taken_as_they_are(folder: Path, url: str) -> None:
    document = {
        "openapi": "3.1.0",
        "paths": {
            "/x": {"get": {"parameters": [{"name": "n", "in": "query", "schema": {"type": ["integer", "null"], "exclusiveMinimum": 3}}]}}
        },
    }
    (folder / "new.json").write_text(json.dumps(document))
    with load_tools([{"openapi": {"document": "new.json", "base_url": url}}], folder) as toolbox:
        assert toolbox.specs[0].parameters["properties"]["n"] == {"type": ["integer", "null"], "exclusiveMinimum": 3}
        assert ask(toolbox, "get_x", n=3).error == ErrorKind.ARGUMENTS
        assert seen(toolbox, "get_x", n=None)["query"] == []


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({}, {"document": "nowhere.yaml"}, "cannot be read"),
        ({"openapi": "2.0"}, {}, "no OpenAPI 3.0 or 3.1 document: it says openapi: 2.0"),
        ({"openapi": None, "swagger": "2.0"}, {}, "no OpenAPI 3.0 or 3.1 document"),
        ({"paths": {}}, {}, "no operations"),
        ({}, {"include": ["getItems"]}, "there is no tool 'getItems'"),
        ({}, {}, "operation `upload` takes a body of multipart/form-data, which is not supported"),
        ({"components": {}}, {}, "refers to nothing"),
        ({"paths": {"/x": {"$ref": "other.yaml#/x"}}}, {}, "refers to another document"),
        ({"paths": {"/x": {"get": {"operationId": "a"}}, "/y": {"get": {"operationId": "a"}}}}, {}, "two operations are called `a`"),
        ({}, {"base_url": "ftp://x"}, "not an http or https URL"),
        ({}, {"base_url": None, "include": ["deleteItem"]}, "does not say where the API is"),
        ({"paths": {"/x": {"get": {"parameters": [{"name": "c", "in": "cookie", "required": True}]}}}}, {}, "needs the cookie 'c'"),
        ({"paths": {"/x": {"get": {"parameters": [{"name": "p", "in": "query", "style": "odd"}]}}}}, {}, "in the style 'odd'"),
        ({}, {"document": "http://127.0.0.1:1/x.yaml"}, "cannot be fetched: ConnectionRefusedError"),
        ({}, {"document": "URL/status/404"}, "cannot be fetched: HTTP 404"),
    ],
)
def test_a_document_that_is_not_fit_is_a_recipe_error(
    folder: Path, url: str, change: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    (folder / "shop.yaml").write_text(yaml.safe_dump({**yaml.safe_load(DOCUMENT), **change}))
    given = {"document": "shop.yaml", "base_url": url, **keys}
    given["document"] = given["document"].replace("URL", url)
    with pytest.raises(RecipeError, match=message) as caught:
        load_tools([{"openapi": given}], folder)
    assert str(caught.value.key).startswith("tools[0].openapi")
    assert caught.value.key != "tools[0].openapi" or caught.value.where == given["document"]


@pytest.mark.parametrize("text", ["{", "a: [", "just text", "- a\n- b\n"])
def test_a_file_that_is_no_document_is_a_recipe_error(folder: Path, text: str) -> None:
    (folder / "shop.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"neither JSON nor YAML|no OpenAPI"):
        load_tools([{"openapi": {"document": "shop.yaml"}}], folder)


def test_retry_is_refused_for_what_http_does_not_call_idempotent(load: Any) -> None:
    with pytest.raises(RecipeError, match="`makeItem` is not known to be idempotent"):
        load({"retry": 1})
    assert load({"retry": 1, "idempotent": True}).by_name["makeItem"].options.retry == 1


# ---- documents of others


def document(operation: Any, path: str = "/a", **more: Any) -> dict[str, Any]:
    return {"openapi": "3.1.0", "servers": [{"url": "http://127.0.0.1:1"}], "paths": {path: {"post": operation}}, **more}


def taking(schema: Any) -> dict[str, Any]:
    return {"operationId": "f", "requestBody": {"content": {"application/json": {"schema": schema}}}}


WIDE = {
    f"S{i}": {"type": "object", "properties": {side: {"$ref": f"#/components/schemas/S{i + 1}"} for side in "ab"}} for i in range(30)
} | {"S30": {"type": "string"}}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (document(None), "`post` is no mapping"),
        (document({"operationId": "???"}), "operationId without letters"),
        (document({"operationId": "f"}, "/a/{id}"), "operation `f` has {id} in its path and no path parameter"),
        (document({"operationId": "f", "parameters": [{"in": "query"}]}), "`f` is not written as OpenAPI wants it: KeyError: 'name'"),
        (document({"operationId": "f", "parameters": [{"name": 5, "in": "query"}]}), "the name 5 of a parameter is no text"),
        (document({"operationId": "f", "requestBody": {"content": {"application/json": None}}}), "not written as OpenAPI wants it"),
        (document({"operationId": "f", "summary": 5}), "not written as OpenAPI wants it"),
        (document(taking("text")), "'text' is no schema"),
        (document(taking({"type": "object", "properties": {"n": {}}, "required": "n"})), "no valid JSON Schema"),
        (document({"operationId": "f"}, servers=["http://x"]), "`servers` is not a list of mappings"),
        (document(taking({"$ref": "#/components/schemas/A"}), components={"schemas": {"A": {"$ref": "#/components/schemas/A"}}}), "itself"),
        (document(taking({"$ref": "#/components/schemas/S0"}), components={"schemas": WIDE}), "more than 20000 parts"),
    ],
)  # fmt: skip
def test_a_document_that_is_none_is_told_with_its_operation(tmp_path: Path, written: Any, message: str) -> None:
    (tmp_path / "odd.json").write_text(json.dumps(written))
    with pytest.raises(RecipeError, match=message):
        load_tools([{"openapi": {"document": "odd.json"}}], tmp_path)


def test_a_date_in_yaml_is_text(tmp_path: Path) -> None:
    schema = "{type: string, default: 2020-01-01}"
    text = (
        f"openapi: 3.1.0\nservers: [{{url: http://x}}]\npaths: {{/a: {{get: {{parameters: [{{name: d, in: query, schema: {schema}}}]}}}}}}"
    )
    (tmp_path / "a.yaml").write_text(text)
    toolbox = load_tools([{"openapi": {"document": "a.yaml"}}], tmp_path)
    assert toolbox.specs[0].parameters["properties"]["d"]["default"] == "2020-01-01"
    assert toolbox.fingerprint


def test_a_schema_without_end_is_an_error_that_the_model_reads(tmp_path: Path) -> None:
    endless = {"A": {"allOf": [{"$ref": "#/components/schemas/A"}]}}
    (tmp_path / "a.json").write_text(json.dumps(document(taking({"$ref": "#/components/schemas/A"}), components={"schemas": endless})))
    result = ask(load_tools([{"openapi": {"document": "a.json"}}], tmp_path), "f", body={})
    assert (result.error, result.content) == (ErrorKind.ARGUMENTS, "error: f: the arguments are nested too deeply")
