"""What one chat template does, found once by rendering probes: how a turn begins and ends, which roles it prints, how it writes calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from postgrad.chat import codecs
from postgrad.chat.lower import Roles
from postgrad.chat.render import PROBE_CALL, PROBE_TOOL, PROBE_USER, SENTINEL, Template
from postgrad.chat.tokens import Tokens
from postgrad.errors import DataError
from postgrad.types import Message, ToolCall

_NO_ROLES = Roles(system=False, tool=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """header:            the generation prompt: text between the conversation and what the model writes
    header_is_prompt:  the template has no generation prompt but prints an assistant header, which serves as one
    end:               the special token that ends an assistant turn; "" when the template puts none
    reasoning:         where the reasoning of a last turn must stand to be printed: under its own key, in the content as a `<think>` block
                       (only of templates that know such blocks), or nowhere
    thinks:            the template knows `<think>` blocks; opens_thinking: its generation prompt already opens one
    """

    header: str = ""
    header_is_prompt: bool = False
    end: str = ""
    roles: Roles = _NO_ROLES
    reasoning: Literal["key", "content", "nowhere"] = "nowhere"
    thinks: bool = False
    opens_thinking: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        return ("the template has no generation prompt; the assistant header it prints is used as one",) if self.header_is_prompt else ()


def probe(template: Template, tokens: Tokens, known_stops: frozenset[int]) -> Facts:
    """`known_stops` are the end ids that model and tokenizer name.

    Raises `DataError` when the template cannot print a user and an assistant turn at all.
    """
    user = template.dicts([PROBE_USER])
    before, found, after = template.render([*user, {"role": "assistant", "content": SENTINEL}]).rpartition(SENTINEL)
    if not found:
        raise DataError("the chat template prints nothing for an assistant turn", hint="use another template")
    plain, prompt = template.render(user), template.render(user, prompt=True)
    header_is_prompt = prompt == plain and before.startswith(plain) and bool(before[len(plain) :].strip())
    prompt = before if header_is_prompt else prompt
    header = prompt[len(plain) :] if prompt.startswith(plain) else ""
    return Facts(
        header=header,
        header_is_prompt=header_is_prompt,
        end=_end(after, tokens, known_stops),
        roles=_roles(template),
        reasoning=_reasoning(template),
        thinks=_thinks(template),
        opens_thinking=header.rstrip().endswith("<think>"),
    )


def _thinks(template: Template) -> bool:
    return "<think>" in template.source or "</think>" in template.source


def _reasoning(template: Template) -> Literal["key", "content", "nowhere"]:
    answer = Message("assistant", "pgAnswer", reasoning=SENTINEL)
    if template.accepts([PROBE_USER, answer], must_show=SENTINEL):
        return "key"
    in_content = Message("assistant", f"<think>\n{SENTINEL}\n</think>\n\npgAnswer")
    return "content" if _thinks(template) and template.accepts([PROBE_USER, in_content], must_show=SENTINEL) else "nowhere"


def _end(after: str, tokens: Tokens, known_stops: frozenset[int]) -> str:
    """The special token that ends a turn, from the text printed after an assistant's content.

    Of several without text between them, the one that the model is known to stop at; else the first.
    """
    first = tokens.special_pattern.search(after)
    if first is None:
        return ""
    run, position = [first.group()], first.end()
    while (following := tokens.special_pattern.match(after, position)) is not None:
        run.append(following.group())
        position = following.end()
    return next((text for text in run if tokens.special[text] in known_stops), run[0])


def _roles(template: Template) -> Roles:
    call = Message("assistant", "pgCall")
    return Roles(
        system=template.accepts([Message("system", SENTINEL), PROBE_USER], must_show=SENTINEL, prompt=True),
        tool=template.accepts([PROBE_USER, call, Message("tool", SENTINEL)], must_show=SENTINEL, prompt=True),
    )


PROBE_CALL_TURN = Message("assistant", "", tool_calls=(PROBE_CALL,))


def prints_tools(template: Template) -> bool:
    """True when the template prints tool descriptions itself."""
    return template.accepts([PROBE_USER], must_show=PROBE_TOOL.description, tools=[PROBE_TOOL], prompt=True)


def supports_tools(template: Template) -> bool:
    """True when the template prints tool descriptions and assistant calls itself."""
    return prints_tools(template) and template.accepts([PROBE_USER, PROBE_CALL_TURN], must_show="pgValue", tools=[PROBE_TOOL])


def call_style(written: str, tokens: Tokens) -> codecs.CallStyle | None:
    """The style of a template that writes a turn with the probe call as `written`; None when no style reads it back."""
    for style in codecs.STYLES.values():
        _, calls = style.parse(tokens.shown(written, keep=style.markers))
        if [call for call in calls if isinstance(call, ToolCall)] == [PROBE_CALL]:
            return style
    return None
