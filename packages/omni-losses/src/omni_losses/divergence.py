"""Divergences of a policy from a reference or a teacher.

Notation: B samples; V tokens of a vocabulary. A step's transition is a normal distribution around `mean` with one
`std` for all latent elements. Distances between latents are means over latent elements, so they do not grow with the
size of the image.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from omni_losses.output import (
    LossOutput,
    element_mean,
    require_latents,
    require_per_sample,
    require_shape_of,
    weighted_mean,
)

Divergence = Literal["reverse", "forward", "jsd"]


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """Compute the KL divergence of a step's transition from the reference's, [B], nats per latent element.

        KL = mean over elements of (mean - ref_mean)^2 / (2 std^2)

    Times the number of latent elements, this is the exact KL of the two normal distributions, which share `std`.

    Args:
        mean: [B, ...], latent units, from the weights being trained.
        ref_mean: [B, ...], latent units, from the reference; no gradient flows here.
        std: [B], latent units, > 0: the standard deviation of x_next given x, including the factor sqrt(-dt).

    Raises:
        ValueError: shapes do not match.

    Source: the closed-form KL of Flow-GRPO (arXiv 2505.05470). Released code (flow_grpo, verl-omni) takes the diffusion
    coefficient for `std`, without sqrt(-dt): its KL is |dt| times this one, so a coefficient tuned there must be
    multiplied by |dt| here.
    """
    if mean.ndim < 2 or ref_mean.shape != mean.shape:
        raise ValueError(
            f"mean and ref_mean must both be [B, ...], got shapes {tuple(mean.shape)} and {tuple(ref_mean.shape)}"
        )
    require_per_sample(mean, std=std)
    squares = element_mean((mean.float() - ref_mean.detach().float()).square())
    return squares / (2 * std.detach().float().square())


def velocity_kl(velocity: Tensor, ref_velocity: Tensor) -> Tensor:
    """Compute the squared distance of two velocities at a latent, [B], latent units squared: a KL without step weight.

        D = mean over elements of (velocity - ref_velocity)^2

    At one step, the means of two policies differ by a known factor times the difference of their velocities, so
    `gaussian_kl` is this distance times factor^2 / (2 std^2): for a small `noise_level`, |dt| / (2 S^2) with
    S = std / sqrt(-dt). D omits that weight. It needs no noise and no step, so it also serves forward-process losses.

    Args:
        velocity: [B, ...], latent units, from the weights being trained.
        ref_velocity: [B, ...], latent units, from the reference at the same latent; no gradient flows here.

    Raises:
        ValueError: shapes do not match.

    Source: the reference penalty of DiffusionNFT (arXiv 2509.16117) and of AWM (arXiv 2509.25050). AWM's released code
    can also divide it by 2 S^2, S = 0.7 sqrt(sigma / (1 - sigma)), with the option `ELBO`; no published preset does.
    """
    require_latents("velocity", velocity, ref_velocity=ref_velocity)
    return element_mean((velocity.float() - ref_velocity.detach().float()).square())


def k3_kl(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from the policy's samples, with the shape and unit of log_prob.

        d = ref_log_prob - log_prob,   k3 = exp(d) - 1 - d

    It is never negative, and 0 only where the two agree. It is unbiased if log_prob is a complete log-probability, such
    as a token's. For diffusion steps, whose log_prob is a mean over latent elements, it is close to d^2 / 2, which is
    not a KL: prefer the exact `gaussian_kl` there.

    Args:
        log_prob: any shape, nats, from the weights being trained.
        ref_log_prob: same shape, nats, from the reference; no gradient flows here.

    Raises:
        ValueError: shapes differ.

    Source: J. Schulman, "Approximating KL divergence" (2020); the penalty of GRPO, DeepSeekMath (arXiv 2402.03300),
    eq. 4.
    """
    require_shape_of("log_prob", log_prob, ref_log_prob=ref_log_prob)
    log_ratio = ref_log_prob.detach().float() - log_prob.float()
    return torch.expm1(log_ratio) - log_ratio


