"""Qwen2.5-VL (github.com/QwenLM/Qwen2.5-VL): text, images and video in, text out.

It needs no torchvision: transformers' PIL processor cuts images, and a video's frames in pairs, into patches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_rollout.models.parts import open_processor
from omni_rollout.models.tokens.transformers_model import TransformersModel
from omni_rollout.types import Cond, Prompt


class Patches:
    """Patches of images and videos, as in transformers' processors."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.processor: Any = open_processor(Qwen2VLImageProcessorPil, folder)

    def of_images(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the patches [n, D] of images, uint8 [H, W, 3] each, and their grids [images, 3]: 1, rows, columns."""
        inputs = self.processor(images=[image.numpy() for image in images], return_tensors="pt")
        return inputs.pixel_values, inputs.image_grid_thw

    def of_video(self, video: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patches [n, D] of a video, uint8 [F, H, W, 3], and its grid [1, 3]: frame pairs, rows, columns.

        The processor repeats an image in time; here a patch has two different frames instead.
        """
        span = self.processor.temporal_patch_size
        frames = torch.cat([video, video[-1:].expand(-len(video) % span, -1, -1, -1)])
        patches, grids = self.of_images(list(frames))
        _, rows, columns = grids[0].tolist()
        parts = patches.view(len(frames) // span, span, rows * columns, 3, span, -1)
        pairs = torch.stack([parts[:, k, :, :, k] for k in range(span)], dim=3)
        return pairs.flatten(0, 1).flatten(1), torch.tensor([[len(frames) // span, rows, columns]])

    def places(self, grids: Tensor) -> list[int]:
        """Return the number of prompt tokens for each grid."""
        counts: list[int] = (grids.prod(dim=1) // self.processor.merge_size**2).tolist()
        return counts

    def encode(self, prompt: Prompt, *, seconds: str) -> tuple[Cond, list[int], list[int]]:
        """Return the tensors of a prompt's images and video, and the number of tokens of each.

        seconds: the net's name for the time between two temporal positions of a video.
        """
        media: Cond = {}
        images: list[int] = []
        videos: list[int] = []
        if prompt.images:
            media["pixel_values"], grids = self.of_images(prompt.images)
            media["image_grid_thw"], images = grids, self.places(grids)
        if prompt.video is not None:
            media["pixel_values_videos"], grids = self.of_video(prompt.video)
            media["video_grid_thw"], videos = grids, self.places(grids)
            media[seconds] = torch.tensor([self.processor.temporal_patch_size / prompt.rates["fps"]])
        return media, images, videos


class Qwen25VL(TransformersModel):
    """Qwen2.5-VL for one checkpoint. Its vision tower is frozen."""

    BLOCK_NAMES: tuple[str, ...] = ("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock")
    LORA_TARGETS = r"model\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
    FROZEN: ClassVar[tuple[str, ...]] = ("model.visual",)
    MEDIA: ClassVar[tuple[str, ...]] = ("image", "video")
    PLACES: ClassVar[tuple[str, ...]] = (
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.patches = Patches(self.folder)

    def encode_media(self, prompt: Prompt) -> tuple[Cond, dict[int, list[int]]]:
        """Return the tensors of a prompt's images and video, and the number of tokens of each medium by placeholder."""
        media, images, videos = self.patches.encode(prompt, seconds="second_per_grid_ts")
        return media, {self.config["image_token_id"]: images, self.config["video_token_id"]: videos}

    def positions(self, inputs: Cond) -> Cond:
        """Return each token's type (0 text, 1 image, 2 video), from which the net computes positions."""
        kinds = torch.zeros_like(inputs["input_ids"])
        for kind, name in enumerate(("image_token_id", "video_token_id"), start=1):
            kinds = kinds.masked_fill(inputs["input_ids"] == self.config[name], kind)
        return {"mm_token_type_ids": kinds}
