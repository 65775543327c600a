"""What a success rate lets one expect of a group: the arithmetic behind "raise the temperature or the group size" (R1, R9).

p is the chance that one rollout is right, independent of the others of its group. Prompts differ, so this is what equal prompts would
give: groups that agree more often than that come from rollouts that are copies of one another, or from prompts that are always solved or
never.
"""

from __future__ import annotations

import math

MOST = 4096
"""Group size beyond which nobody looks."""


def equal_chance(p: float, group_size: int) -> float:
    """P(all right or all wrong) = p^G + (1 − p)^G: the expected share of groups that train nothing, with a reward that is right or wrong.

    >>> round(equal_chance(0.2, 4), 4)
    0.4112
    """
    return float(p**group_size + (1.0 - p) ** group_size)


def seen_chance(p: float, group_size: int) -> float:
    """P(a group sees a success) = 1 − (1 − p)^G.

    >>> round(seen_chance(0.01, 8), 4)
    0.0773
    """
    return float(1.0 - (1.0 - p) ** group_size)


def size_to_see(p: float, chance: float = 0.95) -> int:
    """The smallest G with 1 − (1 − p)^G ≥ chance, ⌈ln(1 − chance) / ln(1 − p)⌉. 0 < p < 1, 0 < chance < 1.

    >>> size_to_see(0.01)
    299
    """
    return max(1, math.ceil(math.log(1.0 - chance) / math.log(1.0 - p) - 1e-9))


def size_to_differ(p: float, share: float) -> int | None:
    """The smallest G with p^G + (1 − p)^G ≤ share; None when even `MOST` is not enough. 0 ≤ p ≤ 1.

    >>> size_to_differ(0.2, 0.3), size_to_differ(0.0, 0.3)
    (6, None)
    """
    return next((size for size in range(1, MOST + 1) if equal_chance(p, size) <= share), None)
