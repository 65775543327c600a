"""Recipes: what a YAML file may say, per method. A key exists only where it acts; an unknown key is an error.

Reading the file (lines, overrides, error messages) is `recipe_file`; this module only says what is allowed and what it means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from postgrad.chat import BUILT_IN, ToolProtocol
from postgrad.data.columns import check_columns
from postgrad.errors import RecipeError
from postgrad.rollout.items import ToolItem
from postgrad.suggest import nearest


def _no_bool(value: Any) -> Any:
    """`true` is no number, although Python says so."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return value


def _meant(columns: dict[str, Any]) -> dict[str, Any]:
    try:
        check_columns(columns)
    except RecipeError as error:
        raise PydanticCustomError("columns", "{message}", {"message": f"{error.what}; {error.hint}"}) from error
    return columns


ColumnMap = Annotated[dict[str, Any], AfterValidator(_meant)]
PositiveInt = Annotated[int, BeforeValidator(_no_bool), Field(gt=0)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(gt=0.0, le=1.0)]
Finite = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_no_bool), Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0.0, allow_inf_nan=False)]
Seed = Annotated[int, BeforeValidator(_no_bool)]
PresetName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]


def _refuse(key: str, message: str) -> PydanticCustomError:
    """An error about a combination of keys, reported at `key`."""
    return PydanticCustomError("combination", "{message}", {"key": key, "message": message})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Adapter(Section):
    kind: Literal["lora"]
    """Without `adapter:` every weight is trained."""
    rank: PositiveInt = 16
    alpha: Positive | None = None
    """Scale of the adapter is alpha / rank; left out = 2 × rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"


class Optimizer(Section):
    """AdamW."""

    learning_rate: Positive = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its full value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up; linear and cosine end at 0 after the last step."""
    weight_decay: NonNegative = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    """A gradient with a larger 2-norm is scaled down to it."""


class Checkpoint(Section):
    every: PositiveInt = 50
    """Save after every this many steps; the last step and an interruption always save."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; the last one that verifies is never removed."""


class Join(Section):
    file: str
    """A file of the kinds that `train` names, relative to the recipe; each row has its own value in the column `by`."""
    by: str
    """The column that both files have, such as `id`."""


class Source(Section):
    file: str
    """A .jsonl, .json, .jsonl.gz, .parquet, .csv or .arrow file (relative to the recipe), or a hub id."""
    weight: Positive = 1.0
    """How often each row comes in one epoch: 2 = twice, 0.5 = a half of the rows, chosen by the seed."""
    columns: ColumnMap = {}
    """The map for this file; left out = `data.columns`."""
    join: Join | None = None
    """The file to join to this one; left out = `data.join`."""


class TrainData(Section):
    train: str | Annotated[list[str | Source], Field(min_length=1)]
    """A .jsonl, .json, .jsonl.gz, .parquet, .csv or .arrow file (relative to the recipe), a hub id, the run directory of a `pairs` run,
    or `stage:NAME` in a pipeline; or a list of them, with weights."""
    columns: ColumnMap = {}
    """Maps the file's columns to a format postgrad knows: a field, or a role, to a column or several; see docs/data.md."""
    join: Join | None = None
    """Another file whose columns each row gets: a benchmark's answers, kept apart from its questions. Also for `eval`."""
    text_prompts: Literal["chat", "raw"] = "chat"
    """Whether a text prompt becomes a user message of the chat template, or stays raw text."""
    max_bad: Annotated[int, Field(ge=0)] = 0
    """Rejected rows (bad JSON, bad shape) that are tolerated; each is reported with file:line."""
    shuffle: bool = True
    """A new order in every epoch, keyed by the seed; false = as the file stands."""


class Data(TrainData):
    eval: str | Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Held-out rows: named as in `train` (of a `pairs` run its held-out pairs), or the share of the training rows to hold out; left out =
    no evaluation."""


class SFTData(Data):
    max_length: PositiveInt = 1024
    """Longest row, in tokens."""
    overlong: Literal["drop", "cut", "error"] = "drop"
    """What happens to a longer row. A cut answer is never given an end token."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are trained: every assistant turn, the last one, or every token."""


