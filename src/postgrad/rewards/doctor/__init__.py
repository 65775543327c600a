"""The reward doctor: what the rollouts and numbers of a training run say about its rewards. Imports no torch.

observed (one run as arrays) · read, run_files, foreign, assemble, lines (where they come from) · catalogue (every check and its limits) ·
groups, shares, relations, rollouts, policy, heldout, preference (the checks) · finding (windows, severities) · numbers, recompute ·
examine · monitor (during a run) · render

It is an audit and a help in designing rewards. Such statistics say after the fact what was wrong; they do not warn of it reliably.
"""

from postgrad.rewards.doctor.examine import Diagnosis, examine
from postgrad.rewards.doctor.finding import Finding, Fix, Passed, Skipped
from postgrad.rewards.doctor.monitor import Monitor
from postgrad.rewards.doctor.observed import Observed, RewardInfo
from postgrad.rewards.doctor.read import observe

__all__ = ["Diagnosis", "Finding", "Fix", "Monitor", "Observed", "Passed", "RewardInfo", "Skipped", "examine", "observe"]
