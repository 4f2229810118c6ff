"""LoRA files of any trainer: reading of their factors, and writing in the formats of other trainers.

Files with peft's names are read directly, others by diffusers, so that training starts from exactly what its pipeline
loads. The scale is read from wherever it is stored (`omni_train.weights.adapters`), and multiplied into B.
"""

import inspect
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
from diffusers.utils import convert_unet_state_dict_to_peft
from omni_rollout.model import Model
from omni_rollout.models import open_model
from omni_train.files import new_folder
from omni_train.weights.adapters import (
    LORA_FILE,
    NAME,
    PEFT_FILE,
    PEFT_PART,
    SIDES,
    config_text,
    find_adapter,
    read_adapter,
    read_alpha,
    read_config,
    read_scaling,
    scaled_state,
)
from omni_train.weights.load import check_numbers, read_shapes
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from omni_rl.settings.fields import prefix_errors, require

PART = "transformer"
FACTORS = re.compile(r"lora|alpha|dora_scale|\.diff|lokr|hada")  # in names of adapters' tensors
UNSUPPORTED = ("dora_scale", "lora_magnitude_vector", ".diff", ".lokr_", ".hada_")  # in names of unsupported adapters
Factors = dict[str, tuple[Tensor, Tensor]]  # by layer: A [rank, in] and B [out, rank], B with the scale


def read_factors(place: Path, model: str) -> Factors:
    """Return the factors of an adapter of any trainer, in float32, with the scale multiplied into B.

    place: a file, or a folder in the layout of diffusers or peft. model: folder or hub id of the adapter's model.

    Raises:
        ValueError: it is not an adapter of the model, holds more than LoRA factors of its net, has layers of different
            ranks, or its scale is unknown.
    """
    file = place if place.is_file() else find_adapter(place)
    if file is None:
        raise ValueError(f"source must be a .safetensors file or an adapter's folder, got {place}")
    with prefix_errors("--model: "):
        opened_model = open_model(model)
    names = read_shapes(file)
    got = f"got {min(names, default='none')} in {file}, as full weights have it"
    require((any(map(FACTORS.search, names)), f"source must hold LoRA factors, {got}"))
    unsupported = next((name for name in names if any(part in name for part in UNSUPPORTED)), "")
    require((not unsupported, f"{file} must hold LoRA factors only, got {unsupported}"))
    factors = read_plain(file, opened_model) if all(map(is_plain, names)) else read_foreign(file, model, opened_model)
    for layer, pair in factors.items():
        for factor in pair:
            check_numbers(file, layer, factor)
    return factors


def check_rank(file: Path, ranks: Iterable[int]) -> int:
    """Return the common rank of all layers, or raise ValueError if there are several."""
    distinct = sorted({*ranks})
    require((len(distinct) == 1, f"{file} must have one rank for all layers, got {distinct}"))
    return distinct[0]


def is_plain(name: str) -> bool:
    """Return True for peft's name of a tensor in a diffusers net, as written by runs, diffusers and peft."""
    return bool(NAME.fullmatch(name)) and name.startswith((f"{PART}.", f"{PEFT_PART}."))


