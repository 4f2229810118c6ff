"""Preference files, which docs/preferences.md describes: their check before any weight is loaded, and their latents."""

from pathlib import Path
from typing import TYPE_CHECKING

from omni_train.data import PromptRecord, load_prompts
from safetensors import SafetensorError, safe_open

from omni_rl.pictures import FORMATS, picture_size, read_picture

if TYPE_CHECKING:  # the check runs before torch is imported
    from omni_rollout import Model, Params
    from omni_rollout.types import Parts
    from torch import Tensor

SIDES = ("win", "lose")
SUFFIXES = (*FORMATS, ".safetensors")


def check_preferences(path: str | Path, *, height: int, width: int) -> None:
    """Check that every pair names two whole files in the file's own folder, and images of the pair's or the run's size.

    Reads headers alone, so a large file is checked in seconds.

    Raises:
        ValueError: a name, a path or a file breaks these rules; the pair and the file are named.
    """
    folder = Path(path).parent
    for record in load_prompts(path):
        for side in SIDES:
            try:
                _check_file(_file_of(record, side, folder), *(record.size or (height, width)))
            except ValueError as exc:
                raise ValueError(f'{path}, pair {record.index + 1}, "{side}": {exc}') from exc


def read_latent(model: "Model", parts: "Parts", path: Path, params: "Params") -> "Tensor":
    """A sample's latent, float32: the tensor `x0` of a .safetensors file, or the VAE's code of an image.

    Raises:
        ValueError: it has another shape than the model's latents, or there is no such tensor.
    """
    shape = model.latent_shape(params)
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            if "x0" not in file.keys():  # noqa: SIM118 - the file is no mapping
                raise ValueError(f"{path} must hold a tensor x0, has {sorted(file.keys())}")
            x0: Tensor = file.get_tensor("x0").float()
    else:
        still = read_picture(path)[None]
        media = {kind: still[None] if kind == "video" else still for kind in model.MEDIA}  # a video of one frame
        x0 = model.encode_media(parts, media, params)[0]
    if x0.shape != shape:
        raise ValueError(f"{path} must be a sample of latent shape {shape}, got {tuple(x0.shape)}")
    return x0


def _file_of(record: PromptRecord, side: str, folder: Path) -> Path:
    """The file that a side of a pair names, which must exist in `folder` or below."""
    name = record.meta.get(side)
    if not isinstance(name, str) or Path(name).suffix.lower() not in SUFFIXES:
        raise ValueError(f"must name a file that ends in one of {SUFFIXES}, got {name!r}")
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"must name a file in the folder of the preference file, got {name!r}")
    if not path.is_file():
        raise ValueError(f"must name a file that exists, got {path}")
    return path


def _check_file(path: Path, height: int, width: int) -> None:
    """Raise ValueError unless the file is whole and, where it is an image, of that size in pixels."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="np"):
                return
        except SafetensorError as exc:
            raise ValueError(f"{path} is no whole safetensors file: {exc}") from exc
    if (size := picture_size(path)) != (width, height):
        raise ValueError(f"{path} must be an image of {width} x {height} pixels, got {size[0]} x {size[1]}")
