"""Losses on token sequences, for the autoregressive part of omni-modal models.

Letters: N sequences, T token places, padded on either side. Log-probabilities are of single tokens, in nats.
"""

import torch
from torch import Tensor

from omni_losses.output import LossOutput, clip_metrics, ratio_metrics, require_clip_width, require_shape_of


def gspo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossOutput:
    """Clipped policy-gradient loss with one ratio for a whole sequence, not one for each token.

        s_i = exp(mean over the sequence's tokens of log_prob_it - old_log_prob_it)
        L   = 1/N sum_i max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

    s is the geometric mean of the token ratios, so sequences of any length share one clip range, and a sequence is kept
    or clipped as a whole. Each of its n tokens gets the gradient -A_i s_i / n, over N. Advantages are not clamped.

    Args:
        log_prob: [N, T], nats per token, of the weights being trained; gradients flow here only.
        old_log_prob: [N, T], same unit, of the weights before the update.
        advantages: [N], dimensionless.
        mask: [N, T], boolean, or 1 and 0: the places of tokens that the policy chose. Values of log_prob elsewhere,
            NaN too, change nothing. A sequence without such tokens has ratio 1 and no loss, and stays in
            the divisor N.
        clip_low, clip_high: widths below and above 1, > 6e-8.

    Returns:
        The loss, the metrics of `grpo_loss` for s, and `tokens_mean`, the mean number of tokens of a sequence.

    Raises:
        ValueError: shapes do not fit, or float32 does not hold a clip width around 1.

    Source: GSPO (arXiv 2507.18071), eq. 5 to 7; the defaults are its section 5.1. Released code (verl, TRL) gives each
    token the ratio s with its own gradient, GSPO-token: with one advantage for a sequence, the same gradient as here.
    """
    if log_prob.ndim != 2 or len(log_prob) == 0:
        raise ValueError(f"log_prob must be [N, T] with N >= 1, got shape {tuple(log_prob.shape)}")
    require_shape_of("log_prob", log_prob, old_log_prob=old_log_prob, mask=mask)
    if advantages.shape != log_prob.shape[:1]:
        raise ValueError(f"advantages must be [N] = {tuple(log_prob.shape[:1])}, got shape {tuple(advantages.shape)}")
    require_clip_width(clip_low=clip_low, clip_high=clip_high)
    chosen = mask.bool()
    counts = chosen.sum(dim=1)
    differences = torch.where(chosen, log_prob.float() - old_log_prob.detach().float(), 0.0)
    log_ratio = differences.sum(dim=1) / counts.clamp(min=1)
    ratio, adv = log_ratio.exp(), advantages.detach().float()
    losses = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics = ratio_metrics(log_ratio.detach()) | clip_metrics(log_ratio.detach(), clip_low, clip_high)
    return LossOutput(losses.where(counts > 0, 0.0).mean(), metrics | {"tokens_mean": counts.float().mean()})