class TrainPrompts(TrainData):
    max_length: PositiveInt = 1024
    """Longest prompt, in tokens."""
    overlong: Literal["drop", "error"] = "drop"
    """What happens to a longer prompt; a prompt is never cut."""


class PromptData(TrainPrompts, Data):
    """Prompts to train on, and others to evaluate on."""


class SFTBatch(Section):
    rows: PositiveInt | None = None
    """Rows of one optimizer step; left out with `tokens` left out = 8."""
    tokens: PositiveInt | None = None
    """Fill each step with whole rows up to this many tokens, instead of a number of rows. No row is ever split."""
    tokens_per_micro_batch: PositiveInt = 1024
    """Tokens computed at once: memory, not mathematics. On a CPU more of them are no faster; an accelerator may want more."""

    @model_validator(mode="after")
    def _one_size(self) -> SFTBatch:
        if self.rows is not None and self.tokens is not None:
            raise _refuse("tokens", "set rows or tokens, not both")
        return self


class GRPOBatch(Section):
    prompts: PositiveInt = 8
    """Prompts of one rollout batch; it holds prompts × rollout.group_size rollouts."""
    minibatches: PositiveInt = 1
    """Optimizer steps that one pass over a rollout batch is split into (whole groups)."""
    epochs: PositiveInt = 1
    """Passes over one rollout batch. More than one update per batch makes later ones off-policy: the ratio and its clip act."""
    tokens_per_micro_batch: PositiveInt = 2048
    """Tokens computed at once: memory, not mathematics. On a CPU more of them are no faster; an accelerator may want more."""

    @model_validator(mode="after")
    def _whole_groups(self) -> GRPOBatch:
        if self.prompts % self.minibatches:
            valid = [n for n in range(1, self.prompts + 1) if self.prompts % n == 0]
            raise _refuse("minibatches", f"must divide prompts = {self.prompts}: one of {valid}")
        return self


class Rollout(Section):
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts per prompt, at least 2."""
    temperature: Positive = 1.0
    top_p: Fraction = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    stop_strings: list[str] = []
    """The rollout also ends when the model has written one of these."""
    max_tokens: PositiveInt = 256
    """Tokens the model may write in one turn."""
    max_total_tokens: PositiveInt | None = None
    """Token budget of the whole rollout after its prompt, tool results included; left out = no limit but the turns'."""
    max_turns: PositiveInt = 8
    max_invalid_turns: PositiveInt = 3
    """Consecutive turns with only malformed or unknown calls after which the rollout ends."""
    tool_deadline_s: Positive = 5.0
    max_output_tokens: PositiveInt | None = None
    """Tokens of one tool result; left out = only max_output_chars limits it."""
    max_calls_per_turn: PositiveInt | None = None
    """Tool calls of one turn that are made; the others are refused. Left out = all."""
    max_output_chars: PositiveInt = 4000
    history: Literal["append", "fork"] = "append"
    """What happens when the chat template rewrites earlier turns: keep appending, or fork into a second training row."""
    refill: Annotated[int, Field(ge=0)] = 0
    """How many more times a batch whose groups were filtered away may draw new prompts to become full (dynamic sampling)."""


class Reward(Section):
    use: str
    """`file.py:function` (relative to the recipe) or the name of a shipped reward."""
    weight: Finite = 1.0
    role: Literal["outcome", "shaping"] | None = None
    """Left out = what the reward itself declares."""
    name: str | None = None
    args: dict[str, Any] = {}
    """Keyword arguments that are bound to the function."""
    deadline_s: Positive | None = None
    """Seconds one call may take; left out = what the reward itself declares, else 5."""
    on_error: Literal["abstain", "stop"] = "abstain"
    """What an exception, a crash or a missed deadline does: the rollout is left out of this reward and counted, or the run stops."""
    on_nonfinite: Literal["abstain", "stop"] = "stop"
    """The same for an infinite value. NaN always abstains and is counted."""