def read_plain(file: Path, model: Model) -> Factors:
    """Return the factors of a file with peft's names."""
    saved, net = read_adapter(file, part=PART), model.empty_net()
    net = next(net.children()) if len(model.nets) > 1 else net  # one of two experts of equal shape
    sizes = {name: tuple(layer.weight.shape) for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    for layer, (down, up, *_) in saved.names.items():
        a, b = saved.shapes[down], saved.shapes[up]
        if (len(a), len(b), b[1:]) != (2, 2, a[:1]) or sizes.get(layer) != (b[0], a[1]):
            mismatch = f"{sizes.get(layer)}, got factors {b} and {a}"
            raise ValueError(f"{file} must fit the net of {model.folder}: {layer} is {mismatch}")
    check_rank(file, (saved.shapes[names[0]][0] for names in saved.names.values()))
    state = scaled_state(saved)
    pairs = {layer: [state[f"{layer}.lora_{side}"].float() for side in SIDES[:2]] for layer in saved.names}
    return {layer: (down, up) for layer, (down, up) in pairs.items()}


def read_foreign(file: Path, model: str, opened: Model) -> Factors:
    """Return the factors of a file whose names diffusers converts."""
    pipeline = getattr(diffusers, opened.config["_class_name"], None)
    require(
        (hasattr(pipeline, "lora_state_dict"), f"--model must be one whose LoRA files diffusers reads, got {model}")
    )
    alphas = read_alphas(file)  # before diffusers, which never returns for a negative alpha
    config = read_config(file, PART)
    require((not (config and config.use_dora), f"{file} must have magnitudes if use_dora is set, got none"))
    try:
        state, layers = load_layers(file, pipeline, opened)
    except Exception as exc:  # errors of diffusers and peft do not name the file
        raise ValueError(f"{file} must fit the net of {model}: {type(exc).__name__}: {exc}") from exc
    other = next((name for name in state if not name.startswith(f"{PART}.")), "")
    factors = scale_factors(layers, state)
    require(
        (not other, f"{file} must hold LoRA factors of the net only, got {other}"),
        (2 * len(factors) == len(state), f"{file} must fit the net: {len(state)} tensors, for {len(factors)} layers"),
    )
    ranks = {layer: len(down) for layer, (down, _) in factors.items()}
    rank = check_rank(file, ranks.values())
    for alpha in alphas:  # must equal that of the header, if there is one
        read_scaling(file, ranks, dict.fromkeys(ranks, alpha / rank), part=PART)
    if not alphas:  # diffusers does not read others
        scaling = read_scaling(file, ranks, {}, part=PART)
        factors = {layer: (down, up * scaling[layer]) for layer, (down, up) in factors.items()}
    return factors


def read_alphas(file: Path) -> set[float]:
    """Return the alphas in the file's tensors, or raise ValueError unless they are finite and above 0."""
    names = [name for name in read_shapes(file) if name.endswith(".alpha")]
    with safe_open(file, framework="pt") as opened:
        return {read_alpha(opened.get_tensor(name), file, name) for name in names}


def load_layers(file: Path, pipeline: Any, model: Model) -> tuple[dict[str, Tensor], dict[str, LoraLayer]]:
    """Return the tensors of a file by peft's names, and the layers that it adapts in a net on the meta device."""
    read = pipeline.lora_state_dict
    options = {"return_alphas": True} if "return_alphas" in inspect.signature(read).parameters else {}
    loaded = read(str(file.parent), weight_name=file.name, **options)
    state, alphas = loaded if options else (loaded, None)
    if not any(".lora_A." in name for name in state):
        state = convert_unet_state_dict_to_peft(state)
    net: Any = model.empty_net()
    net = next(net.children()) if len(model.nets) > 1 else net  # one of two experts of equal shape
    net.load_lora_adapter(state, prefix=PART, low_cpu_mem_usage=True, network_alphas=alphas or None)
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, LoraLayer) and layer.scaling}
    return state, layers


def scale_factors(layers: Mapping[str, LoraLayer], state: Mapping[str, Tensor]) -> Factors:
    """Return the layers' factors, with the scale multiplied into B."""
    factors = {}
    for name, layer in layers.items():
        down, up = (state.get(f"{PART}.{name}.lora_{side}.weight") for side in "AB")
        if down is not None and up is not None:
            (scale,) = layer.scaling.values()
            factors[name] = down.float(), up.float() * scale
    return factors


def to_state_dict(factors: Factors) -> dict[str, Tensor]:
    """Return the tensors of a run's file, without a scale, which is part of B."""
    return {
        f"{PART}.{layer}.lora_{side}.weight": factor.contiguous()
        for layer, pair in factors.items()
        for side, factor in zip("AB", pair, strict=True)
    }


def write_peft(factors: Factors, target: Path, model: str) -> str:
    """Write a folder in peft's layout, for PeftModel.from_pretrained and trainers that use it; return what to print."""
    rank = len(next(iter(factors.values()))[0])
    config = config_text(rank, target_modules=sorted(factors), base_model_name_or_path=model)
    state = {name.replace(PART, PEFT_PART, 1): tensor for name, tensor in to_state_dict(factors).items()}
    with new_folder(target) as folder:
        save_file(state, folder / PEFT_FILE, metadata={"format": "pt"})
        (folder / CONFIG_NAME).write_text(config, "utf-8")
    return f"{target}: {len(factors)} layers of rank {rank}, in peft's layout"


def write_start(factors: Factors, target: Path, model: str) -> str:
    """Write a folder for --init-weights; return what to print, with the settings to use it."""
    with new_folder(target) as folder:
        save_file(to_state_dict(factors), folder / LORA_FILE)
    rank, modules = len(next(iter(factors.values()))[0]), open_model(model).empty_net().named_modules()
    targets = target_suffixes(list(factors), [name for name, layer in modules if isinstance(layer, nn.Linear)])
    flags = ["--init-weights", str(target), "--lora.rank", str(rank), "--lora.targets", targets]
    return f"{target}: {len(factors)} layers of rank {rank}; train from it with\n{shlex.join(flags)}"


def target_suffixes(layers: Sequence[str], names: Sequence[str]) -> str:
    """Return the value of --lora.targets that selects exactly these layers out of all names."""
    split_names = [name.split(".") for name in layers]
    suffixes = {
        ".".join(parts[max((i + 1 for i, part in enumerate(parts[:-1]) if part.isdigit()), default=0) :])
        for parts in split_names
    }
    selected = [name for name in names if any(f".{name}".endswith(f".{end}") for end in suffixes)]
    return ",".join(sorted(suffixes if sorted(selected) == sorted(layers) else layers))
