"""Rewards for length. They count what the model wrote (tool results do not count) and read no text."""

from __future__ import annotations

import math

from postgrad.rewards.base import RolloutView, reward


def _check_overlong(max_tokens: int | None = None, buffer: int = 0) -> None:
    if max_tokens is None:
        raise ValueError("needs args: {max_tokens: …}")
    if not 0 <= buffer <= max_tokens:
        raise ValueError(f"needs 0 ≤ buffer ≤ max_tokens, got buffer {buffer} and max_tokens {max_tokens}")


@reward(scope="length", claim="the model wrote no more than the length allows", range=(-1.0, 0.0), check_args=_check_overlong)
def soft_overlong(rollout: RolloutView, *, max_tokens: int, buffer: int = 0) -> float:
    """0 up to max_tokens − buffer sampled tokens, then falling linearly to −1 at max_tokens (DAPO's soft overlong punishment).

    Tool results do not count: the model did not write them.
    """
    over = rollout.sampled_tokens - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer


def _check_cosine(max_tokens: int | None = None) -> None:
    if max_tokens is None or max_tokens < 1:
        raise ValueError("needs args: {max_tokens: …}, at least 1")


@reward(scope="length", claim="a shorter rollout is better", range=(0.0, 1.0), check_args=_check_cosine)
def cosine_length(rollout: RolloutView, *, max_tokens: int) -> float:
    """(1 + cos(π · min(sampled tokens, max_tokens) / max_tokens)) / 2: near 1 while short, falling fastest in the middle, 0 at the end.

    Beyond max_tokens it stays 0; without that bound the cosine would rise again and pay for running on. It knows nothing of right and
    wrong: `gate(correct, cosine_length)` pays it to right answers only (arXiv 2502.03373 joins both).
    """
    return (1.0 + math.cos(math.pi * min(1.0, rollout.sampled_tokens / max_tokens))) / 2.0


def _check_repetition(ngram: int = 3) -> None:
    if ngram < 1:
        raise ValueError(f"needs ngram ≥ 1, got {ngram}")


@reward(scope="length", claim="the model does not repeat itself", range=(-1.0, 0.0), check_args=_check_repetition)
def repetition(rollout: RolloutView, *, ngram: int = 3) -> float:
    """−(share of the sampled n-grams of tokens that occurred before). Counts tokens, so text without spaces does not hide a loop."""
    ids = rollout.sampled_ids
    total = len(ids) - ngram + 1
    if total <= 0:
        return 0.0
    return len({ids[i : i + ngram] for i in range(total)}) / total - 1.0


@reward(scope="length", claim="shorter than the other rollouts of the prompt", range=(-0.5, 0.5), group=True)
def length_in_group(rollouts: list[RolloutView]) -> list[float]:
    """½ − (length − shortest) / (longest − shortest) over the rollouts of one prompt, 0 for all when their lengths are equal.

    The term λ of Kimi k1.5 (arXiv 2501.12599), which leaves wrong answers only its negative half; `gate` gives them its lowest value.
    """
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    return [0.5 - (length - shortest) / spread if spread else 0.0 for length in lengths]
