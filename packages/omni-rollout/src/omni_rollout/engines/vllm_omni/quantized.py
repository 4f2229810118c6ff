"""Linear layers of vLLM-Omni with quantized weights, and how they take new weights."""

from typing import Any

import torch
from torch import Tensor, nn


class QuantizedLayer:
    """Linear layer that vLLM-Omni quantized while loading it.

    form: its original weight, on the meta device. After the last rows from `put`, the whole weight is quantized.
    """

    def __init__(self, layer: Any) -> None:
        self.form = torch.empty(
            layer.output_size_per_partition, layer.input_size_per_partition, dtype=layer.orig_dtype, device="meta"
        )
        self._layer = layer
        self.begin()
        layer.register_forward_pre_hook(_make_contiguous)

    def begin(self) -> None:
        """Drop the rows of a failed sync."""
        self._whole: Tensor | None = None
        self._missing = len(self.form)

    def put(self, rows: Tensor, tensor: Tensor) -> None:
        """Take rows of a new weight. rows: their place in `form`, as a view of it."""
        if self._whole is None:
            self._whole = torch.empty_like(self.form, device=self._layer.weight.device)
        row = rows.storage_offset() // self.form.shape[1]
        self._whole[row : row + len(tensor)] = tensor
        self._missing -= len(tensor)
        if not self._missing:
            self._quantize(self._whole)
            self.begin()

    def _quantize(self, whole: Tensor) -> None:
        """Quantize a weight with vLLM-Omni, as in loading, and copy the result into the old tensor."""
        layer = self._layer
        places = dict(layer.named_parameters(recurse=False))
        layer.weight = nn.Parameter(whole, requires_grad=False)
        vars(layer).pop("_already_called_process_weights_after_loading", None)
        layer.quant_method.process_weights_after_loading(layer)
        for name, place in places.items():
            place.copy_(getattr(layer, name))
            setattr(layer, name, place)


def is_quantized(layer: nn.Module) -> bool:
    """True if vLLM-Omni quantized the layer's weight while loading it."""
    return getattr(getattr(layer, "quant_method", None), "uses_meta_device", False)


def _make_contiguous(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make inputs contiguous: quantized layers view them as one matrix, and models pass parts of a sequence."""
    return tuple(arg.contiguous() for arg in args)
