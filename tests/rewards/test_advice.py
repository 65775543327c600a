import numpy as np
import pytest

from postgrad.rewards.advice import design_notes, observed_notes
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scores

SOURCE = """
from postgrad.rewards import reward

@reward(scope="final", range=(0, 1), role="outcome")
def right(completion):
    return 1

@reward(scope="structure", range=(0, 1))
def tidy(completion):
    return 1

@reward(scope="structure", range=(-5, 1), role="outcome")
def signed(completion):
    return 1
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "rewards.py").write_text(SOURCE)
    return lambda **weights: load_rewards([{"use": f"rewards.py:{name}", "weight": weight} for name, weight in weights.items()], tmp_path)


def ids(notes):
    return [note.id for note in notes]


def batch(rewards, *columns, group_size=2):
    values = np.column_stack(columns).astype(float)
    return Scores(
        names=tuple(r.name for r in rewards),
        weights=tuple(r.weight for r in rewards),
        roles=tuple(r.role for r in rewards),
        values=values,
        group_size=group_size,
    )


def test_a_sound_design_is_not_commented(load):
    assert design_notes(load(right=1.0, tidy=0.2), scale="group") == []
    assert design_notes(load(right=1.0), scale="group") == []


def test_shaping_that_outweighs_the_outcome_is_named(load):
    notes = design_notes(load(right=1.0, tidy=-1.5), scale="none")
    assert ids(notes) == ["shaping-outranks-outcome"]
    assert "up to 1.5, the outcome by 1" in notes[0].message


def test_shaping_as_large_as_the_outcome_is_not_yet_more(load):
    assert design_notes(load(right=1.0, tidy=1.0), scale="group") == []


def test_weights_without_effect_are_named(load):
    assert ids(design_notes(load(right=1.0, tidy=0.0), scale="group")) == ["no-effect-weight"]
    assert ids(design_notes(load(right=3.0), scale="group")) == ["no-effect-scale"]
    assert design_notes(load(right=3.0), scale="none") == []
    assert design_notes(load(right=3.0), scale="leave_one_out") == []


def test_missing_outcome_is_named(load):
    assert ids(design_notes(load(tidy=1.0), scale="group")) == ["no-outcome"]


@pytest.mark.parametrize("penalty", [-1.0, -5.0])
def test_penalty_size_without_effect_is_said_where_it_applies(load, penalty):
    rewards = load(signed=1.0)
    scores = batch(rewards, [1, penalty, penalty, 1])
    assert ids(observed_notes(rewards, scores, scale="group")) == ["no-effect-penalty"]
    assert observed_notes(rewards, scores, scale="none") == []
    assert observed_notes(rewards, scores, scale="batch") == []


def test_penalty_advice_is_silent_with_three_levels_or_without_penalty_or_spread(load):
    rewards = load(signed=1.0)
    assert observed_notes(rewards, batch(rewards, [1, 0, -1], group_size=3), scale="group") == []
    assert observed_notes(rewards, batch(rewards, [1, 0, 1, 0]), scale="group") == []
    assert observed_notes(rewards, batch(rewards, [-1, -1]), scale="group") == []


def test_the_claim_of_the_penalty_advice_is_true():
    torch = pytest.importorskip("torch")
    from postgrad import formulas

    advantages = [formulas.group_advantages(torch.tensor([1.0, low, low, 1.0]), 4, eps=0.0) for low in (0.0, -1.0, -5.0)]
    assert torch.allclose(advantages[0], advantages[1])
    assert torch.allclose(advantages[0], advantages[2])


def test_values_outside_the_declared_range_are_named(load):
    rewards = load(right=1.0)
    notes = observed_notes(rewards, batch(rewards, [0, 2]), scale="none")
    assert ids(notes) == ["out-of-range"]
    assert "0 … 1 and returned 0 … 2" in notes[0].message


def test_rewards_that_cancel_are_named(load):
    rewards = load(right=1.0, tidy=1.0)
    notes = observed_notes(rewards, batch(rewards, [1, 0, 0, 1], [0, 1, 1, 0]), scale="none")
    assert ids(notes) == ["cancelling"]
    assert "right and tidy cancel: they differ within 2 groups" in notes[0].message


def test_reward_that_never_scores_is_named(load):
    rewards = load(right=1.0, tidy=1.0)
    assert ids(observed_notes(rewards, batch(rewards, [1, 0], [np.nan, np.nan]), scale="none")) == ["never-scored"]
