"""Which tokens are credited with what: by rollout, by turn, by state, or by a function of the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.errors import RecipeError, RunError
from postgrad.rewards.score import Scores
from postgrad.train.credit import states
from postgrad.train.grpo import grpo_loss
from postgrad.train.judged import Denominators, rows_of
from postgrad.train.judging import judge, score
from postgrad.train.presets import loss_settings
from postgrad.train.recipe import GRPOLoss
from postgrad.train.recipe import Rollout as RolloutKeys
from postgrad.train.recipe_file import parse_recipe
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason

LENGTHS = (3, 1, 2, 4)
"""Tokens of a rollout's turns, in order."""


def rollout(sample: int, turns: int, heard: Sequence[str] = ()) -> Rollout:
    """`turns` turns of LENGTHS tokens with a tool result between two of them (`heard`, or one that is its own)."""
    segments, messages = [Segment(Source.PROMPT, (1, 2))], []
    for turn in range(turns):
        segments.append(Segment(Source.MODEL, (5,) * LENGTHS[turn], (-0.5,) * LENGTHS[turn]))
        messages.append(Message("assistant", f"{sample}.{turn}"))
        if turn < turns - 1:
            segments.append(Segment(Source.TOOL, (9, 9)))
            messages.append(Message("tool", heard[turn] if heard else f"{sample} heard {turn}"))
    return Rollout(tuple(segments), tuple(messages), StopReason.END, sample=sample)


def judged(
    rollouts: Sequence[Rollout], values: Sequence[Sequence[float]], *, turns: Mapping[int, Mapping[int, Sequence[float]]] | None = None,
    weights: Sequence[float] = (1.0,), scale: str = "none", hook=None, **loss,
):  # fmt: skip
    """The one group of these rollouts. values [N, K]; turns: by reward and rollout, what it gave each turn."""
    names = tuple(f"r{k}" for k in range(len(weights)))
    placed = {f"r{k}": by_rollout for k, by_rollout in (turns or {}).items()}
    scores = Scores(names, tuple(weights), ("outcome",) * len(weights), np.array(values, dtype=float), len(rollouts), turns=placed)
    group = Group(Prompt("d:1", (Message("user", "Go."),)), tuple(rollouts))
    settings_ = GRPOLoss(**loss)

    class Given:
        def score(self, groups):
            return scores

    [found] = judge(score([group], Given(), settings_), settings_, scale=scale, hook=hook)  # type: ignore[arg-type]
    return found


def by_turn(found) -> list[list[float]]:
    return [entry["advantage_by_turn"] for entry in found.record(1)["scores"]]


def test_by_default_every_token_has_its_rollouts_advantage():
    found = judged([rollout(0, 2), rollout(1, 3)], [[1.0], [0.0]])
    assert found.token_advantages is None
    assert [found.credit(0), found.credit(1)] == [0.5, -0.5]
    assert "advantage_by_turn" not in found.record(1)["scores"][0]


def test_a_turn_is_credited_with_what_came_of_it_and_compared_with_the_same_turn_of_the_others():
    """Turn rewards (1, 0) against (0, 2): from the first turn on 1 and 2, from the second on 0 and 2."""
    found = judged([rollout(0, 2), rollout(1, 2)], [[1.0], [2.0]], turns={0: {0: [1.0, 0.0], 1: [0.0, 2.0]}}, credit="turn")
    assert by_turn(found) == [[-0.5, -1.0], [0.5, 1.0]]
    assert found.token_advantages[0] == [-0.5] * 3 + [-1.0]
    assert found.advantages == pytest.approx([-2.5 / 4, 2.5 / 4])


def test_a_later_reward_weighs_less_by_the_discount():
    found = judged(
        [rollout(0, 3), rollout(1, 3)], [[8.0], [0.0]], turns={0: {0: [0.0, 0.0, 8.0], 1: [0.0] * 3}}, credit="turn", turn_discount=0.5
    )
    assert by_turn(found) == [[1.0, 2.0, 4.0], [-1.0, -2.0, -4.0]]


def test_a_rollouts_value_stands_on_its_last_turn_and_a_turn_that_only_one_has_is_compared_with_nothing():
    found = judged([rollout(0, 3), rollout(1, 2), rollout(2, 1)], [[3.0], [0.0], [0.0]], credit="turn", turn_discount=0.5)
    first = [0.75, 0.0, 0.0]
    assert by_turn(found)[0] == pytest.approx([first[0] - np.mean(first), 1.5 - 0.75, 0.0])
    assert by_turn(found)[1] == pytest.approx([first[1] - np.mean(first), 0.0 - 0.75])
    assert by_turn(found)[2] == pytest.approx([-np.mean(first)])


