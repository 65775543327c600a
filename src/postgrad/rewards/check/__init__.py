"""What can be known of rewards before any training, in seconds and without a model.

1. contract     type, range, determinism, independence of order and batch, purity, threads, deadline, empty and huge rollouts
2. scoreboard   what lazy strategies earn beside the good answer: critical from 0.9 of it on, a warning from 0.5 on
3. scope        which layer of a good answer each reward notices
4. scale        whether shaping can outrank the outcome
5. principle 2  sizes of bonus and penalty that have no effect (with 4)

Functions run in the worker process, never in the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from postgrad.rewards.check.bench import Bench
from postgrad.rewards.check.contract import UNSTABLE, check_contract
from postgrad.rewards.check.finding import Finding, gravest_first
from postgrad.rewards.check.report import Report
from postgrad.rewards.check.samples import Draft, Sample, say
from postgrad.rewards.check.scale import check_scale, scale_sheet
from postgrad.rewards.check.scope import check_scopes, scope_matrix
from postgrad.rewards.check.scoreboard import check_failures, check_good, check_strategies, standings
from postgrad.rewards.check.scoring import score
from postgrad.rewards.ledger import Scheme
from postgrad.rewards.load import LoadedReward

__all__ = ["Draft", "Finding", "Report", "Sample", "check_rewards", "say"]


_AS_GRPO = Scheme("group")
_BROKEN = ("contract.refused", "contract.timeout", "contract.crash", "contract.memory")
"""A reward with one of these on good answers is tried no further."""


def check_rewards(
    rewards: Sequence[LoadedReward], samples: Sequence[Sample], *, scheme: Scheme = _AS_GRPO, weighted: bool = False
) -> Report:
    """All five checks on rewards and good answers. `weighted`: the rewards carry the weights of a recipe; `scheme` is how its advantages
    are made. Samples come with every column that the rewards require.

    Raises `ValueError` without rewards or samples.
    """
    if not rewards or not samples:
        raise ValueError("a check needs at least one reward and one good answer")
    began = time.perf_counter()
    with Bench(rewards) as bench:
        findings, counts = check_contract(bench, samples)
        costs = tuple(bench.cost(index) for index in range(len(rewards)))
        broken = {found.reward for found in findings if found.id in _BROKEN}
        sound = [reward for reward in rewards if reward.name not in broken]
        scored = score(bench, samples, [index for index, reward in enumerate(rewards) if reward in sound]) if sound else None
    if scored is None:
        return Report(tuple(rewards), gravest_first(findings), tuple(counts), 0, costs=costs, seconds=time.perf_counter() - began)
    board, matrix, sheet = standings(scored, sound, weighted=weighted), scope_matrix(scored, sound), scale_sheet(scored, sound)
    findings += check_good(scored, sound)
    findings += check_strategies(board, sound)
    findings += check_failures(scored)
    findings += check_scopes(matrix, sound, unstable={found.reward for found in findings if found.id in UNSTABLE})
    findings += check_scale(scored, sound, scheme=scheme, weighted=weighted)
    return Report(
        tuple(rewards), gravest_first(findings), tuple(counts), len(scored.rows), tuple(board), matrix, tuple(sheet), costs,
        time.perf_counter() - began,
    )  # fmt: skip
