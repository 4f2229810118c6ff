"""Published facts about the released models whose configurations are in omni-rollout."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """A released media model: billions of weights in its net, and the number of its LoRA layers.

    channels, stride: channels of its latents, and pixels per latent pixel. frames: video frames per latent frame.
    """

    billions: float
    lora_layers: int
    channels: int = 16
    stride: int = 8
    frames: int = 4


FLUX2 = {"channels": 128, "stride": 16}
RELEASES = {
    "diffusers/LTX-2.3-Diffusers": Release(19, 48 * 28, channels=128, stride=32, frames=8),
    "models/stable-audio-3-medium-base": Release(1.45, 24 * 7, channels=256, stride=4096),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Release(8.3, 54 * 12 + 2 * 6, channels=32, stride=16),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": Release(8.3, 54 * 12 + 2 * 6, channels=32, stride=16),
    "tencent/HunyuanImage-3.0": Release(80, 32 * 2, channels=32, stride=16),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Release(1.42, 30 * 10),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Release(5, 30 * 10, channels=48, stride=16),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Release(28.6, 2 * 40 * 10),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Release(28.6, 2 * 40 * 10),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Release(16.4, 40 * 10),
    "ByteDance-Seed/BAGEL-7B-MoT": Release(14, 28 * 7),
    "Qwen/Qwen-Image": Release(20, 60 * 12),
    "Qwen/Qwen-Image-Edit": Release(20, 60 * 12),
    "Qwen/Qwen-Image-Edit-2509": Release(20, 60 * 12),
    "Qwen/Qwen-Image-Edit-2511": Release(20, 60 * 12),
    "Qwen/Qwen-Image-2.1": Release(7.1, 32 * 7, channels=64, stride=16),
    "krea/Krea-2-Raw": Release(12.8, (28 + 4) * 4),
    "krea/Krea-2-Turbo": Release(12.8, (28 + 4) * 4),
    "stabilityai/stable-diffusion-3.5-medium": Release(2.5, 24 * 8 - 1),
    "Tongyi-MAI/Z-Image": Release(6, 34 * 7),
    "Tongyi-MAI/Z-Image-Turbo": Release(6, 34 * 7),
    "black-forest-labs/FLUX.1-dev": Release(12, 19 * 12 + 38 * 3),
    "black-forest-labs/FLUX.1-Kontext-dev": Release(12, 19 * 12 + 38 * 3),
    "black-forest-labs/FLUX.2-dev": Release(32, 8 * 12 + 48, **FLUX2),
    "black-forest-labs/FLUX.2-klein-base-4B": Release(4, 5 * 12 + 20, **FLUX2),
    "black-forest-labs/FLUX.2-klein-9B": Release(9, 8 * 12 + 24, **FLUX2),
    "black-forest-labs/FLUX.2-klein-base-9B": Release(9, 8 * 12 + 24, **FLUX2),
    "black-forest-labs/flux-3-image-klein-base": Release(5.6, (3 * 5 + 28) * 6, **FLUX2),
}
TOKENS = {"Qwen/Qwen2.5-3B-Instruct": 3.09, "Qwen/Qwen3-Omni-30B-A3B-Instruct": 31.7}  # billions of weights
