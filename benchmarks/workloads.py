"""What both sides compute: the same rows, the same forced samples, the same rewards, the same tool. Imports nothing of either side.

Texts are made of words that SmolLM2's tokenizer reads as one token each, so that lengths in tokens are exact; both sides read the texts
themselves, and the equality of their losses shows that they read the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

_WORDS = (
    "the of and to in is that for it was on are as with be by this have from or one had not but what all were when we there can an your "
    "which their said if do will each about how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find use may water long little very after words "
    "called just where most know"
)
WORDS = _WORDS.split()

SFT_LENGTHS = ((24, 40), (40, 88), (60, 60), (30, 170), (100, 156), (60, 260), (120, 300), (200, 312))
"""(prompt, completion with its end token) of the 8 rows of a step: 2,020 tokens, a long tail like that of instruction data."""
PAIRS, PAIR_PROMPT, PAIR_ANSWER = 4, 128, 128
PROMPTS, GROUP, PROMPT, COMPLETION = 2, 8, 256, 128
AGENT_PROMPT, AGENT_TURNS, AGENT_TURN = 150, 3, 48
"""Words of the question; turns; tokens sampled in each."""
STEPS = 8
"""Steps that there are different rows for, and that a run has at most."""


def text(count: int, rng: random.Random) -> str:
    return "".join(f" {rng.choice(WORDS)}" for _ in range(count))


def sft_rows(lengths: Sequence[tuple[int, int]] = SFT_LENGTHS, steps: int = STEPS) -> list[dict[str, str]]:
    rng = random.Random(0)
    return [{"prompt": text(p, rng), "completion": text(c - 1, rng)} for _ in range(steps) for p, c in lengths]


def pair_rows(pairs: int = PAIRS, steps: int = STEPS) -> list[dict[str, str]]:
    rng = random.Random(0)
    sides = ("chosen", "rejected")
    return [{"prompt": text(PAIR_PROMPT, rng)} | {side: text(PAIR_ANSWER - 1, rng) for side in sides} for _ in range(pairs * steps)]


def prompt_rows(prompts: int = PROMPTS, length: int = PROMPT, steps: int = STEPS) -> list[dict[str, str]]:
    rng = random.Random(0)
    return [{"prompt": text(length, rng)} for _ in range(prompts * steps)]


def question_rows(steps: int = STEPS) -> list[dict[str, list[dict[str, str]]]]:
    rng = random.Random(0)
    return [{"prompt": [{"role": "user", "content": text(AGENT_PROMPT, rng)}]} for _ in range(PROMPTS * steps)]


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"x": 7}}\n</tool_call>'
"""What the agent's first turns are replaced by, with an end token, after they were really sampled: SmolLM2 calls no tools by itself."""


def multiply(x: int) -> str:
    """Multiply a number by seven.

    Args:
        x: The number.
    """
    return " ".join([str(x * 7)] * 20)


MULTIPLY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply a number by seven.",
        "parameters": {
            "additionalProperties": False,
            "properties": {"x": {"description": "The number.", "type": "integer"}},
            "required": ["x"],
            "type": "object",
        },
    },
}
"""The tool as postgrad shows it to a model. TRL would word the schema a little differently, and the prompts would not be equal."""


def forced_text(row: int, longest: int) -> str:
    """What rollout `row` says where equality is checked: up to `longest` tokens with the end token, fewer in some rows than in others."""
    return text(longest - 1 - 5 * (row % 8), random.Random(row))


def spread(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """A reward in TRL's form, which both sides take: a number between 0 and 1 that differs within every group."""
    return [sum(ids[-8:]) % 101 / 100 for ids in completion_ids]
