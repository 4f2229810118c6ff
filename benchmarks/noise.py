"""The time of `step_noise` against that of `torch.randn`, for a batch of 512 x 512 pixel Qwen-Image latents.

python benchmarks/noise.py
"""

import time
from collections.abc import Callable

import engines
import torch
from omni_sched import step_noise

SHAPE = (16, 64, 64)
BATCH = 4


def fastest_s(function: Callable[[], object], runs: int = 7) -> float:
    """The shortest of some runs, in seconds: what the machine can do when nothing else asks for it."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    print(engines.stamp())
    ours = fastest_s(lambda: step_noise(range(BATCH), 0, SHAPE))
    plain = fastest_s(lambda: torch.randn(BATCH, *SHAPE))
    print(f"step_noise {1000 * ours:.1f} ms, torch.randn {1000 * plain:.1f} ms, ratio {ours / plain:.2f}")


if __name__ == "__main__":
    main()
