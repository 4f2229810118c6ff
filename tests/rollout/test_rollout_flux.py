"""FLUX.1: distilled guidance, which is an input of the net and no classifier-free guidance."""

from dataclasses import replace

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model


@pytest.mark.parametrize("name", ["flux-dev", "flux-schnell"])
def test_the_length_of_texts_and_the_scale_are_as_the_checkpoint_was_trained(name):
    model, row = open_model(ROWS[name].checkpoint()), ROWS[name]
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    seen = []
    engine.net.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    engine.generate([Prompt("a sign", 0, 0, seed=0)], row.unguided)
    lengths, scales = {len(call["encoder_hidden_states"][0]) for call in seen}, [call["guidance"] for call in seen]
    assert lengths == {512 if name == "flux-dev" else 256}
    assert scales == ([torch.tensor([3.5])] * 6 if name == "flux-dev" else [None] * 6)


def test_losses_that_denoise_data_keep_the_distilled_scale():
    model, row = open_model(ROWS["flux-dev"].checkpoint()), ROWS["flux-dev"]
    assert model.unguided(row.guided) == replace(row.guided, guidance={"true_cfg_scale": 1.0})
    assert model.unguided(row.guided).guidance_scale == 3.5
