"""The interface of models: one class per model in `models/`, and one instance per checkpoint.

`sigma` is 1 for noise and 0 for data; `velocity = dx/dsigma = noise - data`. Each model's file converts its net's sign
and timescale to this. Latents are [B, *latent_shape], float32: [C, h, w] for images, [C, F, h, w] for video, [n] for
several concatenated streams.
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
    """A model for one checkpoint; it has the checkpoint's configuration but no weights."""

    BLOCK_NAMES: ClassVar[tuple[str, ...]]  # classes of the net's blocks, the units of sharding and recomputing
    EXPERT_NAMES: ClassVar[tuple[str, ...]]  # classes of the net's modules of experts
    LORA_TARGETS: ClassVar[tuple[str, ...]]  # endings of the names of the layers that get LoRA
    OPTIONS: ClassVar[Mapping[str, float]]  # the pipeline's parameters, by diffusers' names, with defaults
    TEXT_OPTIONS: ClassVar[tuple[str, ...]]  # OPTIONS that are keyword arguments of `encode`
    MEDIA: ClassVar[tuple[str, ...]]  # kinds of media that `decode` returns
    reads_weights: bool  # if False, `check_files` requires no weights and `load` leaves them uninitialized
    host_encoders: bool  # if True, text encoders are offloaded, and copied to the device to encode
    NEGATES_TEXT: ClassVar[bool]  # True if an empty negative prompt depends on the prompt
    IMAGES: range  # allowed numbers of references in a prompt
    BRANCHES: ClassVar[Mapping[str, tuple[str, ...]]]  # names of the modules and weights that serve only one medium
    boundary: float  # noise level below which the second of two experts runs; 0 for one net
    context: int  # number of ranks that compute each forward pass together
    reading: Callable[[str, int], AbstractContextManager[None]]  # entered while a part (name, bytes) is read

    @property
    def nets(self) -> Mapping[str, str]:
        """Subfolders of the net's experts by the name of its submodule; {"": "transformer"} for a single net."""

    @property
    def path(self) -> str:
        """Folder or hub id of the checkpoint."""

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint's configuration, and of its weights once they are fetched."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Entries of model_index.json, with each part's configuration under its name."""

    @property
    def encoders(self) -> list[str]:
        """Names of the parts that encode texts."""

    def check(self, params: Params) -> None:
        """Raise ValueError for an unsupported size, number of frames or option, with the nearest supported value."""

    def check_context(self) -> None:
        """Raise ValueError unless `context` ranks can compute a forward pass together; `check` checks sizes."""

    def share(self, net: nn.Module, mesh: "torch.distributed.DeviceMesh") -> None:
        """Split the tokens of each forward pass of the net over the ranks in a row of `mesh`.

        The ranks call the net with equal inputs and get equal outputs. Each rank has only its own tokens' gradients;
        their sum is the full gradient. mesh: mesh with the axes "ring" and "ulysses".
        """

    def check_image(self, height: int, width: int) -> None:
        """Raise ValueError for a reference whose size, in pixels, is not supported."""

    def check_files(self) -> None:
        """Raise ValueError unless all files exist, are complete and match the configuration; no weights are read."""

    def latent_shape(self, params: Params) -> tuple[int, ...]:
        """Return the shape of one sample's latent."""

    def streams(self, params: Params) -> Mapping[str, int]:
        """Return each medium's number of elements in a sample's latent [n], in order; {} for a single medium."""

    def sigmas(self, params: Params) -> Tensor:
        """Return the noise levels [S + 1] of the checkpoint's scheduler from 1 to 0, on the host."""

    def weight_bytes(self) -> int:
        """Return the size of the weight files, except those of a hub id that are not yet fetched."""

    def load(self, *, device: torch.device | str, dtype: torch.dtype, net: nn.Module | None = None) -> Parts:
        """Return all parts, frozen, in eval mode. net: net to use instead of reading the checkpoint's."""

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Return only the net, as `load` does."""

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """Return the net on the meta device, for names and shapes. buffers: True to materialize the buffers."""

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """Return the safetensors files of a part."""

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Return a sample's conditioning from its text, or negative text, and its images, without the axis B.

        TEXT_OPTIONS are further keyword arguments. The sampler caches the result. Entries whose length depends on the
        text have a mask.
        """

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """Return a sample's other inputs, if any, without the axis B: latents of reference images, first frames.

        The sampler caches the result: it must depend only on the prompt's images, on `params` except `sde_steps`, and
        on frozen weights.
        """

    def is_guided(self, params: Params) -> bool:
        """True if predict_velocity requires a `negative_X` for every entry X of `encode`."""

    def unguided(self, params: Params) -> Params:
        """Return the same parameters without classifier-free guidance, for losses that denoise data."""

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the velocity [B, *latent_shape], float32, at x [B, *latent_shape] and noise levels sigma [B].

        Sampling and training both call it. It only calls `net`, which may be sharded, have adapters, or be another
        engine's.
        """

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """Return the media of clean latents x0 [B, *latent_shape], and their rates; differentiable in x0.

        Images are float32 in [0, 1]; `sampler.to_wire` converts them to uint8.
        """

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Return the clean latents [B, *latent_shape] of media; inverse of `decode`. Images are uint8, or in [0, 1]."""


class _Wrapped:
    def __init__(self, wrapped: object, methods: Mapping[str, Callable[..., object]]) -> None:
        self._wrapped = wrapped
        vars(self).update(methods)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the wrapped object's, for `isinstance` and names
        return self._wrapped.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def wrap(wrapped: T, **methods: Callable[..., object]) -> T:
    """Return an object, such as a model, with some methods replaced; it shares all other attributes with `wrapped`."""
    return cast(T, _Wrapped(wrapped, methods))
