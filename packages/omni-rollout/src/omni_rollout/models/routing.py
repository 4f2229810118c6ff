"""Mixtures of experts: their load, and replay of the sampled routes in the update.

The net of such a model has a `Routing`, which it calls once per forward pass with the choices of all its routers;
its texts are the model's `ids`. If sampling and update round differently, as in different batches, a near tie may send
a token to another expert, and the ratio of the step jumps. Replayed routes prevent this (R3, arXiv 2510.11370).

Shapes: B samples, T text tokens, N further tokens, K kept steps, k experts of a token, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from omni_rollout.model import Model, wrap
from omni_rollout.types import Cond, Engine, Params, Prompt, Trajectory

Chosen = tuple[Tensor, Tensor]  # experts of text tokens and of all later tokens, see `Routing`


class Routing(nn.Module):
    """Attachment point for hooks that read the choices of a net's routers."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        if num_experts > 256:
            raise ValueError(f"num_experts must be <= 256, the values of a byte, got {num_experts}")
        self.num_experts = num_experts

    def forward(self, text: Tensor, others: Tensor) -> Chosen:
        """Return the experts of text tokens [B, T, layers, k] and of all later tokens [B, N, layers, k], uint8."""
        return text, others


def find_routing(net: nn.Module) -> Routing | None:
    """Return the routing of a net with a mixture of experts, else None."""
    return next((module for module in net.modules() if isinstance(module, Routing)), None)


class ExpertLoad:
    """Number of tokens per expert and layer, including padding, over the counted forward passes.

    routing.register_forward_hook(load.count)
    """

    def __init__(self, num_experts: int, *, counts: Callable[[], bool] = lambda: True) -> None:
        self.num_experts, self.is_counted, self.counts = num_experts, counts, torch.zeros(0)

    def clear(self) -> None:
        """Restart the count."""
        self.counts = torch.zeros(0)

    def metrics(self) -> dict[str, float]:
        """Return the busiest expert's relative load, the entropy over its maximum, and the share of idle experts."""
        if not self.counts.numel():
            return {}
        share = self.counts / self.counts.sum(dim=1, keepdim=True)
        entropy = torch.special.entr(share).sum(dim=1).mean() / torch.tensor(self.num_experts).log()
        values = {"busiest": share.max() * self.num_experts, "entropy": entropy, "idle": (share == 0).float().mean()}
        return {f"rollout/experts_{name}": value.item() for name, value in values.items()}

    def count(self, module: nn.Module, args: Chosen, chosen: Chosen) -> None:
        """Count the choices of a forward pass of a `Routing`; a forward hook."""
        if torch.is_grad_enabled() or not self.is_counted():
            return
        experts = torch.cat([choice.flatten(0, 1) for choice in chosen]).transpose(0, 1).flatten(1).long()
        counts = torch.zeros(len(experts), self.num_experts, device=experts.device)
        counts.scatter_add_(1, experts, torch.ones_like(experts, dtype=counts.dtype))
        self.counts = counts + self.counts if self.counts.numel() else counts


def replay_routes(model: Model, engine: Engine, routing: Routing) -> tuple[Model, Engine]:
    """Return a model that replays routes, and an engine that stores the routes of the kept steps in `cond`.

    Routes take a byte for each token, layer, expert of the token and kept step; those of the text are stored once.
    `cond` has `text_routes` [B, T, layers, k] with a mask, `routes` [B, K, N, layers, k], and the noise levels
    `route_levels` [B, K] at which these steps start; with guidance also the negatives of both kinds of routes.
    """
    recorded: list[Chosen] = []

    def keep(module: nn.Module, args: Chosen, chosen: Chosen) -> None:
        recorded.append(chosen)

    def generate_with_routes(prompts: Sequence[Prompt], params: Params) -> Trajectory:
        recorded.clear()
        hook = routing.register_forward_hook(keep)
        try:
            trajectory = engine.generate(prompts, params)
        finally:
            hook.remove()
        if not params.sde_steps:
            return trajectory
        last = len(trajectory.sigmas) - 1  # one forward pass per step; a shared start may have skipped the first ones
        routes = _routes_by_sample(model, trajectory, [recorded[step - last] for step in params.sde_steps])
        return replace(trajectory, cond=trajectory.cond | routes)

    def predict_by_routes(net: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, params: Params) -> Tensor:
        if "route_levels" not in cond:
            return model.predict_velocity(net, x, sigma, cond, params)
        matches = cond["route_levels"] == sigma[:, None]
        torch._assert_async(matches.any(dim=1).all(), "routes must be replayed at their own noise levels")
        rows, steps = torch.arange(len(x), device=x.device), matches.int().argmax(dim=1)
        routes = {name: cond[name][rows, steps] for name in ("routes", "negative_routes") if name in cond}
        return model.predict_velocity(net, x, sigma, cond | routes, params)

    return wrap(model, predict_velocity=predict_by_routes), wrap(engine, generate=generate_with_routes)


def _routes_by_sample(model: Model, trajectory: Trajectory, kept: Sequence[Chosen]) -> dict[str, Tensor]:
    """Return the entries of `cond` for the routers' choices in the kept steps."""
    cond: Mapping[str, Tensor] = trajectory.cond
    sides = ("", "negative_") if model.is_guided(trajectory.params) else ("",)
    texts, others = kept[0][0].chunk(len(sides)), torch.stack([chosen[1] for chosen in kept], dim=1).chunk(len(sides))
    entries = {"route_levels": trajectory.sigmas[trajectory.sde_steps]}
    for side, text, other in zip(sides, texts, others, strict=True):
        mask = cond[f"{side}ids_mask"]
        entries |= {f"{side}text_routes": text[:, : mask.shape[1]], f"{side}text_routes_mask": mask}
        entries[f"{side}routes"] = other
    return entries
