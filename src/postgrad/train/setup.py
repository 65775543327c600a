"""Turns a validated recipe into the objects that a method works with: policy, engine, sampler, data, tools, rewards.

Everything that can be wrong with files, columns and names is found here, before the first step.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from postgrad.chat.format import ChatFormat
from postgrad.data import (
    DEFAULT_WORK,
    Cache,
    DataReport,
    LabelledAnswer,
    Pair,
    RowSource,
    Work,
    load_rows,
    prepare_preferences,
    prepare_prompts,
    prepare_sft,
    prepare_unpaired,
)
from postgrad.data.cache import file_sha256
from postgrad.errors import RecipeError, about
from postgrad.models.engine import LocalEngine, OptimizerConfig
from postgrad.models.loading import LanguageModel, load
from postgrad.models.lora import base_of
from postgrad.models.reference import reference_of
from postgrad.models.role_engine import RoleEngine
from postgrad.models.roles import add_critic
from postgrad.models.sampler import LocalSampler
from postgrad.models.saving import save
from postgrad.models.scalar import load_scalar
from postgrad.models.serving import serving_dtype
from postgrad.protocols import SamplingParams
from postgrad.rewards.combine import STEP
from postgrad.rewards.load import LoadedReward, check_columns, load_rewards
from postgrad.rollout import RolloutConfig
from postgrad.rollout.tools import Toolbox, load_tools
from postgrad.train.datasets import Dataset, data_files, dataset, open_file, open_rows
from postgrad.train.model_rewards import ModelReward, check_model_reward, load_model_reward, names_model
from postgrad.train.recipe import (
    Base,
    DPORecipe,
    GRPORecipe,
    PPORecipe,
    Recipe,
    Reward,
    RewardRecipe,
    RLRecipe,
    Rollout,
    SampledRecipe,
    SFTRecipe,
    Training,
    TrainingRecipe,
)
from postgrad.types import Prompt, TrainRow


@dataclass(frozen=True)
class Policy:
    """A model and how conversations become its tokens. frozen: nothing is trained, so its sampler may take the model over."""

    model: LanguageModel
    chat: ChatFormat
    frozen: bool = False

    @property
    def fingerprints(self) -> dict[str, str]:
        """What was loaded, for whoever comes back to a run: the same weights and the same chat format."""
        return {"the model's weights": self.model.fingerprint, "the tokenizer or chat template": self.chat.fingerprint}

    def export(self, folder: Path, facts: Mapping[str, str]) -> None:
        """Writes the model with the chat template it was trained with."""
        save(self.model, folder, facts=facts, chat_template=self.chat.template_source)

    def sampler(self, *, max_batch: int = 256, progress: Callable[[int, int], None] | None = None) -> LocalSampler:
        """A sampler in the precision that the trainer computes in. Of a frozen policy there is one: afterwards the model is its own."""
        model = self.model.model
        dtype = serving_dtype(model.device, self.model.autocast)
        return LocalSampler(model, decode=self.chat.decode, dtype=dtype, owned=self.frozen, max_batch=max_batch, progress=progress)


def load_policy(recipe: Training) -> Policy:
    return _policy(load(recipe.model, adapter=recipe.adapter, dtype=recipe.dtype, seed=recipe.seed), recipe)


def load_frozen_policy(model: str, recipe: Base | None = None) -> Policy:
    """For generating and evaluating: nothing is trained. Precision and chat format are the recipe's, if there is one."""
    return replace(_policy(load(model, dtype=recipe.dtype if recipe else "auto", trainable=False), recipe), frozen=True)


def load_scalar_policy(recipe: Training) -> Policy:
    """A model with a scalar head, for reward models."""
    return _policy(load_scalar(recipe.model, adapter=recipe.adapter, dtype=recipe.dtype, seed=recipe.seed), recipe)


def load_critic(recipe: PPORecipe) -> Policy:
    """The critic: the policy's model with a new head, or the model that the recipe names, whose head is kept if it has one."""
    model = load_scalar(recipe.critic.model or recipe.model, adapter=recipe.adapter, dtype=recipe.dtype, seed=recipe.seed)
    return Policy(model, ChatFormat(model.tokenizer, stop_ids=model.stop_ids))


