"""Rewards: write them, load them, score rollouts in a process that can be killed, and account for every advantage. Imports no torch.

base (what a reward is) · load (find them) · child, worker (where they run) · score · ledger (totals and shares) · filter · metrics ·
advice · library (those that ship) · combine (rewards made of rewards)
"""

from postgrad.rewards.base import RolloutView, reward

__all__ = ["RolloutView", "reward"]