class GRPOLoss(Section):
    preset: PresetName = "grpo"
    clip_low: NonNegative | None = None
    """ε_low; left out = the preset's."""
    clip_high: NonNegative | None = None
    """ε_high; left out = the preset's."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Two-sided clip: upper bound on the ratio under a negative advantage (left out = unbounded, as in the paper)."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL term to the policy as it was at the start; 0 = no reference model is kept."""
    kl_in: Literal["loss"] = "loss"
    """Where the KL term goes."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    filter: Literal["none", "zero_std", "outcome"] = "none"
    """Which whole groups are left out of the batch: those with equal totals, or with equal outcome rewards."""
    scale: Literal["group", "batch", "none", "leave_one_out"] | None = None
    """How advantages are scaled; left out = the preset's."""
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """normalize_then_sum: each reward is normalised within its group before they are added by weight, then the sum over the batch (GDPO): a
    reward's range then has no effect, its weight has, and rewards that cancel in the sum still count."""
    positive_weight: NonNegative = 1.0
    """λ: advantages above 0 are multiplied by it. Below 1 mistakes teach more than successes: a penalty that exceeds the reward, also
    where a group has two levels of reward and the size of a penalty has no effect; 0 = only mistakes teach; 1 = as they are."""
    credit: Literal["rollout", "turn", "state"] = "rollout"
    """What the tokens of a turn are credited with: the rollout's advantage; what came of the turn, compared with the same turn of the other
    rollouts; or the rollout's, and that of the turn among turns that began in the same state (GiGPO). See docs/agents.md."""
    turn_discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Weight of a reward one turn later, with credit by turn or state."""
    state_weight: NonNegative = 1.0
    """Weight of the turn's part, with credit by state."""
    advantages: str | None = None
    """`file.py:function` of your own: from a group and its rewards (name → one value per rollout) to one entry per rollout, a number or
    one number per sampled token. Replaces credit, scale, normalize and positive_weight."""
    constant_length: PositiveInt | None = None
    """Length that `dr_grpo` divides by; left out = rollout.max_total_tokens or max_tokens × max_turns."""
    mask_truncated: bool = False
    """Leave rollouts that a limit ended out of the loss and its denominator (they still count in their group's mean)."""
    old_logprobs: Literal["sampler", "policy"] | None = None
    """Where π_old of the ratio comes from: the sampler's log-probs, or the policy's before the first update. Left out = the preset's."""

    @model_validator(mode="after")
    def _ranges(self) -> GRPOLoss:
        if self.clip_low is not None and self.clip_low >= 1.0:
            raise _refuse("clip_low", "must be below 1: the ratio is clipped to [1 - clip_low, 1 + clip_high]")
        if self.constant_length is not None and self.preset != "dr_grpo":
            raise _refuse("constant_length", f"acts only in dr_grpo; {self.preset} does not divide by a constant length")
        if self.max_ratio is not None and self.preset in ("cispo", "rloo"):
            raise _refuse("max_ratio", f"bounds a clipped ratio; {self.preset} clips no ratio that way")
        if self.preset == "rloo" and (self.clip_low is not None or self.clip_high is not None):
            raise _refuse("clip_low" if self.clip_low is not None else "clip_high", "rloo is plain REINFORCE: it clips nothing")
        if self.credit == "rollout" and self.turn_discount != 1.0:
            raise _refuse("turn_discount", "acts only with credit: turn or credit: state")
        if self.credit != "state" and self.state_weight != 1.0:
            raise _refuse("state_weight", "acts only with credit: state")
        if self.advantages is not None:
            plain = {"credit": "rollout", "scale": None, "normalize": "sum_then_normalize", "positive_weight": 1.0}
            for name, value in plain.items():
                if getattr(self, name) != value:
                    raise _refuse(name, "does nothing beside `advantages`, whose function makes the advantages")
        if self.normalize == "normalize_then_sum" and self.scale is not None:
            raise _refuse("scale", "normalize_then_sum scales each reward by its group and the sum by the batch; leave scale out")
        return self


class PairData(Data):
    max_length: PositiveInt = 1024
    """Longest side of a pair, prompt included, in tokens."""
    overlong: Literal["drop", "cut", "error"] = "drop"
    """What happens to a longer pair. A cut answer is never given an end token."""


class PairBatch(Section):
    pairs: PositiveInt = 8
    """Pairs (or labelled answers) of one optimizer step."""
    tokens_per_micro_batch: PositiveInt = 512
    """Tokens computed at once: memory, not mathematics. On a CPU more of them are no faster; an accelerator may want more."""


class RewardLoss(Section):
    center_coef: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)², which holds the scores around 0; 0.01 is usual."""


class DPOLoss(Section):
    kind: str | dict[str, Positive] = "sigmoid"
    """A loss, or several with weights, e.g. {sigmoid: 0.8, bco_pair: 0.2, sft: 1.0}; see `train/dpo.py`. kto takes labelled answers."""
    beta: Positive = 0.1
    """How closely the policy is held to the reference."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of the labels believed to be flipped; read by sigmoid, robust, exo_pair (which needs it), aot, aot_unpaired."""
    divergence: Literal["reverse_kl", "forward_kl", "js"] = "reverse_kl"
    length_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Weight of the tokens beyond the other answer's length (LD-DPO); 1 = all tokens count alike."""
    gamma: Finite = 1.0
    """simpo's margin."""
    desirable_weight: Positive = 1.0
    """kto's weight of desirable answers."""
    undesirable_weight: Positive = 1.0
    """kto's weight of undesirable answers."""
    reference: Literal["live", "precomputed"] = "live"
    """live: a frozen copy (or the adapter switched off) is computed in every step. precomputed: its log-probs are made once, and kept."""

    @property
    def kinds(self) -> dict[str, float]:
        return {self.kind: 1.0} if isinstance(self.kind, str) else dict(self.kind)

    @property
    def needs_reference(self) -> bool:
        return not set(self.kinds) <= set(REFERENCE_FREE_LOSSES)

    @model_validator(mode="after")
    def _known(self) -> DPOLoss:
        known = (*PAIR_LOSSES, *REFERENCE_FREE_LOSSES, "kto")
        unknown = next((kind for kind in self.kinds if kind not in known), None)
        if unknown is not None:
            raise _refuse("kind", f"unknown loss {unknown!r}; known are {', '.join(known)}")
        if not self.kinds or ("kto" in self.kinds and len(self.kinds) > 1):
            raise _refuse("kind", "kto learns from single answers and stands alone; name at least one loss")
        if set(self.kinds) == {"sft"}:
            raise _refuse("kind", "sft alone is method: sft")
        self._refuse_unread()
        return self

    def _refuse_unread(self) -> None:
        """A key that no chosen loss reads would do nothing."""
        read = {
            "label_smoothing": ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"),
            "divergence": ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"),
            "gamma": ("simpo",),
            "desirable_weight": ("kto",),
            "undesirable_weight": ("kto",),
            "length_alpha": (*PAIR_LOSSES, "simpo", "cpo", "orpo"),
            "beta": (*PAIR_LOSSES, "simpo", "cpo", "kto"),
            "reference": PAIR_LOSSES,
        }
        for key, kinds in read.items():
            if getattr(self, key) != type(self).model_fields[key].default and not set(self.kinds) & set(kinds):
                raise _refuse(key, f"is read by {', '.join(kinds[:8])}, not by {' or '.join(self.kinds)}")
        for key in ("label_smoothing", "divergence"):
            if getattr(self, key) != type(self).model_fields[key].default and (
                others := set(self.kinds) & set(PAIR_LOSSES) - set(read[key])
            ):
                raise _refuse(key, f"is not read by {', '.join(sorted(others))}")
        if "exo_pair" in self.kinds and self.label_smoothing == 0.0:
            raise _refuse("label_smoothing", "exo_pair compares with the labels 1 - ε and ε: it must be above 0 (1e-3 is usual)")


PAIR_LOSSES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot",
    "aot_unpaired", "discopop",
)  # fmt: skip
REFERENCE_FREE_LOSSES = ("simpo", "cpo", "orpo", "sft")


