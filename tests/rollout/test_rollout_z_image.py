"""Z-Image: truncation that differs within a batch, and the released checkpoints' text encoder."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model

GUIDED = Params(6, 48, 80, guidance_scale=3.0)


@pytest.fixture(scope="module")
def model():
    return open_model(ROWS["z-image"].checkpoint())


def test_truncation_turns_guidance_off_sample_by_sample(model):
    """Training mixes noise levels in one batch; in sampling they are all alike."""
    params = replace(GUIDED, guidance={"cfg_truncation": 0.4, "cfg_normalization": 0.5})
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float64))
    cond = engine.generate([Prompt("a red sign", 0, 0, seed=0), Prompt("a blue sign", 1, 1, seed=1)], params).cond
    x = torch.randn(2, *model.latent_shape(params), generator=torch.Generator().manual_seed(0))

    def velocity(sigma, params):
        return model.predict_velocity(engine.net, x, torch.tensor(sigma), cond, params)

    mixed = velocity([0.9, 0.2], params)
    without = replace(params, guidance={"cfg_normalization": 0.5})
    torch.testing.assert_close(mixed[0], velocity([0.9, 0.2], without)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(mixed[1], velocity([0.9, 0.2], model.unguided(params))[1], rtol=0, atol=1e-5)
    assert (mixed[1] - velocity([0.9, 0.2], without)[1]).abs().max() > 1e-3


def test_a_truncated_step_leaves_the_negatives_out(model):
    params = replace(GUIDED, guidance={"cfg_truncation": 0.4})
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    levels = []
    engine.net.register_forward_pre_hook(lambda _, args, kwargs: levels.append(float(kwargs["t"][0])), with_kwargs=True)
    sigmas = engine.generate([Prompt("a sign", 0, 0, seed=0)], params).sigmas[:-1].tolist()
    calls = [levels.count(level) for level in dict.fromkeys(levels)]
    assert calls == [2 if 1 - sigma <= 0.4 else 1 for sigma in sigmas]
    assert set(calls) == {1, 2}


def test_the_text_encoder_may_be_stored_within_its_language_model(model, tmp_path):
    """As the released checkpoints have it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    config = Qwen3Config.from_pretrained(model.folder, subfolder="text_encoder")
    whole = Qwen3ForCausalLM(config)
    inner = model.load(device="cpu", dtype=torch.float32).text_encoder
    whole.model.load_state_dict(inner.state_dict())
    shutil.rmtree(tmp_path / "text_encoder")
    whole.save_pretrained(tmp_path / "text_encoder")
    assert json.loads((tmp_path / "text_encoder/config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    stored = open_model(tmp_path)
    stored.check_files()
    parts = stored.load(device="cpu", dtype=torch.float32)
    prompt = Prompt("a sign", 0, 0, seed=0)
    embeds = [
        m.encode(p, prompt)["embeds"]
        for m, p in ((stored, parts), (model, model.load(device="cpu", dtype=torch.float32)))
    ]
    assert torch.equal(*embeds)
