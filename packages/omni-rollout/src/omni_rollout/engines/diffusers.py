"""The embedded engine: the denoising loop in the training process, on the trainer's modules.

It samples with the module object that the trainer updates, so a weight sync moves nothing. It uses the same batch
shape, so a step scored before the first update has exactly the sampled log-probability.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from omni_rollout.conditioning import TEXT_CACHE, TextCache
from omni_rollout.model import Model
from omni_rollout.offload import Offloader
from omni_rollout.sampler import Sampler
from omni_rollout.types import Cond, Params, Parts, Prompt, Trajectory


class DiffusersEngine:
    """Engine that samples with a model's parts, as returned by `model.load`."""

    shares_weights = True
    is_exact = True
    moved_bytes = 0

    def __init__(self, model: Model, parts: Parts, *, texts: TextCache = TEXT_CACHE) -> None:
        self.parts, self.net = parts, parts.net  # the trainer's net
        self.sampler = Sampler(model, parts, texts)
        self.weight_version = 0
        self._offloader: Offloader | None = None

    def generate(self, prompts: Sequence[Prompt], params: Params) -> Trajectory:
        """Return one sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Raises:
            ValueError: there are no prompts, images have several sizes, or the model does not support a size or option.
        """
        return self.sampler.sample(prompts, params, weight_version=self.weight_version)

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Sample the initial noise of the next batch, while the device is busy."""
        self.sampler.prepare(prompts, params)

    def condition(self, prompts: Sequence[Prompt], params: Params) -> Cond:
        """Return the conditioning of `generate`; distinct texts and images are encoded once and cached."""
        return self.sampler.condition(prompts, params)

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Return 0: this engine uses the trainer's parameters."""
        return 0

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy named weights into the net, except those that already share its storage.

        A trainer that trains this engine's net passes none.

        Raises:
            ValueError: the net has no parameter of that name and shape.
        """
        params, self.moved_bytes = dict(self.net.named_parameters()), 0
        for name, tensor in tensors:
            if name not in params or params[name].shape != tensor.shape:
                actual = tuple(params[name].shape) if name in params else "no such parameter"
                raise ValueError(f"tensors must fit the net, got {name} {tuple(tensor.shape)}, have {actual}")
            if params[name].data_ptr() != tensor.data_ptr():
                params[name].copy_(tensor)
                self.moved_bytes += params[name].nbytes
        self.weight_version = version

    def sleep(self) -> None:
        """Offload frozen parts such as the VAE to the host; do nothing on a CPU."""
        if self._offloader is None:
            others = [
                part for part in vars(self.parts).values() if isinstance(part, nn.Module) and part is not self.net
            ]
            self._offloader = Offloader(others, next(self.net.parameters()).device)
        self._offloader.begin()

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._offloader is not None:
            self._offloader.end()

    def close(self) -> None:
        """Do nothing: the caller owns the parts."""
