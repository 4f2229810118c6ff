"""The denoising loop of all engines, and the replay of a sampled step.

Sampling and training call the same functions of `omni_sched` and the same `predict_velocity`, so a step scored before
the first update has the sampled log-probability.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, pairwise

import torch
from omni_sched import INITIAL_NOISE, Transition, compress_sigmas, dpmpp_2m_step, euler_step, step_noise
from torch import Tensor, nn

from omni_rollout.conditioning import TEXT_CACHE, Conditioner, TextCache
from omni_rollout.model import Model
from omni_rollout.shared_starts import SharedStarts
from omni_rollout.types import Cond, Media, Params, Parts, Prompt, Trajectory, to_device


class Sampler:
    """Sampler with a model's parts.

    parts: from `model.load`, or an engine's parts under the same names. The net is only called, so it may be sharded
    and may have adapters. texts: settings of the cache of encoded texts and references.
    """

    def __init__(self, model: Model, parts: Parts, texts: TextCache = TEXT_CACHE) -> None:
        self.model = model
        self.parts = parts
        self.condition = Conditioner(model, parts, texts)
        # Only the last noise: `prepare` samples it for the next `sample`.
        self._start_noise = lru_cache(1)(lambda seeds, shape: step_noise(seeds, INITIAL_NOISE, shape))
        self._starts = SharedStarts()

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Prompt], params: Params, *, weight_version: int, cond: Cond | None = None
    ) -> Trajectory:
        """Return one sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Samples with equal prompts and `initial_seed` share the steps before the first kept one (see `shared_starts`).

        cond: conditioning of these samples; by default from `condition`.

        Raises:
            ValueError: there are no prompts, they have sound or several sizes, or the model does not support a size,
                option or number of images.
        """
        check_prompts(prompts, self.model, params)
        self.model.check(params)
        shape, sigmas = self.model.latent_shape(params), self.model.sigmas(params)
        sigmas = compress_sigmas(sigmas, params.first_after, params.compress_ratio)
        cond = self.condition(prompts, params) if cond is None else cond
        x, kept = self._denoise(prompts, params, sigmas, cond, shape, weight_version)
        media, rates = self.model.decode(self.parts, x, cond, params) if params.decode else ({}, {})
        B, K, device = len(prompts), len(kept), x.device
        return Trajectory(
            prompts=tuple(prompts),
            media=to_wire(media),
            rates=rates,
            weight_version=weight_version,
            x=_stack([before for before, _ in kept], (B, *shape), device),
            x_next=_stack([step.x_next for _, step in kept], (B, *shape), device),
            sde_steps=to_device(torch.tensor(params.sde_steps, dtype=torch.long), device).expand(B, K),
            sigmas=to_device(sigmas, device),
            rollout_log_prob=_stack([step.log_prob for _, step in kept], (B,), device),
            rollout_mean=_stack([step.mean for _, step in kept], (B, *shape), device) if params.keep_mean else None,
            cond=cond,
            x0=x,
            params=params,
        )

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Sample the initial noise of the next `sample`, unless it is shared; this does not change any result."""
        if all(prompt.initial_seed is None for prompt in prompts):
            self._noise(prompts, self.model.latent_shape(params))

    def _denoise(
        self, prompts: Sequence[Prompt], params: Params, sigmas: Tensor, cond: Cond, shape: Sequence[int], version: int
    ) -> tuple[Tensor, list[tuple[Tensor, Transition]]]:
        """Return clean latents [B, ...], and for each stochastic step the latents before it and its transition."""
        if params.sde_steps and any(prompt.initial_seed is not None for prompt in prompts):
            x, start = self._shared_start(prompts, params, sigmas, cond, shape, version), params.sde_steps[0]
        else:
            x, start = to_device(self._noise(prompts, shape), next(iter(cond.values())).device), 0
        kept, data, last_sigma = list[tuple[Tensor, Transition]](), None, None
        for i, (sigma, sigma_next) in islice(enumerate(pairwise(sigmas)), start, None):  # on the host
            velocity = self._velocity(x, sigma, cond, params)
            if i in params.sde_steps:
                noise = to_device(step_noise([prompt.seed for prompt in prompts], i, shape), x.device)
                step = params.rule(velocity, x, sigma, sigma_next, noise_level=params.noise_level, noise=noise)
                kept.append((x, step))
                x = step.x_next
            elif params.solver == "dpmpp" and i >= params.first_after:
                x, data = dpmpp_2m_step(velocity, x, sigma, sigma_next, last_data=data, last_sigma=last_sigma)
                last_sigma = sigma
            else:
                x = euler_step(velocity, x, sigma, sigma_next)
        return x, kept

    def _shared_start(
        self, prompts: Sequence[Prompt], params: Params, sigmas: Tensor, cond: Cond, shape: Sequence[int], version: int
    ) -> Tensor:
        """Return the latents [B, ...] before the first stochastic step, computed once for samples with equal starts."""

        def compute(places: list[int]) -> Tensor:
            rows = {name: tensor[places] for name, tensor in cond.items()}
            x = to_device(self._noise([prompts[i] for i in places], shape), next(iter(cond.values())).device)
            for sigma, sigma_next in islice(pairwise(sigmas), params.sde_steps[0]):
                x = euler_step(self._velocity(x, sigma, rows, params), x, sigma, sigma_next)
            return x

        return self._starts.latents(prompts, (version, params), compute)

    def _noise(self, prompts: Sequence[Prompt], shape: Sequence[int]) -> Tensor:
        """Return the samples' initial noise [B, ...]."""
        return self._start_noise(tuple(prompt.start_seed for prompt in prompts), tuple(shape))

    def _velocity(self, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        """Return the net's velocity [B, ...] at latents x [B, ...] at one noise level."""
        levels = torch.full((len(x),), float(sigma), device=x.device)
        return self.model.predict_velocity(self.parts.net, x, levels, cond, params)


def replay(model: Model, net: nn.Module, trajectory: Trajectory, k: int) -> Transition:
    """Return the k-th kept step of a trajectory under `net`; bit-identical to sampling if `net` sampled it."""
    t, params, x, sigma = trajectory, trajectory.params, trajectory.x[:, k], trajectory.sigma(k)
    velocity = model.predict_velocity(net, x, sigma, t.cond, params)
    return params.rule(velocity, x, sigma, t.sigma_next(k), noise_level=params.noise_level, x_next=t.x_next[:, k])


def to_wire(media: Media) -> Media:
    """Return images and videos in [0, 1] as uint8, rounded to the nearest level, and sound unchanged."""
    return {
        kind: (tensor * 255).round().to(torch.uint8).contiguous() if kind in ("image", "video") else tensor
        for kind, tensor in media.items()
    }


def check_images(model: Model, sizes: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError unless a prompt of the model may have references of these heights and widths."""
    if len(sizes) not in model.IMAGES:
        minimum, maximum = model.IMAGES[0], model.IMAGES[-1]
        span = f"{minimum} to {maximum}" if maximum > minimum else minimum or "no"
        raise ValueError(f"prompts of a {model.config['_class_name']} must have {span} images, got {len(sizes)}")
    for height, width in sizes:
        model.check_image(height, width)


def check_prompts(prompts: Sequence[Prompt], model: Model, params: Params) -> None:
    """Raise ValueError unless the prompts can be one batch of the model."""
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    if len(references := {prompt.shapes[1] for prompt in prompts}) > 1:
        raise ValueError(f"prompts of one batch must have equally many images of equal sizes, got {references}")
    if others := {prompt.size for prompt in prompts} - {None, (params.height, params.width)}:
        raise ValueError(f"prompts of one batch must have its size, {params.height} x {params.width}, got {others}")
    check_images(model, [(len(image), image.shape[1]) for image in prompts[0].images])
    if any(prompt.audio is not None for prompt in prompts):
        raise ValueError(f"prompts of a {model.config['_class_name']} must have no audio, got some")


def _stack(steps: Sequence[Tensor], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return tensors of K steps, each of `shape` [B, ...], as [B, K, ...]; K may be 0."""
    return torch.stack(list(steps), dim=1) if steps else torch.empty(shape[0], 0, *shape[1:], device=device)
