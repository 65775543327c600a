"""The annotator of the RLHF chapter: a rule in place of a person, so that what was preferred can be looked up.

    courteous     1 for an answer that holds a courteous phrase and no curt one, else 0. This is what pairs are made by.
    informative   1 for an answer that holds the sentence it was asked to pass on, else 0. Nobody is trained on it: it only watches.

The rule knows the vocabulary below. It does not look at length: the courteous and the curt phrases are about equally long.
"""

from __future__ import annotations

from postgrad.rewards import RolloutView, reward

COURTEOUS = (
    "thank you for asking", "let me know if i can help", "with pleasure", "feel free", "glad to help", "have a wonderful day",
    "certainly!", "i hope that makes", "i am happy to explain", "get in touch again", "thanks for reaching out", "wishing you",
    "you are welcome to ask", "tell me if anything", "how kind of you", "enjoy the rest",
)  # fmt: skip
CURT = (
    "why do you ask", "leave me alone", "everybody knows", "waste my time", "silly thing", "figure out", "ugh", "should have read",
    "tired of explaining", "stop bothering", "nonsense", "annoy somebody", "you never listen", "will not repeat", "how dense", "spare me",
)  # fmt: skip


@reward(scope="final", claim="the answer is courteous, and nowhere curt", range=(0, 1), role="outcome")
def courteous(rollout: RolloutView) -> float:
    text = rollout.final_answer.lower()
    return float(any(phrase in text for phrase in COURTEOUS) and not any(phrase in text for phrase in CURT))


@reward(scope="final", claim="the answer passes on the sentence it was given", range=(0, 1))
def informative(rollout: RolloutView, fact: str) -> float:
    return float(fact in rollout.final_answer)
