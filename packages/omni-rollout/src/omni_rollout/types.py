"""What goes into an engine and what comes out of it: plain frozen data.

Shapes: B samples, S denoising steps, K stochastic (trained) steps. `sigma` is the noise level in [0, 1], 1 = noise,
0 = data; latents, means and log-probs are float32; a log-prob is in nats per latent element.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from omni_sched import Transition, compress_sigmas, sde_step
from torch import Tensor, nn
from torch.nn.functional import pad


@dataclass(frozen=True)
class Prompt:
    """One sample to draw: a text, the group it is compared within, and the seed of its noise.

    initial_seed: the seed of the noise it starts from, if that is another; samples of a group that share it start alike
    and differ by what the stochastic steps inject.
    """

    text: str
    group: int
    seed: int
    negative: str = ""
    image: Tensor | None = None
    meta: dict[str, object] = field(default_factory=dict)
    initial_seed: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How all samples of one call are drawn.

    num_steps: S. height, width: pixels. guidance_scale: classifier-free guidance, off at 1.
    step: the stochastic step function of omni_sched, taken at the step indices `sde_steps`; the others are Euler's.
    noise_level: strength of the injected noise, as that function defines it. keep_mean: also store the steps' means.
    flash_ratio: if given, the steps after the last stochastic one are DPM-Solver++(2M)'s, and only this share of them,
    in (0, 1], is left; the schedule of the trajectory is then the shorter one (MixGRPO-Flash, arXiv 2507.21802).
    """

    num_steps: int
    height: int
    width: int
    num_frames: int = 1
    guidance_scale: float = 1.0
    step: Callable[..., Transition] = sde_step
    noise_level: float = 0.0
    sde_steps: tuple[int, ...] = ()
    keep_mean: bool = False
    flash_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be >= 1, got {self.num_steps}")
        if list(self.sde_steps) != sorted({s for s in self.sde_steps if 0 <= s < self.num_steps}):
            raise ValueError(f"sde_steps must be increasing indices in [0, {self.num_steps}), got {self.sde_steps}")
        if self.sde_steps and self.noise_level <= 0:
            raise ValueError(f"noise_level must be > 0 where there are sde_steps, got {self.noise_level}")
        if self.flash_ratio is not None and not 0 < self.flash_ratio <= 1:
            raise ValueError(f"flash_ratio must be in (0, 1] or None, got {self.flash_ratio}")

    @property
    def first_after(self) -> int:
        """The step after the last stochastic one; 0 where all are deterministic."""
        return self.sde_steps[-1] + 1 if self.sde_steps else 0

    @property
    def num_flash_steps(self) -> int:
        """Steps that are taken: num_steps, or fewer with flash_ratio."""
        if self.flash_ratio is None:
            return self.num_steps
        return len(compress_sigmas(torch.zeros(self.num_steps + 1), self.first_after, self.flash_ratio)) - 1


@dataclass(frozen=True)
class Trajectory:
    """B samples and the K stochastic steps of each; the other steps are not kept.

    x, x_next: latents before and after each kept step, [B, K, ...]. sde_steps: their indices, int64 [B, K].
    sigmas: the whole schedule, [S + 1]. rollout_log_prob: the sampling policy's, [B, K]; rollout_mean: [B, K, ...] or
    None. cond: the model's conditioning, every tensor with leading dimension B. x0: clean latents, [B, ...].
    media: uint8 images [B, 3, H, W]. prompts: B of them. weight_version: of the weights that sampled.
    """

    x: Tensor
    x_next: Tensor
    sde_steps: Tensor
    sigmas: Tensor
    rollout_log_prob: Tensor
    rollout_mean: Tensor | None
    cond: dict[str, Tensor]
    x0: Tensor
    media: Tensor
    prompts: tuple[Prompt, ...]
    weight_version: int

    def __len__(self) -> int:
        return len(self.prompts)

    def sigma(self, k: int) -> Tensor:
        """The noise levels [B] at which the k-th kept step starts."""
        return self.sigmas[self.sde_steps[:, k]]

    def sigma_next(self, k: int) -> Tensor:
        """The noise levels [B] at which the k-th kept step ends."""
        return self.sigmas[self.sde_steps[:, k] + 1]

    def to(self, device: torch.device | str) -> "Trajectory":
        """The same samples on another device."""
        return self._map(lambda t: t.to(device), sigmas=self.sigmas.to(device))

    def select(self, indices: Sequence[int] | Tensor) -> "Trajectory":
        """The samples at `indices`, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        prompts = tuple(self.prompts[i] for i in rows.tolist())
        return self._map(lambda t: t[rows.to(t.device)], sigmas=self.sigmas, prompts=prompts)

    def split(self, size: int) -> list["Trajectory"]:
        """Consecutive pieces of `size` samples; the last may be smaller."""
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        return [self.select(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    @staticmethod
    def cat(parts: Sequence["Trajectory"]) -> "Trajectory":
        """All samples of `parts`, which share schedule, number of kept steps and weight version."""
        first = parts[0]
        for part in parts[1:]:
            if not torch.equal(part.sigmas, first.sigmas) or part.x.shape[1:] != first.x.shape[1:]:
                raise ValueError("parts must share sigmas and the shape of x after the batch dimension")
            if part.weight_version != first.weight_version:
                raise ValueError(f"parts must share weight_version, got {sorted({p.weight_version for p in parts})}")
        whole = {f.name: getattr(first, f.name) for f in fields(Trajectory)}
        for name, value in whole.items():
            if isinstance(value, Tensor) and name != "sigmas":
                whole[name] = torch.cat([getattr(p, name) for p in parts])
        whole["cond"] = {k: torch.cat(pad_alike([p.cond[k] for p in parts], dim=1)) for k in first.cond}
        whole["prompts"] = tuple(prompt for p in parts for prompt in p.prompts)
        return Trajectory(**whole)

    def trim(self) -> "Trajectory":
        """The same samples without the zeros with which all their conditioning ends: the padding of longer texts."""
        return replace(self, cond={name: _trim(tensor) for name, tensor in self.cond.items()})

    def _map(self, change: Callable[[Tensor], Tensor], **others: Any) -> "Trajectory":
        changed: dict[str, Any] = {
            f.name: change(getattr(self, f.name))
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor) and f.name not in others
        }
        return replace(self, cond={k: change(v) for k, v in self.cond.items()}, **changed, **others)


class Engine(Protocol):
    """Anything that turns prompts into trajectories. `omni_rollout.testing.check_engine` holds the contract."""

    @property
    def net(self) -> nn.Module:
        """The transformer that samples, which may be the trainer's own."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Trajectory:
        """One sample per prompt, in order."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes over named weights and counts as `version` from now on."""

    def sleep(self) -> None:
        """Frees the device memory that only sampling needs."""

    def wake(self) -> None:
        """Undoes `sleep`."""


def _trim(tensor: Tensor) -> Tensor:
    """A batch [B, T, ...] without the last places along T where every sample is 0."""
    used = tensor.ne(0).transpose(0, 1).flatten(1).any(dim=1).nonzero()
    return tensor[:, : int(used[-1]) + 1] if len(used) else tensor


def pad_alike(tensors: Sequence[Tensor], *, dim: int) -> list[Tensor]:
    """The tensors with zeros appended along `dim`, up to the longest."""
    length = max(t.shape[dim] for t in tensors)
    return [pad(t, [0, 0] * (t.dim() - dim - 1) + [0, length - t.shape[dim]]) for t in tensors]
