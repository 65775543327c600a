"""A reward is a function from one rollout to a number, or None where it does not apply (None is not 0)."""

from postgrad.rewards import RolloutView, reward


@reward(scope="length", claim="the answer is short", range=(0, 1))
def brief(rollout: RolloutView) -> float:
    return max(0.0, 1.0 - rollout.sampled_tokens / 48)
