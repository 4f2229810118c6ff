"""vLLM-Omni's engine on a planned device: a second net, which shares the weights that it adopts from the trainer's."""

from collections.abc import Collection, Iterable

import torch
from omni_rollout import Model
from omni_rollout.conditioning import TextCache
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_train.planned import PLANNED, PlannedDevice
from torch import Tensor, nn


class PlannedVllmOmni(DiffusersEngine):
    """An engine with its own parts, all in `dtype`, on the planned device.

    quantized: names of weights that take one byte per element. shared: bytes of the trainer's net that this engine will
    adopt, so that they are counted once.
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
        """Use the storage of the trainer's parameters; return 0."""
        unshared = dict(self.net.named_parameters())
        for name, param in params:
            if name not in self._quantized:
                unshared.pop(name).data = param.data
        self._device.add(self._shared)
        self._own = list(unshared.values())
        return 0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Iterate over the weights, which are merged or gathered one at a time."""
        for _ in tensors:
            pass
        self.weight_version = version

    def sleep(self) -> None:
        """Free all parameters that are not shared with the trainer."""
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
