"""Losses of the forward process: velocities at finished samples that are noised again, without a trajectory.

Notation: B samples, each with one noise level. x0 is a sample that the policy generated, noise is standard normal and
independent of x0,

    x_t = (1 - sigma) * x0 + sigma * noise,   target = noise - x0

and a velocity predicts target from x_t. sigma is the noise level in (0, 1], called t in papers. Any sampler may have
generated x0, since the density of its steps is not needed.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from omni_losses.divergence import velocity_kl
from omni_losses.output import (
    LossOutput,
    clip_metrics,
    element_mean,
    expand_like,
    ratio_metrics,
    require_batch,
    require_latents,
    require_per_sample,
    require_positive,
    require_shape_of,
    weighted_mean,
)
from omni_losses.policy import ClipRange, _clip_bounds, grpo_loss

DecaySchedule = Literal["copy", "linear", "delayed_linear"]
AwmWeighting = Literal["uniform", "t", "t2", "huber", "ghuber"]

POWERS: dict[AwmWeighting, int] = {"uniform": 0, "t": 1, "t2": 2}  # of sigma
HUBER_EPS = 1e-10  # added to the squared error, so that its roots have a gradient at 0
GHUBER_POWER = 0.25


def velocity_error(velocity: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """Compute the flow-matching error of each sample, [B]: mean over elements of (velocity - (noise - x0))^2.

    This is the pretraining loss, the quantity that `diffusion_dpo_loss` compares and, negated, AWM's log-probability.

    Args:
        velocity: [B, ...], latent units, predicted at (1 - sigma) * x0 + sigma * noise.
        x0, noise: [B, ...], latent units.

    Raises:
        ValueError: shapes do not match.

    Source: rectified flow (arXiv 2209.03003), eq. 1, for one sample, noise and sigma; there, data is at time 1.
    """
    require_latents("velocity", velocity, x0=x0, noise=noise)
    target = noise.detach().float() - x0.detach().float()
    return element_mean((velocity.float() - target).square())


def reward_probability(advantages: Tensor, *, adv_clip_max: float = 5.0) -> Tensor:
    """Return the probability that each sample is good, in [0, 1], float32: 1/2 + A / (2 adv_clip_max), clipped.

    A is the advantage: adv_clip_max or more gives 1, 0 gives 1/2, -adv_clip_max or less gives 0.

    A sample with advantage 0, such as one without a score, gets 1/2, which pulls it towards the old policy in
    `diffusion_nft_loss`; pass weight 0 there to exclude it.

    Args:
        advantages: any shape, dimensionless.
        adv_clip_max: advantage at which a sample is certainly good, > 0; must equal that of `diffusion_nft_loss`.

    Raises:
        ValueError: adv_clip_max is not positive.

    Source: the optimality probability of DiffusionNFT (arXiv 2509.16117).
    """
    require_positive(adv_clip_max=adv_clip_max)
    return (0.5 + advantages.detach().float() / (2 * adv_clip_max)).clamp(0, 1)


def old_policy_decay(step: int, *, schedule: DecaySchedule) -> float:
    """Return the decay of the old policy's moving average after training step `step`, counted from 0.

        old <- decay * old + (1 - decay) * trained

    schedule is one of
        copy: 0, the old policy becomes the trained one (on-policy);
        linear: 0.001 * step, at most 0.5;
        delayed_linear: 0 for 75 steps, then 0.0075 * (step - 75), at most 0.999.

    Raises:
        ValueError: unknown schedule, or step < 0.

    Source: the schedules of DiffusionNFT (arXiv 2509.16117), decay types 0, 1 and 2 of its released code; there, step
    counts optimizer steps.
    """
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    if schedule not in get_args(DecaySchedule):
        raise ValueError(f"schedule must be one of {get_args(DecaySchedule)}, got {schedule!r}")
    if schedule == "copy":
        return 0.0
    if schedule == "linear":
        return min(0.001 * step, 0.5)
    return min(0.0075 * max(step - 75, 0), 0.999)


def diffusion_nft_loss(  # noqa: PLR0913 - all but six are keyword-only, and each is a different quantity
    velocity: Tensor,
    old_velocity: Tensor,
    x0: Tensor,
    x_t: Tensor,
    sigma: Tensor,
    reward_prob: Tensor,
    *,
    nft_beta: float,
    adv_clip_max: float = 5.0,
    ref_velocity: Tensor | None = None,
    kl_coef: float = 0.0,
    min_weight: float = 1e-5,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute DiffusionNFT's contrastive loss: good samples pull the velocity, bad ones push it, around the old policy.

        v+  = old + nft_beta (velocity - old),   v- = old - nft_beta (velocity - old)
        x+- = x_t - sigma v+-,                   w+- = max(min_weight, mean |x+- - x0|), without gradient
        l+- = mean (x+- - x0)^2 / w+-
        L   = 1/B sum_i w_i [adv_clip_max (q_i l+_i + (1 - q_i) l-_i) / nft_beta + kl_coef velocity_kl(velocity, ref)_i]

    Means are over latent elements. If velocity equals old, the gradient is (2 q - 1) adv_clip_max sigma^2 / w times
    that of `velocity_error`: it does not depend on nft_beta, and is 0 at q = 1/2.

    Args:
        velocity: [B, ...], latent units, from the weights being trained, at x_t; gradients flow here only.
        old_velocity: [B, ...], latent units, from the policy that sampled x0, at x_t.
        x0: [B, ...], latent units, the samples.
        x_t: [B, ...], latent units, (1 - sigma) * x0 + sigma * noise with fresh noise.
        sigma: [B], noise level in (0, 1].
        reward_prob: [B], q in [0, 1], from `reward_probability`.
        nft_beta: > 0, distance of v+ and v- from old; published values are 1 (GenEval, PickScore) and 0.1 (OCR, several
            rewards).
        adv_clip_max: > 0, as passed to `reward_probability`; scales the loss, so that advantages keep their unit.
        ref_velocity: [B, ...] or None, latent units, from the reference at x_t.
        kl_coef: weight of the distance to the reference, >= 0; published 1e-4.
        min_weight: floor of w, latent units, > 0.
        weights: [B] or None; factor of each sample's loss, 0 for a sample without a score; the divisor stays B.

    Returns:
        The loss and, for the unweighted batch: `positive_loss`, `negative_loss`, the means of l+ and l-;
        `reward_prob_mean`; `old_deviation`, the mean of (velocity - old)^2; and `velocity_kl` if there is a reference.

    Raises:
        ValueError: shapes do not match, a number is out of range, or kl_coef > 0 without ref_velocity.

    Source: DiffusionNFT (arXiv 2509.16117), its objective with the self-normalized x0 regression. Released code
    computes w in float64.
    """
    require_latents("velocity", velocity, old_velocity=old_velocity, x0=x0, x_t=x_t, ref_velocity=ref_velocity)
    require_per_sample(velocity, sigma=sigma, reward_prob=reward_prob, weights=weights)
    require_positive(nft_beta=nft_beta, adv_clip_max=adv_clip_max, min_weight=min_weight)
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be >= 0, got {kl_coef}")
    if kl_coef > 0 and ref_velocity is None:
        raise ValueError(f"ref_velocity must be given with kl_coef > 0, got None and {kl_coef}")
    old, x0, x_t = (tensor.detach().float() for tensor in (old_velocity, x0, x_t))
    shift = nft_beta * (velocity.float() - old)
    level = expand_like(sigma.detach().float(), velocity)
    positive = _normalized_error(x_t - level * (old + shift), x0, min_weight)
    negative = _normalized_error(x_t - level * (old - shift), x0, min_weight)
    prob = reward_prob.detach().float()
    losses = adv_clip_max * (prob * positive + (1 - prob) * negative) / nft_beta
    metrics = {
        "positive_loss": positive.detach().mean(),
        "negative_loss": negative.detach().mean(),
        "reward_prob_mean": prob.mean(),
        "old_deviation": velocity_kl(velocity.detach(), old).mean(),
    }
    if ref_velocity is not None:
        kl = velocity_kl(velocity, ref_velocity)
        losses = losses + kl_coef * kl
        metrics["velocity_kl"] = kl.detach().mean()
    return LossOutput(weighted_mean(losses, weights), metrics)


