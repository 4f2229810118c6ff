"""`--memory.offload encoder` with the vLLM-Omni engine."""

import torch
from omni_rollout import Prompt
from omni_rollout.models import open_model
from vllm_omni_helpers import MODEL, PARAMS, open_engine

PROMPTS = [Prompt('a red sign that says "AB"', group=0, index=i, seed=i) for i in range(2)]


def test_an_offloaded_encoder_gives_the_same_samples_and_stays_on_the_host_when_the_engine_sleeps():
    engine = open_engine()
    before = engine.generate(PROMPTS, PARAMS)
    engine.close()
    model = open_model(MODEL.path)
    model.host_encoders = True
    engine = open_engine(model)
    encoder = list(engine.parts.text_encoder.parameters())
    places, forwards = [param.data_ptr() for param in encoder], []
    engine.parts.text_encoder.register_forward_hook(lambda *_: forwards.append(1))
    assert torch.equal(engine.generate(PROMPTS, PARAMS).x0, before.x0)
    assert forwards
    engine._free()  # what `sleep` does on an accelerator
    assert [param.data_ptr() for param in encoder] == places
    assert not any(param.numel() for param in engine.parts.vae.parameters())
    engine.close()
