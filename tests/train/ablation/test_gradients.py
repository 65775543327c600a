"""Gradients under each reward's share of the advantages: they add up to the loss's own, and are what autograd gives by hand."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from postgrad.errors import CheckpointError, DataError, RecipeError, RunError
from postgrad.rollout.record import group_from_json
from postgrad.train import setup
from postgrad.train.ablation.gradients import of_run, pulls, stored_batch, to_json
from postgrad.train.presets import PRESETS, loss_settings
from postgrad.train.recipe import GRPOLoss
from postgrad.train.run import load_run
from postgrad.train.run_directory import RunDirectory


@pytest.fixture(scope="module")
def parts(finished_run):
    """(engine on the model at the start, trained groups of step 1, recipe)"""
    recipe = load_run(finished_run).recipe
    engine = setup.make_engine(recipe, setup.load_policy(recipe), with_reference=False)
    return engine, stored_batch(RunDirectory(finished_run).read_rollouts(1)), recipe


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradients_of_the_rewards_add_up_to_that_of_the_loss(preset, parts):
    engine, groups, recipe = parts
    found, off_policy = pulls(
        engine, groups, loss_settings(GRPOLoss(preset=preset, kl_coef=0.1), recipe.rollout), mask_truncated=False, temperature=1.0
    )
    assert found.residual < 1e-5
    assert found.parts.sum() == pytest.approx(1.0, abs=1e-5)
    assert off_policy < 1e-4  # the first batch is the starting model's own
    assert all(weight.grad is None for weight in engine.optimizer.weights.values())


def test_a_gradient_that_is_not_finite_is_an_error(parts, monkeypatch):
    engine, groups, recipe = parts
    monkeypatch.setattr(engine.optimizer, "gradient_norm", lambda: float("inf"))
    with pytest.raises(RunError, match="the gradient is not finite"):
        pulls(engine, groups, loss_settings(recipe.loss, recipe.rollout), mask_truncated=False, temperature=1.0)


def test_copies_pull_the_same_way_in_the_ratio_of_their_weights(parts):
    engine, groups, recipe = parts
    found, _ = pulls(engine, groups, loss_settings(recipe.loss, recipe.rollout), mask_truncated=False, temperature=1.0)
    assert found.names == ("even", "again", "low")
    assert found.cosines[0, 1] == pytest.approx(1.0, abs=1e-5)
    assert found.norms[1] == pytest.approx(0.5 * found.norms[0], rel=1e-4)
    assert found.cosines[0, 2] < 0.9
    assert np.allclose(np.diag(found.cosines), 1.0)
    assert found.norm_shares.sum() == pytest.approx(1.0)


def test_the_gradient_is_what_autograd_gives_by_hand(parts, finished_run, tiny_folder):
    """−1/N Σ_i A_i · mean over sampled tokens of log π, on each rollout by itself, with the share of one reward in the place of A."""
    engine, groups, recipe = parts
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).float().eval()
    rollouts = [
        (rollout, {name: group.shares[name][place] for name in ("even", "low")})
        for group in groups
        for place, rollout in enumerate(group.group.rollouts)
    ]
    gradients = {}
    for name in ("even", "low"):
        model.zero_grad()
        loss = torch.zeros(())
        for rollout, shares in rollouts:
            ids = torch.tensor([rollout.token_ids])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            loss = loss - shares[name] * logprobs[torch.tensor(rollout.tool_mask[1:])].mean() / len(rollouts)
        loss.backward()
        gradients[name] = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    found, _ = pulls(engine, groups, loss_settings(recipe.loss, recipe.rollout), mask_truncated=False, temperature=1.0)
    assert found.norms[0] == pytest.approx(gradients["even"].norm().item(), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(gradients["even"], gradients["low"], dim=0).item()
    assert found.cosines[0, 2] == pytest.approx(cosine, abs=1e-4)


def test_truncated_rollouts_are_left_out_as_in_the_run(parts):
    engine, groups, recipe = parts
    settings = loss_settings(recipe.loss, recipe.rollout)
    whole, _ = pulls(engine, groups, settings, mask_truncated=False, temperature=1.0)
    if all(rollout.stop.truncated for group in groups for rollout in group.group.rollouts):
        with pytest.raises(RunError, match="no rollout of this batch has an advantage"):
            pulls(engine, groups, settings, mask_truncated=True, temperature=1.0)
    else:
        masked, _ = pulls(engine, groups, settings, mask_truncated=True, temperature=1.0)
        assert masked.total_norm != pytest.approx(whole.total_norm, rel=1e-3)


def test_the_start_is_the_first_batchs_own_model_and_the_end_the_newest_checkpoint(finished_run):
    before = {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()}
    start, final = of_run(finished_run, at="start"), of_run(finished_run)
    assert (start.at, start.step) == ("the model that the run started from", 1)
    assert (final.at, final.step) == ("the checkpoint after step 2", 2)
    assert start.off_policy < 1e-4 < final.off_policy
    assert (final.groups, final.rollouts, final.adapter) == (4, 32, False)
    assert of_run(finished_run, at="start", step=2).off_policy > 1e-3
    assert {file: file.read_bytes() for file in finished_run.rglob("*") if file.is_file()} == before


def test_a_reward_without_a_weight_pulls_nowhere(make_run, tmp_path):
    path = make_run(tmp_path, steps=1, change=lambda text: text.replace("weight: 2.0", "weight: 0.0"))
    found = of_run(path, at="start").pulls
    assert found.norms[2] == 0.0
    assert np.isnan(found.cosines[2]).all()
    assert found.cosines[0, 3] == pytest.approx(1.0, abs=1e-5)
    record = json.loads(json.dumps(to_json(of_run(path, at="start")), allow_nan=False))
    assert record["cosines"][2][2] is None


def test_with_an_adapter_it_is_the_adapters_gradient(make_run, tmp_path):
    path = make_run(tmp_path, more="adapter: {kind: lora, rank: 4}")
    for at in ("start", "final"):
        found = of_run(path, at=at)
        assert found.adapter
        assert found.trained_weights < 20_000
        assert found.pulls.residual < 1e-5
        assert found.pulls.cosines[0, 1] == pytest.approx(1.0, abs=1e-5)


@pytest.fixture
def copy(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    return tmp_path / "run"


def test_what_cannot_be_looked_at_is_named(copy, make_task, tmp_path):
    with pytest.raises(RecipeError, match="no rollouts of step 7") as caught:
        of_run(copy, step=7)
    assert caught.value.hint == "stored steps: 1 to 2"
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        of_run(copy, at="final")
    assert of_run(copy).at == "the model that the run started from"
    shutil.rmtree(copy / "rollouts")
    with pytest.raises(DataError, match="no stored batch trains anything"):
        of_run(copy)


def test_another_model_than_the_run_had_is_refused(copy):
    record = json.loads((copy / "inputs.json").read_text())
    record["loaded"]["the model's weights"] = "other"
    (copy / "inputs.json").write_text(json.dumps(record))
    with pytest.raises(RecipeError, match="changed since this run started: the model's weights"):
        of_run(copy)


@pytest.mark.parametrize("method", ["ppo", "sft"])
def test_only_grpos_advantages_are_split(method, copy, finished_run):
    file = copy / "resolved.json"
    record = json.loads(file.read_text())
    kept = {"model", "run_dir", "max_steps", "data"} | ({"rewards"} if method == "ppo" else set())
    recipe = {key: value for key, value in record["recipe"].items() if key in kept}
    recipe["data"] = {"train": "prompts.jsonl"}
    file.write_text(json.dumps({**record, "recipe": {**recipe, "method": method}}))
    with pytest.raises(RecipeError, match="split over the rewards as GRPO's advantages are"):
        of_run(copy)


@pytest.mark.parametrize("loss", [{"credit": "turn"}, {"advantages": "rewards.py:mine"}])
def test_only_advantages_of_whole_rollouts_are_split(loss, copy):
    record = json.loads((copy / "resolved.json").read_text())
    (copy / "resolved.json").write_text(json.dumps({**record, "recipe": {**record["recipe"], "loss": loss}}))
    with pytest.raises(RecipeError, match="only an advantage of the whole rollout is split") as caught:
        of_run(copy)
    assert next(iter(loss)) in str(caught.value)


def test_rollouts_without_the_split_are_refused_and_dropped_groups_left_out(finished_run):
    records = RunDirectory(finished_run).read_rollouts(1)
    records[0]["dropped"] = "all_equal"
    groups = stored_batch(records)
    assert [group.group for group in groups] == [group_from_json(record) for record in records[1:]]
    del records[1]["scores"][0]["advantage_by_reward"]
    with pytest.raises(DataError, match="do not say what each reward contributed"):
        stored_batch(records)