def test_turns_that_began_in_the_same_state_are_compared_with_one_another():
    """Two heard "a", one heard "b": after "a" the answers differ, after "b" there is nobody to compare with."""
    rollouts = [rollout(0, 2, ["a"]), rollout(1, 2, ["a"]), rollout(2, 2, ["b"])]
    assert states(rollouts[0]) == ["", "\ntool: a"]
    found = judged(rollouts, [[1.0], [0.0], [0.5]], credit="state", state_weight=2.0)
    alone = [0.5, -0.5, 0.0]
    assert by_turn(found)[0] == pytest.approx([3 * alone[0], alone[0] + 2 * 0.5])
    assert by_turn(found)[1] == pytest.approx([3 * alone[1], alone[1] - 2 * 0.5])
    assert by_turn(found)[2] == pytest.approx([3 * alone[2], alone[2]])


def test_with_one_turn_everywhere_credit_by_turn_is_the_articles():
    rollouts = [rollout(sample, 1) for sample in range(4)]
    values = [[1.0, 0.2], [0.0, 0.0], [0.0, math.nan], [1.0, 0.0]]
    for scale in ("group", "batch", "none", "leave_one_out"):
        plain = judged(rollouts, values, weights=(1.0, 0.5), scale=scale)
        turned = judged(rollouts, values, weights=(1.0, 0.5), scale=scale, credit="turn")
        assert turned.advantages == pytest.approx(plain.advantages)
        assert turned.shares == {name: pytest.approx(share) for name, share in plain.shares.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(-3, 3), st.floats(-3, 3), st.sampled_from("ab")), min_size=2, max_size=6),
    st.sampled_from(["turn", "state"]), st.sampled_from(["group", "batch", "none", "leave_one_out"]), st.floats(0.1, 1.0),
    st.sampled_from([1.0, 0.3]),
)  # fmt: skip
def test_every_advantage_is_the_sum_of_its_rewards_shares(drawn, credit, scale, discount, positive_weight):
    rollouts = [rollout(sample, turns, [state] * 3) for sample, (turns, _, _, state) in enumerate(drawn)]
    per_turn = {number: [item[1]] * item[0] for number, item in enumerate(drawn)}
    values = [[item[1] * item[0], item[2]] for item in drawn]
    found = judged(
        rollouts, values, turns={0: per_turn}, weights=(1.0, 0.5), scale=scale, credit=credit, turn_discount=discount,
        positive_weight=positive_weight,
    )  # fmt: skip
    total = np.sum([found.shares[name] for name in found.shares], axis=0)
    np.testing.assert_allclose(total, found.advantages, atol=1e-9)
    for number, each in enumerate(found.token_advantages):
        assert len(each) == rollouts[number].sampled_tokens
        assert np.mean(each) == pytest.approx(found.advantages[number], abs=1e-9)


def test_a_rollout_that_nothing_scored_is_credited_with_nothing_and_changes_nobody():
    rollouts = [rollout(0, 2), rollout(1, 2), rollout(2, 2)]
    for credit in ("turn", "state"):
        found = judged(rollouts, [[1.0], [0.0], [math.nan]], credit=credit)
        pair = judged(rollouts[:2], [[1.0], [0.0]], credit=credit)
        assert by_turn(found)[:2] == by_turn(pair)
        assert by_turn(found)[2] == [0.0, 0.0]


# ---- rows


def test_rows_carry_one_advantage_per_sampled_token_and_none_under_the_mask():
    [row] = rows_of(0, rollout(0, 2), [0.1, 0.2, 0.3, -1.0])
    assert row.per_token["advantages"] == [0.0, 0.0, 0.1, 0.2, 0.3, 0.0, 0.0, -1.0]
    assert row.trained == (False, False, True, True, True, False, False, True)
    assert "advantages" not in row.per_row


