"""The importance ratio r(θ) = π_new / π_old, per token and per sequence, from log-probs."""

from __future__ import annotations

from torch import Tensor

from postgrad.formulas._numeric import MAX_LOG_RATIO, counted, exp_with_tangent, read, require_finite, require_same_shape, select


def log_ratio(current: Tensor, old: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log of the probability ratio of each token between two versions of the policy.

        log_ratio = curr_logp − old_logp = log(π_new / π_old)

    `current` are the log-probs now, with gradient; `old` those the tokens were sampled with (no gradient is stopped here).
    Shapes: current, old and mask [N, T] (any, but equal) -> the same. Edge cases: with `mask`, positions outside are exactly 0 before
    anything else happens, whatever they hold (NaN, inf, 1e30), in value and gradient; inside, a non-finite value raises
    `NonFiniteError`. bf16 is computed in fp32.

    >>> import torch
    >>> log_ratio(torch.tensor([-1.0, -9.0]), torch.tensor([-1.3, float("nan")]), torch.tensor([True, False]))
    tensor([0.3000, 0.0000])

    Source: the articles, "Log Ratio"; PPO, arXiv 1707.06347.
    """
    require_same_shape(current=current, old=old)
    return require_finite("log_ratio", select(current, mask) - select(old, mask))


def token_ratio(log_ratio: Tensor, *, max_log_ratio: float = MAX_LOG_RATIO) -> Tensor:
    """The ratio of each token.

        r(θ) = exp(log_ratio)

    Shapes: any -> the same; a masked position (log-ratio 0) has ratio 1.
    Edge cases: exact up to `max_log_ratio` (default 20: a token 4.9e8 times likelier than when it was sampled); above it
    e^c · (1 + x − c), the tangent, which is finite where exp overflows (fp32: above 88) and whose gradient e^c still points the right
    way. Count `log_ratio > max_log_ratio` to know that it happened; raise it to 88 to switch it off. Non-finite raises.

    >>> import torch
    >>> token_ratio(torch.tensor([0.0, 0.3]))
    tensor([1.0000, 1.3499])

    Source: the articles, `coef_1`; PPO, arXiv 1707.06347.
    """
    return require_finite("token_ratio", exp_with_tangent(read("log_ratio", log_ratio), max_log_ratio))


def sequence_ratio(log_ratio: Tensor, mask: Tensor, *, max_log_ratio: float = MAX_LOG_RATIO) -> Tensor:
    """The length-normalised ratio of each sequence (GSPO): the geometric mean of its token ratios.

        s(θ) = (π_new(y) / π_old(y))^(1/|y|) = exp( (1/|y|) Σ_t log_ratio_t )

    Shapes: log_ratio and mask [N, T] -> [N]. Unsqueeze to [N, 1] to multiply with per-token values.
    Edge cases: only counted tokens enter sum and length; a row without any has ratio 1. Beyond `max_log_ratio` as `token_ratio`.

    >>> import torch
    >>> sequence_ratio(torch.tensor([[0.2, 0.4, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([1.3499])

    Source: GSPO, arXiv 2507.18071.
    """
    lengths = counted(mask, log_ratio.shape).sum(-1).clamp(min=1)  # an empty row: 0 / 1
    mean = read("log_ratio", log_ratio, mask).sum(-1) / lengths
    return require_finite("sequence_ratio", exp_with_tangent(mean, max_log_ratio))
