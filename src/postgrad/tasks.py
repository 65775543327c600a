"""Problems of reasoning-gym (over a hundred procedural tasks, each with its own verifier), for data, rewards and environments.

A problem is what reasoning-gym calls an entry: question, answer and metadata, which its verifier reads. In a row of data it is the column
`reasoning_gym`, beside the prompt.

Needs `pip install postgrad[tasks]`. Source: github.com/open-thought/reasoning-gym.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from postgrad.errors import RecipeError
from postgrad.suggest import did_you_mean

Entry = Mapping[str, Any]
_TUPLE = "__tuple__"


def entries(task: str, *, size: int, seed: int, config: Mapping[str, Any] | None = None) -> Iterator[Entry]:
    """The problems of a task, the same for the same seed and config. config: the task's own settings, such as {"max_terms": 3}.

    Raises `RecipeError` for a task or a setting that reasoning-gym does not know, and when it is not installed.
    """
    gym = _gym()
    if task not in gym.DATASETS:
        hint = did_you_mean(task, gym.DATASETS, "its tasks are listed in reasoning-gym's GALLERY.md")
        raise RecipeError(f"reasoning-gym has no task {task!r}", where="task", hint=hint)
    try:
        dataset = gym.create_dataset(task, size=size, seed=seed, **(config or {}))
    except (TypeError, ValueError, AssertionError) as error:
        raise RecipeError(f"reasoning-gym refuses the settings of {task}: {error}", where="config") from error
    for index in range(size):
        yield dataset[index]


def score(answer: str, entry: Entry) -> float:
    """What the task's own verifier gives, in [0, 1]."""
    gym = _gym()
    value = gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer, dict(entry))
    return min(max(float(value), 0.0), 1.0)


def rows(task: str, *, size: int, seed: int = 0, config: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of data for `method: grpo` and `ppo`, to be scored by the reward `reasoning_gym`."""
    for entry in entries(task, size=size, seed=seed, config=config):
        yield {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": packed(entry)}


def packed(value: Any) -> Any:
    """As JSON values; tuples, which some verifiers tell from lists, are marked.

    >>> packed({"board": (1, 2)}), unpacked(packed({"board": (1, 2)}))
    ({'board': {'__tuple__': [1, 2]}}, {'board': (1, 2)})
    """
    if isinstance(value, Mapping):
        return {key: packed(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [packed(item) for item in value]}
    return [packed(item) for item in value] if isinstance(value, list) else value


def unpacked(value: Any) -> Any:
    """What `packed` was given."""
    if isinstance(value, Mapping):
        inner = {key: unpacked(item) for key, item in value.items()}
        return tuple(inner[_TUPLE]) if set(inner) == {_TUPLE} else inner
    return [unpacked(item) for item in value] if isinstance(value, list) else value


def _gym() -> Any:
    try:
        import reasoning_gym.factory
    except ModuleNotFoundError as error:
        raise RecipeError("this needs the package reasoning-gym", hint="pip install 'postgrad[tasks]'") from error
    return reasoning_gym.factory
