"""R1, R2, R9: which groups carry a signal about the task."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from postgrad.rewards.doctor import needs
from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.chances import equal_chance, seen_chance, size_to_differ, size_to_see
from postgrad.rewards.doctor.finding import Details, Fix, Result, decide, one
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.filter import keep_groups
from postgrad.rewards.ledger import Flags, equal_groups

LOOK_AT = 5
"""Places to look at that a finding names."""
ALIKE = 0.1
"""How much more often than by chance groups agree before their rollouts are called alike."""


def collapsed_share(observed: Observed) -> float:
    scored = observed.scored
    return float(observed.flat[scored].mean()) if scored.any() else math.nan


def collapse(observed: Observed) -> Result:
    """R1: groups with equal totals have advantage 0 for every rollout."""
    rule = RULES["R1"]
    return (
        needs.group_baseline(observed, rule)
        or needs.groups(observed, rule)
        or decide(observed, rule, one(collapsed_share), _explain_collapse, healthy="{value} of the groups have equal totals")
    )


def _explain_collapse(where: Observed, share: float, _: int) -> Details:
    flat = where.flat & where.scored
    kinds = _kinds(where, flat)
    rate = success_rate(where)
    size = where.group_size
    evidence = {"value": share, "groups": float(flat.sum()), **kinds}
    cost = "none trains"
    if share < 1.0:
        evidence["cost"] = 1.0 / (1.0 - share)
        cost = f"each group that trains costs 1/(1 − {share:.2f}) = {evidence['cost']:.1f} times its own rollouts"
    words = [f"{name.replace('_', ' ')} {100 * value:.0f} %" for name, value in kinds.items()]
    expected = ""
    if not math.isnan(rate):
        evidence |= {"success_rate": rate, "expected": equal_chance(rate, size)}
        expected = (
            f"; with equal prompts of success rate p = {rate:.2f}, p^{size} + (1 − p)^{size} = {evidence['expected']:.2f} is expected"
        )
    message = f"{100 * share:.0f} % of the groups have equal totals and train nothing" + (f" ({', '.join(words)})" if words else "")
    arithmetic = f"{flat.sum()} of {where.scored.sum()} groups; {cost}{expected}"
    return Details(message, evidence, arithmetic, _collapse_fixes(where, kinds, share), _groups(where, flat))


def _kinds(where: Observed, flat: Flags) -> dict[str, float]:
    """Shares of the equal groups: all fail, all pass, and equal totals from different outcomes or between the two."""
    if where.right is None or not flat.any():
        return {}
    grouped = where.right.reshape(-1, where.group_size)[flat]
    known = ~np.isnan(grouped)
    passed, failed = ((grouped == value) | ~known for value in (1.0, 0.0))
    counted = known.any(axis=1)
    all_pass, all_fail = (float((flags.all(axis=1) & counted).mean()) for flags in (passed, failed))
    return {"all_fail": all_fail, "all_pass": all_pass, "mixed": max(0.0, 1.0 - all_fail - all_pass)}


def success_rate(where: Observed) -> float:
    """Share of right rollouts; NaN where that is not known."""
    if where.right is None or np.isnan(where.right).all():
        return math.nan
    return float(np.nanmean(where.right))


def _collapse_fixes(where: Observed, kinds: dict[str, float], share: float) -> tuple[Fix, ...]:
    fixes = list(_temperature_fix(where, share))
    if kinds.get("all_fail", 0.0) >= 0.5:
        if not fixes:
            fixes.append(Fix("rollout.temperature", "higher", "more different tries: a group of failures needs one success to learn from"))
        fixes.append(_size_fix(where))
        fixes.append(Fix("data.train", "easier rows", "prompts that the model solves now and then"))
    elif kinds.get("all_pass", 0.0) >= 0.5:
        fixes.append(Fix("data.train", "harder rows", "what is always solved teaches nothing more"))
    else:
        fixes.append(Fix("rewards", "a finer reward", "levels that tell the rollouts of a group apart"))
    if where.settings.get("loss.filter", "none") == "none":
        why = "with rollout.refill: 2 it fills the batch with groups that train; that costs rollouts, not updates"
        fixes.append(Fix("loss.filter", "zero_std", why))
    return tuple(fixes)


def _temperature_fix(where: Observed, share: float) -> tuple[Fix, ...]:
    """A temperature below 1 where groups agree more often than independent rollouts would."""
    temperature, rate = where.settings.get("rollout.temperature"), success_rate(where)
    if not isinstance(temperature, int | float) or temperature >= 1.0 or math.isnan(rate):
        return ()
    expected = equal_chance(rate, where.group_size)
    if share < expected + ALIKE:
        return ()
    why = f"at {temperature:g} the rollouts of a group are alike: {100 * share:.0f} % of the groups agree, independent ones would in "
    return (Fix("rollout.temperature", "1.0", why + f"{100 * expected:.0f} %"),)


def _size_fix(where: Observed) -> Fix:
    """The group size at which no more than the share that is worth a note would agree, where the arithmetic gives a larger one."""
    rule, rate, size = RULES["R1"], success_rate(where), where.group_size
    assert rule.levels is not None
    needed = None if math.isnan(rate) else size_to_differ(rate, rule.levels.info)
    if needed is None or needed <= size:
        return Fix("rollout.group_size", str(2 * size), f"(1 − p)^{2 * size} is the square of (1 − p)^{size}")
    why = f"with equal prompts p^{needed} + (1 − p)^{needed} = {equal_chance(rate, needed):.2f} of the groups would then agree"
    return Fix("rollout.group_size", str(needed), why)


def _groups(where: Observed, flags: Flags) -> tuple[str, ...]:
    return tuple(where.group_place(int(group)) for group in np.flatnonzero(flags)[-LOOK_AT:])


# R2 -----------------------------------------------------------------------------------------------------------------------------------


def _phantoms(observed: Observed) -> Flags:
    assert observed.outcome is not None
    constant = equal_groups(observed.outcome, observed.group_size)
    return np.asarray(constant & ~observed.flat & observed.trained & observed.scored)


def phantom_share(observed: Observed) -> float:
    kept = observed.trained & observed.scored
    return float(_phantoms(observed)[kept].mean()) if kept.any() else math.nan


def phantom(observed: Observed) -> Result:
    """R2: groups in which only shaping rewards differ still move the policy."""
    rule = RULES["R2"]
    return (
        needs.group_baseline(observed, rule)
        or needs.groups(observed, rule)
        or needs.outcome(observed, rule)
        or decide(observed, rule, one(phantom_share), _explain_phantom, healthy="{value} of the trained groups learn from shaping alone")
    )


def _explain_phantom(where: Observed, share: float, _: int) -> Details:
    phantoms, kept = _phantoms(where), where.trained & where.scored
    filtered = outcome_filtered(where)
    stay = float(filtered.trained.mean())
    after = phantom_share(filtered) if filtered.trained.any() else 0.0
    fix = Fix("loss.filter", "outcome", f"leaves these whole groups out; {100 * stay:.0f} % of the groups stay", share, after)
    message = f"{100 * share:.0f} % of the trained groups have one outcome, all right or all wrong, and learn only from shaping rewards"
    arithmetic = f"{phantoms.sum()} of {kept.sum()} trained groups: equal outcome totals, different totals"
    return Details(message, {"value": share, "groups": float(phantoms.sum())}, arithmetic, (fix,), _groups(where, phantoms))


def outcome_filtered(observed: Observed) -> Observed:
    """The same rollouts under `loss.filter: outcome`."""
    kept = keep_groups(observed.totals, observed.outcome, observed.group_size, mode="outcome").kept
    return dataclasses.replace(observed, trained=observed.trained & np.array(kept))


# R9 -----------------------------------------------------------------------------------------------------------------------------------


def _solved(observed: Observed) -> dict[str, bool]:
    """Prompts with a scored rollout: whether one of them was right."""
    assert observed.right is not None
    grouped = observed.right.reshape(-1, observed.group_size)
    judged, hit = np.any(~np.isnan(grouped), axis=1), np.any(grouped == 1.0, axis=1)
    solved: dict[str, bool] = {}
    for group in np.flatnonzero(judged):
        prompt = observed.prompts[group]
        solved[prompt] = solved.get(prompt, False) or bool(hit[group])
    return solved


def unsolved_share(observed: Observed) -> float:
    solved = _solved(observed)
    return 1.0 - sum(solved.values()) / len(solved) if solved else math.nan


def sparsity(observed: Observed) -> Result:
    """R9: a prompt that is never solved gives no rollout to reinforce."""
    rule = RULES["R9"]
    return (
        needs.groups(observed, rule)
        or needs.outcome(observed, rule)
        or needs.verdict(observed, rule)
        or decide(observed, rule, one(unsolved_share), _explain_sparsity, healthy="{value} of the prompts were never solved")
    )


def _explain_sparsity(where: Observed, share: float, _: int) -> Details:
    rate, size = success_rate(where), where.group_size
    seen = seen_chance(rate, size)
    solved = _solved(where)
    evidence = {"value": share, "prompts": float(len(solved)), "success_rate": rate, "seen": seen}
    arithmetic = f"over all prompts p = {rate:.3f}: P(a group sees a success) = 1 − (1 − p)^{size} = {seen:.2f}"
    fixes = [
        Fix("rewards", "one more, for steps on the way", "it tells failures apart: a part that is right, a level that is reached"),
        Fix("data.train", "easier rows", "or a warm start (method: sft) on examples that solve the task"),
    ]
    if 0.0 < rate < 1.0:
        needed = size_to_see(rate)
        evidence["group_size_95"] = float(needed)
        arithmetic += f"; 0.95 needs a group of {needed} (ln 0.05 / ln(1 − p))"
        if needed > size:
            why = f"an average prompt then shows a success in 95 % of its groups, not {100 * seen:.0f} %"
            fixes.insert(0 if needed <= 4 * size else 1, Fix("rollout.group_size", str(needed), why))
    never = [group for group, prompt in enumerate(where.prompts) if not solved.get(prompt, True)]
    rows = tuple(where.group_place(group) for group in never[-LOOK_AT:])
    message = f"{100 * share:.0f} % of the prompts were not solved by any rollout"
    return Details(message, evidence, arithmetic, tuple(fixes), rows)
