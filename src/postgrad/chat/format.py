"""How a conversation becomes tokens, and how sampled tokens become a turn again, for any chat template.

1. `prompt_ids`    exactly what inference sees: the rendered template, generation prompt included, BOS once.
2. `conversation`  a whole conversation for training: which tokens an assistant must write (its content and the end token) is found by
                   rendering prefixes of the conversation, never by searching for text, so an answer that also stands in the question,
                   a trimmed content or a missing `{% generation %}` block cannot shift it.
3. `parse`         sampled ids to content, reasoning and tool calls. Never raises.
4. `glue`          the tokens between a sampled turn and the next one. The sampled turn itself is never rendered again.
5. Facts about tokenizer and template (`prints_tools`, `merges_at`, `fingerprint`, …) for audits and caches.

A template for which the spans cannot be exact (it rewrites earlier turns, prints no terminator) is refused with a `DataError`.
Prompt and answer are encoded apart, so no token spans their border. Special-token strings inside content stay text (`tokens.Guard`).
A format can be pickled: it travels as the tokenizer and the arguments it was made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

from postgrad.chat import codecs
from postgrad.chat.encoded import EncodedConversation, Printed, printed_prompt, printed_raw, printed_turns
from postgrad.chat.facts import PROBE_CALL_TURN, Facts, call_style, prints_tools, probe, supports_tools
from postgrad.chat.identity import digest
from postgrad.chat.lower import guarded, guarded_tool, lower
from postgrad.chat.reading import ParsedTurn, Reader, opens_thinking, same, thought_in_content
from postgrad.chat.render import PROBE_TOOL, PROBE_USER, SENTINEL, Template, TemplateRefuses
from postgrad.chat.tokens import Guard, Tokenizer, Tokens
from postgrad.chat.turns import Chat, Turns, last_assistant, unused
from postgrad.errors import DataError
from postgrad.types import Message, ToolCall, ToolSpec

ToolProtocol = Literal["auto", "template", "text", "llama3", "pythonic", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "xml"]
"""What a recipe may ask for: `auto`, the template's own way, or postgrad's text protocol: in hermes style (`text`) or the named one."""

_TAIL = 32
"""Tokens at the end of a prompt that are looked at for an opened `<think>`."""
_NO_END_HINT = "set the tokenizer's eos_token, or use a chat template that ends turns with a special token of the tokenizer"


class ChatFormat:
    """One tokenizer's chat format.

    stop_ids:       every id that ends a turn: those given (generation_config), the tokenizer's end token, the template's terminator;
                    empty when there is none at all (then nothing can be trained: `require_end`)
    end_of_turn:    what the template puts after an assistant's content; empty when it puts nothing
    tool_protocol:  "template" = the template prints tools and calls itself; "text" = postgrad's text protocol
    call_style:     the name of the style that calls are written and read in (`codecs.STYLES`); "" = one that cannot be read back
    notes:          what was decided about this template, in words for the user
    template:       a built-in template's name (`postgrad.chat.BUILT_IN`) or Jinja text, instead of the tokenizer's own
    template_options: variables that the template reads, e.g. {"enable_thinking": False}
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: Iterable[int] = (),
        tool_protocol: ToolProtocol = "auto",
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        stop_ids, template_options = frozenset(stop_ids), dict(template_options or {})
        self._tokenizer = tokenizer
        self._made_with: dict[str, Any] = {
            "stop_ids": stop_ids, "tool_protocol": tool_protocol, "template": template, "template_options": template_options,
        }  # fmt: skip
        self._tokens = Tokens(tokenizer)
        self._template = Template(tokenizer, template, self._tokens.special, template_options)
        self._eos = (tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ()
        known_stops = stop_ids.union(self._eos)
        self._facts = probe(self._template, self._tokens, known_stops) if self.has_template else Facts()
        self.end_of_turn: tuple[int, ...] = (self._tokens.special[self._facts.end],) if self._facts.end else ()
        self.stop_ids = known_stops | frozenset(self.end_of_turn)
        stops = [text for text, index in self._tokens.special.items() if index in self.stop_ids]
        self._turns = Turns(self._template, self._facts, stops)
        self._style: codecs.CallStyle | None = codecs.STYLES.get(tool_protocol, codecs.HERMES)
        self.tool_protocol: Literal["template", "text"] = "text"
        if tool_protocol in ("auto", "template") and self.has_template:
            self._use_template_tools(required=tool_protocol == "template")
        self._reader = Reader(self._tokens, self._facts, self._style or codecs.HERMES)
        self.notes = self._notes()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._made_with), (self._tokenizer,)

    # ---- facts

    @property
    def has_template(self) -> bool:
        return self._template.exists

    @property
    def template_source(self) -> str:
        """The Jinja text in use; it stands on its own, so it can be saved with a model. "" without a template."""
        return self._template.source

    @property
    def prints_system_role(self) -> bool:
        """The template prints system messages, as a turn or inside another. Where it does not, tool descriptions go to the user."""
        return self._facts.roles.system

    @property
    def prints_tool_role(self) -> bool:
        """The template prints tool results itself. In the text protocol, results become user messages where it does not."""
        return self._facts.roles.tool

    @cached_property
    def prints_tools(self) -> bool:
        """The template prints tool descriptions itself, whatever `tool_protocol` is in use."""
        return self.has_template and prints_tools(self._template)

    @property
    def call_style(self) -> str:
        """Name of the style in which calls are written and read; "" where the template's own cannot be read back."""
        return self._style.name if self._style else ""

    @property
    def bos_id(self) -> int | None:
        return self._tokens.bos_id

    @property
    def unk_id(self) -> int | None:
        return self._tokens.unk_id

    @cached_property
    def vocabulary_size(self) -> int:
        """The largest id that the tokenizer can give, plus 1: a model needs that many rows in its embedding."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides which ids a conversation gets: tokenizer, template and its options, tool protocol, stop ids.

        The same for two loads of one tokenizer. Computed once, from the tokenizer as it is then.
        """
        decided = {"template": self.template_source, "tool_protocol": self.tool_protocol, "stop_ids": sorted(self.stop_ids)}
        written = {"call_style": self.call_style} if self.tool_protocol == "text" and self._style is not codecs.HERMES else {}
        return digest(self._tokenizer, decided | written | {"template_options": self._made_with["template_options"]})

    def special_in_text(self, text: str) -> bool:
        """True when the text holds a special-token string (which stays text when it is encoded)."""
        return self._tokens.special_pattern.search(text) is not None

    def merges_at(self, prompt: str, answer: str) -> bool:
        """True when two raw texts, encoded together, have other ids than encoded apart: a token wants to span their border."""
        apart = [*self._tokens.text(prompt), *(self._tokens.continuation(answer) if prompt else self._tokens.text(answer))]
        return self._tokens.text(prompt + answer) != apart

    def require_end(self) -> None:
        """Raises `DataError` when no token ends a turn: what is trained or sampled would never stop."""
        if not self.stop_ids:
            raise DataError("no end token: neither tokenizer nor chat template has one, so an answer could never end", hint=_NO_END_HINT)

    # ---- text

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text to ids; special-token strings typed in it stay text."""
        return tuple(self._tokens.text(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokens.decode(ids)

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return self._tokens.decode_raw(ids)

    def raw_prompt_ids(self, text: str) -> tuple[int, ...]:
        """A prompt that no template is applied to: BOS where the tokenizer puts one, then the text."""
        return tuple(self._tokens.with_bos(self._tokens.text(text)))

    def raw_conversation(self, prompt: str, completion: str) -> EncodedConversation:
        """A text prompt and its answer without a template; the answer is encoded on its own and ends with the tokenizer's end token."""
        return self._alone(self.print_raw(prompt, completion))

    # ---- conversations

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """What inference sees: the rendered messages and the generation prompt, as one text, BOS once."""
        return self._alone(self.print_prompt(messages, tools)).token_ids

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> EncodedConversation:
        """All turns of a conversation in one row.

        Raises `TemplateRewritesHistory` when the template changes earlier turns (then use `last_turn` per turn), and `DataError`
        when the template gives an assistant turn no end token, or a generation prompt that it does not print in the conversation.
        """
        return self._alone(self.print_conversation(messages, tools))

    def last_turn(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, check_calls: bool = True) -> EncodedConversation:
        """A conversation that ends in an assistant turn, with only that turn as "assistant": what inference would see, then the answer.

        check_calls: False prints the turn as the template does, whatever becomes of its calls: to score what was written, not to train on.
        """
        return self._alone(self.print_last_turn(messages, tools, check_calls=check_calls))

    # ---- many at once: printed one by one, encoded together

    def print_raw(self, prompt: str, completion: str) -> Printed:
        """See `raw_conversation`."""
        if not self._eos:
            raise DataError("the tokenizer has no end token, so an answer could never end", hint=_NO_END_HINT)
        return printed_raw(self._tokens, prompt, completion, self._eos)

    def print_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Printed:
        """See `prompt_ids`."""
        chat = self._chat(messages, tools)
        return printed_prompt(self._tokens, chat, self._turns.prompt(chat, chat.messages))

    def print_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Printed:
        """See `conversation`."""
        return self._print(messages, tools, only_last=False)

    def print_last_turn(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, check_calls: bool = True) -> Printed:
        """See `last_turn`."""
        if not messages or messages[-1].role != "assistant":
            raise DataError("the conversation does not end with an assistant turn")
        return self._print(messages, tools, only_last=True, check_calls=check_calls)

    def encode_printed(self, printed: Sequence[Printed]) -> list[EncodedConversation]:
        """What each would be alone."""
        ids = self._tokens.rendered_many([(conversation.pieces, conversation.guard) for conversation in printed])
        return [conversation.encoded(pieces) for conversation, pieces in zip(printed, ids, strict=True)]

    def rewrites_history(
        self, before: Sequence[Message], turn: Message, results: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> bool:
        """True when the template, once `results` follow, no longer prints the prompt that `turn` answered, or prints `turn` so that it
        reads otherwise: without its reasoning, or without the text beside its calls. Also when it refuses to print them.

        Then a fresh rendering would show the model something else than what it has read and written.
        """
        try:
            chat = self._chat([*before, turn, *results], tools)
            prompt = self._turns.prompt(chat, chat.messages[: last_assistant(chat.messages)])
            text = self._turns.prompt(chat, chat.messages)
        except TemplateRefuses:
            return True
        if not text.startswith(prompt):
            return True
        printed = self._reader.printed(self._turns.body(text, len(prompt)), chat.guard, tools, opened=opens_thinking(prompt))
        return not same(printed.message, turn)

    # ---- sampled turns

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), *, read: Sequence[int] | None = None) -> ParsedTurn:
        """A sampled turn (with or without its end token) as a message and its calls. Never raises on what a model can write.

        tools: those that were offered; a style whose text does not say what type a value has (`xml`) needs them.
        read:  the ids that the turn continues, which say whether its reasoning was opened there; left out = those of a first turn.
        """
        return self._reader.sampled(self._unended(token_ids), tools, opened=self._opened(read))

    def parse_text(self, token_ids: Sequence[int], *, read: Sequence[int] | None = None) -> Message:
        """A sampled turn where no tools were offered: reasoning and text, and what looks like a call is text."""
        return self._reader.without_calls(self._unended(token_ids), opened=self._opened(read))

    def _unended(self, token_ids: Sequence[int]) -> list[int]:
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return ids

    def _opened(self, read: Sequence[int] | None) -> bool:
        return self._facts.opens_thinking if read is None else opens_thinking(self._tokens.decode_raw(read[-_TAIL:]))

    def glue(
        self,
        before: Sequence[Message],
        turn: Message,
        results: Sequence[Message],
        turn_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
    ) -> tuple[int, ...]:
        """Ids to append after a sampled turn so that the model reads `results` and may write its next turn.

        before:    the messages before the turn (prompt and earlier turns)
        turn:      the parsed turn; only the names and ids of its calls are used, for templates that print them again with the results
        turn_ids:  the sampled ids; when they do not end with the template's end token, the glue starts with it

        A stand-in for the turn is rendered, and what follows its end token is taken.
        """
        sentinel = unused(SENTINEL, before, results, tools)
        chat, prompt = self._followed(before, turn, results, sentinel, tools)
        text = self._turns.from_end_of(prompt, sentinel)
        ids = self._tokens.rendered(text, guard=chat.guard, continues=True)
        return tuple(ids[1:] if turn_ids and turn_ids[-1] == ids[0] else ids)

    # ---- inside

    def _notes(self) -> tuple[str, ...]:
        notes = [*self._facts.notes, self._template.note]
        if not self.stop_ids:
            notes.append("neither tokenizer nor chat template has an end token, so nothing can be trained")
        if self._tokens.adds_bos and self.has_template and self._template_writes_bos():
            notes.append("both the chat template and the tokenizer write the beginning-of-sequence token; one of them was removed")
        return tuple(note for note in notes if note)

    def _template_writes_bos(self) -> bool:
        chat = self._chat([PROBE_USER], ())
        return self._tokens.rendered(self._turns.prompt(chat, chat.messages), guard=chat.guard)[:1] == [self.bos_id]

    def _chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Chat:
        in_content = self._facts.reasoning == "content"
        messages = [thought_in_content(message) if in_content else message for message in messages]
        shown, printed = [tool.to_json() for tool in tools], self._template.dicts(messages)
        guard = Guard(self._tokens, printed, shown)
        if guard.mark:
            messages = [guarded(guard, message) for message in messages]
            shown, printed = guard.apply(shown), self._template.dicts(messages)
        if self.tool_protocol == "template":
            self._require_style(messages, tools)
            return Chat(printed, tuple(range(len(messages))), tuple(shown), guard)
        style = self._style or codecs.HERMES
        try:
            pairs = lower(messages, [guarded_tool(guard, tool) for tool in tools], self._facts.roles, style)
        except codecs.CannotWrite as error:
            raise TemplateRefuses(
                f"a call cannot be written in the {style.name} style: {error}", hint="use tool_protocol: text, or rename it"
            ) from error
        lowered = [message for _, message in pairs]
        if lowered != messages:
            printed = self._template.dicts(lowered)
        return Chat(printed, tuple(index for index, _ in pairs), (), guard)

    def _alone(self, printed: Printed) -> EncodedConversation:
        return self.encode_printed([printed])[0]

    def _print(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, only_last: bool, check_calls: bool = True) -> Printed:
        self.require_end()
        answers = messages[-1:] if only_last else [message for message in messages if message.role == "assistant"]
        if self._facts.reasoning == "nowhere" and any(message.reasoning for message in answers):
            raise DataError("the chat template prints no `reasoning`, so it would be lost", hint="put the reasoning into the content")
        chat = self._chat(messages, tools)
        turns, text = self._turns.walk(chat, only_last=only_last)
        for turn in turns if check_calls else ():
            message = messages[chat.origin[turn.index]]
            if message.tool_calls:
                printed = self._reader.printed(turn.body, chat.guard, tools, opened=opens_thinking(turn.prompt))
                self._reader.require_same(message, printed, chat.guard.remove(turn.body))
        return printed_turns(self._tokens, chat, turns, text, header=self._facts.header)

    def _followed(
        self, before: Sequence[Message], turn: Message, results: Sequence[Message], sentinel: str, tools: Sequence[ToolSpec]
    ) -> tuple[Chat, str]:
        """The conversation with a stand-in for the turn, and the prompt of the turn after it.

        A template may refuse what a model wrote (more than one call in a turn): then no turn of it has calls. Results stay as they are.
        """
        plain = [replace(message, content=message.content or sentinel, tool_calls=()) for message in before]
        for turns in ([*before, self._stand_in(turn, results, sentinel)], [*plain, Message("assistant", sentinel)]):
            try:
                chat = self._chat([*turns, *results], tools)
                return chat, self._turns.prompt(chat, chat.messages)
            except TemplateRefuses as error:
                refused = error
        raise refused

    def _stand_in(self, turn: Message, results: Sequence[Message], sentinel: str) -> Message:
        """A turn to render in the place of `turn`: calls with the same names and ids, the sentinel for all else."""
        answered = [result for result in results if result.role == "tool"]
        if self.tool_protocol == "text" or not answered:
            return Message("assistant", sentinel)
        names = {call.id: call.name for call in turn.tool_calls}
        calls = tuple(
            ToolCall(names.get(result.tool_call_id) or result.name or "unknown", {"value": sentinel}, id=result.tool_call_id)
            for result in answered
        )
        return Message("assistant", "", tool_calls=calls)  # some templates refuse a turn that has both text and calls

    def _require_style(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        if self._style is None and (tools or any(message.tool_calls for message in messages)):
            raise DataError(
                "the chat template writes tool calls in a style that postgrad cannot read back",
                hint=f'use postgrad\'s own protocol (tool_protocol="text"), or a template in one of the styles {", ".join(codecs.STYLES)}',
            )

    def _use_template_tools(self, *, required: bool) -> None:
        if not supports_tools(self._template):
            if required:
                raise DataError("the chat template has no tool support of its own", hint='use tool_protocol="text"')
            if not prints_tools(self._template):
                self._style = self._style_of_calls([]) or codecs.HERMES
            return
        self.tool_protocol = "template"
        self._style = self._style_of_calls([PROBE_TOOL])

    def _style_of_calls(self, tools: Sequence[ToolSpec]) -> codecs.CallStyle | None:
        """The style in which the template prints calls; None when it prints none that can be read back, or no end after them."""
        shown = [tool.to_json() for tool in tools]
        question, turn = self._template.dicts([PROBE_USER]), self._template.dicts([PROBE_CALL_TURN])
        try:
            before, text = self._template.render(question, shown), self._template.render([*question, *turn], shown)
            body = self._turns.body(text, len(before))
        except DataError:
            return None
        return call_style(body, self._tokens) if text.startswith(before) else None
