"""How a conversation becomes tokens, and how sampled tokens become a turn again, for any chat template.

1. `prompt_ids`    exactly what inference sees: the rendered template, generation prompt included, BOS once.
2. `conversation`  a whole conversation for training: which tokens an assistant must write (its content and the end token) is found by
                   rendering prefixes of the conversation, never by searching for text, so an answer that also stands in the question,
                   a trimmed content or a missing `{% generation %}` block cannot shift it.
3. `parse`         sampled ids to content, reasoning and tool calls. Never raises.
4. `glue`          the tokens between a sampled turn and the next one. The sampled turn itself is never rendered again.

A template for which the spans cannot be exact (it rewrites earlier turns, prints no terminator) is refused with a `DataError`.
Prompt and answer are encoded apart, so no token spans their border. Special-token strings inside content stay text (`tokens.Guard`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from postgrad.chat import codecs
from postgrad.chat.lower import Roles, lower
from postgrad.chat.render import PROBE_CALL, PROBE_TOOL, PROBE_USER, SENTINEL, Dicts, Template
from postgrad.chat.tokens import Guard, Tokenizer, Tokens
from postgrad.errors import DataError
from postgrad.types import MalformedCall, Message, ToolCall, ToolSpec

TokenSource = Literal["context", "assistant", "glue"]
ToolProtocol = Literal["template", "text"]


class TemplateRewritesHistory(DataError):
    """The template prints an earlier turn differently once later turns follow (thinking models), so no single row holds every turn."""


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """One conversation as ids. Three tuples of one length.

    source:   "assistant" = the model must write it (content, calls, end token); "glue" = what the template puts around an assistant turn
              (its header, the newline after its end token); "context" = everything else.
    message:  index of the assistant message that a token belongs to; -1 for context.
    """

    token_ids: tuple[int, ...]
    source: tuple[TokenSource, ...]
    message: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One sampled turn. `calls` are in the order written; `message.tool_calls` holds the well-formed ones."""

    message: Message
    calls: tuple[ToolCall | MalformedCall, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """Rendered text of one assistant turn: what precedes it, what the model writes, its end token, what the template adds after it."""

    index: int
    prompt: str
    body: str
    end: str
    tail: str


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation ready to render: template messages, the original index of each, tools, and the guard over all of their text."""

    messages: Dicts
    origin: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    guard: Guard


class ChatFormat:
    """One tokenizer's chat format.

    stop_ids:       every id that ends a turn: those given (generation_config), the tokenizer's end token, the template's terminator
    end_of_turn:    what the template puts after an assistant's content; empty when it puts nothing
    tool_protocol:  "template" = the template prints tools and calls itself; "text" = postgrad's text protocol
    notes:          what was decided about this template, in words for the user
    template:       a built-in template's name (`postgrad.chat.templates.BUILT_IN`) or Jinja text, instead of the tokenizer's own
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: Iterable[int] = (),
        tool_protocol: Literal["auto", "template", "text"] = "auto",
        template: str | None = None,
    ) -> None:
        self._tokens = Tokens(tokenizer)
        self._template = Template(tokenizer, template, self._tokens.special)
        self.notes: tuple[str, ...] = ()
        self._header = ""
        self._header_is_prompt = False
        self._end_text = self._probe_turn() if self.has_template else ""
        self.end_of_turn: tuple[int, ...] = (self._tokens.special[self._end_text],) if self._end_text else ()
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset(stop_ids) | frozenset(self.end_of_turn) | ({eos} if eos is not None else frozenset())
        self._eos_id = eos
        strings = [text for text, index in self._tokens.special.items() if index in self.stop_ids]
        self._stop_pattern = re.compile("|".join(re.escape(text) for text in sorted(strings, key=len, reverse=True)) or "(?!)")
        self._roles = self._probe_roles() if self.has_template else Roles(system=False, tool=False)
        self._renders_reasoning, self._thinks, self._opens_thinking = (
            self._probe_reasoning() if self.has_template else (False, False, False)
        )
        self._style: codecs.CallStyle | None = codecs.TEXT
        self.tool_protocol: ToolProtocol = "text"
        if tool_protocol != "text" and self.has_template:
            self._resolve_tools(tool_protocol)

    @property
    def has_template(self) -> bool:
        return self._template.exists

    # ---- text

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text to ids; special-token strings typed in it stay text."""
        return tuple(self._tokens.text(text))

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Like `encode`, for text that continues other text: no space is put before it."""
        return tuple(self._tokens.continuation(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokens.decode(ids)

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return self._tokens.decode_raw(ids)

    def raw_prompt_ids(self, text: str) -> tuple[int, ...]:
        """A prompt that no template is applied to: BOS where the tokenizer puts one, then the text."""
        return tuple(self._tokens.with_bos(self._tokens.text(text)))

    @property
    def raw_end(self) -> tuple[int, ...]:
        """The end token of an answer that no template is applied to: the tokenizer's end-of-sequence id."""
        if self._eos_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so an answer could never end", hint="set the tokenizer's eos_token"
            )
        return (self._eos_id,)

    # ---- conversations

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """What inference sees: the rendered messages and the generation prompt, as one text, BOS once."""
        chat = self._chat(messages, tools)
        text = self._prompt_text(chat, chat.messages)
        return tuple(self._tokens.with_bos(self._tokens.rendered(text, guard=chat.guard)))

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> EncodedConversation:
        """All turns of a conversation in one row.

        Raises `TemplateRewritesHistory` when the template changes earlier turns (then use `last_turn` per turn), and `DataError`
        when the template gives an assistant turn no end token, or a generation prompt that it does not print in the conversation.
        """
        chat = self._chat(messages, tools)
        self._check_reasoning(messages)
        turns, text = self._walk(chat, every_turn=True)
        return self._encode(chat, turns, text)

    def last_turn(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> EncodedConversation:
        """A conversation that ends in an assistant turn, with only that turn as "assistant": what inference would see, then the answer."""
        if not messages or messages[-1].role != "assistant":
            raise DataError("the conversation does not end with an assistant turn")
        chat = self._chat(messages, tools)
        self._check_reasoning(messages[-1:])
        turns, text = self._walk(chat, every_turn=False)
        return self._encode(chat, turns, text)

    def raw_conversation(self, prompt: str, completion: str) -> EncodedConversation:
        """A text prompt and its answer without a template; the answer is encoded on its own and ends with the tokenizer's end token."""
        row = _Row()
        row.add(self.raw_prompt_ids(prompt), "context", -1)
        row.add([*self._tokens.continuation(completion), *self.raw_end], "assistant", 0)
        return row.encoded()

    def rewrites_history(
        self, before: Sequence[Message], turn: Message, results: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> bool:
        """True when the template, once `results` follow, prints `before` and `turn` differently from when `turn` was written.

        Then what the model has read and written so far is no prefix of what a fresh rendering would show it.
        """
        stand_in = self._with_reasoning(self._stand_in(turn, results, SENTINEL), turn.reasoning)
        chat = self._chat([*before, stand_in, *results], tools)
        index = (
            len(chat.messages)
            - 1
            - next(number for number, message in enumerate(reversed(chat.messages)) if message["role"] == "assistant")
        )
        turned = self._turn(chat, index)
        return not self._prompt_text(chat, chat.messages).startswith(turned.prompt + turned.body + turned.end)

    # ---- sampled turns

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """A sampled turn (with or without its end token) as a message and its calls. Never raises on what a model can write."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        style = self._style or codecs.HERMES
        keep = frozenset(self._tokens.special[marker] for marker in style.markers if marker in self._tokens.special)
        reasoning, text = self._split_reasoning(self._tokens.decode(ids, keep=keep))
        content, calls = style.parse(text)
        good = tuple(call for call in calls if isinstance(call, ToolCall))
        return ParsedTurn(Message("assistant", content, tool_calls=good, reasoning=reasoning), calls)

    def glue(
        self,
        before: Sequence[Message],
        turn: Message,
        results: Sequence[Message],
        turn_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
    ) -> tuple[int, ...]:
        """Ids to append after a sampled turn so that the model reads `results` and may write its next turn.

        before:    the messages before the turn (prompt and earlier turns); turn: the parsed turn (its role in the template only)
        turn_ids:  the sampled ids; when they do not end with the template's end token, the glue starts with it
        A stand-in turn is rendered and only what follows its end token is taken.
        """
        sentinel = _unused(SENTINEL, [*before, *results], tools)
        stand_in = self._stand_in(turn, results, sentinel)
        chat = self._chat([*before, stand_in, *results], tools)
        text = self._prompt_text(chat, chat.messages)
        end = self._stop_pattern.search(text, text.rindex(sentinel)) if sentinel in text else None
        if end is None:
            raise self._no_terminator()
        ids = self._tokens.rendered(text[end.start() :], guard=chat.guard, continues=True)
        return tuple(ids[1:] if turn_ids and turn_ids[-1] == ids[0] else ids)

    # ---- inside: rendering

    def _chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> _Chat:
        if self.tool_protocol == "text":
            pairs = lower(messages, tools, self._roles)
            tools = ()
        else:
            self._require_style(messages, tools)
            pairs = list(enumerate(messages))
        dicts = self._template.dicts([message for _, message in pairs])
        specs = [tool.to_json() for tool in tools]
        guard = Guard(self._tokens, dicts, specs)
        return _Chat(guard.apply(dicts), tuple(index for index, _ in pairs), tuple(guard.apply(specs)), guard)

    def _prompt_text(self, chat: _Chat, messages: Dicts) -> str:
        if self._header_is_prompt:
            return self._before_sentinel(chat, messages)
        return self._template.render(messages, chat.tools, prompt=True)

    def _before_sentinel(self, chat: _Chat, messages: Dicts) -> str:
        sentinel = _unused(SENTINEL, messages, ())
        text = self._template.render([*messages, {"role": "assistant", "content": sentinel}], chat.tools)
        if sentinel not in text:
            raise DataError("the chat template prints nothing for an assistant turn", hint="use another template")
        return text[: text.rindex(sentinel)]

    def _walk(self, chat: _Chat, *, every_turn: bool) -> tuple[list[_Turn], str]:
        """The assistant turns (all, or only a last one) and the whole text, checked to be prefixes of each other."""
        indices = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        last = len(chat.messages) - 1
        turns: list[_Turn] = []
        so_far = ""
        for index in indices if every_turn else indices[-1:]:
            turn = self._turn(chat, index)
            self._check_history(turn.prompt, so_far)
            so_far = turn.prompt + turn.body + turn.end
            turns.append(turn)
        if turns and indices[-1] == last:
            return turns, so_far + turns[-1].tail
        text = self._template.render(chat.messages, chat.tools)
        self._check_history(text, so_far)
        return turns, text

    def _turn(self, chat: _Chat, index: int) -> _Turn:
        messages = chat.messages
        prompt = self._prompt_text(chat, messages[:index]) if index else self._before_sentinel(chat, [])
        text = self._template.render(messages[: index + 1], chat.tools)
        if not text.startswith(prompt):
            raise DataError(
                "the chat template's generation prompt is not how it prints the assistant turn, so training would not match inference",
                hint="use a template whose generation prompt is the start of the assistant turn it prints",
            )
        rest = text[len(prompt) :]
        end = self._stop_pattern.search(rest)
        if end is None:
            raise self._no_terminator()
        return _Turn(index, prompt, rest[: end.start()], end.group(), rest[end.end() :])

    def _check_history(self, text: str, so_far: str) -> None:
        if not text.startswith(so_far):
            raise TemplateRewritesHistory(
                "the chat template prints earlier turns differently once later turns follow, so one row cannot hold every turn",
                hint="train the last turn only (train_on: last), or one row per turn",
            )

    def _no_terminator(self) -> DataError:
        return DataError(
            "the chat template puts no end token after an assistant turn, so a model trained on it would never stop",
            hint="add the tokenizer's end token after the assistant content in the template, or use a built-in template",
        )

    # ---- inside: encoding

    def _encode(self, chat: _Chat, turns: Sequence[_Turn], text: str) -> EncodedConversation:
        """Pieces: context up to the first answer; each answer; each end token together with the context that follows it."""
        row = _Row()
        first = turns[0].prompt if turns else text
        ids = self._tokens.with_bos(self._tokens.rendered(first, guard=chat.guard))
        row.add_context(ids, header=self._header_length(chat, turns[0], ids) if turns else 0, message=self._origin(chat, turns, 0))
        for number, turn in enumerate(turns):
            position = len(turn.prompt) + len(turn.body)
            stop = len(turns[number + 1].prompt) if number + 1 < len(turns) else len(text)
            message = chat.origin[turn.index]
            row.add(self._tokens.rendered(turn.body, guard=chat.guard, continues=True), "assistant", message)
            end, *after = self._tokens.rendered(text[position:stop], guard=chat.guard, continues=True)
            row.add([end], "assistant", message)
            tail = self._tail_length(chat, turn, after)
            row.add(after[:tail], "glue", message)
            following = turns[number + 1] if number + 1 < len(turns) else None
            header = self._header_length(chat, following, after[tail:]) if following else 0
            row.add_context(after[tail:], header=header, message=self._origin(chat, turns, number + 1))
        return row.encoded()

    def _origin(self, chat: _Chat, turns: Sequence[_Turn], number: int) -> int:
        return chat.origin[turns[number].index] if number < len(turns) else -1

    def _header_length(self, chat: _Chat, turn: _Turn, ids: Sequence[int]) -> int:
        """How many of the last `ids` are the assistant header; 0 where they cannot be told apart from what precedes them."""
        if not self._header or not turn.prompt.endswith(self._header):
            return 0
        header = self._tokens.rendered(self._header, guard=chat.guard, continues=True)
        return len(header) if list(ids[-len(header) :]) == header else 0

    def _tail_length(self, chat: _Chat, turn: _Turn, ids: Sequence[int]) -> int:
        tail = self._tokens.rendered(turn.tail, guard=chat.guard, continues=True)
        return len(tail) if list(ids[: len(tail)]) == tail else 0

    # ---- inside: what a turn looks like

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        """(reasoning, the rest) for templates that know `<think>`; other text is left whole."""
        if not self._thinks:
            return "", text
        opened = text.lstrip().startswith("<think>")
        if not opened and not self._opens_thinking:
            return "", text
        thought, closed, rest = (text.lstrip().removeprefix("<think>") if opened else text).partition("</think>")
        return thought.strip("\n"), rest.lstrip("\n") if closed else ""

    def _stand_in(self, turn: Message, results: Sequence[Message], sentinel: str) -> Message:
        """A turn that the template prints in the place of `turn`: the same calls by name and id, the sentinel for all else."""
        answered = [result for result in results if result.role == "tool"]
        if self.tool_protocol == "text" or not answered:
            return Message("assistant", sentinel)
        names = {call.id: call.name for call in turn.tool_calls}
        calls = tuple(
            ToolCall(names.get(result.tool_call_id) or result.name or "unknown", {"value": sentinel}, id=result.tool_call_id)
            for result in answered
        )
        return Message("assistant", sentinel, tool_calls=calls)

    def _with_reasoning(self, message: Message, reasoning: str) -> Message:
        """The message with its reasoning where this template looks for it."""
        if not reasoning or self._renders_reasoning:
            return replace(message, reasoning=reasoning)
        return replace(message, content=f"<think>\n{reasoning}\n</think>\n\n{message.content}")

    def _check_reasoning(self, messages: Sequence[Message]) -> None:
        if not self._renders_reasoning and any(message.reasoning for message in messages if message.role == "assistant"):
            raise DataError("the chat template prints no `reasoning`, so it would be lost", hint="put the reasoning into the content")

    def _require_style(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        if self._style is None and (tools or any(message.tool_calls for message in messages)):
            raise DataError(
                "the chat template writes tool calls in a style that postgrad cannot read back",
                hint='use postgrad\'s own protocol (tool_protocol="text"), or a template in the hermes, llama3 or mistral style',
            )

    # ---- inside: probes of the template, once

    def _probe_turn(self) -> str:
        """Finds the assistant header; returns the special token that ends an assistant turn ("" when there is none)."""
        render = self._template.render
        user = self._template.dicts([PROBE_USER])
        text = render([*user, {"role": "assistant", "content": SENTINEL}])
        before, found, after = text.rpartition(SENTINEL)
        if not found:
            raise DataError("the chat template prints nothing for an assistant turn", hint="use another template")
        plain, prompt = render(user), render(user, prompt=True)
        if prompt == plain and before.startswith(plain) and before[len(plain) :].strip():
            self._header_is_prompt, prompt = True, before
            self.notes += ("the template has no generation prompt; the assistant header it prints is used as one",)
        self._header = prompt[len(plain) :] if prompt.startswith(plain) else ""
        end = self._tokens.special_pattern.search(after)
        return end.group() if end else ""

    def _probe_roles(self) -> Roles:
        accepts = self._template.accepts
        call = Message("assistant", "pgCall")
        system = accepts([Message("system", SENTINEL), PROBE_USER], must_show=SENTINEL, prompt=True)
        tool = accepts([PROBE_USER, call, Message("tool", SENTINEL)], must_show=SENTINEL, prompt=True)
        return Roles(system=system, tool=tool)

    def _probe_reasoning(self) -> tuple[bool, bool, bool]:
        """(prints `reasoning`, knows `<think>`, opens `<think>` in the generation prompt)."""
        prints = self._template.accepts([PROBE_USER, Message("assistant", "pgAnswer", reasoning=SENTINEL)], must_show=SENTINEL)
        return prints, "</think>" in self._template.source, self._header.rstrip().endswith("<think>")

    def _resolve_tools(self, wanted: Literal["auto", "template"]) -> None:
        accepts = self._template.accepts
        turn = Message("assistant", "", tool_calls=(PROBE_CALL,))
        shows_tools = accepts([PROBE_USER], must_show=PROBE_TOOL.description, tools=[PROBE_TOOL], prompt=True)
        shows_calls = accepts([PROBE_USER, turn], must_show=PROBE_CALL.name) or accepts(
            [PROBE_USER, turn], must_show="pgValue", tools=[PROBE_TOOL]
        )
        if not (shows_tools and shows_calls):
            if wanted == "template":
                raise DataError("the chat template has no tool support of its own", hint='use tool_protocol="text"')
            return
        self.tool_protocol = "template"
        self._style = codecs.HERMES  # so that the probe itself may be rendered
        probe = self._walk(self._chat([PROBE_USER, turn], [PROBE_TOOL]), every_turn=True)[0][0]
        self._style = codecs.recognise(probe.body, PROBE_CALL)


class _Row:
    """Ids, sources and message indices that grow together."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.source: list[TokenSource] = []
        self.message: list[int] = []

    def add(self, ids: Sequence[int], source: TokenSource, message: int) -> None:
        self.ids += ids
        self.source += [source] * len(ids)
        self.message += [message] * len(ids)

    def encoded(self) -> EncodedConversation:
        return EncodedConversation(tuple(self.ids), tuple(self.source), tuple(self.message))

    def add_context(self, ids: Sequence[int], *, header: int, message: int) -> None:
        """Context whose last `header` ids are the header of assistant turn `message`."""
        border = len(ids) - header
        self.add(ids[:border], "context", -1)
        self.add(ids[border:], "glue", message)


def _unused(word: str, messages: Sequence[Any], tools: Sequence[Any]) -> str:
    """`word`, lengthened until no message or tool contains it."""
    text = repr((messages, tools))
    while word in text:
        word += "x"
    return word
