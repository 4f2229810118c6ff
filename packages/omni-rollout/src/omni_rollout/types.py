"""Prompts, sampling parameters and samples: the frozen data of an engine's inputs and outputs.

Shapes: B samples, S denoising steps, K stochastic (trained) steps, T text tokens. `sigma` is the noise level in [0, 1]:
1 is noise, 0 is data. Latents, means and log-probabilities are float32; log-probabilities are in nats per latent
element.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal, Protocol, Self, get_args

import torch
from omni_sched import Transition, sde_step
from torch import Tensor, nn
from torch.nn.functional import pad

# A model's conditioning; every tensor has the leading dimension B. A tensor X [B, T, ...] whose length depends on the
# text has an X_mask, bool [B, T], by which it is padded and truncated; a tensor without a mask never is. Masks stay on
# the host, which reads them without waiting for the device.
Cond = dict[str, Tensor]
Solver = Literal["euler", "dpmpp"]
Media = dict[str, Tensor]  # image uint8 [B, H, W, 3]; video uint8 [B, F, H, W, 3]; audio float32 [B, points, channels]
Rates = dict[str, float]  # rates of media: fps, sample_rate
SHARED = ("rates", "weight_version", "sigmas", "params")  # fields that a batch has once
OF_STEPS = ("x", "x_next", "sde_steps", "rollout_log_prob", "rollout_mean")  # fields with a value per kept step


class Parts(SimpleNamespace):
    """Loaded parts of a model, frozen, under diffusers' names; and `net`, which is trained."""

    net: nn.Module


@dataclass(frozen=True)
class Prompt:
    """The prompt of one sample.

    text: the prompt's text. group: number of the group of samples that it is compared with. index: its position among
    the samples of the step. seed: seed of its noise. negative: negative prompt; empty for the model's default. images:
    references to edit, or a video's first and last frames, each uint8 [H, W, 3]. audio: float32 [points, channels].
    video: uint8 [F, H, W, 3]. rates: rates of audio and video. meta: further data for a scorer. initial_seed: seed of
    the initial noise, if not `seed`; samples of a group that share it differ in the noise of the stochastic steps.
    size: (height, width) in pixels, or None for any; the batch's Params must have it.
    """

    text: str
    group: int
    index: int
    seed: int
    negative: str = ""
    images: tuple[Tensor, ...] = ()
    audio: Tensor | None = None
    meta: dict[str, object] = field(default_factory=dict)
    initial_seed: int | None = None
    size: tuple[int, int] | None = None
    video: Tensor | None = None
    rates: Rates = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[tuple[int, int] | None, tuple[tuple[int, ...], ...]]:
        """Shapes that all samples of a batch share: the prompt's size or None, and the sizes of its references."""
        return self.size, tuple(tuple(image.shape) for image in self.images)

    @property
    def start_seed(self) -> int:
        """Seed of the initial noise."""
        return self.seed if self.initial_seed is None else self.initial_seed


