"""Losses that match the distribution of a few-step student's samples to that of a teacher.

Notation: B samples, each with one noise level. A sample is noised to x at level sigma, where a velocity predicts the
clean sample `x - sigma * velocity` and the noise `x + (1 - sigma) * velocity`. The teacher predicts for its training
data; the fake net, which is trained alongside the student, predicts for the student's samples. The difference of the
two predictions is that of the scores of the two distributions:

    fake_x0 - teacher_x0 = sigma^2 / (1 - sigma) (score of the student's samples - score of the teacher's)
"""

from torch import Tensor

from omni_losses.output import (
    LossOutput,
    element_mean,
    expand_like,
    require_latents,
    require_per_sample,
    require_positive,
    weighted_mean,
)


def distribution_matching_loss(
    x0: Tensor, fake_x0: Tensor, teacher_x0: Tensor, *, min_scale: float = 1e-5, weights: Tensor | None = None
) -> LossOutput:
    """Compute the loss whose gradient moves the student's samples from their distribution to the teacher's.

        g_i = (fake_x0_i - teacher_x0_i) / max(min_scale, mean over elements of |x0_i - teacher_x0_i|),   a constant
        L   = 1/B sum_i w_i mean over elements of 1/2 ((x0_i - target_i)^2),   target_i = x0_i - g_i, a constant

    The gradient of L with respect to an element of x0_i is w_i g_i / (B elements): up to its scale, the gradient of
    KL(student || teacher) at that noise level. It is 0 where fake and teacher agree. TDM-R1 maximizes a learned reward
    with the same loss: the net before training replaces the fake net, and the net with the learned reward replaces the
    teacher.

    Args:
        x0: [B, ...], latent units, clean samples that the student predicts; gradients flow here only.
        fake_x0: [B, ...], latent units, predicted by the fake net from the noised x0.
        teacher_x0: [B, ...], latent units, predicted by the teacher from the same input.
        min_scale: floor of the divisor, latent units, > 0.
        weights: [B] or None; factor of each sample's loss, 0 for a masked sample; the divisor stays B.

    Returns:
        The loss and `matching_error`, the unweighted mean of |fake_x0 - teacher_x0|, latent units.

    Raises:
        ValueError: shapes do not match, or min_scale is not positive.

    Source: gradient and divisor of DMD (arXiv 2311.18828), as in DMD2 (arXiv 2405.14867), without its regression; TDM
    (arXiv 2503.06674) for samples of a trajectory; the reward term of TDM-R1 (arXiv 2603.07700). The released code of
    TDM can use a pseudo-Huber loss instead of the square.
    """
    require_latents("x0", x0, fake_x0=fake_x0, teacher_x0=teacher_x0)
    require_per_sample(x0, weights=weights)
    require_positive(min_scale=min_scale)
    student, fake, teacher = (tensor.detach().float() for tensor in (x0, fake_x0, teacher_x0))
    scale = element_mean((student - teacher).abs()).clamp(min=min_scale)
    target = student - (fake - teacher) / expand_like(scale, student)
    losses = element_mean((x0.float() - target).square()) / 2
    return LossOutput(weighted_mean(losses, weights), {"matching_error": (fake - teacher).abs().mean()})


def added_noise_error(velocity: Tensor, x: Tensor, noise: Tensor, sigma: Tensor, std: Tensor) -> Tensor:
    """Compute the error of a velocity as a prediction of the noise that was added to a latent to get x, [B].

        E = mean over elements of (noise - std / sigma (x + (1 - sigma) velocity))^2

    with x = a y + std noise from `omni_sched.renoise`, y at a lower level. The velocity with the least expected error
    is that of the distribution of x, for any distribution of y: E is denoising score matching. For clean y, std = sigma
    and E is (1 - sigma)^2 times `velocity_error`. Of two nets, the one under which y is more likely has the lower E.

    Args:
        velocity: [B, ...], latent units, predicted at x.
        x: [B, ...], latent units, at level sigma.
        noise: [B, ...], standard normal, the noise in x.
        sigma: [B], noise level of x, in (0, 1).
        std: [B], latent units, > 0: amplitude of the noise in x.

    Raises:
        ValueError: shapes do not match.

    Source: denoising score matching (P. Vincent, 2011) for the segments of TDM (arXiv 2503.06674). Released code
    predicts the student's clean sample instead, and corrects by a clipped ratio of densities.
    """
    require_latents("velocity", velocity, x=x, noise=noise)
    require_per_sample(velocity, sigma=sigma, std=std)
    level, amplitude, latent = sigma.detach().float(), std.detach().float(), x.detach().float()
    predicted = expand_like(amplitude / level, latent) * (latent + expand_like(1 - level, latent) * velocity.float())
    return element_mean((noise.detach().float() - predicted).square())
