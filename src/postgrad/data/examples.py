"""Rows to examples: what is read, what is answered, in one shape for every format.

A text prompt (and text completion) becomes a user (and assistant) message when the model has a chat template, because an
instruct model never learned to stop after raw text; `text_prompts="raw"` keeps it raw, and so does a model without a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from postgrad.chat import ChatFormat
from postgrad.data.files import Row
from postgrad.data.formats import Format, gold_column, label_column, pair_columns
from postgrad.data.messages import BadRow, read_messages, read_tools
from postgrad.gold import gold_calls
from postgrad.types import Message, ToolSpec

TextPrompts = Literal["chat", "raw"]
Messages = tuple[Message, ...]
_PROMPT_COLUMNS = ("prompt", "messages", "conversations", "instruction", "question")
_QUESTIONS = ("question", "question+answer", "question+calls")


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation. For raw text the prompt and the completion are in `raw`, and `messages` is empty.

    answer_from: index of the first message of the answer; the messages before it are the prompt.
    """

    messages: Messages
    tools: tuple[ToolSpec, ...] = ()
    raw: tuple[str, str] | None = None
    answer_from: int = 0


@dataclass(frozen=True, slots=True)
class PairExample:
    """Two answers to one prompt: `chosen` is preferred. Both start with the same messages, or the same raw prompt."""

    chosen: Example
    rejected: Example
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class PromptExample:
    """What a model is asked. `answered`: the row's own answer at the end was left out."""

    messages: Messages
    tools: tuple[ToolSpec, ...]
    columns: Mapping[str, Any]
    raw_text: str | None = None
    answered: bool = False


def effective_text_prompts(text_prompts: TextPrompts, chat: ChatFormat) -> TextPrompts:
    return text_prompts if chat.has_template else "raw"


# ---- one answer


def training_example(row: Row, format: Format, text_prompts: TextPrompts) -> Example:
    """A conversation with an answer. Raises `BadRow`."""
    fields = row.fields
    tools = _tools(fields)
    if format == "text":
        return Example((), tools, raw=("", _filled(fields["text"], "text")))
    if _is_conversation(fields, format):
        example = Example(_conversation(fields), tools)
    else:
        prompt, answer = _prompt_of(fields, format), _gold_turn(fields) if format == "question+calls" else _completion_of(fields, format)
        if text_prompts == "raw" and isinstance(prompt, str) and isinstance(answer, str):
            return Example((), tools, raw=(prompt, _filled(answer, "completion")))
        example = _joined(_messages(prompt, fields), _answer(answer, "completion"), tools)
    _check_answers(example.messages)
    return example


def is_text_prompt(row: Row, format: Format) -> bool:
    return format != "text" and not _is_conversation(row.fields, format) and isinstance(_prompt_of(row.fields, format), str)


# ---- pairs and labels


