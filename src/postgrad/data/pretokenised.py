"""Rows that are token ids already. Which of them are trained must be written beside them; nothing is guessed.

`input_ids` with `labels` (-100 = not trained, else the id itself) or a 0/1 mask (`completion_mask`, `assistant_masks`, `loss_mask`,
`train`); or `prompt_ids` and `completion_ids`. Places that `attention_mask` marks as padding are taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.data.encoded import EncodedRow
from postgrad.data.files import Row
from postgrad.data.messages import BadRow

IGNORED = -100
MASKS = ("completion_mask", "assistant_masks", "loss_mask", "train")


def read_tokens(row: Row, vocabulary_size: int) -> EncodedRow:
    """Raises `BadRow`: ids outside the vocabulary, labels or masks of another length, labels that are not the ids."""
    ids, trained = _ids_and_flags(row.fields)
    outside = next((token for token in ids if not 0 <= token < vocabulary_size), None)
    if outside is not None:
        raise BadRow(f"the id {outside} is outside the tokenizer's {vocabulary_size} ids: the row was made with another tokenizer")
    if not ids:
        raise BadRow("the row has no tokens")
    flags = (False, *trained[1:])
    return EncodedRow.of(row.name, ids, ((1, "assistant" if flag else "context", flag) for flag in flags))


def _ids_and_flags(fields: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    if "input_ids" not in fields:
        prompt, completion = _ids(fields["prompt_ids"], "prompt_ids"), _ids(fields["completion_ids"], "completion_ids")
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)
    ids = _ids(fields["input_ids"], "input_ids")
    trained = _from_labels(ids, fields["labels"]) if fields.get("labels") is not None else _from_mask(ids, fields)
    attention = fields.get("attention_mask")
    if attention is not None:
        real = _flags(attention, "attention_mask", len(ids))
        pairs = [(token, flag) for token, flag, keep in zip(ids, trained, real, strict=True) if keep]
        return [token for token, _ in pairs], [flag for _, flag in pairs]
    return ids, trained


def _from_labels(ids: Sequence[int], labels: Any) -> list[bool]:
    wanted = _ids(labels, "labels")
    if len(wanted) != len(ids):
        raise BadRow(f"{len(ids)} input_ids but {len(wanted)} labels")
    for place, (token, label) in enumerate(zip(ids, wanted, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(f"labels[{place}] is {label}; it must be input_ids[{place}] = {token}, or {IGNORED} (labels are not shifted)")
    return [label != IGNORED for label in wanted]


def _from_mask(ids: Sequence[int], fields: Mapping[str, Any]) -> list[bool]:
    name = next((name for name in MASKS if fields.get(name) is not None), None)
    if name is None:
        raise BadRow("the row has neither labels nor a mask, so nothing says which tokens are the answer")
    return _flags(fields[name], name, len(ids))


def _flags(value: Any, what: str, length: int) -> list[bool]:
    flags = _ids(value, what)
    if len(flags) != length or not set(flags) <= {0, 1}:
        raise BadRow(f"{what} must hold one 0 or 1 for each of the {length} ids")
    return [bool(flag) for flag in flags]


def _ids(value: Any, what: str) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, int) for item in value):
        raise BadRow(f"{what} must be a list of whole numbers")
    return list(value)
