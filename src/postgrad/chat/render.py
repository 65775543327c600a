"""Conversations through a chat template: what the template gets, and errors that name the template's problem.

Templates fail on `content: null`, want arguments as objects (some as JSON text), sometimes call ids of nine characters, and may lack
the system or tool role.
`Template` knows these facts of one template (it probes them once) and renders text; it never makes token ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import jinja2

from postgrad.chat.templates import BUILT_IN, built_in
from postgrad.chat.tokens import Tokenizer
from postgrad.errors import DataError
from postgrad.types import Message, ToolCall, ToolSpec

Dicts = list[dict[str, Any]]

SENTINEL = "pgSentinel7Q"
PROBE_USER = Message("user", "pgQuestion3Z")
PROBE_TOOL = ToolSpec(
    "pgTool5K", "pgAbout5K", {"type": "object", "properties": {"pgKey": {"type": "string", "description": "pgText"}}, "required": ["pgKey"]}
)
PROBE_CALL = ToolCall("pgTool5K", {"pgKey": "pgValue"}, id="call_0")

_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


Renderer = Callable[[list[Any], list[Any], bool], Any]
"""(messages, tools, whether to add the generation prompt) → text"""
_COMPILER, _WRAPPER = "transformers.utils.chat_template_utils", "transformers.tokenization_utils_base"
_ASKED = {"role": "user", "content": PROBE_USER.content}
_TOLD = {"role": "assistant", "content": SENTINEL}
_PROBES: tuple[tuple[list[Any], list[Any], bool], ...] = (
    ([_ASKED], [], True),
    ([{"role": "system", "content": SENTINEL}, _ASKED, _TOLD, _ASKED, _TOLD], [], False),
    ([_ASKED], [PROBE_TOOL.to_json()], True),
)


def _printed(render: Renderer, probe: tuple[list[Any], list[Any], bool]) -> Any:
    """The text, or what the template raised."""
    try:
        return render(*probe)
    except _RENDER_ERRORS as error:
        return type(error), str(error)


class TemplateRefuses(DataError):
    """The template raised an error of its own on this conversation (order of roles, a missing key)."""


class Template:
    """The tokenizer's chat template, or a built-in one (`name`), or Jinja text. `source` is the Jinja text; `note` is for the user."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = dict(options)
        self.note = ""
        if template in BUILT_IN:
            eos = next((text for text, index in special.items() if index == tokenizer.eos_token_id), "")
            template, self.note = built_in(template, special, eos)
        if template is not None:
            self._options["chat_template"] = template
        self.source = str(self._options.get("chat_template") or tokenizer.chat_template or "")
        self.exists = bool(self.source)
        self._arguments_as_text = self._long_call_ids = self._needs_call_ids = False
        self._render: Renderer = self._wrapped
        if self.exists:
            self._render = self._straight() or self._wrapped
            self._probe_calls()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool = False) -> str:
        """The template's text; `prompt` asks for the generation prompt. Raises `DataError` with the template's own words."""
        if not self.exists:
            raise DataError(
                "the tokenizer has no chat template, and the data are messages",
                hint=f"name a built-in template ({', '.join(BUILT_IN)}) or use text prompts",
            )
        try:
            text = self._render(list(messages), list(tools), prompt)
        except _RENDER_ERRORS as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TemplateRefuses(
                f"the chat template refuses this conversation ({roles}): {error}", hint="change the order of roles, or use another template"
            ) from error
        if not isinstance(text, str):
            raise DataError(f"the tokenizer's apply_chat_template gave {type(text).__name__}, expected text")
        return text

    def _wrapped(self, messages: list[Any], tools: list[Any], prompt: bool) -> Any:
        options = dict(self._options) | ({"tools": tools} if tools else {})
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)

    def _straight(self) -> Renderer | None:
        """The template itself in transformers' sandbox, without what its `apply_chat_template` does around it for every row, and with the
        sandbox's globals in one dict, for Jinja copies them for every row. None unless both print the same."""
        compile = getattr(sys.modules.get(_COMPILER), "_compile_jinja_template", None)
        wrapper = getattr(type(self._tokenizer), "apply_chat_template", None)
        own = "apply_chat_template" in vars(self._tokenizer) or getattr(wrapper, "__module__", "") != _WRAPPER
        if compile is None or own:
            return None
        compiled = compile(self.source)
        sandbox = compiled.environment
        template = sandbox.template_class.from_code(sandbox, sandbox.compile(self.source), dict(compiled.globals))
        variables = {**self._tokenizer.special_tokens_map, **self._options}
        variables.pop("chat_template", None)

        def render(messages: list[Any], tools: list[Any], prompt: bool) -> Any:
            return template.render(messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **variables)

        return render if all(_printed(render, probe) == _printed(self._wrapped, probe) for probe in _PROBES) else None

    def accepts(self, messages: Sequence[Message], *, must_show: str, tools: Sequence[ToolSpec] = (), prompt: bool = False) -> bool:
        """True when the template renders these messages and its text holds `must_show`."""
        try:
            return must_show in self.render(self.dicts(messages), [tool.to_json() for tool in tools], prompt=prompt)
        except DataError:
            return False

    def dicts(self, messages: Sequence[Message]) -> Dicts:
        """Messages as templates expect them: no null anywhere, arguments as objects, only the keys that say something."""
        ids = _CallIds(long=self._long_call_ids, always=self._needs_call_ids)
        return [self._dict(message, ids) for message in messages]

    def _dict(self, message: Message, ids: _CallIds) -> dict[str, Any]:
        result: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            result["reasoning_content"] = message.reasoning
        if message.tool_calls:
            result["tool_calls"] = [self._call(call, ids) for call in message.tool_calls]
        if message.role == "tool" and (identifier := ids.of_result(message.tool_call_id)):
            result["tool_call_id"] = identifier
        if message.name:
            result["name"] = message.name
        return result

    def _call(self, call: ToolCall, ids: _CallIds) -> dict[str, Any]:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False) if self._arguments_as_text else dict(call.arguments)
        identifier = ids.of_call(call.id)
        written = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        return written | ({"id": identifier} if identifier else {})

    def _probe_calls(self) -> None:
        """How the template wants calls: the first way in which it prints an argument as JSON, else the first that it does not refuse."""
        turn = Message("assistant", "", tool_calls=(PROBE_CALL,))
        for shown in ('"pgValue"', PROBE_CALL.name):
            for self._arguments_as_text, self._long_call_ids in product((False, True), repeat=2):
                if self.accepts([PROBE_USER, turn], must_show=shown, tools=[PROBE_TOOL]):
                    nameless = Message("assistant", "", tool_calls=(ToolCall(PROBE_CALL.name, PROBE_CALL.arguments),))
                    self._needs_call_ids = not self.accepts([PROBE_USER, nameless], must_show=shown, tools=[PROBE_TOOL])
                    return
        self._arguments_as_text = self._long_call_ids = False


class _CallIds:
    """Ids of the calls of one conversation as a template wants them: as they are, or of nine characters numbered by first use (`long`),
    and for those without one an id all the same (`always`), which the next result without one then has."""

    def __init__(self, *, long: bool, always: bool) -> None:
        self._long, self._always = long, always
        self._written: dict[str, str] = {}
        self._waiting: list[str] = []
        self._count = 0

    def of_call(self, identifier: str) -> str:
        if identifier or not self._always:
            return self._known(identifier)
        self._waiting.append(self._new())
        return self._waiting[-1]

    def of_result(self, identifier: str) -> str:
        if identifier or not self._always:
            return self._known(identifier)
        return self._waiting.pop(0) if self._waiting else self._new()

    def _known(self, identifier: str) -> str:
        if not identifier or not self._long:
            return identifier
        if identifier not in self._written:
            self._written[identifier] = self._new()
        return self._written[identifier]

    def _new(self) -> str:
        self._count += 1
        return f"call{self._count - 1:05d}"
