"""Builds a method from a recipe: loads everything it names, in the order in which faults are cheapest to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from postgrad.data import Pair, Work
from postgrad.models.loading import LanguageModel
from postgrad.models.sampler import LocalSampler
from postgrad.rewards.score import Scorer
from postgrad.rollout.journal import Journals, no_journals
from postgrad.rollout.load import load_attribute
from postgrad.rollout.tools import Toolbox, load_tools
from postgrad.train import setup
from postgrad.train.doctor import RewardWatch
from postgrad.train.dpo import DPO
from postgrad.train.evaluate import Evaluator
from postgrad.train.grpo import GRPO, GRPOParts
from postgrad.train.kto import KTO
from postgrad.train.loop import Method, Reporter
from postgrad.train.model_rewards import Judges
from postgrad.train.notes import grpo_notes, role_notes, sandbox_notes
from postgrad.train.pairing import Pairing, PairingParts, check_columns
from postgrad.train.ppo import PPO, PPOParts
from postgrad.train.presets import loss_settings
from postgrad.train.recipe import DPORecipe, GRPORecipe, PairsRecipe, PPORecipe, Recipe, RewardRecipe, RLRecipe, SampledRecipe, SFTRecipe
from postgrad.train.recorder import IterationRecorder, Recorder
from postgrad.train.reference_logprobs import precomputed
from postgrad.train.reward_model import RewardModelling
from postgrad.train.run_directory import RunDirectory
from postgrad.train.sampling import Sampling
from postgrad.train.sft import SFT, batch_notes
from postgrad.types import Prompt


@dataclass(frozen=True)
class Built:
    """A method that is ready to step, and what the user should know before it does."""

    method: Method
    notes: Sequence[str]
    policy: setup.Policy
    toolbox: Toolbox | None = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """What was loaded: a resumed run must find the same weights, the same chat format, and tools that say the same of themselves."""
        return self.policy.fingerprints | ({"the tools": self.toolbox.fingerprint} if self.toolbox else {})


@contextmanager
def build(recipe: Recipe, base: Path, directory: RunDirectory, reporter: Reporter) -> Iterator[Built]:
    """Load everything the recipe names. Worker processes of the rewards end with the block."""
    with ExitStack() as stack:
        if isinstance(recipe, SFTRecipe):
            yield build_sft(recipe, base, reporter)
        elif isinstance(recipe, PairsRecipe):
            yield build_pairs(recipe, base, directory, reporter, stack)
        elif isinstance(recipe, RewardRecipe):
            yield build_reward_model(recipe, base, reporter)
        elif isinstance(recipe, DPORecipe):
            yield build_dpo(recipe, base, reporter)
        elif isinstance(recipe, PPORecipe):
            yield build_ppo(recipe, base, directory, reporter, stack)
        else:
            yield build_grpo(recipe, base, directory, reporter, stack)


def build_sft(recipe: SFTRecipe, base: Path, reporter: Reporter) -> Built:
    policy = setup.load_policy(recipe)
    data = setup.load_sft(recipe, policy, base, work=reading(reporter))
    engine = setup.make_engine(recipe, policy, with_reference=False)
    method = SFT(recipe, policy, engine, data.train, data.heldout[: recipe.evaluation.rows])
    return Built(method, [*data.notes, *batch_notes(method.batches)], policy)


def build_reward_model(recipe: RewardRecipe, base: Path, reporter: Reporter) -> Built:
    policy = setup.load_scalar_policy(recipe)
    data = setup.load_pairs(recipe, policy, base, work=reading(reporter))
    engine = setup.make_engine(recipe, policy, with_reference=False, reads="values")
    heldout = data.heldout[: recipe.evaluation.rows]
    return Built(RewardModelling(recipe, policy, engine, data.train, heldout, reporter.note), data.notes, policy)


def build_dpo(recipe: DPORecipe, base: Path, reporter: Reporter) -> Built:
    policy = setup.load_policy(recipe)
    if "kto" in recipe.loss.kinds:
        answers = setup.load_answers(recipe, policy, base, work=reading(reporter))
        engine = setup.make_engine(recipe, policy, with_reference=True)
        kto = KTO(recipe, policy, engine, answers.train, answers.heldout[: recipe.evaluation.rows], reporter.note)
        return Built(kto, answers.notes, policy)
    data = setup.load_pairs(recipe, policy, base, work=reading(reporter))
    heldout = data.heldout[: recipe.evaluation.rows]
    once = recipe.loss.needs_reference and recipe.loss.reference == "precomputed"
    engine = setup.make_engine(recipe, policy, with_reference=recipe.loss.needs_reference and not once)

    def known(pairs: Sequence[Pair]) -> list[tuple[list[float], list[float]]] | None:
        return precomputed(pairs, policy, engine, progress=reporter.working) if once else None

    method = DPO(
        recipe, policy, engine, data.train, heldout, reference=known(data.train), heldout_reference=known(heldout), note=reporter.note
    )
    return Built(method, [*data.notes, *dpo_notes(recipe, data.train)], policy)


def dpo_notes(recipe: DPORecipe, pairs: Sequence[Pair]) -> list[str]:
    notes = []
    if set(recipe.loss.kinds) == {"sigmoid"}:
        notes.append("the loss starts at ln 2 = 0.693, where policy and reference are the same; it falls below that, never below 0")
    if pairs and pairs[0].margin is not None:
        notes.append("the column `margin` acts in reward models only; dpo does not read it")
    return notes


def reading(reporter: Reporter) -> Work:
    return Work(progress=lambda share, rows: reporter.working(f"reading, {100 * share:.0f} %", rows))


def sampler_progress(reporter: Reporter) -> Callable[[int, int], None]:
    return lambda tokens, live: reporter.working(f"sampling, {live} rollouts going on", tokens)


def make_evaluator(
    recipe: RLRecipe,
    policy: setup.Policy,
    sampler: LocalSampler,
    toolbox: Toolbox,
    judges: Judges,
    prompts: Sequence[Prompt],
    journals: Journals = no_journals,
) -> Evaluator:
    setup.check_reward_columns(judges.functions.rewards, prompts)
    return Evaluator(
        sampler=sampler,
        chat=policy.chat,
        toolbox=toolbox,
        rollout=setup.rollout_config(recipe.rollout, sampler, samples=recipe.evaluation.samples),
        params=setup.sampling_params(recipe.rollout, policy.chat, temperature=recipe.evaluation.temperature),
        scorer=judges,
        prompts=prompts,
        seed=recipe.seed,
        journals=journals,
    )


def make_sampling(
    recipe: SampledRecipe, base: Path, reporter: Reporter, stack: ExitStack, journals: Journals
) -> tuple[Sampling, Sequence[str]]:
    """What the methods that sample share, and what the data's audit has to say."""
    toolbox = stack.enter_context(load_tools(recipe.tools, base, allow_unsafe_exec=recipe.allow_unsafe_exec))
    named = setup.load_recipe_rewards(recipe, base)
    policy, shared = _loaded(recipe)
    data = setup.load_prompts(recipe, policy, base, toolbox=toolbox, work=reading(reporter))
    setup.check_reward_columns(named.functions, data.train)
    judges = Judges(stack.enter_context(Scorer(named.functions)), named.models(recipe.dtype, shared), toolbox.specs)
    sampler = policy.sampler(max_batch=recipe.sampler.max_batch, progress=sampler_progress(reporter))
    evaluator = None
    if data.heldout and not isinstance(recipe, PairsRecipe):
        evaluator = make_evaluator(recipe, policy, sampler, toolbox, judges, data.heldout[: recipe.evaluation.rows], journals)
    sampling = Sampling(
        policy=policy,
        sampler=sampler,
        params=setup.sampling_params(recipe.rollout, policy.chat),
        toolbox=toolbox,
        rollout=setup.rollout_config(recipe.rollout, sampler),
        judges=judges,
        prompts=data.train,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        evaluator=evaluator,
        journals=journals,
    )
    return sampling, [*sandbox_notes(recipe), *data.notes]


