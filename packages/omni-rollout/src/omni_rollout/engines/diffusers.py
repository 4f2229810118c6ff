"""The embedded engine: the denoising loop in the training process, on the training process's modules.

It samples with the very module object that the trainer updates, so a weight sync moves nothing, and at the same batch
shape, so that a step scored before the first update has exactly the sampled log-prob.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from omni_rollout.conditioning import TEXT_CACHE, TextCache
from omni_rollout.model import Model
from omni_rollout.offload import Rest
from omni_rollout.sampler import Sampler
from omni_rollout.types import Cond, Params, Parts, Prompt, Trajectory


class DiffusersEngine:
    """Samples with a model's own parts, as `model.load` returns them."""

    shares_weights = True
    is_exact = True
    moved_bytes = 0

    def __init__(self, model: Model, parts: Parts, *, weight_version: int = 0, texts: TextCache = TEXT_CACHE) -> None:
        self.parts, self.net = parts, parts.net  # which is the trainer's own
        self.sampler = Sampler(model, parts, texts)
        self.weight_version = weight_version
        self._rest: Rest | None = None

    def generate(self, prompts: Sequence[Prompt], params: Params) -> Trajectory:
        """One sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Raises:
            ValueError: no prompts, images of several sizes, or a size or option that the model lacks.
        """
        return self.sampler.sample(prompts, params, weight_version=self.weight_version)

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Draw the noise that the next batch starts from, which a device that is busy need not wait for then."""
        self.sampler.prepare(prompts, params)

    def condition(self, prompts: Sequence[Prompt], params: Params) -> Cond:
        """The conditioning of samples, as `generate` has it; texts and images are encoded once and remembered."""
        return self.sampler.condition(prompts, params)

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """0: the trainer's parameters are this engine's own."""
        return 0

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copies named weights into the net, those that are the same storage already excepted.

        A trainer that trains this engine's net passes none: the weights are there.

        Raises:
            ValueError: a name or a shape that the net does not have.
        """
        own, self.moved_bytes = dict(self.net.named_parameters()), 0
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape:
                have = tuple(own[name].shape) if name in own else "no such parameter"
                raise ValueError(f"tensors must fit the net, got {name} {tuple(tensor.shape)}, have {have}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
                self.moved_bytes += own[name].nbytes
        self.weight_version = version

    def sleep(self) -> None:
        """Takes what is not trained, such as the VAE, off the accelerator; on a CPU nothing happens."""
        if self._rest is None:
            others = [
                part for part in vars(self.parts).values() if isinstance(part, nn.Module) and part is not self.net
            ]
            self._rest = Rest(others, next(self.net.parameters()).device)
        self._rest.begin()

    def wake(self) -> None:
        """Undoes `sleep`."""
        if self._rest is not None:
            self._rest.end()

    def close(self) -> None:
        """Nothing: the parts are whoever's who loaded them."""