class Evaluation(Section):
    every: PositiveInt | None = None
    """Evaluate after every this many steps; left out = only before the first and after the last step."""
    rows: PositiveInt | None = None
    """First rows of the evaluation file that are used; left out = all."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    samples: PositiveInt = 1
    """Rollouts per prompt."""


class SFTEvaluation(Section):
    every: PositiveInt | None = None
    """Evaluate after every this many steps; left out = only before the first and after the last step."""
    rows: PositiveInt | None = None
    """First rows of the evaluation file that are used; left out = all."""


class LocalSampler(Section):
    engine: Literal["local"] = "local"
    max_batch: PositiveInt = 256
    """Most rollouts decoded together."""


class Base(Section):
    model: str
    """Built-in name, folder, run directory, hub id, .gguf file, or `stage:NAME` in a pipeline."""
    run_dir: str
    """Relative to the working directory."""
    seed: Seed = 0
    """Keys the order of rows, sampling noise, dropout and fresh adapter weights."""
    max_steps: PositiveInt | None = None
    """Steps of the run; set this or epochs."""
    epochs: Positive | None = None
    """Passes over the data; set this or max_steps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; the trained weights are always float32."""
    chat_template: str | None = None
    """A built-in template's name (chatml, qwen, llama3, mistral, gemma) or Jinja text, instead of the tokenizer's own."""
    tool_protocol: ToolProtocol = "auto"
    """How tools are shown and calls written: as the chat template does it, or in postgrad's text protocol, in `<tool_call>` JSON (text) or
    in the named style; auto = the template's way where it prints tools in a style that can be read back. See docs/agents.md."""
    checkpoint: Checkpoint = Checkpoint()
    notes: str = ""
    """Free text for the model card."""

    @model_validator(mode="after")
    def _known_template(self) -> Base:
        if self.chat_template is not None and "{" not in self.chat_template and self.chat_template not in BUILT_IN:
            near = nearest(self.chat_template, BUILT_IN)
            meant = f"; did you mean {near}?" if near else ""
            raise _refuse("chat_template", f"is no Jinja text and no built-in template ({', '.join(BUILT_IN)}){meant}")
        return self

    @model_validator(mode="after")
    def _evaluates_something(self) -> Base:
        data = getattr(self, "data", None)
        if data is not None and self.evaluation_every is not None and data.eval is None:
            raise _refuse("evaluation.every", "acts only with data.eval: name held-out rows, or a share of the training rows")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Base:
        if (self.max_steps is None) == (self.epochs is None):
            raise _refuse("max_steps", "set exactly one of max_steps and epochs")
        return self

    @property
    def evaluation_every(self) -> int | None:
        """Steps between evaluations; None = at the end alone, as in methods without the section."""
        every: int | None = getattr(getattr(self, "evaluation", None), "every", None)
        return every


class Training(Base):
    """Methods that learn."""

    adapter: Adapter | None = None
    optimizer: Optimizer = Optimizer()


class NoDropout(Training):
    """Methods that compare log-probs or scores: dropout is off, and a recipe that asks for it is refused."""

    @model_validator(mode="after")
    def _no_dropout(self) -> NoDropout:
        if self.adapter is not None and self.adapter.dropout:
            raise _refuse("adapter.dropout", "acts only in sft: here log-probs or scores are compared, and dropout would change them")
        return self


class SFTRecipe(Training):
    method: Literal["sft"]
    data: SFTData
    batch: SFTBatch = SFTBatch()
    evaluation: SFTEvaluation = SFTEvaluation()
    tools: list[ToolItem] = []
    """Tools named in the system prompt of conversations that bring no `tools` column of their own."""

    @model_validator(mode="after")
    def _rows_fit(self) -> SFTRecipe:
        if self.batch.tokens is not None and self.batch.tokens < self.data.max_length:
            raise _refuse(
                "batch.tokens", f"a row may have data.max_length = {self.data.max_length} tokens and is never split: at least that"
            )
        return self


class GRPORecipe(NoDropout):
    method: Literal["grpo"]
    data: PromptData
    batch: GRPOBatch = GRPOBatch()
    rollout: Rollout = Rollout()
    tools: list[ToolItem] = []
    """Functions, environments, servers and APIs that the model may call; see docs/agents.md. With tools this is Agent GRPO."""
    allow_unsafe_exec: bool = False
    """Where there is no sandbox, run code that the model writes (the tools `python` and `python_session`, the reward `code_exec`) with your
    own rights instead of refusing: it can read, change and send whatever you can. Said aloud and recorded in the run."""
    system: str | None = None
    """A system message put before every prompt that has none."""
    rewards: Annotated[list[Reward], Field(min_length=1)]
    loss: GRPOLoss = GRPOLoss()
    evaluation: Evaluation = Evaluation()
    sampler: LocalSampler = LocalSampler()

    @model_validator(mode="after")
    def _possible(self) -> GRPORecipe:
        if self.rollout.group_size == 1:
            raise _refuse("rollout.group_size", "1 gives advantage 0 for every rollout, so nothing would be learned; use at least 2")
        filtered = self.rollout.top_p < 1.0 or self.rollout.top_k or self.rollout.min_p
        if filtered and self.loss.old_logprobs != "policy":
            raise _refuse(
                "loss.old_logprobs",
                "top_p, top_k and min_p sample from another distribution than the one whose log-probs are trained, which biases the ratio "
                "against the sampler (trl#6789); leave them out or set old_logprobs: policy",
            )
        if self.rollout.refill and self.loss.filter == "none":
            raise _refuse("rollout.refill", "refills a batch whose groups were filtered away, but loss.filter is none")
        return self