def awm_log_prob(
    velocity: Tensor, x0: Tensor, noise: Tensor, sigma: Tensor, *, weighting: AwmWeighting = "ghuber"
) -> Tensor:
    """Compute AWM's log-probability of each sample, [B]: minus its weighted flow-matching error e.

        uniform: -e;  t: -sigma e;  t2: -sigma^2 e
        huber:  -sigma (sqrt(e + 1e-10) - 1e-5)
        ghuber: -sigma ((e + 1e-10)^p - 1e-10^p) / p,  p = 1/4

    All are 0 at e = 0 and decrease with e. The huber variants reduce the influence of large errors.

    Args:
        velocity: [B, ...], latent units, predicted at (1 - sigma) * x0 + sigma * noise.
        x0, noise: [B, ...], latent units. Only log-probabilities at the same noise and sigma can be compared.
        sigma: [B], noise level in (0, 1].
        weighting: as above; the published presets use ghuber.

    Raises:
        ValueError: shapes do not match, or unknown weighting.

    Source: Advantage Weighted Matching (arXiv 2509.25050); weightings as in its released code, which computes them in
    float64 and spells t2 as t**2.
    """
    if weighting not in get_args(AwmWeighting):
        raise ValueError(f"weighting must be one of {get_args(AwmWeighting)}, got {weighting!r}")
    error = velocity_error(velocity, x0, noise)
    require_per_sample(velocity, sigma=sigma)
    level = sigma.detach().float()
    if weighting in POWERS:
        return -(level ** POWERS[weighting]) * error
    if weighting == "huber":
        return -level * ((error + HUBER_EPS).sqrt() - HUBER_EPS**0.5)
    return -level * ((error + HUBER_EPS) ** GHUBER_POWER - HUBER_EPS**GHUBER_POWER) / GHUBER_POWER


