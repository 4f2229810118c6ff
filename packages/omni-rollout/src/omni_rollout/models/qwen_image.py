"""Qwen-Image (arXiv 2508.02324): text to image, a flow-matching transformer over the latents of an 8x VAE.

Shapes: B samples, C latent channels (16), h x w latent pixels (an eighth of the image), T text tokens, D text width.

Latents stay unpacked, [B, C, h, w], so that a tensor's shape shows the geometry; they are packed into 2 x 2 tokens only
around the transformer call. The transformer runs in the text embeddings' dtype.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import (
    PIXELS_PER_TOKEN,
    DiffusersModel,
    check_size,
    needed_mask,
    pack,
    pixels,
    unpack,
)
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

# The chat template that the model was trained with; the embeddings of its first TEMPLATE_TOKENS tokens are dropped.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
MAX_PROMPT_TOKENS = 512


class QwenVaeModel(DiffusersModel):
    """DiffusersModel of images, whose latents are the normalized code of an AutoencoderKLQwenImage."""

    def _check_config(self) -> None:
        super()._check_config()
        self._expect("vae", input_channels=3)
        self._expect_length("vae", "temperal_downsample", 3)  # each halves the sides

    def load(self, *, device: torch.device | str, dtype: torch.dtype, net: nn.Module | None = None) -> Parts:
        """Load as other models do, then reduce the video decoder to a single frame."""
        parts = super().load(device=device, dtype=dtype, net=net)
        cut_to_one_frame(parts.vae.decoder)
        return parts

    def latent_shape(self, params: Params) -> tuple[int, int, int]:
        """Return (C, h, w)."""
        return self.value("vae", "z_dim", int), params.height // 8, params.width // 8

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return images [B, 8h, 8w, 3] in [0, 1], float32, from clean latents x0 [B, C, h, w]."""
        mean, std = channel_statistics(self, x0)
        latents = (x0 * std + mean).to(parts.vae.dtype)
        images = parts.vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0]
        return {"image": (images.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)}, {}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, H/8, W/8] of images [B, H, W, 3]: the mean of the VAE's code."""
        images = pixels(media["image"]).to(parts.vae.device, parts.vae.dtype)
        code = parts.vae.encode(images[:, :, None]).latent_dist.mode()[:, :, 0].float()
        mean, std = channel_statistics(self, code)
        return (code - mean) / std


