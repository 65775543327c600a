"""Rows of a dataset on the Hugging Face hub, or of its copy in the local cache.

`owner/name`, `owner/name:split` or `owner/name:config:split`; the split is `train` unless named.
Without a network the local cache is asked, and the answer comes within seconds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

from postgrad.data.files import Place, Rejected, Row
from postgrad.errors import DataError, reason

_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?")
_SECONDS = 4.0
_OFFLINE = "download the dataset where there is a network and use the file, or give a local .jsonl, .json or .parquet"


def is_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None


def read_hub(source: str) -> Iterator[Row | Rejected]:
    """Rows of one split. Raises `DataError` within seconds when the hub cannot be reached and the cache does not hold the dataset."""
    match = _HUB_ID.fullmatch(source)
    if match is None:
        raise DataError("not a hub id", where=source)
    name, first, second = match["name"], match["first"], match["second"]
    config, split = (first, second) if second else (None, first or "train")
    problem = _reach(name)
    dataset = _load(name, config, split, source=source, offline=problem)
    for number, fields in enumerate(dataset, start=1):
        yield Row(Place(source, number), dict(fields))


def _reach(name: str) -> str:
    """ "" when the hub answers within seconds, else why it does not. A thread waits: name resolution has no timeout."""
    outcome = ["no answer within 4 seconds"]

    def ask() -> None:
        import huggingface_hub

        try:
            huggingface_hub.HfApi().dataset_info(name, timeout=_SECONDS - 1)
            outcome[0] = ""
        except Exception as error:  # reported below in one line: any failure to reach the hub is the same to the user
            outcome[0] = f"{type(error).__name__}: {reason(error)}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return outcome[0]


def _load(name: str, config: str | None, split: str, *, source: str, offline: str) -> Any:
    import datasets

    options: dict[str, Any] = {}
    if offline:
        options["download_config"] = datasets.DownloadConfig(local_files_only=True, max_retries=0)
    previous = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = previous or bool(offline)
        return datasets.load_dataset(name, config, split=split, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if offline:
            raise DataError(
                f"the dataset is neither reachable on the hub ({offline}) nor in the local cache", where=source, hint=_OFFLINE
            ) from error
        raise DataError(
            f"cannot load the dataset: {reason(error)}", where=source, hint="name a split or config: owner/name:config:split"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = previous
