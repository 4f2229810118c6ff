"""Quantized frozen weights under adapters, dequantized to the compute dtype whenever a layer runs.

int8 and fp8 (e4m3) have one scale per row of a weight. nf4 has one scale per 64 numbers in a row, and stores each
number as one of 16 quantiles of the normal distribution (QLoRA, arXiv 2305.14314), with bitsandbytes' codes and values.

A running layer holds its whole dequantized weight, and its graph keeps it alive: use gradient checkpointing. On an
accelerator for which torch can compile, one kernel reads the codes and writes the weight: 2.6 bytes of traffic per
weight in bfloat16 with nf4. Separate operators, with the same bits, need 14.6.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from omni_train.kernels import MAX_GRAPHS, check_compiler

QuantizedDtype = Literal["int8", "fp8", "nf4"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
BYTES = {"int8": 1, "fp8": 1, "nf4": 0.5625}  # per weight, including its scales
NF4_BLOCK = 64
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_MAX_VALUES = {"int8": 127.0, "fp8": 448.0}


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantized weight: codes [out, n], uint8, and scales, float32.

    dtype: dtype of the dequantized weight. table, dequantize: as in the function below.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor | None
    dtype: torch.dtype
    dequantize: Callable[..., Tensor]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # it is never written to
        """The dequantized weight [out, in], a new tensor."""
        with torch.no_grad():  # one compiled graph for sampling and training
            weight = self.dequantize(self.codes, self.scales, self.table, self.dtype)
        return weight.view(self.out_features, self.in_features)


def dequantize(codes: Tensor, scales: Tensor, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight as rows, one per scale: products in float32, rounded once.

    table: the values of each code, [256, 1], or [256, 2] for nf4; None for int8, whose codes are the values.
    """
    values = codes.view(torch.int8) if table is None else table.index_select(0, codes.flatten().int())
    values = values.view(len(scales), -1)
    out = values if values.dtype == dtype else torch.empty(values.shape, dtype=dtype, device=values.device)
    return torch.mul(values, scales, out=out)


def compiled_dequantize() -> Callable[..., Tensor]:
    """Return `dequantize` compiled to one kernel, with the same bits."""
    return torch.compile(dequantize, fullgraph=True, dynamic=True, recompile_limit=MAX_GRAPHS)  # type: ignore[call-overload]


@torch.no_grad()
def quantize_blocks(
    module: ModuleT,
    quantized: QuantizedDtype,
    block_names: Collection[str],
    device: torch.device,
    *,
    home: torch.device | None = None,
) -> ModuleT:
    """Quantize the weights of the linear layers in a module's blocks, on `device`; return the same module.

    Call it after `add_lora`. Biases, adapters and layers outside of blocks stay unchanged on their device; so does a
    weight whose row length is not divisible by 64, for nf4.

    block_names: class names of the blocks. home: where codes and scales are stored, if not on `device`.
    """
    home = home or device
    table, run = _table(quantized, home), dequantize
    if device.type != "cpu" and find_spec("triton"):
        with suppress(ValueError):
            check_compiler(device)
            run = compiled_dequantize()
    blocks = [block for block in module.modules() if type(block).__name__ in block_names]
    layers = {id(layer): layer for block in blocks for name, layer in block.named_modules() if ".lora_" not in name}
    for layer in layers.values():
        if type(layer) is not nn.Linear or (quantized == "nf4" and layer.in_features % NF4_BLOCK):
            continue
        weight = layer.weight
        del layer.weight
        codes, scales = (tensor.to(home) for tensor in quantize(weight.to(device), quantized))
        layer.__class__ = QuantizedLinear
        assert isinstance(layer, QuantizedLinear)
        layer.dtype, layer.dequantize = weight.dtype, run
        for name, tensor in {"codes": codes, "scales": scales, "table": table}.items():
            layer.register_buffer(name, tensor, persistent=False)  # from the base model's files, so not in checkpoints
    return module


def _table(quantized: QuantizedDtype, device: torch.device) -> Tensor | None:
    """Return the values of all 256 codes, as expected by `dequantize`."""
    if quantized == "int8":
        return None
    if quantized == "fp8":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None].to(device)
    values = torch.tensor(NF4)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).to(device)


def quantize(weight: Tensor, quantized: QuantizedDtype) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8, of a weight [out, in], and the scales of its rows [out, 1], or of its blocks for nf4."""
    rows = weight.float() if quantized != "nf4" else weight.float().view(-1, NF4_BLOCK)
    max_abs = rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if quantized == "nf4":
        middles = torch.tensor([(low + high) / 2 for low, high in pairwise(NF4)]).to(rows.device)
        places = torch.bucketize(rows / max_abs, middles).view(-1, 2)
        return (places[:, 0] * 16 + places[:, 1]).to(torch.uint8).view(len(weight), -1), max_abs
    scales = max_abs / _MAX_VALUES[quantized]
    scaled = rows / scales
    codes = scaled.round().to(torch.int8) if quantized == "int8" else scaled.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales
