"""The thinker of Qwen3-Omni (github.com/QwenLM/Qwen3-Omni): text, images, sound and video in, text out.

It loads from the folder of the whole model, where names begin with `thinker.`, or of a separate thinker.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.files import read_json
from omni_rollout.models.parts import open_processor
from omni_rollout.models.tokens.qwen2_5_vl import Patches
from omni_rollout.models.tokens.transformers_model import TransformersModel
from omni_rollout.types import Cond, Prompt

FEATURES = ("input_features", "feature_attention_mask")


class Qwen3Omni(TransformersModel):
    """Qwen3-Omni's thinker for one checkpoint. Its vision and audio towers are frozen."""

    BLOCK_NAMES: tuple[str, ...] = (
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeVisionBlock",
        "Qwen3OmniMoeAudioEncoderLayer",
    )
    EXPERT_NAMES: ClassVar[tuple[str, ...]] = ("Qwen3OmniMoeThinkerTextExperts",)
    LORA_TARGETS = r"model\.layers\.\d+\.self_attn\.[qkvo]_proj"  # not those in the towers
    FROZEN: ClassVar[tuple[str, ...]] = ("visual", "audio_tower")
    MEDIA: ClassVar[tuple[str, ...]] = ("image", "video", "audio")
    PLACES: ClassVar[tuple[str, ...]] = (
        "image_token_id",
        "video_token_id",
        "audio_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "audio_start_token_id",
        "audio_end_token_id",
    )
    GROWS: ClassVar[tuple[str, ...]] = FEATURES

    def __init__(self, path: str | Path) -> None:
        from transformers import WhisperFeatureExtractor

        super().__init__(path)
        self.patches = Patches(self.folder)
        self.listen: Any = open_processor(WhisperFeatureExtractor, self.folder)
        self.sample_rate = int(self.listen.sampling_rate)
        self.prefix = "thinker." if "thinker_config" in read_json(self.file) else ""

    def read_config(self) -> dict[str, Any]:
        """Return the thinker's configuration, including from a whole model's file."""
        config: dict[str, Any] = self.net_config().to_dict()
        return config | {"architectures": read_json(self.file)["architectures"]}

    def net_class(self) -> Any:
        """Return the thinker's class."""
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

        return Qwen3OmniMoeThinkerForConditionalGeneration

    def parse_config(self, content: dict[str, Any]) -> Any:
        """Return the thinker's configuration, including from a whole model's file."""
        from transformers import Qwen3OmniMoeThinkerConfig

        return Qwen3OmniMoeThinkerConfig(**content.get("thinker_config", content))

    def encode_media(self, prompt: Prompt) -> tuple[Cond, dict[int, list[int]]]:
        """Return the tensors of a prompt's images, video and sound, and each one's number of tokens by placeholder."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

        media, images, videos = self.patches.encode(prompt, seconds="video_second_per_grid")
        sounds: list[int] = []
        if prompt.audio is not None:
            features = self.listen(
                prompt.audio.mean(dim=1).numpy(),
                sampling_rate=int(prompt.rates["sample_rate"]),
                padding=True,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            media |= dict(zip(FEATURES, (features.input_features, features.attention_mask), strict=True))
            window = self.config["audio_config"]["n_window"]
            sounds = [int(_get_feat_extract_output_lengths(features.attention_mask.sum(dim=1), window))]
        names = ("image_token_id", "video_token_id", "audio_token_id")
        return media, {self.config[name]: sizes for name, sizes in zip(names, (images, videos, sounds), strict=True)}

    def positions(self, inputs: Cond) -> Cond:
        """Return {}: the net computes positions from ids and masks."""
        return {}

    def save(self, net: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the weights under the whole model's names, which the thinker's class can also read."""
        from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

        config = Qwen3OmniMoeConfig(thinker_config=self.net_config().to_dict(), enable_audio_output=False)
        with torch.device("meta"):
            whole = Qwen3OmniMoeForConditionalGeneration(config)
        whole.save_pretrained(folder, state_dict={f"thinker.{name}": tensor for name, tensor in weights.items()})
        self.finish(folder)