def _policy(model: LanguageModel, recipe: Base | None) -> Policy:
    if recipe is None:
        chat = ChatFormat(model.tokenizer, stop_ids=model.stop_ids)
        chat.require_end()
        return Policy(model, chat)
    chat = ChatFormat(model.tokenizer, stop_ids=model.stop_ids, tool_protocol=recipe.tool_protocol, template=recipe.chat_template)
    chat.require_end()
    return Policy(model, chat)


def make_engine(
    recipe: TrainingRecipe, policy: Policy, *, with_reference: bool, reads: Literal["logprobs", "values"] = "logprobs"
) -> LocalEngine:
    """The engine of a run. The reference is made here, before any checkpoint is restored: it is the policy at the start."""
    return LocalEngine(
        policy.model.model, reference=reference_of(policy.model) if with_reference else None, reads=reads, **_engine_options(recipe, policy)
    )


def make_critic(recipe: PPORecipe, policy: Policy) -> LocalEngine:
    """The critic's engine: with an adapter it lives on the actor's frozen base, otherwise it is a model of its own."""
    if recipe.adapter is not None and recipe.critic.model is None:
        return RoleEngine(add_critic(policy.model, recipe.adapter, seed=recipe.seed), **_engine_options(recipe, policy))
    return make_engine(recipe, load_critic(recipe), with_reference=False, reads="values")


def _engine_options(recipe: TrainingRecipe, policy: Policy) -> dict[str, Any]:
    optimizer = recipe.optimizer
    return {
        "tokens_per_micro_batch": recipe.batch.tokens_per_micro_batch,
        "autocast": policy.model.autocast,
        "optimizer": OptimizerConfig(betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay),
        "max_grad_norm": optimizer.max_grad_norm,
        # Elsewhere log-probs or scores are compared: with dropout, policy and reference would differ at the start.
        "dropout": recipe.method == "sft",
        "seed": recipe.seed,
    }


def load_sft(recipe: SFTRecipe, policy: Policy, base: Path, *, work: Work = DEFAULT_WORK) -> Dataset[TrainRow]:
    """Training and held-out rows, tokenised."""
    train, heldout = open_rows(recipe, base)
    with load_tools(recipe.tools, base, to_run=False) as toolbox:
        tools = toolbox.specs

    def prepare(rows: RowSource) -> tuple[Sequence[TrainRow], DataReport]:
        data = prepare_sft(
            rows, policy.chat, max_length=recipe.data.max_length, overlong=recipe.data.overlong, train_on=recipe.data.train_on, tools=tools,
            text_prompts=recipe.data.text_prompts, work=work, cache=Cache(),
        )  # fmt: skip
        _check_positions(data.report, policy)
        return data.rows, data.report

    return dataset(train, heldout, prepare, seed=recipe.seed)


