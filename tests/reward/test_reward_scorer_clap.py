"""CLAP on a tiny checkpoint, against transformers' own extractor and model, and resampling against closed forms."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from omni_reward import Score
from omni_reward.scorers import empty_networks, load_scorer
from omni_reward.scorers.sound import resample
from safetensors.torch import load_file
from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

RATE = 48_000
SOUNDS = (0.3 * np.random.default_rng(0).standard_normal((3, 12_000, 2))).astype(np.float32)
PROMPTS = ["a dog", "rain on a roof", "caf\u00e9"]
META: list[dict[str, object]] = [{"sample_rate": RATE}] * 3


@pytest.fixture
def tiny(tiny: Path) -> Path:
    return tiny / "clap"


def values(tiny: Path, sounds: np.ndarray = SOUNDS, rate: float = RATE, **options: str) -> list[float | None]:
    scorer = load_scorer("clap", options={"model": str(tiny), **options})
    assert scorer.media == ("audio",)
    return [score.value for score in scorer({"audio": sounds}, PROMPTS, [{"sample_rate": rate}] * 3)]


@torch.inference_mode()
def reference(tiny: Path, sounds: np.ndarray) -> list[float]:
    """The diagonal of the model's own table of similarities, without its scale."""
    model = ClapModel.from_pretrained(tiny).eval()
    heard = ClapFeatureExtractor.from_pretrained(tiny)(list(sounds), sampling_rate=RATE, return_tensors="pt")
    out = model(**AutoTokenizer.from_pretrained(tiny)(PROMPTS, padding=True, return_tensors="pt"), **heard)
    return (out.logits_per_audio.diagonal() / model.logit_scale_a.exp()).tolist()


def test_it_is_the_cosine_of_the_model(tiny: Path) -> None:
    found = values(tiny)
    assert found == pytest.approx(reference(tiny, SOUNDS.mean(axis=2)), abs=1e-5)
    assert len({round(value, 4) for value in found if value is not None}) == 3


def test_a_sound_of_another_rate_scores_as_at_the_model_s(tiny: Path) -> None:
    t = np.arange(6000) / 24_000
    tones = np.stack([np.sin(2 * np.pi * f * t) for f in (400, 1000, 4000)]).astype(np.float32)
    fast = np.arange(12_000) / RATE
    wanted = reference(tiny, np.stack([np.sin(2 * np.pi * f * fast) for f in (400, 1000, 4000)]).astype(np.float32))
    assert values(tiny, tones[..., None], rate=24_000) == pytest.approx(wanted, abs=1e-4)


def test_a_long_sound_is_cut_and_scores_alike_each_time(tiny: Path) -> None:
    longer = np.concatenate([SOUNDS, *[SOUNDS[:, ::-1]] * 4], axis=1)
    assert values(tiny, longer) == values(tiny, longer) == values(tiny, longer[:, :48_000])


def test_silence_and_a_long_prompt_are_judged(tiny: Path) -> None:
    scorer = load_scorer("clap", options={"model": str(tiny)})
    [score] = scorer({"audio": np.zeros((1, 10, 1), np.float32)}, ["a" * 200], META[:1])
    assert isinstance(score, Score)
    assert score.value is not None


def test_a_pytorch_file_of_the_weights_does_as_well(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert values(tmp_path) == values(tiny)
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        values(tmp_path)


def test_the_larger_checkpoint_has_its_published_size() -> None:
    [empty] = empty_networks("clap", "meta", {"model": "laion/larger_clap_general"}).values()
    assert 4 * sum(own.numel() for own in empty.network.parameters()) / 1e6 == pytest.approx(776, rel=0.005)  # MB


def test_a_model_that_fuses_random_crops_is_refused(tiny: Path, tmp_path: Path) -> None:
    config = ClapModel.from_pretrained(tiny).config
    config.audio_config.enable_fusion = True
    ClapModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model must be a CLAP without feature fusion"):
        load_scorer("clap", options={"model": str(tmp_path)})


@pytest.mark.parametrize(("rate", "wanted"), [(24_000, 48_000), (48_000, 16_000), (44_100, 48_000)])
def test_a_tone_stays_a_tone_at_another_rate(rate: int, wanted: int) -> None:
    def tone(hertz: int) -> np.ndarray:
        return np.sin(2 * np.pi * 1000 * np.arange(hertz // 10) / hertz)

    np.testing.assert_allclose(resample(tone(rate), rate, wanted), tone(wanted), atol=1e-9)


def test_the_rate_it_has_changes_nothing_and_what_does_not_fit_is_left_out() -> None:
    sound = SOUNDS[0, :, 0]
    assert resample(sound, 8000, 8000) is sound
    high = np.sin(2 * np.pi * 7000 * np.arange(1600) / 16_000)
    assert np.abs(resample(high, 16_000, 8000)).max() < 1e-9
