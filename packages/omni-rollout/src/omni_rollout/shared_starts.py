"""The steps before the first stochastic one, computed once for samples with an equal start.

This is the shared prefix of Flow-GRPO-Fast (arXiv 2505.05470). Samples with equal prompts and `initial_seed` have equal
starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from omni_rollout.types import Prompt


@dataclass
class Prefix:
    """Latents x [n, ...] of n `starts` before the first stochastic step, and the seeds of the samples that used them.

    prompts: prompts of the first of these samples, which keep alive the images whose ids are in `starts`.
    """

    starts: object
    x: Tensor
    prompts: Sequence[Prompt]
    seeds: set[int]


class SharedStarts:
    """Latents of the last batch, which the next one reuses if it has the same starts and new samples."""

    def __init__(self) -> None:
        self._last: Prefix | None = None

    def latents(self, prompts: Sequence[Prompt], facts: object, compute: Callable[[list[int]], Tensor]) -> Tensor:
        """Return the latents [B, ...] of samples before their first stochastic step.

        facts: what the latents depend on besides the prompts. compute: returns the latents of some samples, by their
            indices.
        """
        first, row_of = _distinct_starts(prompts)
        starts = facts, [_start_key(prompts[i]) for i in first]
        seeds, last = {prompt.seed for prompt in prompts}, self._last
        if not last or last.starts != starts or last.seeds & seeds:  # a repeated sample may come from other weights
            last = self._last = Prefix(starts, compute(first), prompts, set())
        last.seeds |= seeds
        return last.x[row_of]


def _distinct_starts(prompts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
    """Return the index of the first sample of each distinct start, and each sample's index among those."""
    starts = [_start_key(prompt) for prompt in prompts]
    distinct = [*dict.fromkeys(starts)]
    return [starts.index(start) for start in distinct], [distinct.index(start) for start in starts]


def _start_key(prompt: Prompt) -> tuple[str | int, ...]:
    """Return what samples with an equal start share: texts, ids of images, and the noise's seed."""
    return prompt.text, prompt.negative, *map(id, prompt.images), prompt.start_seed
