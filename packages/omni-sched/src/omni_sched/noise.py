"""Standard normal noise, a function of a sample's seed and the step alone, and its mixture with data.

Letters: B samples, S denoising steps. A step is 0 .. S-1, or INITIAL_NOISE for the start of a sample at sigma = 1.

The random bits are SHAKE-128 of the pair (seed, step), turned into normals by Box-Muller in float64 on the CPU and
rounded to float32 once. `torch.Generator` is not used, for three reasons. Its CPU engine keeps only the low 32 bits of
a seed, so seeds 2^32 apart, or hashed seeds that agree there by accident, give the same noise. Accelerators have their
own generators and streams. And torch promises the same normals neither across its versions nor across kinds of CPU.
Here distinct pairs get unrelated bits, and two kinds of CPU can differ only where their float64 log, sin or cos differ
and the rounding to float32 shows it: by one unit in the last place, about once in 10^8 elements.
"""

import hashlib
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from omni_sched._levels import Level, check_shapes, on_cpu, on_host, over, per_sample

INITIAL_NOISE = -1  # the step of the noise at sigma = 1, before step 0


def step_noise(seeds: Sequence[int], step: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise for one step of B samples, row b a function of seeds[b] and step alone.

    The same whatever batch, order, rank or device the sample is in: it is made on the CPU, and the caller moves it. A
    smaller shape gets the beginning of what a larger one gets, in row-major order.

    Args:
        seeds: B integers of any size and sign, one per sample; equal seeds give equal rows.
        step: index of the denoising step, or INITIAL_NOISE.
        shape: of one sample, without B.

    Returns:
        [B, *shape], float32, on the CPU, dimensionless.

    Raises:
        ValueError: no seeds, step < INITIAL_NOISE, or a negative size in shape.
        TypeError: a seed or step that is no integer.
    """
    if len(seeds) == 0:
        raise ValueError("seeds must hold at least one seed, got none")
    if operator.index(step) < INITIAL_NOISE:
        raise ValueError(f"step must be >= {INITIAL_NOISE} (the initial noise), got {step}")
    if min(shape, default=0) < 0:
        raise ValueError(f"shape must hold sizes >= 0, got {tuple(shape)}")
    rows = [_normal(f"step_noise {operator.index(seed)} {operator.index(step)}", math.prod(shape)) for seed in seeds]
    return torch.stack(rows).view(len(rows), *shape)


def add_noise(x0: Tensor, noise: Tensor, sigma: Level) -> Tensor:
    """Data noised to level sigma: `(1 - sigma) * x0 + sigma * noise`.

    Args:
        x0: [B, ...], latent units: data.
        noise: [B, ...], standard normal.
        sigma: scalar or [B], noise level in [0, 1].

    Returns:
        [B, ...], float32, differentiable in x0 and noise.

    Raises:
        ValueError: shapes differ; or, seen on the CPU only, a sigma outside [0, 1].

    The forward process of rectified flow, arXiv 2209.03003, eq. 1; there, data is at time 1.
    """
    check_shapes(x0, noise=noise)
    if on_host(sigma) and not ((on_cpu(sigma) >= 0) & (on_cpu(sigma) <= 1)).all():
        raise ValueError(f"sigma must be in [0, 1], got {sigma}")
    level = over(per_sample(x0, "sigma", sigma), x0)
    return (1 - level) * x0.float() + level * noise.float()


def _normal(key: str, count: int) -> Tensor:
    """[count] standard normals, float32, from the bits of key."""
    num_pairs = (count + 1) // 2
    bits = bytearray(hashlib.shake_128(key.encode()).digest(8 * max(num_pairs, 1)))
    words = torch.frombuffer(bits, dtype=torch.int32).double()
    uniform = (words + (2**31 + 0.5)) / 2**32  # inside (0, 1), so the logarithm is finite and |normal| < 6.8
    first, second = uniform.view(-1, 2).unbind(1)
    radius, angle = (-2 * first.log()).sqrt(), 2 * math.pi * second
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).flatten()[:count].float()
