"""HunyuanImage-3.0's VAE: 16 x 16 pixels per latent, by non-causal 3D convolutions.

Written from vLLM-Omni's port (Apache-2.0). It was made for video: an image is encoded as equal frames, as many as a
latent covers, and the last decoded frame is the image. Names are those of the released files.

Shapes: B samples, C latent channels, F frames, H x W pixels, h x w latent pixels.
"""

import math
from types import SimpleNamespace

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

GROUPS = 32  # groups of channels in norms


class Conv3d(nn.Conv3d):
    """A 3D convolution in float32, rounded once, on a CPU without 16-bit kernels: torch's loop is 50 times slower."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output [B, out, F, H, W] for the input [B, channels, F, H, W]."""
        is_16_bit = input.dtype in (torch.bfloat16, torch.float16)
        if input.device.type != "cpu" or not is_16_bit or has_16_bit_kernels(input.dtype):
            return super().forward(input)
        assert self.bias is not None
        return self._conv_forward(input.float(), self.weight.float(), self.bias.float()).to(input.dtype)


def has_16_bit_kernels(dtype: torch.dtype) -> bool:
    """Return True if oneDNN has kernels of this dtype, bfloat16 or float16, for this CPU."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)  # None without oneDNN
    return bool(is_supported and is_supported())


class Frames(nn.Module):
    """Base of the encoder and decoder: levels of blocks, and a middle with attention."""

    def add_middle(self, channels: int) -> None:
        """Add the middle as `mid`."""
        self.mid = nn.ModuleDict()
        self.mid["block_1"], self.mid["block_2"] = Residual(channels, channels), Residual(channels, channels)
        self.mid["attn_1"] = Attention(channels)

    def middle(self, x: Tensor) -> Tensor:
        """Return the states [B, channels, F, h, w] after the middle."""
        for name in ("block_1", "attn_1", "block_2"):
            x = self.mid[name](x)
        return x


class Residual(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, channels, eps=1e-6), nn.GroupNorm(GROUPS, out, eps=1e-6)
        self.conv1, self.conv2 = Conv3d(channels, out, 3, padding=1), Conv3d(out, out, 3, padding=1)
        self.nin_shortcut = Conv3d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, out, F, h, w] for x [B, channels, F, h, w]."""
        states: Tensor = self.conv2(silu(self.norm2(self.conv1(silu(self.norm1(x))))))
        return states + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class Attention(nn.Module):
    """Attention over all positions of all frames, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (Conv3d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x, both [B, channels, F, h, w]."""
        states = self.norm(x)
        query, key, value = (layer(states).flatten(2).transpose(1, 2)[:, None] for layer in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(query, key, value)[:, 0].transpose(1, 2)
        out: Tensor = x + self.proj_out(attended.unflatten(2, x.shape[2:]))
        return out


class Downsample(nn.Module):
    """Layer that halves height and width and merges `times` frames, by moving them into channels."""

    def __init__(self, channels: int, out: int, times: int) -> None:
        super().__init__()
        self.times, self.out = times, out
        self.conv = Conv3d(channels, out // (4 * times), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, out, F / times, h / 2, w / 2] for x [B, channels, F, h, w]."""
        kept = self._fold(x)
        return self._fold(self.conv(x)) + kept.unflatten(1, (self.out, -1)).mean(dim=2)

    def _fold(self, x: Tensor) -> Tensor:
        x = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, self.times))
        return x.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


