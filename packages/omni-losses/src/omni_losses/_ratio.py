"""Metrics of the ratio, for the losses of diffusion steps and of token sequences."""

from torch import Tensor


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """`ratio_mean`, `ratio_std`, `ratio_max_dev`, `approx_kl` and `ppo_kl` of detached log-ratios [B]."""
    ratio = log_ratio.exp()
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_max_dev": (ratio - 1).abs().max(),
        "approx_kl": 0.5 * log_ratio.square().mean(),
        "ppo_kl": -log_ratio.mean(),
    }


def clip_metrics(log_ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """`clip_fraction`, `clip_fraction_low` and `clip_fraction_high` of detached log-ratios [B]."""
    ratio = log_ratio.exp()
    below, above = (ratio < 1 - low).float().mean(), (ratio > 1 + high).float().mean()
    return {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above}
