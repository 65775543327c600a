"""All checks on one run. The order is the catalogue's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from postgrad.rewards.doctor import groups, heldout, policy, preference, relations, rollouts, shares
from postgrad.rewards.doctor.finding import SEVERITIES, Finding, Passed, Result, Severity, Skipped
from postgrad.rewards.doctor.observed import Observed

Check = Callable[[Observed], Result]

CHECKS: dict[str, Check] = {
    "R1": groups.collapse,
    "R2": groups.phantom,
    "R3": shares.signal_share,
    "R4": shares.sacrificed,
    "R5": relations.conflict,
    "R6": relations.redundancy,
    "R7": relations.inversion,
    "R8": shares.resolution,
    "R9": groups.sparsity,
    "R10": shares.saturation,
    "R11": rollouts.abstained,
    "R12": rollouts.length,
    "R13": rollouts.degeneracy,
    "R14": policy.entropy,
    "R15": policy.kl_budget,
    "R16": policy.trust_region,
    "R17": policy.sampler_mismatch,
    "R18": heldout.proxy_against_truth,
    "R19": policy.non_finite,
    "P1": policy.critic,
    "D1": preference.preference_loss,
    "M1": preference.reward_model,
}
FOR_METHOD = {"dpo": ("R19", "D1"), "reward": ("R19", "M1"), "sft": ("R19",)}
"""Methods that sample no rollouts get the checks that apply to them."""


@dataclass(frozen=True)
class Diagnosis:
    """What the checks say about one run, gravest first."""

    observed: Observed
    findings: tuple[Finding, ...]
    passed: tuple[Passed, ...]
    skipped: tuple[Skipped, ...]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def critical(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "critical")


def examine(observed: Observed) -> Diagnosis:
    """Run every check that applies to the method."""
    chosen = FOR_METHOD.get(observed.method, tuple(CHECKS))
    results = [CHECKS[name](observed) for name in chosen]
    findings = sorted((r for r in results if isinstance(r, Finding)), key=lambda finding: -SEVERITIES.index(finding.severity))
    return Diagnosis(
        observed,
        tuple(findings),
        tuple(r for r in results if isinstance(r, Passed)),
        tuple(r for r in results if isinstance(r, Skipped)),
    )
