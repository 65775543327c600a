"""The cheat sheet as data: every formula of the articles (and those that grew from them), each computed live by the function it names.

`sheet_lines()` is what `postgrad formulas` prints. `trl` names the TRL function that holds the same formula, never a line of it:
lines move. The numbers of `compute` are checked against hand-computed ones in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad import formulas as f


@dataclass(frozen=True, slots=True)
class SheetLine:
    """One line: `equation` in the articles' notation, `example_call_text` as one would type it, `compute()` its value, now.

    `note` corrects the articles where they would mislead an implementer. `trl` is empty where TRL has no such function.
    """

    name: str
    equation: str
    article_part: str
    example_call_text: str
    compute: Callable[[], float]
    note: str = ""
    trl: str = ""


_SFT, _RM, _DPO, _GRPO, _K3, _ADVANTAGE, _BEYOND = (
    "SFT",
    "Reward model",
    "DPO",
    "GRPO & PPO",
    "k3 estimator",
    "Advantage",
    "Beyond the articles",
)
_GRPO_LOSS = "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss"
_GRPO_SCORE = "trl.trainer.grpo_trainer.GRPOTrainer._generate_and_score_completions"
_DPO_LOSS = "trl.trainer.dpo_trainer.DPOTrainer._compute_loss"


def _t(*values: float) -> Tensor:
    return torch.tensor(values)


_LINES = (
    SheetLine(
        "mask_prompt",
        "labels[:prompt_length] = −100",
        _SFT,
        "count of labels that are −100 in mask_prompt([5, 6, 7, 8], 2)",
        lambda: float((f.mask_prompt(torch.tensor([5, 6, 7, 8]), 2) == f.IGNORE_INDEX).sum()),
        note="prompt_length must count the ids that inference would see; the prompt encoded alone may differ at the boundary",
        trl="trl.trainer.sft_trainer.DataCollatorForLanguageModeling.torch_call",
    ),
    SheetLine(
        "masked_cross_entropy",
        "−(1/L) Σ log p(label_t), L = trained tokens",
        _SFT,
        "masked_cross_entropy(uniform logits over 4 tokens)",
        lambda: f.masked_cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]])).item(),
        note="the mean is over trained tokens, never over padding; no trained token is an error, not a loss of 0",
        trl="trl.trainer.sft_trainer.SFTTrainer.compute_loss",
    ),
    SheetLine(
        "token_logprobs",
        "log π(y) = z_y − log Σ_v exp(z_v)",
        _SFT,
        "token_logprobs([2, 0], 0)",
        lambda: f.token_logprobs(_t(2.0, 0.0), torch.tensor(0)).item(),
        trl="trl.trainer.utils.selective_log_softmax",
    ),
    SheetLine(
        "entropy_from_logits",
        "H = −Σ_v π(v)·log π(v)",
        _BEYOND,
        "entropy_from_logits(uniform over 4 tokens)",
        lambda: f.entropy_from_logits(torch.zeros(4)).item(),
        trl="trl.trainer.utils.entropy_from_logits",
    ),
    SheetLine(
        "bradley_terry_loss",
        "−log σ(r_chosen − r_rejected)",
        _RM,
        "bradley_terry_loss(1.2, 0.5)",
        lambda: f.bradley_terry_loss(_t(1.2), _t(0.5)).item(),
        trl="trl.trainer.reward_trainer.RewardTrainer.compute_loss",
    ),
    SheetLine(
        "dpo_loss",
        "−log σ(β × [log(ratio_chosen) − log(ratio_rejected)])",
        _DPO,
        "dpo_loss(policy = reference, beta=0.1)",
        lambda: f.dpo_loss(_t(-3.0), _t(-4.0), _t(-3.0), _t(-4.0), beta=0.1).item(),
        note="never negative (−log σ > 0): it starts at ln 2 and falls below ln 2, not below 0, when the model learns",
        trl=_DPO_LOSS,
    ),
    SheetLine(
        "implicit_reward",
        "r(x,y) = β·log(π_θ(y)/π_ref(y))",
        _DPO,
        "implicit_reward(-3, -4, beta=0.1)",
        lambda: f.implicit_reward(_t(-3.0), _t(-4.0), beta=0.1).item(),
        trl=_DPO_LOSS,
    ),
    SheetLine(
        "simpo_loss",
        "−log σ(β·(logπ(chosen)/|chosen| − logπ(rejected)/|rejected|) − γ)",
        _BEYOND,
        "simpo_loss(-2, -6, tokens 2 and 3)",
        lambda: f.simpo_loss(_t(-2.0), _t(-6.0), _t(2.0), _t(3.0)).item(),
    ),
    SheetLine(
        "cpo_loss",
        "−log σ(β·(logπ(chosen) − logπ(rejected)))",
        _BEYOND,
        "cpo_loss(-2, -6, beta=0.5)",
        lambda: f.cpo_loss(_t(-2.0), _t(-6.0), beta=0.5).item(),
    ),
    SheetLine(
        "orpo_loss",
        "−log σ(log odds(chosen) − log odds(rejected))",
        _BEYOND,
        "orpo_loss(-1, -4, 2 tokens each)",
        lambda: f.orpo_loss(_t(-1.0), _t(-4.0), _t(2.0), _t(2.0)).item(),
    ),
    SheetLine(
        "kto_loss",
        "1 − σ(β·(r − z)) desirable, 1 − σ(β·(z − r)) not",
        _BEYOND,
        "kto_loss(policy = reference)",
        lambda: f.kto_loss(_t(-1.0), _t(-1.0), torch.tensor([True]), torch.tensor(0.0)).item(),
        trl="trl.trainer.kto_trainer.KTOTrainer",
    ),
    SheetLine(
        "length_desensitized_sum",
        "Σ_{t ≤ l} logπ_t + α·Σ_{t > l} logπ_t",
        _BEYOND,
        "length_desensitized_sum([-1, -2, -4], shared=2, alpha=0.5)",
        lambda: f.length_desensitized_sum(_t(-1.0, -2.0, -4.0)[None], torch.ones(1, 3), torch.tensor([2]), alpha=0.5).item(),
        trl=_DPO_LOSS,
    ),
    SheetLine(
        "log_ratio",
        "curr_logp − old_logp",
        _GRPO,
        "log_ratio(-1.0, -1.3)",
        lambda: f.log_ratio(_t(-1.0), _t(-1.3)).item(),
        note="select with the mask before exp, never multiply after: NaN · 0 = NaN in the gradient",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "token_ratio",
        "r(θ) = π_new / π_old = exp(log_ratio)",
        _GRPO,
        "token_ratio(0.3)",
        lambda: f.token_ratio(_t(0.3)).item(),
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "sequence_ratio",
        "exp( mean_t log_ratio_t )",
        _BEYOND,
        "sequence_ratio([0.2, 0.4])",
        lambda: f.sequence_ratio(_t(0.2, 0.4).unsqueeze(0), torch.ones(1, 2)).item(),
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "clipped_surrogate",
        "−min(r(θ)·A, clip(r(θ), 1−ε, 1+ε)·A)",
        _GRPO,
        "clipped_surrogate(ratio 1.5, A 1, ε 0.2)",
        lambda: f.clipped_surrogate(_t(1.5), _t(1.0)).item(),
        note="at the first step r = 1 and advantages are centred: the printed loss is 0, its gradient is not",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "two_sided_clip_surrogate",
        "−min(min(r, δ)·A, clip(r, 1−ε, 1+ε)·A)",
        _BEYOND,
        "two_sided_clip_surrogate(ratio 50, A −1, δ 4)",
        lambda: f.two_sided_clip_surrogate(_t(50.0), _t(-1.0)).item(),
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "cispo_surrogate",
        "−sg[clip(r)]·A·log π",
        _BEYOND,
        "cispo_surrogate(ratio 9, A 1, logp −1)",
        lambda: f.cispo_surrogate(_t(9.0), _t(1.0), _t(-1.0)).item(),
        note="TRL reads epsilon_high as the bound itself: its default 0.2 makes the ratio irrelevant",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "reinforce_surrogate",
        "−A·log π",
        _BEYOND,
        "reinforce_surrogate(logp −0.5, A 2)",
        lambda: f.reinforce_surrogate(_t(-0.5), _t(2.0)).item(),
        trl="trl.trainer.rloo_trainer.RLOOTrainer._compute_loss",
    ),
    SheetLine(
        "soft_gate_surrogate",
        "−(4/τ)·σ(τ(r − 1))·A",
        _BEYOND,
        "soft_gate_surrogate(ratio 1, A 1)",
        lambda: f.soft_gate_surrogate(_t(1.0), _t(1.0)).item(),
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "gamma_weight_surrogate",
        "−sg[w^k·e^{λ(1−w)}]·A·log π",
        _BEYOND,
        "gamma_weight_surrogate(log ratio −0.2, A 1, logp −1)",
        lambda: f.gamma_weight_surrogate(_t(-0.2).unsqueeze(0), _t(1.0), _t(-1.0).unsqueeze(0), torch.ones(1, 1)).item(),
        trl="trl.trainer.grpo_trainer.GRPOTrainer.get_gamma_weights",
    ),
    SheetLine(
        "clip_fractions",
        "share of tokens that the clip leaves without gradient",
        _BEYOND,
        "clip_fractions(ratios 1.5, 1.5, 0.5, 0.5; A 1, −1, 1, −1).region",
        lambda: f.clip_fractions(_t(1.5, 1.5, 0.5, 0.5), _t(1.0, -1.0, 1.0, -1.0), torch.ones(4)).region.item(),
        note="a ratio outside the bounds on the side that min does not take is not clipped",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "kl_k1",
        "curr_logp − ref_logp",
        _K3,
        "kl_k1(-0.5, -2.0)",
        lambda: f.kl_k1(_t(-0.5), _t(-2.0)).item(),
    ),
    SheetLine(
        "kl_k2",
        "½·(curr_logp − ref_logp)²",
        _K3,
        "kl_k2(-0.5, -2.0)",
        lambda: f.kl_k2(_t(-0.5), _t(-2.0)).item(),
    ),
    SheetLine(
        "kl_k3",
        "exp(x) − x − 1, x = ref_logp − curr_logp",
        _K3,
        "mean of kl_k3([-1.0, -0.5, -1.5], [-1.2, -2.0, -1.0])",
        lambda: f.kl_k3(_t(-1.0, -0.5, -1.5), _t(-1.2, -2.0, -1.0)).mean().item(),
        note="computed as expm1(x) − x in fp32: the literal form is negative in bf16 near 0 and overflows far from it",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "kl_k3_importance_weighted",
        "r(θ)·(exp(x) − x − 1)",
        _BEYOND,
        "kl_k3_importance_weighted(-0.5, -2.0, ratio 2)",
        lambda: f.kl_k3_importance_weighted(_t(-0.5), _t(-2.0), _t(2.0)).item(),
        note="TRL's default (use_bias_correction_kl), not the articles' formula; off here unless asked for",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "group_advantages",
        "(r − mean_group) / (std_group + 1e-4)",
        _ADVANTAGE,
        "first of group_advantages([1, 0, 0, 1], 4)",
        lambda: f.group_advantages(_t(1.0, 0.0, 0.0, 1.0), 4)[0].item(),
        note="with two reward levels in a group a harsher punishment changes nothing: {1, 0} and {1, −5} give the same advantages",
        trl=_GRPO_SCORE,
    ),
    SheetLine(
        "leave_one_out_advantages",
        "r_i − mean of the group's other rewards",
        _BEYOND,
        "first of leave_one_out_advantages([1, 0, 0], 3)",
        lambda: f.leave_one_out_advantages(_t(1.0, 0.0, 0.0), 3)[0].item(),
        trl="trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions",
    ),
    SheetLine(
        "normalize_then_sum",
        "normalise (Σ_k w_k·A_k) over the batch",
        _BEYOND,
        "second of normalize_then_sum([[1, 0], [0, 10]], [1, 2], 2)",
        lambda: f.normalize_then_sum(torch.stack([_t(1.0, 0.0), _t(0.0, 10.0)]), _t(1.0, 2.0), 2)[1].item(),
        trl=_GRPO_SCORE,
    ),
    SheetLine(
        "weight_positive",
        "λ·A where A > 0, else A",
        _BEYOND,
        "first of weight_positive([2, -1], positive_weight=0.1)",
        lambda: f.weight_positive(_t(2.0, -1.0), positive_weight=0.1)[0].item(),
    ),
    SheetLine(
        "token_rewards",
        "r_t = −kl_coef·kl_t + [t last]·score",
        _GRPO,
        "last of token_rewards(2, mask [1, 1], kl [0.5, 0.25], kl_coef=0.1)",
        lambda: f.token_rewards(_t(2.0), torch.ones(1, 2), _t(0.5, 0.25).unsqueeze(0), kl_coef=0.1)[0, 1].item(),
        note="on the last counted token, not on the first pad, where the mask would drop it",
    ),
    SheetLine(
        "gae",
        "A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γV_{t+1} − V_t",
        _GRPO,
        "first of gae(r [0, 1], V [0.5, 0.5], gamma=1, lam=0.5)",
        lambda: f.gae(_t(0.0, 1.0).unsqueeze(0), _t(0.5, 0.5).unsqueeze(0), torch.ones(1, 2), gamma=1.0, lam=0.5)[0][0, 0].item(),
        note="the articles' A = R − V is λ = 1; tool tokens are no time steps",
    ),
    SheetLine(
        "whiten",
        "(x − mean) / √(var + 1e-8)",
        _GRPO,
        "second of whiten([1, 3])",
        lambda: f.whiten(_t(1.0, 3.0), torch.ones(2))[1].item(),
    ),
    SheetLine(
        "clipped_value_loss",
        "½·max((V − R)², (clip(V, V_old ± c) − R)²)",
        _GRPO,
        "clipped_value_loss(V 1, V_old 0, R 2, clip=0.2)",
        lambda: f.clipped_value_loss(_t(1.0), _t(0.0), _t(2.0), clip=0.2).item(),
    ),
    SheetLine(
        "token_mean",
        "Σ x·mask / Σ mask",
        _GRPO,
        "token_mean([[1, 2], [6, pad]])",
        lambda: f.token_mean(torch.stack([_t(1.0, 2.0), _t(6.0, 9.0)]), torch.tensor([[1, 1], [1, 0]])).item(),
        note="mean(per_token_loss × mask) divides by padding too",
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "sequence_mean",
        "mean_i ( Σ_t x·mask / Σ_t mask )",
        _GRPO,
        "sequence_mean([[1, 2], [6, pad]])",
        lambda: f.sequence_mean(torch.stack([_t(1.0, 2.0), _t(6.0, 9.0)]), torch.tensor([[1, 1], [1, 0]])).item(),
        trl=_GRPO_LOSS,
    ),
    SheetLine(
        "constant_length_mean",
        "Σ x·mask / (N·L)",
        _BEYOND,
        "constant_length_mean([[1, 2], [6, pad]], length 10)",
        lambda: f.constant_length_mean(torch.stack([_t(1.0, 2.0), _t(6.0, 9.0)]), torch.tensor([[1, 1], [1, 0]]), 10).item(),
        trl=_GRPO_LOSS,
    ),
)


def sheet_lines() -> tuple[SheetLine, ...]:
    """Every line of the sheet, in the articles' order of topics.

    >>> [round(line.compute(), 4) for line in sheet_lines() if line.name == "dpo_loss"]
    [0.6931]
    """
    return _LINES
