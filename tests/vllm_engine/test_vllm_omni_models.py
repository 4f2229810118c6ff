"""Every model that vLLM-Omni samples: the contract, one name for every weight, and a sync that brings LoRA merged."""

from dataclasses import replace

import pytest
import torch
from build_tiny_models import tiny_checkpoint
from helpers import CHECKPOINT, REPO
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model
from omni_rollout.testing import check_engine, check_scores
from omni_train.lora import add_lora, unadapted_params
from omni_train.weights import named_weights
from vllm_omni_helpers import open_engine

CACHE = REPO / ".pytest_cache" / "tiny-models"
PARAMS = Params(5, 32, 96, noise_level=0.7, sde_steps=(1, 2))
MODELS = {
    "qwen-image": (lambda: CHECKPOINT, replace(PARAMS, guidance={"true_cfg_scale": 3.0})),
    "sd35-medium": (lambda: tiny_checkpoint("sd35-medium", CACHE), replace(PARAMS, guidance_scale=3.0)),
    "sd35-large": (lambda: tiny_checkpoint("sd35-large", CACHE), replace(PARAMS, guidance_scale=3.0)),
    "flux-dev": (lambda: tiny_checkpoint("flux-dev", CACHE), replace(PARAMS, guidance={"true_cfg_scale": 3.0})),
    "flux-schnell": (lambda: tiny_checkpoint("flux-schnell", CACHE), replace(PARAMS, guidance={"true_cfg_scale": 3.0})),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_samples_the_model(name):
    checkpoint, guided = MODELS[name]
    model = open_model(checkpoint())
    engine = open_engine(model)
    try:
        net = model.load_net(device="cpu", dtype=torch.float32)
        assert engine.weights().keys() == dict(net.named_parameters()).keys()
        assert engine.adopt(net.named_parameters()) == sum(p.nbytes for p in net.parameters())
        for params in (PARAMS, guided):
            check_engine(engine, model, params, net=net, tolerance=1e-5)
        trained = model.load_net(device="cpu", dtype=torch.float32)
        add_lora(trained, model.LORA_TARGETS, rank=4, alpha=8, seed=0)
        engine.adopt(unadapted_params(trained))
        with torch.no_grad():
            for layer, p in trained.named_parameters():
                if "lora_B" in layer:
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        stale = engine.generate([Prompt("a sign", 0, 0, seed=0)], guided)
        engine.load_weights(named_weights(trained), version=5)
        fresh = engine.generate([Prompt("a sign", 0, 0, seed=0)], guided)
        check_scores(fresh, model, trained, tolerance=1e-5)
        with pytest.raises(AssertionError):
            check_scores(stale, model, trained, tolerance=1e-5)
    finally:
        engine.close()
