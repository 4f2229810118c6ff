"""Convert LoRA files: those of other trainers to a folder for --init-weights, and a run's to kohya's names.

omni-rl lora their.safetensors adapters --model Qwen/Qwen-Image        then: --init-weights adapters
omni-rl lora runs/first/weights out.safetensors --model Qwen/Qwen-Image

diffusers reads the names, and peft the scales: what diffusers' pipeline loads is what training starts from. A run's own
weights are in diffusers' names already.
"""

import argparse
import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
from diffusers.utils import convert_state_dict_to_kohya, convert_unet_state_dict_to_peft
from omni_rollout.model import Model
from omni_rollout.models import open_model
from omni_train.files import write_atomically, write_folder_atomically
from omni_train.weights.full import LORA_FILE
from omni_train.weights.load import read_shapes
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from omni_rl.settings.fields import require

PART = "transformer"
UNREAD = ("dora_scale", "lora_magnitude_vector", ".diff", ".lokr_", ".hada_")  # parts of names of other adapters
Factors = dict[str, tuple[Tensor, Tensor]]  # A [rank, in] and B [out, rank], with its scale, by layer


def read_factors(file: Path, model: str) -> Factors:
    """Return the factors of a file that diffusers reads, in float32.

    model: folder or hub id of a checkpoint that the adapter is for.

    Raises:
        ValueError: it is no file of such a model, holds more than LoRA factors of its net, or layers of several ranks.
    """
    names, opened = read_shapes(file), open_model(model)
    pipeline = getattr(diffusers, opened.config["_class_name"], None)
    unread = next((name for name in names if any(part in name for part in UNREAD)), "")
    require(
        (hasattr(pipeline, "lora_state_dict"), f"--model must be one whose LoRA files diffusers reads, got {model}"),
        (not unread, f"{file} must hold LoRA factors only, got {unread}"),
    )
    try:
        state, layers = load(file, pipeline, opened)
    except Exception as exc:  # of diffusers and peft, which name no file
        raise ValueError(f"{file} must fit the net of {model}: {type(exc).__name__}: {exc}") from exc
    other = next((name for name in state if not name.startswith(f"{PART}.")), "")
    factors = scaled(layers, state)
    ranks = sorted({len(down) for down, _ in factors.values()})
    require(
        (not other, f"{file} must hold LoRA factors of the net only, got {other}"),
        (2 * len(factors) == len(state), f"{file} must fit the net: {len(state)} tensors, for {len(factors)} layers"),
        (len(ranks) == 1, f"{file} must have one rank for all layers, got {ranks}"),
    )
    return factors


def load(file: Path, pipeline: Any, model: Model) -> tuple[dict[str, Tensor], dict[str, LoraLayer]]:
    """Return the tensors of a file by peft's names, and the layers that it adapts, of a net on the meta device."""
    read = pipeline.lora_state_dict
    more = {"return_alphas": True} if "return_alphas" in inspect.signature(read).parameters else {}
    state, *alphas, metadata = read(str(file.parent), weight_name=file.name, return_lora_metadata=True, **more)
    if not any(".lora_A." in name for name in state):
        state = convert_unet_state_dict_to_peft(state)
    net: Any = model.empty_net()
    net = next(net.children()) if len(model.nets) > 1 else net  # one of two experts, of one shape
    known = {"network_alphas": next(iter(alphas), None) or None, "metadata": metadata or None}
    net.load_lora_adapter(state, prefix=PART, low_cpu_mem_usage=True, **known)
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, LoraLayer) and layer.scaling}
    return state, layers


def scaled(layers: Mapping[str, LoraLayer], state: Mapping[str, Tensor]) -> Factors:
    """Return the layers' factors, with the scale in B."""
    found = {}
    for name, layer in layers.items():
        down, up = (state.get(f"{PART}.{name}.lora_{side}.weight") for side in "AB")
        if down is not None and up is not None:
            (scale,) = layer.scaling.values()
            found[name] = down.float(), up.float() * scale
    return found


def named(factors: Factors) -> dict[str, Tensor]:
    """Return the tensors of a run's file, which has no scale: B has it."""
    return {
        f"{PART}.{layer}.lora_{side}.weight": factor.contiguous()
        for layer, pair in factors.items()
        for side, factor in zip("AB", pair, strict=True)
    }


def as_kohya(factors: Factors) -> dict[str, Tensor]:
    """Return the tensors by kohya's names, with an alpha for each layer that makes its scale 1."""
    state = {name.replace(f"{PART}.", "unet.", 1): tensor for name, tensor in named(factors).items()}
    return dict(convert_state_dict_to_kohya(state))


def write_kohya(factors: Factors, target: Path, model: str) -> str:
    """Write a file in kohya's names; return what to print.

    Raises:
        ValueError: diffusers reads another adapter from it, as for models whose layers kohya's trainers call otherwise.
    """
    with TemporaryDirectory() as folder:
        trial = Path(folder) / LORA_FILE
        save_file(as_kohya(factors), trial)
        try:
            is_same = same(read_factors(trial, model), factors)
        except ValueError:
            is_same = False
        require((is_same, f"--model must be one that diffusers reads in kohya's names as written here, got {model}"))
        write_atomically(target, trial.read_bytes())
    return f"{target}: {len(factors)} layers, in kohya's names"


def write_start(factors: Factors, target: Path, model: str) -> str:
    """Write a folder for --init-weights; return what to print, with the settings that go with it."""
    write_folder_atomically(target, lambda folder: save_file(named(factors), folder / LORA_FILE))
    rank, modules = len(next(iter(factors.values()))[0]), open_model(model).empty_net().named_modules()
    targets = endings(list(factors), [name for name, layer in modules if isinstance(layer, nn.Linear)])
    words = ["--init-weights", str(target), "--lora.rank", str(rank), "--lora.targets", targets]
    return f"{target}: {len(factors)} layers of rank {rank}; train from it with\n{shlex.join(words)}"


def endings(layers: Sequence[str], names: Sequence[str]) -> str:
    """Return what --lora.targets must be for just these layers of all names."""
    after = [name.split(".") for name in layers]
    short = {
        ".".join(words[max((i + 1 for i, w in enumerate(words[:-1]) if w.isdigit()), default=0) :]) for words in after
    }
    meant = [name for name in names if any(f".{name}".endswith(f".{end}") for end in short)]
    return ",".join(sorted(short if sorted(meant) == sorted(layers) else layers))


def same(one: Mapping[str, tuple[Tensor, Tensor]], other: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
    """Return True if all products of two adapters are equal."""
    return one.keys() == other.keys() and all(
        (up @ down).equal(other[layer][1] @ other[layer][0]) for layer, (down, up) in one.items()
    )


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Any failure ends it with one line and exit code 2."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="omni-rl lora", description=__doc__, formatter_class=how)
    parser.add_argument("source", type=Path, help="file of another trainer, or folder of a run's weights")
    parser.add_argument("target", type=Path, help="folder for --init-weights, or .safetensors file in kohya's names")
    parser.add_argument("--model", required=True, help="folder or hub id of the model that it is for")
    args = parser.parse_args(argv)
    file = args.source / LORA_FILE if args.source.is_dir() else args.source
    try:
        require(
            (file.suffix == ".safetensors" and file.is_file(), f"source must be a .safetensors file, got {file}"),
            (not args.target.exists(), f"target must be new, got {args.target}"),
        )
        factors = read_factors(file, args.model)
        export = write_kohya if args.target.suffix == ".safetensors" else write_start
        print(export(factors, args.target, args.model))
    except (ImportError, OSError, ValueError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
