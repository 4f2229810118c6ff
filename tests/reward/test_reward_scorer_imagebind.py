"""ImageBind with a small stand-in for its network, which is what ImageBind's own code would be given."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers import ulps
from omni_reward import Scorer
from omni_reward.scorers import load_scorer
from omni_reward.scorers.imagebind import clip_bounds, clip_starts
from torch import Tensor, nn

CLIPS = np.random.default_rng(0).integers(0, 256, (2, 40, 30, 50, 3), np.uint8)
SOUNDS = (0.3 * np.random.default_rng(1).standard_normal((2, 40_000, 2))).astype(np.float32)
META: list[dict[str, object]] = [{"fps": 16.0, "sample_rate": 16_000}] * 2
SHAPES = {"vision": (15, 3, 2, 224, 224), "audio": (3, 1, 128, 204)}


class Network(nn.Module):
    """As ImageBind's: unit embeddings of pieces, of which it gives the mean; sound's is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.audio = nn.Linear(3, 8), nn.Linear(128, 8)
        self.given: dict[str, Tensor] = {}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.given = inputs
        features = {"vision": inputs["vision"].mean(dim=(3, 4, 5)), "audio": inputs["audio"].mean(dim=(2, 4))}
        scales = {"vision": 1, "audio": 20}
        return {
            name: (scales[name] * nn.functional.normalize(getattr(self, name)(each), dim=-1)).mean(dim=1)
            for name, each in features.items()
        }


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """What ImageBind's code makes of its settings, where it is installed."""
    torch.manual_seed(0)
    made = Network()
    models, module = ModuleType("imagebind.models"), ModuleType("imagebind.models.imagebind_model")
    vars(module)["imagebind_huge"] = lambda pretrained: made
    vars(models)["imagebind_model"] = module
    for name, each in {"imagebind": ModuleType("imagebind"), models.__name__: models, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, each)
    return made


def load(network: Network, folder: Path, **options: str) -> Scorer:
    torch.save(network.state_dict(), folder / "imagebind_huge.pth")
    return load_scorer("imagebind", options={"weights": str(folder / "imagebind_huge.pth"), **options})


def test_it_is_the_cosine_of_what_the_network_gives(network: Network, tmp_path: Path) -> None:
    scorer = load(network, tmp_path)
    assert scorer.media == ("video", "audio")
    found = [score.value for score in scorer({"video": CLIPS, "audio": SOUNDS}, ["", ""], META)]
    assert {name: tuple(each.shape[1:]) for name, each in network.given.items()} == SHAPES
    given = network(network.given)
    assert found == pytest.approx(torch.cosine_similarity(given["vision"], given["audio"]).tolist(), abs=ulps(32))
    alone = [scorer({"video": CLIPS[i:][:1], "audio": SOUNDS[i:][:1]}, [""], META[:1])[0].value for i in range(2)]
    assert found == pytest.approx(alone, abs=ulps(32))


def test_the_network_sees_the_first_and_the_last_frame_of_each_piece_in_three_squares(
    network: Network, tmp_path: Path
) -> None:
    clips = np.zeros((1, 40, 224, 300, 3), np.uint8)
    clips += np.arange(40, dtype=np.uint8)[:, None, None, None]
    clips[..., 0] = np.arange(300) % 256
    load(network, tmp_path)({"video": clips, "audio": SOUNDS[:1]}, [""], META[:1])
    seen = network.given["vision"][0].double()
    green = seen[:, 1, :, 0, 0] * 0.26130258 + 0.4578275
    starts = [0, 2, 4, 6, 8]  # of 32 frames among 40
    assert (green * 255).round().int().tolist() == [[start, start + 31] for start in starts for _ in range(3)]
    red = ((seen[:3, 0, 0, 0, 0] * 0.26862954 + 0.48145466) * 255).round().int().tolist()
    assert red == [0, 38, 76]


@pytest.mark.parametrize(("length", "rate"), [(40, 16.0), (41, 16.0), (30, 16.0), (96, 24.0), (1, 16.0), (301, 29.97)])
def test_clips_are_those_of_the_library_s_sampler(length: int, rate: float) -> None:
    """The frames that begin within 2 s from each of five starts, spread over what a clip leaves."""
    for i, start in enumerate(clip_starts(length, rate, 5)):
        begin = i * max(length / rate - 2, 0) / 4
        within = [frame for frame in range(length) if begin - 1e-9 <= frame / rate < begin + 2 - 1e-9]
        assert clip_bounds(start, rate, length) == [within[0], within[-1]]


def test_a_sound_is_heard_in_bands_at_16_khz(network: Network, tmp_path: Path) -> None:
    t = np.arange(3 * 48_000) / 48_000
    tones = np.stack([np.sin(2 * np.pi * f * t) for f in (300, 3000)]).astype(np.float32)[..., None]
    load(network, tmp_path)({"video": CLIPS, "audio": tones}, ["", ""], [{"fps": 16.0, "sample_rate": 48_000}] * 2)
    low, high = (each.mean(dim=(0, 1, 3)).argmax().item() for each in network.given["audio"])
    assert 5 < low < high < 128
    silence = (0 + 4.268) / 9.138  # what fills up the 204 steps of 10 ms
    assert network.given["audio"][:, :, 0, :, 198:].unique().tolist() == pytest.approx([silence], abs=1e-6)


def test_the_first_channel_of_a_sound_is_heard(network: Network, tmp_path: Path) -> None:
    scorer = load(network, tmp_path)
    other = np.random.default_rng(1).standard_normal(SOUNDS.shape).astype(np.float32)
    heard = []
    for sounds in (SOUNDS[..., :1], np.concatenate([SOUNDS[..., :1], other[..., :1]], axis=-1)):
        scorer({"video": CLIPS, "audio": sounds}, ["", ""], META)
        heard.append(network.given["audio"])
    assert torch.equal(*heard)


def test_a_short_clip_is_judged(network: Network, tmp_path: Path) -> None:
    scorer = load(network, tmp_path, dtype="bfloat16")
    [score] = scorer({"video": CLIPS[:1, :1], "audio": SOUNDS[:1, :900]}, [""], META[:1])
    assert score.value is not None
    assert -1 <= score.value <= 1


def test_weights_of_another_network_are_refused(network: Network, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="weights must be those of imagebind_huge, got"):
        load_scorer("imagebind", options={"weights": str(tmp_path / "other.pth")})


def test_without_its_code_it_is_said_what_to_install() -> None:
    with pytest.raises(ImportError, match="scorer imagebind needs imagebind: install"):
        load_scorer("imagebind", options={"weights": "a"})
