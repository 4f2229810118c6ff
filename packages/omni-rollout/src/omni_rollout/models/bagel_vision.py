"""BAGEL's reference encoder: the sizes of references, and SigLIP's vision transformer on a grid of any size.

Names are those of ema.safetensors. Nothing here is trained.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoder

from omni_rollout.models.diffusers_model import resize_image

STAGES = ("embeddings.patch_embedding", "embeddings.position_embedding", "encoder", "post_layernorm")
MAX_PIXELS = 14 * 14 * 9 * 1024  # of a reference


class BagelVision(nn.Module):
    """Vision transformer with its connector to the language model.

    Arguments are as in vit_config.json; defaults are the released model's. width: width of the language model.
    """

    def __init__(
        self,
        hidden_size: int = 1152,
        image_size: int = 980,
        intermediate_size: int = 4304,
        num_attention_heads: int = 16,
        num_hidden_layers: int = 27,
        patch_size: int = 14,
        width: int = 3584,
    ) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_hidden_layers=num_hidden_layers - 1,  # the released code omits the last layer
        )
        config._attn_implementation = "sdpa"
        encoder = SiglipEncoder(config)  # type: ignore[arg-type]  # annotated with both towers' configuration
        self.patch_size, self.grid = patch_size, image_size // patch_size  # pixels; patches along a side
        vision = {
            "embeddings": nn.ModuleDict(
                {
                    "patch_embedding": nn.Linear(3 * patch_size**2, hidden_size),
                    "position_embedding": nn.Embedding(self.grid**2, hidden_size),
                }
            ),
            "encoder": encoder,
            "post_layernorm": nn.LayerNorm(hidden_size, eps=config.layer_norm_eps),
        }
        self.vit_model = nn.ModuleDict({"vision_model": nn.ModuleDict(vision)})
        self.connector = nn.ModuleDict({"fc1": nn.Linear(hidden_size, width), "fc2": nn.Linear(width, width)})
        self.vit_pos_embed = nn.ParameterDict({"pos_embed": nn.Parameter(torch.zeros(self.grid**2, width))})

    def forward(self, image: Tensor) -> Tensor:
        """Return the tokens [n, D] of an image [3, H, W] in [-1, 1], one per patch, in row order."""
        vision, size = self.vit_model["vision_model"], self.patch_size
        patch, place, encoder, norm = map(vision.get_submodule, STAGES)
        weight = patch.get_parameter("weight")
        patches = image.unflatten(2, (-1, size)).unflatten(1, (-1, size)).permute(1, 3, 2, 4, 0)
        rows, columns = (torch.arange(count, device=weight.device) for count in patches.shape[:2])
        places = (rows[:, None] * self.grid + columns).flatten()
        states = patch(patches.flatten(2).flatten(0, 1).to(weight)) + place(places)
        states = norm(encoder(inputs_embeds=states[None]).last_hidden_state[0])
        tokens: Tensor = self.connector["fc2"](gelu(self.connector["fc1"](states), approximate="tanh"))
        return tokens + self.vit_pos_embed["pos_embed"][places]


def fit_reference(image: Tensor, *, unit: int, min_side: float, max_side: float) -> Tensor:
    """Return a reference, uint8 [H, W, 3], resized to sides that are multiples of `unit` pixels and at most `max_side`.

    The shorter side has at least `min_side` pixels if the longer one permits it. The steps and rounding follow the
    released code; the filter is bicubic.
    """
    height, width = image.shape[:2]
    scale = max(min(max_side / max(height, width), 1.0), min_side / min(height, width))
    height, width = _scaled(height, width, scale, unit)
    if height * width > MAX_PIXELS:  # by the ratio of the areas, not by its root
        height, width = _scaled(height, width, MAX_PIXELS / (height * width), unit)
    if max(height, width) > max_side:
        height, width = _scaled(height, width, max_side / max(height, width), unit)
    return resize_image(image, height, width, resample="BICUBIC")


def _scaled(height: int, width: int, scale: float, unit: int) -> tuple[int, int]:
    """Scale both sides, and round each to the nearest multiple of the unit."""
    new_height, new_width = (max(1, round(round(side * scale) / unit)) * unit for side in (height, width))
    return new_height, new_width