class QwenImage(QwenVaeModel):
    """Qwen-Image for one checkpoint. Its guidance is `true_cfg_scale`, which is on above 1."""

    PIPELINE = "QwenImagePipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "QwenImageTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKLQwenImage"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {"text_encoder": ("model.visual", "lm_head")}
    OPTIONS: ClassVar[Mapping[str, float]] = {"true_cfg_scale": 1.0}
    GUIDANCE = OPTIONS
    CONTEXT_PARALLEL = True
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("QwenImageTransformerBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (
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

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "z_dim", int)
        self._expect("transformer", patch_size=2, in_channels=4 * channels, out_channels=channels)
        self._expect("transformer", guidance_embeds=False, use_additional_t_cond=False, use_layer3d_rope=False)

    def _class(self, part: str) -> Any:
        if part != "transformer":
            return super()._class(part)
        from omni_rollout.models.qwen_image_net import QwenImageTransformer2DModel

        return QwenImageTransformer2DModel

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size or option."""
        super().check(params)
        check_size(params, PIXELS_PER_TOKEN)
        if params.guidance_scale != 1:
            rule = f"guidance_scale must be 1 for a {self.PIPELINE}, whose guidance is true_cfg_scale"
            raise ValueError(f"{rule}, got {params.guidance_scale}")
        if self.context > 1:
            self._check_tokens(params, PIXELS_PER_TOKEN)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, D] in the encoder's dtype and `embeds_mask` [T], all True.

        Prompts are encoded one at a time, so that the embeddings do not depend on the batch.
        """
        # Without a negative prompt, the released pipeline guides away from a single space.
        text = (prompt.negative or " ") if negative else prompt.text
        tokens = parts.tokenizer(
            TEMPLATE.format(text), max_length=MAX_PROMPT_TOKENS + TEMPLATE_TOKENS, truncation=True, return_tensors="pt"
        )
        ids = to_device(tokens.input_ids, parts.text_encoder.device)  # without a mask, which would be all ones
        return text_conditioning(
            parts.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1], TEMPLATE_TOKENS
        )

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, h, w], float32, at x [B, C, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `embeds_mask` [B, T], with guidance also their negatives; `reference_0` and so on:
        latents [B, C, h', w'] of images to edit. The guided result is rescaled, per token, to the norm of the
        conditional prediction, as in the released pipeline ("true CFG").
        """
        images = [x, *(latents for name, latents in cond.items() if name.startswith("reference_"))]
        tokens = torch.cat([pack(latents) for latents in images], dim=1)
        shapes = [[(1, latents.shape[-2] // 2, latents.shape[-1] // 2) for latents in images]] * len(tokens)

        def predict(embeds: Tensor, mask: Tensor) -> Tensor:
            if padding := -mask.shape[1] % self.context:  # so that every rank has equally many positions
                embeds, mask = nn.functional.pad(embeds, [0, 0, 0, padding]), nn.functional.pad(mask, [0, padding])
            return net(
                hidden_states=tokens.to(embeds.dtype),
                timestep=sigma.float() * 1000 / 1000,  # rounded as in diffusers: its timesteps are float32 sigma * 1000
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=needed_mask(mask, embeds.device),
                img_shapes=shapes,
                return_dict=False,
            )[0][:, : x[0, 0].numel() // 4].float()  # without the references' velocity

        velocity = predict(cond["embeds"], cond["embeds_mask"])
        if self.is_guided(params):
            negative = predict(cond["negative_embeds"], cond["negative_embeds_mask"])
            combined = negative + self.option(params, "true_cfg_scale") * (velocity - negative)
            velocity = combined * (velocity.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
        return unpack(velocity, x.shape)


class OneFrameConv(nn.Conv2d):
    """Causal video convolution for a single frame: only its last temporal taps, because the others multiply zeros."""

    def __init__(self, conv: nn.Conv3d) -> None:
        _, height, width = conv.kernel_size
        padding = height // 2, width // 2
        super().__init__(conv.in_channels, conv.out_channels, (height, width), padding=padding, device="meta")
        last = conv.weight[:, :, -1].clone(memory_format=torch.channels_last)
        self.weight, self.bias = nn.Parameter(last, requires_grad=False), conv.bias

    def forward(self, x: Tensor, cache_x: None = None) -> Tensor:
        """Return the output [B, out, 1, h, w] for a first frame x [B, in, 1, h, w]."""
        return super().forward(x[:, :, 0])[:, :, None]


def cut_to_one_frame(decoder: nn.Module) -> None:
    """Replace the convolutions of a video decoder by convolutions for a single frame.

    This leaves 38 % of the operations and, on a CPU, of the time, and saves 2.4 GB of bfloat16 activations for a
    1024-pixel image.
    """
    for name, module in list(decoder.named_modules()):
        if isinstance(module, nn.Conv3d):
            decoder.set_submodule(name, OneFrameConv(module))
    # Without `feat_cache`: no next frame needs the convolutions' inputs.
    decoder.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)


def text_conditioning(hidden: Tensor, num_left_out: int) -> Cond:
    """Return the conditioning from last hidden states [1, N, D] of a template with a text, without the first tokens."""
    embeds = hidden[0, num_left_out:]
    return {"embeds": embeds, "embeds_mask": torch.ones(len(embeds), dtype=torch.bool)}


def channel_statistics(model: DiffusersModel, latents: Tensor) -> list[Tensor]:
    """Return the mean and standard deviation [1, C, 1, ...] of the VAE's channels, for latents [B, C, ...]."""
    return [
        to_device(torch.tensor(model.value("vae", name, list)), latents.device).view(1, -1, *[1] * (latents.dim() - 2))
        for name in ("latents_mean", "latents_std")
    ]