class RewardRecipe(NoDropout):
    """A scalar head learns which of two answers is preferred."""

    method: Literal["reward"]
    data: PairData
    batch: PairBatch = PairBatch()
    loss: RewardLoss = RewardLoss()
    evaluation: SFTEvaluation = SFTEvaluation()


class DPORecipe(NoDropout):
    """The policy learns from preferences directly."""

    method: Literal["dpo"]
    data: PairData
    batch: PairBatch = PairBatch()
    loss: DPOLoss = DPOLoss()
    evaluation: SFTEvaluation = SFTEvaluation()


class PPOBatch(Section):
    prompts: PositiveInt = 16
    """Prompts of one iteration; it holds prompts × rollout.group_size rollouts."""
    minibatches: PositiveInt = 1
    """Optimizer steps that one epoch over the iteration's rollouts is split into (whole rollouts)."""
    epochs: PositiveInt = 2
    """Passes over the rollouts of one iteration."""
    tokens_per_micro_batch: PositiveInt = 2048
    """Tokens computed at once: memory, not mathematics. On a CPU more of them are no faster; an accelerator may want more."""


class PPORollout(Rollout):
    group_size: Annotated[int, Field(ge=1)] = 1
    """Rollouts per prompt; the critic is the baseline, so 1 is enough."""


