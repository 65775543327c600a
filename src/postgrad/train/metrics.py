"""Every number a run logs, defined once. `docs/metrics.md` is generated from here (`python -m postgrad.train.metrics`).

Names follow TRL where TRL has one. A name with `<name>` or another part in angle brackets stands for a family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    meaning: str
    unit: str = ""
    good: Direction = "neither"
    methods: str = "all"

    def matches(self, name: str) -> bool:
        pattern = "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<[^>]+>)", self.name))
        return re.fullmatch(pattern, name) is not None


METRICS: tuple[Metric, ...] = (
    Metric(
        "loss",
        "the loss of the step. SFT: mean negative log-prob over trained tokens. GRPO: about 0 on the sampled policy",
        "nats",
        "neither",
    ),
    Metric("entropy", "mean entropy of the policy over the trained tokens that were computed, at the sampling temperature", "nats/token"),
    Metric("grad_norm", "2-norm of the gradient over all trained weights, before clipping"),
    Metric("learning_rate", "learning rate of the step"),
    Metric("epoch", "rows drawn so far, divided by the rows there are"),
    Metric("trained_tokens", "tokens the loss of this step was computed on", "tokens"),
    Metric("num_tokens", "all tokens of the step's rows, context included", "tokens", methods="sft"),
    Metric("trained_rollouts", "training rows that could have a gradient (advantage other than 0, or a KL term)", "rows", methods="grpo"),
    Metric("reward", "mean of the weighted sum of rewards, over rollouts that have one", good="up", methods="grpo"),
    Metric("reward_std", "mean over groups of the sample standard deviation of the totals", methods="grpo"),
    Metric("frac_reward_zero_std", "share of groups whose totals are equal: they train nothing", good="down", methods="grpo"),
    Metric("rewards/<name>/mean", "mean of one reward over the rollouts it scored, before its weight", good="up", methods="grpo"),
    Metric("rewards/<name>/std", "sample standard deviation of one reward over the rollouts it scored", methods="grpo"),
    Metric("rewards/<name>/abstained", "rollouts for which the reward returned None", "rollouts", "down", "grpo"),
    Metric("rewards/<name>/failed", "rollouts on which the reward failed: exception, deadline, crash, NaN", "rollouts", "down", "grpo"),
    Metric("rewards/unscored", "rollouts without any reward", "rollouts", "down", "grpo"),
    Metric("groups/dropped/<cause>", "groups that `loss.filter` left out, by cause", "groups", "down", "grpo"),
    Metric(
        "kl",
        "mean per-token estimate of KL(policy ‖ reference) over the trained tokens; the same number that the loss uses",
        "nats",
        methods="grpo",
    ),
    Metric("clip_ratio/low_mean", "share of trained tokens whose lower clip is active, so that they have no gradient", methods="grpo"),
    Metric("clip_ratio/high_mean", "the same for the upper clip", methods="grpo"),
    Metric("clip_ratio/region_mean", "the same for either", methods="grpo"),
    Metric(
        "sampling/logprob_difference",
        "mean |log-prob of the trainer − log-prob of the sampler| over trained tokens",
        "nats",
        "down",
        "grpo",
    ),
    Metric("completions/mean_length", "mean number of sampled tokens of a rollout (tool results do not count)", "tokens", methods="grpo"),
    Metric("completions/min_length", "the shortest", "tokens", methods="grpo"),
    Metric("completions/max_length", "the longest", "tokens", methods="grpo"),
    Metric("completions/<stat>_terminated_length", "mean, min and max over rollouts that no limit cut", "tokens", methods="grpo"),
    Metric("completions/clipped_ratio", "share of rollouts that a limit ended", good="down", methods="grpo"),
    Metric("completions/mean_turns", "turns of a rollout", "turns", methods="grpo"),
    Metric("stop/<reason>", "rollouts by stop reason", "rollouts", methods="grpo"),
    Metric("tools/call_frequency", "tool calls per rollout, failed ones included", "calls", methods="grpo"),
    Metric("tools/failure_frequency", "share of the calls that failed", good="down", methods="grpo"),
    Metric("tools/errors/<kind>", "failed calls by kind", "calls", "down", "grpo"),
    Metric("rollouts/retried", "rollouts tried again after something outside the model failed", "rollouts", "down", "grpo"),
    Metric(
        "rollouts/history_rewrites",
        "turns after which the chat template would have rendered the history otherwise",
        "turns",
        "down",
        "grpo",
    ),
    Metric("pairs/made", "prompts so far that gave a preference pair", "prompts", "up", "pairs"),
    Metric("pairs/tied", "prompts so far whose answers all have equal totals: no pair", "prompts", "down", "pairs"),
    Metric("pairs/too_few", "prompts so far with fewer than two usable answers: no pair", "prompts", "down", "pairs"),
    Metric("pairs/unreadable", "prompts so far whose two answers cannot be read as a pair", "prompts", "down", "pairs"),
    Metric(
        "pairs/answers_<cause>",
        "answers so far that could be no side of a pair: cut by a limit, unscored, empty, spoiled by the infrastructure",
        "answers",
        "down",
        "pairs",
    ),
    Metric("accuracy", "share of pairs whose chosen answer scores higher", good="up", methods="reward"),
    Metric("margin", "mean score of the chosen minus the rejected answer", good="up", methods="reward"),
    Metric("mean_reward", "mean score over both answers; `reward_std` is then the standard deviation of all scores", methods="reward"),
    Metric("rewards/chosen", "mean implicit reward β·log(π/π_ref) of the chosen answers; 0 at the start", methods="dpo"),
    Metric("rewards/rejected", "the same of the rejected answers", methods="dpo"),
    Metric("rewards/margins", "mean difference of the two", good="up", methods="dpo"),
    Metric("rewards/accuracies", "share of pairs whose chosen answer gained more on the reference", good="up", methods="dpo"),
    Metric("logps/chosen", "mean summed log-prob of the chosen answers", "nats", methods="dpo"),
    Metric("logps/rejected", "the same of the rejected answers", "nats", methods="dpo"),
    Metric("objective/scores", "mean score of a rollout: weighted rewards less the penalty for a missing end", good="up", methods="ppo"),
    Metric("objective/kl", "mean over rollouts of the summed per-token KL estimate to the reference", "nats", methods="ppo"),
    Metric("objective/kl_coef", "weight of the KL in the reward", methods="ppo"),
    Metric("objective/non_score_reward", "mean of −kl_coef × KL over rollouts", methods="ppo"),
    Metric("objective/rlhf_reward", "scores plus non_score_reward", good="up", methods="ppo"),
    Metric("objective/entropy", "mean over rollouts of −Σ log-prob of the sampled tokens", "nats", methods="ppo"),
    Metric("policy/approxkl_avg", "mean KL (k3) of the updated policy to the one that sampled, over sampled tokens", "nats", "down", "ppo"),
    Metric("policy/clipfrac_avg", "share of sampled tokens whose clip is active", "", "down", "ppo"),
    Metric("policy/entropy_avg", "mean entropy of the policy over sampled tokens", "nats/token", methods="ppo"),
    Metric("policy/stopped_epoch", "epoch in which target_kl ended the updates of the iteration", methods="ppo"),
    Metric("loss/policy_avg", "mean clipped surrogate of the updates", methods="ppo"),
    Metric("loss/value_avg", "mean clipped value loss of the updates", good="down", methods="ppo"),
    Metric("val/clipfrac_avg", "share of values that moved beyond value_clip", methods="ppo"),
    Metric("val/ratio", "mean ratio π_new/π_old over sampled tokens", methods="ppo"),
    Metric("val/ratio_var", "variance of that ratio", methods="ppo"),
    Metric("val/num_eos_tokens", "rollouts that ended by themselves", "rollouts", methods="ppo"),
    Metric(
        "val/explained_variance",
        "1 − Var(returns − values)/Var(returns): 1 is a perfect critic, 0 knows only the mean",
        good="up",
        methods="ppo",
    ),
    Metric("val/returns_std", "standard deviation of the returns: what the critic has to explain", methods="ppo"),
    Metric("critic/grad_norm", "2-norm of the critic's gradient, before clipping", methods="ppo"),
    Metric("eval/accuracy", "share of held-out pairs whose chosen answer scores higher", good="up", methods="reward"),
    Metric("eval/accuracy_<end>", "low and high end of its 95 % interval (Wilson)", methods="reward"),
    Metric("eval/margin", "mean score difference on held-out pairs", good="up", methods="reward"),
    Metric("eval/mean_reward", "mean score over held-out answers", methods="reward"),
    Metric("eval/reward_std", "standard deviation of the scores of held-out answers", methods="reward"),
    Metric("eval/length_correlation", "Spearman correlation of score and length over held-out answers", methods="reward"),
    Metric("eval/calibration_error", "expected calibration error of σ(|margin|) on held-out pairs", good="down", methods="reward"),
    Metric("eval/rewards/accuracies", "share of held-out pairs whose chosen answer gained more on the reference", good="up", methods="dpo"),
    Metric("eval/rewards/accuracies_<end>", "low and high end of its 95 % interval (Wilson)", methods="dpo"),
    Metric("eval/rewards/margins", "mean difference of the implicit rewards on held-out pairs", good="up", methods="dpo"),
    Metric("eval/logps/accuracies", "share of held-out pairs whose chosen answer the policy finds likelier", good="up", methods="dpo"),
    Metric("eval/logps/<side>", "mean summed log-prob of the held-out chosen (rejected) answers", "nats", methods="dpo"),
    Metric("eval/pairs", "pairs those numbers are over", "pairs", methods="reward, dpo"),
    Metric("eval/answers", "labelled answers those numbers are over", "answers", methods="dpo"),
    Metric(
        "eval/loss",
        "the loss on the held-out rows: mean negative log-prob of their trained tokens (sft), mean over their pairs (reward)",
        "nats",
        "down",
        "sft, reward",
    ),
    Metric("eval/trained_tokens", "tokens that mean is over", "tokens", methods="sft"),
    Metric("eval/reward", "mean total on the evaluation prompts", good="up", methods="grpo"),
    Metric("eval/rewards/<name>/mean", "mean of one reward on the evaluation prompts", good="up", methods="grpo"),
    Metric("eval/rewards/<name>/low", "lower end of its 95 % interval (Wilson for values 0 and 1)", methods="grpo"),
    Metric("eval/rewards/<name>/high", "upper end of its 95 % interval", methods="grpo"),
    Metric("eval/<rollout metric>", "a metric of the rollouts above, on the evaluation prompts", methods="grpo"),
    Metric("time/step_s", "wall-clock time of the step", "s", "down"),
    Metric("time/<part>_s", "the part of it spent on rollouts, rewards, training, evaluation, log-probs", "s", "down"),
)


def find(name: str) -> Metric | None:
    """The definition of a logged name; None for a name that nobody defined."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def docs_page() -> str:
    lines = ["# Metrics", "", "What a run writes to `metrics.jsonl`. Generated by `python -m postgrad.train.metrics`.", ""]
    lines += ["| name | meaning | unit | better | method |", "|---|---|---|---|---|"]
    arrows = {"up": "higher", "down": "lower", "neither": ""}
    lines += [f"| `{m.name}` | {m.meaning} | {m.unit} | {arrows[m.good]} | {m.methods} |" for m in METRICS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(docs_page(), end="")
