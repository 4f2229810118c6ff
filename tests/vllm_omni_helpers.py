"""Helpers of the vLLM-Omni engine's tests."""

from dataclasses import replace

import torch
from helpers import CHECKPOINT
from omni_rollout import Params, Prompt, replay
from omni_rollout.models import open_model
from omni_rollout.testing import check_chain, check_fields
from omni_train.optim import build_adamw
from omni_train.weights.full import named_weights

PARAMS = Params(5, 32, 96, noise_level=0.7, sde_steps=(1, 2))
MODEL = open_model(CHECKPOINT)


def open_engine(model=MODEL, **options):
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine

    return VllmOmniEngine(model, **options)


def load_net():
    """Return a trainer's own transformer."""
    return MODEL.load_net(device="cpu", dtype=torch.float32).requires_grad_(True)


@torch.no_grad()
def gap(net, trajectory, model=MODEL):
    """Return the largest difference between the trainer's and the engine's log-probabilities."""
    scores = [replay(model, net, trajectory, k).log_prob for k in range(trajectory.num_kept)]
    return (torch.stack(scores, dim=1) - trajectory.rollout_log_prob).abs().max().item()


def train(net, trajectory, params=None):
    """Take an optimizer step that moves the weights by far more than rounding does."""
    optimizer = build_adamw(params or list(net.parameters()), lr=1e-3, weight_decay=0.0)
    x, sigma = trajectory.x[:, 0], trajectory.sigma(0)
    MODEL.predict_velocity(net, x, sigma, trajectory.cond, trajectory.params).square().mean().backward()
    optimizer.step()


def open_quantized(model, quantization="fp8"):
    return open_engine(model, dtype=torch.bfloat16, quantization=quantization)


def load_half(model):
    return model.load_net(device="cpu", dtype=torch.bfloat16).to(torch.bfloat16)


def values(engine):
    return {name: param.float() for name, param in engine.net.named_parameters()}  # copies what is not float32


def equal(found, expected):
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def check_quantized(engine, model, net, row):
    """Check that it samples close to the trainer, and that a sync of its own weights changes no bit and no address."""
    prompts = [Prompt("a sign", 0, i, seed=i, images=row.references(0)) for i in range(2)]
    params = replace(row.unguided, noise_level=0.7, sde_steps=(1, 2))
    trajectory = engine.generate(prompts, params)
    check_fields(trajectory, prompts, model, params)
    check_chain(trajectory)
    assert 0 < gap(net, trajectory, model) < 2e-2
    before, places = values(engine), {name: p.data_ptr() for name, p in engine.net.named_parameters()}
    assert any(p.dtype in (torch.float8_e4m3fn, torch.int8) for p in engine.net.parameters())
    assert engine.adopt(net.named_parameters()) == sum(net.get_parameter(name).nbytes for name in engine.weights())
    engine.load_weights(named_weights(net), version=trajectory.weight_version)
    assert equal(values(engine), before)
    assert {name: p.data_ptr() for name, p in engine.net.named_parameters()} == places
