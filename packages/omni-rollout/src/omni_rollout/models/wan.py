"""Wan 2.1 and 2.2 (arXiv 2503.20314): text and image to video, a flow in the latents of a causal video VAE.

Shapes: B samples, C latent channels (16; 48 in TI2V-5B), F frames of a video, f = (F - 1) / 4 + 1 latent frames, h x w
latent pixels (an eighth of a frame, a sixteenth in TI2V-5B), T text positions (512), D text width. Every text fills all
positions, and the net attends to the zeros after it, so there is no mask.
"""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from omni_sched import linear_sigmas, shift_sigmas
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import (
    FLOW_SCHEDULER,
    DiffusersModel,
    cfg_batch,
    check_size,
    pixels,
    resize_image,
)
from omni_rollout.models.qwen_image import channel_statistics
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

TEXT_TOKENS = 512  # a net with image keys takes all but the last 512 tokens for image tokens
PATCH = 2  # latent pixels along a token's side
EXPERTS = {"high": "transformer", "low": "transformer_2"}  # by noise level -> subfolder


class Wan(DiffusersModel):
    """Wan for one checkpoint. Its guidance is `guidance_scale`, which is on above 1.

    The option guidance_scale_2 is the scale for the expert of low noise levels, or 0 for guidance_scale; flow_shift is
    the shift of the schedule, or 0 for the checkpoint's. TI2V-5B accepts a first frame as known data: the net gets it
    at noise level 0, and its velocity leads to it.
    """

    PIPELINE = "WanPipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "T5Tokenizer"),
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": ("diffusers", "WanTransformer3DModel"),
        "image_encoder": ("transformers", "CLIPVisionModel"),
        "image_processor": ("transformers", "CLIPImageProcessor"),
        "vae": ("diffusers", "AutoencoderKLWan"),
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    }
    OPTIONAL: ClassVar[tuple[str, ...]] = ("transformer_2", "image_encoder", "image_processor")
    OPTIONS: ClassVar[Mapping[str, float]] = {"guidance_scale_2": 0.0, "flow_shift": 0.0}
    SCHEDULER: ClassVar[Mapping[str, object]] = {
        **FLOW_SCHEDULER,
        "final_sigmas_type": "zero",
        "prediction_type": "flow_prediction",
        "shift_terminal": None,
        "thresholding": False,
        "use_dynamic_shifting": False,
        "use_flow_sigmas": True,
    }
    MEDIA: ClassVar[tuple[str, ...]] = ("video",)
    CONTEXT_PARALLEL = True
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("WanTransformerBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        index = self.folder / "model_index.json"
        self.is_per_token = self.config.get("expand_timesteps") is True
        ratio = self.config.get("boundary_ratio")
        if "transformer_2" in self.parts:
            if not isinstance(ratio, float) or not 0 < ratio < 1:
                raise ValueError(f"boundary_ratio must be in (0, 1) for two experts, {index} says {ratio!r:.80}")
            self.boundary = float(torch.tensor(ratio))  # rounded like a noise level, which may equal it
        elif ratio is not None:
            raise ValueError(f"boundary_ratio must be null without a transformer_2, {index} says {ratio!r:.80}")
        self.IMAGES = self._image_counts()

    def _check_config(self) -> None:
        self.config["scheduler"] = {"prediction_type": "epsilon", "use_flow_sigmas": False} | self.config["scheduler"]
        super()._check_config()
        channels = self.value("vae", "z_dim", int)
        for net in self.nets.values():
            self._expect(net, out_channels=channels)
        self._expect("vae", scale_factor_spatial=8 * (self.config["vae"].get("patch_size") or 1))
        self._expect_length("vae", "temperal_downsample", 3)  # each halves the sides

    @property
    def nets(self) -> Mapping[str, str]:
        """Subfolders of the experts high and low, if the checkpoint has two."""
        return EXPERTS if "transformer_2" in self.parts else super().nets

    def _image_counts(self) -> range:
        """Return the allowed numbers of given frames: TI2V-5B accepts the first frame or none."""
        return range(2 if self.is_per_token else 1)

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size, number of frames or option."""
        super().check(params)
        max_positions = self.value("transformer", "rope_max_seq_len", int, 1024)
        check_size(params, PATCH * self.value("vae", "scale_factor_spatial", int, 8), max_units=max_positions)
        stride, frames = self.value("vae", "scale_factor_temporal", int, 4), params.num_frames
        nearest = min(max(0, round((frames - 1) / stride)), max_positions - 1) * stride + 1
        if frames != nearest:
            rule = f"num_frames must be {stride}k + 1, up to {(max_positions - 1) * stride + 1}, such as {nearest}"
            raise ValueError(f"{rule}, got {frames}")
        second, shift = self.option(params, "guidance_scale_2"), self.option(params, "flow_shift")
        if second and not self.boundary:
            raise ValueError(f"guidance_scale_2 must be 0 for a checkpoint without a transformer_2, got {second}")
        if second and second < 1:
            raise ValueError(f"guidance_scale_2 must be >= 1, or 0 for guidance_scale, got {second}")
        if shift < 0:
            raise ValueError(f"flow_shift must be > 0, or 0 for the checkpoint's, got {shift}")
        self._check_tokens(
            params, PATCH * self.value("vae", "scale_factor_spatial", int, 8), (frames - 1) // stride + 1
        )

    def latent_shape(self, params: Params) -> tuple[int, int, int, int]:
        """Return (C, f, h, w)."""
        stride = self.value("vae", "scale_factor_spatial", int, 8)
        frames = (params.num_frames - 1) // self.value("vae", "scale_factor_temporal", int, 4) + 1
        return self.value("vae", "z_dim", int), frames, params.height // stride, params.width // stride

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] from 1 to 0, evenly spaced and shifted as in Wan's released code."""
        shift = self.option(params, "flow_shift") or self.value("scheduler", "flow_shift", float, 1.0)
        return shift_sigmas(linear_sigmas(params.num_inference_steps), shift)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt: `embeds` [T, D] in the encoder's dtype, with zeros after the text."""
        from ftfy import fix_text

        text = fix_text(prompt.negative if negative else prompt.text)
        text = html.unescape(html.unescape(text))  # twice, as in diffusers
        tokens = parts.tokenizer(
            [" ".join(text.split())], padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
        )
        device, length = parts.text_encoder.device, int(tokens.attention_mask.sum())
        inputs = to_device(tokens.input_ids, device), to_device(tokens.attention_mask, device)
        embeds = parts.text_encoder(*inputs).last_hidden_state[0]
        return {"embeds": torch.cat([embeds[:length], torch.zeros_like(embeds[length:])])}

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the conditioning by given frames: for TI2V-5B, `first` [C, 1, h, w], the latents of the first frame.

        Otherwise `image_latents` [4 + C, f, h, w], a mask of the given frames and the latents of a video that is gray
        between them; and for nets with that input, CLIP's embeddings of the frames, `image_embeds` [n, D'].
        """
        if not prompt.images:
            return {}
        frames = [resize_image(image, params.height, params.width) for image in prompt.images]
        if self.is_per_token:
            return {"first": self.encode_media(parts, {"video": frames[0][None, None]}, params)[0]}
        video, known = torch.full((params.num_frames, *frames[0].shape), 0.5), torch.zeros(params.num_frames)
        for i, frame in zip((0, -1), frames, strict=False):
            video[i], known[i] = frame.float() / 255, 1
        latents = self.encode_media(parts, {"video": video[None]}, params)[0]
        stride = self.value("vae", "scale_factor_temporal", int, 4)
        mask = torch.cat([known[:1].expand(stride), known[1:]]).view(-1, stride).T  # of the frames in each latent frame
        mask = to_device(mask[..., None, None].expand(-1, *latents.shape[1:]).contiguous(), latents.device)
        return {"image_latents": torch.cat([mask, latents])} | self._encode_frames(parts, prompt)

    def _encode_frames(self, parts: Parts, prompt: Prompt) -> Cond:
        """Return CLIP's embeddings of the given frames."""
        if "image_encoder" not in self.parts:
            return {}
        encoder = parts.image_encoder
        inputs = parts.image_processor(
            [image.cpu().numpy() for image in prompt.images], return_tensors="pt"
        ).pixel_values
        hidden = encoder(inputs.to(encoder.device, encoder.dtype), output_hidden_states=True).hidden_states[-2]
        return {"image_embeds": hidden.flatten(0, 1)}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, f, h, w], float32, at x [B, C, f, h, w] and noise levels sigma [B].

        cond: `embeds` [B, T, D], with guidance also its negative, and the entries of `condition`. Both halves of
        classifier-free guidance run as one batch. With two experts, all levels must be on one side of the boundary, and
        the host waits for them.

        Raises:
            ValueError: the levels are on both sides of the boundary.
        """
        embeds, image, first = cond["embeds"], cond.get("image_embeds"), cond.get("first")
        guided, expert = self.is_guided(params), self._expert(sigma)
        inputs, timestep = x, sigma.float() * 1000
        if "image_latents" in cond:
            inputs = torch.cat([x, cond["image_latents"]], dim=1)
        if self.is_per_token:
            timestep = timestep[:, None, None].repeat(1, x.shape[2], x[0, 0, 0].numel() // PATCH**2)
        if first is not None:
            inputs = torch.cat([first, x[:, :, 1:]], dim=2)
            timestep[:, 0] = 0
        if image is not None and self.config["transformer"].get("pos_embed_seq_len"):  # first and last frame
            image = image.unflatten(1, (2, -1)).flatten(0, 1)
        if guided:
            embeds, inputs, timestep = cfg_batch(cond, "embeds"), torch.cat([inputs, inputs]), torch.cat([timestep] * 2)
            image = None if image is None else torch.cat([image, image])
        velocity = net(
            hidden_states=inputs.to(embeds.dtype),
            timestep=timestep.flatten(1) if self.is_per_token else timestep,
            encoder_hidden_states=embeds,
            encoder_hidden_states_image=image,
            return_dict=False,
            **expert,
        )[0].float()
        if guided:
            scale = params.guidance_scale
            if expert.get("expert") == "low":
                scale = self.option(params, "guidance_scale_2") or scale
            positive, negative = velocity.chunk(2)
            velocity = negative + scale * (positive - negative)
        if first is None:
            return velocity
        return torch.cat([(x[:, :, :1] - first) / sigma.view(-1, 1, 1, 1, 1), velocity[:, :, 1:]], dim=2)

    def _expert(self, sigma: Tensor) -> dict[str, str]:
        """Return the keyword argument that selects the expert to run."""
        if not self.boundary:
            return {}
        low = {level < self.boundary for level in sigma.tolist()}
        if len(low) > 1:
            rule = f"noise levels of a batch must be on one side of the experts' boundary, {self.boundary}"
            raise ValueError(f"{rule}, got {sigma.tolist()}")
        return {"expert": "low" if low == {True} else "high"}

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return videos [B, F, H, W, 3] in [0, 1], float32, from clean latents x0 [B, C, f, h, w]."""
        mean, std = channel_statistics(self, x0)
        video = parts.vae.decode((x0 * std + mean).to(parts.vae.dtype), return_dict=False)[0]
        return {"video": (video.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)}, {"fps": params.frame_rate}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, f, h, w] of videos [B, F, H, W, 3]: the mean of the VAE's code."""
        video = pixels(media["video"]).transpose(1, 2).to(parts.vae.device, parts.vae.dtype)
        code = parts.vae.encode(video).latent_dist.mode().float()
        mean, std = channel_statistics(self, code)
        return (code - mean) / std


class WanImageToVideo(Wan):
    """Wan for one checkpoint whose videos begin with a given frame, and may end with another.

    Wan 2.1 also encodes the frames with CLIP: its checkpoints accept the first one, or both if trained for both.
    """

    PIPELINE = "WanImageToVideoPipeline"
    IMAGES = range(1, 3)

    def _image_counts(self) -> range:
        """Return the allowed numbers of given frames."""
        if "image_encoder" not in self.parts:
            return range(1, 2 if self.is_per_token else 3)
        return range(2, 3) if self.config["transformer"].get("pos_embed_seq_len") else range(1, 2)

    def _class(self, part: str) -> Any:
        if part != "image_processor":
            return super()._class(part)
        from transformers import CLIPImageProcessorPil

        return CLIPImageProcessorPil  # needs no torchvision
