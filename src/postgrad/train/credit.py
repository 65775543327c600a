"""Which of a rollout's tokens are credited with what.

rollout   the article's: every token of a rollout has the rollout's advantage.
turn      what came of a turn: the rewards from it on, discounted per turn, compared with the same turn of the group's other rollouts.
state     beside the rollout's advantage, that of the turn among all turns of the group that began in the same state (GiGPO, arXiv
          2505.10978). The state is what the environment had last said: the prompt, or the results of the turn before.
a hook    `loss.advantages`: a function from a group and its rewards to advantages, of rollouts or of their tokens.

Every comparison is that of `judging.compared`, so presets, `scale`, `normalize` and `positive_weight` act on turns as they do on rollouts,
and every advantage stays the sum of its rewards' shares. A rollout's value stands on its last turn; what `@reward(per_turn=True)` gave
stands on each turn.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from postgrad import formulas
from postgrad.errors import RunError
from postgrad.rewards.ledger import Floats
from postgrad.rewards.score import Scores
from postgrad.types import Group, Rollout

Compare = Callable[[Floats, int], tuple[Floats, Floats]]
"""(values [M, K] with NaN = not there, size of the groups) → (advantages [M], shares [M, K])"""
Hook = Callable[[Group, Mapping[str, Sequence[float]]], Sequence[float | Sequence[float]]]


@dataclass(frozen=True)
class Credit:
    """advantages [N] and shares [N, K] of rollouts: means over their sampled tokens. tokens: each rollout's, one per sampled token; None
    where all tokens of a rollout have its own."""

    advantages: Floats
    shares: Floats
    tokens: Sequence[Sequence[float]] | None = None


def by_turn(groups: Sequence[Group], scores: Scores, values: Floats, compare: Compare, *, discount: float) -> Credit:
    """values [N, K]: the rewards that count, NaN where one abstained."""
    rollouts = _rollouts(groups)
    returns, there = returns_by_turn(rollouts, scores, values, discount=discount)
    advantages = np.zeros(there.shape)
    shares = np.zeros(returns.shape)
    for turn in range(there.shape[1]):
        at = np.where(there[:, turn, None], returns[:, turn], np.nan)
        advantages[:, turn], shares[:, turn] = compare(at, scores.group_size)
    return _over_tokens(rollouts, advantages, shares)


def by_state(groups: Sequence[Group], scores: Scores, values: Floats, compare: Compare, *, discount: float, state_weight: float) -> Credit:
    """A of the rollout + state_weight · A of the turn among those of its group that began in the same state."""
    rollouts = _rollouts(groups)
    of_rollouts, shares_of_rollouts = compare(values, scores.group_size)
    returns, there = returns_by_turn(rollouts, scores, values, discount=discount)
    alike: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for number, rollout in enumerate(rollouts):
        for turn, state in enumerate(states(rollout)):
            alike.setdefault((number // scores.group_size, state), []).append((number, turn))
    if not alike:  # nobody wrote anything
        return _over_tokens(rollouts, np.zeros(there.shape), np.zeros((*there.shape, values.shape[1])))
    size = max(map(len, alike.values()))
    table = np.full((len(alike) * size, values.shape[1]), np.nan)
    places = [(row * size + column, place) for row, members in enumerate(alike.values()) for column, place in enumerate(members)]
    for row, (number, turn) in places:
        table[row] = returns[number, turn]
    of_states, shares_of_states = compare(table, size)
    advantages = np.where(there, of_rollouts[:, None], 0.0)
    shares = np.where(there[..., None], shares_of_rollouts[:, None], 0.0)
    for row, (number, turn) in places:
        advantages[number, turn] += state_weight * of_states[row]
        shares[number, turn] += state_weight * shares_of_states[row]
    return _over_tokens(rollouts, advantages, shares)


def by_hook(groups: Sequence[Group], scores: Scores, values: Floats, hook: Hook) -> Credit:
    """What the user's function says, checked. A group of which nothing counts is not shown to it."""
    size = scores.group_size
    advantages, tokens = np.zeros(len(values)), []
    for index, group in enumerate(groups):
        here = values[index * size : (index + 1) * size]
        given = [0.0] * size if np.isnan(here).all() else _asked(hook, group, dict(zip(scores.names, here.T.tolist(), strict=True)))
        for place, (rollout, value) in enumerate(zip(group.rollouts, given, strict=True)):
            each = _per_token(rollout, value, where=f"{group.prompt.row}, sample {rollout.sample}")
            tokens.append(each)
            advantages[index * size + place] = float(np.mean(each)) if each else 0.0
    return Credit(advantages, np.zeros((len(values), 0)), tokens)


