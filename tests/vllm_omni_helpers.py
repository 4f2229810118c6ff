"""What the tests of the vLLM-Omni engine share."""

import torch
from helpers import CHECKPOINT
from omni_rollout import Params, replay
from omni_rollout.models import open_model
from omni_train.optim import build_adamw

PARAMS = Params(5, 32, 96, noise_level=0.7, sde_steps=(1, 2))
MODEL = open_model(CHECKPOINT)


def open_engine(model=MODEL, **options):
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine

    return VllmOmniEngine(model, **options)


def load_net():
    """A trainer's transformer of its own."""
    return MODEL.load_net(device="cpu", dtype=torch.float32).requires_grad_(True)


@torch.no_grad()
def gap(net, trajectory, model=MODEL):
    """The largest difference between the trainer's and the engine's log-probs."""
    scores = [replay(model, net, trajectory, k).log_prob for k in range(trajectory.num_kept)]
    return (torch.stack(scores, dim=1) - trajectory.rollout_log_prob).abs().max().item()


def train(net, trajectory, params=None):
    """Optimizer steps that move the weights by far more than rounding does."""
    optimizer = build_adamw(params or list(net.parameters()), lr=1e-3, weight_decay=0.0)
    x, sigma = trajectory.x[:, 0], trajectory.sigma(0)
    MODEL.predict_velocity(net, x, sigma, trajectory.cond, trajectory.params).square().mean().backward()
    optimizer.step()
