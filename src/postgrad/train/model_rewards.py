"""Reward models as rewards: each with its own tokenizer and chat template, beside the reward functions.

A rollout is scored as the reward model was trained: prompt and answer through *its* template, read at the end token of the last
assistant turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from postgrad.chat import ChatFormat
from postgrad.errors import DataError, RecipeError, RunError
from postgrad.models.loading import LanguageModel
from postgrad.models.reader import Reader
from postgrad.models.role_engine import RoleReader
from postgrad.models.roles import add_reward
from postgrad.models.scalar import is_reward_model, load_scalar
from postgrad.models.tokenizer import load_tokenizer
from postgrad.rewards.advice import Declared
from postgrad.rewards.base import RewardRole
from postgrad.rewards.combine import STEP
from postgrad.rewards.score import Scorer, Scores
from postgrad.train.pairs import scored_row
from postgrad.train.recipe import Reward
from postgrad.types import Group, Message, Prompt, Rollout, StopReason, ToolSpec

_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class ConversationScorer:
    """A reward model, and how conversations become its tokens."""

    chat: ChatFormat
    reader: Reader

    def ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The conversation up to the end token of its last assistant turn. Raises `DataError` when there is none."""
        last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=None)
        if last is None:
            raise DataError("there is no assistant turn to score")
        encoded = self.chat.last_turn(messages[: last + 1], tools, check_calls=False)
        end = max(place for place, source in enumerate(encoded.source) if source == "assistant") + 1
        return encoded.token_ids[:end]

    def raw_ids(self, prompt: str, completion: str) -> tuple[int, ...]:
        return self.chat.raw_conversation(prompt, completion).token_ids

    def scores(self, ids: Sequence[tuple[int, ...]]) -> list[float]:
        """One score per sequence; a score does not depend on what else is scored with it."""
        return [values[0] for values in self.reader.values([scored_row(row, index) for index, row in enumerate(ids)])]


def load_scorer(name: str, *, dtype: str = "auto") -> ConversationScorer:
    """Raises `ModelError` when `name` is no reward model."""
    model = load_scalar(name, dtype=dtype, trainable=False, new_head=False)
    chat = ChatFormat(model.tokenizer, stop_ids=model.stop_ids)
    chat.require_end()
    reader = Reader(model.model, autocast=model.autocast, reads="values", tokens_per_micro_batch=_TOKENS_AT_ONCE)
    return ConversationScorer(chat, reader)


@dataclass(frozen=True)
class ModelReward:
    """One entry of `rewards:` that names a reward model."""

    name: str
    weight: float
    role: RewardRole
    scorer: ConversationScorer
    range: None = None

    @property
    def on_policys_base(self) -> bool:
        """Whether it is an adapter on the policy's own base, and no model of its own."""
        return isinstance(self.scorer.reader, RoleReader)

    def values(self, groups: Sequence[Group], tools: Sequence[ToolSpec]) -> list[float]:
        """One score per rollout; NaN where the infrastructure failed."""
        rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        scored = [index for index, (_, rollout) in enumerate(rollouts) if rollout.stop is not StopReason.INFRASTRUCTURE]
        values = [math.nan] * len(rollouts)
        ids = [self._ids(*rollouts[index], tools) for index in scored]
        for index, value in zip(scored, self.scorer.scores(ids), strict=True):
            values[index] = value
        return values

    def _ids(self, prompt: Prompt, rollout: Rollout, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        if prompt.raw_text is not None:
            return self.scorer.raw_ids(prompt.raw_text, rollout.text)
        try:
            return self.scorer.ids((*prompt.messages, *rollout.messages), (*tools, *prompt.tools))
        except DataError as error:
            raise RunError(f"reward {self.name}: {error.what}", where=prompt.row, hint=error.hint) from error


class Judges:
    """Every reward of a run: functions in their own process, then reward models, in the order of the scores' columns."""

    def __init__(self, functions: Scorer, models: Sequence[ModelReward] = (), tools: Sequence[ToolSpec] = ()) -> None:
        self.functions, self.models, self.tools = functions, tuple(models), tuple(tools)

    @property
    def rewards(self) -> Sequence[Declared]:
        return [*self.functions.rewards, *self.models]

    def at(self, step: int, prompt: Prompt) -> Prompt:
        """The prompt with the optimizer step as a column, where a reward asks for it (`schedule` does). A column of that name stays."""
        wanted = any(STEP in (*reward.form.required, *reward.form.optional) for reward in self.functions.rewards)
        return replace(prompt, columns={STEP: step, **prompt.columns}) if wanted else prompt

    def score(self, groups: Sequence[Group]) -> Scores:
        scores = self.functions.score(groups)
        for reward in self.models:
            scores = scores.with_reward(reward.name, weight=reward.weight, role=reward.role, values=reward.values(groups, self.tools))
        return scores


def names_model(reward: Reward, base: Path) -> Path | None:
    """The folder of the reward model that `use:` names, or None when it names a function.

    A folder or run directory, relative to the recipe or, as `model:` and `run_dir:` are, to the working directory.
    """
    for folder in (base / reward.use, base / reward.use / "model", Path(reward.use), Path(reward.use) / "model"):
        if is_reward_model(folder):
            return folder
    return None


def check_model_reward(reward: Reward) -> None:
    """Raises `RecipeError` for keys that act only on functions."""
    for key, unset in (("args", {}), ("deadline_s", None), ("on_error", "abstain"), ("on_nonfinite", "stop")):
        if getattr(reward, key) != unset:
            raise RecipeError(f"it acts on reward functions, and {reward.use} is a reward model", key=key, hint="leave it out")


def load_model_reward(reward: Reward, folder: Path, *, dtype: str, policy: LanguageModel | None = None) -> ModelReward:
    """Where it was trained with an adapter on the `policy`'s base, it lives there too and needs no model of its own."""
    name = reward.name or "reward_model"
    scorer = _on_base(policy, folder, name) if policy is not None else None
    return ModelReward(name, reward.weight, reward.role or "outcome", scorer or load_scorer(str(folder), dtype=dtype))


def _on_base(policy: LanguageModel, folder: Path, name: str) -> ConversationScorer | None:
    role = add_reward(policy, folder, name=name)
    if role is None:
        return None
    tokenizer, stop_ids = load_tokenizer(str(folder))
    reader = RoleReader(role, autocast=policy.autocast, tokens_per_micro_batch=_TOKENS_AT_ONCE)
    return ConversationScorer(ChatFormat(tokenizer, stop_ids=stop_ids), reader)
