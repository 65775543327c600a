"""The reference's log-probs of a data set, computed once before training and kept under a key of everything they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.cache import build_once, cache_folder
from postgrad.data import Pair
from postgrad.models.loading import fingerprint
from postgrad.models.lora import base_of
from postgrad.protocols import Engine
from postgrad.train.pairs import pair_rows
from postgrad.train.setup import Policy

_PAIRS_AT_ONCE = 64

PairLogprobs = list[tuple[list[float], list[float]]]
"""Per pair, the log-probs of the chosen and of the rejected answer's scored tokens."""


def precomputed(
    pairs: Sequence[Pair], policy: Policy, engine: Engine, *, progress: Callable[[str, int], None] = lambda what, count: None,
    folder: Path | None = None,
) -> PairLogprobs:  # fmt: skip
    """Call it before the first update and before a checkpoint is restored: the policy is then the reference.

    `folder` None = `logprobs` in the cache folder of postgrad. The same model, rows and precision are computed once per machine.
    """

    def build(target: Path) -> None:
        values: list[float] = []
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            progress("reference log-probs", start)
            for row in engine.logprobs(pair_rows(pairs[start : start + _PAIRS_AT_ONCE])):
                values += row
        np.save(target / "logprobs.npy", np.asarray(values, np.float32), allow_pickle=False)

    done = build_once((folder or cache_folder() / "logprobs") / _key(pairs, policy), build, verify=True)
    return _split(pairs, np.load(done / "logprobs.npy", allow_pickle=False).tolist())


def _split(pairs: Sequence[Pair], values: list[float]) -> PairLogprobs:
    counts = [sum(answer.scored) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    ends = list(accumulate(counts))
    rows = [values[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return list(zip(rows[0::2], rows[1::2], strict=True))


def _settings(model: Any) -> str:
    """What the numbers follow from beside weights and ids: the model's config (positions, norms) and the scale of its adapter."""
    config = {key: value for key, value in base_of(model).config.to_dict().items() if key not in ("_name_or_path", "transformers_version")}
    scales = [(name, part.scaling) for name, part in model.named_modules() if isinstance(getattr(part, "scaling", None), dict)]
    return json.dumps([config, scales], sort_keys=True, default=str)


def _key(pairs: Sequence[Pair], policy: Policy) -> str:
    digest = hashlib.sha256(f"{fingerprint(policy.model.model)} {policy.model.autocast} {_settings(policy.model.model)}".encode())
    for pair in pairs:
        for ids in (pair.prompt_ids, pair.chosen.token_ids, pair.rejected.token_ids):
            digest.update(np.asarray([len(ids), *ids], np.int64).tobytes())
        digest.update(bytes(pair.chosen.scored) + bytes(pair.rejected.scored))
    return digest.hexdigest()[:32]
