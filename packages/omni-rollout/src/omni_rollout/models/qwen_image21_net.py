"""Qwen-Image-2.1's transformer: diffusers' modules and weights, with positions that do not depend on the batch.

Texts and images are one sequence: text, reference, text, reference, and so on, text, image. Each text token attends to
everything before it, and each image token also to its whole image. diffusers' forward reads the layout from a mask on
the host, counts the padding of shorter texts as text before the image, and uses complex rotations; here the layout
follows from shapes, the image's position follows its own text, and rotations are real.
"""

from collections.abc import Sequence
from functools import wraps
from itertools import accumulate
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21AttnProcessor
from torch import Tensor

from omni_rollout.models.rotary import rotate
from omni_rollout.types import to_device

Segment = tuple[int, int, bool]  # first token, end, True for text


class QwenImage21Transformer2DModel(diffusers.QwenImage21Transformer2DModel):
    """Net of diffusers' class, under the same name."""

    @wraps(diffusers.QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]  # from_config reads its names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.transformer_blocks:
            block.attn.set_processor(Attention())

    def forward(
        self,
        *,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Sequence[Tensor],
        encoder_hidden_states_mask: Tensor | None,
        img_shapes: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Return the velocity [B, N, C] of an image's N latent pixels.

        hidden_states: latent pixels of all references, then of the image. timestep: [B], in [0, 1].
        encoder_hidden_states: embeddings [B, T, D] of the text before each reference, and of the text before the image.
        encoder_hidden_states_mask: bool [B, T] for the last text, False for padding at its end; None without padding.
        img_shapes: height and width of each reference and of the image, in latent pixels.
        """
        images = self.img_in(hidden_states).split([h * w for h, w in img_shapes], dim=1)
        texts = [self.txt_in(text) for text in encoder_hidden_states]
        pieces = [piece for pair in zip(texts, images, strict=True) for piece in pair]
        ends = list(accumulate(piece.shape[1] for piece in pieces))
        segments = [(start, end, i % 2 == 0) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
        x, device, text_mask, size = (
            torch.cat(pieces, dim=1),
            hidden_states.device,
            encoder_hidden_states_mask,
            ends[-1] - ends[-2],
        )
        angles = self._angles(token_positions([text.shape[1] for text in texts], img_shapes, text_mask, device))
        keys, is_image = None, torch.arange(ends[-1], device=device) >= ends[-2]
        if text_mask is not None:
            before, after = text_mask.new_ones(len(x), ends[-2] - text_mask.shape[1]), text_mask.new_ones(len(x), size)
            keys = torch.cat([before, text_mask, after], dim=1)[:, None, None]
        timestep = timestep.to(x.dtype)
        temb = self.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), x)  # texts and references have 0
        modulation = self.modulation(temb)
        for block in self.transformer_blocks:
            inputs = x, modulation, angles, keys, is_image, None, None, None, segments
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, *inputs)
            else:
                x = block(*inputs)
        velocity: Tensor = self.proj_out(self.norm_out(x[:, ends[-2] :], temb[:-1]))
        return velocity

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the rotation angles [(B,) N, d/2] for positions [(B,) N, 3]."""
        theta, widths = float(self.pos_embed.theta), self.pos_embed.axes_dim
        speeds = [1 / torch.pow(theta, torch.arange(0, width, 2).float() / width) for width in widths]
        axes = zip(positions.unbind(-1), speeds, strict=True)
        return torch.cat([place[..., None] * to_device(speed, place.device) for place, speed in axes], dim=-1)


class Attention(QwenImage21AttnProcessor):
    """diffusers' attention with angles instead of complex numbers, and without a cache."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None,
        rotary_emb: Tensor,
        segments: Sequence[Segment],
        **unused: None,
    ) -> Tensor:
        """Return the states [B, N, D] after attention, segment by segment.

        attention_mask: bool [B, 1, 1, N], False for padding, which only the last segment sees. rotary_emb: angles.
        """
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = rotate(attn.norm_q(query), rotary_emb), rotate(attn.norm_k(key), rotary_emb)
        out = []
        for start, end, is_text in segments:
            mask = attention_mask if end == key.shape[1] else None
            if is_text and start:
                mask = torch.ones(end - start, end, dtype=torch.bool, device=key.device).tril(start)
            out.append(
                dispatch_attention_fn(
                    query[:, start:end],
                    key[:, :end],
                    value[:, :end],
                    attn_mask=mask,
                    is_causal=is_text and not start,
                    backend=self._attention_backend,
                )
            )
        return attn.to_out[0](torch.cat(out, dim=1).flatten(2))


def token_positions(
    lengths: Sequence[int], shapes: Sequence[tuple[int, int]], mask: Tensor | None, device: torch.device
) -> Tensor:
    """Return the frame, row and column of each token: [N, 3], or [B, N, 3] with a mask of the last text.

    The n-th position in a text is (n, n, n). The next image is at frame n, with rows and columns counted from its
    middle, and takes as many positions as its longer side.
    """
    positions, n = [], 0
    for length, (h, w) in zip(lengths, shapes, strict=True):
        positions.append(torch.arange(n, n + length, device=device)[:, None].expand(-1, 3))
        n += length
        rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in (h, w))
        frame = torch.full([1], n, device=device)
        positions.append(torch.stack(torch.meshgrid(frame, rows, columns, indexing="ij"), dim=-1).flatten(0, 2))
        n += max(h, w)
    places = torch.cat(positions)
    if mask is None:
        return places
    places = places.repeat(len(mask), 1, 1)
    places[:, -h * w :, 0] -= (~mask).sum(dim=1, keepdim=True)  # the image follows its own text
    return places
