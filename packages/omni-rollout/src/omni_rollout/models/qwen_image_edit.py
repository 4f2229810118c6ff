"""Qwen-Image-Edit and Qwen-Image-Edit-Plus (2509, 2511): Qwen-Image that edits one or several references.

A reference enters twice: the text encoder reads it, and its latents are further tokens next to those of the image.

Shapes besides Qwen-Image's: h' x w' latent pixels of a reference, which is resized to about `image_area` pixels.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from omni_rollout.model import Model
from omni_rollout.models.diffusers_model import PIXELS_PER_TOKEN, DiffusersModel, resize_image
from omni_rollout.models.qwen_image import QwenImage, text_conditioning
from omni_rollout.types import Cond, Params, Parts, Prompt

# The chat template that the models were trained with; the embeddings of its first TEMPLATE_TOKENS tokens are dropped.
TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 64
PLACE = "<|image_pad|>"  # one per token of an image
UNIT = 32  # pixels; the sides of references are multiples of it


class QwenImageEditPlus(QwenImage):
    """Qwen-Image-Edit-Plus for one checkpoint. Its guidance is `true_cfg_scale`, which is on above 1.

    The option image_area is the number of pixels of each reference for its latents, by default 4,096 tokens.
    """

    PIPELINE = "QwenImageEditPlusPipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        **QwenImage.PARTS,
        "processor": ("transformers", "Qwen2VLProcessor"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"text_encoder": ("lm_head",)}
    OPTIONS: ClassVar[Mapping[str, float]] = {**QwenImage.OPTIONS, "image_area": 1024 * 1024}
    IMAGES = range(1, 11)
    SEEN_AREA: ClassVar[int] = 384 * 384  # pixels of a reference that the text encoder sees
    CAPTION: ClassVar[str] = "Picture {}: "  # before a reference in the text

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        check_image_area(self, params)

    def check_context(self) -> None:
        """Raise ValueError unless `context` ranks can share a forward pass; references have 4 tokens per unit."""
        super().check_context()
        if (UNIT // PIXELS_PER_TOKEN) ** 2 % self.context:
            raise ValueError(f"context must be 1, 2 or 4 for a {self.PIPELINE}, got {self.context}")

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of a prompt and its references: `embeds` [T, D] and `embeds_mask` [T].

        The encoder gets the token types; otherwise it would number image tokens like words (diffusers issue 14194).
        """
        text = (prompt.negative or " ") if negative else prompt.text
        images = [fit_reference(image, self.SEEN_AREA) for image in prompt.images]
        vision = parts.processor(images=images, return_tensors="pt")
        lengths = (vision.image_grid_thw.prod(-1) // parts.processor.merge_size**2).tolist()
        places = [
            f"{self.CAPTION.format(i)}<|vision_start|>{PLACE * length}<|vision_end|>"
            for i, length in enumerate(lengths, start=1)
        ]
        tokens = parts.tokenizer([TEMPLATE.format("".join(places) + text)], return_tensors="pt")
        is_picture = tokens.input_ids == parts.tokenizer.convert_tokens_to_ids(PLACE)
        inputs: dict[str, Tensor] = {**tokens, **vision, "mm_token_type_ids": is_picture.int()}
        inputs = {name: tensor.to(parts.text_encoder.device) for name, tensor in inputs.items()}
        return text_conditioning(
            parts.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1], TEMPLATE_TOKENS
        )

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the latents of the references, `reference_0` [C, h', w'] and so on."""
        images = [fit_reference(image, self.option(params, "image_area")) for image in prompt.images]
        return reference_latents(self, parts, images, params)

    def _class(self, part: str) -> Any:
        return image_processor_class() if part == "processor" else super()._class(part)


class QwenImageEdit(QwenImageEditPlus):
    """Qwen-Image-Edit for one checkpoint, which takes one reference."""

    PIPELINE = "QwenImageEditPipeline"
    IMAGES = range(1, 2)
    SEEN_AREA: ClassVar[int] = 1024 * 1024
    CAPTION: ClassVar[str] = ""


def image_processor_class() -> Any:
    """Return the class of the processor's image half, which needs no torchvision."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil


def check_image_area(model: DiffusersModel, params: Params) -> None:
    """Raise ValueError for references smaller than a unit; the model's option image_area is their number of pixels."""
    if not (area := model.option(params, "image_area")) >= UNIT * UNIT:
        raise ValueError(f"image_area must be >= {UNIT * UNIT} pixels, got {area}")


def reference_latents(model: Model, parts: Parts, images: Sequence[Tensor], params: Params) -> Cond:
    """Return the latents of references, `reference_0` [C, h', w'] and so on."""
    encoded = [model.encode_media(parts, {"image": image[None]}, params)[0] for image in images]
    return {f"reference_{i}": latents for i, latents in enumerate(encoded)}


def fit_reference(image: Tensor, area: float) -> Tensor:
    """Return an image, uint8 [H, W, 3], resized to about `area` pixels: same aspect ratio, sides of whole units."""
    ratio = image.shape[1] / image.shape[0]
    height, width = (max(1, round(math.sqrt(side) / UNIT)) * UNIT for side in (area / ratio, area * ratio))
    return resize_image(image, height, width)
