"""Losses and advantages for RL post-training of generative models: pure functions on tensors.

Losses are computed in float32, advantages in float64, so that small differences between large rewards count.

This package has no models, devices or collectives. Gather rewards from all ranks before calling `group_advantages`.
"""

from omni_losses.advantages import best_worst_n as best_worst_n
from omni_losses.advantages import filter_groups as filter_groups
from omni_losses.advantages import group_advantages as group_advantages
from omni_losses.advantages import multi_reward_advantages as multi_reward_advantages
from omni_losses.advantages import overrated as overrated
from omni_losses.advantages import ranks as ranks
from omni_losses.advantages import reward_metrics as reward_metrics
from omni_losses.correction import rollout_weights as rollout_weights
from omni_losses.correction import token_rollout_weights as token_rollout_weights
from omni_losses.direct import direct_align as direct_align
from omni_losses.direct import srpo_loss as srpo_loss
from omni_losses.divergence import distill_kl_loss as distill_kl_loss
from omni_losses.divergence import distill_velocity_loss as distill_velocity_loss
from omni_losses.divergence import gaussian_kl as gaussian_kl
from omni_losses.divergence import k3_kl as k3_kl
from omni_losses.divergence import token_divergence as token_divergence
from omni_losses.divergence import velocity_kl as velocity_kl
from omni_losses.forward import awm_log_prob as awm_log_prob
from omni_losses.forward import awm_loss as awm_loss
from omni_losses.forward import dgpo_loss as dgpo_loss
from omni_losses.forward import diffusion_nft_loss as diffusion_nft_loss
from omni_losses.forward import old_policy_decay as old_policy_decay
from omni_losses.forward import reward_probability as reward_probability
from omni_losses.forward import velocity_error as velocity_error
from omni_losses.matching import added_noise_error as added_noise_error
from omni_losses.matching import distribution_matching_loss as distribution_matching_loss
from omni_losses.output import LossOutput as LossOutput
from omni_losses.policy import flow_dppo_loss as flow_dppo_loss
from omni_losses.policy import grpo_guard_loss as grpo_guard_loss
from omni_losses.policy import grpo_loss as grpo_loss
from omni_losses.policy import tempflow_weights as tempflow_weights
from omni_losses.preference import best_worst_pairs as best_worst_pairs
from omni_losses.preference import diffusion_dpo_loss as diffusion_dpo_loss
from omni_losses.preference import sequence_dpo_loss as sequence_dpo_loss
from omni_losses.sequence import gspo_loss as gspo_loss
from omni_losses.sequence import overlong_penalty as overlong_penalty
from omni_losses.sequence import token_cispo_loss as token_cispo_loss
from omni_losses.sequence import token_grpo_loss as token_grpo_loss
from omni_losses.sequence import token_nll_loss as token_nll_loss
from omni_losses.sequence import token_weights as token_weights

__version__ = "0.1.0"
