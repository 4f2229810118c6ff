"""Qwen-Image (arXiv 2508.02324): text to image, a flow-matching transformer over the latents of an 8x VAE.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text tokens, D text width.
`velocity = dx/dsigma = noise - data`; latents and velocities are float32, the transformer runs in the dtype of the text
features.

Latents stay unpacked, [B, C, h, w], so that a tensor's shape tells the geometry; the 2 x 2 packing into tokens happens
around the transformer call. `predict_velocity` is the one function that both sampling and training call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omni_sched import exponential_shift_sigmas, linear_sigmas, resolution_mu, shift_sigmas, stretch_sigmas
from torch import Tensor, nn

from omni_rollout.files import check_safetensors, read_json

if TYPE_CHECKING:
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
    from transformers import PreTrainedTokenizerBase

BLOCK_NAMES = ("QwenImageTransformerBlock",)
LORA_TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)

# The chat template the model was trained with; its first TEMPLATE_TOKENS tokens are dropped from the text features.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
MAX_PROMPT_TOKENS = 512
PIXELS_PER_TOKEN = 16  # 8 by the VAE, 2 by the packing


@dataclass(frozen=True)
class QwenImage:
    """The parts of a Qwen-Image checkpoint."""

    transformer: nn.Module
    text_encoder: nn.Module
    tokenizer: "PreTrainedTokenizerBase"
    vae: "AutoencoderKLQwenImage"
    scheduler: "FlowMatchEulerDiscreteScheduler"


def load(path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> QwenImage:
    """The parts of a diffusers QwenImagePipeline folder or hub id, in eval mode, with no gradients wanted."""
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline.from_pretrained(path, dtype=dtype)
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        part.to(device).eval().requires_grad_(False)
    return QwenImage(pipe.transformer, pipe.text_encoder, pipe.tokenizer, pipe.vae, pipe.scheduler)


def load_transformer(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The transformer alone, for training beside an engine that has loaded the rest."""
    from diffusers import QwenImageTransformer2DModel

    transformer = QwenImageTransformer2DModel.from_pretrained(path, subfolder="transformer", torch_dtype=dtype)
    return transformer.to(device).eval().requires_grad_(False)


def check_folder(path: str | Path, *, height: int, width: int) -> None:
    """Returns when a local checkpoint has all its files, whole, and can draw that size; reads no weights.

    Raises:
        ValueError: what is missing or cut short, or height or width is no positive multiple of 16 pixels.
    """
    _check_size(height, width)
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or str(path).count("/") != 1 or str(path).startswith("."):
            raise ValueError(f"model must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at {path}")
        return
    kind = read_json(folder / "model_index.json").get("_class_name")
    if kind != "QwenImagePipeline":
        raise ValueError(f"model must be the folder of a diffusers QwenImagePipeline, {folder} holds a {kind}")
    configs = ("transformer/config.json", "text_encoder/config.json", "vae/config.json")
    for name in (*configs, "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"):
        read_json(folder / name)
    for part in ("text_encoder", "vae"):
        check_safetensors(folder / part)
    found, wanted = check_safetensors(folder / "transformer"), empty_transformer(folder).state_dict()
    if missing := wanted.keys() - found:  # diffusers would draw them at random
        raise ValueError(
            f"model is incomplete: {folder}/transformer lacks {len(missing)} weights, such as {min(missing)}"
        )


def empty_transformer(path: str | Path) -> nn.Module:
    """The transformer on the meta device: names and shapes without weights."""
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        return QwenImageTransformer2DModel.from_config(
            QwenImageTransformer2DModel.load_config(path, subfolder="transformer")
        ).requires_grad_(False)


def latent_shape(model: QwenImage, *, height: int, width: int) -> tuple[int, int, int]:
    """The latent shape (C, h, w) of an image of `height` x `width` pixels.

    Raises:
        ValueError: height or width is no positive multiple of 16.
    """
    _check_size(height, width)
    return model.vae.config.z_dim, height // 8, width // 8


