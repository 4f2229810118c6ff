"""Noise schedules: the sigmas a sampler visits, and the maps that bend them.

Letters: S denoising steps. A schedule is [S+1], float32, strictly decreasing, from 1 (noise) to exactly 0 (data);
sigma is dimensionless: `x = (1 - sigma) * data + sigma * noise`.

The maps compute in float32, operation for operation as diffusers' `FlowMatchEulerDiscreteScheduler` does, so that a
schedule built here equals the table of a published pipeline bit for bit, except that no sigma exceeds 1. Values are
checked on the CPU only: reading them back from an accelerator would stall its queue.
"""

import math

import torch
from torch import Tensor

MAX_ABS_MU = 80.0  # e^mu stays inside float32


def linear_sigmas(num_steps: int) -> Tensor:
    """Evenly spaced sigmas 1, (S-1)/S, ..., 1/S, 0.

    Args:
        num_steps: S, at least 1.

    Returns:
        [S+1], float32, on the CPU.

    Raises:
        ValueError: num_steps < 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, got {num_steps}")
    # The spacing is computed in float64 and rounded once, as numpy's linspace followed by a cast would be.
    levels = torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float64, device="cpu")
    return torch.cat([levels, levels.new_zeros(1)]).float()


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Sigmas moved towards 1 by a constant factor: `s' = shift * s / (1 + (shift - 1) * s)`.

    0 stays, 1 stays up to rounding, shift 1 changes nothing, and two shifts compose to their product.

    Args:
        sigmas: noise levels in [0, 1], any shape.
        shift: > 0, dimensionless; SD3.5 uses 3.

    Returns:
        Shifted noise levels, same shape, float32.

    Raises:
        ValueError: shift <= 0, or a sigma outside [0, 1].

    Esser et al., "Scaling Rectified Flow Transformers", arXiv 2403.03206, section on resolution-dependent shifting.
    """
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be > 0 and finite, got {shift}")
    sigmas = _float_levels(sigmas)
    # At sigma 1 the quotient of two roundings of shift can be 1.0000001, and 1 - sigma must not turn negative.
    return (shift * sigmas / (1 + (shift - 1) * sigmas)).clamp(max=1)


def exponential_shift_sigmas(sigmas: Tensor, mu: float) -> Tensor:
    """Sigmas moved towards 1 in log-odds: `s' = e^mu / (e^mu + 1/s - 1)`, that is `shift_sigmas` with shift e^mu.

    Args:
        sigmas: noise levels in [0, 1], any shape.
        mu: log of the shift, usually from `resolution_mu`.

    Returns:
        Shifted noise levels, same shape, float32.

    Raises:
        ValueError: |mu| >= 80 (e^mu would leave float32), or a sigma outside [0, 1].

    Dynamic shifting as used by FLUX and Qwen-Image.
    """
    if not abs(mu) < MAX_ABS_MU:
        raise ValueError(f"mu must be in (-{MAX_ABS_MU}, {MAX_ABS_MU}), got {mu}")
    sigmas = _float_levels(sigmas)
    # torch turns `float / tensor` into a product with the reciprocal, which rounds twice; a 0-d tensor divides once.
    # sigma 0 needs no branch: 1/0 is inf, and e^mu / inf is exactly 0.
    odds = torch.tensor(math.exp(mu), dtype=torch.float32, device="cpu")
    return odds / (odds + (1 / sigmas - 1))


def resolution_mu(
    num_tokens: int, *, base_tokens: int = 256, max_tokens: int = 4096, base_mu: float = 0.5, max_mu: float = 1.15
) -> float:
    """mu for a latent of num_tokens tokens, on the line through (base_tokens, base_mu) and (max_tokens, max_mu).

    Not clamped: a latent above max_tokens gets a mu above max_mu.

    Args:
        num_tokens: image tokens the transformer sees, (height / 16) * (width / 16) for FLUX and Qwen-Image.
        base_tokens, max_tokens, base_mu, max_mu: the two points of the line. The defaults are FLUX's; Qwen-Image uses
            max_tokens 8192 and max_mu 0.9.

    Raises:
        ValueError: num_tokens < 1, or base_tokens >= max_tokens.

    The line that FLUX's released code draws; diffusers' `calculate_shift`.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")
    if base_tokens >= max_tokens:
        raise ValueError(f"base_tokens must be < max_tokens, got {base_tokens} and {max_tokens}")
    return base_mu + (max_mu - base_mu) * (num_tokens - base_tokens) / (max_tokens - base_tokens)


def stretch_sigmas(sigmas: Tensor, terminal: float) -> Tensor:
    """Schedule rescaled so that its last non-zero sigma, s_last, becomes `terminal`.

    `1 - s' = (1 - s) * (1 - terminal) / (1 - s_last)`: 1 stays 1, and the final 0 stays 0. Named
    `shift_terminal` in diffusers; Qwen-Image uses 0.02, after the exponential shift.

    Args:
        sigmas: [S+1], a whole schedule that ends with 0; S at least 2.
        terminal: the wanted last non-zero sigma, in (0, 1).

    Returns:
        [S+1], float32.

    Raises:
        ValueError: terminal outside (0, 1), or sigmas that is no schedule with an entry between 0 and 1.
    """
    if not 0 < terminal < 1:
        raise ValueError(f"terminal must be in (0, 1), got {terminal}")
    if sigmas.ndim != 1 or len(sigmas) < 3:
        raise ValueError(f"sigmas must be [S+1] with S >= 2, got shape {tuple(sigmas.shape)}")
    sigmas = _float_levels(sigmas)
    if _on_host(sigmas) and not (sigmas[-1] == 0 and 0 < sigmas[-2] < 1):
        raise ValueError(f"sigmas must end with an entry in (0, 1) and then 0, got {sigmas[-2:].tolist()}")
    signal = 1 - sigmas
    stretched = 1 - signal / (signal[-2] / (1 - terminal))
    stretched[-1] = 0
    return stretched


def _float_levels(sigmas: Tensor) -> Tensor:
    """sigmas in float32; a value outside [0, 1] that the host can see is refused."""
    sigmas = sigmas.float()
    if _on_host(sigmas) and not ((sigmas >= 0) & (sigmas <= 1)).all():
        raise ValueError(f"sigmas must be in [0, 1], got {sigmas.tolist()}")
    return sigmas


def _on_host(sigmas: Tensor) -> bool:
    return sigmas.device.type == "cpu"
