"""Stable Audio 3 (arXiv 2605.17991): text to sound, a flow in the latents of a stereo autoencoder.

Shapes: B samples, C latent channels (256), n latent frames (of 4096 points), N points, T text positions (256), D width.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from omni_sched import linear_sigmas, shift_sigmas
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import FLOW_SCHEDULER, DiffusersModel, cfg_batch
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

TEXT_TOKENS = 256
MAX_LOGSNR = 16.0  # beyond it float32 levels round to 0 and 1


class StableAudio3(DiffusersModel):
    """Stable Audio 3 for one checkpoint. Its guidance is `guidance_scale`, on above 1, without variants.

    Height, width and frames have no effect: the option duration is the sound's length in seconds. The noise levels are
    evenly spaced in log-SNR from logsnr_min to logsnr_max.
    """

    PIPELINE = "StableAudio3Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "T5GemmaEncoderModel"),
        "tokenizer": ("transformers", "GemmaTokenizer"),
        "duration_embedder": ("stable_audio_3", "StableAudio3DurationEmbedder"),
        "transformer": ("diffusers", "StableAudio3DiTModel"),
        "vae": ("diffusers", "AutoencoderSAME"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    OPTIONS: ClassVar[Mapping[str, float]] = {"duration": 10.0, "logsnr_min": -6.2, "logsnr_max": 2.0}
    MEDIA: ClassVar[tuple[str, ...]] = ("audio",)
    SCHEDULER: ClassVar[Mapping[str, object]] = {
        **FLOW_SCHEDULER,  # distilled checkpoints sample stochastically
        "num_train_timesteps": (1, 1000),
        "shift_terminal": None,
        "use_dynamic_shifting": False,
    }
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("StableAudio3DiTBlock",)
    LORA_TARGETS: ClassVar[tuple[str, ...]] = (
        "self_attn.to_qkv",
        "self_attn.to_out",
        "cross_attn.to_q",
        "cross_attn.to_kv",
        "cross_attn.to_out",
        "ff.proj_in",
        "ff.proj_out",
    )

    def _check_config(self) -> None:
        super()._check_config()
        self._expect("transformer", patch_size=1, io_channels=self.value("vae", "latent_dim", int))

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported length or option."""
        super().check(params)
        seconds, longest = self.option(params, "duration"), self.value("duration_embedder", "max_val", float, 384.0)
        rate = self.value("vae", "sampling_rate", int)
        if not 1 / rate <= seconds <= longest:
            nearest = min(max(seconds, 1.0), longest)
            rule = f"duration must be > 0 and <= {longest:g} seconds, such as {nearest:g}"
            raise ValueError(f"{rule}, got {seconds:g}")
        low, high = self.option(params, "logsnr_min"), self.option(params, "logsnr_max")
        if not -MAX_LOGSNR <= low < high <= MAX_LOGSNR:
            bound = f"{MAX_LOGSNR:g}"
            raise ValueError(f"logsnr_min must be >= -{bound} and < logsnr_max <= {bound}, got {low}, {high}")

    def latent_shape(self, params: Params) -> tuple[int, int]:
        """Return (C, n)."""
        return self.value("vae", "latent_dim", int), math.ceil(self._num_points(params) / self._stride)

    def _num_points(self, params: Params) -> int:
        """Return N."""
        return int(self.option(params, "duration") * self.value("vae", "sampling_rate", int))

    @property
    def _stride(self) -> int:
        """Points per latent frame."""
        return self.value("vae", "patch_size", int) * math.prod(self.value("vae", "encoder_strides", list))

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] from 1 to 0, with even log-SNR steps between."""
        low, high = self.option(params, "logsnr_min"), self.option(params, "logsnr_max")
        levels = torch.sigmoid(linear_sigmas(params.num_inference_steps) * (high - low) - high)
        levels[0], levels[-1] = 1, 0
        return shift_sigmas(levels, self.value("scheduler", "shift", float, 1.0))

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of a prompt: `embeds` [T, D] in the encoder's dtype, and `is_text` [T], False after it.

        The net has a learned vector for positions after the text and attends to them, so there is no mask.
        """
        text, length = prompt.negative if negative else prompt.text, min(parts.tokenizer.model_max_length, TEXT_TOKENS)
        tokens = parts.tokenizer([text], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        ids, mask = (to_device(t, parts.text_encoder.device) for t in (tokens.input_ids, tokens.attention_mask))
        embeds = parts.text_encoder(ids, attention_mask=mask)[0][0]
        return {"embeds": embeds, "is_text": to_device(tokens.attention_mask[0].bool(), embeds.device)}

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the embedding of the length, `duration` [D]."""
        seconds = torch.tensor([self.option(params, "duration")], dtype=torch.float32)
        return {"duration": parts.duration_embedder(to_device(seconds, parts.duration_embedder.device))[0]}

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, C, n], float32, at x [B, C, n] and noise levels sigma [B].

        cond: `embeds` [B, T, D], `is_text` [B, T] and `duration` [B, D]; with guidance also the negatives of the first
        two, and both halves run as one batch.
        """
        embeds, is_text, duration = cond["embeds"], cond["is_text"], cond["duration"]
        guided, inputs = self.is_guided(params), x
        if guided:
            embeds, is_text = cfg_batch(cond, "embeds"), cfg_batch(cond, "is_text")
            inputs, sigma, duration = (torch.cat([tensor, tensor]) for tensor in (x, sigma, duration))
        velocity = net(
            hidden_states=inputs.to(embeds.dtype),
            timestep=sigma.float() * self.value("scheduler", "num_train_timesteps", int, 1000),
            encoder_hidden_states=torch.cat([embeds, duration[:, None].to(embeds.dtype)], dim=1),
            global_hidden_states=duration,
            encoder_attention_mask=torch.cat([is_text, torch.ones_like(is_text[:, :1])], dim=1),
            return_dict=False,
        )[0].float()
        if guided:
            positive, negative = velocity.chunk(2)
            velocity = negative + params.guidance_scale * (positive - negative)
        return velocity

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return sound [B, N, 2] in [-1, 1], float32, from clean latents x0 [B, C, n]."""
        sound = parts.vae.decode(x0.to(parts.vae.dtype), return_dict=False)[0].float()
        sound = sound[:, :, : self._num_points(params)].clamp(-1, 1).transpose(1, 2).contiguous()
        return {"audio": sound}, {"sample_rate": float(self.value("vae", "sampling_rate", int))}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, C, n] of sound [B, N, 2], padded with silence to whole latent frames."""
        sound = media["audio"].transpose(1, 2).to(parts.vae.device, parts.vae.dtype)
        sound = nn.functional.pad(sound, [0, -sound.shape[-1] % self._stride])
        code: Tensor = parts.vae.encode(sound, return_dict=False)[0]
        return code.float()

    def _class(self, part: str) -> Any:
        if part == "duration_embedder":
            from diffusers import StableAudio3DurationEmbedder

            return StableAudio3DurationEmbedder
        cls = super()._class(part)
        if part != "transformer":
            return cls
        from diffusers.loaders import PeftAdapterMixin

        return type(cls.__name__, (cls, PeftAdapterMixin), {})  # diffusers' class cannot load adapters
