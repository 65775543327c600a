"""PPO: whole runs on a tiny model, killed and resumed; four roles on one base; early stop, warm-up, adaptive KL, penalty by stop reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from postgrad.errors import RecipeError, RunError
from postgrad.models.engine import LocalEngine
from postgrad.models.loading import load
from postgrad.models.lora import Lora
from postgrad.models.role_engine import RoleEngine, RoleReader
from postgrad.models.roles import add_critic, add_reward
from postgrad.models.saving import save
from postgrad.models.scalar import load_scalar
from postgrad.rewards.score import Scores
from postgrad.train.critic import WINDOW, CriticWatch, explained_variance
from postgrad.train.experience import experience_of
from postgrad.train.metrics import find
from postgrad.train.ppo import PPO
from postgrad.train.recipe import PPOLoss
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import resume, run
from postgrad.train.run_directory import read_jsonl
from postgrad.types import Group, Prompt, Rollout, Segment, Source, StopReason, TrainRow

ROWS = [TrainRow((5, 6, 7, 8, 9, 0), (False,) * 5 + (True,)), TrainRow((5, 6, 7, 0), (False,) * 3 + (True,))]


def rollout(*parts, stop=StopReason.END):
    return Rollout(tuple(Segment(s, ids, (-0.5,) * len(ids) if s is Source.MODEL else ()) for s, ids in parts), (), stop)


def one_group(*rollouts, totals):
    scores = Scores(("r",), (1.0,), ("outcome",), np.asarray(totals)[:, None], len(rollouts))
    return experience_of([Group(Prompt("r:1", ()), rollouts)], scores, missing_end_penalty=0.5)


PLAIN = rollout((Source.PROMPT, (3, 4)), (Source.MODEL, (5, 6)))
TOOLS = rollout((Source.PROMPT, (3, 4)), (Source.MODEL, (5,)), (Source.TOOL, (9, 9, 9)), (Source.MODEL, (6,)))
CUT = replace(PLAIN, stop=StopReason.TURN_TOKENS)


# ---- experience


def test_tool_tokens_are_no_time_steps():
    """miles#1827: GAE counted tool tokens as steps. The same numbers with and without a tool result in between."""
    finished = []
    for item in (PLAIN, TOOLS):
        raw = one_group(item, totals=[2.0])
        finished.append(raw.finished([[-1.0, -1.0]], [[-1.5, -0.5]], [[0.3, 0.6]], loss=PPOLoss(gamma=0.9, lam=0.8), kl_coef=0.1))
    assert torch.equal(finished[0].advantages, finished[1].advantages)
    places = [index for index, flag in enumerate(finished[1].rows[0].trained) if flag]
    assert places == [2, 6]
    assert all(value == 0.0 for index, value in enumerate(finished[1].rows[0].per_token["advantages"]) if index not in places)


def test_the_score_sits_on_the_last_sampled_token_and_the_kl_on_each():
    """trl#3750: the score was written on the first pad. γ = λ = 1: the return of a token is the sum of what follows."""
    raw = one_group(TOOLS, totals=[2.0])
    loss = PPOLoss(gamma=1.0, lam=1.0, whiten_advantages=False, kl_estimator="k1")
    experience = raw.finished([[-1.0, -1.0]], [[-1.5, -0.5]], [[0.0, 0.0]], loss=loss, kl_coef=0.1)
    assert experience.returns.tolist() == [[pytest.approx(2.0 - 0.1 * 0.5 + 0.1 * 0.5), pytest.approx(2.0 + 0.1 * 0.5)]]


