"""HunyuanVideo 1.5 (arXiv 2511.18870): text and image to video, a flow in the latents of a causal video VAE.

Shapes: B samples, C latent channels (32), F frames of a video, f = (F - 1) / 4 + 1 latent frames, h x w latent pixels
(a sixteenth of a frame), T text tokens of width D, G bytes of quoted words of width D', I tokens of the first frame of
width D''.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.files import read_json
from omni_rollout.models.diffusers_model import (
    FLOW_SCHEDULER,
    JOINT_ATTENTION,
    DiffusersModel,
    check_size,
    needed_mask,
    pixels,
    resize_image,
)
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

TEMPLATE_TOKENS = 108  # before the prompt's tokens
TEXT_TOKENS = 1000
GLYPH_TOKENS = 256
REQUEST = (" " * 8).join(  # lines are indented in the released code
    [
        "You are a helpful assistant. Describe the video by detailing the following aspects: ",
        "1. The main content and theme of the video. ",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. ",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. ",
        "4. background environment, light, style and atmosphere. ",
        "5. camera angles, movements, and transitions used in the video.",
    ]
)
QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")
PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}  # of the guider


class HunyuanVideo15(DiffusersModel):
    """HunyuanVideo 1.5 for one checkpoint. Its guidance is `guidance_scale`, on above 1, without variants.

    Quoted words are also encoded byte by byte, so that the model can spell them.
    """

    PIPELINE = "HunyuanVideo15Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Qwen2_5_VLTextModel"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
        "tokenizer_2": ("transformers", "ByT5Tokenizer"),
        "transformer": ("diffusers", "HunyuanVideo15Transformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLHunyuanVideo15"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    MEDIA: ClassVar[tuple[str, ...]] = ("video",)
    CONTEXT_PARALLEL = True
    SCHEDULER: ClassVar[Mapping[str, object]] = {**FLOW_SCHEDULER, "use_dynamic_shifting": False}
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = (
        "HunyuanVideo15TransformerBlock",
        "HunyuanVideo15IndividualTokenRefinerBlock",
    )
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "latent_channels", int)
        self._expect("transformer", patch_size=1, patch_size_t=1, in_channels=2 * channels + 1, out_channels=channels)
        if self.value("transformer", "use_meanflow", bool, False):
            rule = f"use_meanflow of {self.config_file('transformer')} must be false"
            raise ValueError(f"{rule}: such a net predicts the mean velocity of a step, got true")
        guider = self.folder / "guider" / "guider_config.json"
        for name, value in read_json(guider).items():
            if name in PLAIN and value != PLAIN[name]:
                raise ValueError(f"{name} of {guider} must be {PLAIN[name]}, got {value!r:.80}")

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size, number of frames or option."""
        super().check(params)
        check_size(params, self._strides[0])
        stride, frames = self._strides[1], params.num_frames
        nearest = max(0, round((frames - 1) / stride)) * stride + 1
        if frames != nearest:
            raise ValueError(f"num_frames must be {stride}k + 1, such as {nearest}, got {frames}")
        self._check_tokens(params, self._strides[0], (frames - 1) // stride + 1)

    def latent_shape(self, params: Params) -> tuple[int, int, int, int]:
        """Return (C, f, h, w)."""
        side, time = self._strides
        frames = (params.num_frames - 1) // time + 1
        return self.value("vae", "latent_channels", int), frames, params.height // side, params.width // side

    @property
    def _strides(self) -> tuple[int, int]:
        """Pixels and frames per latent pixel."""
        return (
            self.value("vae", "spatial_compression_ratio", int, 16),
            self.value("vae", "temporal_compression_ratio", int, 4),
        )

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt, `embeds` [T, D], and of its quoted words, `glyphs` [G, D']; G may be 0.

        Each is in its encoder's dtype and has a mask, which is all True.
        """
        text = prompt.negative if negative else prompt.text
        chat = [{"role": "system", "content": REQUEST}, {"role": "user", "content": text or " "}]
        tokens = parts.tokenizer.apply_chat_template(
            [chat],
            add_generation_prompt=True,
            return_dict=True,
            max_length=TEXT_TOKENS + TEMPLATE_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        ids = to_device(tokens.input_ids, parts.text_encoder.device)
        embeds = parts.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-3][0, TEMPLATE_TOKENS:]
        encoder = parts.text_encoder_2
        glyphs = torch.zeros(0, encoder.config.d_model, dtype=encoder.dtype, device=embeds.device)
        if quoted := dict.fromkeys(straight or curly for straight, curly in QUOTED.findall(text)):
            spelled = "".join(f'Text "{words}". ' for words in quoted)
            codes = parts.tokenizer_2(spelled, max_length=GLYPH_TOKENS, truncation=True, return_tensors="pt").input_ids
            glyphs = encoder(to_device(codes, encoder.device))[0][0]
        return {
            "embeds": embeds,
            "embeds_mask": torch.ones(len(embeds), dtype=torch.bool),
            "glyphs": glyphs,
            "glyphs_mask": torch.ones(len(glyphs), dtype=torch.bool),
        }

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, f, h, w], float32, at x [B, C, f, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D], `glyphs` [B, G, D'] and their masks, with guidance also their negatives, and the
        entries of `condition`.
        """
        dtype, condition, known = cond["embeds"].dtype, torch.zeros_like(x), torch.zeros_like(x[:, :1])
        if "first" in cond:
            condition[:, :, :1], known[:, :, :1] = cond["first"], 1
        inputs = torch.cat([x, condition, known], dim=1).to(dtype)

        def predict(kind: str) -> Tensor:
            embeds, glyphs = cond[f"{kind}embeds"], cond[f"{kind}glyphs"]
            mask = needed_mask(torch.cat([cond[f"{kind}embeds_mask"], cond[f"{kind}glyphs_mask"]], dim=1), x.device)
            words, letters = (None, None) if mask is None else mask.split([embeds.shape[1], glyphs.shape[1]], dim=1)
            velocity: Tensor = net(
                hidden_states=inputs,
                timestep=(sigma.float() * 1000).to(dtype),  # rounded in bfloat16 like the stock pipeline
                encoder_hidden_states=embeds,
                encoder_hidden_states_2=glyphs,
                encoder_attention_mask=words,
                encoder_attention_mask_2=letters,
                image_embeds=cond.get("image_embeds"),
            )
            return velocity.float()

        velocity = predict("")
        if self.is_guided(params):
            negative = predict("negative_")
            velocity = negative + params.guidance_scale * (velocity - negative)
        return velocity

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return videos [B, F, H, W, 3] in [0, 1], float32, from clean latents x0 [B, C, f, h, w]."""
        code = (x0 / self.value("vae", "scaling_factor", float)).to(parts.vae.dtype)
        video = torch.cat([parts.vae.decode(sample, return_dict=False)[0] for sample in code.split(1)])  # one at a time
        return {"video": (video.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)}, {"fps": params.frame_rate}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, f, h, w] of videos [B, F, H, W, 3]: the mean of the VAE's code."""
        video = pixels(media["video"]).transpose(1, 2).to(parts.vae.device, parts.vae.dtype)
        code = torch.cat([parts.vae.encode(sample).latent_dist.mode() for sample in video.split(1)])
        return code.float() * self.value("vae", "scaling_factor", float)

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the tokens of each forward pass of the net over a row of `mesh`; every rank refines all text tokens."""
        super().share(net, mesh)
        for block in net.get_submodule("context_embedder.token_refiner.refiner_blocks").children():
            block.get_submodule("attn").processor._parallel_config = None  # type: ignore[union-attr]

    def _context_plan(self, net: nn.Module) -> dict[str, Any]:
        """Return a plan, as diffusers has none: tokens, their positions, words and the masks are split."""
        from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

        places = ContextParallelInput(split_dim=0, split_output=True)
        return {
            "transformer_blocks.0": dict.fromkeys(("hidden_states", "encoder_hidden_states"), ContextParallelInput(1)),
            "transformer_blocks.*": {"attention_mask": ContextParallelInput(split_dim=-1)},
            "rope": {0: places, 1: places},
            "proj_out": ContextParallelOutput(gather_dim=1),
        }

    def _class(self, part: str) -> Any:
        if part != "transformer":
            return super()._class(part)
        from omni_rollout.models.hunyuan_video_net import HunyuanVideo15Transformer3DModel

        return HunyuanVideo15Transformer3DModel


class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    """HunyuanVideo 1.5 for one checkpoint whose videos begin with a given frame, which SigLIP also encodes."""

    PIPELINE = "HunyuanVideo15ImageToVideoPipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        **HunyuanVideo15.PARTS,
        "image_encoder": ("transformers", "SiglipVisionModel"),
        "feature_extractor": ("transformers", "SiglipImageProcessor"),
    }
    IMAGES = range(1, 2)

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the given frame, cropped to the video: latents `first` [C, 1, h, w], and `image_embeds` [I, D'']."""
        frame, encoder = resize_to_cover(prompt.images[0], params.height, params.width), parts.image_encoder
        first = self.encode_media(parts, {"video": frame[None, None]}, params)[0]
        inputs = to_device(parts.feature_extractor([frame.numpy()], return_tensors="pt").pixel_values, encoder.device)
        return {"first": first, "image_embeds": encoder(inputs.to(encoder.dtype)).last_hidden_state[0]}

    def _class(self, part: str) -> Any:
        if part != "feature_extractor":
            return super()._class(part)
        from transformers import SiglipImageProcessorPil

        return SiglipImageProcessorPil  # needs no torchvision


def resize_to_cover(image: Tensor, height: int, width: int) -> Tensor:
    """Return an image, uint8 [H, W, 3], resized to cover another size and center-cropped to it."""
    H, W, _ = image.shape
    wide = W * height > H * width
    h, w = (height, W * height // H) if wide else (H * width // W, width)
    top, left = h // 2 - height // 2, w // 2 - width // 2
    return resize_image(image, h, w)[top : top + height, left : left + width]
