"""The ratio gate: a check that an update starts from the policy that sampled."""

import torch
from omni_train.dist import Dist, gather_floats
from torch import Tensor


def check_ratio(dist: Dist, deviations: list[Tensor], tolerance: float, step: int) -> float:
    """Return the largest |ratio - 1| of all ranks before a step's first update. Every rank calls it.

    Args:
        dist: the ranks.
        deviations: 0-d, one per forward of this rank and as many on every rank: the largest |ratio - 1| of its samples,
            ratio = exp(log_prob - old_log_prob).
        tolerance: largest deviation allowed; 0 where sampling and update share functions, weights and shapes.
        step: of the training loop, for the message.

    Raises:
        RuntimeError: on every rank, where some rank's deviation is larger or NaN. The message names the rank, the
            forward and the causes.
    """
    local = torch.stack(deviations).detach().float()
    by_rank = gather_floats(dist, local).view(dist.world_size, -1).cpu()
    worst = by_rank.max().item()
    if worst <= tolerance:
        return worst
    off = ~(by_rank <= tolerance)  # NaN is off too
    rank, forward = off.nonzero()[0].tolist()
    raise RuntimeError(
        f"step {step}: before the first update the ratio must be 1 within {tolerance}, but is off by {worst:.3g}: in "
        f"{int(off.sum())} of {off.numel()} forwards, first in forward {forward} of rank {rank}. The update does not "
        "compute what the engine sampled with. Causes: other weights (a missed sync), another batch shape, padding, "
        "dtype or attention kernel, another sigma, window or guidance scale."
    )