def distill_kl_loss(mean: Tensor, teacher_mean: Tensor, std: Tensor, *, weights: Tensor | None = None) -> LossOutput:
    """Compute on-policy distillation for a stochastic step: the KL to the teacher's transition at the student's latent.

        L = 1/B sum_i w_i gaussian_kl(mean_i, teacher_mean_i, std_i)

    Args:
        mean: [B, ...], latent units, from the student at latents that the student sampled.
        teacher_mean: [B, ...], latent units, from the teacher at the same latents; no gradient flows here.
        std: [B], latent units, > 0: the standard deviation of x_next given x, including the factor sqrt(-dt).
        weights: [B] or None; factor of each sample's loss, 0 for a masked sample; the divisor stays B.

    Returns:
        The loss and `distill_kl`, the unweighted mean, nats per latent element.

    Raises:
        ValueError: shapes do not match.

    Source: the closed-form KL of a step in DiffusionOPD (arXiv 2605.15055). The code of verl-omni takes `std` without
    sqrt(-dt), so that its loss is |dt| times this one.
    """
    kl = gaussian_kl(mean, teacher_mean, std)
    require_shape_of("std", std, weights=weights)
    return LossOutput(weighted_mean(kl, weights), {"distill_kl": kl.detach().mean()})


def distill_velocity_loss(velocity: Tensor, teacher_velocity: Tensor, *, weights: Tensor | None = None) -> LossOutput:
    """Compute on-policy distillation of velocities: mean squared distance to the teacher's at the student's latents.

        L = 1/B sum_i w_i velocity_kl(velocity_i, teacher_velocity_i)

    Unlike `distill_kl_loss` it needs no noise, so the latents may come from deterministic sampling, and every noise
    level has the same weight.

    Args:
        velocity: [B, ...], latent units, from the student at latents that the student sampled.
        teacher_velocity: [B, ...], latent units, from the teacher at the same latents; no gradient flows here.
        weights: [B] or None; factor of each sample's loss, 0 for a masked sample; the divisor stays B.

    Returns:
        The loss and `distill_velocity_error`, the unweighted mean.

    Raises:
        ValueError: shapes do not match.

    Source: the ODE form of the mean matching of DiffusionOPD (arXiv 2605.15055).
    """
    errors = velocity_kl(velocity, teacher_velocity)
    require_per_sample(velocity, weights=weights)
    return LossOutput(weighted_mean(errors, weights), {"distill_velocity_error": errors.detach().mean()})


def token_divergence(log_probs: Tensor, teacher_log_probs: Tensor, *, divergence: Divergence) -> Tensor:
    """Compute the divergence of the student's next-token distribution p from the teacher's q, [...], float32, nats.

        "reverse"   KL(p || q) = sum_v p_v (log p_v - log q_v)
        "forward"   KL(q || p)
        "jsd"       1/2 KL(p || m) + 1/2 KL(q || m),   m = (p + q) / 2, at most log 2

    A token with probability 0 in both, such as a suppressed token, adds 0 and has gradient 0. A KL is infinite if its
    first distribution has a token that the second excludes; "jsd" is always finite. Equal distributions give exactly 0.

    Args:
        log_probs: [..., V], nats, from the student, normalized over V, -inf for excluded tokens; gradients flow here
            only.
        teacher_log_probs: [..., V], same unit, from the teacher at the same positions.
        divergence: as above.

    Raises:
        ValueError: shapes differ, V is missing or 0, or an unknown divergence.

    Source: GKD (arXiv 2306.13649), section 2, its generalized Jensen-Shannon divergence with beta 0.5. On the student's
    own answers, "reverse" is the loss of on-policy distillation.
    """
    if log_probs.ndim == 0 or log_probs.shape[-1] == 0:
        raise ValueError(f"log_probs must be [..., V] with V >= 1, got shape {tuple(log_probs.shape)}")
    require_shape_of("log_probs", log_probs, teacher_log_probs=teacher_log_probs)
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence must be one of {get_args(Divergence)}, got {divergence!r}")
    student, teacher = log_probs.float(), teacher_log_probs.detach().float()
    if divergence == "jsd":
        return (_kl_to_mean(student, teacher) + _kl_to_mean(teacher, student)) / 2
    return _kl(student, teacher) if divergence == "reverse" else _kl(teacher, student)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, log_ratio = _prob_and_log_ratio(log_p, log_q)
    return (p * log_ratio).sum(dim=-1)


def _kl_to_mean(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || (p + q) / 2), [...]: log p - log((p + q) / 2) is log 2 + log sigmoid(log p - log q)."""
    p, log_ratio = _prob_and_log_ratio(log_p, log_q)
    return (p * (math.log(2) + logsigmoid(log_ratio))).sum(dim=-1)


def _prob_and_log_ratio(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and log p - log q, [..., V]; the latter is 0 where p is 0, as inf - inf and 0 * inf are NaN."""
    p = log_p.exp()
    return p, torch.where(p == 0, 0.0, log_p - log_q)
