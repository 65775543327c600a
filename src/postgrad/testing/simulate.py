"""Simulated training runs for the reward doctor: healthy ones, and one with each fault that it knows, from a seed. No model.

    simulate("healthy", seed=0)             a run that nothing is wrong with
    simulate("proxy_gaming", seed=0)        a run in which one thing is wrong
    HEALTHY, FAULTS                         the names; FAULTS says which check must find each

A run is drawn by a small model of GRPO: prompts of different difficulty, a policy that becomes better, an outcome of 0 or 1, two shaping
rewards, lengths, texts, and the numbers that an update logs. A fault changes one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from postgrad.rewards.doctor.observed import Failure, NonFinite, Observed, RewardInfo, outcome_bounds
from postgrad.rewards.doctor.recompute import Scheme, recomputed
from postgrad.rewards.filter import FilterMode, keep_groups
from postgrad.rewards.ledger import outcome_total, weighted_total

Floats = NDArray[np.float64]
Numbers = dict[str, Floats]

CORRECT = RewardInfo("correct", 1.0, "outcome", (0.0, 1.0))
FORMAT = RewardInfo("format", 0.2, "shaping", (0.0, 1.0))
CLARITY = RewardInfo("clarity", 0.2, "shaping", (0.0, 1.0))


@dataclass
class World:
    """One run while it is drawn. Arrays are [B, G], except `numbers` (one value per step) and `heldout` (step → value)."""

    noise: Generator
    steps: int = 36
    prompts: int = 8
    group_size: int = 8
    method: str = "grpo"
    rewards: list[RewardInfo] = field(default_factory=lambda: [CORRECT, FORMAT, CLARITY])
    values: dict[str, Floats] = field(default_factory=dict)
    lengths: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    truncated: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    repeated: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    duplicate: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    empty: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    numbers: Numbers = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    nonfinite: list[NonFinite] = field(default_factory=list)
    scheme: Scheme = field(default_factory=lambda: Scheme("group"))
    settings: dict[str, object] = field(default_factory=lambda: {"loss.kl_coef": 0.02, "loss.preset": "grpo", "loss.filter": "none"})

    @property
    def groups(self) -> int:
        return self.steps * self.prompts

    @property
    def progress(self) -> Floats:
        """[B, 1] from 0 at the first group to 1 at the last."""
        return np.linspace(0.0, 1.0, self.groups)[:, None]

    def uniform(self) -> Floats:
        return self.noise.random((self.groups, self.group_size))

    def coin(self, probability: Floats | float) -> Floats:
        """[B, G] ones with the given probability."""
        return (self.uniform() < probability).astype(np.float64)

    def series(self, start: float, end: float, spread: float) -> Floats:
        """[steps] from start to end with relative noise."""
        return np.linspace(start, end, self.steps) * np.exp(spread * self.noise.standard_normal(self.steps))


def _logistic(x: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-x))
    return result


def _draw(world: World, *, start: float = -0.6, end: float = 0.7, hardness: float = 0.4) -> None:
    """A healthy run: success from about 1/3 to 2/3, shaping rewards that are learned beside it, stable updates."""
    difficulty = world.noise.normal(0.0, hardness, (world.groups, 1))
    chance = _logistic(start + (end - start) * world.progress - difficulty)
    world.values["correct"] = world.coin(chance)
    world.values["format"] = world.coin(0.80 + 0.12 * world.progress)
    world.values["clarity"] = np.clip(0.5 + 0.15 * world.noise.standard_normal((world.groups, world.group_size)), 0.0, 1.0)
    shape = (world.groups, world.group_size)
    world.lengths = np.round(200.0 * np.exp(0.3 * world.noise.standard_normal(shape) + 0.2 * difficulty))
    world.truncated = (world.lengths > 400).astype(np.float64)
    world.repeated = np.clip(world.noise.normal(0.08, 0.03, shape), 0.0, 1.0)
    world.duplicate = world.coin(0.02)
    world.empty = world.coin(0.005)
    world.numbers = {
        "entropy": world.series(0.9, 0.7, 0.03),
        "kl": world.series(0.001, 0.04, 0.2),
        "clip_ratio/region_mean": world.series(0.01, 0.02, 0.2),
        "sampling/logprob_difference": world.series(0.004, 0.005, 0.1),
        "grad_norm": world.series(0.5, 0.5, 0.2),
    }
    for step in range(0, world.steps + 1, 4):
        rate = float(_logistic(np.array(start + (end - start) * step / world.steps)))
        world.heldout[step] = world.noise.binomial(200, rate) / 200


def _finish(world: World, name: str) -> Observed:
    rewards = tuple(world.rewards)
    values = np.stack([world.values[reward.name].reshape(-1) for reward in rewards], axis=1)
    weights = np.array([reward.weight for reward in rewards])
    roles = [reward.role or "shaping" for reward in rewards]
    outcome = outcome_total(values, weights, roles, world.group_size)
    totals = weighted_total(values, weights, world.group_size)
    mode: FilterMode = "outcome" if world.settings.get("loss.filter") == "outcome" else "none"
    kept = keep_groups(totals, outcome, world.group_size, mode=mode).kept
    steps = np.repeat(np.arange(1, world.steps + 1), world.prompts)
    nothing = np.full(len(values), np.nan)
    drawn = Observed(
        source=f"simulated {name}", method=world.method, rewards=rewards, group_size=world.group_size, steps=steps,
        prompts=tuple(f"train.jsonl:{row + 1}" for row in range(world.groups)), trained=np.array(kept), values=values, totals=totals,
        advantages=nothing, present=np.ones(len(values), dtype=bool), lengths=world.lengths.reshape(-1),
        truncated=world.truncated.reshape(-1),
        empty=world.empty.reshape(-1), duplicate=world.duplicate.reshape(-1), repeated=world.repeated.reshape(-1), verifier=nothing,
        bounds=outcome_bounds(rewards, outcome), metrics=_metrics(world, totals), failures=tuple(world.failures),
        nonfinite=tuple(world.nonfinite), settings=world.settings,
    )  # fmt: skip
    object.__setattr__(drawn, "advantages", recomputed(drawn, world.scheme))
    return drawn


def _metrics(world: World, totals: Floats) -> tuple[tuple[int, Mapping[str, float]], ...]:
    rewards = np.nanmean(totals.reshape(world.steps, -1), axis=1)
    lines: list[tuple[int, Mapping[str, float]]] = []
    for step in range(world.steps + 1):
        numbers = {} if not step else {"reward": float(rewards[step - 1]), **{k: float(v[step - 1]) for k, v in world.numbers.items()}}
        held = {"eval/rewards/correct/mean": world.heldout[step]} if step in world.heldout else {}
        lines.append((step, {k: v for k, v in (numbers | held).items() if math.isfinite(v)}))
    return tuple(lines)


# healthy runs ---------------------------------------------------------------------------------------------------------------------------


def _healthy(world: World) -> None:
    _draw(world)


def _healthy_flat(world: World) -> None:
    """Learns nothing, and shows no more than that."""
    _draw(world, start=0.0, end=0.0)


def _healthy_outcome_only(world: World) -> None:
    _draw(world)
    world.rewards = [CORRECT]


def _healthy_filtered(world: World) -> None:
    """Easy and hard prompts mixed, groups with one outcome left out."""
    world.settings["loss.filter"] = "outcome"
    _draw(world, hardness=0.9)


def _healthy_small_groups(world: World) -> None:
    world.group_size, world.prompts = 4, 12
    _draw(world, start=-0.2, end=0.4, hardness=0.2)
    world.rewards = [CORRECT, RewardInfo("format", 0.1, "shaping", (0.0, 1.0))]
    world.values["format"] = world.coin(0.97)


def _healthy_ppo(world: World) -> None:
    """One rollout per prompt: nothing is compared within groups."""
    world.method, world.group_size, world.prompts = "ppo", 1, 64
    _draw(world)
    world.numbers |= {"val/explained_variance": world.series(0.4, 0.7, 0.1), "policy/clipfrac_avg": world.series(0.02, 0.04, 0.2)}


def _healthy_entropy(world: World) -> None:
    """Entropy falls because the reward rises."""
    _draw(world)
    world.numbers["entropy"] = np.geomspace(1.0, 0.15, world.steps)


def _healthy_normalized(world: World) -> None:
    """Each reward normalised before the sum; one has a range that would drown the others."""
    world.settings["loss.normalize"], world.scheme = "normalize_then_sum", Scheme("group", "normalize_then_sum")
    _draw(world)
    world.rewards = [CORRECT, FORMAT, RewardInfo("clarity", 0.2, "shaping", (0.0, 100.0))]
    world.values["clarity"] = 100.0 * world.values["clarity"]


def _healthy_positive_weight(world: World) -> None:
    """Learns mostly from mistakes."""
    world.settings["loss.positive_weight"], world.scheme = 0.1, Scheme("group", positive_weight=0.1)
    _draw(world)


# faults ---------------------------------------------------------------------------------------------------------------------------------


def _all_fail(world: World) -> None:
    _draw(world, start=-5.0, end=-4.5)
    world.rewards = [CORRECT]


def _all_pass(world: World) -> None:
    _draw(world, start=4.0, end=5.0)
    world.rewards = [CORRECT]


def _cold(world: World) -> None:
    """A low temperature: nine groups of ten are copies of one rollout, on prompts of middling difficulty."""
    world.settings["rollout.temperature"] = 0.2
    _draw(world, start=0.0, end=0.5)
    copied = world.noise.random((world.groups, 1)) < 0.9
    world.values["correct"] = np.where(copied, world.values["correct"][:, :1], world.values["correct"])
    world.rewards = [CORRECT]


def _phantom(world: World) -> None:
    """Most groups have one outcome; clarity still differs in each."""
    _draw(world, start=-1.5, end=-1.0, hardness=2.0)


def _shaping_dominates(world: World) -> None:
    _draw(world)
    world.rewards = [CORRECT, FORMAT, RewardInfo("clarity", 9.0, "shaping", (0.0, 1.0))]


def _dead_reward(world: World) -> None:
    world.settings["loss.filter"] = "outcome"
    _draw(world)
    world.rewards = [CORRECT, FORMAT, RewardInfo("clarity", 0.01, "shaping", (0.0, 1.0))]


def _sacrificed(world: World) -> None:
    """A reward for showing the work falls whenever the outcome is reached by a shortcut."""
    _draw(world, start=-0.3, end=0.3)
    world.values["clarity"] = np.clip(0.75 - 0.5 * world.values["correct"] + 0.15 * (world.uniform() - 0.5), 0.0, 1.0)


def _conflict(world: World) -> None:
    _draw(world)
    world.rewards = [CORRECT, RewardInfo("thorough", 0.5, "shaping", (0.0, 1.0)), RewardInfo("brief", 0.4, "shaping", (0.0, 1.0))]
    world.values["thorough"] = np.clip(world.lengths / 400, 0.0, 1.0)
    world.values["brief"] = np.clip(1.0 - world.lengths / 400 + 0.1 * (world.uniform() - 0.5), 0.0, 1.0)


def _redundant(world: World) -> None:
    _draw(world)
    world.values["clarity"] = np.clip(world.values["format"] - 0.1 * world.uniform(), 0.0, 1.0)


def _inversion(world: World) -> None:
    """Shaping outweighs the outcome's gap."""
    _draw(world)
    world.rewards = [CORRECT, RewardInfo("format", 1.5, "shaping", (0.0, 1.0)), CLARITY]