def awm_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_range: ClipRange = 1.0,
    adv_clip_max: float = 5.0,
    weights: Tensor | None = None,
) -> LossOutput:
    """Compute the loss of AWM: `grpo_loss` on `awm_log_prob`, that is, flow matching weighted by the advantage.

    At ratio 1, its gradient is A_i times that of the weighted flow-matching error: good samples are learned as if they
    were data, bad ones unlearned. Add `kl_coef * velocity_kl(velocity, ref_velocity).mean()` for the reference, and the
    same with the velocity of a moving average of the weights: the published presets use 1e-4 to 3e-3 and 1.

    Args:
        log_prob: [B], from `awm_log_prob` with the weights being trained; gradients flow here only.
        old_log_prob: [B], with the weights before the update and the same x0, noise, sigma and weighting.
        advantages: [B], dimensionless.
        clip_range, adv_clip_max, weights: as in `grpo_loss`. The published clip range is 1: it clips ratios at 2 and
            never from below.

    Returns:
        The loss and metrics of `grpo_loss`.

    Raises:
        ValueError: as `grpo_loss`.

    Source: Advantage Weighted Matching (arXiv 2509.25050). Released code divides the clamped advantages by
    adv_clip_max, which makes its loss 5 times smaller than this one.
    """
    return grpo_loss(
        log_prob, old_log_prob, advantages, clip_range=clip_range, adv_clip_max=adv_clip_max, weights=weights
    )


def dgpo_loss(
    error: Tensor,
    ref_error: Tensor,
    old_error: Tensor,
    advantages: Tensor,
    groups: Tensor,
    *,
    dgpo_beta: float,
    clip_range: ClipRange = 1e-2,
    adv_clip_max: float = 5.0,
) -> LossOutput:
    """Compute the loss of DGPO: flow matching weighted by the advantage and by the ranking error left in the group.

        s_G = dgpo_beta / |G| sum_{i in G} A_i (error_i - ref_error_i),   a constant
        L   = 1/B sum_i sigmoid(s_G(i)) A_i error_i

    L has the gradient of -log sigmoid(-s_G), times |G| / (B dgpo_beta); sigmoid(-s_G) is the likelihood that a group's
    better samples are preferred to its worse ones. A sample gets no gradient if its ratio exp(old_error - error) is
    above 1 + high at an advantage > 0, or below 1 - low otherwise.

    Args:
        error: [B], from `velocity_error` with the weights being trained; gradients flow here only. The samples of a
            group share noise and noise level.
        ref_error: [B], from the reference, with the same noise and noise level.
        old_error: [B], from the old policy, likewise.
        advantages: [B], dimensionless, with a sum near 0 in each group; 0 for a sample without a score.
        groups: [B], integer ids; all samples of a group are in the batch.
        dgpo_beta: > 0; published 100 with the policy before training as the reference, 2000 with a moving average.
        clip_range, adv_clip_max: as in `grpo_loss`.

    Returns:
        The loss, the metrics of `grpo_loss` for the ratio above, and `group_weight`, the mean of sigmoid(s_G).

    Raises:
        ValueError: shapes do not match, or a number is out of range.

    Source: DGPO (arXiv 2510.08425); the ratio and its clipping follow its released code, as does the weight
    sigmoid(s_G) without the factor dgpo_beta / |G|.
    """
    low, high = _clip_bounds(clip_range)
    require_positive(dgpo_beta=dgpo_beta, adv_clip_max=adv_clip_max)
    require_batch("error", error, ref_error=ref_error, old_error=old_error, advantages=advantages)
    require_shape_of("error", error, groups=groups)
    current, advantage = error.detach().float(), advantages.detach().float().clamp(-adv_clip_max, adv_clip_max)
    is_same = groups[:, None] == groups
    gains = torch.where(is_same, advantage * (current - ref_error.detach().float()), 0.0)
    # CUDA adds by index in any order, and to find the indices would wait for the device; sums of rows do neither.
    weight = torch.sigmoid(dgpo_beta * (gains.sum(dim=1) / is_same.sum(dim=1)))
    log_ratio = old_error.detach().float() - current
    clipped = torch.where(advantage > 0, log_ratio.exp() > 1 + high, log_ratio.exp() < 1 - low)
    losses = weight * advantage * torch.where(clipped, current, error.float())
    metrics = ratio_metrics(log_ratio) | clip_metrics(log_ratio, low, high) | {"group_weight": weight.mean()}
    return LossOutput(losses.mean(), metrics)


def _normalized_error(predicted: Tensor, x0: Tensor, min_weight: float) -> Tensor:
    """Return squared error over absolute error, [B]; no gradient flows through the absolute error."""
    weight = element_mean((predicted.detach() - x0).abs()).clamp(min=min_weight)
    return element_mean((predicted - x0).square()) / weight
