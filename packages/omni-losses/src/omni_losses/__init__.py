"""Losses and advantages for RL post-training of generative models: pure functions on tensors, computed in float32.

No model, no device, no collective lives here. Gather rewards from all ranks before calling `group_advantages`.
"""

from omni_losses.advantages import (
    best_worst_n,
    filter_groups,
    group_advantages,
    multi_reward_advantages,
    reward_metrics,
)
from omni_losses.correction import rollout_weights
from omni_losses.direct import direct_align, srpo_loss
from omni_losses.divergence import distill_kl_loss, distill_velocity_loss, gaussian_kl, k3_kl, velocity_kl
from omni_losses.forward import (
    awm_log_prob,
    awm_loss,
    diffusion_nft_loss,
    old_policy_decay,
    reward_probability,
    velocity_error,
)
from omni_losses.output import LossOutput
from omni_losses.policy import flow_dppo_loss, grpo_guard_loss, grpo_loss, tempflow_weights
from omni_losses.preference import best_worst_pairs, diffusion_dpo_loss
from omni_losses.sequence import gspo_loss

__all__ = [
    "LossOutput",
    "awm_log_prob",
    "awm_loss",
    "best_worst_n",
    "best_worst_pairs",
    "diffusion_dpo_loss",
    "diffusion_nft_loss",
    "direct_align",
    "distill_kl_loss",
    "distill_velocity_loss",
    "filter_groups",
    "flow_dppo_loss",
    "gaussian_kl",
    "group_advantages",
    "grpo_guard_loss",
    "grpo_loss",
    "gspo_loss",
    "k3_kl",
    "multi_reward_advantages",
    "old_policy_decay",
    "reward_metrics",
    "reward_probability",
    "rollout_weights",
    "srpo_loss",
    "tempflow_weights",
    "velocity_error",
    "velocity_kl",
]
