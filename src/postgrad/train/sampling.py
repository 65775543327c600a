"""What GRPO, PPO and pairs share: a policy that samples with its tools, the judges of what it samples, and the run's prompts in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from postgrad.protocols import Sampler, SamplingParams
from postgrad.rewards.score import Scores
from postgrad.rollout import RolloutConfig, collect
from postgrad.rollout.journal import Journals, no_journals
from postgrad.rollout.tools import Toolbox
from postgrad.train.evaluate import Evaluator
from postgrad.train.model_rewards import Judges
from postgrad.train.order import row_at
from postgrad.train.setup import Policy
from postgrad.types import Group, Prompt


@dataclass(frozen=True)
class Sampling:
    """Samples and scores the prompts at given positions of the run. `evaluator`: None without held-out prompts."""

    policy: Policy
    sampler: Sampler
    params: SamplingParams
    toolbox: Toolbox
    rollout: RolloutConfig
    judges: Judges
    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool
    evaluator: Evaluator | None = None
    journals: Journals = no_journals

    def groups(self, step: int, positions: Sequence[int]) -> list[Group]:
        """One group per position of the endless stream of epochs over the prompts; the noise is keyed by (seed, step, position)."""
        size = len(self.prompts)
        prompts = [self.prompts[row_at(place, size=size, seed=self.seed, shuffle=self.shuffle)] for place in positions]
        numbered = [(place, self.judges.at(step, prompt)) for place, prompt in zip(positions, prompts, strict=True)]
        with self.journals(step) as journal:
            return collect(
                numbered, sampler=self.sampler, chat=self.policy.chat, toolbox=self.toolbox, config=self.rollout, params=self.params,
                seed=self.seed, step=step, journal=journal,
            )  # fmt: skip

    def epochs(self, drawn: int) -> float:
        """How often the prompts have been gone through once `drawn` of them were."""
        return drawn / len(self.prompts)

    def score(self, groups: Sequence[Group]) -> Scores:
        return self.judges.score(groups)

    def evaluate(self, step: int) -> dict[str, float]:
        """The held-out prompts under the weights as they are; empty without any."""
        return {} if self.evaluator is None else self.evaluator.run(step).metrics
