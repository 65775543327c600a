"""Which format a row has, by its column names. The first format of this list that fits is the row's:

rollouts           what a run writes under `rollouts/`: a prompt and the rollouts sampled from it
tokens             `input_ids` with `labels` or a mask, or `prompt_ids` and `completion_ids`
preference         `chosen` and `rejected` (text, one message or messages), with or without the prompt beside them
unpaired           a prompt, a `completion` and a true/false `label`; or a conversation with a label
messages           `messages` (`role`/`content`), optionally `tools`
sharegpt           `conversations` (`from`/`value`), optionally `tools` and `system`
prompt+completion  `prompt` and `completion`, each text or messages
prompt             `prompt` alone; every other column is handed to the rewards
alpaca             `instruction` and `output`, optionally `input`, `system`, `history`
question           `question`, optionally `answer` (the completion in SFT, a column for the rewards in RL) and `function` (tools)
question+calls     `question` and the calls that answer it, in `tool_calls` or BFCL's `ground_truth`; optionally `function` or `tools`
text               `text` alone: every token is trained
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from postgrad.data.files import Row
from postgrad.errors import DataError
from postgrad.gold import gold_calls
from postgrad.suggest import nearest

Format = Literal[
    "rollouts",
    "tokens",
    "preference",
    "unpaired",
    "messages",
    "sharegpt",
    "prompt+completion",
    "prompt",
    "alpaca",
    "question+answer",
    "question+calls",
    "question",
    "text",
]
Method = Literal["sft", "reward", "dpo", "grpo", "ppo"]

_RL: tuple[Format, ...] = (
    "prompt",
    "messages",
    "sharegpt",
    "prompt+completion",
    "question+answer",
    "question+calls",
    "question",
    "alpaca",
    "unpaired",
)
ACCEPTED: Mapping[Method, tuple[Format, ...]] = {
    "sft": ("messages", "sharegpt", "prompt+completion", "alpaca", "question+answer", "question+calls", "text", "tokens", "unpaired"),
    "reward": ("preference",),
    "dpo": ("preference", "unpaired"),
    "grpo": _RL,
    "ppo": _RL,
}
"""The formats that each method trains on. In RL every column that is not the prompt, such as an answer or a label, is for the rewards."""

PAIR_COLUMNS = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
LABEL_COLUMNS = ("label", "kto_tag")
_HINTS = (
    ({"instruction"}, "{user: instruction, assistant: ...}"),
    ({"query", "response"}, "{prompt: query, completion: response}"),
    ({"input", "output"}, "{user: input, assistant: output}"),
)


def detect(fields: Mapping[str, Any]) -> Format | None:
    """The format of a row; None when its columns are none of these."""
    return next((name for name, fits in _TESTS.items() if fits(fields)), None)


def pair_columns(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in PAIR_COLUMNS if pair[0] in fields and pair[1] in fields), None)


def label_column(fields: Mapping[str, Any]) -> str | None:
    """The column with a true/false label. A number other than 0 and 1 is a class of some other task."""
    for name in LABEL_COLUMNS:
        value = fields.get(name)
        if isinstance(value, bool) or value in (0, 1) or (isinstance(value, str) and value.strip().lower() in ("true", "false")):
            return name
    return None


def gold_column(fields: Mapping[str, Any]) -> str | None:
    """The column with the calls that are right, in a form that `postgrad.gold` reads."""
    return next((name for name in ("tool_calls", "ground_truth") if gold_calls(fields.get(name)) is not None), None)


def default_method(format: Format) -> Method:
    """The method that a file of this format is most likely meant for."""
    return "dpo" if format in ("preference", "unpaired") else "grpo" if format in ("prompt", "question", "question+calls") else "sft"


def require(format: str, method: Method, *, where: str) -> None:
    """Raises `DataError` when the method cannot train on the format."""
    accepted = ACCEPTED[method]
    if format in accepted:
        return
    others = [name for name, formats in ACCEPTED.items() if format in formats]
    hint = f"train it with method: {' or '.join(others)}" if others else None
    if format in ("prompt", "question") and method == "sft":
        hint = "give the answers a column and map it: data.columns: {prompt: question, completion: answer}"
    if format == "rollouts":
        hint = "rollouts are looked at with `postgrad data check` or `postgrad data show`"
    raise DataError(f"{method} needs {' or '.join(accepted)} rows, and these are {format} rows", where=where, hint=hint)


def unknown(row: Row) -> DataError:
    """What to tell a user whose columns are none of the formats."""
    names = set(row.fields)
    suggestion = next((text for needed, text in _HINTS if needed <= names), "{user: question, assistant: reply}")
    hint = f"name the columns, in a recipe with data.columns: {suggestion}, here with --columns user=question --columns assistant=reply"
    if "input_ids" in names:
        hint = "token ids do not say which of them are the answer: add `labels` (-100 = not trained) or a `completion_mask`"
    elif any(name.startswith(("chosen", "rejected")) for name in names):
        hint = "a pair needs both sides: map them with data.columns: {chosen: ..., rejected: ...}"
    near = next((f"; nearest format: {word}" for word in get_args(Format) if nearest(word, names)), "")
    return DataError(f"unknown format; columns found: {', '.join(sorted(names)) or 'none'}{near}", where=row.name, hint=hint)


def _has_labels(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in ("labels", "completion_mask", "assistant_masks", "loss_mask", "train"))


def _has_prompt(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in ("prompt", "messages", "conversations", "question", "instruction"))


_TESTS: dict[Format, Callable[[Mapping[str, Any]], bool]] = {
    "rollouts": lambda fields: "rollouts" in fields and isinstance(fields.get("prompt"), Mapping),
    "tokens": lambda fields: ("input_ids" in fields and _has_labels(fields)) or ("prompt_ids" in fields and "completion_ids" in fields),
    "preference": lambda fields: pair_columns(fields) is not None,
    "unpaired": lambda fields: (
        label_column(fields) is not None
        and ("messages" in fields or "conversations" in fields or ("completion" in fields and _has_prompt(fields)))
    ),
    "messages": lambda fields: "messages" in fields,
    "sharegpt": lambda fields: "conversations" in fields and not {"chosen", "rejected"} & set(fields),
    "prompt+completion": lambda fields: "prompt" in fields and "completion" in fields,
    "prompt": lambda fields: "prompt" in fields and not {"chosen", "rejected"} & set(fields),
    "alpaca": lambda fields: "instruction" in fields and "output" in fields,
    "question+answer": lambda fields: "question" in fields and "answer" in fields,
    "question+calls": lambda fields: "question" in fields and gold_column(fields) is not None,
    "question": lambda fields: "question" in fields,
    "text": lambda fields: "text" in fields,
}
