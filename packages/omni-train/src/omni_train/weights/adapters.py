"""Adapters from any trainer: their tensors by layer, and the scale of the product of a layer's factors.

Trainers store this scale in different places. All of them are read, and two different scales are an error:

    adapter_config.json next to the file     peft, and trainers built on it: r, lora_alpha, patterns, use_rslora
    `lora_adapter_metadata` in the header    diffusers' trainers: the same, as JSON
    an alpha in the header                   SimpleTuner, kohya, LightX2V: lora_alpha, network_alpha, alpha
    a tensor LAYER.alpha                     kohya and its successors

A file with none of these has its scale in B, as written by diffusers.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor, nn

from omni_train.files import parse_object, read_linked
from omni_train.lora import adapter_layers, lora_layers
from omni_train.lora_layer import INITIAL, AdaptedLayer, adapter_tensors, factors
from omni_train.weights.load import check_numbers, read_shapes, read_tensors

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name
PEFT_FILE, PEFT_PART = SAFETENSORS_WEIGHTS_NAME, "base_model.model"  # peft's names
SIDES = ("A.weight", "B.weight", "magnitude_vector.weight")  # suffixes of the names of an adapter's tensors
NAME = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(\.default)?(\.weight)?")
SCALES = "lora_adapter_metadata"  # header key used by diffusers' trainers
ALPHAS = ("lora_alpha", "network_alpha", "alpha", "ss_network_alpha")  # suffixes of header keys
SCALED = re.compile(r"alpha|scal(e|ing)|multiplier|strength")  # keys that may be about a scale
MAX_CONFIG_BYTES = 2**22
MAX_NUMBER = 1e9  # maximum for a rank and an alpha
PATTERN = re.compile(r"\^?([\w.-]|\\\.)+\$?")  # layer names as in peft's patterns
RESIDUAL = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializers that change the weights below the adapter
UNREAD: Mapping[str, tuple[object, ...]] = {  # other features of a peft adapter, and their values when unused
    "bias": ("none",), "modules_to_save": (None, []), "trainable_token_indices": (None, [], {}), "lora_bias": (False,),
    "layer_replication": (None, []), "fan_in_fan_out": (False,), "use_qalora": (False,), "use_bdlora": (None, False),
    "arrow_config": (None,), "kasa_config": (None,), "alora_invocation_tokens": (None,), "monteclora_config": (None,),
    "velora_config": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a file.

    names: names of each layer's tensors in the file: A, B, and with DoRA the magnitudes. shapes: shapes of the tensors.
    scaling: factor of the product of each layer's factors.
    """

    file: Path
    names: Mapping[str, Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]]
    scaling: Mapping[str, float]

    @property
    def use_dora(self) -> bool:
        """True if the adapter has magnitudes."""
        return any(len(names) > 2 for names in self.names.values())


def find_adapter(place: str | Path) -> Path | None:
    """Return the file of an adapter, in the layout of diffusers or peft; None if the folder has none."""
    known = (Path(place) / name for name in (LORA_FILE, PEFT_FILE))
    return next((file for file in known if file.is_file()), None)


