"""One environment class, in TRL's GRPOTrainer and here: reset with the same row, the same tools, asked for its reward once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from postgrad.rollout.adapters import trl_environment
from postgrad.rollout.environments import end_session
from postgrad.rollout.tools import make_toolbox
from postgrad.testing.tiny import tiny_model, tiny_tokenizer
from postgrad.types import Message, Prompt

pytest.importorskip("trl", minversion="1.16.0", reason="TRL is not installed (pip install postgrad[conformance])")

import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
ROW = {"secret": 7, "level": "easy"}


class Guess:
    """Writes down what it is asked."""

    log: ClassVar[list[Any]] = []

    def reset(self, **kwargs: Any) -> str:
        self.log.append(("reset", kwargs))
        return "Guess."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number to guess.

        Returns:
            Whether it is right.
        """
        return "wrong"

    def get_reward(self) -> float:
        self.log.append(("get_reward",))
        return 0.5


def test_an_environment_is_treated_as_trl_treats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    theirs: list[Any] = []
    monkeypatch.setattr(Guess, "log", theirs)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = GRPOTrainer(
        model=tiny_model("llama", vocab_size=len(tokenizer)),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_completion_length=8, max_steps=1, **options
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Play."}], **ROW}] * 2),
        environment_factory=Guess,
    )
    trainer.train()

    ours: list[Any] = []
    monkeypatch.setattr(Guess, "log", ours)
    toolbox = make_toolbox([trl_environment(Guess)])
    [environment] = toolbox.environments
    prompt = Prompt("d:1", (Message("user", "Play."),), ROW)
    sessions = [toolbox.open([environment.reset_arguments(prompt)]) for _ in range(2)]
    rewards = [end_session(session).reward for session in sessions]

    assert ours == theirs == [("reset", {"prompt": [{"role": "user", "content": "Play."}], **ROW})] * 2 + [("get_reward",)] * 2
    assert [spec.name for spec in toolbox.specs] == [tool.__name__ for tool in trainer.tools] == ["guess"]
    assert rewards == [0.5, 0.5]
    assert trainer.reward_func_names == ["Guess"]
