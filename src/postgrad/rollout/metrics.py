"""Numbers about rollouts. Names follow TRL where TRL has one; a number that nothing supports is left out, never reported as 0.

Lengths count sampled tokens only: tool results are not the policy's length. Rollouts that the infrastructure spoiled are counted and
otherwise left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from postgrad.rollout.results import ErrorKind
from postgrad.types import Group, Rollout, StopReason


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics over all rollouts of a step.

    completions/{mean,min,max}_length             sampled tokens of a rollout
    completions/{mean,min,max}_terminated_length  the same over rollouts that no limit cut
    completions/clipped_ratio                     share of rollouts that a limit ended (`StopReason.truncated`)
    completions/mean_turns                        turns of a rollout
    stop/REASON                                   rollouts per stop reason
    tools/call_frequency                          calls per rollout, failed ones included
    tools/failure_frequency                       share of the calls that failed (left out without calls)
    tools/errors/KIND                             failed calls per kind
    rollouts/retried, rollouts/history_rewrites   rollouts tried again after an infrastructure error; turns after which the template
                                                  would have rendered the history otherwise
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sound = [rollout for rollout in rollouts if rollout.stop is not StopReason.INFRASTRUCTURE]
    metrics = _lengths(sound, "length")
    metrics |= _lengths([rollout for rollout in sound if not rollout.stop.truncated], "terminated_length")
    if sound:
        metrics["completions/clipped_ratio"] = fmean(rollout.stop.truncated for rollout in sound)
        metrics["completions/mean_turns"] = fmean(rollout.turns for rollout in sound)
    metrics |= _stops(rollouts) | _tools(sound)
    metrics["rollouts/retried"] = float(sum(bool(rollout.infrastructure_errors) for rollout in rollouts))
    metrics["rollouts/history_rewrites"] = float(sum(rollout.rewrites for rollout in sound))
    return metrics


def _lengths(rollouts: Sequence[Rollout], name: str) -> dict[str, float]:
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    if not lengths:
        return {}
    return {
        f"completions/mean_{name}": fmean(lengths),
        f"completions/min_{name}": float(min(lengths)),
        f"completions/max_{name}": float(max(lengths)),
    }


def _stops(rollouts: Sequence[Rollout]) -> dict[str, float]:
    counts = Counter(rollout.stop for rollout in rollouts)
    return {f"stop/{reason}": float(counts[reason]) for reason in StopReason}


def _tools(rollouts: Sequence[Rollout]) -> dict[str, float]:
    results = [result for rollout in rollouts for result in rollout.tool_results]
    kinds = Counter(result.error for result in results if result.error)
    metrics = {f"tools/errors/{kind}": float(kinds[kind]) for kind in ErrorKind if kind is not ErrorKind.INFRASTRUCTURE}
    if rollouts:
        metrics["tools/call_frequency"] = len(results) / len(rollouts)
    if results:
        metrics["tools/failure_frequency"] = sum(kinds.values()) / len(results)
    return metrics
