"""Faster deterministic sampling for the steps that are not trained: fewer steps, of second order.

Notation and signs as in `steps`: sigma falls from 1 to 0, velocity = dx/dsigma, data_hat = x - sigma * velocity.

For the steps after a window, MixGRPO-Flash (arXiv 2507.21802) keeps only a share of the noise levels and takes each
step with DPM-Solver++:

    sigmas = compress_sigmas(sigmas, window[-1] + 1, 0.4)
    x_next, data = dpmpp_2m_step(velocity, x, sigma, sigma_next, last_data=data, last_sigma=last_sigma)
"""

import math

import torch
from torch import Tensor

from omni_sched.steps import Level, check_shapes, expand_level, expand_levels, expand_like, on_host, to_cpu


def compress_sigmas(sigmas: Tensor, start: int, compress_ratio: float) -> Tensor:
    """Keep the first `start` steps of a schedule and reduce the number of later steps.

    Of the S - start later steps, ceil(compress_ratio * (S - start)) remain. Their noise levels are a subset of the
    schedule, as evenly spaced as possible, and end at its last level.

    Args:
        sigmas: [S+1], a schedule.
        start: number of steps to keep unchanged, in [0, S]: one past the window's last index.
        compress_ratio: share of the later steps that remains, in (0, 1]; 1 changes nothing. Published values are 0.4,
            and 0.2 with a window that stays at the start (Flash*).

    Returns:
        [S'+1], with the dtype of sigmas; the first start + 1 entries are those of sigmas.

    Raises:
        ValueError: an argument is outside the ranges above.

    Source: the compression of MixGRPO-Flash, arXiv 2507.21802. Released code spaces the levels evenly before the
    shift, and applies the ratio to levels, not steps: 7 steps where 0.4 of 21 are 9, and after a late window
    it stops before sigma 0.
    """
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas must be [S+1] with S >= 1, got shape {tuple(sigmas.shape)}")
    num_steps = len(sigmas) - 1
    if not 0 <= start <= num_steps:
        raise ValueError(f"start must be in [0, S = {num_steps}], got {start}")
    if not 0 < compress_ratio <= 1:
        raise ValueError(f"compress_ratio must be in (0, 1], got {compress_ratio}")
    later = num_steps - start
    left = math.ceil(compress_ratio * later - 1e-9)  # 0.28 * 25, for example, rounds to slightly above 7
    # Round half up, in integers: later / left >= 1, so no index repeats.
    indices = [start + (2 * i * later + left) // (2 * left) for i in range(1, left + 1)]
    return sigmas[[*range(start + 1), *indices]]


def dpmpp_2m_step(
    velocity: Tensor,
    x: Tensor,
    sigma: Level,
    sigma_next: Level,
    *,
    last_data: Tensor | None = None,
    last_sigma: Level | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one step of DPM-Solver++(2M), a second-order multistep solver; also return the data for the next call.

        lambda = log((1 - sigma) / sigma),   h = lambda_next - lambda,   h_last = lambda - lambda_last
        data   = x - sigma * velocity
        x_next = x + dt * velocity + (1 - sigma_next / sigma) / 2 * h / h_last * (data - last_data)

    The last term extrapolates the trend of the predicted data without another model call. It is omitted without
    last_data, that is, at the first step, which is then exactly `euler_step`. It is also omitted if sigma_next = 0 or
    last_sigma = 1, where h or h_last is infinite.

    Args:
        velocity: [B, ...], latent units; the model's prediction of noise - data at x.
        x: [B, ...], latent units.
        sigma, sigma_next: scalar or [B], noise levels before and after.
        last_data: [B, ...], latent units: data as returned by the previous step, at last_sigma. Omit it at the first
            step after a stochastic step, which has moved x off the trend.
        last_sigma: scalar or [B], noise level before the previous step; required if and only if last_data is passed.

    Returns:
        (x_next, data), [B, ...], float32, differentiable in velocity and x.

    Raises:
        ValueError: shapes differ, not 0 <= sigma_next < sigma <= 1, not sigma < last_sigma <= 1, or only one of
            last_data and last_sigma is passed.

    DPM-Solver++, arXiv 2211.01095, algorithm 2, with alpha = 1 - sigma: diffusers' `DPMSolverMultistepScheduler` with
    `use_flow_sigmas`, solver_order 2 and solver_type "midpoint". MixGRPO's released code passes the data of the last
    stochastic step as last_data.
    """
    check_shapes(x, velocity=velocity, last_data=last_data)
    if (last_data is None) != (last_sigma is None):
        name = "last_data" if last_sigma is None else "last_sigma"
        raise ValueError(f"last_data and last_sigma must be given together, got only {name}")
    current, following = expand_levels(x, sigma, sigma_next)
    velocity, x = velocity.float(), x.float()
    data = x - expand_like(current, x) * velocity
    x_next = x + expand_like(following - current, x) * velocity
    if last_data is None or last_sigma is None:
        return x_next, data
    if on_host(sigma) and on_host(last_sigma):
        level, last_level = to_cpu(sigma), to_cpu(last_sigma)
        if not ((level < last_level) & (last_level <= 1)).all():
            rule = "last_sigma must satisfy sigma < last_sigma <= 1"
            raise ValueError(f"{rule}, got sigma={level.tolist()}, last_sigma={last_level.tolist()}")
    previous = expand_level(x, "last_sigma", last_sigma)
    steps_ratio = (_half_log_snr(following) - _half_log_snr(current)) / (
        _half_log_snr(current) - _half_log_snr(previous)
    )
    coefficient = torch.where(following > 0, (1 - following / current) / 2 * steps_ratio, 0.0)
    return x_next + expand_like(coefficient, x) * (data - last_data.float()), data


def _half_log_snr(sigma: Tensor) -> Tensor:
    """Return lambda of DPM-Solver++: log(alpha / sigma) with alpha = 1 - sigma; infinite at 0 and 1."""
    return torch.log((1 - sigma) / sigma)
