"""One whole PPO iteration against an independent oracle in float64 numpy: rewards with KL, GAE, whitening, both losses, both gradients.

The oracle reads the definition of each quantity and loops over tokens; it shares no code with the library.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from postgrad.models.engine import LocalEngine
from postgrad.rewards.score import Scores
from postgrad.testing import tiny_model
from postgrad.train.experience import experience_of
from postgrad.train.ppo import actor_loss, critic_loss
from postgrad.train.recipe import PPORecipe
from postgrad.types import Group, Prompt, Rollout, Segment, Source, StopReason

PROMPT, MODEL, TOOL = Source.PROMPT, Source.MODEL, Source.TOOL


def segments(*parts):
    return tuple(Segment(source, ids, (0.0,) * len(ids) if source is MODEL else ()) for source, ids in parts)


ROLLOUTS = [
    Rollout(segments((PROMPT, (5, 6, 7)), (MODEL, (8, 9, 2))), (), StopReason.END),
    Rollout(segments((PROMPT, (5, 6, 7)), (MODEL, (8, 3)), (TOOL, (11, 12, 13)), (MODEL, (4, 2))), (), StopReason.END, sample=1),
    Rollout(segments((PROMPT, (9, 6)), (MODEL, (8, 9, 10, 11))), (), StopReason.TURN_TOKENS),
    Rollout(segments((PROMPT, (9, 6)), (MODEL, (7,)), (TOOL, (3, 3)), (MODEL, (5, 6))), (), StopReason.TOTAL_TOKENS, sample=1),
]
GROUPS = [Group(Prompt("rows:1", ()), tuple(ROLLOUTS[:2])), Group(Prompt("rows:2", ()), tuple(ROLLOUTS[2:]))]
TOTALS = [1.0, -0.5, 0.25, 2.0]
SCORES = Scores(("r",), (1.0,), ("outcome",), np.asarray(TOTALS)[:, None], 2)
TURNS = [[1.0], [0.4, -0.9], [0.25], [0.5, 1.5]]
"""The same totals, earned turn by turn."""
BY_TURN = replace(SCORES, turns={"r": dict(enumerate(TURNS))})


def recipe(**loss):
    return PPORecipe.model_validate(
        {
            "method": "ppo",
            "model": "m",
            "run_dir": "r",
            "max_steps": 1,
            "data": {"train": "p.jsonl"},
            "rewards": [{"use": "x"}],
            "loss": loss,
        }
    )


def tokens_of(rollout):
    return [token for segment in rollout.segments for token in segment.token_ids]


def sampled(rollout):
    """Places of the sampled tokens."""
    flags = [segment.source is MODEL for segment in rollout.segments for _ in segment.token_ids]
    return [place for place, flag in enumerate(flags) if flag]


def plain_logprobs(model, rollout):
    """[sampled tokens] log-probs by the model's own forward call."""
    ids = torch.tensor([tokens_of(rollout)])
    logits = model(ids).logits[0].log_softmax(-1)
    return torch.stack([logits[place - 1, ids[0, place]] for place in sampled(rollout)])


def plain_entropies(model, rollout):
    logits = model(torch.tensor([tokens_of(rollout)])).logits[0].log_softmax(-1)
    return torch.stack([-(logits[place - 1].exp() * logits[place - 1]).sum() for place in sampled(rollout)])


def plain_values(model, rollout):
    """Values before each sampled token, and the one behind the last token of all."""
    logits = model(torch.tensor([tokens_of(rollout)])).logits[0, :, 0]
    return torch.stack([logits[place - 1] for place in sampled(rollout)]), logits[sampled(rollout)[-1]]


def gae_by_hand(rewards, values, gamma, lam, after):
    advantages, following, carried = [0.0] * len(values), after, 0.0
    for t in reversed(range(len(values))):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages


@pytest.fixture(scope="module")
def models():
    from transformers import AutoModelForSequenceClassification

    actor, reference = (tiny_model("llama", seed=seed).double() for seed in (0, 1))
    torch.manual_seed(2)
    config = tiny_model("llama", seed=2).config
    config.num_labels, config.pad_token_id = 1, 0
    critic = AutoModelForSequenceClassification.from_config(config).double()
    return actor.eval(), critic, reference.eval()