def returns_by_turn(rollouts: Sequence[Rollout], scores: Scores, values: Floats, *, discount: float) -> tuple[Floats, Any]:
    """(returns [N, T, K], there [N, T]): what each reward gave from each turn on, a turn later weighing `discount`; NaN = it abstained."""
    turns = np.array([rollout.turns for rollout in rollouts])
    there = np.arange(max(1, turns.max(initial=1)))[None] < turns[:, None]
    rewards = np.zeros((*there.shape, len(scores.names)))
    for column, name in enumerate(scores.names):
        placed = scores.turns.get(name, {})
        for number, rollout in enumerate(rollouts):
            if number in placed:
                rewards[number, : rollout.turns, column] = placed[number]
            elif rollout.turns and math.isfinite(values[number, column]):
                rewards[number, rollout.turns - 1, column] = values[number, column]
    flat = torch.from_numpy(rewards.transpose(0, 2, 1).reshape(-1, there.shape[1]))
    mask = torch.from_numpy(np.repeat(there, len(scores.names), axis=0))
    _, returns = formulas.gae(flat, torch.zeros_like(flat), mask, gamma=discount, lam=1.0)  # a critic that expects nothing
    table = returns.numpy().reshape(len(rollouts), len(scores.names), -1).transpose(0, 2, 1)
    return np.where(np.isnan(values)[:, None], np.nan, table), there


def states(rollout: Rollout) -> list[str]:
    """What the environment had last said when each turn began; "" for the first, which follows the prompt."""
    found, heard = [], ""
    for message in rollout.messages:
        if message.role == "assistant":
            found.append(heard)
            heard = ""
        else:
            heard += f"\n{message.role}: {message.content}"
    return found[: rollout.turns]


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _over_tokens(rollouts: Sequence[Rollout], advantages: Floats, shares: Floats) -> Credit:
    """From turns to tokens; rollouts get the mean over their tokens."""
    lengths = np.zeros(advantages.shape)
    for number, rollout in enumerate(rollouts):
        lengths[number, : rollout.turns] = rollout.turn_lengths
    part = lengths / np.maximum(1.0, lengths.sum(axis=1, keepdims=True))
    tokens = [
        [float(value) for turn, length in enumerate(rollout.turn_lengths) for value in [advantages[number, turn]] * length]
        for number, rollout in enumerate(rollouts)
    ]
    return Credit((part * advantages).sum(axis=1), (part[..., None] * shares).sum(axis=1), tokens)


def _asked(hook: Hook, group: Group, rewards: Mapping[str, Sequence[float]]) -> Sequence[float | Sequence[float]]:
    hint = "return one entry per rollout of the group: a number, or one number per sampled token"
    given: Any = None
    try:
        given = hook(group, rewards)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"loss.advantages raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno} in {frame.name})"
        raise RunError(what, where=group.prompt.row) from error
    try:
        entries: list[Any] = [] if isinstance(given, str | bytes | Mapping) else list(given)
    except TypeError:
        entries = []
    if not entries:
        raise RunError(f"loss.advantages returned {type(given).__name__}, which is no list of entries", where=group.prompt.row, hint=hint)
    if len(entries) != len(group.rollouts):
        what = f"loss.advantages returned {len(entries)} entries for {len(group.rollouts)} rollouts"
        raise RunError(what, where=group.prompt.row, hint=hint)
    return entries


def _per_token(rollout: Rollout, value: float | Sequence[float], *, where: str) -> list[float]:
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except Exception as error:  # text, lists of unequal lengths, a tensor that needs a gradient
        what = f"loss.advantages returned {type(value).__name__} for a rollout, which is neither a number nor a list of numbers"
        raise RunError(
            f"{what}: {error}", where=where, hint="return a number for a rollout, or one number per sampled token, turn after turn"
        ) from error
    if numbers.shape not in ((), (rollout.sampled_tokens,)):
        raise RunError(
            f"loss.advantages returned {numbers.shape} numbers for {rollout.sampled_tokens} sampled tokens",
            where=where,
            hint="return a number for a rollout, or one number per sampled token, turn after turn",
        )
    if not np.isfinite(numbers).all():
        raise RunError(
            "loss.advantages returned a number that is not finite", where=where, hint="return finite advantages; 0 teaches nothing"
        )
    return [float(number) for number in np.broadcast_to(numbers, (rollout.sampled_tokens,))]