def test_what_a_cut_rollout_is_worth():
    """trl#5338, trl#6802: the penalty looked for an id. By its stop reason a cut rollout loses the penalty; the critic, read once more
    behind the last sampled token, stands in the place of its score. Both together would pay for being cut."""
    loss = PPOLoss(gamma=1.0, lam=1.0, whiten_advantages=False)
    stuck = replace(PLAIN, stop=StopReason.INVALID_CALLS)
    raw = one_group(PLAIN, CUT, stuck, totals=[1.0, 1.0, 1.0])
    assert raw.totals == [1.0, 0.5, 0.5]
    assert [row.trained_tokens for row in raw.value_rows] == [2, 3, 2]
    values = [[0.0, 0.0], [0.0, 0.0, 7.0], [0.0, 0.0]]
    experience = raw.finished([[-1.0, -1.0]] * 3, None, values, loss=loss, kl_coef=0.0)
    assert experience.returns.tolist() == [[1.0, 1.0], [6.5, 6.5], [0.5, 0.5]]
    assert experience.values.tolist() == [[0.0, 0.0]] * 3
    assert experience.scores.tolist() == [1.0, 0.5, 0.5]

    scores = Scores(("r",), (1.0,), ("outcome",), np.asarray([[1.0]]), 1)
    scored = experience_of([Group(Prompt("r:1", ()), (CUT,))], scores, missing_end_penalty=0.5, cut="score")
    assert scored.finished([[-1.0, -1.0]], None, [[0.0, 0.0]], loss=loss, kl_coef=0.0).returns.tolist() == [[0.5, 0.5]]


def test_a_cut_rollout_keeps_what_its_turns_earned():
    cut = replace(TOOLS, stop=StopReason.TURNS)
    scores = Scores(("steps",), (1.0,), ("shaping",), np.asarray([[1.5]]), 1, turns={"steps": {0: [0.5, 1.0]}})
    raw = experience_of([Group(Prompt("r:1", ()), (cut,))], scores, missing_end_penalty=0.0)
    loss = PPOLoss(gamma=1.0, lam=1.0, whiten_advantages=False)
    experience = raw.finished([[-1.0, -1.0]], None, [[0.0, 0.0, 0.25]], loss=loss, kl_coef=0.0)
    assert experience.returns.tolist() == [[1.75, 1.25]]


def test_rollouts_without_a_score_take_no_part_and_none_at_all_is_an_error():
    spoiled = replace(PLAIN, stop=StopReason.INFRASTRUCTURE)
    raw = one_group(PLAIN, spoiled, PLAIN, totals=[1.0, 1.0, np.nan])
    assert len(raw.rollouts) == 1
    with pytest.raises(RunError, match="no rollout"):
        one_group(spoiled, totals=[1.0])