def sigmas(model: QwenImage, num_steps: int, *, height: int, width: int) -> Tensor:
    """The noise levels [num_steps + 1] from 1 to 0, shifted as the checkpoint's scheduler configuration says."""
    config = model.scheduler.config
    levels = linear_sigmas(num_steps)
    if config.use_dynamic_shifting:
        tokens = (height // PIXELS_PER_TOKEN) * (width // PIXELS_PER_TOKEN)
        mu = resolution_mu(
            tokens,
            base_tokens=config.base_image_seq_len,
            max_tokens=config.max_image_seq_len,
            base_mu=config.base_shift,
            max_mu=config.max_shift,
        )
        levels = exponential_shift_sigmas(levels, mu)
    else:
        levels = shift_sigmas(levels, config.shift)
    return stretch_sigmas(levels, config.shift_terminal) if config.shift_terminal else levels


def encode(model: QwenImage, text: str) -> dict[str, Tensor]:
    """The text features of one prompt: `embeds` [T, D] in the encoder's dtype and `mask` [T], True.

    One prompt at a time, so that the features do not depend on which prompts share a batch.
    """
    tokens = model.tokenizer(
        [TEMPLATE.format(text)],
        max_length=MAX_PROMPT_TOKENS + TEMPLATE_TOKENS,
        truncation=True,
        return_tensors="pt",
    ).to(next(model.text_encoder.parameters()).device)
    hidden = model.text_encoder(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
    ).hidden_states[-1]
    embeds = hidden[0, TEMPLATE_TOKENS:]
    return {"embeds": embeds, "mask": torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)}


def predict_velocity(
    transformer: nn.Module, x: Tensor, sigma: Tensor, cond: dict[str, Tensor], *, guidance_scale: float = 1.0
) -> Tensor:
    """The velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

    cond: `embeds` [B, T, D] and `mask` [B, T]; with guidance_scale > 1 also `negative_embeds` and `negative_mask`. Both
    halves of classifier-free guidance run as one batch; the result is rescaled, token by token, to the length of the
    conditional prediction, as the released pipeline does ("true CFG").
    """
    embeds, mask = cond["embeds"], cond["mask"]
    tokens = _pack(x)
    guided = guidance_scale > 1
    if guided:
        embeds, mask = _stack(embeds, mask, cond["negative_embeds"], cond["negative_mask"])
        tokens, sigma = torch.cat([tokens, tokens]), torch.cat([sigma, sigma])
    dtype = embeds.dtype
    velocity = transformer(
        hidden_states=tokens.to(dtype),
        timestep=sigma.float() * 1000 / 1000,  # diffusers' own rounding: its timesteps are float32 sigma * 1000
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=None if bool(mask.all()) else mask,
        img_shapes=[[(1, x.shape[-2] // 2, x.shape[-1] // 2)]] * len(tokens),
        return_dict=False,
    )[0].float()
    if guided:
        positive, negative = velocity.chunk(2)
        combined = negative + guidance_scale * (positive - negative)
        velocity = combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
    return _unpack(velocity, x.shape)


def decode(model: QwenImage, x0: Tensor) -> Tensor:
    """Images [B, 3, 8h, 8w] in [0, 1], float32, from clean latents x0 [B, C, h, w]."""
    config = model.vae.config
    mean = torch.tensor(config.latents_mean, device=x0.device).view(1, -1, 1, 1)
    std = torch.tensor(config.latents_std, device=x0.device).view(1, -1, 1, 1)
    latents = (x0 * std + mean).to(model.vae.dtype)
    images = model.vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0]
    return (images.float() / 2 + 0.5).clamp(0, 1)


def _check_size(height: int, width: int) -> None:
    for name, value in (("height", height), ("width", width)):
        if value < PIXELS_PER_TOKEN or value % PIXELS_PER_TOKEN:
            raise ValueError(f"{name} must be a positive multiple of {PIXELS_PER_TOKEN} pixels, got {value}")


def _stack(embeds: Tensor, mask: Tensor, negative: Tensor, negative_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both text batches as one, [2B, T, D] and [2B, T], padded on the right to the longer one."""
    length = max(embeds.shape[1], negative.shape[1])
    pad = nn.functional.pad
    embeds, negative = (pad(e, (0, 0, 0, length - e.shape[1])) for e in (embeds, negative))
    mask, negative_mask = (pad(m, (0, length - m.shape[1])) for m in (mask, negative_mask))
    return torch.cat([embeds, negative]), torch.cat([mask, negative_mask])


def _pack(x: Tensor) -> Tensor:
    """[B, C, h, w] -> tokens [B, (h/2)(w/2), 4C], each a 2 x 2 patch."""
    B, C, h, w = x.shape
    return x.view(B, C, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, (h // 2) * (w // 2), C * 4)


def _unpack(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_pack` for a latent of the given shape [B, C, h, w]."""
    B, C, h, w = shape
    return tokens.view(B, h // 2, w // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, h, w)
