"""Decoding with less memory: in slices of a few samples, or in tiles."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import ceil

import torch
from torch import Tensor

from omni_rollout.types import Cond, Media, Params, Parts, Rates

Decode = Callable[[Parts, Tensor, Cond, Params], tuple[Media, Rates]]
Place = tuple[slice, ...]  # rows and columns of latents
Run = Callable[[Callable[[Place], Tensor], Sequence[Place]], Iterable[Tensor]]

DECODED_PIXELS = 4 * 2**20  # at a time by default; with twice as many, cuDNN rejects tensors with 256 channels
OVERLAP = 64  # pixels that neighboring tiles share, and at most a quarter of a tile, as in diffusers


def num_decoded(size: int, height: int, width: int, tile: int = 0) -> int:
    """Return how many samples of height x width pixels to decode at a time: `size`, or by default 4 megapixels.

    tile: longest side of a tile, or 0 to decode whole samples.
    """
    side = tile or max(height, width)
    return size or max(1, DECODED_PIXELS // (min(height, side) * min(width, side)))


def sliced_decode(decode: Decode, size: int) -> Decode:
    """Wrap `Model.decode` to decode any number of samples, `size` of them at a time."""

    def decode_slices(parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        pieces = [
            decode(parts, x0[i : i + size], {name: tensor[i : i + size] for name, tensor in cond.items()}, params)
            for i in range(0, len(x0), size)
        ]
        first, rates = pieces[0]
        return {kind: torch.cat([media[kind] for media, _ in pieces]) for kind in first}, rates

    return decode_slices


def tiled_decode(decode: Decode, max_side: int, run: Run = map) -> Decode:
    """Wrap `Model.decode` to decode images or videos in overlapping tiles of at most `max_side` pixels a side.

    The VAE sees one tile at a time, so the result differs slightly from decoding whole samples.

    run: returns the pixels of all tiles in order. It may distribute the tiles over other ranks, which call it too.
    """

    def decode_tiles(parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        unit = params.height // x0.shape[-2]
        overlap = max(1, min(OVERLAP, max_side // 4) // unit)
        places = [*product(*(tile_slices(length, max_side // unit, overlap) for length in x0.shape[-2:]))]
        if len(places) == 1:
            return decode(parts, x0, cond, params)
        decoded = list[tuple[Media, Rates]]()

        def decode_tile(place: Place) -> Tensor:
            rows, columns = place
            tile = x0[..., rows, columns]
            size = tile.shape[-2] * unit, tile.shape[-1] * unit
            decoded.append(decode(parts, tile, cond, params.of_size(size)))
            (pixels,) = decoded[-1][0].values()
            return pixels

        whole = blend([*run(decode_tile, places)], places, unit, overlap)
        media, rates = decoded[0]
        return dict.fromkeys(media, whole), rates

    return decode_tiles


def tile_slices(length: int, max_length: int, overlap: int) -> list[slice]:
    """Return the fewest equal parts, of at most `max_length`, that cover a length and overlap by `overlap` or more."""
    count = max(1, ceil((length - overlap) / (max_length - overlap)))
    size = ceil((length + (count - 1) * overlap) / count)
    starts = [(length - size) * i // max(1, count - 1) for i in range(count)]
    return [slice(start, start + size) for start in starts]


def blend(tiles: Sequence[Tensor], places: Sequence[Place], unit: int, overlap: int) -> Tensor:
    """Blend tiles [..., h, w, 3] into the whole [..., H, W, 3], with weights that fall linearly where tiles overlap.

    places: positions of the tiles, in latents of `unit` pixels, as is `overlap`.
    """
    height, width = tiles[0].shape[-3:-1]
    weight = ramp(height, overlap * unit)[:, None] * ramp(width, overlap * unit)
    weight = weight[..., None].to(tiles[0].device)
    rows, columns = (span.stop * unit for span in places[-1])
    whole = tiles[0].new_zeros(*tiles[0].shape[:-3], rows, columns, tiles[0].shape[-1])
    total = weight.new_zeros(rows, columns, 1)
    for tile, place in zip(tiles, places, strict=True):
        down, right = (slice(span.start * unit, span.stop * unit) for span in place)
        whole[..., down, right, :] += tile * weight
        total[down, right] += weight
    return whole / total


def ramp(length: int, overlap: int) -> Tensor:
    """Return weights [length], which fall linearly from 1 towards either end over `overlap` positions."""
    from_end = torch.arange(length).minimum(torch.arange(length).flip(0))
    return ((from_end + 1) / (overlap + 1)).clamp(max=1)
