"""Every check in one table: what it looks at, and from where on it speaks. `docs/doctor.md` shows it; limits exist nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from postgrad.rewards.doctor.finding import Levels, Rule

RULES: Mapping[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("R1", "collapse", "share of groups whose totals are equal: they train nothing", Levels(0.30, 0.50, 0.75), "arXiv 2503.14476"),
        Rule("R2", "phantom signal", "share of trained groups whose outcome is constant while their total is not",
             Levels(0.05, 0.15, 0.30), "arXiv 2503.14476"),
        Rule("R3", "signal share", "shaping's share of the advantages; a reward with less than .02 is dead",
             Levels(0.5, 0.7, 0.9), "trl#4785"),
        Rule("R4", "sacrificed objective", "windows in a row in which training pushes a reward down (bootstrap over groups, 95 %)",
             Levels(1, 3, 10, inclusive=True), "arXiv 2602.06869"),
        Rule("R5", "conflict", "correlation of two rewards within groups", Levels(-0.3, -0.5, -0.7, below=True), "trl#3857"),
        Rule("R6", "redundancy", "R² of a reward on those that agree with it, within groups", Levels(0.6, 0.8, 0.95), ""),
        Rule("R7", "rank inversion", "share of pairs within a group in which the worse outcome has the higher total",
             Levels(0.01, 0.05, 0.15), ""),
        Rule("R8", "resolution", "distinct advantages ÷ distinct reward vectors within groups",
             Levels(0.7, 0.5, 0.3, below=True), "trl#4785"),
        Rule("R9", "sparsity", "share of prompts that no rollout solved", Levels(0.3, 0.6, 0.8), "arXiv 2503.14476"),
        Rule("R10", "saturation", "a reward within 2 % of its maximum that no longer varies", Levels(0.98), "trl#3903"),
        Rule("R11", "abstained or failed", "share of rollouts that a reward failed on or left out", Levels(0.01, 0.05, 0.20), "trl#5902"),
        Rule("R12", "length", "rank correlation of length and total within groups", Levels(0.4, 0.6, 0.8), "arXiv 2310.03716"),
        Rule("R13", "degenerate text", "share of repeated 3-grams; of duplicates in a group; of empty answers",
             Levels(0.25, 0.5, 0.8), "trl#3138"),
        Rule("R14", "entropy", "entropy falls while the reward is flat", None, "arXiv 2505.22617"),
        Rule("R15", "KL budget", "KL to the reference per token [nats]; a spike; pinned at 0", Levels(0.1, 0.5, 2.0), "arXiv 2210.10760"),
        Rule("R16", "trust region", "share of tokens whose clip is active: they have no gradient",
             Levels(0.1, 0.2, 0.4), "arXiv 1707.06347"),
        Rule("R17", "sampler mismatch", "mean |log-prob of the trainer − log-prob of the sampler| [nats]",
             Levels(0.02, 0.05, 0.2), "trl#4159"),
        Rule("R18", "proxy against held-out", "rise of the trained reward less the rise on held-out prompts, as shares of their scales, "
             "while the one rises and the other does not", Levels(0.10, 0.15, 0.30), "arXiv 2210.10760"),
        Rule("R19", "non-finite", "any number that is NaN or infinite", None, "trl#6702"),
        Rule("P1", "critic", "explained variance of the returns, over the second half of the run", Levels(0.2, 0.05, -0.5, below=True),
             ""),
        Rule("D1", "preference loss", "stuck at ln 2; both log-probs fall; saturated; length of chosen against rejected", None,
             "arXiv 2402.13228"),
        Rule("M1", "reward model", "held-out accuracy, scores that follow length, calibration, drift", None, "arXiv 2310.03716"),
    )
}  # fmt: skip


def table() -> str:
    """The rules as the table of docs/doctor.md."""
    lines = ["| id | what | looks at | note / warning / critical | see |", "|---|---|---|---|---|"]
    for rule in RULES.values():
        limits = "–" if rule.levels is None else rule.levels.shown()
        lines.append(f"| {rule.id} | {rule.title} | {rule.looks_at.replace('|', chr(92) + '|')} | {limits} | {rule.reference} |")
    return "\n".join(lines) + "\n"
