"""Losses on token sequences, for the autoregressive part of omni-modal models.

Notation: N sequences of T token positions, padded on either side. Log-probabilities are per token, in nats.

The caller passes the weights of a mean over tokens or sequences, so that an update in several batches, on several
ranks, has the gradient of the mean over all of them.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from omni_losses.output import LossOutput, clip_metrics, ratio_metrics, require_clip_width, require_shape_of

TokenMean = Literal["sequence", "token", "constant"]


def gspo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute a clipped policy-gradient loss with one ratio for a whole sequence instead of one per token.

        s_i = exp(mean over the sequence's tokens of log_prob_it - old_log_prob_it)
        L   = sum_i w_i max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

    s is the geometric mean of the token ratios, so sequences of any length share one clip range, and a sequence is kept
    or clipped as a whole. Each of its n tokens gets the gradient -w_i A_i s_i / n. Advantages are not clamped.

    Args:
        log_prob: [N, T], nats per token, from the weights being trained; gradients flow here only.
        old_log_prob: [N, T], same unit, from the weights before the update.
        advantages: [N], dimensionless.
        mask: [N, T], boolean, or 1 and 0: True for tokens sampled by the policy. Values of log_prob elsewhere have no
            effect, even NaN. A sequence without such tokens has ratio 1 and loss 0.
        clip_low, clip_high: widths below and above 1, >= 1e-6.
        weights: [N], one per sequence; None means 1/N for each.

    Returns:
        The loss, the metrics of `grpo_loss` for s, and `tokens_mean`, the mean number of tokens per sequence.

    Raises:
        ValueError: shapes do not match, or float32 cannot represent a clip width around 1.

    Source: GSPO (arXiv 2507.18071), eq. 5 to 7; the defaults are from its section 5.1. Released code (verl, TRL) gives
    each token the ratio s with its own gradient (GSPO-token): with one advantage per sequence, the gradient is the
    same.
    """
    _check(log_prob, mask, old_log_prob, advantages=advantages, weights=weights)
    require_clip_width(clip_low=clip_low, clip_high=clip_high)
    chosen = mask.bool()
    counts = chosen.sum(dim=1)
    differences = torch.where(chosen, log_prob.float() - old_log_prob.detach().float(), 0.0)
    log_ratio = differences.sum(dim=1) / counts.clamp(min=1)
    ratio, adv = log_ratio.exp(), advantages.detach().float()
    losses = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics = ratio_metrics(log_ratio.detach()) | clip_metrics(log_ratio.detach(), clip_low, clip_high)
    metrics["tokens_mean"] = counts.float().mean()
    losses = losses.where(counts > 0, 0.0)
    return LossOutput(losses.mean() if weights is None else (losses * weights.detach().float()).sum(), metrics)


def token_grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute a clipped policy-gradient loss with one ratio per token.

        r_it = exp(log_prob_it - old_log_prob_it)
        L    = sum_i w_i sum_t max(-A_i r_it, -A_i clip(r_it, 1 - clip_low, 1 + clip_high))

    Args:
        log_prob, old_log_prob, advantages, mask, clip_low, clip_high: as in `gspo_loss`.
        weights: [N], for each token of a sequence, from `token_weights`, or [N, T]; None means 1/(N n_i).

    Returns:
        The loss, the metrics of `grpo_loss` for the ratios of the tokens in the mask, and `tokens_mean`.

    Raises:
        ValueError: shapes do not match, the mask is empty, or float32 cannot represent a clip width around 1.

    Source: GRPO (arXiv 2402.03300), eq. 3 without its KL term. With a wider clip_high and the mean over all tokens, it
    is the loss of DAPO (arXiv 2503.14476), eq. 8; with constant weights and advantages with std "none", that of Dr.
    GRPO (arXiv 2503.20783).
    """
    log_ratio, chosen, weights = _token_ratios(log_prob, old_log_prob, advantages, mask, weights)
    require_clip_width(clip_low=clip_low, clip_high=clip_high)
    ratio, adv = log_ratio.exp(), advantages.detach().float()[:, None]
    losses = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    return LossOutput((losses * weights).sum(), _token_metrics(log_ratio, chosen, clip_low, clip_high))


def token_cispo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute the policy gradient of each token, weighted by a clipped ratio without gradient: no token is dropped.

        r_it = exp(log_prob_it - old_log_prob_it) clipped to [1 - clip_low, 1 + clip_high], a constant
        L    = -sum_i w_i sum_t r_it A_i log_prob_it

    Args:
        log_prob, old_log_prob, advantages, mask, clip_low, clip_high, weights: as in `token_grpo_loss`. clip_low=1
            means no lower bound.

    Returns:
        The loss and the metrics of `token_grpo_loss`, for the ratios before clipping.

    Raises:
        ValueError: as in `token_grpo_loss`.

    Source: CISPO of MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5, with the mean over all tokens from `token_weights`; it
    has no lower bound in practice. The upper bound, a ratio of 5, is that of ScaleRL (arXiv 2510.13786).
    """
    log_ratio, chosen, weights = _token_ratios(log_prob, old_log_prob, advantages, mask, weights)
    require_clip_width(clip_low=clip_low, clip_high=clip_high)
    ratio = log_ratio.detach().exp().clamp(1 - clip_low, 1 + clip_high)
    losses = -ratio * advantages.detach().float()[:, None] * torch.where(chosen, log_prob.float(), 0.0)
    return LossOutput((losses * weights).sum(), _token_metrics(log_ratio, chosen, clip_low, clip_high))


