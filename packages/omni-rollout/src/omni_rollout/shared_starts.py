"""The steps before the first stochastic one, computed once for samples with an equal start.

This is the shared prefix of Flow-GRPO-Fast (arXiv 2505.05470). Samples with equal prompt and `initial_seed` have equal
starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from omni_rollout.types import Prompt


@dataclass
class Prefix:
    """Latents x [n, ...] before the first stochastic step of n `starts`, and the seeds of samples that used them.

    prompts: of the first of these samples; they keep the images alive whose ids `starts` has.
    """

    starts: object
    x: Tensor
    prompts: Sequence[Prompt]
    seeds: set[int]


class SharedStarts:
    """The latents of the last batch, which a next one with the same starts and new samples reuses, as of one group."""

    def __init__(self) -> None:
        self._last: Prefix | None = None

    def latents(self, prompts: Sequence[Prompt], facts: object, compute: Callable[[list[int]], Tensor]) -> Tensor:
        """Return the latents [B, ...] of samples before their first stochastic step.

        facts: what they depend on beside the prompts. compute: returns those of some of the samples, by their places.
        """
        first, row_of = _distinct_starts(prompts)
        starts = facts, [_start(prompts[i]) for i in first]
        seeds, last = {prompt.seed for prompt in prompts}, self._last
        if not last or last.starts != starts or last.seeds & seeds:  # a sample is repeated: the weights may differ
            last = self._last = Prefix(starts, compute(first), prompts, set())
        last.seeds |= seeds
        return last.x[row_of]


def _distinct_starts(prompts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
    """Return the index of the first sample of each distinct start, and for each sample its position among those."""
    starts = [_start(prompt) for prompt in prompts]
    distinct = [*dict.fromkeys(starts)]
    return [starts.index(start) for start in distinct], [distinct.index(start) for start in starts]


def _start(prompt: Prompt) -> tuple[str | int, ...]:
    """Return what samples with an equal start share: texts, ids of images, and the seed of the noise."""
    return prompt.text, prompt.negative, *map(id, prompt.images), prompt.start_seed
