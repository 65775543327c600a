"""`SFT.step` against `SFTTrainer.train`: the same rows give the same tokens, the same trained tokens, loss and gradients.

TRL's side prepares, collates, pads and accumulates as for any user; postgrad's side packs rows by tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from postgrad.chat import ChatFormat
from postgrad.data import load_rows, prepare_sft
from postgrad.testing.tiny import Architecture, tiny_model, tiny_tokenizer
from postgrad.types import TrainRow

from . import same, trl_side

if TYPE_CHECKING:
    from trl import SFTTrainer

pytestmark = [pytest.mark.conformance, *trl_side.QUIET]

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""`tiny.CHATML` with the marks that TRL finds assistant tokens by."""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _ask(*texts: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [_message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]


CONVERSATIONS = [
    _ask("What is 12 + 1?", "13"),
    [_message("system", "Answer in one word."), *_ask("the capital of Japan?", "Tokyo", "and of Italy, in the south of the Alps?", "Rome")],
    _ask("hi", "Hello the in \n\n there. How are you today?"),
    _ask("a", "b", "c", "d", "e", "f"),
    _ask("Ünïcödé ☂?", "ÿes ☂☂"),
    _ask("count (1 12)", " 1 12 123\n"),
]


def _random_rows() -> list[TrainRow]:
    """Ragged rows in which arbitrary tokens are trained; the fourth has a single one."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate((5, 40, 17, 9, 2, 28)):
        ids = torch.randint(0, 280, (length,), generator=generator).tolist()
        flags = (torch.rand(length, generator=generator) < 0.6).tolist()
        if number == 3:
            flags = [False] * length
        rows.append(TrainRow(tuple(ids), (False, *flags[1:-1], True)))
    return rows


def _labels(row: TrainRow) -> list[int]:
    return [token if trained else -100 for token, trained in zip(row.token_ids, row.trained, strict=True)]


def _prepared(rows: Sequence[dict[str, Any]], folder: Path, *, template: str = GENERATION, **options: Any) -> list[TrainRow]:
    """The rows of a file, as a recipe would prepare them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_length": 1024} | options
    return list(prepare_sft(load_rows(file), ChatFormat(tiny_tokenizer(template)), **options).rows)


def _assert_same_rows(ours: Sequence[TrainRow], trainer: SFTTrainer) -> None:
    """The same ids, and the same labels but for the first token of a row, which nothing predicts."""
    theirs = list(trainer.train_dataset)
    assert [list(row.token_ids) for row in ours] == [row["input_ids"] for row in theirs]
    assert [_labels(row)[1:] for row in ours] == [row["labels"][1:] for row in theirs]


def _check(
    rows: Sequence[dict[str, Any]], folder: Path, *, ours: dict[str, Any] | None = None, template: str = GENERATION, **config: Any
) -> None:
    """Rows from text to gradient, on both sides."""
    model = tiny_model()
    prepared = _prepared(rows, folder, template=template, **(ours or {}))
    trainer = trl_side.sft_trainer(copy.deepcopy(model), rows, folder, rows_per_micro_batch=2, tokenizer=tiny_tokenizer(template), **config)
    _assert_same_rows(prepared, trainer)
    same.assert_same_step(same.sft_step(model, prepared), trl_side.sft_step(trainer))


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 6])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2"])
def test_given_tokens_and_labels(architecture: Architecture, rows_per_micro_batch: int, tmp_path: Path) -> None:
    model, rows = tiny_model(architecture), _random_rows()
    tokenised = [{"input_ids": list(row.token_ids), "labels": _labels(row)} for row in rows]
    trainer = trl_side.sft_trainer(copy.deepcopy(model), tokenised, tmp_path, rows_per_micro_batch=rows_per_micro_batch)
    theirs = trl_side.sft_step(trainer)
    for budget in (1, 30, 90):
        ours = same.sft_step(copy.deepcopy(model), rows, tokens_per_micro_batch=budget)
        same.assert_same_step(ours, theirs)
    if rows_per_micro_batch == len(rows):  # TRL means a metric over micro-batches, whatever their size
        assert ours.metrics["entropy"] == pytest.approx(theirs.metrics["entropy"], rel=same.RELATIVE)
        assert ours.metrics["num_tokens"] == theirs.metrics["num_tokens"]


def test_assistant_turns_of_conversations(tmp_path: Path) -> None:
    _check([{"messages": messages} for messages in CONVERSATIONS], tmp_path, assistant_only_loss=True)


def test_every_token_of_conversations(tmp_path: Path) -> None:
    _check([{"messages": messages} for messages in CONVERSATIONS], tmp_path, ours={"train_on": "all"})


def test_prompt_and_completion_as_messages(tmp_path: Path) -> None:
    rows = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in CONVERSATIONS]
    _check(rows, tmp_path, assistant_only_loss=True)


def test_prompt_and_completion_as_text_without_a_template(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q: {number} 12?\nA:", "completion": " " + "yes 1 " * number} for number in range(1, 7)]
    _check(rows, tmp_path, ours={"text_prompts": "raw"})


def test_cut_rows_keep_their_start(tmp_path: Path) -> None:
    _check(
        [{"messages": messages} for messages in CONVERSATIONS],
        tmp_path,
        ours={"max_length": 48, "overlong": "cut"},
        assistant_only_loss=True,
        max_length=48,
    )


def test_dropping_over_long_rows_is_left_to_the_user_in_trl(tmp_path: Path) -> None:
    rows = _prepared([{"messages": messages} for messages in CONVERSATIONS], tmp_path, max_length=48)
    assert len(rows) < len(CONVERSATIONS)
    assert all(row.token_ids[-2] == same.EOS for row in rows)
