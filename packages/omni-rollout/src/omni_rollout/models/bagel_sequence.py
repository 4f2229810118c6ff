"""The sequence of BAGEL's tokens, in segments: references, text, image.

A segment attends to itself and everything before it; text is causal. A reference is two segments: its latents at noise
level 0, and its vision-transformer tokens. The tokens of an image share one position. With R references:

    segment    reference i           reference i, vision   text               image
    tokens     2 marks, N_i latents  2 marks, n_i tokens   T                  2 marks, N latents
    position   2i                    2i + 1                2R .. 2R + T - 1   2R + T

The marks are <|vision_start|> and <|vision_end|>. Latents have separate weights, so the net keeps two streams of
tokens, each in the order of the sequence: U tokens of text, marks and vision, and G latents.

Shapes: B samples, L = U + G tokens, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_TOKENS_PER_SIDE = 64  # along a side, as in the weights; the released config.json says 32


class Segment(NamedTuple):
    """Number of a segment's tokens for NAME and for NAME_moe_gen, and the attention mask up to its end.

    visible: mask for scaled_dot_product_attention; None if all tokens are visible, or if the segment is causal.
    """

    text: int
    image: int
    visible: Tensor | None = None
    is_causal: bool = False


def lay_out(words: Tensor, references: Sequence[tuple[int, int]], image: int) -> tuple[list[Segment], Tensor]:
    """Return the segments of a sequence and its positions [B, L].

    words: mask of the text [B, T], False for padding. references: (N_i, n_i) of each. image: N.
    """
    B, T = words.shape
    segments = [
        segment
        for num_latents, num_vision in references
        for segment in (Segment(2, num_latents), Segment(2 + num_vision, 0))
    ]
    sizes, first = [segment.text + segment.image for segment in segments], len(segments)
    places = [torch.full((B, size), i, device=words.device) for i, size in enumerate(sizes)]
    places.append(first + torch.arange(T, device=words.device).expand(B, T))
    places.append(first + words.sum(dim=1, keepdim=True).expand(B, image + 2))
    before, around = words.new_ones(B, sum(sizes)), words.new_ones(B, image + 2)
    causal = words.new_ones(T, sum(sizes) + T).tril(sum(sizes)) if references else None
    segments.append(Segment(T, 0, causal, is_causal=causal is None))
    segments.append(Segment(2, image, torch.cat([before, words, around], dim=1)[:, None, None]))
    return segments, torch.cat(places, dim=1)


def join_streams(text: Tensor, image: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return the sequence [B, heads, L, width] of two streams, [B, heads, U, width] and [B, heads, G, width]."""
    texts = text.split([segment.text for segment in segments], dim=2)
    images = image.split([segment.image for segment in segments], dim=2)
    return torch.cat([piece for pair in zip(texts, images, strict=True) for piece in pair], dim=2)


def split_streams(states: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Return the streams [B, U, D] and [B, G, D] of a sequence [B, L, D]."""
    pieces = states.split([count for segment in segments for count in segment[:2]], dim=1)
    return torch.cat(pieces[::2], dim=1), torch.cat(pieces[1::2], dim=1)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return the attention over a sequence [B, heads, L, width] by segments; keys and values may begin before it."""
    out, end = [], 0
    past = key.shape[2] - query.shape[2]
    for text, image, visible, is_causal in segments:
        start, end = end, end + text + image
        states = query[:, :, start:end], key[:, :, : past + end], value[:, :, : past + end]
        out.append(scaled_dot_product_attention(*states, attn_mask=visible, is_causal=is_causal))
    return torch.cat(out, dim=2)
