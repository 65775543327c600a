"""TRL's side of a comparison: its own trainers and its own training loop, made to wait for a command before every step.

    python -m benchmarks.theirs METHOD --model FOLDER --dtype float32|bfloat16 [--whole-batch] [--config JSON]

Samples are forced as on our side (see `ours`): full turns; in agent runs the first turns are generated, then replaced by a call of the
tool; in a `check` nothing is generated. Runs in an environment with TRL; imports nothing of postgrad.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from benchmarks import workloads
from benchmarks.worker import Channel, Meter, peak_mib, resident_mib, restart_peak


def batch(rows: int, at_once: int) -> dict[str, int]:
    """`rows` of a step, `at_once` in a micro-batch: few at once waste little on padding. What was fastest is used below."""
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": rows // at_once}


COMMON: dict[str, Any] = {
    "max_steps": workloads.STEPS, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-6, "use_cpu": True,
    "lr_scheduler_type": "constant", "gradient_checkpointing": False, "disable_tqdm": True, "seed": 0,
    "train_sampling_strategy": "sequential",
}  # fmt: skip
ROLLOUTS = workloads.PROMPTS * workloads.GROUP
_DPO = {"max_length": 512, **batch(workloads.PAIRS, 2)}
_REWARD = {"max_length": 512, **batch(workloads.PAIRS, workloads.PAIRS)}
_GRPO = {
    "num_generations": workloads.GROUP, "beta": 0.0, "loss_type": "grpo", "shuffle_dataset": False,
    "max_completion_length": workloads.COMPLETION, "generation_kwargs": {"min_new_tokens": workloads.COMPLETION}, **batch(ROLLOUTS, 2),
}  # fmt: skip
_AGENT = _GRPO | {
    "max_completion_length": 512,
    "generation_kwargs": {"min_new_tokens": workloads.AGENT_TURN, "max_new_tokens": workloads.AGENT_TURN},
}
CONFIGS: dict[str, tuple[type, type, dict[str, Any], Callable[[], Sequence[dict[str, Any]]]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"max_length": 512, **batch(8, 1)}, workloads.sft_rows),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, _DPO, workloads.pair_rows),
    "dpo_cached": (trl.DPOTrainer, trl.DPOConfig, _DPO | {"precompute_ref_log_probs": True}, workloads.pair_rows),
    "reward": (trl.RewardTrainer, trl.RewardConfig, _REWARD, workloads.pair_rows),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, _GRPO, workloads.prompt_rows),
    "decoding": (trl.GRPOTrainer, trl.GRPOConfig, _GRPO, workloads.prompt_rows),
    "agent": (trl.GRPOTrainer, trl.GRPOConfig, _AGENT, workloads.question_rows),
    "startup": (trl.SFTTrainer, trl.SFTConfig, batch(1, 1), workloads.sft_rows),
}
"""Per method: trainer, config, what is set beside `COMMON`, rows. Other settings that were tried are on docs/benchmarks.md."""


class OneStepAtATime(TrainerCallback):
    """The trainer's loop waits for a command before each step and answers after it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.command = ""
        self.parts: dict[str, float] = {}
        self.step: dict[str, Any] = {}

    def on_step_begin(self, *arguments: Any, **state: Any) -> None:
        self.command = self.channel.receive()
        self.parts.clear()
        self.meter = Meter()

    def on_step_end(self, *arguments: Any, **state: Any) -> None:
        self.step = self.meter.read() | {"parts": dict(self.parts), "peak_mib": peak_mib()}

    def on_log(self, *arguments: Any, logs: dict[str, float] | None = None, **state: Any) -> None:
        if logs and "grad_norm" in logs:
            self.channel.send(self.step | {"loss": logs["loss"], "grad_norm": logs["grad_norm"]})


