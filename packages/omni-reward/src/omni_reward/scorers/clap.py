"""CLAP: the similarity of a sound to its prompt, as the cosine of their embeddings, in [-1, 1].

CLAP (Wu et al., arXiv 2211.06687) takes one channel at 48 kHz. It gets the first 10 s of a sound; a shorter sound is
repeated. Models that fuse random crops of longer sounds are rejected, because their scores are not deterministic. The
published repositories hold their weights as pytorch_model.bin.

Notation: N samples, S points in time, C channels.
"""

from typing import Any

import torch
from transformers import AutoTokenizer, ClapConfig, ClapFeatureExtractor, ClapModel

from omni_reward.media import Arrays, Meta
from omni_reward.scorers import neural
from omni_reward.scorers.sound import resample
from omni_reward.wire import Score, Scorer

HERTZ = 48_000
CLAP = "laion/clap-htsat-unfused"
FRAMES = 1001  # in 10 s of sound
PUBLISHED: dict[str, dict[str, Any]] = {  # 153 and 194 million weights; the first has the class's default values
    CLAP: {},
    "laion/larger_clap_general": {  # verl-omni's
        "audio_config": {"depths": [2, 2, 12, 2], "hidden_size": 1024, "patch_embeds_hidden_size": 128}
    },
}


def empty_clap(device: str, *, model: str = CLAP, dtype: str = "float32") -> neural.Empty:
    """Return the network of `load_clap` with uninitialized weights.

    Raises:
        ValueError: an argument is invalid, or the model's configuration cannot be read.
    """
    config = neural.load_config(ClapConfig, model, PUBLISHED)
    network = neural.empty_model(ClapModel, config, dtype, device)
    length = config.text_config.max_position_embeddings - 2

    def call() -> None:
        features = torch.zeros(neural.BATCH_SIZE, 1, FRAMES, config.audio_config.num_mel_bins).to(device, network.dtype)
        tokens = torch.ones(neural.BATCH_SIZE, length, dtype=torch.int64).to(device)
        network.get_audio_features(input_features=features)
        network.get_text_features(tokens, tokens)

    return neural.Empty(network, call)


def load_clap(*, model: str = CLAP, device: str | None = None, dtype: str = "float32", threads: int = 1) -> Scorer:
    """Load the scorer of `audio` [N, S, C], float32.

    Args:
        model: name of a CLAP model without feature fusion.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument is invalid, or the model cannot be read.
    """
    where, kind = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    config = neural.load_part(ClapConfig, model)
    network = neural.load_model(ClapModel, model, kind, where, config=config, weights=neural.find_weights(model))
    if network.config.audio_config.enable_fusion:
        raise ValueError(f"model must be a CLAP without feature fusion, got {model!r}")
    tokenizer, extract = neural.load_part(AutoTokenizer, model), neural.load_part(ClapFeatureExtractor, model)
    max_length = network.config.text_config.max_position_embeddings - 2  # RoBERTa counts positions from 2

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        rates: list[Any] = [sample["sample_rate"] for sample in meta]
        sounds = [resample(array.mean(axis=1), rate, HERTZ) for array, rate in zip(media["audio"], rates, strict=True)]
        cut = [array[: extract.nb_max_samples] for array in sounds]
        features = extract(cut, sampling_rate=HERTZ, return_tensors="pt").input_features.to(where, kind)
        tokens = tokenizer(prompts, padding=True, truncation=True, max_length=max_length, return_tensors="pt").to(where)
        with torch.inference_mode():
            sound = network.get_audio_features(input_features=features).pooler_output.float()
            text = network.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output.float()
        return [Score.of(value) for value in (sound * text).sum(dim=-1).tolist()]

    version, move = f"{neural.short_name(model)} {dtype}", neural.make_mover(network)
    return Scorer(score, media=("audio",), batch_size=neural.BATCH_SIZE, version=version, move=move)
