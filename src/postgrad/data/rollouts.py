"""Rollouts that a run wrote, as rows: what the model read, what it wrote, and whether every finished turn ends with an end token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.chat import ChatFormat, EncodedConversation, TokenSource
from postgrad.data.encoded import COLUMNS, EncodedRow
from postgrad.data.files import Row
from postgrad.data.formats import Format
from postgrad.data.limit import Limit
from postgrad.data.messages import BadRow
from postgrad.data.pipeline import Draft
from postgrad.data.table import Record
from postgrad.data.tally import Tally

_SOURCES: Mapping[str, TokenSource] = {"prompt": "context", "model": "assistant", "tool": "glue"}
_CUT = frozenset({"turn_tokens", "total_tokens", "stop_string"})
"""Stop reasons after which the last turn of the model may be without an end token."""


@dataclass(frozen=True, kw_only=True)
class RolloutEncoder:
    """One group to a record per rollout; the trained tokens are those the model sampled, everything else is context."""

    chat: ChatFormat
    limit: Limit
    columns = COLUMNS

    def draft(self, row: Row, format: Format) -> Draft[Record]:
        rollouts = row.fields.get("rollouts")
        if not isinstance(rollouts, list) or not rollouts:
            raise BadRow("rollouts must be a list that is not empty")
        read = [self._read(f"{row.name} rollout {index}", rollout) for index, rollout in enumerate(rollouts)]

        def keep(_: Sequence[EncodedConversation], tally: Tally) -> list[Record]:
            tally.kept += 1
            tally.made += len(read)
            for encoded, finished in read:
                self._count(tally, encoded, finished)
            if not all(flag for _, finished in read for flag in finished):
                tally.mark("no_end_token", row.name)
            return [encoded.record() for encoded, _ in read]

        return Draft((), keep)

    def _count(self, tally: Tally, encoded: EncodedRow, finished: list[bool]) -> None:
        tally.lengths[len(encoded)] += 1
        tally.kept_lengths[len(encoded)] += 1
        tally.tokens += len(encoded)
        tally.trained += encoded.trained_tokens
        tally.answers += len(finished)
        tally.ends += sum(finished)

    def _read(self, name: str, rollout: Any) -> tuple[EncodedRow, list[bool]]:
        """The row, and for each turn that the model finished whether its last token is an end token."""
        try:
            segments = [(str(item["source"]), list(item["token_ids"]), list(item["logprobs"])) for item in rollout["segments"]]
        except (TypeError, KeyError) as error:
            raise BadRow(f"{name} has no segments with source, token_ids and logprobs: {error}") from None
        ids: list[int] = []
        stretches: list[tuple[int, TokenSource, bool]] = []
        ends: list[bool] = []
        for kind, token_ids, logprobs in segments:
            if kind not in _SOURCES or len(logprobs) != (len(token_ids) if kind == "model" else 0):
                raise BadRow(f"{name} has a {kind} segment of {len(token_ids)} tokens and {len(logprobs)} log-probs")
            ids += token_ids
            stretches.append((len(token_ids), _SOURCES[kind], kind == "model"))
            if kind == "model" and token_ids:
                ends.append(token_ids[-1] in self.chat.stop_ids)
        if rollout.get("stop") in _CUT:
            ends = ends[:-1]
        return EncodedRow.of(name, ids, stretches), ends
