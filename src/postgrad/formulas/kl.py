"""Estimators of KL(π_current ‖ π_reference) from the log-probs of sampled tokens.

With x = ref_logp − current_logp, for tokens sampled from π_current: k1 = −x and k3 = e^x − x − 1 have the KL as their expectation;
k2 = x²/2 is biased but close for small x. k1 may be negative for one token, k2 and k3 never are.
As a term of the loss: k1's gradient is 0 on average, so it teaches nothing there (it belongs in the reward); k2's gradient is on average
that of the KL; k3's is not, but pulls the same way. http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from torch import Tensor

from postgrad.formulas._numeric import MAX_LOG_RATIO, expm1_with_tangent, require_finite, select
from postgrad.formulas.ratio import log_ratio


def kl_k1(current: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """The log-ratio itself: unbiased, of high variance, negative for single tokens.

        k1 = current_logp − ref_logp

    Shapes: [N, T] (any, but equal) -> the same. Edge cases: as `log_ratio`: 0 outside the mask, non-finite inside raises.

    >>> import torch
    >>> kl_k1(torch.tensor(-0.5), torch.tensor(-2.0))
    tensor(1.5000)

    Source: Schulman, "Approximating KL divergence".
    """
    return log_ratio(current, reference, mask)


def kl_k2(current: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """Half the squared log-ratio: biased, of low variance; its gradient is on average that of the KL.

        k2 = ½ · (current_logp − ref_logp)²

    Shapes: [N, T] (any, but equal) -> the same. Edge cases: as `log_ratio`; a square that overflows raises `NonFiniteError`.

    >>> import torch
    >>> kl_k2(torch.tensor(-0.5), torch.tensor(-2.0))
    tensor(1.1250)

    Source: Schulman, "Approximating KL divergence".
    """
    return require_finite("kl_k2", 0.5 * log_ratio(current, reference, mask) ** 2)


def kl_k3(current: Tensor, reference: Tensor, mask: Tensor | None = None, *, max_log_ratio: float = MAX_LOG_RATIO) -> Tensor:
    """The articles' estimator: unbiased and never negative.

        k3 = e^x − x − 1,   x = ref_logp − current_logp

    Shapes: [N, T] (any, but equal) -> the same. Edge cases: exactly 0 where current = reference; outside the mask 0 in value and
    gradient, whatever stands there; a non-finite value inside raises `NonFiniteError`.
    Correction of the articles: computed as expm1(x) − x in fp32 at least, because e^x − x − 1 is negative in bf16 near 0
    (−0.0039 at x = 0.01). Exact up to x = `max_log_ratio` = c (default 20); above it e^x continues as its tangent e^c · (1 + x − c),
    so value and gradient stay finite where fp32 overflows (x > 88, trl#6637) and the gradient, 1 − e^c per token with respect to
    `current`, still raises current towards reference. Count `reference − current > max_log_ratio` to know that it happened.
    "mean" in the articles is the mean over counted tokens (`token_mean`), not over padding.

    >>> import torch
    >>> kl_k3(torch.tensor([-1.0, -0.5, -1.5]), torch.tensor([-1.2, -2.0, -1.0]))
    tensor([0.0187, 0.7231, 0.1487])

    Source: the articles, "k3 estimator"; Schulman, "Approximating KL divergence"; GRPO, arXiv 2402.03300.
    """
    x = -log_ratio(current, reference, mask)
    return require_finite("kl_k3", expm1_with_tangent(x, max_log_ratio) - x)


def kl_k3_importance_weighted(
    current: Tensor, reference: Tensor, ratio: Tensor, mask: Tensor | None = None, *, max_log_ratio: float = MAX_LOG_RATIO
) -> Tensor:
    """k3 times the importance ratio: unbiased when the tokens were sampled from an older policy.

        k3_w = r(θ) · (e^x − x − 1),   r(θ) = π_current / π_old

    Not the articles' formula: TRL's `use_bias_correction_kl`, on by default there, off by default here. On policy (r = 1) the value is
    k3's, but the gradient is not: r carries gradient too, which makes the gradient that of the KL on average.
    Shapes: current, reference and mask [N, T], ratio [N, T], or [N, 1] for a sequence ratio -> [N, T]. Edge cases: as `kl_k3`.

    >>> import torch
    >>> kl_k3_importance_weighted(torch.tensor(-0.5), torch.tensor(-2.0), torch.tensor(2.0))
    tensor(1.4463)

    Source: DeepSeek-V3.2, arXiv 2512.02556, "unbiased KL estimate".
    """
    k3 = kl_k3(current, reference, mask, max_log_ratio=max_log_ratio)
    if ratio.shape[:-1] != k3.shape[:-1] or ratio.shape[-1:] not in (k3.shape[-1:], (1,)):
        raise ValueError(f"ratio {tuple(ratio.shape)} does not fit the log-probs {tuple(k3.shape)}")
    return require_finite("kl_k3_importance_weighted", k3 * select(ratio.expand(k3.shape), mask))