def test_whitening_sees_sampled_tokens_only():
    """SkyRL#1305: the mean went over pads. Rollouts of different lengths: mean 0 and variance 1 over the four sampled tokens."""
    short = rollout((Source.PROMPT, (3, 4)), (Source.MODEL, (5,)))
    longer = rollout((Source.PROMPT, (3, 4)), (Source.MODEL, (5, 6, 7)))
    raw = one_group(short, longer, totals=[1.0, 3.0])
    experience = raw.finished([[-1.0], [-1.0] * 3], None, [[0.2], [0.1, 0.4, 0.9]], loss=PPOLoss(), kl_coef=0.0)
    white = [v for row in experience.rows for v, flag in zip(row.per_token["advantages"], row.trained, strict=True) if flag]
    assert len(white) == 4
    assert np.mean(white) == pytest.approx(0.0, abs=1e-6)
    assert np.var(white, ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_minibatches_hold_every_rollout_once_per_epoch_in_another_order():
    items = [rollout((Source.PROMPT, (3,)), (Source.MODEL, (5, index))) for index in range(9)]
    experience = one_group(*items, totals=list(range(9))).finished([[-1.0, -1.0]] * 9, None, [[0.0, 0.0]] * 9, loss=PPOLoss(), kl_coef=0.0)
    epochs = [[[row.token_ids[-1] for row in part] for part in experience.minibatches(2, seed=0, step=1, epoch=e)] for e in (0, 1)]
    assert all(sorted(x for part in epoch for x in part) == list(range(9)) for epoch in epochs)
    assert [len(part) for part in epochs[0]] == [5, 4]
    assert epochs[0] != epochs[1]


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_a_critic_that_explains_nothing_is_named_once_also_after_a_resume():
    """P1. Iterations whose returns do not vary say nothing about the critic, nor do those of its warm-up."""
    notes: list[str] = []
    watch = CriticWatch(2, notes.append)
    useless = {"val/explained_variance": 0.02, "val/returns_std": 1.0}
    for step in range(1, WINDOW + 2):
        watch.see(step, useless)
    watch.see(WINDOW + 2, {"val/explained_variance": 0.0, "val/returns_std": 0.0})
    assert notes == []
    resumed = CriticWatch(2, notes.append)
    resumed.load_state(watch.state())
    for step in (WINDOW + 3, WINDOW + 4):
        resumed.see(step, useless)
    assert len(notes) == 1
    assert "explained 2 %" in notes[0]
    good = CriticWatch(0, notes.append)
    for step in range(1, 3 * WINDOW):
        good.see(step, {"val/explained_variance": 0.4, "val/returns_std": 1.0})
    assert len(notes) == 1


STEPWISE = Rollout(TOOLS.segments, (), StopReason.END)


def test_what_a_turn_earned_stands_at_its_end_and_the_rest_at_the_end_of_all():
    """Two turns earned 0.5 and -1 from a reward of weight 2; another reward gave 3 for the whole rollout."""
    values = np.asarray([[-0.5, 3.0]])
    scores = Scores(("steps", "r"), (2.0, 1.0), ("shaping", "outcome"), values, 1, turns={"steps": {0: [0.5, -1.0]}})
    raw = experience_of([Group(Prompt("r:1", ()), (STEPWISE,))], scores, missing_end_penalty=0.0)
    loss = PPOLoss(gamma=1.0, lam=1.0, whiten_advantages=False)
    experience = raw.finished([[-1.0, -1.0]], None, [[0.0, 0.0]], loss=loss, kl_coef=0.0)
    assert experience.returns.tolist() == [[pytest.approx(1.0 - 2.0 + 3.0), pytest.approx(-2.0 + 3.0)]]
    assert experience.scores.tolist() == [2.0]


# ---- one base, several roles


@pytest.fixture
def shared(tiny_folder, tmp_path):
    """(policy with an adapter, folder of a reward model that was trained on the same base)."""
    reward = load_scalar(tiny_folder, adapter=Lora(rank=4), seed=1, dtype="float32")
    policy = load(tiny_folder, adapter=Lora(rank=4), seed=5, dtype="float32")
    torch.manual_seed(0)
    with torch.no_grad():
        for model in (reward.model, policy.model):
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.1 * torch.randn_like(weight))
    alone = LocalEngine(reward.model, reads="values").values(ROWS)
    save(reward, tmp_path / "rm")
    return policy, tmp_path / "rm", alone


def test_a_reward_model_on_the_policys_base_scores_as_it_does_alone(shared):
    policy, folder, alone = shared
    actor = LocalEngine(policy.model)
    before = actor.logprobs(ROWS)
    role = add_reward(policy, folder, name="rm")
    assert role is not None
    assert RoleReader(role).values(ROWS) == alone
    assert actor.logprobs(ROWS) == before


def test_training_the_critic_leaves_the_actor_as_it_was_and_the_other_way_round(shared):
    policy, _, _ = shared
    critic = RoleEngine(add_critic(policy, Lora(rank=4), seed=2))
    actor = LocalEngine(policy.model)
    assert not any("critic" in name or "score" in name for name in actor.optimizer.weights)
    assert any("score" in name for name in critic.optimizer.weights)
    assert all("critic" in name or "score" in name for name in critic.optimizer.weights)
    before, values = actor.logprobs(ROWS), critic.values(ROWS)
    critic.forward_backward(ROWS, lambda v, rows: (v.sum(), {}))
    critic.optimizer_step(1e-2)
    assert actor.logprobs(ROWS) == before
    moved = critic.values(ROWS)
    assert moved != values
    actor.forward_backward(ROWS, lambda v, rows: (-v.sum(), {}))
    actor.optimizer_step(1e-2)
    assert critic.values(ROWS) == moved
    assert actor.logprobs(ROWS) != before


def test_a_reward_model_of_another_base_stays_a_model_of_its_own(shared, tmp_path):
    from postgrad.testing import tiny_model, tiny_tokenizer

    tiny_model("llama", vocab_size=268, seed=9).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    other = load(tmp_path / "other", adapter=Lora(rank=4), dtype="float32")
    assert add_reward(other, shared[1], name="rm") is None
    full = save(load_scalar(tmp_path / "other", dtype="float32"), tmp_path / "full")
    assert add_reward(shared[0], full, name="rm") is None


