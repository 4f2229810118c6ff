"""vLLM-Omni's engine on a planned device: a net beside the trainer's, which shares with it what the engine adopts."""

from collections.abc import Collection, Iterable

import torch
from omni_rollout import Model
from omni_rollout.conditioning import TextCache
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_train.planned import PLANNED, PlannedDevice
from torch import Tensor, nn


class PlannedVllmOmni(DiffusersEngine):
    """An engine with parts of its own, all in the dtype, on the planned device.

    quantized: the weights of which an element takes one byte. shared: bytes that the trainer's net has and that this
    engine will adopt: they are there once.
    """

    shares_weights = False
    is_exact = False

    def __init__(
        self,
        model: Model,
        device: PlannedDevice,
        dtype: torch.dtype,
        texts: TextCache,
        *,
        quantized: Collection[str],
        shared: int,
    ) -> None:
        sizes = {name: param.numel() for name, param in model.empty_net().named_parameters()}
        self._saved = sum(sizes[name] for name in quantized) * (dtype.itemsize - 1)
        self._device, self._quantized, self._shared = device, quantized, shared
        device.add(-self._saved - shared)
        super().__init__(model, model.load(device=PLANNED, dtype=dtype), texts=texts)
        self._own = list(self.net.parameters())

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Take the storage of a trainer's parameters; return 0."""
        own = dict(self.net.named_parameters())
        for name, param in params:
            if name not in self._quantized:
                own.pop(name).data = param.data
        self._device.add(self._shared)
        self._own = list(own.values())
        return 0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Go through the weights as they are merged or gathered, one at a time."""
        for _ in tensors:
            pass
        self.weight_version = version

    def sleep(self) -> None:
        """Free all that the trainer has not adopted."""
        super().sleep()
        self._shapes = [param.shape for param in self._own]
        for param in self._own:
            param.data = param.data.new_empty(0)
        self._device.add(self._saved)

    def wake(self) -> None:
        """Undo `sleep`."""
        self._device.add(-self._saved)
        for param, shape in zip(self._own, self._shapes, strict=True):
            param.data = param.data.new_empty(shape)
        super().wake()