class ForcedGeneration:
    """Stands in front of the trainer's `_generate_single_turn`."""

    def __init__(self, trainer: Any, clock: OneStepAtATime, tokenizer: Any, *, agent: bool) -> None:
        self.real = trainer._generate_single_turn
        self.trainer, self.clock, self.tokenizer, self.agent = trainer, clock, tokenizer, agent
        self.turn = 0

    def __call__(self, prompt_ids: list[list[int]], *arguments: Any, **options: Any) -> tuple[list[list[int]], Any]:
        check = self.clock.command == "check"
        last = not self.agent or self.turn % workloads.AGENT_TURNS == workloads.AGENT_TURNS - 1
        self.turn += 1
        if not check:
            meter = Meter()
            ids, logprobs = self.real(prompt_ids, *arguments, **options)
            self.clock.parts["generate"] = self.clock.parts.get("generate", 0.0) + meter.seconds()
            if last:
                return ids, logprobs
        first = self.trainer.state.global_step * workloads.PROMPTS * workloads.GROUP
        longest = workloads.AGENT_TURN if self.agent else workloads.COMPLETION
        texts = [workloads.forced_text(first + row, longest) if last else workloads.CALL for row in range(len(prompt_ids))]
        return [[*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id] for text in texts], None


def load(method: str, folder: str) -> tuple[Any, Any]:
    """Model in fp32, as postgrad keeps it, and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if method == "agent":
        tokenizer.chat_template = template()
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    model: Any = kind.from_pretrained(folder, dtype=torch.float32, **({"num_labels": 1} if method == "reward" else {}))
    if method == "reward":
        torch.manual_seed(0)
        torch.nn.init.normal_(model.score.weight, std=0.02)
        tokenizer.pad_token = "<|endoftext|>"  # with the end token as padding, transformers would read the score before the end token
    model.config.pad_token_id = tokenizer.pad_token_id
    for weight in model.parameters():
        weight.sum()  # it lies in a mapped file until it is read
    return model, tokenizer


def template() -> str:
    """A chat template that this version of TRL knows how to parse calls of."""
    return (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=CONFIGS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--whole-batch", action="store_true", help="one micro-batch")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    channel = Channel()
    trainer_kind, config_kind, settings, rows = CONFIGS[args.method]
    if args.whole_batch:
        every = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
        settings = settings | batch(every, every)
    model, tokenizer = load(args.method, args.model)
    loaded = resident_mib()
    restart_peak()
    clock = OneStepAtATime(channel)
    with tempfile.TemporaryDirectory() as folder:
        config = config_kind(**COMMON | settings | {"output_dir": folder, "bf16": args.dtype == "bfloat16"} | args.config)
        extra: dict[str, Any] = {}
        if trainer_kind is trl.GRPOTrainer:
            extra["reward_funcs"] = workloads.spread
        if args.method == "agent":
            extra["tools"] = [workloads.multiply]
        data = Dataset.from_list(list(rows()))
        trainer = trainer_kind(model=model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[clock], **extra)
        if trainer_kind is trl.GRPOTrainer:
            trainer._generate_single_turn = ForcedGeneration(trainer, clock, tokenizer, agent=args.method == "agent")
        if args.method == "agent":
            trainer.tools = [workloads.MULTIPLY]
        versions = {"trl": trl.__version__, "torch": torch.__version__}
        channel.send({"loaded_mib": loaded, "versions": versions, **({"template": template()} if args.method == "agent" else {})})
        if args.method == "decoding":
            decode(trainer, tokenizer, channel)
        trainer.train()


def decode(trainer: Any, tokenizer: Any, channel: Channel) -> None:
    """Generation alone, on the prompts of one step after the other."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in workloads.prompt_rows()]
    generate = trainer._generate_single_turn.real
    for start in range(0, len(prompts), workloads.PROMPTS):
        channel.receive()
        meter = Meter()
        ids, _ = generate(
            [ids for ids in prompts[start : start + workloads.PROMPTS] for _ in range(workloads.GROUP)], None, {}, workloads.GROUP
        )
        channel.send(meter.read() | {"parts": {}, "peak_mib": peak_mib(), "tokens": sum(map(len, ids))})


if __name__ == "__main__":
    main()