class PerToken(torch.nn.Module):
    """The critic's score at every token."""

    def __init__(self, critic):
        super().__init__()
        self.critic = critic

    def forward(self, ids):
        hidden = self.critic.model(ids).last_hidden_state
        return type("Output", (), {"logits": self.critic.score(hidden)})


@pytest.mark.parametrize("scores", [SCORES, BY_TURN], ids=["at the end", "by turn"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_coef": 0.3, "kl_estimator": "k3", "gamma": 0.9, "lam": 0.8},
        {"missing_end_penalty": 1.5, "whiten_rewards": True},
        {"kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.3},
        {"cut": "score", "missing_end_penalty": 0.5},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_an_iteration_is_what_the_definitions_say(models, options, scores):
    actor, critic, reference = models
    whole = recipe(**({"kl_coef": 0.2, "clip": 0.1, "value_clip": 0.05} | options))
    given = whole.loss
    raw = experience_of(GROUPS, scores, missing_end_penalty=given.missing_end_penalty, cut=given.cut)
    engine = LocalEngine(actor, tokens_per_micro_batch=12)
    values_engine = LocalEngine(critic, tokens_per_micro_batch=12, reads="values")
    with torch.no_grad():
        now = [plain_logprobs(actor, rollout).tolist() for rollout in ROLLOUTS]
        base = [plain_logprobs(reference, rollout).tolist() for rollout in ROLLOUTS]
        valued = [plain_values(PerToken(critic), rollout) for rollout in ROLLOUTS]
    old_engine = engine.logprobs(raw.policy_rows)
    assert np.allclose(np.concatenate(old_engine), np.concatenate(now), atol=1e-9)
    engine_values = values_engine.values(raw.value_rows)
    unfinished = [rollout.stop.truncated and given.cut == "bootstrap" for rollout in ROLLOUTS]
    expected_values = [[*v.tolist(), last.item()] if cut else v.tolist() for cut, (v, last) in zip(unfinished, valued, strict=True)]
    assert np.allclose(np.concatenate(engine_values), np.concatenate(expected_values), atol=1e-9)
    in_reward = given.kl_coef if given.kl_in == "reward" else 0.0
    experience = raw.finished(old_engine, base, engine_values, loss=given, kl_coef=in_reward)

    # the oracle
    rewards, advantages, returns = [], [], []
    for number, (rollout, total, logp, ref) in enumerate(zip(ROLLOUTS, TOTALS, now, base, strict=True)):
        kl = [a - b if given.kl_estimator == "k1" else math.exp(b - a) - 1 - (b - a) for a, b in zip(logp, ref, strict=True)]
        row = [-in_reward * k for k in kl]
        row[-1] += -given.missing_end_penalty * rollout.stop.truncated
        if scores is BY_TURN:
            sizes = [len(segment.token_ids) for segment in rollout.segments if segment.source is MODEL]
            for turn, earned in enumerate(TURNS[number]):
                row[sum(sizes[: turn + 1]) - 1] += earned
        elif not unfinished[number]:
            row[-1] += total
        rewards.append(row)
    if given.whiten_rewards:
        each = np.concatenate(rewards)
        spread = math.sqrt(each.var(ddof=1) + 1e-8)
        rewards = [[(r - each.mean()) / spread + each.mean() for r in row] for row in rewards]
    for cut, row, (value, last) in zip(unfinished, rewards, valued, strict=True):
        v = value.tolist()
        advantage = gae_by_hand(row, v, given.gamma, given.lam, last.item() if cut else 0.0)
        advantages.append(advantage)
        returns.append([a + b for a, b in zip(advantage, v, strict=True)])
    flat = np.concatenate(advantages)
    white = [[(a - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8) for a in row] for row in advantages]
    assert np.allclose(experience.advantages[experience.steps].numpy(), flat, atol=1e-6)
    assert np.allclose(experience.returns[experience.steps].numpy(), np.concatenate(returns), atol=1e-6)

    # both losses and gradients, after the policy and the critic have moved
    _move(actor, 0.02)
    _move(critic, 0.02)
    count = float(sum(len(row) for row in white))
    in_loss = given.kl_coef if given.kl_in == "loss" else 0.0
    result = engine.forward_backward(experience.rows, actor_loss(whole, given.kl_coef, tokens=count))
    loss, slopes = 0.0, []
    for rollout, old, ref, row in zip(ROLLOUTS, now, base, white, strict=True):
        with torch.no_grad():
            current = plain_logprobs(actor, rollout).tolist()
            loss -= given.entropy_coef * plain_entropies(actor, rollout).sum().item() / count
        for a, new, before, b in zip(row, current, old, ref, strict=True):
            ratio = math.exp(new - before)
            clipped = min(max(ratio, 0.9), 1.1)
            loss += (-min(ratio * a, clipped * a) + in_loss * (math.exp(b - new) - 1 - (b - new))) / count
            surrogate = 0.0 if clipped * a < ratio * a else -a * ratio
            slopes.append((surrogate + in_loss * (1 - math.exp(b - new))) / count)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    outputs = [plain_logprobs(actor, rollout) for rollout in ROLLOUTS] + [plain_entropies(actor, rollout) for rollout in ROLLOUTS]
    _same_gradient(actor, torch.cat(outputs), slopes + [-given.entropy_coef / count] * len(slopes))

    result = values_engine.forward_backward(experience.rows, critic_loss(whole, tokens=count))
    loss, slopes = 0.0, []
    for rollout, (value, _), target in zip(ROLLOUTS, valued, returns, strict=True):
        with torch.no_grad():
            current = plain_values(PerToken(critic), rollout)[0].tolist()
        for new, before, goal in zip(current, value.tolist(), target, strict=True):
            near = min(max(new, before - 0.05), before + 0.05)
            plain, held = (new - goal) ** 2, (near - goal) ** 2
            loss += 0.5 * max(plain, held) / count
            slopes.append((new - goal) / count if plain >= held else 0.0)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    _same_gradient(critic, torch.cat([plain_values(PerToken(critic), rollout)[0] for rollout in ROLLOUTS]), slopes)


def _move(model, size):
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn_like(weight))


def _same_gradient(model, outputs, slopes):
    """The engine's gradient is Σ slope · ∂output."""
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    (outputs * torch.tensor(slopes, dtype=torch.float64)).sum().backward()
    scale = max(weight.grad.abs().max() for weight in model.parameters() if weight.grad is not None)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert (found[name] - weight.grad).abs().max() < 1e-6 * scale, name
    model.zero_grad()


def poisoned(row, column, poison):
    return [value if flag else poison for value, flag in zip(column, row.trained, strict=True)]


def test_changing_anything_under_the_mask_changes_nothing(models):
    """AReaL#1346, OpenRLHF#1240: masked values reached the loss."""
    actor, critic, _ = models
    given = recipe(kl_coef=0.1).loss

    def outcome(poison):
        raw = experience_of(GROUPS, SCORES, missing_end_penalty=0.0)
        engine, values = LocalEngine(actor), LocalEngine(critic, reads="values")
        old = engine.logprobs(raw.policy_rows)
        experience = raw.finished(old, old, values.values(raw.value_rows), loss=given, kl_coef=0.1)
        rows = []
        for row in experience.rows:
            columns = {name: poisoned(row, column, poison) for name, column in row.per_token.items()}
            rows.append(replace(row, per_token=columns))
        first = engine.forward_backward(rows, actor_loss(recipe(kl_coef=0.1), 0.1, tokens=14.0))
        gradient = torch.cat([weight.grad.flatten() for weight in actor.parameters()])
        actor.zero_grad()
        return first.loss, gradient, experience.metrics()

    loss, gradient, metrics = outcome(0.0)
    for poison in (math.nan, 1e30, -math.inf):
        again = outcome(poison)
        assert again[0] == loss
        assert torch.equal(again[1], gradient)
        assert again[2] == metrics
