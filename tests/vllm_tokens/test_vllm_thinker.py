"""Qwen3-Omni's thinker on vLLM: with media of every kind it samples what the trainer scores, also after a sync."""

import pytest
import torch
from omni_rollout import Prompt
from omni_rollout.engines.vllm import VllmEngine
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenParams, score_tokens
from omni_train.weights.full import named_weights
from vllm_models import build_qwen3_omni

GENERATOR = torch.Generator().manual_seed(0)
TOLERANCE = 1e-5  # nats: float32 through other kernels


def noise(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)


IMAGES = (noise(48, 64, 3), noise(32, 32, 3))
VIDEO = noise(5, 48, 64, 3)
SOUND = torch.rand(16_080, 1, generator=GENERATOR) - 0.5  # half a hop more than a second
MEDIA = {
    "text": {},
    "images": {"images": IMAGES},
    "sound": {"audio": SOUND},
    "whole hops": {"audio": SOUND[:16_000]},
    "video": {"video": VIDEO},
    "all": {"images": IMAGES[:1], "audio": SOUND, "video": VIDEO},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    build_qwen3_omni(folder)
    engine = VllmEngine(open_token_model(folder), memory_share=0.1, max_tokens=256)
    yield engine
    engine.close()


def gaps(engine, net):
    """How far off the log-probs of each kind of prompt are, two answers each."""
    kinds = [kind for kind in MEDIA for _ in range(2)]
    rates = {"sample_rate": 16_000, "fps": 2.0}
    prompts = [Prompt("what?", group=0, index=i, seed=i, rates=rates, **MEDIA[kind]) for i, kind in enumerate(kinds)]
    drawn = engine.generate(prompts, TokenParams(8))
    batches = [drawn.select([i]) for i in range(len(prompts))]
    with torch.no_grad():
        scored = [score_tokens(engine.model, net, batch) for batch in batches]
    off = [
        ((s.log_prob - b.rollout_log_prob) * b.mask).abs().max().item() for s, b in zip(scored, batches, strict=True)
    ]
    return {kind: max(off[2 * i : 2 * i + 2]) for i, kind in enumerate(MEDIA)}


def test_log_probs_of_every_kind_of_prompt_are_the_trainers_also_after_a_sync(engine):
    net = engine.model.load_net(device="cpu", dtype=torch.float32)
    assert max(gaps(engine, net).values()) <= TOLERANCE
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(1 + (weight.dim() > 1) * torch.rand(weight.shape, generator=GENERATOR))  # norms stay
    stale = gaps(engine, net)  # what the engine has drawn so far must not come back
    assert min(stale.values()) > 10 * TOLERANCE, stale
    engine.load_weights(named_weights(net), version=1)
    found = gaps(engine, net)
    assert max(found.values()) <= TOLERANCE, found


def test_a_video_between_whole_places_in_time_is_refused(engine):
    prompt = Prompt("what?", group=0, index=0, seed=0, video=VIDEO, rates={"fps": 3.0})
    with pytest.raises(ValueError, match=r"times a video's 2 / fps must be whole for vLLM, got 16\.6"):
        engine.generate([prompt], TokenParams(2))