def token_nll_loss(log_prob: Tensor, mask: Tensor, *, weights: Tensor) -> LossOutput:
    """Compute the negative log-likelihood of given answers, as in supervised fine-tuning of language models.

        L = -sum_i w_i sum_t log_prob_it

    Args:
        log_prob: [N, T], nats per token, from the weights being trained.
        mask: [N, T], boolean, or 1 and 0: the tokens of the answers. Values of log_prob elsewhere have no effect, even
            NaN.
        weights: [N], for each token of an answer, from `token_weights`. "token" gives the mean over all tokens, the
            cross-entropy of language models.

    Returns:
        The loss; `nll`, the mean over all tokens of the mask, nats per token, for any weights; and `tokens_mean`,
        the mean number of tokens per answer.

    Raises:
        ValueError: shapes do not match, or the mask is empty.

    Source: supervised fine-tuning as in InstructGPT (arXiv 2203.02155), section 3.5.
    """
    _check(log_prob, mask, weights=weights)
    chosen = _bool_mask(mask)
    losses = torch.where(chosen, -log_prob.float(), 0.0)
    counts = chosen.sum(dim=1).float()
    metrics = {"nll": losses.detach().sum() / counts.sum(), "tokens_mean": counts.mean()}
    return LossOutput((losses * weights.detach().float()[:, None]).sum(), metrics)


def token_weights(counts: Tensor, *, mean: TokenMean, max_tokens: int = 1) -> Tensor:
    """Return the weight [N], float32, of each token of a sequence, such that the weighted sum over tokens is a mean.

    "sequence" is the mean over sequences of the mean over their tokens, 1/(N n_i); "token" is the mean over all tokens,
    1/sum(n); "constant" is the sum over tokens divided by N max_tokens, so the length of a sequence has no effect.

    Args:
        counts: [N], token counts of all sequences of an optimizer step, including those on other ranks. A sequence of 0
            tokens gets weight 0 but counts in N.
        max_tokens: maximum number of tokens in a sequence, used only for "constant".

    Raises:
        ValueError: counts are not [N], mean is unknown, or max_tokens is below 1.

    Source: GRPO (arXiv 2402.03300), DAPO (arXiv 2503.14476) and Dr. GRPO (arXiv 2503.20783), in that order.
    """
    if counts.ndim != 1 or mean not in get_args(TokenMean) or max_tokens < 1:
        rule = f"counts must be [N], mean one of {get_args(TokenMean)} and max_tokens >= 1"
        raise ValueError(f"{rule}, got {tuple(counts.shape)}, {mean!r} and {max_tokens}")
    n = counts.float()
    per_token = {"sequence": 1 / (len(n) * n.clamp(min=1)), "token": 1 / n.sum().clamp(min=1).expand_as(n)}
    return per_token.get(mean, torch.full_like(n, 1 / (max(1, len(n)) * max_tokens))).where(n > 0, 0.0)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Return penalties [N] in [-1, 0], float32, for answers near the maximum length.

    The penalty is 0 up to max_tokens - buffer tokens, then falls linearly to -1 at max_tokens.

    Args:
        lengths: [N], number of tokens in each answer.
        max_tokens: maximum number of tokens in an answer.
        buffer: number of tokens before the maximum over which the penalty grows, from 1 to max_tokens.

    Raises:
        ValueError: the buffer is out of range.

    Source: soft overlong punishment of DAPO (arXiv 2503.14476), eq. 13.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be from 1 to max_tokens ({max_tokens}), got {buffer}")
    return ((max_tokens - buffer - lengths.float()) / buffer).clamp(-1, 0)


def _check(log_prob: Tensor, mask: Tensor, old_log_prob: Tensor | None = None, **per_sequence: Tensor | None) -> None:
    if log_prob.ndim != 2 or len(log_prob) == 0:
        raise ValueError(f"log_prob must be [N, T] with N >= 1, got shape {tuple(log_prob.shape)}")
    require_shape_of("log_prob", log_prob, old_log_prob=old_log_prob, mask=mask)
    for name, value in per_sequence.items():
        if value is not None and value.shape != log_prob.shape[:1]:
            raise ValueError(f"{name} must be [N] = {tuple(log_prob.shape[:1])}, got shape {tuple(value.shape)}")


def _bool_mask(mask: Tensor) -> Tensor:
    """Return the mask as booleans; raise ValueError if it is empty."""
    chosen = mask.bool()
    if not chosen.any():
        raise ValueError("mask must hold at least one token, got none")
    return chosen


def _token_ratios(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-ratios [N, T], 0 outside the mask; the boolean mask; and weights [N, T], 0 outside the mask."""
    of_sequences = weights if weights is None or weights.ndim == 1 else None
    _check(log_prob, mask, old_log_prob, advantages=advantages, weights=of_sequences)
    if weights is not None and weights.ndim == 1:
        weights = weights[:, None].expand_as(log_prob)
    require_shape_of("log_prob", log_prob, weights=weights)
    chosen = _bool_mask(mask)
    if weights is None:
        weights = token_weights(chosen.sum(dim=1), mean="sequence")[:, None]
    log_ratio = torch.where(chosen, log_prob.float() - old_log_prob.detach().float(), 0.0)
    return log_ratio, chosen, weights.detach().float() * chosen


def _token_metrics(log_ratio: Tensor, chosen: Tensor, low: float, high: float) -> dict[str, Tensor]:
    tokens = log_ratio.detach()[chosen]
    return ratio_metrics(tokens) | clip_metrics(tokens, low, high) | {"tokens_mean": chosen.sum(dim=1).float().mean()}
