"""LTX-2 and LTX-2.3 (arXiv 2601.03233): text, or text and a first frame, to video with sound, a flow in their latents.

Shapes: B samples, n latent elements of a sample: those of its frames, [C, f, h, w], then those of its sound, [L, A].
C latent channels (128), F frames, f = (F - 1) / 8 + 1, h x w latent pixels (a thirty-second of a frame), L latents of
sound (25 per second), A numbers per latent (128), T text positions (1024), D and D' text widths for frames and sound.
Every text fills all positions with learned registers, so there is no mask. Both media share one schedule.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_rollout.models.diffusers_model import DiffusersModel, cfg_batch, check_size, pixels, resize_image
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates, to_device

CPU = torch.device("cpu")
TEXT_TOKENS = 1024
MEL_RATIO = 4  # spectrogram frames, and bins, per latent
SOUND_SCALE = "audio_guidance_scale"
WIDE_VOCODER = "LTX2VocoderWithBWE"  # for 2.3, which converts 16 kHz to 48 kHz


class LTX2(DiffusersModel):
    """LTX-2 or 2.3 for one checkpoint. Its guidance is `guidance_scale`, which is on above 1.

    The option audio_guidance_scale is the scale for the sound, if it differs from that for the frames. The pipeline's
    further guidance, by forward passes without some attention, is not supported. A first frame is known data: the net
    gets it at noise level 0, and its velocity leads to it.
    """

    PIPELINE = "LTX2Pipeline"
    PARTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "text_encoder": ("transformers", "Gemma3ForConditionalGeneration"),
        "tokenizer": ("transformers", "GemmaTokenizer"),
        "connectors": ("ltx2", "LTX2TextConnectors"),
        "transformer": ("diffusers", "LTX2VideoTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLLTX2Video"),
        "audio_vae": ("diffusers", "AutoencoderKLLTX2Audio"),
        "vocoder": ("ltx2", "LTX2Vocoder"),
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    }
    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text_encoder": ("model.vision_tower", "model.multi_modal_projector", "lm_head")
    }
    OPTIONS: ClassVar[Mapping[str, float]] = {SOUND_SCALE: 1.0}
    GUIDANCE: ClassVar[Mapping[str, float]] = {"guidance_scale": 1.0, SOUND_SCALE: 1.0}
    MEDIA: ClassVar[tuple[str, ...]] = ("video", "audio")
    CONTEXT_PARALLEL = True
    HEADS: ClassVar[tuple[str, ...]] = ("num_attention_heads", "audio_num_attention_heads")
    IMAGES = range(2)
    BLOCK_NAMES: ClassVar[tuple[str, ...]] = ("LTX2VideoTransformerBlock",)
    BRANCHES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "audio": (
            "audio_proj_in",
            "audio_proj_out",
            "audio_caption_projection",
            "audio_time_embed",
            "audio_prompt_adaln",
            "audio_scale_shift_table",
            "audio_prompt_scale_shift_table",
            "audio_a2v_cross_attn_scale_shift_table",
            "av_cross_attn_audio_scale_shift",
            "av_cross_attn_audio_v2a_gate",
            "audio_attn1",
            "audio_attn2",
            "video_to_audio_attn",
            "audio_ff",
        )
    }
    LORA_TARGETS: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")

    def _check_config(self) -> None:
        super()._check_config()
        channels = self.value("vae", "latent_channels", int, 128)
        self._expect("transformer", patch_size=1, patch_size_t=1, in_channels=channels, out_channels=channels)
        self._expect("transformer", audio_patch_size=1, audio_patch_size_t=1)
        self._expect("vae", timestep_conditioning=False)
        for name in ("video", "audio"):  # without registers, some positions would be masked
            self.value("connectors", f"{name}_connector_num_learnable_registers", int, 128)

    def _part_config(self, part: str, library: str, name: str) -> dict[str, Any]:
        wide = part == "vocoder" and self.config.get(part) == [library, WIDE_VOCODER]
        return super()._part_config(part, library, WIDE_VOCODER if wide else name)

    def _class(self, part: str) -> Any:
        from diffusers.pipelines import ltx2

        from omni_rollout.models.ltx2_net import LTX2TextConnectors, LTX2VideoTransformer3DModel

        if part == "vocoder":
            return getattr(ltx2, self.config[part]["_class_name"])
        classes = {"transformer": LTX2VideoTransformer3DModel, "connectors": LTX2TextConnectors}
        return classes[part] if part in classes else super()._class(part)

    def option(self, params: Params, name: str) -> float:
        """Return the value of `guidance_scale` or an option; the sound's scale defaults to the frames'."""
        return params.guidance.get(name, params.guidance_scale)

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size, number of frames or option."""
        super().check(params)
        stride, pixels = self._strides()
        check_size(params, pixels)
        frames = params.num_frames
        nearest = max(0, round((frames - 1) / stride)) * stride + 1
        if frames != nearest:
            raise ValueError(f"num_frames must be {stride}k + 1, such as {nearest}, got {frames}")
        if not self._sound_length(params):
            rule = f"frame_rate must leave {frames} frames at least {0.5 / self._sound_rate():g} s of sound"
            raise ValueError(f"{rule}, got {params.frame_rate}")
        self._check_tokens(params, pixels, (frames - 1) // stride + 1)

    def check_image(self, height: int, width: int) -> None:
        """Raise ValueError for a first frame of less than 2 x 2 pixels, which H.264 cannot hold.

        Also if ranks compute forward passes together, because a first frame has a different noise level.
        """
        if min(height, width) < 2:
            raise ValueError(f"a first frame must have at least 2 x 2 pixels, got {width} x {height}")
        if self.context > 1:
            raise ValueError(f"context must be 1 for a {self.PIPELINE} with a first frame, got {self.context}")

    def _strides(self) -> tuple[int, int]:
        """Return the frames, and the pixels along a side, per latent."""
        frames, pixels, *_ = self.value("transformer", "vae_scale_factors", list)
        return int(frames), int(pixels)

    def _sound_rate(self) -> float:
        """Return the sound latents per second."""
        hop = self.value("audio_vae", "mel_hop_length", int, 160)
        return self.value("audio_vae", "sample_rate", int, 16_000) / hop / MEL_RATIO

    def _sound_length(self, params: Params) -> int:
        return round(params.num_frames / params.frame_rate * self._sound_rate())

    def _shapes(self, params: Params) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
        """Return (C, f, h, w) of the frames and (L, A) of the sound."""
        stride, pixels = self._strides()
        grid = (params.num_frames - 1) // stride + 1, params.height // pixels, params.width // pixels
        sound = self._sound_length(params), self.value("transformer", "audio_in_channels", int, 128)
        return (self.value("transformer", "in_channels", int, 128), *grid), sound

    def streams(self, params: Params) -> dict[str, int]:
        """Return the numbers of latent elements of a sample for frames and sound."""
        return dict(zip(self.MEDIA, map(math.prod, self._shapes(params)), strict=True))

    def latent_shape(self, params: Params) -> tuple[int]:
        """Return (n,)."""
        return (sum(self.streams(params).values()),)

    def _split(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Split latents [B, n] into those of the frames [B, C, f, h, w] and of the sound [B, L, A]."""
        frames, sound = self._shapes(params)
        parts = x.split(list(self.streams(params).values()), dim=1)
        return parts[0].reshape(-1, *frames), parts[1].reshape(-1, *sound)

    def _num_tokens(self, params: Params) -> int:
        return math.prod(self._shapes(params)[0][1:])

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return the embeddings of one prompt, `embeds` [T, D] and `sound_embeds` [T, D'], in the encoder's dtype."""
        text = (prompt.negative if negative else prompt.text).strip()
        tokens = parts.tokenizer(
            [text],
            padding="max_length",
            padding_side="left",
            max_length=TEXT_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        mask = to_device(tokens.attention_mask, parts.text_encoder.device)
        ids = to_device(tokens.input_ids, parts.text_encoder.device)
        layers = parts.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        hidden = torch.stack(layers, dim=-1)
        frames, sound, _ = parts.connectors(hidden, mask.to(hidden.device), padding_side="left")
        return {"embeds": frames[0], "sound_embeds": sound[0]}

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the frames' tokens of each forward pass of the net over the ranks in a row of `mesh`.

        All ranks compute all of the sound, and use the first rank's result.
        """
        from omni_rollout.models.ltx2_net import share_frames

        super().share(net, mesh)
        share_frames(net, mesh)

    def _context_plan(self, net: nn.Module) -> dict[str, Any]:
        """Return the plan without texts and with positions of either shape; the sound is gathered, not summed."""
        from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

        gathered, places = ContextParallelOutput(gather_dim=1), ContextParallelInput(split_dim=-2, split_output=True)
        return {
            "": {  # a first frame has its own levels; otherwise there is one per sample
                "hidden_states": ContextParallelInput(split_dim=1),
                "timestep": ContextParallelInput(split_dim=1, expected_dims=2),
            },
            "rope": {0: places, 1: places},
            "proj_out": gathered,
            "audio_proj_out": gathered,
        }

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return the latents of a given first frame, `first` [C, 1, h, w].

        It is first compressed with H.264, like the frames that the weights were trained on.
        """
        if not prompt.images:
            return {}
        from diffusers.pipelines.ltx2 import utils

        vae, crf = parts.vae, utils.resolve_default_image_crf(parts.text_encoder)
        image = compress_image(prompt.images[0], crf)
        frame = pixels(resize_image(image, params.height, params.width, resample="BILINEAR"))
        code = vae.encode(frame[None, :, None].to(vae.device, vae.dtype)).latent_dist.mode().float()
        mean, std = (tensor.float().view(1, -1, 1, 1, 1) for tensor in (vae.latents_mean, vae.latents_std))
        return {"first": ((code - mean) * self.value("vae", "scaling_factor", float, 1.0) / std)[0]}

    @cached_property
    def _net(self) -> Any:
        """Net that computes positions on the host: on a device it would create constants, and the host would wait."""
        return self.empty_net()

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, n], float32, at x [B, n] and noise levels sigma [B].

        cond: `embeds` [B, T, D] and `sound_embeds` [B, T, D'], with guidance also their negatives; with a first frame,
        `first` [B, C, 1, h, w]. Both halves of classifier-free guidance run as one batch.
        """
        texts, guided, first = [cond["embeds"], cond["sound_embeds"]], self.is_guided(params), cond.get("first")
        frames, sound = self._split(x, params)
        _, _, f, h, w = frames.shape
        noisy = frames[:, :, :1]
        if first is not None:
            frames = torch.cat([first.to(frames.dtype), frames[:, :, 1:]], dim=2)
        # For strided rows, frozen and trained linear layers use different matrix products, which round differently.
        tokens, sound = frames.flatten(2).transpose(1, 2).contiguous(), sound.contiguous()
        level = sigma.float() * 1000
        if guided:
            texts = [cfg_batch(cond, "embeds"), cfg_batch(cond, "sound_embeds")]
            tokens, sound, level = (torch.cat([tensor, tensor]) for tensor in (tokens, sound, level))
        levels = level
        if first is not None:
            levels = level[:, None].repeat(1, f * h * w)
            levels[:, : h * w] = 0
        places = self._net.rope.prepare_video_coords(len(tokens), f, h, w, CPU, fps=params.frame_rate)
        times = self._net.audio_rope.prepare_audio_coords(len(sound), sound.shape[1], CPU).contiguous()
        velocities: tuple[Tensor, Tensor] = net(
            hidden_states=tokens.to(texts[0].dtype),
            audio_hidden_states=sound.to(texts[1].dtype),
            encoder_hidden_states=texts[0],
            audio_encoder_hidden_states=texts[1],
            timestep=levels,
            audio_timestep=level,
            sigma=level,
            use_cross_timestep=True,  # the sample's level, even for cross-attention to a first frame
            num_frames=f,
            height=h,
            width=w,
            fps=params.frame_rate,
            audio_num_frames=sound.shape[1],
            video_coords=places,
            audio_coords=times,
            return_dict=False,
        )
        outputs = [velocities[0].float(), velocities[1][:, : sound.shape[1]].float()]  # the first rank's sound
        if guided:
            scales = [self.option(params, name) for name in self.GUIDANCE]
            halves = zip(scales, (tensor.chunk(2) for tensor in outputs), strict=True)
            outputs = [negative + scale * (positive - negative) for scale, (positive, negative) in halves]
        velocity = outputs[0].transpose(1, 2)
        if first is not None:
            known = ((noisy - first) / sigma.view(-1, 1, 1, 1, 1)).flatten(2)
            velocity = torch.cat([known, velocity[:, :, h * w :]], dim=2)
        return torch.cat([velocity.flatten(1), outputs[1].flatten(1)], dim=1)

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return videos [B, F, H, W, 3] in [0, 1] and sound [B, points, channels], float32, for latents x0 [B, n]."""
        frames, sound = self._split(x0, params)
        vae, sound_vae = parts.vae, parts.audio_vae
        mean, std = (tensor.float().view(1, -1, 1, 1, 1) for tensor in (vae.latents_mean, vae.latents_std))
        frames = frames * std / self.value("vae", "scaling_factor", float, 1.0) + mean
        video = vae.decode(frames.to(vae.dtype), None, return_dict=False)[0]
        sound = sound * sound_vae.latents_std.float() + sound_vae.latents_mean.float()
        bins = self.value("audio_vae", "mel_bins", int, 64) // MEL_RATIO
        sound = sound.unflatten(2, (-1, bins)).transpose(1, 2)
        waves = parts.vocoder(sound_vae.decode(sound.to(sound_vae.dtype), return_dict=False)[0])
        media = {
            "video": (video.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1),
            "audio": waves.float().transpose(1, 2).contiguous(),
        }
        rate = self.value("vocoder", "output_sampling_rate", int, 24_000)
        return media, {"fps": params.frame_rate, "sample_rate": rate}

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Raise ValueError: a checkpoint does not define the spectrogram that sound latents need."""
        raise ValueError(f"samples of a {self.PIPELINE} must be given as latents, got {' and '.join(media)}")


def compress_image(image: Tensor, crf: int) -> Tensor:
    """Return an image, uint8 [H, W, 3], after H.264 compression at this CRF, with even height and width.

    It is encoded as one slice: as many slices as cores, as in the stock pipeline, would make the pixels depend on the
    host.
    """
    import av

    height, width = (side // 2 * 2 for side in image.shape[:2])
    encoder, decoder = av.VideoCodecContext.create("libx264", "w"), av.VideoCodecContext.create("h264", "r")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = width, height, "yuv420p", Fraction(1)
    encoder.options, encoder.thread_count = {"crf": str(crf), "preset": "veryfast"}, 1
    source = av.VideoFrame.from_ndarray(image[:height, :width].cpu().numpy(), format="rgb24")
    packets = [*encoder.encode(source.reformat(format="yuv420p")), *encoder.encode(), None]
    (frame,) = [frame for packet in packets for frame in decoder.decode(packet)]
    return torch.from_numpy(frame.to_ndarray(format="rgb24"))
