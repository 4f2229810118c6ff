"""The door to a model: one class per model in `models/`, and an instance for one checkpoint.

`sigma` 1 = noise, 0 = data; `velocity = dx/dsigma = noise - data`: a model's file turns its net's sign and timescale to
that. Latents are [B, *latent_shape], float32, whatever that is: [C, h, w] for pictures, [C, F, h, w] for video, [n] for
several streams that are laid end to end.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Rates

T = TypeVar("T")


class Model(Protocol):
    """A model for one checkpoint: it knows the checkpoint's configuration and holds no weight."""

    BLOCK_NAMES: ClassVar[tuple[str, ...]]  # classes of the net's blocks, which are sharded and recomputed one by one
    LORA_TARGETS: ClassVar[tuple[str, ...]]  # how the names of layers that LoRA wraps end
    OPTIONS: ClassVar[Mapping[str, float]]  # the pipeline's own knobs, by diffusers' names, with defaults
    TEXT_OPTIONS: ClassVar[tuple[str, ...]]  # those of OPTIONS that are keyword arguments of `encode`
    MEDIA: ClassVar[tuple[str, ...]]  # the kinds that `decode` returns
    reads_weights: bool  # without, `check_files` asks for no weights, and `load` leaves their values open
    host_encoders: bool  # with it, `load` keeps text encoders on the host, from where they visit the device to encode
    NEGATES_TEXT: ClassVar[bool]  # whether an empty negative prompt is made of the prompt, and not the same for all
    IMAGES: range  # how many references a prompt may have
    BRANCHES: ClassVar[Mapping[str, tuple[str, ...]]]  # names of modules and weights that act on one medium alone
    boundary: float  # noise level below which the second of two experts is the net; 0 where there is one

    @property
    def nets(self) -> Mapping[str, str]:
        """The net's experts, as its submodules are called, each with its subfolder; {"": "transformer"} for one net."""

    @property
    def path(self) -> str:
        """The folder or hub id of the checkpoint."""

    @property
    def folder(self) -> Path:
        """Where its configuration lies, and its weights once they are fetched."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The entries of model_index.json; under each part's name, that part's own configuration."""

    @property
    def encoders(self) -> list[str]:
        """The parts that encode texts."""

    def check(self, params: Params) -> None:
        """Raises ValueError for a size, number of frames or option that the model lacks; names the nearest it has."""

    def check_image(self, height: int, width: int) -> None:
        """Raises ValueError for a reference of a size, in pixels, that the model does not take."""

    def check_files(self) -> None:
        """Raises ValueError unless all files are there, whole, and as the configuration says; reads no weight."""

    def latent_shape(self, params: Params) -> tuple[int, ...]:
        """The shape of one sample's latent."""

    def streams(self, params: Params) -> Mapping[str, int]:
        """How many elements of a sample's latent [n] are each medium's, in their order; {} where it draws but one."""

    def sigmas(self, params: Params) -> Tensor:
        """The noise levels [S + 1] from 1 to 0, on the host, as the checkpoint's scheduler has them."""

    def load(self, *, device: torch.device | str, dtype: torch.dtype, net: nn.Module | None = None) -> Parts:
        """All parts, frozen, in eval mode. net: put in place of the checkpoint's own, whose weights are not read."""

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The net alone, as `load` has it."""

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """The net on the meta device, for names and shapes. buffers: all but its parameters is real, to be filled."""

    def weight_files(self, part: str = "transformer") -> list[Path]:
        """The safetensors files of a part."""

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """One sample's conditioning by its text and images, or by its negative text and images, without the axis B.

        TEXT_OPTIONS are further keyword arguments. The sampler caches the result. What grows with the text comes with
        a mask.
        """

    def condition(self, parts: Parts, prompt: Prompt, params: Params) -> Cond:
        """One sample's other inputs, without the axis B: latents of reference images, first frames. Often none.

        The sampler remembers it: it depends on the prompt's images and on `params` without `sde_steps` alone, and on
        nothing that is trained.
        """

    def is_guided(self, params: Params) -> bool:
        """Whether predict_velocity wants a `negative_X` for every entry X of `encode`."""

    def unguided(self, params: Params) -> Params:
        """The same parameters without classifier-free guidance, for losses that denoise data."""

    def predict_velocity(self, net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """The velocity [B, *latent_shape], float32, at x [B, *latent_shape] and noise levels sigma [B].

        Sampling and training call it. It calls `net` and looks at nothing else of it: that may be sharded, carry
        adapters, or be another engine's.
        """

    def decode(self, parts: Parts, x0: Tensor, cond: Cond, params: Params) -> tuple[Media, Rates]:
        """The media of clean latents x0 [B, *latent_shape], and how fast they play; differentiable in x0.

        Pictures are float32 in [0, 1]; `sampler.to_wire` makes them uint8.
        """

    def encode_media(self, parts: Parts, media: Media, params: Params) -> Tensor:
        """Clean latents [B, *latent_shape] of media; the inverse of `decode`. Pictures may be uint8, or in [0, 1]."""


class _Wrapped:
    def __init__(self, wrapped: object, methods: Mapping[str, Callable[..., object]]) -> None:
        self._wrapped = wrapped
        vars(self).update(methods)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the wrapped one's, for `isinstance` and for what is named by the class
        return self._wrapped.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def wrap(wrapped: T, **methods: Callable[..., object]) -> T:
    """Return a model or an engine with some of its methods replaced; all else is the wrapped one's own."""
    return cast(T, _Wrapped(wrapped, methods))
