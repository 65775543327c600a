"""Supervised fine-tuning: which tokens are labels, and the cross-entropy over them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from postgrad.formulas._numeric import require, require_finite, widen
from postgrad.formulas.logprobs import require_ids_below

IGNORE_INDEX = -100
"""The label that means: do not train on this token."""


def mask_prompt(input_ids: Tensor, prompt_length: int | Tensor) -> Tensor:
    """Labels for training on the completion only: the prompt's labels become −100.

        labels[:prompt_length] = −100

    Shapes: input_ids [T] or [B, T]; prompt_length an int, or one per row [B]. -> labels of input_ids' shape, a new tensor.
    Edge cases: prompt_length 0 trains every token; = T trains none (and `masked_cross_entropy` then raises); outside 0..T raises.
    Correction of the articles: `prompt_length` must be the number of ids that inference would feed the model. The length of the prompt
    encoded alone is wrong where a token merges across the boundary: encode prompt and completion apart and join their ids.
    Padding is not a prompt: this function does not mask it.

    >>> mask_prompt(torch.tensor([5, 6, 7, 8]), 2)
    tensor([-100, -100,    7,    8])

    Source: the articles, SFT, "Label Masking".
    """
    lengths = torch.as_tensor(prompt_length, device=input_ids.device)
    total = input_ids.shape[-1]
    if lengths.dim() and lengths.shape != input_ids.shape[:-1]:
        raise ValueError(f"prompt_length {tuple(lengths.shape)} does not fit input_ids {tuple(input_ids.shape)}")
    require(bool(((lengths >= 0) & (lengths <= total)).all()), f"prompt_length must lie in 0..{total}, got {prompt_length}")
    position = torch.arange(total, device=input_ids.device)
    return torch.where(position < lengths.unsqueeze(-1), IGNORE_INDEX, input_ids)


def masked_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    reduction: Literal["mean", "sum", "none"] = "mean",
    *,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Next-token cross-entropy over the trained tokens.

        L_CE = −(1/L) Σ_t log p(label_t),   L = number of trained tokens

    The shift is inside: logits at position t predict the label at t + 1, so the first label of a row is never used.
    Shapes: logits [B, T, V], labels [B, T] -> scalar; with reduction "none" [B, T − 1], 0 where not trained.
    Edge cases: the mean is over trained tokens, never over padding. No trained token: "mean" raises `ValueError` (a loss of 0.0 would
    claim that something was learned). `denominator` is the trained-token count of the whole batch: micro-batches and ranks then add
    up to exactly the loss of the batch, and one without any trained token adds 0 with gradient 0. Logits at untrained positions are
    never read. Labels other than −100 outside 0..V−1 raise; a non-finite loss raises `NonFiniteError`.

    >>> masked_cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]]))  # one trained token, uniform over 4: ln 4
    tensor(1.3863)

    Source: the articles, SFT; token-weighted accumulation as in trl#2175.
    """
    require(reduction in ("mean", "sum", "none"), f"reduction must be mean, sum or none, got {reduction!r}")
    if logits.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must be [B, T, V] and [B, T]")
    if denominator is not None and reduction != "mean":
        raise ValueError(f"denominator divides a mean; reduction is {reduction!r}")
    targets = labels[:, 1:]
    trained = targets != IGNORE_INDEX
    losses = _cross_entropy(logits[:, :-1][trained], targets[trained])
    if reduction == "none":
        return torch.zeros_like(targets, dtype=losses.dtype).masked_scatter(trained, losses)
    if reduction == "sum":
        return losses.sum()
    if denominator is None:
        require(losses.numel() > 0, "no trained token: every label is −100 (the first label of a row is never predicted)")
        return losses.mean()
    require(bool(denominator > 0), f"denominator must be positive, got {denominator}")
    return losses.sum() / denominator


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """[M, V] and [M] -> [M]. Only trained rows arrive here: a NaN elsewhere would reach the gradient through log-softmax."""
    require_ids_below(logits.shape[-1], targets)
    losses = torch.nn.functional.cross_entropy(widen(logits), targets, reduction="none")
    return require_finite("masked_cross_entropy", losses)
