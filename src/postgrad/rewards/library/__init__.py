"""The rewards that ship: `use: NAME` in a recipe. Each is a plain function with a truth table in its tests.

matching   numeric_match · exact_match · choice_match             maths  math_accuracy (pip install postgrad[math])
structure  think_format · json_schema                             code   code_exec
length     soft_overlong · cosine_length · repetition · length_in_group
tools      tool_use · tool_match · tool_exact · tool_efficiency · tool_error · answer_uses_tool
text       language · refusal · keyword                           judging  judge
worlds     environment · environment_turns · reasoning_gym (pip install postgrad[tasks])
"""

from collections.abc import Callable, Mapping
from typing import Any

from postgrad.rewards.library.answer import answer_part
from postgrad.rewards.library.code import code_exec
from postgrad.rewards.library.environment import environment, environment_turns
from postgrad.rewards.library.gym import reasoning_gym
from postgrad.rewards.library.judging import judge
from postgrad.rewards.library.length import cosine_length, length_in_group, repetition, soft_overlong
from postgrad.rewards.library.matching import choice_match, exact_match, numeric_match
from postgrad.rewards.library.maths import math_accuracy
from postgrad.rewards.library.numbers import answered_number, gold_number, numbers_in
from postgrad.rewards.library.structure import json_schema, think_format
from postgrad.rewards.library.text import keyword, language, refusal
from postgrad.rewards.library.tools import answer_uses_tool, tool_efficiency, tool_error, tool_exact, tool_match, tool_use

LIBRARY: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        exact_match, numeric_match, choice_match, math_accuracy, think_format, json_schema, soft_overlong, cosine_length, repetition,
        length_in_group, tool_use, tool_match, tool_exact, tool_efficiency, tool_error, answer_uses_tool, language, refusal, keyword,
        code_exec, judge, environment, environment_turns, reasoning_gym,
    )
}  # fmt: skip

__all__ = [
    "LIBRARY", "answer_part", "answer_uses_tool", "answered_number", "choice_match", "code_exec", "cosine_length", "environment",
    "environment_turns", "exact_match", "gold_number", "json_schema", "judge", "keyword", "language", "length_in_group",
    "math_accuracy", "numbers_in", "numeric_match", "reasoning_gym", "refusal", "repetition", "soft_overlong", "think_format",
    "tool_efficiency", "tool_error", "tool_exact", "tool_match", "tool_use",
]  # fmt: skip
