"""The formulas of post-training, each once, as a pure function on tensors.

Tensors in, tensors out; keyword scalars; no config, no model, no logging, nothing written in place. Imports torch only.
Three rules hold for all of them:

1. A mask is True where something counts. What stands outside is set to 0 before any function sees it, so it can reach neither a value
   nor a gradient.
2. A number that counts and is not finite, given or computed, raises `NonFiniteError` (a `ValueError`). It is never returned.
3. bf16 and fp16 are computed and returned in fp32; fp64 stays fp64.

"The articles" that these functions cite are two that read the source of Hugging Face TRL, in Chinese: "Agentic RL 基础理论&代码速递" and
Harry Yu's "LLM 后训练方法概览与 TRL 源码解读". Where they would mislead an implementer, the function says so.

Shapes: N rollouts = B prompts × G, T tokens, V vocabulary. `postgrad.formulas.sheet` lists them all with live numbers.
"""

from postgrad.formulas._numeric import MAX_LOG_RATIO, NonFiniteError
from postgrad.formulas.advantages import group_advantages, leave_one_out_advantages, normalize_then_sum, weight_positive, whiten
from postgrad.formulas.aggregate import constant_length_mean, sequence_mean, token_mean
from postgrad.formulas.bradley_terry import bradley_terry_loss
from postgrad.formulas.dpo import DPO_LOSSES, WHOLE_BATCH_DPO_LOSSES, dpo_loss, implicit_reward
from postgrad.formulas.gae import gae, token_rewards
from postgrad.formulas.kl import kl_k1, kl_k2, kl_k3, kl_k3_importance_weighted
from postgrad.formulas.logprobs import entropy_from_logits, token_logprobs
from postgrad.formulas.preference import cpo_loss, kto_loss, length_desensitized_sum, orpo_loss, simpo_loss
from postgrad.formulas.ratio import log_ratio, sequence_ratio, token_ratio
from postgrad.formulas.sft import IGNORE_INDEX, mask_prompt, masked_cross_entropy
from postgrad.formulas.surrogate import (
    ClipFractions,
    cispo_surrogate,
    clip_fractions,
    clipped_surrogate,
    gamma_weight_surrogate,
    reinforce_surrogate,
    soft_gate_surrogate,
    two_sided_clip_surrogate,
)
from postgrad.formulas.value import clipped_value_loss

__all__ = [
    "DPO_LOSSES",
    "IGNORE_INDEX",
    "MAX_LOG_RATIO",
    "WHOLE_BATCH_DPO_LOSSES",
    "ClipFractions",
    "NonFiniteError",
    "bradley_terry_loss",
    "cispo_surrogate",
    "clip_fractions",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_length_mean",
    "cpo_loss",
    "dpo_loss",
    "entropy_from_logits",
    "gae",
    "gamma_weight_surrogate",
    "group_advantages",
    "implicit_reward",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_importance_weighted",
    "kto_loss",
    "leave_one_out_advantages",
    "length_desensitized_sum",
    "log_ratio",
    "mask_prompt",
    "masked_cross_entropy",
    "normalize_then_sum",
    "orpo_loss",
    "reinforce_surrogate",
    "sequence_mean",
    "sequence_ratio",
    "simpo_loss",
    "soft_gate_surrogate",
    "token_logprobs",
    "token_mean",
    "token_ratio",
    "token_rewards",
    "two_sided_clip_surrogate",
    "weight_positive",
    "whiten",
]