def read_adapter(place: str | Path, *, part: str = "transformer") -> SavedAdapter:
    """Read the names, shapes and scales of an adapter, without values.

    Args:
        place: a folder in the layout of diffusers or peft, or a file.
            part: prefix of the layers' names, after peft's own; optional in the file.

        Raises:
            ValueError: there is no adapter, it is damaged, its tensors have other names, or its kind is unknown.
    """
    file = Path(place) if Path(place).is_file() else find_adapter(place)
    if file is None:
        raise ValueError(f"folder must hold {LORA_FILE}, or {PEFT_FILE} with {CONFIG_NAME}, got {place}")
    shapes, layers, alphas = read_shapes(file), dict[str, dict[str, str]](), dict[str, str]()
    for name in shapes:
        if name.endswith(".alpha"):
            alphas[layer_name(name.removesuffix(".alpha"), part)] = name
        elif match := NAME.fullmatch(name):
            layers.setdefault(layer_name(match[1], part), {})[match[2]] = name
        else:
            raise ValueError(f"{file} must hold LoRA by peft's names, got {name}: convert it by omni-rl lora")
    for layer, by_side in layers.items():
        if not {"A", "B"} <= by_side.keys():
            raise ValueError(f"{file} must hold lora_A and lora_B of each layer, lacks one of {layer}")
    if not layers or alphas.keys() - layers.keys():
        raise ValueError(f"{file} must hold LoRA factors, got {min(alphas.values(), default='none')}")
    names = {
        layer: [by_side[side] for side in ("A", "B", "magnitude_vector") if side in by_side]
        for layer, by_side in layers.items()
    }
    for name in (name for layer_names in names.values() for name in layer_names):
        if not shapes[name] or min(shapes[name]) < 1:
            raise ValueError(f"{file} must hold factors of rank 1 or more, got the shape {shapes[name]} of {name}")
    ranks = {layer: shapes[layer_names[0]][0] for layer, layer_names in names.items()}
    with safe_open(file, framework="pt") as opened:
        from_tensors = {
            layer: read_alpha(opened.get_tensor(name), file, name) / ranks[layer] for layer, name in alphas.items()
        }
    saved = SavedAdapter(file, names, shapes, read_scaling(file, ranks, from_tensors, part=part))
    config = read_config(file, part)
    if config and config.use_dora != saved.use_dora:
        raise ValueError(f"{file} must have magnitudes if and only if use_dora is set, got use_dora {config.use_dora}")
    return saved


def layer_name(name: str, part: str) -> str:
    """Return the name of a layer in its net. part: as in `read_adapter`."""
    for prefix in (PEFT_PART, part):
        name = name.removeprefix(f"{prefix}.") if prefix else name
    return name


def read_scaling(
    file: Path, ranks: Mapping[str, int], from_tensors: Mapping[str, float], *, part: str = "transformer"
) -> dict[str, float]:
    """Return the factor of the product of each layer's factors, from wherever it is stored.

    Args:
        file: file of the adapter.
        ranks: ranks of the layers' factors.
        from_tensors: scales of layers from their alpha tensors.
        part: as in `read_adapter`.

    Raises:
        ValueError: a scale is not a finite number > 0, two places have different scales, or an unknown key of the
            header may be a scale.
    """
    scalings, header = {"its tensors of alpha": dict(from_tensors)}, read_header(file)
    if config := read_config(file, part):
        place = CONFIG_NAME if (file.parent / CONFIG_NAME).exists() else f"{SCALES} of its header"
        scalings[place] = {layer: layer_scale(config, layer, rank, file) for layer, rank in ranks.items()}
    for key, text in header.items():
        end = key.rpartition(".")[2]
        if end in ALPHAS:
            root = any(k.rpartition(".")[2] == "use_rslora" and v.lower() == "true" for k, v in header.items())
            alpha = parse_number(file, key, text)
            scalings[f"{key} of its header"] = {layer: alpha / (r**0.5 if root else r) for layer, r in ranks.items()}
        elif SCALED.search(end) and not key.startswith("ss_"):
            raise ValueError(f"{file} has {key!r:.80} in its header, which may be a scale and is not known: convert it")
    agreed: dict[str, float] = {}
    for place, scales in scalings.items():
        for layer, scale in scales.items():
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{file} must have scales that are finite and > 0, got {scale} by {place} for {layer}")
            if not math.isclose(agreed.setdefault(layer, scale), scale):
                rule = f"must have one scale for each layer, got {agreed[layer]:g} and, by {place}, {scale:g}"
                raise ValueError(f"{file} {rule} for {layer}")
    if agreed and (missing := ranks.keys() - agreed.keys()):
        raise ValueError(f"{file} must have a scale for each layer, lacks {min(missing)}")
    return agreed or dict.fromkeys(ranks, 1.0)


def read_alpha(tensor: Tensor, file: Path, name: str) -> float:
    """Return the alpha in a tensor of a file; raise ValueError unless it is one finite number > 0."""
    values = tensor.flatten().tolist()
    alpha = values[0] if len(values) == 1 else f"{len(values)} numbers"
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"{file} must have finite alphas > 0, got {alpha} as {name}")
    return float(alpha)


