"""Losses that move a policy's log-probability along the advantage.

Notation: B samples, one denoising step each. Losses are minimized, so a positive advantage raises the
log-probability. Log-probabilities are in nats per latent element (the mean over elements of a step's log-density), so
a ratio is per element (geometric mean), and useful clip ranges are small: 1e-5 to 1e-3.

`mean`, `old_mean` and `std` describe the step's transition, as returned by the stochastic steps of omni-sched:
`std` is the standard deviation of x_next given x, including the factor sqrt(-dt).
"""

import torch
from torch import Tensor

from omni_losses.divergence import gaussian_kl
from omni_losses.output import (
    LossOutput,
    clip_metrics,
    ratio_metrics,
    require_batch,
    require_clip_width,
    require_per_sample,
    require_positive,
    require_shape_of,
    weighted_mean,
)

ClipRange = float | tuple[float, float]


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_range: ClipRange,
    adv_clip_max: float = 5.0,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute the clipped policy-gradient loss of one denoising step.

        r_i = exp(log_prob_i - old_log_prob_i),   A_i clamped to +-adv_clip_max
        L   = 1/B sum_i w_i max(-A_i r_i, -A_i clip(r_i, 1 - low, 1 + high))

    The gradient of a sample is 0 only where r has already passed the bound in the direction of A. At r = 1, it
    is the policy gradient, -A_i times the gradient of log_prob_i, over B.

    Args:
        log_prob: [B], nats per latent element, from the weights being trained; gradients flow here only.
        old_log_prob: [B], same unit, from the weights before the update.
        advantages: [B], dimensionless.
        clip_range: half-width around 1, >= 1e-6, or (low, high) for different widths below and above.
        adv_clip_max: bound on |A|.
        weights: [B] or None; factor of each sample's loss, such as a rollout correction, or 0 for a masked sample. The
            sum is always divided by B, so masking a sample does not raise the weight of the others.

    Returns:
        The loss and, for the unweighted batch: `ratio_mean`; `ratio_std`, squares divided by B; `ratio_max_dev`, the
        largest |r - 1|, 0 before the first update if both log-probabilities come from the same arithmetic;
        `clip_fraction`, `clip_fraction_low`, `clip_fraction_high`, the shares of r outside, below and above the range,
        for either sign of A; `approx_kl`, half the mean of squared log-ratios; `ppo_kl`, the mean of -log r.

    Raises:
        ValueError: shapes differ, or float32 cannot represent a clip width around 1.

    Source: the objective of Flow-GRPO (arXiv 2505.05470) for one step, without its KL term: add `gaussian_kl` for that.
    Different bounds below and above: DAPO (arXiv 2503.14476). Released code (flow_grpo, verl-omni) has the same loss;
    its KL term omits |dt|, see `gaussian_kl`.
    """
    low, high = _clip_bounds(clip_range)
    require_batch("log_prob", log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    require_positive(adv_clip_max=adv_clip_max)
    adv = advantages.detach().float().clamp(-adv_clip_max, adv_clip_max)
    log_ratio = log_prob.float() - old_log_prob.detach().float()
    ratio = log_ratio.exp()
    losses = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
    metrics = ratio_metrics(log_ratio.detach()) | clip_metrics(log_ratio.detach(), low, high)
    return LossOutput(weighted_mean(losses, weights), metrics)


def grpo_guard_loss(  # noqa: PLR0913 - all but three are keyword-only, and each is a different quantity of the step
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    sqrt_dt: Tensor | None = None,
    clip_range: ClipRange,
    adv_clip_max: float = 5.0,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute a clipped loss whose ratio has mean 1 and the same spread at every step, with equally weighted steps.

        b_i = gaussian_kl(mean_i, old_mean_i, std_i)
        r_i = exp((log_prob_i - old_log_prob_i + b_i) std_i),   A_i clamped to +-adv_clip_max
        L   = 1/B sum_i w_i max(-A_i r_i, -A_i clip(r_i, 1 - low, 1 + high)) / sqrt_dt_i^2

    For x_next = old_mean + std z, the log-ratio is mean(z (mean - old_mean)) / std - b. It is shifted to the left,
    so that good samples never reach the upper bound, and its spread depends on the step. This loss corrects both:
    r = exp(mean(z (mean - old_mean))), mean over elements. Ratios stay closer to 1 than in `grpo_loss`: published clip
    ranges are 2e-6 and 4e-6.

    Args:
        log_prob, old_log_prob, advantages, clip_range, adv_clip_max, weights: as in `grpo_loss`. The log-probabilities
            must come from normal distributions, so the unnormalized ones of `cps_step` do not qualify.
        mean: [B, ...], latent units, from the weights being trained; gradients flow here and through log_prob.
        old_mean: [B, ...], latent units, from the weights before the update.
        std: [B], latent units, > 0: the standard deviation of x_next given x, including the factor sqrt(-dt).
        sqrt_dt: [B], sqrt(sigma - sigma_next), > 0, or None to skip the division.

    Returns:
        The loss and the metrics of `grpo_loss`: the ratio metrics for the r above, `approx_kl` and `ppo_kl` for the
        plain log-ratio; and `mean_shift_kl`, the mean of b.

    Raises:
        ValueError: shapes do not match, or float32 cannot represent a clip width around 1.

    Source: GRPO-Guard (arXiv 2510.22319), eq. 8 for the ratio. Released code (flow_grpo) averages b over the whole
    batch instead of per sample, as does verl-omni with std and sqrt_dt; Flow-Factory does not divide by sqrt_dt^2.
    """
    low, high = _clip_bounds(clip_range)
    require_batch("log_prob", log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    require_shape_of("log_prob", log_prob, std=std, sqrt_dt=sqrt_dt)
    require_positive(adv_clip_max=adv_clip_max)
    adv = advantages.detach().float().clamp(-adv_clip_max, adv_clip_max)
    bias = gaussian_kl(mean, old_mean, std)
    require_per_sample(mean, log_prob=log_prob)
    log_ratio = log_prob.float() - old_log_prob.detach().float()
    guarded = (log_ratio + bias) * std.detach().float()
    ratio = guarded.exp()
    losses = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
    if sqrt_dt is not None:
        losses = losses / sqrt_dt.detach().float().square()
    metrics = ratio_metrics(guarded.detach()) | clip_metrics(guarded.detach(), low, high)
    plain = ratio_metrics(log_ratio.detach())
    metrics |= {name: plain[name] for name in ("approx_kl", "ppo_kl")} | {"mean_shift_kl": bias.detach().mean()}
    return LossOutput(weighted_mean(losses, weights), metrics)


def flow_dppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    kl_threshold: float = 1e-5,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute the policy-gradient loss of one denoising step, with a trust region in the KL instead of a clipped ratio.

        r_i    = exp(log_prob_i - old_log_prob_i),   k_i = gaussian_kl(mean_i, old_mean_i, std_i)
        drop_i = k_i >= kl_threshold and (r_i > 1 and A_i > 0, or r_i < 1 and A_i < 0)
        L      = 1/B sum_i w_i (0 if drop_i else -A_i r_i)

    A sample is dropped only if its step has left the region and its gradient would lead further away; a step outside
    may still return. k is exact, while the ratio is one noisy sample. Advantages are not clamped.

    Args:
        log_prob, old_log_prob, advantages, weights: as in `grpo_loss`; dropped samples stay in the divisor B.
        mean: [B, ...], latent units, from the weights being trained; it decides which samples are dropped, no gradient.
        old_mean: [B, ...], latent units, from the weights before the update.
        std: [B], latent units, > 0: the standard deviation of x_next given x, including the factor sqrt(-dt).
        kl_threshold: bound on k, nats per latent element, > 0.

    Returns:
        The loss and, for the unweighted batch: `ratio_mean`, `ratio_std`, `ratio_max_dev`, `approx_kl`, `ppo_kl` as in
        `grpo_loss`; `kl_mean`, `kl_max` of k; `kl_fraction`, the share of samples outside the region; `drop_fraction`.

    Raises:
        ValueError: shapes do not match, or kl_threshold is not positive.

    Source: Flow-DPPO (arXiv 2606.11025), eq. 14 for k and eq. 18 for the dropped samples. There, k is a sum over latent
    elements; the released code, the source of this threshold, takes the mean as here.
    """
    require_batch("log_prob", log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    require_shape_of("log_prob", log_prob, std=std)
    require_positive(kl_threshold=kl_threshold)
    kl = gaussian_kl(mean.detach(), old_mean, std)
    require_per_sample(mean, log_prob=log_prob)
    log_ratio = log_prob.float() - old_log_prob.detach().float()
    adv = advantages.detach().float()
    outside = kl >= kl_threshold
    drop = outside & (log_ratio.detach() * adv > 0)
    losses = torch.where(drop, 0.0, -adv * log_ratio.exp())
    metrics = ratio_metrics(log_ratio.detach()) | {
        "kl_mean": kl.mean(),
        "kl_max": kl.max(),
        "kl_fraction": outside.float().mean(),
        "drop_fraction": drop.float().mean(),
    }
    return LossOutput(weighted_mean(losses, weights), metrics)


def tempflow_weights(std: Tensor, *, scale: float = 2.25) -> Tensor:
    """Return weights [B] proportional to the injected noise of a step: scale * std.

    Pass them as `weights` to `grpo_loss`. The weight of a step then falls from the noisy start of the schedule to its
    end, where fresh noise has little effect.

    Args:
        std: [B], latent units: the standard deviation of x_next given x, including the factor sqrt(-dt).
        scale: 1 / latent units, > 0. 2.25 makes the mean weight 1 for the paper's schedule: 10 steps with shift 3,
            `sde_step` with noise_level 0.7, without the last step. For other schedules, use 1 / mean(std) of the steps.

    Raises:
        ValueError: scale is not positive.

    Source: the noise-aware weighting of TempFlow-GRPO (arXiv 2508.04324); factor and std as in its released code.
    """
    require_positive(scale=scale)
    return scale * std.detach().float()


def _clip_bounds(clip_range: ClipRange) -> tuple[float, float]:
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    for width in (low, high):
        require_clip_width(clip_range=width)
    return low, high