def _coarse(world: World) -> None:
    """Four rewards of one weight: their sums coincide."""
    world.group_size, world.prompts = 16, 8
    _draw(world)
    names = ("format", "cites", "polite", "units")
    world.rewards = [CORRECT, *(RewardInfo(name, 1.0, "shaping", (0.0, 1.0)) for name in names)]
    for name in names:
        world.values[name] = world.coin(0.5)


def _sparse(world: World) -> None:
    """Nine of ten prompts are out of reach; shaping rewards differ everywhere."""
    _draw(world)
    reachable = (world.noise.random((world.groups, 1)) < 0.1).astype(np.float64)
    world.values["correct"] = world.values["correct"] * reachable


def _saturated(world: World) -> None:
    _draw(world)
    world.values["format"] = np.ones_like(world.values["format"])


def _failing_grader(world: World) -> None:
    """The grader misses its deadline on every eighth rollout."""
    _draw(world)
    lost = world.uniform() < 0.12
    world.values["correct"] = np.where(lost, np.nan, world.values["correct"])
    for group, sample in np.argwhere(lost):
        step = int(group) // world.prompts + 1
        world.failures.append(Failure(step, "correct", "timeout", f"train.jsonl:{group + 1}", int(sample), "took longer than 5 s"))


def _abstaining(world: World) -> None:
    """A reward returns None on answers that it cannot parse."""
    _draw(world)
    world.values["clarity"] = np.where(world.uniform() < 0.3, np.nan, world.values["clarity"])


