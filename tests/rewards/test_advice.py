import numpy as np
import pytest

from postgrad.rewards.advice import design_notes, observed_notes, two_level_advantages
from postgrad.rewards.ledger import Scheme
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
    assert design_notes(load(right=1.0, tidy=0.2), Scheme("group")) == []
    assert design_notes(load(right=1.0), Scheme("group")) == []


def test_shaping_that_outweighs_the_outcome_is_named(load):
    notes = design_notes(load(right=1.0, tidy=-1.5), Scheme("none"))
    assert ids(notes) == ["shaping-outranks-outcome"]
    assert "up to 1.5, the outcome by 1" in notes[0].message


def test_shaping_as_large_as_the_outcome_is_not_yet_more(load):
    assert design_notes(load(right=1.0, tidy=1.0), Scheme("group")) == []


def test_weights_without_effect_are_named(load):
    assert ids(design_notes(load(right=1.0, tidy=0.0), Scheme("group"))) == ["no-effect-weight"]
    assert ids(design_notes(load(right=3.0), Scheme("group"))) == ["no-effect-scale"]
    assert design_notes(load(right=3.0), Scheme("none")) == []
    assert design_notes(load(right=3.0), Scheme("leave_one_out")) == []


def test_missing_outcome_is_named(load):
    assert ids(design_notes(load(tidy=1.0), Scheme("group"))) == ["no-outcome"]


@pytest.mark.parametrize("penalty", [-1.0, -5.0])
def test_penalty_size_without_effect_is_said_where_it_applies(load, penalty):
    rewards = load(signed=1.0)
    scores = batch(rewards, [1, penalty, penalty, 1])
    assert ids(observed_notes(rewards, scores, Scheme("group"))) == ["no-effect-penalty"]
    assert observed_notes(rewards, scores, Scheme("none")) == []
    assert observed_notes(rewards, scores, Scheme("batch")) == []


def test_penalty_advice_is_silent_with_three_levels_or_without_penalty_or_spread(load):
    rewards = load(signed=1.0)
    assert observed_notes(rewards, batch(rewards, [1, 0, -1], group_size=3), Scheme("group")) == []
    assert observed_notes(rewards, batch(rewards, [1, 0, 1, 0]), Scheme("group")) == []
    assert observed_notes(rewards, batch(rewards, [-1, -1]), Scheme("group")) == []


def test_a_recipe_that_weighs_mistakes_already_needs_no_advice_on_penalties(load):
    rewards = load(signed=1.0)
    scores = batch(rewards, [1, -5, -5, 1])
    assert observed_notes(rewards, scores, Scheme("group", positive_weight=0.2)) == []


@pytest.mark.parametrize(("above", "size"), [(1, 4), (2, 4), (3, 4), (1, 8), (7, 16)])
def test_the_arithmetic_of_the_penalty_advice_is_true(above, size):
    """Whatever the two levels are, the formula's advantages are the ones that the advice names."""
    torch = pytest.importorskip("torch")
    from postgrad import formulas

    up, down = two_level_advantages(above, size)
    for high, low in ((1.0, 0.0), (1.0, -1.0), (1.0, -5.0), (0.2, 0.1)):
        advantages = formulas.group_advantages(torch.tensor([high] * above + [low] * (size - above)).double(), size, eps=0.0)
        assert advantages.tolist() == pytest.approx([up] * above + [down] * (size - above))
    weighed = formulas.weight_positive(torch.tensor([up, down]), positive_weight=0.2).tolist()
    assert weighed == pytest.approx([0.2 * up, down])


def test_the_penalty_advice_shows_its_arithmetic_and_names_the_keys(load):
    rewards = load(signed=1.0)
    (note,) = observed_notes(rewards, batch(rewards, [1, -5, -5, -5], group_size=4), Scheme("group"))
    assert "With 1 of 4 rollouts at 1 and 3 at -5 the advantages are +1.50 and -0.50; with -25 in the place of -5" in note.message
    for key in ("loss.positive_weight below 1", "loss.scale: none"):
        assert key in note.message


def test_penalties_are_looked_at_one_by_one_where_each_reward_is_normalised(load):
    """The totals have three levels, the signed reward alone has two."""
    rewards = load(tidy=1.0, signed=1.0)
    scores = batch(rewards, [1, 0, 0, 1], [1, -5, 1, -5], group_size=4)
    assert observed_notes(rewards, scores, Scheme("group")) == []
    (note,) = observed_notes(rewards, scores, Scheme("group", "normalize_then_sum"))
    assert (note.id, "two levels of signed" in note.message) == ("no-effect-penalty", True)


def test_where_each_reward_is_normalised_weights_decide_and_not_ranges(load):
    scheme = Scheme("group", "normalize_then_sum")
    assert design_notes(load(right=1.0, tidy=0.9), scheme) == []
    assert ids(design_notes(load(signed=1.0, tidy=1.5), scheme)) == ["shaping-outranks-outcome"]  # range −5 … 1 does not help it
    assert design_notes(load(signed=1.0, tidy=1.5), Scheme("group")) == []
    assert ids(design_notes(load(right=3.0), scheme)) == ["no-effect-scale"]


def test_what_cancels_in_the_total_is_no_matter_where_each_is_normalised(load):
    rewards = load(right=1.0, tidy=1.0)
    scores = batch(rewards, [1, 0, 0, 1], [0, 1, 1, 0])
    assert ids(observed_notes(rewards, scores, Scheme("none"))) == ["cancelling"]
    assert observed_notes(rewards, scores, Scheme("group", "normalize_then_sum")) == []


def test_values_outside_the_declared_range_are_named(load):
    rewards = load(right=1.0)
    notes = observed_notes(rewards, batch(rewards, [0, 2]), Scheme("none"))
    assert ids(notes) == ["out-of-range"]
    assert "0 … 1 and returned 0 … 2" in notes[0].message


def test_rewards_that_cancel_are_named(load):
    rewards = load(right=1.0, tidy=1.0)
    notes = observed_notes(rewards, batch(rewards, [1, 0, 0, 1], [0, 1, 1, 0]), Scheme("none"))
    assert ids(notes) == ["cancelling"]
    assert "right and tidy cancel: they differ within 2 groups" in notes[0].message


def test_reward_that_never_scores_is_named(load):
    rewards = load(right=1.0, tidy=1.0)
    assert ids(observed_notes(rewards, batch(rewards, [1, 0], [np.nan, np.nan]), Scheme("none"))) == ["never-scored"]
