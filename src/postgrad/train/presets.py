"""The GRPO family as one table: ratio level × surrogate × aggregation, and how advantages are scaled.

`grpo`, `bnpo`, `dr_grpo`, `dapo`, `gspo`, `cispo` and `rloo` are rows, not branches. A recipe may override the clip range, the scale
and where π_old comes from.

| preset  | paper                                    | differs from grpo in                                                    |
|---------|------------------------------------------|-------------------------------------------------------------------------|
| grpo    | DeepSeekMath, arXiv 2402.03300           | –                                                                       |
| bnpo    | arXiv 2506.02864                         | mean over all tokens of the batch                                       |
| dr_grpo | arXiv 2503.20783                         | divides by a constant length; advantages are not divided by the std     |
| dapo    | arXiv 2503.14476                         | mean over all tokens of the batch; clips higher above than below        |
| gspo    | arXiv 2507.18071                         | one ratio per sequence (geometric mean over its tokens), tiny clip range |
| cispo   | MiniMax-M1, arXiv 2506.13585             | clips the weight, not the gradient: every token keeps one               |
| rloo    | arXiv 2402.14740                         | leave-one-out baseline, plain REINFORCE, summed over the sequence       |

With several optimizer steps per rollout batch each step divides by its own tokens (TRL's dapo divides by their mean over the steps).
bnpo and dapo aggregate alike here because denominators are always global (TRL's bnpo divides by the micro-batch's own tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from postgrad.rewards.ledger import Normalize, Scheme
from postgrad.train.recipe import GRPOLoss, PresetName, Rollout

AdvantageScale = Literal["group", "batch", "none", "leave_one_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    ratio: Literal["token", "sequence"]
    surrogate: Literal["clipped", "cispo", "reinforce"]
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    scale: AdvantageScale
    clip_low: float = 0.2
    clip_high: float = 0.2
    old_logprobs: Literal["sampler", "policy"] = "sampler"
    sequence_sum: bool = False
    """Constant length 1: the loss of a rollout is the sum over its tokens."""


PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset(ratio="token", surrogate="clipped", aggregation="sequence_mean", scale="group"),
    "bnpo": Preset(ratio="token", surrogate="clipped", aggregation="token_mean", scale="group"),
    "dr_grpo": Preset(ratio="token", surrogate="clipped", aggregation="constant_length", scale="none"),
    "dapo": Preset(ratio="token", surrogate="clipped", aggregation="token_mean", scale="group", clip_high=0.28),
    # A sequence ratio moves by the mean of many small differences: against a bf16 sampler its rounding alone would leave the clip range.
    "gspo": Preset(
        ratio="sequence",
        surrogate="clipped",
        aggregation="sequence_mean",
        scale="group",
        clip_low=3e-4,
        clip_high=4e-4,
        old_logprobs="policy",
    ),
    "cispo": Preset(ratio="token", surrogate="cispo", aggregation="token_mean", scale="group", clip_low=1.0, clip_high=4.0),
    "rloo": Preset(
        ratio="token", surrogate="reinforce", aggregation="constant_length", scale="leave_one_out", old_logprobs="policy", sequence_sum=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """A preset with the recipe's overrides: every choice that the loss makes, by name."""

    ratio: Literal["token", "sequence"]
    surrogate: Literal["clipped", "cispo", "reinforce"]
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    scale: AdvantageScale
    normalize: Normalize
    positive_weight: float
    clip_low: float
    clip_high: float
    max_ratio: float | None
    length: int
    old_logprobs: Literal["sampler", "policy"]
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]

    @property
    def scheme(self) -> Scheme:
        """How advantages are made of rewards."""
        return Scheme(self.scale, self.normalize, self.positive_weight)


def loss_settings(loss: GRPOLoss, rollout: Rollout) -> LossSettings:
    """The preset named in the recipe, with what the recipe overrides."""
    preset = PRESETS[loss.preset]
    longest = rollout.max_total_tokens or rollout.max_tokens * rollout.max_turns
    return LossSettings(
        ratio=preset.ratio,
        surrogate=preset.surrogate,
        aggregation=preset.aggregation,
        scale=loss.scale or preset.scale,
        normalize=loss.normalize,
        positive_weight=loss.positive_weight,
        clip_low=preset.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=preset.clip_high if loss.clip_high is None else loss.clip_high,
        max_ratio=loss.max_ratio,
        length=1 if preset.sequence_sum else (loss.constant_length or longest),
        old_logprobs=loss.old_logprobs or preset.old_logprobs,
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
    )