def _length_hacking(world: World) -> None:
    _draw(world)
    world.rewards = [CORRECT, RewardInfo("detail", 6.0, "shaping", (0.0, 1.0))]
    world.values["detail"] = np.clip((world.lengths - 50) / 500, 0.0, 1.0)


def _looping_text(world: World) -> None:
    _draw(world)
    world.repeated = np.clip(0.3 + 0.6 * world.progress + 0.1 * (world.uniform() - 0.5), 0.0, 1.0)


def _copies(world: World) -> None:
    _draw(world)
    world.duplicate = world.coin(0.7)


def _silence(world: World) -> None:
    _draw(world)
    world.empty = world.coin(0.9 * world.progress)


def _entropy_collapse(world: World) -> None:
    _draw(world, start=0.0, end=0.0)
    world.values["format"] = world.coin(0.9)
    world.numbers["entropy"] = np.geomspace(1.0, 0.05, world.steps)


def _kl_runaway(world: World) -> None:
    _draw(world)
    world.numbers["kl"] = np.geomspace(0.01, 20.0, world.steps)


def _kl_pinned(world: World) -> None:
    _draw(world)
    world.numbers["kl"] = np.zeros(world.steps)


def _kl_spike(world: World) -> None:
    _draw(world)
    world.numbers["kl"][world.steps // 2] = 1.5


def _overclipped(world: World) -> None:
    _draw(world)
    world.numbers["clip_ratio/region_mean"] = world.series(0.1, 0.45, 0.1)


def _mismatch(world: World) -> None:
    _draw(world)
    world.numbers["sampling/logprob_difference"] = world.series(0.08, 0.12, 0.1)


def _proxy_gaming(world: World) -> None:
    """The grader is fooled more and more often; held-out prompts, judged properly, stay where they are."""
    _draw(world, start=-0.5, end=-0.5)
    fooled = world.coin(0.85 * world.progress)
    world.values["correct"] = np.maximum(world.values["correct"], fooled)


def _format_only(world: World) -> None:
    """Format is learned, the task is not: the total rises by what format pays."""
    _draw(world, start=-1.0, end=-1.0, hardness=0.3)
    world.rewards = [CORRECT, RewardInfo("format", 0.8, "shaping", (0.0, 1.0))]
    world.values["format"] = world.coin(0.1 + 0.85 * world.progress)


def _not_finite(world: World) -> None:
    _draw(world)
    world.nonfinite.append(NonFinite(world.steps // 2, "grad_norm", "inf"))


def _bad_critic(world: World) -> None:
    _healthy_ppo(world)
    world.numbers["val/explained_variance"] = world.noise.normal(-0.2, 0.05, world.steps)


# preference runs ------------------------------------------------------------------------------------------------------------------------


def _preference_run(method: str, noise: Generator, numbers: Mapping[str, Floats], last: Mapping[str, float], name: str) -> Observed:
    count = len(next(iter(numbers.values())))
    lines = [(step + 1, {k: float(v[step]) for k, v in numbers.items()}) for step in range(count)]
    lines[-1] = (count, lines[-1][1] | dict(last))
    empty = np.zeros(0)
    return Observed(
        source=f"simulated {name}", method=method, rewards=(), group_size=1, steps=np.zeros(0, dtype=np.int64), prompts=(),
        trained=np.zeros(0, dtype=bool), values=np.zeros((0, 0)), totals=empty, advantages=empty, present=np.zeros(0, dtype=bool),
        lengths=empty, truncated=empty, empty=empty, duplicate=empty, repeated=empty, verifier=empty, metrics=tuple(lines),
        settings={"loss.kind": "sigmoid", "loss.beta": 0.1},
    )  # fmt: skip


def _dpo(noise: Generator, name: str, *, gain: float, sink: float = 0.0) -> Observed:
    """`gain`: how far the margin grows; `sink`: how far both log-probs fall."""
    ramp = np.linspace(0.0, 1.0, 60)
    margin = gain * ramp + 0.02 * (gain > 0) * noise.standard_normal(60)
    chosen = 0.4 * gain * ramp - sink * ramp + 0.01 * (gain > 0) * np.abs(noise.standard_normal(60))
    numbers = {
        "loss": np.log1p(np.exp(-margin)), "rewards/chosen": chosen, "rewards/rejected": chosen - margin, "rewards/margins": margin,
        "rewards/accuracies": np.clip(0.5 + margin, 0.0, 0.97), "logps/chosen": -50 + 10 * chosen,
        "logps/rejected": -50 + 10 * (chosen - margin),
    }  # fmt: skip
    return _preference_run("dpo", noise, numbers, {}, name)


def _reward_run(noise: Generator, name: str, *, accuracy: float, rho: float = 0.1) -> Observed:
    right = noise.binomial(200, accuracy) / 200
    half = 1.96 * math.sqrt(right * (1 - right) / 200)
    last = {
        "eval/accuracy": right, "eval/accuracy_low": right - half, "eval/accuracy_high": right + half, "eval/pairs": 200.0,
        "eval/length_correlation": rho + 0.03 * noise.standard_normal(), "eval/calibration_error": 0.05, "eval/mean_reward": 0.1,
        "eval/reward_std": 1.0,
    }  # fmt: skip
    return _preference_run("reward", noise, {"loss": np.linspace(0.69, 0.5, 40), "accuracy": np.linspace(0.5, accuracy, 40)}, last, name)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a simulated run: the check that must find it, at least how gravely, and one sentence."""

    check: str
    severity: str
    meaning: str


FAULTS: Mapping[str, Fault] = {
    "all_fail": Fault("R1", "critical", "no rollout is right"),
    "all_pass": Fault("R1", "critical", "every rollout is right"),
    "cold": Fault("R1", "critical", "the rollouts of a group are copies: the temperature is too low"),
    "phantom": Fault("R2", "critical", "most groups have one outcome and learn from shaping"),
    "shaping_dominates": Fault("R3", "warn", "a shaping reward owns the advantages"),
    "dead_reward": Fault("R3", "info", "a weight too small to matter"),
    "sacrificed": Fault("R4", "warn", "a reward falls while the outcome rises"),
    "conflict": Fault("R5", "critical", "two rewards pull apart"),
    "redundant": Fault("R6", "critical", "two rewards say the same"),
    "inversion": Fault("R7", "warn", "wrong answers outrank right ones"),
    "coarse": Fault("R8", "warn", "different rewards, one advantage"),
    "sparse": Fault("R9", "critical", "most prompts are never solved"),
    "saturated": Fault("R10", "info", "a reward that everything earns"),
    "failing_grader": Fault("R11", "warn", "the grader misses its deadline"),
    "abstaining": Fault("R11", "critical", "a reward abstains on a third of the rollouts"),
    "length_hacking": Fault("R12", "warn", "longer is better paid"),
    "looping_text": Fault("R13", "warn", "answers repeat themselves"),
    "copies": Fault("R13", "warn", "the rollouts of a group are copies"),
    "silence": Fault("R13", "warn", "answers become empty"),
    "entropy_collapse": Fault("R14", "info", "entropy falls while the reward is flat"),
    "kl_runaway": Fault("R15", "critical", "the policy runs away from the reference"),
    "kl_pinned": Fault("R15", "warn", "the KL stays at 0"),
    "kl_spike": Fault("R15", "info", "one update moved the policy far"),
    "overclipped": Fault("R16", "warn", "a third of the tokens has no gradient"),
    "mismatch": Fault("R17", "warn", "sampler and trainer disagree"),
    "proxy_gaming": Fault("R18", "warn", "the grader is fooled, held-out prompts do not improve"),
    "format_only": Fault("R18", "warn", "only the format is learned"),
    "not_finite": Fault("R19", "critical", "an infinite number"),
    "bad_critic": Fault("P1", "warn", "the critic is worse than the mean"),
    "dpo_stuck": Fault("D1", "warn", "the preference loss stays at ln 2"),
    "dpo_both_fall": Fault("D1", "info", "chosen answers become unlikely too"),
    "reward_chance": Fault("M1", "critical", "the reward model guesses"),
    "reward_length": Fault("M1", "warn", "the reward model scores length"),
}  # fmt: skip

_WORLDS: Mapping[str, Callable[[World], None]] = {
    "healthy": _healthy,
    "healthy_flat": _healthy_flat,
    "healthy_outcome_only": _healthy_outcome_only,
    "healthy_filtered": _healthy_filtered,
    "healthy_small_groups": _healthy_small_groups,
    "healthy_ppo": _healthy_ppo,
    "healthy_entropy": _healthy_entropy,
    "healthy_normalized": _healthy_normalized,
    "healthy_positive_weight": _healthy_positive_weight,
    "all_fail": _all_fail,
    "all_pass": _all_pass,
    "cold": _cold,
    "phantom": _phantom,
    "shaping_dominates": _shaping_dominates,
    "dead_reward": _dead_reward,
    "sacrificed": _sacrificed,
    "conflict": _conflict,
    "redundant": _redundant,
    "inversion": _inversion,
    "coarse": _coarse,
    "sparse": _sparse,
    "saturated": _saturated,
    "failing_grader": _failing_grader,
    "abstaining": _abstaining,
    "length_hacking": _length_hacking,
    "looping_text": _looping_text,
    "copies": _copies,
    "silence": _silence,
    "entropy_collapse": _entropy_collapse,
    "kl_runaway": _kl_runaway,
    "kl_pinned": _kl_pinned,
    "kl_spike": _kl_spike,
    "overclipped": _overclipped,
    "mismatch": _mismatch,
    "proxy_gaming": _proxy_gaming,
    "format_only": _format_only,
    "not_finite": _not_finite,
    "bad_critic": _bad_critic,
}

_PREFERENCE: Mapping[str, Callable[[Generator], Observed]] = {
    "healthy_dpo": lambda noise: _dpo(noise, "healthy_dpo", gain=1.0),
    "healthy_reward": lambda noise: _reward_run(noise, "healthy_reward", accuracy=0.75),
    "dpo_stuck": lambda noise: _dpo(noise, "dpo_stuck", gain=0.0),
    "dpo_both_fall": lambda noise: _dpo(noise, "dpo_both_fall", gain=0.8, sink=3.0),
    "reward_chance": lambda noise: _reward_run(noise, "reward_chance", accuracy=0.5),
    "reward_length": lambda noise: _reward_run(noise, "reward_length", accuracy=0.75, rho=0.85),
}

HEALTHY: tuple[str, ...] = tuple(name for name in (*_WORLDS, *_PREFERENCE) if name.startswith("healthy"))


def simulate(name: str, *, seed: int) -> Observed:
    """A run of the given name, the same for the same seed.

    >>> simulate("healthy", seed=1).group_count
    288
    """
    noise = np.random.default_rng([seed, sum(name.encode())])
    if name in _PREFERENCE:
        return _PREFERENCE[name](noise)
    world = World(noise)
    _WORLDS[name](world)
    return _finish(world, name)
