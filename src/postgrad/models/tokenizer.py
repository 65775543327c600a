"""The tokenizer as the model ships it, and every id that ends a turn. No weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.errors import DataError, ModelError, reason
from postgrad.models.locate import Location, locate
from postgrad.models.quiet import quiet
from postgrad.models.weights import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name: str | Path) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """(tokenizer with its chat template, all ids that end a turn) of any model that `load` takes, without its weights.

    The end ids are those of the generation config (which may list several) and the tokenizer's own.
    Raises `ModelError` when there is no tokenizer, `DataError` when its ids exceed the model's embedding rows.
    """
    location = locate(name)
    tokenizer = read_tokenizer(location)
    config = read_json(location.folder / "config.json")
    rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    if rows is not None:
        check_vocabulary(tokenizer, int(rows), where=str(name))
    return tokenizer, stop_ids(location.folder, tokenizer)


def read_tokenizer(location: Location) -> PreTrainedTokenizerFast:
    """From the adapter folder if it brings one, else from the model's folder."""
    folder = location.folder
    if location.adapter is not None and (location.adapter / "tokenizer.json").is_file():
        folder = location.adapter
    try:
        with quiet():
            tokenizer = _read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no usable tokenizer here: {reason(error)}"
        raise ModelError(
            what, where=str(folder), hint="copy tokenizer.json and tokenizer_config.json of the model into this folder"
        ) from error
    if not tokenizer.is_fast:
        raise ModelError("postgrad needs a fast tokenizer", where=str(folder), hint="convert it to tokenizer.json")
    return tokenizer  # type: ignore[no-any-return]


def _read(folder: Path) -> Any:
    """tokenizer.json decides when it is there.

    The class that tokenizer_config.json names is not asked: transformers 5 lets some of them (GPT2Tokenizer, Qwen2Tokenizer) replace the
    split of text that tokenizer.json states, so the same text silently gets other tokens than the model was trained on.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def stop_ids(folder: Path, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """End ids of generation_config.json (of config.json where there is none) and of the tokenizer."""
    generation = folder / "generation_config.json"
    source = generation if generation.is_file() else folder / "config.json"
    return merge_stop_ids(read_json(source).get("eos_token_id"), tokenizer.eos_token_id)


def merge_stop_ids(*values: int | Iterable[int] | None) -> frozenset[int]:
    """Each value is an id, several, or None.

    >>> sorted(merge_stop_ids([2, 5], 2, None))
    [2, 5]
    """
    ids: set[int] = set()
    for value in values:
        if value is not None:
            ids |= {int(value)} if isinstance(value, int) else {int(item) for item in value}
    return frozenset(ids)


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, rows: int, *, where: str) -> None:
    """Every id the tokenizer can make must have an embedding row. Raises `DataError`."""
    largest_token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        raise DataError(
            f"the tokenizer makes ids up to {largest} ({largest_token!r}), but the model has {rows} embedding rows",
            where=where,
            hint="resize the model's embeddings, or this is the wrong tokenizer for it",
        )