def pair_example(row: Row, text_prompts: TextPrompts) -> PairExample:
    """A preference pair with its true common prompt. Raises `BadRow` when there is none, or a side is empty or equals the other."""
    fields = row.fields
    names = pair_columns(fields)
    assert names is not None
    chosen, rejected = (fields[name] for name in names)
    margin = _margin(fields.get("margin"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _text_pair(fields, chosen, rejected, text_prompts, margin)
    prompt = _prompt_column(fields)
    sides = [_answer(value, f"{name} answer") for value, name in zip((chosen, rejected), names, strict=True)]
    if sides[0][0].role == "assistant" and sides[1][0].role == "assistant":
        if prompt is None:
            raise BadRow("the pair has no prompt: both sides start with an answer, and no prompt column stands beside them")
        return _pair(_messages(prompt, fields), sides[0], sides[1], _tools(fields), margin)
    if prompt is not None and not isinstance(prompt, str):  # a prompt of messages, perhaps repeated at the start of each side
        context = _messages(prompt, fields)
        sides = [side if side[: len(context)] == context else (*context, *side) for side in sides]
    common = _common(sides[0], sides[1])
    return _pair(_with_system(common, fields), sides[0][len(common) :], sides[1][len(common) :], _tools(fields), margin)


def unpaired_example(row: Row, text_prompts: TextPrompts) -> tuple[Example, bool]:
    """A prompt with one answer, and whether it is a desirable one. Raises `BadRow`."""
    fields = row.fields
    name = label_column(fields)
    assert name is not None
    label = fields[name]
    if isinstance(label, str):
        raise BadRow(f"{name} is the text {label!r}; it must be true or false")
    if "completion" in fields:
        prompt, completion = _prompt_column(fields), fields["completion"]
        if text_prompts == "raw" and isinstance(prompt, str) and isinstance(completion, str):
            return Example((), (), raw=(prompt, _filled(completion, "completion"))), bool(label)
        example = _joined(_messages(prompt, fields), _answer(completion, "completion"), _tools(fields))
    else:
        messages = _conversation(fields)
        start = max((index for index, message in enumerate(messages) if message.role != "assistant"), default=-1) + 1
        example = _joined(messages[:start], messages[start:], _tools(fields))
    _check_answers(example.messages[example.answer_from :])
    return example, bool(label)


# ---- prompts


def prompt_example(row: Row, format: Format, text_prompts: TextPrompts) -> PromptExample:
    """What the model is asked, and the other columns. Raises `BadRow`."""
    fields = row.fields
    columns = {name: value for name, value in fields.items() if name not in _used(fields, format)}
    if format == "question+calls" and (gold := gold_column(fields)) is not None:
        columns["tool_calls"] = fields[gold]  # the name by which rewards ask for it
    prompt: Any = _conversation(fields) if _is_conversation(fields, format) else _prompt_of(fields, format)
    if isinstance(prompt, str) and text_prompts == "raw":
        return PromptExample((), _tools(fields), columns, raw_text=_filled(prompt, "prompt"))
    messages = prompt if isinstance(prompt, tuple) else _messages(prompt, fields)
    end = len(messages)
    while end and messages[end - 1].role == "assistant":
        end -= 1
    if not end:
        raise BadRow("the prompt has no message for the model to answer")
    return PromptExample(messages[:end], _tools(fields), columns, answered=end < len(messages))


def _used(fields: Mapping[str, Any], format: Format) -> set[str]:
    """The columns that make the prompt; the others are for the rewards."""
    if _is_conversation(fields, format):
        return {"messages", "conversations"}
    if format == "alpaca":
        return {"instruction", "input", "history", "system"}
    return {"question"} if format in _QUESTIONS else {"prompt"}


def _is_conversation(fields: Mapping[str, Any], format: Format) -> bool:
    return format in ("messages", "sharegpt") or (format == "unpaired" and "completion" not in fields)


# ---- parts of a row


def _conversation(fields: Mapping[str, Any]) -> Messages:
    return _with_system(read_messages(fields["messages"] if fields.get("messages") is not None else fields.get("conversations")), fields)


def _with_system(messages: Messages, fields: Mapping[str, Any]) -> Messages:
    """A `system` column is the system message of rows that have none."""
    system = fields.get("system")
    if isinstance(system, str) and system.strip() and messages[0].role != "system":
        return (Message("system", system), *messages)
    return messages


def _tools(fields: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """The `tools` column; beside a `question` benchmarks call it `function`."""
    if fields.get("tools") is None and "question" in fields:
        return read_tools(fields.get("function"))
    return read_tools(fields.get("tools"))


def _prompt_column(fields: Mapping[str, Any]) -> Any:
    name = next((name for name in _PROMPT_COLUMNS if fields.get(name) is not None), None)
    return _prompt_of(fields, "alpaca") if name == "instruction" else fields[name] if name else None


def _prompt_of(fields: Mapping[str, Any], format: Format) -> Any:
    """The prompt of a row: text, or a list of messages."""
    if format == "alpaca":
        return _alpaca(fields)
    value = fields.get("question") if format in _QUESTIONS else _prompt_column(fields)
    while isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        value = value[0]  # benchmarks list conversations, of which a single-turn row has one
    return value


def _alpaca(fields: Mapping[str, Any]) -> Any:
    """Instruction and input, joined by a blank line; messages when earlier turns stand in `history` or a `system` is given."""
    text = "\n\n".join(str(part) for part in (fields.get("instruction"), fields.get("input")) if part not in (None, ""))
    history = fields.get("history") or []
    if not history and not fields.get("system"):
        return text
    if not isinstance(history, (list, tuple)) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history):
        raise BadRow("history must be a list of [question, answer] pairs")
    turns = [{"role": role, "content": content} for pair in history for role, content in zip(("user", "assistant"), pair, strict=True)]
    return [*turns, {"role": "user", "content": text}]


def _completion_of(fields: Mapping[str, Any], format: Format) -> Any:
    return fields.get({"alpaca": "output", "question+answer": "answer"}.get(format, "completion"))


def _gold_turn(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gold calls as the assistant's turn; of several accepted values the first, and nothing that may be left out."""
    calls = gold_calls(fields[gold_column(fields) or "tool_calls"])
    if not calls:
        raise BadRow("the right answer is no call at all, and no text says what to answer instead")
    made = [call.example() for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in made]}


def _messages(prompt: Any, fields: Mapping[str, Any]) -> Messages:
    """A prompt as messages. Assistant turns inside it are context."""
    if isinstance(prompt, str):
        messages: Messages = (Message("user", _filled(prompt, "prompt")),)
    else:
        read = read_messages(prompt)
        messages = tuple(replace(message, train=False) if message.role == "assistant" else message for message in read)
    return _with_system(messages, fields)


def _answer(value: Any, what: str) -> Messages:
    if isinstance(value, str):
        return (Message("assistant", _filled(value, what)),)
    if value is None or value in ([], {}):
        raise BadRow(f"the {what} is empty")
    if not isinstance(value, (Mapping, list, tuple)):
        raise BadRow(f"the {what} is {type(value).__name__}; expected text, a message or messages")
    return read_messages([value] if isinstance(value, Mapping) else value)


def _joined(prompt: Messages, answer: Messages, tools: tuple[ToolSpec, ...]) -> Example:
    if not prompt:
        raise BadRow("there is no prompt before the answer")
    return Example((*prompt, *answer), tools, answer_from=len(prompt))


def _check_answers(messages: Sequence[Message]) -> None:
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise BadRow("the conversation has no assistant turn, so there is nothing to train")
    if any(not message.content.strip() and not message.tool_calls and message.train is not False for message in answers):
        raise BadRow("an assistant turn is empty; training it would teach the model to say nothing")


def _filled(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise BadRow(f"the {what} is {type(text).__name__}, not text")
    if not text.strip():
        raise BadRow(f"the {what} is empty")
    return text


# ---- pairs


def _pair(prompt: Messages, chosen: Messages, rejected: Messages, tools: tuple[ToolSpec, ...], margin: float | None) -> PairExample:
    for answer, what in ((chosen, "chosen"), (rejected, "rejected")):
        if not answer:
            raise BadRow(f"the {what} answer is empty: all of it also starts the other side")
        if answer[0].role != "assistant":
            raise BadRow(f"the two sides differ in a {answer[0].role} message, before any answer: they have no common prompt")
        if answer[-1].role != "assistant":
            raise BadRow(f"the {what} side ends with a {answer[-1].role} message, not with an answer")
        _check_answers(answer)
    if chosen == rejected:
        raise BadRow("chosen and rejected are equal")
    return PairExample(_joined(prompt, chosen, tools), _joined(prompt, rejected, tools), margin)


def _common(chosen: Messages, rejected: Messages) -> Messages:
    """The messages that both sides start with; never an answer that one of them ends in."""
    if chosen == rejected:
        raise BadRow("chosen and rejected are equal")
    length = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        length += 1
    if not length:
        raise BadRow("chosen and rejected have no common prompt")
    return chosen[:length]


def _text_pair(fields: Mapping[str, Any], chosen: str, rejected: str, text_prompts: TextPrompts, margin: float | None) -> PairExample:
    _filled(chosen, "chosen answer"), _filled(rejected, "rejected answer")
    if chosen == rejected:
        raise BadRow("chosen and rejected are equal")
    prompt = _prompt_column(fields)
    if prompt is None:
        if text_prompts == "chat" and chosen.startswith(_HUMAN) and rejected.startswith(_HUMAN):
            sides = _dialogue(chosen), _dialogue(rejected)
            common = _common(*sides)
            return _pair(common, sides[0][len(common) :], sides[1][len(common) :], (), margin)
        prompt = _common_text(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        left, right = (Example((), raw=(prompt, _filled(side, "answer"))) for side in (chosen, rejected))
        return PairExample(left, right, margin)
    if isinstance(prompt, str) and text_prompts == "raw":
        return PairExample(Example((), raw=(prompt, chosen)), Example((), raw=(prompt, rejected)), margin)
    return _pair(_messages(prompt, fields), _answer(chosen, "chosen answer"), _answer(rejected, "rejected answer"), _tools(fields), margin)


_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def _dialogue(text: str) -> Messages:
    """Turns written as `\\n\\nHuman: … \\n\\nAssistant: …`, the style of the hh-rlhf data."""
    turns = []
    for part in text.split(_HUMAN)[1:]:
        question, *answers = part.split(_ASSISTANT)
        turns += [Message("user", question.strip()), *(Message("assistant", answer.strip()) for answer in answers)]
    return tuple(turns)


def _common_text(chosen: str, rejected: str) -> str:
    """The text both sides start with, up to the last white space in it. Raises `BadRow` when nothing is left of a prompt or an answer."""
    shortest = min(len(chosen), len(rejected))
    length = next((index for index, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), shortest)
    if length == shortest:
        raise BadRow("one side starts with all of the other, so no answer of its own is left")
    while length and not chosen[length - 1].isspace():
        length -= 1
    prompt = chosen[:length].rstrip()
    if not prompt:
        raise BadRow("chosen and rejected have no common prompt")
    return prompt


def _margin(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise BadRow(f"margin must be a finite number, not {value!r}")
    return float(value)