def _loaded(recipe: SampledRecipe) -> tuple[setup.Policy, LanguageModel | None]:
    """The policy, and its model where reward models that were trained on its base may live on it."""
    if isinstance(recipe, PairsRecipe):
        return setup.load_frozen_policy(recipe.model, recipe), None
    policy = setup.load_policy(recipe)
    return policy, policy.model if recipe.adapter is not None else None


def build_pairs(recipe: PairsRecipe, base: Path, directory: RunDirectory, reporter: Reporter, stack: ExitStack) -> Built:
    sampling, notes = make_sampling(recipe, base, reporter, stack, directory.journal)
    check_columns(sampling.prompts)
    return Built(Pairing(recipe, PairingParts(sampling, directory, reporter)), notes, sampling.policy, sampling.toolbox)


def build_grpo(recipe: GRPORecipe, base: Path, directory: RunDirectory, reporter: Reporter, stack: ExitStack) -> Built:
    sampling, notes = make_sampling(recipe, base, reporter, stack, directory.journal)
    rewards = sampling.judges.rewards
    watch = RewardWatch.of(recipe, rewards, directory, reporter)
    parts = GRPOParts(
        sampling=sampling,
        engine=setup.make_engine(recipe, sampling.policy, with_reference=recipe.loss.kl_coef > 0),
        hook=None if recipe.loss.advantages is None else load_attribute(recipe.loss.advantages, base),
        record=Recorder(directory, reporter, rewards, loss_settings(recipe.loss, recipe.rollout).scheme, watch),
    )
    return Built(GRPO(recipe, parts), [*notes, *grpo_notes(recipe, rewards, sampling.policy)], sampling.policy, sampling.toolbox)


def build_ppo(recipe: PPORecipe, base: Path, directory: RunDirectory, reporter: Reporter, stack: ExitStack) -> Built:
    sampling, notes = make_sampling(recipe, base, reporter, stack, directory.journal)
    parts = PPOParts(
        sampling=sampling,
        actor=setup.make_engine(recipe, sampling.policy, with_reference=recipe.loss.kl_coef > 0),
        critic=setup.make_critic(recipe, sampling.policy),
        record=IterationRecorder(directory, reporter, RewardWatch.of(recipe, sampling.judges.rewards, directory, reporter)),
        note=reporter.note,
    )
    return Built(
        PPO(recipe, parts), [*notes, *role_notes(recipe, sampling.judges.models, sampling.policy)], sampling.policy, sampling.toolbox
    )
