"""ImageBind: the similarity of a video to its sound, as the cosine of their embeddings, in [-1, 1].

ImageBind (Girdhar et al., arXiv 2305.05665) averages the embeddings of clips of 2 s: five clips of a video, each as
three square crops of two frames, and three clips of a sound, each as 128 mel bands at 16 kHz. The starts of the clips
are evenly spaced; shorter sounds are padded with silence. The first channel of a sound is resampled by a Fourier
series; imagebind/data.py of github.com/facebookresearch/ImageBind resamples by a filter.

Notation: N samples, T frames, H height, W width, S points in time, C channels.
"""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize
from transformers import ASTFeatureExtractor

from omni_reward.media import Arrays, Meta
from omni_reward.scorers import neural
from omni_reward.scorers.sound import resample
from omni_reward.wire import Score, Scorer

HERTZ = 16_000
SECONDS = 2  # of a clip
SIDE = 224
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def empty_imagebind(device: str, *, dtype: str = "float32") -> neural.Empty:
    """Return the network of `load_imagebind` with uninitialized weights.

    Raises:
        ValueError: scorers do not support the dtype.
    """
    from imagebind.models import imagebind_model

    kind = neural.pick_dtype(dtype)
    with torch.device("meta"):
        network = imagebind_model.imagebind_huge(pretrained=False)
    network = network.to(kind).to_empty(device=device).eval().requires_grad_(False)

    def call() -> None:
        video = torch.zeros(neural.BATCH_SIZE, 15, 3, 2, SIDE, SIDE)
        audio = torch.zeros(neural.BATCH_SIZE, 3, 1, 128, 204)
        network({"vision": video.to(device, kind), "audio": audio.to(device, kind)})

    return neural.Empty(network, call)


def load_imagebind(*, weights: str, device: str | None = None, dtype: str = "float32", threads: int = 1) -> Scorer:
    """Load the scorer of `video` [N, T, H, W, 3], uint8, RGB, with `audio` [N, S, C], float32.

    Args:
        weights: path of imagebind_huge.pth.
        device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`.

    Raises:
        ValueError: an argument is invalid, or the weights belong to another model.
        OSError: the weights cannot be read.
    """
    from imagebind.models import imagebind_model

    where, kind = neural.pick_device(device, threads=threads), neural.pick_dtype(dtype)
    network = imagebind_model.imagebind_huge(pretrained=False)
    try:
        network.load_state_dict(neural.read_weights(Path(weights)))
    except RuntimeError as exc:
        raise ValueError(f"weights must be those of imagebind_huge, got {weights!r}: {exc}") from exc
    network = network.to(where, kind).eval().requires_grad_(False)
    extract = ASTFeatureExtractor(max_length=204, mean=-4.268, std=9.138 / 2)  # it divides by 2 std

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        rates: list[tuple[Any, Any]] = [(sample["sample_rate"], sample["fps"]) for sample in meta]
        audio, video = [], []
        for clip, sound, (rate, fps) in zip(media["video"], media["audio"], rates, strict=True):
            mono = resample(sound[:, 0], rate, HERTZ)
            points = [int(start * HERTZ) for start in clip_starts(len(mono), HERTZ, 3)]
            clips = [mono[point : point + SECONDS * HERTZ] for point in points]
            bands = extract([piece - piece.mean() for piece in clips], HERTZ, return_tensors="pt")
            audio.append(bands.input_values.transpose(1, 2)[:, None])
            starts = clip_starts(len(clip), fps, 5)
            video.append(torch.cat([square_crops(clip[clip_bounds(start, fps, len(clip))]) for start in starts]))
        inputs = {"vision": torch.stack(video).to(where, kind), "audio": torch.stack(audio).to(where, kind)}
        with torch.inference_mode():
            embeddings = {name: normalize(embedding.float(), dim=-1) for name, embedding in network(inputs).items()}
        return [Score.of(value) for value in (embeddings["vision"] * embeddings["audio"]).sum(dim=-1).tolist()]

    version, move = f"imagebind_huge {dtype}", neural.make_mover(network)
    return Scorer(score, media=("video", "audio"), batch_size=neural.BATCH_SIZE, version=version, move=move)


def clip_starts(length: int, rate: float, count: int) -> list[Fraction]:
    """Return the starts, in s, of `count` clips of 2 s, evenly spaced over `length` frames or points."""
    gap = Fraction(max(length / rate - SECONDS, 0)) / (count - 1)
    return [gap * i for i in range(count)]


def clip_bounds(start: Fraction, fps: float, length: int) -> list[int]:
    """Return the first and last frame of the clip that starts at `start` s, limited to the video's frames."""
    first = min(math.ceil(float(fps) * start), length - 1)  # rounded as pytorchvideo's decoder does
    return [first, max(first, min(math.ceil(float(fps) * (start + SECONDS)), length) - 1)]


def square_crops(frames: np.ndarray) -> Tensor:
    """Return the left, middle and right (or top to bottom) square of frames [T, H, W, 3]: [3, 3, T, 224, 224]."""
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
    height, width = pixels.shape[2:]
    scale = SIDE / min(height, width)
    size = max(SIDE, int(height * scale)), max(SIDE, int(width * scale))
    pixels = interpolate(pixels, size=size, mode="bilinear", align_corners=False).transpose(0, 1)
    pixels = (pixels - torch.tensor(MEAN).view(3, 1, 1, 1)) / torch.tensor(STD).view(3, 1, 1, 1)
    excess = max(size) - SIDE
    dim = 2 if size[0] > size[1] else 3
    return torch.stack([pixels.narrow(dim, start, SIDE) for start in (0, -(-excess // 2), excess)])
