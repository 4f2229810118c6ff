"""Preference files (docs/preferences.md): checks before any weights are loaded, and reading of latents."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni_train.hub import real_roots
from omni_train.prompts.files import PromptRecord
from omni_train.prompts.splits import data_files
from safetensors import SafetensorError, safe_open

from omni_rl.media import images
from omni_rl.media.images import image_size, read_image
from omni_rl.media.videos import VIDEOS, read_video, video_facts
from omni_rl.settings.args import load_records
from omni_rl.settings.fields import prefix_errors
from omni_rl.settings.groups import Data, Sampling

if TYPE_CHECKING:  # the check runs before torch is imported
    from omni_rollout import Model, Params
    from omni_rollout.types import Parts
    from torch import Tensor

SIDES = ("win", "lose")
SUFFIXES = tuple(dict.fromkeys((*images.SUFFIXES, *VIDEOS, ".safetensors")))
MAX_SPEED_ERROR = 0.05  # fraction of the frame rate; times in a .gif are multiples of 0.01 s


def named_file(meta: Mapping[str, object], side: str) -> object:
    """Return the value of a side in a line. "sample", for supervised training, is the preferred side of a pair."""
    return meta["win"] if side == "sample" and "win" in meta else meta.get(side)


def check_preferences(
    path: str | Path, data: Data, sampling: Sampling, sides: Sequence[str] = SIDES, *, name: str = "--preferences"
) -> None:
    """Check that every line names complete files in the preference file's folder, with the size of the line or the run.

    At most the first frame is decoded, so a large file is checked in seconds. sampling: number of frames, and the
    height and width of lines that do not set them. sides: the keys with files. name: the flag.

    Raises:
        ValueError: a name, a path or a file is invalid; the message names the pair or sample and the file.
    """
    entry_kind = "pair" if sides == SIDES else "sample"
    with prefix_errors(f"{name}: "):
        records, folder = load_records(data, path), data_files(path)[0].parent
    for record in records:
        for side in sides:
            try:
                file, size = _find_file(record, side, folder), record.size or (sampling.height, sampling.width)
                _check_file(file, (sampling.num_frames, *size), sampling.frame_rate)
            except ValueError as exc:
                raise ValueError(f'{name}: {path}, {entry_kind} {record.index + 1}, "{side}": {exc}') from exc


def read_latent(model: "Model", parts: "Parts", path: Path, params: "Params") -> "Tensor":
    """Return a sample's latent, float32: tensor `x0` of a .safetensors file, or the VAE's latent of an image or video.

    Raises:
        ValueError: its shape is not that of the model's latents, or the file has no tensor x0.
    """
    shape = model.latent_shape(params)
    if path.suffix.lower() == ".safetensors":
        with safe_open(path, framework="pt") as file:
            if "x0" not in file.keys():  # noqa: SIM118 - the file is not a mapping
                raise ValueError(f"{path} must hold a tensor x0, has {sorted(file.keys())}")
            x0: Tensor = file.get_tensor("x0").float()
    elif "audio" in model.MEDIA:
        raise ValueError(f"{path} must be the .safetensors file of a latent, as the model generates sound")
    else:
        frames = read_video(path)[0] if _is_video(path) else read_image(path)[None]
        media = {"video": frames[None]} if "video" in model.MEDIA else {"image": frames}
        x0 = model.encode_media(parts, media, params)[0]
    if x0.shape != shape:
        raise ValueError(f"{path} must be a sample of latent shape {shape}, got {tuple(x0.shape)}")
    return x0


def _find_file(record: PromptRecord, side: str, folder: Path) -> Path:
    """Return the file of a side of a pair, which must exist in `folder` or a subfolder."""
    name = named_file(record.meta, side)
    if not isinstance(name, str) or Path(name).suffix.lower() not in SUFFIXES:
        raise ValueError(f"must name a file with a suffix of {SUFFIXES}, got {name!r}")
    path = folder / name
    if not any(path.resolve().is_relative_to(root) for root in real_roots(folder)):
        raise ValueError(f"must name a file in the folder of the preference file, got {name!r}")
    if not path.is_file():
        raise ValueError(f"must name a file that exists, got {path}")
    return path


def _check_file(path: Path, shape: tuple[int, int, int], frame_rate: float) -> None:
    """Raise ValueError for a damaged file, or an image or video with other (frames, H, W) or another frame rate."""
    if path.suffix.lower() == ".safetensors":
        try:
            with safe_open(path, framework="np"):
                return
        except SafetensorError as exc:
            raise ValueError(f"{path} is no whole safetensors file: {exc}") from exc
    *shape_found, fps = video_facts(path) if _is_video(path) else (1, *image_size(path)[::-1], frame_rate)
    if tuple(shape_found) != shape:
        raise ValueError(f"{path} must be {_describe_shape(*shape)}, got {_describe_shape(*shape_found)}")
    if shape[0] > 1 and abs(fps / frame_rate - 1) > MAX_SPEED_ERROR:
        raise ValueError(f"{path} must have {frame_rate:g} frames per second, as --frame-rate says, got {fps:g}")


def _is_video(path: Path) -> bool:
    """Return True if the file is a video. A .webp may be either."""
    return path.suffix.lower() in VIDEOS and (path.suffix.lower() not in images.SUFFIXES or video_facts(path)[0] > 1)


def _describe_shape(num_frames: int, height: int, width: int) -> str:
    kind = "an image" if num_frames == 1 else f"a video of {num_frames} frames"
    return f"{kind} of {width} x {height} pixels"
