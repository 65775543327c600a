import math

import numpy as np

from postgrad.rewards.metrics import reward_metrics
from postgrad.rewards.score import RewardCount, Scores

NAN = float("nan")


def scores(values, **options):
    values = np.array(values)
    names = tuple("ab"[: values.shape[1]])
    return Scores(names=names, weights=(1.0,) * len(names), roles=("outcome",) * len(names), values=values, group_size=2, **options)


def test_names_and_numbers_by_hand():
    metrics = reward_metrics(scores([[1.0], [0.0], [1.0], [1.0]]))
    assert metrics == {
        "rewards/a/mean": 0.75,
        "rewards/a/std": 0.5,
        "rewards/a/abstained": 0.0,
        "rewards/a/failed": 0.0,
        "rewards/unscored": 0.0,
        "reward": 0.75,
        "reward_std": math.sqrt(0.5) / 2,
        "frac_reward_zero_std": 0.5,
    }


def test_nan_never_enters_a_mean_and_is_counted():
    counts = {"a": RewardCount(3, 0, 1, 0.0), "b": RewardCount(2, 2, 0, 0.0)}
    metrics = reward_metrics(scores([[1.0, NAN], [NAN, NAN], [0.0, 1.0], [2.0, 3.0]], counts=counts))
    assert (metrics["rewards/a/mean"], metrics["rewards/b/mean"]) == (1.0, 2.0)
    assert (metrics["rewards/a/failed"], metrics["rewards/b/abstained"], metrics["rewards/unscored"]) == (1.0, 2.0, 1.0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_mean_over_nothing_is_left_out():
    metrics = reward_metrics(scores([[NAN], [NAN]]))
    assert metrics == {"rewards/a/abstained": 2.0, "rewards/a/failed": 0.0, "rewards/unscored": 2.0}


def test_groups_without_any_reward_are_no_zero_std_groups():
    metrics = reward_metrics(scores([[1.0], [0.0], [NAN], [NAN]]))
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["reward_std"] == math.sqrt(0.5)
