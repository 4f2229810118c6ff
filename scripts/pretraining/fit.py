"""The training loop of all tiny models."""

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Schedule = Callable[[int, int], float]  # maps a step and the number of steps to a factor on the learning rate


def cosine(step: int, steps: int, warmup: int = 50) -> float:
    """Return the factor on the learning rate: linear warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def fit(
    name: str,
    weights: Iterable[nn.Parameter],
    loss_of: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    schedule: Schedule = cosine,
) -> None:
    """Minimize a loss, a function of the step, with AdamW without weight decay; gradients are clipped to norm 1.

    It prints a line every hundred steps.
    """
    params, start = list(weights), time.time()
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0, betas=betas)
    for step in range(steps):
        loss = loss_of(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"{name} {step}/{steps} loss {loss.item():.4f} {time.time() - start:.0f} s", flush=True)
