"""Losses and advantages for RL post-training of generative models: pure functions on tensors, computed in float32.

No model, no device, no collective lives here. Gather rewards from all ranks before calling `group_advantages`.
"""

from omni_losses.advantages import group_advantages, reward_metrics
from omni_losses.divergence import gaussian_kl
from omni_losses.output import LossOutput
from omni_losses.policy import grpo_loss

__all__ = ["LossOutput", "gaussian_kl", "group_advantages", "grpo_loss", "reward_metrics"]
