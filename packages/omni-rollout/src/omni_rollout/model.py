"""The door to a model: one class per model in `models/`, and an instance for one checkpoint.

`sigma` 1 = noise, 0 = data; `velocity = dx/dsigma = noise - data`: a model's file turns its net's sign and timescale to
that. Latents are [B, *latent_shape], float32: [C, h, w] for images, [C, F, h, w] for video, [n] for several streams
one after the other.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates

T = TypeVar("T")


class Model(Protocol):
    """A model for one checkpoint; it has the checkpoint's configuration and no weight."""

    BLOCK_NAMES: ClassVar[tuple[str, ...]]  # classes of the net's blocks, the units of sharding and recomputing
    EXPERT_NAMES: ClassVar[tuple[str, ...]]  # classes of its modules of experts
    LORA_TARGETS: ClassVar[tuple[str, ...]]  # endings of the names of layers with LoRA
    OPTIONS: ClassVar[Mapping[str, float]]  # the pipeline's parameters, by diffusers' names, with defaults
    TEXT_OPTIONS: ClassVar[tuple[str, ...]]  # OPTIONS that are keyword arguments of `encode`
    MEDIA: ClassVar[tuple[str, ...]]  # the kinds that `decode` returns
    reads_weights: bool  # if False, `check_files` requires no weights, and `load` leaves them uninitialized
    host_encoders: bool  # if True, `load` offloads text encoders, and copies them to the device to encode
    NEGATES_TEXT: ClassVar[bool]  # True if an empty negative prompt depends on the prompt
    IMAGES: range  # the numbers of references that a prompt may have
    BRANCHES: ClassVar[Mapping[str, tuple[str, ...]]]  # names of modules and weights for only one medium
    boundary: float  # noise level below which the second of two experts runs; 0 for one net
    context: int  # number of ranks that compute each forward together
    reading: Callable[[str, int], AbstractContextManager[None]]  # around the reading of a part of so many bytes

    @property
    def nets(self) -> Mapping[str, str]:
        """The subfolders of the net's experts, by the names of its submodules; {"": "transformer"} for one net."""

    @property
    def path(self) -> str:
        """The folder or hub id of the checkpoint."""

    @property
    def folder(self) -> Path:
        """The folder of its configuration, and of its weights once they are fetched."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The entries of model_index.json, with each part's configuration under its name."""

    @property
    def encoders(self) -> list[str]:
        """The parts that encode texts."""

    def check(self, params: Params) -> None:
        """Raise ValueError for a size, number of frames or option that the model lacks; name the nearest legal one."""

    def check_context(self) -> None:
        """Raise ValueError unless `context` ranks can compute a forward together; `check` has the rules of sizes."""

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the tokens of each forward of the net over the ranks of a row of `mesh`.

        They call it with equal inputs, and get equal outputs. A rank's gradients are those of its tokens: their sum is
        the gradient. mesh: with the axes "ring" and "ulysses".
        """

    def check_image(self, height: int, width: int) -> None:
        """Raise ValueError for a reference of a size, in pixels, that the model does not support."""

    def check_files(self) -> None:
        """Raise ValueError unless all files exist, are complete, and match the configuration; read no weight."""

    def latent_shape(self, params: Params) -> tuple[int, ...]:
        """Return the shape of one sample's latent."""

    def streams(self, params: Params) -> Mapping[str, int]:
        """Return the number of each medium's elements in a sample's latent [n], in their order; {} for one medium."""

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] of the checkpoint's scheduler from 1 to 0, on the host."""

    def weight_bytes(self) -> int:
        """Return the size of the files with weights, without those of a hub id that are not fetched yet."""

    def load(self, *, device: torch.device | str, dtype: torch.dtype, net: nn.Module | None = None) -> Parts:
        """Return all parts, frozen, in eval mode. net: replaces the checkpoint's, whose weights are then not read."""

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Return only the net, as `load` does."""

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """Return the net on the meta device, for names and shapes. buffers: True to keep all but parameters real."""

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """Return the safetensors files of a part."""

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return a sample's conditioning by its text, or negative text, and its images, without the axis B.

        TEXT_OPTIONS are further keyword arguments. The sampler caches the result. Entries that grow with the text have
        a mask.
        """

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return a sample's other inputs, without the axis B: latents of reference images, first frames. Often none.

        The sampler caches it: it must depend only on the prompt's images, on `params` except `sde_steps`, and on frozen
        weights.
        """

    def is_guided(self, params: Params) -> bool:
        """True if predict_velocity requires a `negative_X` for every entry X of `encode`."""

    def unguided(self, params: Params) -> Params:
        """Return the same parameters without classifier-free guidance, for losses that denoise data."""

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, *latent_shape], float32, at x [B, *latent_shape] and noise levels sigma [B].

        Sampling and training call it. It only calls `net`, which may be sharded, have adapters, or be another engine's.
        """

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return the media of clean latents x0 [B, *latent_shape], and their rates; differentiable in x0.

        Images are float32 in [0, 1]; `sampler.to_wire` converts them to uint8.
        """

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return clean latents [B, *latent_shape] of media, the inverse of `decode`. Images are uint8, or in [0, 1]."""


class _Wrapped:
    def __init__(self, wrapped: object, methods: Mapping[str, Callable[..., object]]) -> None:
        self._wrapped = wrapped
        vars(self).update(methods)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the wrapped one's, for `isinstance` and for names
        return self._wrapped.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def wrap(wrapped: T, **methods: Callable[..., object]) -> T:
    """Return an object, such as a model, with some of its methods replaced; other attributes are the wrapped one's."""
    return cast(T, _Wrapped(wrapped, methods))