def read_header(file: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def parse_number(file: Path, key: str, text: str) -> float:
    """Parse a number in a file's header."""
    try:
        return float(text)
    except ValueError as exc:
        raise ValueError(f"{file} must have a number as {key!r:.80} in its header, got {text!r:.80}") from exc


def read_config(file: Path, part: str) -> LoraConfig | None:
    """Return peft's configuration, stored next to a file or in its header; None if there is none.

    Raises:
        ValueError: it is damaged, or of another kind of adapter.
    """
    beside, inside = file.parent / CONFIG_NAME, read_header(file).get(SCALES)
    if beside.exists():
        place, text = str(beside), read_linked(beside, MAX_CONFIG_BYTES).decode("utf-8", "replace")
    elif inside is not None:
        place, text = f"{SCALES} of {file}", inside
    else:
        return None
    values = parse_object(text, place, parse_int=int)
    if not beside.exists() and "r" not in values:  # in a pipeline's file, each key begins with the part
        values = {key.removeprefix(f"{part}."): value for key, value in values.items() if key.startswith(f"{part}.")}
    return checked_config(values, place)


def checked_config(values: Mapping[str, Any], place: str) -> LoraConfig:
    """Return peft's configuration with these values; raise ValueError for unsupported features."""
    kind, known = values.get("peft_type", "LORA"), {field.name for field in fields(LoraConfig)}
    if kind != "LORA":
        raise ValueError(f"peft_type of {place} must be LORA, got {kind!r:.80}")
    if unknown := [key for key, value in values.items() if key not in known and value]:
        raise ValueError(f"{place} has {unknown[0]!r:.80}, which the installed peft does not know")
    for key, accepted in UNREAD.items():
        if (value := values.get(key, accepted[0])) not in accepted:
            raise ValueError(f"{key} of {place} must be {accepted[0]!r}, got {value!r:.80}")
    init = values.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(RESIDUAL):
        rule = "must not change the weights below the adapter: save it with path_initial_model_for_weight_conversion"
        raise ValueError(f"init_lora_weights of {place} {rule}, got {init!r:.80}")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = values.get(key) or {}
        if not isinstance(pattern, dict) or any(not PATTERN.fullmatch(name) for name in pattern):
            raise ValueError(f"{key} of {place} must have numbers by names of layers, got {pattern!r:.80}")
    numbers = [(key, values.get(key)) for key in ("r", "lora_alpha")]
    numbers += [
        (key, number) for key in ("rank_pattern", "alpha_pattern") for number in (values.get(key) or {}).values()
    ]
    for key, value in numbers:
        kinds = (int,) if key in ("r", "rank_pattern") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < MAX_NUMBER:
            raise ValueError(f"{key} of {place} must be a number > 0, got {value!r:.80}")
    for key in ("use_rslora", "use_dora"):
        if not isinstance(values.get(key) or False, bool):
            raise ValueError(f"{key} of {place} must be true or false, got {values[key]!r:.80}")
    read = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
    return LoraConfig(**{key: values[key] for key in read if values.get(key) is not None})


def config_text(rank: int, **facts: Any) -> str:
    """Return adapter_config.json for factors whose scale is in B. facts: other fields of peft's `LoraConfig`."""
    config = LoraConfig(r=rank, lora_alpha=rank, inference_mode=True, **facts)
    return json.dumps(config.to_dict(), indent=2, default=sorted) + "\n"  # sets become lists


def layer_scale(config: LoraConfig, layer: str, rank: int, file: Path) -> float:
    """Return a layer's scale from peft's configuration. rank: rows of its A: rank times number of experts."""
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    layer_rank = ranks.get(get_pattern_key(list(ranks), layer), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), layer), config.lora_alpha)
    if rank % layer_rank:
        raise ValueError(f"{file} must have the rank of its configuration, {layer_rank}, got {rank} for {layer}")
    return float(alpha / (layer_rank**0.5 if config.use_rslora else layer_rank))


