"""The verifiers of reasoning-gym."""

from __future__ import annotations

import re
from typing import Any

from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part
from postgrad.tasks import score, unpacked

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward(scope="final", claim="the task's own verifier accepts the answer", range=(0.0, 1.0), role="outcome")
def reasoning_gym(rollout: RolloutView, reasoning_gym: Any) -> float:
    """What the verifier of a reasoning-gym task gives the answer: what stands in `<answer>…</answer>`, or all that follows the thinking
    where there are no such tags. Several answers are none. Rows with the column `reasoning_gym` come from `postgrad.tasks.rows`.
    """
    text = answer_part(rollout.final_answer)
    tagged = _TAGGED.findall(text)
    answer = text if not tagged else tagged[0] if len(tagged) == 1 else ""
    return score(answer.strip(), unpacked(reasoning_gym)) if answer.strip() else 0.0
