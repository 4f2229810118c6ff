"""Losses that move a policy's log-probability along the advantage.

Letters: B samples, one denoising step of each. Sign: losses are minimized, so a positive advantage raises the
log-probability. Log-probabilities are in nats per latent element (the mean over elements of a step's log-density), so a
ratio is that of a single element, on geometric average, and useful clip ranges are small: 1e-5 to 1e-3.
"""

import torch
from torch import Tensor

from omni_losses.output import LossOutput


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_range: float | tuple[float, float],
    adv_clip_max: float = 5.0,
    weights: Tensor | None = None,
) -> LossOutput:
    """The clipped policy-gradient loss of one denoising step.

        r_i = exp(log_prob_i - old_log_prob_i),   A_i clamped to +-adv_clip_max
        L   = 1/B sum_i w_i max(-A_i r_i, -A_i clip(r_i, 1 - low, 1 + high))

    The gradient of a sample is 0 where r has already moved past the bound that A points to, and only there. At r = 1 it
    is the policy gradient, -A_i times the gradient of log_prob_i, over B.

    Args:
        log_prob: [B], nats per latent element, of the weights being trained; gradients flow here only.
        old_log_prob: [B], same unit, of the weights before the update.
        advantages: [B], dimensionless.
        clip_range: half-width around 1, or (low, high) for different widths below and above.
        adv_clip_max: bound on |A|.
        weights: [B] or None; factor of each sample's loss, such as a rollout correction, or 0 for a masked sample. The
            sum is divided by B whatever the weights, so a masked sample does not raise the weight of the others.

    Returns:
        The loss and, of the unweighted batch: `ratio_mean`; `ratio_std`, squares divided by B; `ratio_max_dev`, the
        largest |r - 1|, 0 before the first update if both log-probabilities come from the same arithmetic;
        `clip_fraction`, `clip_fraction_low`, `clip_fraction_high`, the shares of r outside, below and above the range,
        whatever A's sign; `approx_kl`, half the mean of squared log-ratios; `ppo_kl`, the mean of -log r.

    Raises:
        ValueError: shapes differ, or a clip bound is not positive.

    Source: the objective of Flow-GRPO (arXiv 2505.05470) for one step, without its KL term: add `gaussian_kl` for that.
    Different bounds below and above: DAPO (arXiv 2503.14476).
    """
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    _check(log_prob, old_log_prob, advantages, weights)
    if not (low > 0 and high > 0):
        raise ValueError(f"clip_range must be > 0, got {clip_range}")
    if not adv_clip_max > 0:
        raise ValueError(f"adv_clip_max must be > 0, got {adv_clip_max}")
    log_ratio = log_prob.float() - old_log_prob.detach().float()
    ratio = log_ratio.exp()
    adv = advantages.detach().float().clamp(-adv_clip_max, adv_clip_max)
    losses = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
    if weights is not None:
        losses = losses * weights.detach().float()
    return LossOutput(losses.mean(), _ratio_metrics(log_ratio.detach(), low, high))


def _ratio_metrics(log_ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    ratio = log_ratio.exp()
    below, above = (ratio < 1 - low).float().mean(), (ratio > 1 + high).float().mean()
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_max_dev": (ratio - 1).abs().max(),
        "clip_fraction": below + above,
        "clip_fraction_low": below,
        "clip_fraction_high": above,
        "approx_kl": 0.5 * log_ratio.square().mean(),
        "ppo_kl": -log_ratio.mean(),
    }


def _check(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, weights: Tensor | None) -> None:
    if log_prob.ndim != 1 or len(log_prob) == 0:
        raise ValueError(f"log_prob must be [B] with B >= 1, got shape {tuple(log_prob.shape)}")
    others = {"old_log_prob": old_log_prob, "advantages": advantages, "weights": weights}
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != log_prob.shape:
            raise ValueError(f"{name} must have log_prob's shape {tuple(log_prob.shape)}, got {tuple(tensor.shape)}")