# ---- whole runs

RECIPE = """\
method: ppo
model: {model}
run_dir: {run_dir}
dtype: float32
max_steps: 4
data: {{train: prompts.jsonl, eval: prompts.jsonl, max_length: 600}}
tools: [tools.py:add]
batch: {{prompts: 3, minibatches: 2, epochs: 2, tokens_per_micro_batch: 900}}
rollout: {{group_size: 2, max_tokens: 12, max_turns: 2}}
optimizer: {{learning_rate: 1e-3}}
critic: {{learning_rate: 1e-3, warmup_steps: 1}}
rewards: [{{use: "rewards.py:short"}}]
loss: {{adaptive_kl_target: 1.0, adaptive_kl_horizon: 20, missing_end_penalty: 0.1}}
checkpoint: {{every: 1, keep: 9}}
{more}
"""


def task(make_task, tiny_folder, folder: Path, more: str = "") -> Path:
    made = make_task(folder)
    (made / "recipe.yaml").write_text(RECIPE.format(model=tiny_folder, run_dir=folder / "run", more=more))
    return made / "recipe.yaml"


def logged(folder: Path):
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "adapter: {kind: lora, rank: 4}"])
def test_ppo_killed_after_a_step_resumes_bit_for_bit(make_task, tiny_folder, tmp_path, more):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run(load_recipe(task(make_task, tiny_folder, tmp_path / "a", more)))
    recipe = task(make_task, tiny_folder, tmp_path / "b", more)
    environment = {**os.environ, "POSTGRAD_FAULT": "step:2", "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-m", "postgrad", "train", str(recipe)], env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    resume(tmp_path / "b" / "run")
    whole, again = logged(tmp_path / "a" / "run"), logged(tmp_path / "b" / "run")
    assert whole == again
    assert [name for record in whole for name in record if name != "step" and find(name) is None] == []
    assert "loss/policy_avg" not in whole[1]  # the critic warms up
    assert whole[2]["objective/kl_coef"] != whole[3]["objective/kl_coef"] or whole[3]["objective/kl_coef"] != whole[4]["objective/kl_coef"]
    model = "model/model.safetensors"
    assert (tmp_path / "a" / "run" / model).read_bytes() == (tmp_path / "b" / "run" / model).read_bytes()


def test_updates_stop_when_the_policy_has_moved_too_far():
    """An iteration of 3 epochs × 1 minibatch whose second update reports a KL above the target makes two updates."""
    made = []
    method = PPO.__new__(PPO)
    method.recipe = SimpleNamespace(
        batch=SimpleNamespace(epochs=3, minibatches=1), critic=SimpleNamespace(warmup_steps=0), loss=SimpleNamespace(target_kl=0.1),
        seed=0, optimizer=SimpleNamespace(learning_rate=1.0, warmup_steps=0, schedule="constant"),
    )  # fmt: skip
    method.total_steps = 5
    method._critic_update = lambda *_: {}

    def update(*_):
        made.append(1)
        return {"policy/approxkl_avg": 0.07 * len(made)}

    method._actor_update = update
    experience = SimpleNamespace(minibatches=lambda *_, **__: [[SimpleNamespace(trained_tokens=2)]])
    metrics = method._update(1, experience)
    assert len(made) == 2
    assert metrics["policy/stopped_epoch"] == 1.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("rollout: {top_p: 0.9}", "top_p"),
        ("loss: {adaptive_kl_target: 1.0, kl_coef: 0.0}", "steers the KL"),
        ("loss: {adaptive_kl_target: 1.0, kl_in: loss}", "steers the KL"),
        ("adapter: {kind: lora, dropout: 0.1}", "acts only in sft"),
    ],
)
def test_what_would_not_act_is_refused(tmp_path, more, message):
    head = "method: ppo\nmodel: m\nrun_dir: r\nmax_steps: 1\ndata: {train: p.jsonl}\nrewards: [{use: x}]\n"
    (tmp_path / "recipe.yaml").write_text(head + more + "\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "recipe.yaml")
