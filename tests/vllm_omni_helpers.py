"""What the tests of the vLLM-Omni engine share."""

import torch
from helpers import CHECKPOINT
from omni_rollout import SamplingParams
from omni_rollout.models import qwen_image
from omni_train.optim import build_adamw

PARAMS = SamplingParams(5, 32, 96, noise_level=0.7, sde_steps=(1, 2))


def open_engine(path=CHECKPOINT, **options):
    from omni_rollout.vllm_omni_engine import VllmOmniEngine
    from omni_rollout.vllm_omni_models.qwen_image import QwenImageRollout

    return VllmOmniEngine(QwenImageRollout, str(path), **options)


def gap(net, trajectory, params):
    """The largest difference between the trainer's and the engine's log-probs."""
    largest = 0.0
    for k in range(trajectory.x.shape[1]):
        x, sigma = trajectory.x[:, k], trajectory.sigma(k)
        with torch.no_grad():
            velocity = qwen_image.predict_velocity(net, x, sigma, trajectory.cond, guidance_scale=params.guidance_scale)
        score = params.step(
            velocity, x, sigma, trajectory.sigma_next(k), noise_level=params.noise_level, x_next=trajectory.x_next[:, k]
        )
        largest = max(largest, (score.log_prob - trajectory.rollout_log_prob[:, k]).abs().max().item())
    return largest


def train(net, trajectory, params=None):
    """Optimizer steps that move the weights by far more than rounding does."""
    optimizer = build_adamw(params or list(net.parameters()), lr=1e-3, weight_decay=0.0)
    velocity = qwen_image.predict_velocity(net, trajectory.x[:, 0], trajectory.sigma(0), trajectory.cond)
    velocity.square().mean().backward()
    optimizer.step()
