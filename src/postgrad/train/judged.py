"""Groups that have been scored, and the training rows they become.

`JudgedGroup` is one group with its rewards, advantages and the split of each advantage over the rewards. From it come the rollout
files (everything a reader needs), the metrics, and the `TrainRow`s of the packed batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from postgrad.rollout.record import group_to_json
from postgrad.types import Group, Rollout, Segment, Source, StopReason, TrainRow


@dataclass(frozen=True)
class JudgedGroup:
    """One group after scoring. Sequences have one entry per rollout; NaN = abstained.

    rewards:    by name, the reward's value.
    totals:     weighted sums.
    advantages: 0 where nothing can be said.
    shares:     by reward, its part of the advantage; the parts add up to it. Empty where a function of the user's made the advantages.
    dropped:    why the group is left out of the batch ("" = it is in).
    token_advantages: of each rollout, one per sampled token, with `advantages` their means; None = all tokens have their rollout's.
    """

    group: Group
    rewards: Mapping[str, Sequence[float]]
    totals: Sequence[float]
    advantages: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    dropped: str = ""
    token_advantages: Sequence[Sequence[float]] | None = None

    def credit(self, index: int) -> float | Sequence[float]:
        """What the tokens of a rollout are trained with: one advantage, or one for each."""
        return self.advantages[index] if self.token_advantages is None else self.token_advantages[index]

    def record(self, step: int) -> dict[str, Any]:
        """One line of a rollout file."""
        per_rollout = [
            {
                "rewards": {name: _json(values[index]) for name, values in self.rewards.items()},
                "total": _json(self.totals[index]),
                "advantage": self.advantages[index],
                "advantage_by_reward": {name: _json(values[index]) for name, values in self.shares.items()},
                **({} if self.token_advantages is None else {"advantage_by_turn": self._by_turn(index)}),
            }
            for index in range(len(self.group.rollouts))
        ]
        return {"step": step, "dropped": self.dropped, **group_to_json(self.group), "scores": per_rollout}

    def _by_turn(self, index: int) -> list[float]:
        """The mean advantage of each turn's tokens."""
        assert self.token_advantages is not None
        values = iter(self.token_advantages[index])
        return [math.fsum(islice(values, length)) / max(1, length) for length in self.group.rollouts[index].turn_lengths]


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the loss of one optimizer step is divided by, over every micro-batch and rank: trained tokens, and rollouts."""

    tokens: float
    rollouts: float


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One optimizer step: the rows that can have a gradient, and denominators that count the others as well."""

    rows: tuple[TrainRow, ...]
    denominators: Denominators

    def to_json(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows], "denominators": asdict(self.denominators)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Minibatch:
        rows = tuple(TrainRow(**{**row, "token_ids": tuple(row["token_ids"]), "trained": tuple(row["trained"])}) for row in record["rows"])
        return cls(rows, Denominators(**record["denominators"]))


def counts(rollout: Rollout, total: float, *, mask_truncated: bool) -> bool:
    """Whether a rollout is part of the loss at all: it was scored, its infrastructure held, and no limit masks it."""
    if rollout.stop is StopReason.INFRASTRUCTURE or math.isnan(total):
        return False
    return not (mask_truncated and rollout.stop.truncated)


def _one_prompt(group: Group) -> bool:
    """Whether every rollout read the same prompt ids: an environment's first observation may differ between samples."""
    return len({rollout.segments[0].token_ids for rollout in group.rollouts}) == 1


def rows_of(index: int | None, rollout: Rollout, advantage: float | Sequence[float]) -> list[TrainRow]:
    """The training rows of one rollout of group `index`: one, or one per fork. The mask is the rollout's own tool mask.

    advantage: the rollout's (per_row["advantages"]), or one per sampled token (per_token["advantages"]).

    per_row["share"] is the row's part of the rollout's sampled tokens (1 without forks): a mean over a rollout is the sum over its rows
    of share × the row's mean, so a forked rollout weighs as much as any other.
    """
    total = max(1, rollout.sampled_tokens)
    given = advantage if isinstance(advantage, float) else iter(advantage)
    rows = [_row(segments, given, total) for segments in (*rollout.forks, rollout.segments)]
    prompt = rollout.segments[0]
    if index is None or rollout.forks or prompt.source is not Source.PROMPT:
        return rows
    (row,) = rows
    return [TrainRow(row.token_ids, row.trained, index, len(prompt.token_ids), row.per_token, row.per_row)]


def _row(segments: Sequence[Segment], advantage: float | Iterator[float], sampled_tokens: int) -> TrainRow:
    """`advantage`: the rollout's, or those of the sampled tokens that no earlier row had."""
    ids = tuple(token for segment in segments for token in segment.token_ids)
    mask = tuple(flag for segment in segments for flag in segment.mask)
    old = [value for segment in segments for value in (segment.logprobs or (0.0,) * len(segment.token_ids))]
    share = {"share": sum(mask) / sampled_tokens}
    if isinstance(advantage, float):
        return TrainRow(ids, mask, per_token={"sampler_logprobs": old}, per_row={"advantages": advantage, **share})
    each = [next(advantage) if flag else 0.0 for flag in mask]
    return TrainRow(ids, mask, per_token={"sampler_logprobs": old, "advantages": each}, per_row=share)


def split_minibatches(groups: Sequence[JudgedGroup], *, minibatches: int, mask_truncated: bool, skip_zero: bool) -> list[Minibatch]:
    """Split whole groups evenly over the optimizer steps of one pass over the batch.

    skip_zero: leave out rows whose advantage is 0 (without a KL term they have no gradient); they still count in the denominators.
    """
    share = max(1, -(-len(groups) // minibatches))
    pieces = [groups[start * share : (start + 1) * share] for start in range(minibatches)]
    return [_minibatch(piece, start * share, mask_truncated=mask_truncated, skip_zero=skip_zero) for start, piece in enumerate(pieces)]


def _minibatch(groups: Sequence[JudgedGroup], first: int, *, mask_truncated: bool, skip_zero: bool) -> Minibatch:
    counted = [
        (index if _one_prompt(judged.group) else None, rollout, judged.credit(position))
        for index, judged in enumerate(groups, start=first)
        for position, rollout in enumerate(judged.group.rollouts)
        if counts(rollout, judged.totals[position], mask_truncated=mask_truncated)
    ]
    denominators = Denominators(float(sum(rollout.sampled_tokens for _, rollout, _ in counted)), float(len(counted)))
    computed = [item for item in counted if np.any(item[2]) or not skip_zero]
    return Minibatch(tuple(row for item in computed for row in rows_of(*item)), denominators)