def test_a_forked_rollout_hands_each_row_its_own_turns():
    whole = rollout(0, 2)
    forked = replace(whole, forks=(whole.segments[:2],), segments=(Segment(Source.PROMPT, (1, 2, 3)), whole.segments[3]))
    first, second = rows_of(None, forked, [0.1, 0.2, 0.3, -1.0])
    assert first.per_token["advantages"] == [0.0, 0.0, 0.1, 0.2, 0.3]
    assert second.per_token["advantages"] == [0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("preset", ["grpo", "cispo", "rloo", "gspo"])
def test_equal_advantages_by_token_train_as_one_advantage_by_rollout_does(preset):
    current = torch.tensor([[-0.4, -0.6, 0.0], [-0.2, -0.9, -0.5]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    old = current.detach().clone()
    loss = grpo_loss(loss_settings(GRPOLoss(preset=preset), RolloutKeys(max_tokens=3, max_turns=1)), Denominators(5.0, 2.0))
    gradients = []
    for per_token, per_row in (
        ({}, {"advantages": torch.tensor([1.0, -2.0])}),
        ({"advantages": torch.tensor([[1.0] * 3, [-2.0] * 3])}, {}),
    ):
        rows = SimpleNamespace(mask=mask, per_token={"old_logprobs": old, **per_token}, per_row={"share": torch.ones(2), **per_row})
        value, _ = loss(current, rows)
        gradients.append((value.item(), torch.autograd.grad(value, current)[0].tolist()))
    assert gradients[0] == gradients[1]
    assert gradients[0][1][1][2] != 0.0


# ---- a function of the user's


def test_a_hook_gives_rollouts_or_their_tokens_an_advantage():
    seen = []

    def hook(group, rewards):
        seen.append((group.prompt.row, rewards))
        return [2.0, [1.0, 2.0, 3.0, 6.0]]

    found = judged([rollout(0, 1), rollout(1, 2)], [[1.0], [0.0]], hook=hook)
    assert seen == [("d:1", {"r0": [1.0, 0.0]})]
    assert found.token_advantages == [[2.0] * 3, [1.0, 2.0, 3.0, 6.0]]
    assert found.advantages == [2.0, 3.0]
    assert found.shares == {}
    assert found.record(1)["scores"][0]["advantage_by_reward"] == {}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 entries for 2 rollouts"),
        ([1.0, [1.0, 2.0]], r"d:1, sample 1: loss.advantages returned \(2,\) numbers for 4 sampled tokens"),
        ([1.0, math.nan], "not finite"),
        ([[1.0, 2.0, math.inf], 0.0], "d:1, sample 0: .* not finite"),
        (None, "returned NoneType, which is no list of entries"),
        (1.0, "returned float, which is no list"),
        ("ab", "returned str, which is no list"),
        ({0: 1.0, 1: 1.0}, "returned dict, which is no list"),
        (torch.tensor(1.0), "returned Tensor, which is no list"),
        (["a", 1.0], "sample 0: loss.advantages returned str for a rollout, which is neither"),
        ([[[1.0], [1.0, 2.0]], 1.0], "sample 0: loss.advantages returned list for a rollout, which is neither"),
    ],
)
def test_what_a_hook_returns_is_checked(returned, message):
    with pytest.raises(RunError, match=message):
        judged([rollout(0, 1), rollout(1, 2)], [[1.0], [0.0]], hook=lambda group, rewards: returned)


def test_a_hook_that_raises_is_named_with_the_place_where_it_did():
    with pytest.raises(RunError, match=r"d:1: loss.advantages raised ZeroDivisionError: .*test_credit.py:\d+ in <lambda>"):
        judged([rollout(0, 1)], [[1.0]], hook=lambda group, rewards: 1 / 0)


@pytest.mark.parametrize("credit", ["rollout", "turn", "state"])
def test_where_nobody_wrote_anything_nobody_is_credited(credit):
    nothing = [replace(rollout(sample, 0), stop=StopReason.INFRASTRUCTURE) for sample in range(2)]
    found = judged(nothing, [[math.nan], [math.nan]], credit=credit)
    assert found.advantages == [0.0, 0.0]


# ---- the recipe


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"turn_discount": 0.9}, "acts only with credit"),
        ({"credit": "turn", "state_weight": 0.5}, "acts only with credit: state"),
        ({"advantages": "a.py:f", "credit": "turn"}, "does nothing beside"),
        ({"credit": "turn", "turn_discount": 0.0}, "turn_discount"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(loss, message):
    recipe = {"method": "grpo", "model": "m", "run_dir": "r", "max_steps": 1, "data": {"train": "p.jsonl"}, "rewards": [{"use": "x"}]}
    with pytest.raises(RecipeError, match=message):
        parse_recipe({**recipe, "loss": loss})
