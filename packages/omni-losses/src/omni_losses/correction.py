"""Importance weights towards the trainer's policy, for samples from an engine with different arithmetic.

Notation: B samples with K stochastic steps each; N answers of T tokens each. Log-probabilities of steps are in nats per
latent element: a step's log-density over its number of elements. They must come from densities, so the unnormalized
ones of `cps_step` do not qualify. Log-probabilities of tokens are in nats per token.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from omni_losses.output import MIN_CLIP_WIDTH, require_shape_of

Level = Literal["trajectory", "step"]
TokenMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Mode = Literal["truncate", "mask"]


def rollout_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    *,
    level: Level = "trajectory",
    mode: Mode = "truncate",
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute weights [B, K] for the losses of steps, and metrics of the gap between engine and trainer.

        d_ik = old_log_prob_ik - rollout_log_prob_ik
        r_ik = exp(d_ik) for level "step";  exp(sum over k of d_ik), the same for every step, for level "trajectory"
        w_ik = r_ik clamped to [low, high] for mode "truncate" (importance sampling, with bounded variance)
               1 if low <= r_ik <= high, else 0, for mode "mask" (rejection)

    To apply both modes, multiply the weights of two calls. Pass column k as `weights` to the loss of step k.

    The bounds are ratios per latent element (geometric mean), in the unit of a clip range. Two engines
    with the same weights differ by 1e-5 to 1e-4 nats per element and step, with guidance by up to 3e-3: bounds such as
    0.999 and 1.001 separate a broken step from rounding. Bounds for tokens, such as 0.5 and 2, have no effect here. The
    ratio of a trajectory is the product of its K steps' ratios, so its bounds may be up to K times as far from 1.

    Args:
        old_log_prob: [B, K], nats per latent element, from the trainer's weights before the update.
        rollout_log_prob: [B, K], same unit, from the engine that sampled the steps.
        level, mode: as above.
        low: lower bound, from 0 to 1 - 1e-6; 0 for none.
        high: upper bound, at least 1 + 1e-6; infinity for none.

    Returns:
        The weights, float32, without gradient, and: `abs_diff_mean`, `abs_diff_max` of |d|; `kl`, the mean of -d, which
        estimates KL(engine || trainer) in nats per element; `k3_kl`, the mean of exp(d) - 1 - d, never negative;
        `ratio_min`, `ratio_max` and `outside_fraction`, the share of r outside the bounds; `weight_mean`; and
        `effective_fraction`, (mean w)^2 / mean w^2, the effective sample size as a share of the steps.

    Raises:
        ValueError: shapes do not match, an unknown option, or bounds that do not enclose 1 in float32.

    Source: truncated importance sampling and rejection as in verl's rollout correction. verl-omni applies the token
    bounds 0.5 and 2 to these means, and truncates from above only.
    """
    if old_log_prob.ndim != 2 or old_log_prob.numel() == 0:
        raise ValueError(f"old_log_prob must be [B, K] with B, K >= 1, got shape {tuple(old_log_prob.shape)}")
    require_shape_of("old_log_prob", old_log_prob, rollout_log_prob=rollout_log_prob)
    if level not in get_args(Level):
        raise ValueError(f"level must be one of {get_args(Level)}, got {level!r}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
    if not 0 <= low <= 1 - MIN_CLIP_WIDTH or not high >= 1 + MIN_CLIP_WIDTH:
        rule = f"low and high must enclose 1 by {MIN_CLIP_WIDTH:g} or more, 0 <= low < 1 < high"
        raise ValueError(f"{rule}, got {low} and {high}")
    diff = old_log_prob.detach().float() - rollout_log_prob.detach().float()
    log_ratio = diff if level == "step" else diff.sum(dim=1, keepdim=True).expand_as(diff)
    ratio = log_ratio.exp()
    inside = (ratio >= low) & (ratio <= high)
    weights = ratio.clamp(low, high) if mode == "truncate" else inside.float()
    return weights, _metrics(diff, ratio, inside, weights)


def token_rollout_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    *,
    mode: TokenMode = "token_truncate",
    cap: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute weights [N, T] for the losses of tokens, and metrics of the gap between engine and trainer.

        d_it = old_log_prob_it - rollout_log_prob_it
        r_it = exp(d_it) for token modes;  exp(sum over t of d_it), equal for all tokens, for sequence modes
        w_it = min(r_it, cap) for truncating modes;  r_it if r_it <= cap, else 0, for masking modes

    Args:
        old_log_prob: [N, T], nats per token, from the trainer's weights before the update.
        rollout_log_prob: [N, T], same unit, from the engine that sampled the tokens.
        mask: [N, T], boolean: True for tokens sampled by the policy. Values elsewhere have no effect, even NaN.
        mode: as above.
        cap: upper bound, >= 1; infinity for none.

    Returns:
        The weights, float32, without gradient, 1 outside the mask, and the metrics of `rollout_weights` for the tokens
        of the mask, in nats per token.

    Raises:
        ValueError: shapes do not match, an unknown mode, a cap below 1, or an empty mask.

    Source: truncated importance sampling, with the names of TRL's `vllm_importance_sampling_mode`; verl's `rollout_is`
    values "token" and "sequence" are the truncating modes, with verl's threshold of 2.
    """
    require_shape_of("old_log_prob", old_log_prob, rollout_log_prob=rollout_log_prob, mask=mask)
    if mode not in get_args(TokenMode) or not cap >= 1 or not mask.any():
        rule = f"mode must be one of {get_args(TokenMode)}, cap >= 1, and mask must hold a token"
        raise ValueError(f"{rule}, got {mode!r}, {cap} and {int(mask.sum())} tokens")
    chosen = mask.bool()
    diff = torch.where(chosen, old_log_prob.detach().float() - rollout_log_prob.detach().float(), 0.0)
    ratio = (diff if mode.startswith("token") else diff.sum(dim=1, keepdim=True).expand_as(diff)).exp()
    inside = ratio <= cap
    weights = (ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.where(inside, 0.0)).where(chosen, 1.0)
    return weights, _metrics(diff[chosen], ratio[chosen], inside[chosen], weights[chosen])


def _metrics(diff: Tensor, ratio: Tensor, inside: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {
        "abs_diff_mean": diff.abs().mean(),
        "abs_diff_max": diff.abs().max(),
        "kl": -diff.mean(),
        "k3_kl": (torch.expm1(diff) - diff).mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "outside_fraction": 1 - inside.float().mean(),
        "weight_mean": weights.mean(),
        "effective_fraction": weights.mean().square() / weights.square().mean().clamp(min=1e-30),
    }