@dataclass(frozen=True)
class Params:
    """Sampling parameters of all samples of one call.

    num_inference_steps: S. height, width: pixels. num_frames, frame_rate: frames and frames per second of a video.
    guidance_scale: as in the model's diffusers pipeline. guidance: values of the model's OPTIONS by name. rule: the
    stochastic step of omni_sched at the step indices `sde_steps`; the steps before are Euler steps. noise_level:
    strength of the injected noise, defined by the rule. keep_mean: True to store the steps' means. solver: solver for
    the steps after the last stochastic one, or for all steps without one: euler, or dpmpp for DPM-Solver++(2M).
    compress_ratio: share of these steps that is kept, in (0, 1]; the trajectory has the shorter schedule
    (MixGRPO-Flash, arXiv 2507.21802). decode: False for samples without media.
    """

    num_inference_steps: int
    height: int
    width: int
    num_frames: int = 1
    frame_rate: float = 24.0
    guidance_scale: float = 1.0
    guidance: Mapping[str, float] = field(default_factory=dict)
    rule: Callable[..., Transition] = sde_step
    noise_level: float = 0.0
    sde_steps: tuple[int, ...] = ()
    keep_mean: bool = False
    solver: Solver = "euler"
    compress_ratio: float = 1.0
    decode: bool = True

    def __post_init__(self) -> None:
        for name in ("num_inference_steps", "num_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name, value in {"guidance_scale": self.guidance_scale, **self.guidance}.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        last = self.num_inference_steps - 1
        if list(self.sde_steps) != sorted({s for s in self.sde_steps if 0 <= s < last}):
            rule = f"sde_steps must be increasing indices in [0, {last})"
            raise ValueError(f"{rule}: the last step's density degenerates (sigma_next = 0), got {self.sde_steps}")
        if self.sde_steps and self.noise_level <= 0:
            raise ValueError(f"noise_level must be > 0 with sde_steps, got {self.noise_level}")
        if self.solver not in get_args(Solver):
            raise ValueError(f"solver must be one of {', '.join(get_args(Solver))}, got {self.solver!r}")
        if not 0 < self.compress_ratio <= 1:
            raise ValueError(f"compress_ratio must be in (0, 1], got {self.compress_ratio}")

    def of_size(self, size: tuple[int, int] | None) -> "Params":
        """Return the same parameters with another (height, width), if given."""
        return self if size is None else replace(self, height=size[0], width=size[1])

    @property
    def first_after(self) -> int:
        """Step after the last stochastic one; 0 if all are deterministic."""
        return self.sde_steps[-1] + 1 if self.sde_steps else 0


@dataclass(frozen=True)
class Samples:
    """The B samples of a batch.

    prompts: prompts of the B samples. media: every tensor has the leading dimension B. rates: rates of the media.
    weight_version: version of the weights that sampled.
    """

    prompts: tuple[Prompt, ...]
    media: Media
    rates: Rates
    weight_version: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def indices(self) -> Tensor:
        """Positions of the samples in the step, int64 [B], on the host."""
        return torch.tensor([prompt.index for prompt in self.prompts])

    def to(self, device: torch.device | str) -> Self:
        """Return the same samples on another device."""
        return replace(
            self, **{f.name: _map_tensors(getattr(self, f.name), lambda t: t.to(device)) for f in fields(self)}
        )

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """Return the samples at the positions `indices` of this batch, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.long).tolist()
        names = [f.name for f in fields(self) if f.name not in SHARED]
        return replace(self, **{name: _select_rows(getattr(self, name), rows) for name in names})

    def split(self, size: int) -> list[Self]:
        """Return consecutive pieces of `size` samples; the last may be smaller."""
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        return [self.select(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the samples of `parts`; answers and conditioning with a mask are padded to the longest.

        Raises:
            ValueError: parts differ in something that all samples of a batch share: schedule, parameters, rates, weight
                version, or the shape of a tensor without its batch dimension.
        """
        whole: dict[str, Any] = {}
        for f in fields(parts[0]):
            values = [getattr(part, f.name) for part in parts]
            if f.name not in SHARED and all(value is not None for value in values):
                whole[f.name] = _concatenated(values, f.name)
                continue
            equal = torch.equal if f.name == "sigmas" else operator.eq
            if not all(equal(value, values[0]) for value in values):
                raise ValueError(f"parts must share {f.name}, got {values}")
        return replace(parts[0], **whole)


@dataclass(frozen=True)
class Trajectory(Samples):
    """Samples with their K stochastic steps; other steps are not kept.

    x, x_next: latents before and after each kept step, [B, K, ...]. sde_steps: their indices, int64 [B, K]. sigmas: the
    whole schedule, [S + 1]. rollout_log_prob: the sampling policy's log-probabilities, [B, K]; rollout_mean:
    [B, K, ...] or None. cond: the model's conditioning. x0: clean latents, [B, ...]. params: sampling parameters.
    """

    x: Tensor
    x_next: Tensor
    sde_steps: Tensor
    sigmas: Tensor
    rollout_log_prob: Tensor
    rollout_mean: Tensor | None
    cond: Cond
    x0: Tensor
    params: Params

    @property
    def num_kept(self) -> int:
        """Number of kept steps, K."""
        return self.sde_steps.shape[1]

    def sigma(self, k: int) -> Tensor:
        """Return the noise levels [B] at which the k-th kept step starts."""
        return self.sigmas[self.sde_steps[:, k]]

    def sigma_next(self, k: int) -> Tensor:
        """Return the noise levels [B] at which the k-th kept step ends."""
        return self.sigmas[self.sde_steps[:, k] + 1]

    def take_steps(self, steps: slice | Tensor) -> "Trajectory":
        """Return the same samples with only some of their kept steps: a slice, or indices per sample, [B, k]."""
        rows = slice(None) if isinstance(steps, slice) else torch.arange(len(self), device=steps.device)[:, None]
        fields = {name: getattr(self, name) for name in OF_STEPS}
        return replace(self, **{name: value[rows, steps] for name, value in fields.items() if value is not None})

    def trim(self) -> "Trajectory":
        """Return the same samples without the last text positions if no mask has them: padding for longer texts."""
        cond = dict(self.cond)
        for name in _padded_entries(cond):
            columns = cond[f"{name}_mask"].any(dim=0).nonzero()
            length = int(columns[-1]) + 1 if len(columns) else 0
            cond |= {key: cond[key][:, :length] for key in (name, f"{name}_mask")}
        return replace(self, cond=cond)


class WeightedEngine(Protocol):
    """An engine that samples with a trainer's weights."""

    shares_weights: bool  # True if its net is the trainer's, so that a sync moves nothing
    is_exact: bool  # True if a step replayed by the trainer under equal weights is bit-identical
    moved_bytes: int  # bytes moved by the last load_weights

    @property
    def net(self) -> nn.Module:
        """Module that samples, which may be the trainer's."""

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Move the trainer's parameters into the engine's storage where possible; return the bytes saved."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy named weights into the engine as `version`."""

    def sleep(self) -> None:
        """Free the device memory that only sampling needs."""

    def wake(self) -> None:
        """Undo `sleep`; an engine that does not share weights may need the next `load_weights` before it samples."""

    def close(self) -> None:
        """Free the engine's resources; it cannot be used afterwards."""


class Engine(WeightedEngine, Protocol):
    """An engine that samples trajectories for prompts. `omni_rollout.testing.check_engine` tests the contract."""

    @property
    def parts(self) -> Parts:
        """Loaded parts, for `Model.decode` and `Model.encode_media`."""

    def generate(self, prompts: Sequence[Prompt], params: Params) -> Trajectory:
        """Return one sample per prompt, in order."""

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Do the host's part of the next `generate` while the device is busy; this does not change any result."""

    def condition(self, prompts: Sequence[Prompt], params: Params) -> Cond:
        """Return the conditioning of `generate`; distinct texts and images are encoded once and cached."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; copies from the host do not block."""
    is_copied = tensor.device.type == "cpu" and device.type not in ("cpu", "meta")
    return (tensor.pin_memory() if is_copied else tensor).to(device, non_blocking=True)


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the rows of a tensor on any device, without blocking the host."""
    return tensor[to_device(torch.tensor(rows, dtype=torch.long), tensor.device)]


def join(batches: Sequence[Mapping[str, Tensor]], *, dim: int, what: str) -> dict[str, Tensor]:
    """Concatenate tensors with equal names along the batch dimension; those with a mask are padded along `dim`.

    dim: 1 for batches [B, T, ...]; 0 for single samples [T, ...], which are stacked. what: the argument's name in
    messages.

    Raises:
        ValueError: names, or the shapes of tensors without a mask, differ.
    """
    names = batches[0].keys()
    for batch in batches:
        if batch.keys() != names:
            raise ValueError(f"{what} must have the same entries in every part, got {sorted(names ^ batch.keys())}")
    padded = {key for name in _padded_entries(batches[0]) for key in (name, f"{name}_mask")}
    joined = {}
    for name in names:
        tensors = [batch[name] for batch in batches]
        if name in padded:
            length = max(tensor.shape[dim] for tensor in tensors)
            tensors = [pad(t, [0, 0] * (t.dim() - dim - 1) + [0, length - t.shape[dim]]) for t in tensors]
        joined[name] = _joined(tensors if dim else [t[None] for t in tensors], f"{what}[{name!r}]")
    return joined


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a field's value with `change` applied to its tensors."""
    if isinstance(value, dict):
        return {name: _map_tensors(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, Tensor) else value


def _select_rows(value: Any, rows: Sequence[int]) -> Any:
    """Return the rows of a field's value that has one row per sample."""
    if isinstance(value, tuple):
        return tuple(value[i] for i in rows)
    return (
        value.select(rows)
        if isinstance(value, Samples)
        else _map_tensors(value, lambda tensor: take_rows(tensor, rows))
    )


def _concatenated(values: Sequence[Any], what: str) -> Any:
    """Return the concatenated values of a field that has one row per sample."""
    if isinstance(values[0], Samples):
        return values[0].cat(values)
    if isinstance(values[0], tuple):
        return tuple(chain.from_iterable(values))
    return _joined(values, what) if isinstance(values[0], Tensor) else join(values, dim=1, what=what)


def _joined(tensors: Sequence[Tensor], what: str) -> Tensor:
    shapes = sorted({tuple(tensor.shape[1:]) for tensor in tensors})
    if len(shapes) > 1:
        raise ValueError(f"{what} must have one shape for all samples of a batch, got {shapes}")
    return torch.cat(list(tensors))


def _padded_entries(cond: Mapping[str, Tensor]) -> list[str]:
    """Return the names of entries whose length depends on the text: those with a mask."""
    return [name for name in cond if f"{name}_mask" in cond]