class PPOLoss(Section):
    clip: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """ε: the ratio is clipped to [1 - ε, 1 + ε]."""
    value_clip: Positive = 0.2
    """How far the value may move from the one it had at sampling."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount per sampled token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """λ of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Advantages get mean 0 and variance 1 over the iteration's sampled tokens."""
    whiten_rewards: bool = False
    """The tokens' rewards get variance 1 over the iteration's sampled tokens; their mean stays."""
    entropy_coef: NonNegative = 0.0
    """Weight of the policy's mean entropy, which the loss is lowered by: it keeps the policy from settling too early."""
    kl_coef: NonNegative = 0.05
    """Weight of the KL to the policy as it was at the start; 0 = no reference model is kept."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL stands: in the reward of each token, or in the loss. Never in both."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    adaptive_kl_target: Positive | None = None
    """KL per rollout (nats) that the coefficient is steered to; left out = a fixed coefficient."""
    adaptive_kl_horizon: Positive = 10000.0
    """Rollouts over which the coefficient may change by its largest step."""
    missing_end_penalty: NonNegative = 0.0
    """Taken from what a rollout that a limit cut earns."""
    cut: Literal["bootstrap", "score"] = "bootstrap"
    """What a rollout that ran out of tokens or turns is worth: what the critic expects after its last token, in the place of its score
    (what it earned turn by turn stays); or its score, as if it had ended there."""
    target_kl: Positive | None = None
    """Updates of an iteration end when the approximate KL to the policy that sampled exceeds this."""

    @model_validator(mode="after")
    def _acts(self) -> PPOLoss:
        if self.adaptive_kl_target is not None and (self.kl_coef == 0.0 or self.kl_in != "reward"):
            raise _refuse("adaptive_kl_target", "steers the KL in the reward: set kl_coef above 0 and kl_in: reward")
        return self


class Critic(Section):
    model: str | None = None
    """What the critic starts from: left out = the policy's model with a new head; or a folder (a reward model keeps its head)."""
    learning_rate: Positive = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Iterations in which only the critic learns."""


class PPORecipe(NoDropout):
    """Actor, critic, reference and reward; with tools it is Agent PPO. A step is one iteration."""

    method: Literal["ppo"]
    data: PromptData
    batch: PPOBatch = PPOBatch()
    rollout: PPORollout = PPORollout()
    tools: list[ToolItem] = []
    """Functions, environments, servers and APIs that the model may call; see docs/agents.md. With tools this is Agent PPO."""
    allow_unsafe_exec: bool = False
    """Where there is no sandbox, run code that the model writes (the tools `python` and `python_session`, the reward `code_exec`) with your
    own rights instead of refusing: it can read, change and send whatever you can. Said aloud and recorded in the run."""
    system: str | None = None
    """A system message put before every prompt that has none."""
    rewards: Annotated[list[Reward], Field(min_length=1)]
    loss: PPOLoss = PPOLoss()
    critic: Critic = Critic()
    evaluation: Evaluation = Evaluation()
    sampler: LocalSampler = LocalSampler()

    @model_validator(mode="after")
    def _possible(self) -> PPORecipe:
        if self.rollout.top_p < 1.0 or self.rollout.top_k or self.rollout.min_p:
            raise _refuse(
                "rollout.top_p", "top_p, top_k and min_p sample from another distribution than the one that is trained; leave them out"
            )
        if self.rollout.refill:
            raise _refuse("rollout.refill", "refills groups that a filter dropped; PPO drops none")
        if self.batch.minibatches > (rollouts := self.batch.prompts * self.rollout.group_size):
            raise _refuse("batch.minibatches", f"an iteration has {rollouts} rollouts, which cannot be split into more parts")
        return self


class PairsBatch(Section):
    prompts: PositiveInt = 8
    """Prompts of one step; it samples prompts × rollout.group_size answers."""


class PairsRollout(Rollout):
    group_size: Annotated[int, Field(ge=2)] = 4
    """Answers per prompt, of which the best and the worst become a pair."""


class PairsRecipe(Base):
    """A model answers prompts several times, rewards judge the answers, and the best and the worst of each prompt become a preference pair.

    Nothing is trained: the result is `pairs.jsonl`, which `reward` and `dpo` learn from.
    """

    method: Literal["pairs"]
    data: TrainPrompts
    batch: PairsBatch = PairsBatch()
    rollout: PairsRollout = PairsRollout()
    tools: list[ToolItem] = []
    """Functions, environments, servers and APIs that the model may call; see docs/agents.md."""
    allow_unsafe_exec: bool = False
    """Where there is no sandbox, run code that the model writes (the tools `python` and `python_session`, the reward `code_exec`) with your
    own rights instead of refusing: it can read, change and send whatever you can. Said aloud and recorded in the run."""
    system: str | None = None
    """A system message put before every prompt that has none."""
    rewards: Annotated[list[Reward], Field(min_length=1)]
    """Who judges: reward functions, reward models, or both, exactly as in `grpo`."""
    heldout: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the prompts whose pairs go to `heldout.jsonl` instead of `pairs.jsonl`, so that a reward model can be judged on prompts that
    it never saw; left out = none."""
    sampler: LocalSampler = LocalSampler()

    @model_validator(mode="after")
    def _possible(self) -> PairsRecipe:
        if self.rollout.refill:
            raise _refuse("rollout.refill", "refills groups that a filter dropped; pairs drops none, it counts those without a pair")
        return self


RLRecipe = GRPORecipe | PPORecipe
"""Methods that train the policy that samples."""
SampledRecipe = RLRecipe | PairsRecipe
"""Methods that sample rollouts and score them."""
TrainingRecipe = SFTRecipe | RewardRecipe | DPORecipe | RLRecipe
"""Methods that write a model."""
Recipe = TrainingRecipe | PairsRecipe
METHODS: dict[str, type[SFTRecipe] | type[PairsRecipe] | type[RewardRecipe] | type[DPORecipe] | type[PPORecipe] | type[GRPORecipe]] = {
    "sft": SFTRecipe,
    "pairs": PairsRecipe,
    "reward": RewardRecipe,
    "dpo": DPORecipe,
    "ppo": PPORecipe,
    "grpo": GRPORecipe,
}


class Pipeline(Section):
    """`stages:` name → recipe, run in order; a stage may name what an earlier one wrote: `stage:NAME`, see `stages`."""

    run_dir: str
    seed: Seed = 0
    stages: Annotated[dict[str, Recipe], Field(min_length=1)]
