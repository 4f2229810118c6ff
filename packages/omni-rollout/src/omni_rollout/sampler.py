"""The denoising loop, which every engine runs on the modules that it has.

Sampling and training call the same functions of `omni_sched` and the same `predict_velocity`, so that a step scored
before the first update has the sampled log-prob.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import torch
from omni_sched import INITIAL_NOISE, Transition, compress_sigmas, dpmpp_2m_step, euler_step, step_noise
from torch import Tensor, nn

from omni_rollout.types import Prompt, SamplingParams, Trajectory, pad_alike

MAX_CACHED_TEXTS = 512  # up to 4 MB each on the device, for Qwen-Image


class Sampler:
    """Samples with the parts of a diffusion pipeline, and remembers the texts it has encoded.

    family: a module of `omni_rollout.models`. model: has the parts that the family's functions ask for, by diffusers'
    names; what the family's `load` returns is one such model, a pipeline of another engine may be another. Its
    transformer may be sharded and may carry adapters: it is called, never taken apart.
    """

    def __init__(self, family: ModuleType, model: object) -> None:
        self.family = family
        self.model = model
        self.net: nn.Module = model.transformer  # type: ignore[attr-defined]
        self._texts: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, *, weight_version: int) -> Trajectory:
        """One sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Samples of the same prompt and `initial_seed` are one until the first of these steps, and computed once till
        then: the shared prefix of Flow-GRPO-Fast (arXiv 2505.05470).

        Raises:
            ValueError: no prompts, or a size the model does not draw.
        """
        if not prompts:
            raise ValueError("prompts must hold at least one prompt, got none")
        size = {"height": params.height, "width": params.width}
        shape = self.family.latent_shape(self.model, **size)
        if params.num_steps - 1 in params.sde_steps:
            raise ValueError("sde_steps must leave out the last step, whose density degenerates (sigma_next = 0)")
        sigmas = self.family.sigmas(self.model, params.num_steps, **size)
        if params.flash_ratio is not None:
            sigmas = compress_sigmas(sigmas, params.first_after, params.flash_ratio)
        cond = self._condition(prompts, guided=params.guidance_scale > 1)
        device = next(iter(cond.values())).device
        x, kept = self._denoise(prompts, params, sigmas, cond, shape)
        B, K = len(prompts), len(kept)
        return Trajectory(
            x=_stack([before for before, _ in kept], (B, *shape), device),
            x_next=_stack([step.x_next for _, step in kept], (B, *shape), device),
            sde_steps=torch.tensor(params.sde_steps, dtype=torch.long, device=device).expand(B, K),
            sigmas=sigmas.to(device),
            rollout_log_prob=_stack([step.log_prob for _, step in kept], (B,), device),
            rollout_mean=_stack([step.mean for _, step in kept], (B, *shape), device) if params.keep_mean else None,
            cond=cond,
            x0=x,
            media=to_uint8(self.family.decode(self.model, x)),
            prompts=tuple(prompts),
            weight_version=weight_version,
        )

    def _denoise(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        sigmas: Tensor,
        all_cond: dict[str, Tensor],
        shape: Sequence[int],
    ) -> tuple[Tensor, list[tuple[Tensor, Transition]]]:
        """Clean latents [B, ...], and of each stochastic step the latents before it and its transition."""
        first, row_of = _alike(prompts)
        shares = bool(params.sde_steps) and len(first) < len(prompts)
        if not shares:
            first = list(range(len(prompts)))
        cond = {name: tensor[first] for name, tensor in all_cond.items()} if shares else all_cond
        device = next(iter(cond.values())).device
        x = step_noise([_initial_seed(prompts[i]) for i in first], INITIAL_NOISE, shape).to(device)
        kept: list[tuple[Tensor, Transition]] = []
        data, last_sigma = None, None
        for i, (sigma, sigma_next) in enumerate(pairwise(sigmas)):  # on the host: no copy, no waiting for the device
            if shares and i == params.sde_steps[0]:  # samples that have started alike go apart
                x, cond = x[row_of], all_cond
            levels = torch.full((len(x),), float(sigma), device=device)
            velocity = self.family.predict_velocity(self.net, x, levels, cond, guidance_scale=params.guidance_scale)
            if i in params.sde_steps:
                noise = step_noise([prompt.seed for prompt in prompts], i, shape).to(device)
                step = params.step(velocity, x, sigma, sigma_next, noise_level=params.noise_level, noise=noise)
                kept.append((x, step))
                x = step.x_next
            elif params.flash_ratio is not None and i >= params.first_after:
                x, data = dpmpp_2m_step(velocity, x, sigma, sigma_next, last_data=data, last_sigma=last_sigma)
                last_sigma = sigma
            else:
                x = euler_step(velocity, x, sigma, sigma_next)
        return x, kept

    def _condition(self, prompts: Sequence[Prompt], *, guided: bool) -> dict[str, Tensor]:
        """The batch's conditioning: each distinct text is encoded once and remembered."""
        cond = _collate([self._encode(prompt.text) for prompt in prompts])
        if guided:
            # An empty text is what a user leaves out; the released pipeline guides away from one space.
            negatives = _collate([self._encode(prompt.negative or " ") for prompt in prompts])
            cond |= {f"negative_{name}": tensor for name, tensor in negatives.items()}
        return cond

    def _encode(self, text: str) -> dict[str, Tensor]:
        if text not in self._texts:
            if len(self._texts) >= MAX_CACHED_TEXTS:
                self._texts.pop(next(iter(self._texts)))
            self._texts[text] = self.family.encode(self.model, text)
        return self._texts[text]


def _alike(prompts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
    """Of samples that start alike the first one's index, and for each sample its place among those."""
    starts = [(p.text, p.negative, id(p.image), _initial_seed(p)) for p in prompts]
    first = {start: i for i, start in reversed(list(enumerate(starts)))}
    places = {start: place for place, start in enumerate(dict.fromkeys(starts))}
    return sorted(first.values()), [places[start] for start in starts]


def _initial_seed(prompt: Prompt) -> int:
    return prompt.seed if prompt.initial_seed is None else prompt.initial_seed


def to_uint8(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] from images in [0, 1], rounded to the nearest level."""
    return (images * 255).round().to(torch.uint8)


def _collate(texts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Features of single texts as one batch, padded with zeros along their first dimension."""
    return {name: torch.stack(pad_alike([text[name] for text in texts], dim=0)) for name in texts[0]}


def _stack(steps: Sequence[Tensor], shape: Sequence[int], device: torch.device) -> Tensor:
    """Per-step tensors of `shape` [B, ...] as [B, K, ...]; K may be 0."""
    return torch.stack(list(steps), dim=1) if steps else torch.empty(shape[0], 0, *shape[1:], device=device)