@torch.no_grad()
def load_adapter(module: nn.Module, place: str | Path, *, adapter: str = "default", part: str = "transformer") -> None:
    """Load an adapter from any trainer into an adapter made by `omni_train.lora.add_lora`, sharded or not.

    The product of its factors times its scale equals that of the file: B is multiplied by the file's scale and divided
    by that of `adapter`, unless they are equal.

    Raises:
        ValueError: as in `check_adapter`, or the adapter is not finite, or too large for products in float32.
    """
    saved = check_adapter(module, place, adapter=adapter, part=part)
    layers = adapter_layers(module, adapter)
    pairs = [zip(saved.names[name], adapter_tensors(layer, adapter), strict=True) for name, layer in layers.items()]
    read_tensors(dict(chain.from_iterable(pairs)), [saved.file])
    for name, layer in layers.items():
        if (scale := saved.scaling[name]) != layer.scaling[adapter]:
            up = factors(layer, adapter)[1].mul_(scale).div_(layer.scaling[adapter])
            check_numbers(saved.file, f"B of {name} times its scale {scale:g}", up)


def check_adapter(
    module: nn.Module, place: str | Path, *, adapter: str = "default", part: str = "transformer"
) -> SavedAdapter:
    """Check that `load_adapter` would succeed, without reading weights. The module may be on the meta device.

    Raises:
        ValueError: there is no adapter, it is of another kind, has another rank or other layers, or the module's
            adapter was initialized by PiSSA.
    """
    if any(INITIAL in layer.lora_A for layer in lora_layers(module).values()):
        raise ValueError("module must have adapters that begin at 0 to load another's values, got PiSSA's")
    saved, layers = read_adapter(place, part=part), adapter_layers(module, adapter)
    is_dora = any(len(adapter_tensors(layer, adapter)) > 2 for layer in layers.values())
    if is_dora != saved.use_dora:
        rule = "with" if is_dora else "without"
        raise ValueError(f"{saved.file} must be an adapter {rule} use_dora, as the module's is")
    if other := layers.keys() ^ saved.names.keys():
        rule = f"must be an adapter on the same layers, differs in {len(other)} such as {min(other)}"
        raise ValueError(f"{saved.file} {rule}")
    for name, layer in layers.items():
        for tensor, target in zip(saved.names[name], adapter_tensors(layer, adapter), strict=True):
            if saved.shapes[tensor] != tuple(target.shape):
                shapes = f"{saved.shapes[tensor]}, not {tuple(target.shape)}"
                raise ValueError(f"{saved.file} must be an adapter of the same rank, but {tensor} is {shapes}")
    return saved


def scaled_state(saved: SavedAdapter) -> dict[str, Tensor]:
    """Return an adapter's tensors by peft's names, with its scale in B and factors zero-padded to the largest rank."""
    rank, state = max(saved.shapes[names[0]][0] for names in saved.names.values()), dict[str, Tensor]()
    with safe_open(saved.file, framework="pt") as opened:
        for layer, names in saved.names.items():
            down, up, *magnitudes = (opened.get_tensor(name) for name in names)
            padding = rank - len(down)
            scale = saved.scaling[layer]
            state[f"{layer}.lora_{SIDES[0]}"] = torch.nn.functional.pad(down, (0, 0, 0, padding))
            up = up if scale == 1 else up.float() * scale  # 16 bits would round the product
            state[f"{layer}.lora_{SIDES[1]}"] = torch.nn.functional.pad(up, (0, padding))
            state |= {f"{layer}.lora_{SIDES[2]}": magnitude for magnitude in magnitudes}
    for name, tensor in state.items():
        check_numbers(saved.file, name, tensor)
    return state


def factors_by_name(
    module: nn.Module,
    adapter: str,
    part: str,
    tensors: Callable[[AdaptedLayer, str], Sequence[Tensor]] = adapter_tensors,
) -> dict[str, Tensor]:
    """Return the adapter's tensors by their names in a file, in the order of `named_adapter`.

    tensors: returns A, B and any magnitudes of a layer.
    """
    return {
        f"{part}.{name}.lora_{which}": tensor
        for name, layer in adapter_layers(module, adapter).items()
        for which, tensor in zip(SIDES, tensors(layer, adapter), strict=False)
    }
