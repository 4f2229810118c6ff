"""The embedded engine: the denoising loop in the training process, on the training process's modules.

It samples with the very module object that the trainer updates, so a weight sync moves nothing, and at the same batch
shape, so that a step scored before the first update has exactly the sampled log-prob.
"""

from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

from omni_rollout.sampler import Sampler
from omni_rollout.types import Prompt, SamplingParams, Trajectory


class DiffusersEngine:
    """Samples with the parts of a diffusers pipeline.

    family: a module of `omni_rollout.models`. model: what its `load` returned.
    """

    def __init__(self, family: ModuleType, model: object, *, weight_version: int = 0) -> None:
        self.sampler = Sampler(family, model)
        self.net: nn.Module = self.sampler.net
        self.weight_version = weight_version

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Trajectory:
        """One sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Raises:
            ValueError: no prompts, or a size the model does not draw.
        """
        return self.sampler.sample(prompts, params, weight_version=self.weight_version)

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copies named weights into the transformer, those that are the same storage already excepted.

        An engine that samples with the trainer's own module is passed none: the weights are there.

        Raises:
            ValueError: a name or a shape that the transformer does not have.
        """
        own = dict(self.net.named_parameters())
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape:
                have = tuple(own[name].shape) if name in own else "no such parameter"
                raise ValueError(f"tensors must fit the transformer, got {name} {tuple(tensor.shape)}, have {have}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing: the weights are the trainer's and no workspace outlives `generate`."""

    def wake(self) -> None:
        """Nothing, as `sleep`."""
