"""Preference files, which docs/preferences.md describes: their check before any weight is loaded, and their latents."""

from pathlib import Path
from typing import TYPE_CHECKING

from omni_train.hub import real_roots
from omni_train.prompts.files import PromptRecord, load_prompts
from safetensors import SafetensorError, safe_open

from omni_rl.media.images import FORMATS, picture_size, read_picture
from omni_rl.media.videos import VIDEOS, read_video, video_facts

if TYPE_CHECKING:  # the check runs before torch is imported
    from omni_rollout import Model, Params
    from omni_rollout.types import Parts
    from torch import Tensor

SIDES = ("win", "lose")
SUFFIXES = tuple(dict.fromkeys((*FORMATS, *VIDEOS, ".safetensors")))
SPEED = 0.05  # of the frame rate, by which a video's may differ: the times in a .gif are whole hundredths of a second


def check_preferences(
    path: str | Path, shape: tuple[int, int, int], *, frame_rate: float, media_root: str = ""
) -> None:
    """Check that every pair names two whole files in the file's own folder, of the pair's or the run's size.

    Decodes nothing, or a first frame, so a large file is checked in seconds. shape: frames, height and width; a pair
    may have another height and width. frame_rate: of videos. media_root: as `load_prompts`, for the references.

    Raises:
        ValueError: a name, a path or a file breaks these rules; the pair and the file are named.
    """
    folder = Path(path).parent
    for record in load_prompts(path, media_root=media_root):
        for side in SIDES:
            try:
                file, size = _file_of(record, side, folder), record.size or shape[1:]
                _check_file(file, (shape[0], *size), frame_rate)
            except ValueError as exc:
                raise ValueError(f'{path}, pair {record.index + 1}, "{side}": {exc}') from exc


def read_latent(model: "Model", parts: "Parts", path: Path, params: "Params") -> "Tensor":
    """A sample's latent, float32: the tensor `x0` of a .safetensors file, or the VAE's code of an image or a video.

    Raises:
        ValueError: it has another shape than the model's latents, or there is no such tensor.
    """
    shape = model.latent_shape(params)
    if path.suffix.lower() == ".safetensors":
        with safe_open(path, framework="pt") as file:
            if "x0" not in file.keys():  # noqa: SIM118 - the file is no mapping
                raise ValueError(f"{path} must hold a tensor x0, has {sorted(file.keys())}")
            x0: Tensor = file.get_tensor("x0").float()
    elif "audio" in model.MEDIA:
        raise ValueError(f"{path} must be the .safetensors file of a latent, as the model draws sound")
    else:
        frames = read_video(path) if _is_video(path) else read_picture(path)[None]
        x0 = model.encode_media(
            parts, {"video": frames[None]} if "video" in model.MEDIA else {"image": frames}, params
        )[0]
    if x0.shape != shape:
        raise ValueError(f"{path} must be a sample of latent shape {shape}, got {tuple(x0.shape)}")
    return x0


def _file_of(record: PromptRecord, side: str, folder: Path) -> Path:
    """The file that a side of a pair names, which must exist in `folder` or below."""
    name = record.meta.get(side)
    if not isinstance(name, str) or Path(name).suffix.lower() not in SUFFIXES:
        raise ValueError(f"must name a file that ends in one of {SUFFIXES}, got {name!r}")
    path = folder / name
    if not any(path.resolve().is_relative_to(root) for root in real_roots(folder)):
        raise ValueError(f"must name a file in the folder of the preference file, got {name!r}")
    if not path.is_file():
        raise ValueError(f"must name a file that exists, got {path}")
    return path


def _check_file(path: Path, shape: tuple[int, int, int], frame_rate: float) -> None:
    """Raise ValueError unless the file is whole and, where it is a video or an image, of that (frames, H, W)."""
    if path.suffix.lower() == ".safetensors":
        try:
            with safe_open(path, framework="np"):
                return
        except SafetensorError as exc:
            raise ValueError(f"{path} is no whole safetensors file: {exc}") from exc
    is_picture = path.suffix.lower() in FORMATS
    *found, fps = (1, *picture_size(path)[::-1], frame_rate) if is_picture else video_facts(path)
    if is_picture and _is_video(path):
        *found, fps = video_facts(path)
    if tuple(found) != shape:
        raise ValueError(f"{path} must be {_described(*shape)}, got {_described(*found)}")
    if shape[0] > 1 and abs(fps / frame_rate - 1) > SPEED:
        raise ValueError(f"{path} must have {frame_rate:g} frames per second, as --frame-rate says, got {fps:g}")


def _is_video(path: Path) -> bool:
    """Whether a file moves; a .webp may or may not."""
    return path.suffix.lower() in VIDEOS and (path.suffix.lower() not in FORMATS or video_facts(path)[0] > 1)


def _described(num_frames: int, height: int, width: int) -> str:
    kind = "an image" if num_frames == 1 else f"a video of {num_frames} frames"
    return f"{kind} of {width} x {height} pixels"
