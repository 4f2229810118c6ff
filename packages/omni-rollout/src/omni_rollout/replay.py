"""A step of a trajectory taken again: the one way in which training scores what was sampled."""

from omni_sched import Transition
from torch import nn

from omni_rollout.model import Model
from omni_rollout.types import Trajectory


def replay(model: Model, net: nn.Module, trajectory: Trajectory, k: int) -> Transition:
    """The k-th kept step of a trajectory under `net`; equals sampling bit for bit if `net` is what sampled."""
    t, params = trajectory, trajectory.params
    x, sigma = t.x[:, k], t.sigma(k)
    velocity = model.predict_velocity(net, x, sigma, t.cond, params)
    return params.rule(velocity, x, sigma, t.sigma_next(k), noise_level=params.noise_level, x_next=t.x_next[:, k])