class Upsample(nn.Module):
    """Layer that doubles height and width and expands each frame to `times` frames, from channels."""

    def __init__(self, channels: int, out: int, times: int) -> None:
        super().__init__()
        self.times, self.repeats = times, 4 * times * out // channels
        self.conv = Conv3d(channels, out * 4 * times, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, out, times F, 2h, 2w] for x [B, channels, F, h, w]."""
        return self._unfold(self.conv(x)) + self._unfold(x.repeat_interleave(self.repeats, dim=1))

    def _unfold(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.times, 2, 2, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class Encoder(Frames):
    """Encoder of frames to the mean and log-variance of their code."""

    def __init__(self, latents: int, widths: tuple[int, ...], layers: int, halvings: int, doublings: int) -> None:
        super().__init__()
        self.conv_in = Conv3d(3, widths[0], 3, padding=1)
        self.down, channels = nn.ModuleList(), widths[0]
        for i, width in enumerate(widths):
            blocks = [Residual(channels if j == 0 else width, width) for j in range(layers)]
            level = nn.ModuleDict({"block": nn.ModuleList(blocks)})
            channels = width
            if i < halvings:
                level["downsample"] = Downsample(width, widths[i + 1], 1 + (i >= halvings - doublings))
                channels = widths[i + 1]
            self.down.append(level)
        self.add_middle(channels)
        self.norm_out = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.conv_out = Conv3d(channels, 2 * latents, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the code [B, 2C, F', h, w] of frames [B, 3, F, H, W]."""
        x = self.conv_in(x)
        for level in self.down:
            assert isinstance(level, nn.ModuleDict)
            for block in [*level["block"].children(), *([level["downsample"]] if "downsample" in level else [])]:
                x = block(x)
        x = self.middle(x)
        out: Tensor = self.conv_out(silu(self.norm_out(x)))
        return out + x.unflatten(1, (out.shape[1], -1)).mean(dim=2)


class Decoder(Frames):
    """Decoder of a code to frames."""

    def __init__(self, latents: int, widths: tuple[int, ...], layers: int, halvings: int, doublings: int) -> None:
        super().__init__()
        self.conv_in = Conv3d(latents, widths[0], 3, padding=1)
        self.add_middle(widths[0])
        self.up, channels = nn.ModuleList(), widths[0]
        for i, width in enumerate(widths):
            blocks = [Residual(channels if j == 0 else width, width) for j in range(layers + 1)]
            level = nn.ModuleDict({"block": nn.ModuleList(blocks)})
            channels = width
            if i < halvings:
                level["upsample"] = Upsample(width, widths[i + 1], 1 + (i < doublings))
                channels = widths[i + 1]
            self.up.append(level)
        self.norm_out = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.conv_out = Conv3d(channels, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Return the frames [B, 3, F, H, W] of a code [B, C, F', h, w]."""
        x = self.conv_in(z)
        x = self.middle(x + z.repeat_interleave(x.shape[1] // z.shape[1], dim=1))
        for level in self.up:
            assert isinstance(level, nn.ModuleDict)
            for block in [*level["block"].children(), *([level["upsample"]] if "upsample" in level else [])]:
                x = block(x)
        out: Tensor = self.conv_out(silu(self.norm_out(x)))
        return out


class HunyuanImageVAE(ModelMixin, ConfigMixin):
    """HunyuanImage-3.0's VAE. Arguments are as in config.json under `vae`; defaults are the released model's."""

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 32,
        block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024),
        layers_per_block: int = 2,
        ffactor_spatial: int = 16,
        ffactor_temporal: int = 4,
    ) -> None:
        super().__init__()
        halvings, doublings = int(math.log2(ffactor_spatial)), int(math.log2(ffactor_temporal))
        widths = tuple(block_out_channels)
        self.encoder = Encoder(latent_channels, widths, layers_per_block, halvings, doublings)
        self.decoder = Decoder(latent_channels, widths[::-1], layers_per_block, halvings, doublings)

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        """Return the code of images [B, 3, H, W] in [-1, 1]; its `latent_dist.mode()` is [B, C, h, w]."""
        frames = pixels[:, :, None].expand(-1, -1, self.config["ffactor_temporal"], -1, -1)
        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(self.encoder(frames)[:, :, 0]))

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return images [B, 3, H, W] in [-1, 1] for latents [B, C, h, w]."""
        return (self.decoder(latents[:, :, None])[:, :, -1],)
