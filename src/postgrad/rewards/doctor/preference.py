"""D1 and M1: what the log of a preference run means. Said by the trainer while it runs and by the doctor afterwards, from one place.

1. `dpo_notes`           over a window of steps.
2. `reward_model_notes`  over the last held-out evaluation of a reward model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.finding import SEVERITIES, Details, Fix, Passed, Result, Severity, found, skipped
from postgrad.rewards.doctor.observed import WINDOW_STEPS, Observed

LN2 = math.log(2.0)
STUCK = 1e-3
"""Distance of the loss to ln 2 at which nothing has been learned."""
SATURATED_ACCURACY, SATURATED_LOSS = 0.99, 0.05
FEWEST_PAIRS = 20
"""Held-out pairs below which no finding is made of them."""
LENGTH_CORRELATION, CALIBRATION, DRIFT = 0.6, 0.15, 3.0
"""|Spearman ρ| of score and length; expected calibration error; |mean score| in standard deviations."""

Watched = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PreferenceNote:
    """One thing to know: a name, how grave it is, the sentence, its numbers, and what to change."""

    name: str
    severity: Severity
    text: str
    evidence: Mapping[str, float]
    fix: Fix | None = None


def dpo_notes(steps: Sequence[Watched], *, sigmoid: bool, needs_reference: bool, beta: float) -> list[PreferenceNote]:
    """Over one window of steps. sigmoid: the loss is DPO's own, so that ln 2 means something; without a reference there are no rewards
    that could fall."""
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    notes = []
    if sigmoid and all(abs(step["loss"] - LN2) < STUCK for step in steps):
        text = f"the loss has been ln 2 = {LN2:.4f} for {len(steps)} steps: nothing is learned; raise optimizer.learning_rate"
        fix = Fix("optimizer.learning_rate", "higher", "policy and reference are still the same")
        notes.append(PreferenceNote("stuck", "warn", text, {"loss": means["loss"]}, fix))
    chosen, margin = means.get("rewards/chosen"), means.get("rewards/margins")
    if needs_reference and chosen is not None and margin is not None and chosen < 0 < margin:
        notes.append(_both_fall(chosen, margin, beta))
    accuracy = means.get("rewards/accuracies", 0.0)
    if accuracy > SATURATED_ACCURACY and means["loss"] < SATURATED_LOSS:
        text = f"the preference is learned ({100 * accuracy:.0f} % right, loss {means['loss']:.3f}): more steps only widen the margin"
        notes.append(PreferenceNote("saturated", "info", text, {"accuracy": accuracy, "loss": means["loss"]}))
    return notes


def _both_fall(chosen: float, margin: float, beta: float) -> PreferenceNote:
    nats = -chosen / beta
    text = (
        f"the chosen answers have become {nats:.1f} nats less likely than at the start, while the margin grew to {margin:.3f}: "
        "the rejected ones fall faster. That is usual for DPO; a term on the chosen answers holds them up "
        "(loss.kind: {sigmoid: 1.0, sft: 0.2})"
    )
    fix = Fix("loss.kind", "{sigmoid: 1.0, sft: 0.2}", "a term on the chosen answers holds them up")
    return PreferenceNote("both_fall", "info", text, {"nats": nats, "margin": margin}, fix)


def reward_model_notes(metrics: Watched) -> list[PreferenceNote]:
    """What the held-out pairs say about a reward model. Needs at least `FEWEST_PAIRS` of them."""
    notes = []
    low, high = metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]
    shown = f"held-out accuracy {100 * metrics['eval/accuracy']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    if low <= 0.5:
        text = f"{shown} is not clear of chance (50 %): do not train a policy on this reward; more pairs, or a larger model"
        notes.append(PreferenceNote("chance", "critical", text, {"accuracy": metrics["eval/accuracy"], "low": low, "high": high}))
    if abs(rho := metrics["eval/length_correlation"]) > LENGTH_CORRELATION:
        text = f"scores follow the answers' length (Spearman ρ = {rho:.2f}): a policy would learn length; balance the pairs by length"
        notes.append(PreferenceNote("length", "warn", text, {"rho": rho}, Fix("data.train", "balanced by length", "see data report")))
    if (error := metrics["eval/calibration_error"]) > CALIBRATION:
        text = f"σ(margin) is off by {100 * error:.0f} % on average: use the order of scores, not their size"
        notes.append(PreferenceNote("calibration", "info", text, {"calibration_error": error}))
    if abs(metrics["eval/mean_reward"]) > DRIFT * max(metrics["eval/reward_std"], 1e-6):
        text = "scores have drifted far from 0 compared with their spread: a larger loss.center_coef (0.01 is usual) holds them"
        evidence = {"mean": metrics["eval/mean_reward"], "std": metrics["eval/reward_std"]}
        notes.append(PreferenceNote("drift", "info", text, evidence, Fix("loss.center_coef", "0.01", "holds the scores around 0")))
    return notes


# the doctor's side ----------------------------------------------------------------------------------------------------------------------


def preference_loss(observed: Observed) -> Result:
    """D1, from metrics.jsonl: a note counts once two windows of steps show it."""
    rule = RULES["D1"]
    steps = [
        (step, numbers) for step, numbers in observed.metrics if step > 0 and {"loss", "rewards/chosen", "rewards/margins"} <= set(numbers)
    ]
    if observed.method not in ("dpo", "") or not steps:
        return skipped(rule, "this is no run on preference pairs", "method: dpo")
    if len(steps) < WINDOW_STEPS:
        return skipped(rule, f"{len(steps)} steps, a window has {WINDOW_STEPS}", "max_steps")
    starts = range(0, len(steps) - WINDOW_STEPS + 1, WINDOW_STEPS)
    windows = [_dpo_window(observed, [numbers for _, numbers in steps[start : start + WINDOW_STEPS]]) for start in starts]
    lasting = {name: note for before, now in itertools.pairwise(windows) for name, note in now.items() if name in before}
    notes = list(lasting.values()) if len(windows) > 1 else [_as_note(note) for note in windows[0].values()]
    if not notes:
        text = "the loss moves; length of chosen against rejected: see `postgrad data report`"
        return Passed(rule.id, rule.title, text)
    still = {note.name for note in notes} <= set(windows[-1])
    return _as_finding("D1", notes, observed, still=still)


def _dpo_window(observed: Observed, steps: list[Mapping[str, float]]) -> dict[str, PreferenceNote]:
    kinds = observed.settings.get("loss.kind", "sigmoid")
    names = {kinds} if isinstance(kinds, str) else set(kinds)
    reference_free = names <= {"simpo", "cpo", "orpo", "sft"}
    beta: Any = observed.settings.get("loss.beta", 0.1)
    shared = [{name: step[name] for name in step if all(name in other for other in steps)} for step in steps]
    notes = dpo_notes(shared, sigmoid="sigmoid" in names, needs_reference=not reference_free, beta=float(beta))
    return {note.name: note for note in notes}


def _as_note(note: PreferenceNote) -> PreferenceNote:
    """One window alone is no alarm."""
    return PreferenceNote(note.name, "info", note.text, note.evidence, note.fix)


def reward_model(observed: Observed) -> Result:
    """M1, from the last held-out evaluation."""
    rule = RULES["M1"]
    evaluations = [numbers for _, numbers in observed.metrics if {"eval/accuracy", "eval/length_correlation"} <= set(numbers)]
    if observed.method not in ("reward", "") or not evaluations:
        key: Literal["data.eval", "method: reward"] = "data.eval" if observed.method == "reward" else "method: reward"
        return skipped(rule, "there is no held-out evaluation of a reward model", key)
    last = evaluations[-1]
    if last["eval/pairs"] < FEWEST_PAIRS:
        return skipped(rule, f"{last['eval/pairs']:.0f} held-out pairs, {FEWEST_PAIRS} are needed", "data.eval")
    notes = reward_model_notes(last)
    if not notes:
        return Passed(rule.id, rule.title, f"held-out accuracy {100 * last['eval/accuracy']:.1f} %", {"accuracy": last["eval/accuracy"]})
    return _as_finding("M1", notes, observed, still=True)


def _as_finding(rule_id: str, notes: list[PreferenceNote], observed: Observed, *, still: bool) -> Result:
    """All notes as one finding, as grave as the gravest."""
    ordered = sorted(notes, key=lambda note: -SEVERITIES.index(note.severity))
    evidence = {name: value for note in reversed(ordered) for name, value in note.evidence.items()}
    message = "; ".join(note.text for note in ordered)
    fixes = tuple(note.fix for note in ordered if note.fix is not None)
    details = Details(message, evidence, "means over the steps of a window" if rule_id == "D1" else "over the held-out pairs", fixes)
    return found(RULES[rule_id], SEVERITIES.index(ordered[0].severity) + 1, details, observed, still=still)
