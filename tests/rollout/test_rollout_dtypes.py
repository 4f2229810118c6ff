"""Every model in 16 bits: latents stay float32, gradients pass the decoder, and samples are encoded again."""

from dataclasses import replace

import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model

CASES = [f"{name} {dtype}" for name in ROWS for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize("case", sampled(CASES, 4))
def test_a_gradient_passes_the_decoder_in_16_bits_and_samples_are_encoded_again(case):
    name, dtype = case.split()[0], getattr(torch, case.split()[1])
    row = ROWS[name]
    model, params = open_model(row.checkpoint()), replace(row.guided, num_inference_steps=2)
    parts = model.load(device="cpu", dtype=dtype)
    assert {p.dtype for p in parts.vae.parameters()} == {torch.bfloat16 if dtype == torch.bfloat16 else torch.float32}
    prompt = Prompt("a sign", 0, 0, seed=1, negative="grey", images=row.references(0))
    drawn = DiffusersEngine(model, parts).generate([prompt], params)
    x0 = drawn.x0.clone().requires_grad_()
    media, _ = model.decode(parts, x0, drawn.cond, params)
    assert {tensor.dtype for tensor in (x0, *media.values())} == {torch.float32}
    sum(tensor.square().sum() for tensor in media.values()).backward()
    assert x0.grad.isfinite().all()
    assert x0.grad.any()
    if len(media) == 1:  # frames with their sound are given as latents
        # In bfloat16 oneDNN's convolution of a single frame of three channels, which no released model has, gives NaN.
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=name != "hunyuan-image"):
            latents = model.encode_media(parts, {kind: tensor.detach() for kind, tensor in media.items()}, params)
        assert latents.dtype == torch.float32
        assert latents.shape == x0.shape
        assert latents.isfinite().all()
