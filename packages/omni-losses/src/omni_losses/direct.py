"""Losses that differentiate the reward itself: SRPO, on samples recovered from a single step.

Notation: B samples. sigma is the noise level, 1 = noise, 0 = data; velocity = dx/dsigma = noise - data.
"""

import torch
from torch import Tensor

from omni_losses.output import (
    LossOutput,
    expand_like,
    require_batch,
    require_latents,
    require_per_sample,
    require_shape_of,
)


def direct_align(velocity: Tensor, x: Tensor, noise: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Recover the sample x0 [B, ...] from one step of the model and the known noise in x.

        x_next = x + (sigma_next - sigma) velocity
        x0     = (x_next - sigma_next noise) / (1 - sigma_next)

    The true velocity recovers the noised sample exactly, at any noise level, so a reward of x0 has a usable gradient
    where a one-step prediction x - sigma velocity would still be blurred. The velocity enters with the factor
    (sigma_next - sigma) / (1 - sigma_next): negative when denoising, positive when inverting (sigma_next > sigma).

    Args:
        velocity: [B, ...], latent units, from the weights being trained, at x; the gradient of the reward flows here.
        x: [B, ...], latent units: (1 - sigma) * sample + sigma * noise.
        noise: [B, ...], latent units: the noise in x.
        sigma, sigma_next: [B], noise levels before and after the step; sigma_next < 1.

    Returns:
        [B, ...], float32, latent units.

    Raises:
        ValueError: shapes do not match; or, checked on the CPU only, a sigma_next outside [0, 1).

    Source: Direct-Align of SRPO (arXiv 2509.06942). Released code subtracts 0.1 of the trained range from sigma to get
    sigma_next, and rounds the model's timestep down to an integer.
    """
    require_latents("velocity", velocity, x=x, noise=noise)
    require_per_sample(velocity, sigma=sigma, sigma_next=sigma_next)
    if sigma_next.device.type == "cpu" and not ((sigma_next >= 0) & (sigma_next < 1)).all():
        raise ValueError(f"sigma_next must be in [0, 1), got {sigma_next.tolist()}")
    level, level_next = (expand_like(s.detach().float(), velocity) for s in (sigma, sigma_next))
    x_next = x.detach().float() + (level_next - level) * velocity.float()
    return (x_next - level_next * noise.detach().float()) / (1 - level_next)


def srpo_loss(
    positive_reward: Tensor,
    negative_reward: Tensor,
    *,
    discount: float | Tensor,
    inversion: bool = False,
    threshold: float = 0.7,
) -> LossOutput:
    """Compute the loss of SRPO: a sample should match its prompt better with positive than with negative words.

        denoising:  R_i = (1 + discount) positive_reward_i - negative_reward_i
        inversion:  R_i = (1 + discount) negative_reward_i - positive_reward_i
        L         = 1/B sum_i max(0, threshold - R_i)

    The reward model's bias common to all images cancels in the difference. When inverting, the velocity enters
    `direct_align` with the opposite sign, so both kinds of step move it towards the positive words. One ascends and the
    other descends the share `discount` of the reward that does not cancel, which guards against overoptimization.

    Args:
        positive_reward, negative_reward: [B], differentiable scores of one sample from `direct_align` for its prompt
            with positive and negative control words; gradients flow here.
        discount: number or [B], >= 0: the share of the plain reward that remains. Published for HPS-v2.1: denoising,
            from 0.1 at the low end of the trained noise levels to 0.25 at the high end; inverting, from 0.3 to 0.01.
        inversion: True if the step went from less noise to more.
        threshold: rewards of at least this value have no gradient, in units of the reward.

    Returns:
        The loss; `relative_reward`, `positive_reward` and `negative_reward`, means; and `active_fraction`, the share of
        samples below the threshold.

    Raises:
        ValueError: shapes do not match.

    Source: SRPO (arXiv 2509.06942), its semantic relative preference in the form of classifier-free guidance, (1 - k)
    negative + k positive; the form here is that of its released code, which found it more stable.
    """
    require_batch("positive_reward", positive_reward, negative_reward=negative_reward)
    if isinstance(discount, Tensor):
        require_shape_of("positive_reward", positive_reward, discount=discount)
        discount = discount.detach().float()
    positive, negative = positive_reward.float(), negative_reward.float()
    favored, opposed = (negative, positive) if inversion else (positive, negative)
    relative = (1 + discount) * favored - opposed
    metrics = {
        "relative_reward": relative.mean(),
        "positive_reward": positive.mean(),
        "negative_reward": negative.mean(),
        "active_fraction": (relative < threshold).float().mean(),
    }
    loss = torch.relu(threshold - relative).mean()
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})
