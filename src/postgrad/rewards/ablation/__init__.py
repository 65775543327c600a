"""Ablation on a run's rollouts: what they would have taught without one of the rewards. Imports no torch, and runs none of the user's code.

basis (how the run's advantages were made) · free (with and without) · show

It says what changes in the signal of rollouts that were sampled with every reward in place, not what another run would have become:
`train.reward_gradients` and `train.leave_one_out` need a model.
"""

from postgrad.rewards.ablation.free import Ablation, Dropped, ablate
from postgrad.rewards.ablation.show import NO_CHANGE, lines, to_json, verdict

__all__ = ["NO_CHANGE", "Ablation", "Dropped", "ablate", "lines", "to_json", "verdict"]