def _check_positions(report: DataReport, policy: Policy, *, to_write: int = 0) -> None:
    """Raises `RecipeError` when a row is longer than the model can read, less the tokens that it is to write behind it."""
    positions = getattr(base_of(policy.model.model).config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and report.lengths.longest > positions - to_write:
        what = f"a row has {report.lengths.longest} tokens, the model takes {positions}{' with what it writes' if to_write else ''}"
        raise RecipeError(what, key="data.max_length", hint=f"set data.max_length to {positions - to_write} or less")


def load_pairs(recipe: RewardRecipe | DPORecipe, policy: Policy, base: Path, *, work: Work = DEFAULT_WORK) -> Dataset[Pair]:
    """Training and held-out preference pairs."""
    train, heldout = open_rows(recipe, base)

    def prepare(rows: RowSource) -> tuple[Sequence[Pair], DataReport]:
        data = prepare_preferences(
            rows, policy.chat, max_length=recipe.data.max_length, overlong=recipe.data.overlong, text_prompts=recipe.data.text_prompts,
            work=work, cache=Cache(),
        )  # fmt: skip
        _check_positions(data.report, policy)
        return data.pairs, data.report

    return dataset(train, heldout, prepare, seed=recipe.seed)


def load_answers(recipe: DPORecipe, policy: Policy, base: Path, *, work: Work = DEFAULT_WORK) -> Dataset[LabelledAnswer]:
    """Training and held-out labelled answers; a file of pairs gives two of each."""
    train, heldout = open_rows(recipe, base)
    if train.format == "preference":
        pairs = load_pairs(recipe, policy, base, work=work)
        return Dataset(
            as_answers(pairs.train), as_answers(pairs.heldout), [*pairs.notes, "each pair became a desirable and an undesirable answer"]
        )

    def prepare(rows: RowSource) -> tuple[Sequence[LabelledAnswer], DataReport]:
        data = prepare_unpaired(
            rows, policy.chat, max_length=recipe.data.max_length, overlong=recipe.data.overlong, text_prompts=recipe.data.text_prompts,
            work=work, cache=Cache(),
        )  # fmt: skip
        _check_positions(data.report, policy)
        return data.answers, data.report

    return dataset(train, heldout, prepare, seed=recipe.seed)


def as_answers(pairs: Sequence[Pair]) -> list[LabelledAnswer]:
    """Each pair as a desirable and an undesirable answer."""
    return [
        LabelledAnswer(pair.name, pair.prompt_ids, answer, label)
        for pair in pairs
        for answer, label in ((pair.chosen, True), (pair.rejected, False))
    ]


def load_prompts(recipe: SampledRecipe, policy: Policy, base: Path, *, toolbox: Toolbox, work: Work = DEFAULT_WORK) -> Dataset[Prompt]:
    """Training and held-out prompts."""
    train, heldout = open_rows(recipe, base)
    return dataset(train, heldout, lambda rows: _prompts(rows, recipe, policy, toolbox, work), seed=recipe.seed)


def load_heldout(recipe: RLRecipe, policy: Policy, base: Path, *, file: str | None, toolbox: Toolbox) -> Sequence[Prompt]:
    """The recipe's held-out prompts, or those of another file, read as the recipe reads its own."""
    rows = open_rows(recipe, base)[1] if file is None else open_file(file, recipe, base)
    if rows is None:
        raise RecipeError("nothing to evaluate on: the recipe has no data.eval", key="data.eval", hint="pass --data FILE")
    return _prompts(rows, recipe, policy, toolbox, DEFAULT_WORK)[0]


def _prompts(rows: RowSource, recipe: SampledRecipe, policy: Policy, toolbox: Toolbox, work: Work) -> tuple[Sequence[Prompt], DataReport]:
    data = prepare_prompts(
        rows, policy.chat, max_prompt_tokens=recipe.data.max_length, overlong=recipe.data.overlong, tools=toolbox.specs,
        system=recipe.system, text_prompts=recipe.data.text_prompts, work=work,
    )  # fmt: skip
    _check_positions(data.report, policy, to_write=1)
    return data.prompts, data.report


def read_prompts(file: Path, policy: Policy, toolbox: Toolbox, *, system: str | None) -> list[Prompt]:
    """Prompts of a file outside of any recipe; none is too long here, the sampler says so if one is."""
    return prepare_prompts(load_rows(file), policy.chat, tools=toolbox.specs, system=system).prompts


@dataclass(frozen=True)
class NamedRewards:
    """What `rewards:` names: functions, which are loaded, and folders of reward models, which `models` loads."""

    functions: list[LoadedReward]
    folders: list[tuple[Reward, Path]]

    def models(self, dtype: str, policy: LanguageModel | None = None) -> list[ModelReward]:
        """With a policy that has an adapter, those that were trained on its base share it."""
        return [load_model_reward(reward, folder, dtype=dtype, policy=policy) for reward, folder in self.folders]


def load_recipe_rewards(recipe: SampledRecipe, base: Path) -> NamedRewards:
    found = [(reward, names_model(reward, base)) for reward in recipe.rewards]
    named = {index: reward.model_dump() for index, (reward, folder) in enumerate(found) if folder is None}
    functions = load_rewards(named, base, allow_unsafe_exec=recipe.allow_unsafe_exec)
    folders = {index: (reward, folder) for index, (reward, folder) in enumerate(found) if folder is not None}
    for index, (reward, _) in folders.items():
        with about(f"rewards[{index}]"):
            check_model_reward(reward)
    names = [reward.name for reward in functions] + [reward.name or "reward_model" for reward, _ in folders.values()]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise RecipeError(f"two rewards are named {double!r}", key="rewards", hint="give one of them a name: …")
    return NamedRewards(functions, list(folders.values()))


def check_reward_columns(rewards: Sequence[LoadedReward], prompts: Sequence[Prompt]) -> None:
    """Every column that a reward asks for stands in every row; the optimizer step is the run's own."""
    common = frozenset.intersection(*(frozenset(prompt.columns) for prompt in prompts))
    check_columns(rewards, common, given={STEP})


def rollout_config(rollout: Rollout, sampler: LocalSampler, *, samples: int | None = None) -> RolloutConfig:
    return RolloutConfig(
        group_size=rollout.group_size if samples is None else samples,
        max_tokens=rollout.max_tokens,
        max_total_tokens=rollout.max_total_tokens,
        max_context_tokens=sampler.max_positions,
        max_turns=rollout.max_turns,
        max_invalid_turns=rollout.max_invalid_turns,
        tool_deadline_s=rollout.tool_deadline_s,
        max_output_tokens=rollout.max_output_tokens,
        max_output_chars=rollout.max_output_chars,
        max_calls_per_turn=rollout.max_calls_per_turn,
        history=rollout.history,
    )


def sampling_params(rollout: Rollout, chat: ChatFormat, *, temperature: float | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=chat.stop_ids,
        stop_strings=tuple(rollout.stop_strings),
    )


def input_hashes(recipe: Recipe, base: Path) -> dict[str, str]:
    """sha256 of everything local that the run's numbers depend on: data, reward and tool files with the modules beside them that they
    import, reward models, the critic's model."""
    rewards = recipe.rewards if isinstance(recipe, SampledRecipe) else []
    tools = recipe.tools if isinstance(recipe, SFTRecipe | SampledRecipe) else []
    hooks = [recipe.loss.advantages] if isinstance(recipe, GRPORecipe) and recipe.loss.advantages is not None else []
    code = {name for tool in tools for name in tool.files} | {item.split(":")[0] for item in [*hooks, *(reward.use for reward in rewards)]}
    paths = data_files(recipe.data, base) | {name: base / name for name in (*code, *local_imports(sorted(code), base))}
    hashes = {name: file_sha256(path) for name, path in sorted(paths.items()) if path.is_file()}
    folders: dict[str, Path | None] = {reward.use: names_model(reward, base) for reward in rewards}
    if isinstance(recipe, PPORecipe) and recipe.critic.model is not None:
        folders[recipe.critic.model] = Path(recipe.critic.model)
    for name, folder in sorted(folders.items()):
        if folder is not None and folder.is_dir():  # two models of one name: a change of either counts
            hashes[_short(name)] = hashes.get(_short(name), "") + _folder_sha256(folder)
    return hashes


def _short(name: str) -> str:
    """A model's name that stays when a run is moved: the folder's own, with the stage's before `model`."""
    path = Path(name)
    return "/".join(path.parts[-2:]) if path.name == "model" else path.name


def _folder_sha256(folder: Path) -> str:
    files = sorted(path for path in folder.glob("*") if path.suffix in {".safetensors", ".json", ".jinja"})
    return hashlib.sha256("".join(f"{path.name} {file_sha256(path)}\n" for path in files).encode()).hexdigest()


def local_imports(files: Sequence[str], base: Path) -> list[str]:
    """Python modules beside these files that they import, directly or through one another, as paths relative to `base`."""
    found: list[str] = []
    waiting = [name for name in files if name.endswith(".py")]
    while waiting:
        path = base / waiting.pop()
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):  # reported where the file is loaded
            continue
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        for module in sorted(name.split(".")[0] for name in names):
            beside = path.parent / f"{module}.py"
            name = os.path.relpath(beside, base)
            if beside.is_file() and name not in found:
                found.append(name)
                waiting.append(name)
    return found
