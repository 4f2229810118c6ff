"""Full weights of a trained module: streamed to an engine, or saved in the layout of diffusers or transformers.

Sharded tensors are gathered one at a time; every rank takes part.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
from peft import TaskType
from peft.utils import CONFIG_NAME
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from omni_train.checkpoint.parts import assign_by_size, file_header
from omni_train.checkpoint.state import in_batches
from omni_train.dist import Dist, gather_json, same_error
from omni_train.experts import expert_owners
from omni_train.files import new_folder
from omni_train.lora import adapted_params, adapter_layers, all_factors, base_name, lora_layers
from omni_train.lora_layer import (
    INITIAL,
    AdaptedLayer,
    LoraLinear,
    ParamWrapper,
    adapter_tensors,
    factors,
    has_dora,
    merge_weight,
)
from omni_train.weights.adapters import (
    LORA_FILE,
    PEFT_FILE,
    PEFT_PART,
    SavedAdapter,
    config_text,
    factors_by_name,
    find_adapter,
    read_adapter,
    scaled_state,
)
from omni_train.weights.card import CARD_FILE, model_card
from omni_train.weights.load import check_files, read_tensors

FULL_FILE = "diffusion_pytorch_model.safetensors"  # diffusers' name
GROUP_BYTES = 2**28  # size of weights that are gathered together for the engine
FILE_BYTES = 5 * 10**9  # size above which full weights are split into more files, one per rank


@torch.no_grad()
def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the module as (name, full tensor), under its name before LoRA and sharding.

    The active adapter is merged: a layer's weight is `W + (alpha / rank) * B A`, with DoRA's magnitudes, in W's dtype,
    so the receiver gets the policy without LoRA. Inside `omni_train.lora.reference` it is W, with PiSSA up to rounding.

    Every rank must exhaust the iterator. Shards are gathered together up to `GROUP_BYTES`; two copies are alive at a
    time if the receiver keeps none. An unsharded weight may be the parameter itself, so a receiver that keeps it must
    copy it.

    Args:
        module: a module with or without adapters, sharded or not.
    """
    adapters = all_factors(module)
    adapted = {name: layer for name, layer in adapted_params(module).items() if layer.active}
    weights = {base_name(name): t for name, t in module.state_dict(keep_vars=True).items() if t not in adapters}
    sources = {  # each weight and the tensors merged into it
        name: [tensor, *(adapter_tensors(adapted[name], adapted[name].active) if name in adapted else ())]
        for name, tensor in weights.items()
    }
    owners = expert_owners(module)
    for group in in_batches(sources.items(), GROUP_BYTES, num_bytes=lambda item: sum(part.nbytes for part in item[1])):
        whole = iter(gather([tensor for _, tensors in group for tensor in tensors], owners))
        for name, tensors in group:
            weight, *lora_factors = islice(whole, len(tensors))
            if lora_factors:
                weight = merge_weight(adapted[name], adapted[name].active, weight, *lora_factors)
            yield name, weight
            del weight, lora_factors
        del whole  # before the next group is gathered


def gather_in_groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield full tensors, in order, up to `GROUP_BYTES` at a time; every rank must exhaust the iterator."""
    for group in in_batches(tensors, GROUP_BYTES, num_bytes=lambda tensor: tensor.nbytes):
        yield gather(group)


def gather(tensors: Sequence[Tensor], owners: Mapping[Tensor, int] = MappingProxyType({})) -> list[Tensor]:
    """Return full tensors, with one collective for all sharded ones; every rank calls it.

    tensors: sharded by rows over the same ranks, as by FSDP2. owners: ranks that hold other tensors whole.
    """
    shards = [tensor for tensor in tensors if isinstance(tensor, DTensor) and tensor not in owners]
    parts: Iterator[Tensor] = iter(())
    if shards:
        mesh = shards[0].device_mesh
        rows = [_pad_rows(shard, mesh.size()).view(-1).view(torch.uint8) for shard in shards]
        local = torch.cat(rows)
        gathered = local.new_empty(mesh.size(), len(local))
        torch.distributed.all_gather(list(gathered.unbind()), local, group=mesh.get_group())
        parts = iter(gathered.split([len(row) for row in rows], dim=1))
    return [
        _join_rows(tensor, next(parts))
        if isinstance(tensor, DTensor) and tensor not in owners
        else _gather_full(tensor, owners)
        for tensor in tensors
    ]


def _join_rows(shard: DTensor, parts: Tensor) -> Tensor:
    """Return a full tensor from the bytes of all ranks' rows [ranks, bytes]."""
    return parts.reshape(-1).view(shard.dtype).view(-1, *shard.shape[1:])[: len(shard)]


def _pad_rows(shard: DTensor, ranks: int) -> Tensor:
    """Return this rank's rows, padded to the number of rows on the first rank."""
    rows, length = shard.to_local(), -(-len(shard) // ranks)
    if len(rows) == length:
        return rows.contiguous()
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


@torch.no_grad()
def named_adapter(module: nn.Module, adapter: str = "default") -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors as (name, full tensor), in peft's names.

    They are `<layer>.lora_A.weight`, `<layer>.lora_B.weight` and, with DoRA, `<layer>.lora_magnitude_vector.weight`. B
    is multiplied by alpha / rank. To diffusers and most other readers, a file without alphas means `W + B A`, so this
    form gives the same output everywhere. With PiSSA, A and B have twice the rank, as they are added to the weights
    from before PiSSA. Every rank must exhaust the iterator.
    """
    for name, layer in adapter_layers(module, adapter).items():  # an unknown name raises before any rank gathers
        down, up = _trained_factors(*map(_gather_full, _factors_with_initial(layer, adapter)))
        yield f"{name}.lora_A.weight", down
        yield f"{name}.lora_B.weight", up * layer.scaling[adapter]
        if has_dora(layer, adapter):
            yield f"{name}.lora_magnitude_vector.weight", _gather_full(adapter_tensors(layer, adapter)[-1])


@torch.no_grad()
def save_weights(
    module: nn.Module,
    folder: str | Path,
    dist: Dist,
    *,
    part: str = "transformer",
    adapter: str = "default",
    into: str | None = None,
    card: Mapping[str, Any] | None = None,
) -> None:
    """Write the trained weights to `folder`, completely or not at all; every rank calls it and waits until it is done.

    With adapters: `pytorch_lora_weights.safetensors`, for `pipeline.load_lora_weights(folder)` and
    `net.load_lora_adapter(folder, weight_name=..., prefix=part)`. Without: `diffusion_pytorch_model.safetensors` and
    `config.json` in the subfolder `part`, for `ModelClass.from_pretrained(folder, subfolder=part)`. Several ranks that
    share the folder write more than 5 GB as several files, `diffusion_pytorch_model-00001-of-00003.safetensors` and so
    on, with diffusers' index. An existing folder is replaced.

    Args:
        module: a diffusers model, sharded or not; with adapters, it may be any module. folder: where to write. Ranks
            that do not see the first rank's folder write nothing. dist: rank 0 writes; if there are several files,
            other ranks write one each. A rank holds two full tensors at a time. part: name of the module in its
            pipeline. adapter: the adapter to save. into: for the card, the pipeline component that loads the module, if
            not `part`: the second of two experts. card: facts for a model card, README.md, as in
            `omni_train.weights.card.model_card`; None writes none.

        Raises:
            ValueError: there is nothing to save, the module has neither adapters nor a configuration, or a fact is
                missing from the card.
            OSError: a rank could not write; the others raise it as well.
    """
    is_lora = bool(lora_layers(module))
    texts = {} if is_lora else {f"{part}/config.json": _config(module)}
    if card is not None:
        texts[CARD_FILE] = model_card(card, is_lora=is_lora, part=part, into=into or part)
    if is_lora:
        file, state = LORA_FILE, factors_by_name(module, adapter, part, _saved_shapes)
        weights = (tensor for _, tensor in named_adapter(module, adapter))
    else:
        file = f"{part}/{FULL_FILE}"
        state = dict(sorted(module.state_dict(keep_vars=True).items(), key=lambda item: -item[1].itemsize))
        owners = expert_owners(module)
        weights = (_gather_full(tensor, owners) for tensor in state.values())
    _save(folder, dist, file, state, weights, texts)


def save_peft(
    module: nn.Module, folder: str | Path, dist: Dist, *, prefix: str, base: str, card: Mapping[str, Any] | None = None
) -> None:
    """Write the trained adapter in peft's layout, for `load_adapter(folder)` of transformers and, without DoRA, vLLM.

    Args:
        module, folder, dist, card: as in `save_weights`.
            prefix: prefix of the module's names in the model that loads the adapter, with its dot.
            base: folder or hub id of that model.

        Raises:
            ValueError, OSError: as in `save_weights`.
    """
    layers = adapter_layers(module, "default")
    rank = next(layer.r["default"] * (1 + (INITIAL in layer.lora_A)) for layer in layers.values())
    of_experts = [name for name, layer in adapted_params(module).items() if isinstance(layer, ParamWrapper)]
    config = config_text(
        rank,
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
        target_modules=[f"{prefix}{name}" for name, layer in layers.items() if isinstance(layer, LoraLinear)],
        target_parameters=[f"{prefix}{name}" for name in of_experts] or None,
        use_dora=any(has_dora(layer, "default") for layer in layers.values()),
    )
    texts = {CONFIG_NAME: config}
    if card is not None:
        texts[CARD_FILE] = model_card(card, is_lora=True, library="transformers")
    state = factors_by_name(module, "default", f"{PEFT_PART}.{prefix}".rstrip("."), _saved_shapes)
    _save(folder, dist, PEFT_FILE, state, (tensor for _, tensor in named_adapter(module)), texts)


def _save(
    folder: str | Path,
    dist: Dist,
    file: str,
    state: dict[str, Tensor],
    weights: Iterator[Tensor],
    texts: dict[str, str],
) -> None:
    """Write weights, with the names and shapes of `state`, and texts to the folder; all ranks take part.

    More than FILE_BYTES are split over files by size; the rank that writes a file holds one tensor besides the
    gathered.
    """
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in state.items()}
    number = max(1, min(-(-sum(sizes.values()) // FILE_BYTES), len(sizes)))
    try:
        with ExitStack() as stack:
            with same_error(dist):
                place = stack.enter_context(new_folder(folder)) if dist.is_main else None
                if place:
                    (place / file).parent.mkdir(exist_ok=True)
            writers, place = ([0], place) if number == 1 else _find_writers(dist, Path(folder), place)
            files = _file_names(file, min(number, len(writers)))
            chosen = {name: files[share] for name, share in assign_by_size(sizes, len(files)).items()}
            own_file = dict(zip(writers, files, strict=False)).get(dist.rank)
            with same_error(dist):
                try:
                    if place and own_file:
                        file_tensors = {name: tensor for name, tensor in state.items() if chosen[name] == own_file}
                        _write(place / own_file, file_tensors, zip(state, weights, strict=True))
                finally:
                    for _ in weights:  # all ranks take part in every gather, even after an error
                        pass
            if len(files) > 1:
                index = {
                    "metadata": {"total_size": sum(sizes.values())},
                    "weight_map": {name: Path(path).name for name, path in chosen.items()},
                }
                texts = texts | {f"{file}.index.json": json.dumps(index, indent=2, sort_keys=True) + "\n"}
            with same_error(dist):
                if dist.is_main and place:
                    for name, text in texts.items():
                        (place / name).write_text(text, encoding="utf-8")
                stack.close()  # renames the folder
    except OSError as exc:
        raise OSError(f"{folder} could not be written: {exc}") from exc


def _find_writers(dist: Dist, folder: Path, place: Path | None) -> tuple[list[int], Path]:
    """Return the ranks that see the folder that the first rank has made to replace `folder`, and its path here."""
    mark = place and place / f".{uuid4().hex}"
    with same_error(dist):
        if mark:
            mark.touch()
    folder_path = folder.parent / gather_json(dist, mark and f"{mark.parent.name}/{mark.name}")[0]
    writers = [rank for rank, is_visible in enumerate(gather_json(dist, folder_path.is_file())) if is_visible]
    with same_error(dist):
        if mark:
            mark.unlink()
    return writers, folder_path.parent


def _file_names(file: str, number: int) -> list[str]:
    """Return diffusers' names for `number` files, or `file` itself for one."""
    stem, ending = file.removesuffix(".safetensors"), f"of-{number:05}.safetensors"
    return [f"{stem}-{i:05}-{ending}" for i in range(1, number + 1)] if number > 1 else [file]


def _write(path: Path, tensors: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file of the `tensors`, which arrive in its order, while the next ones are gathered."""

    def write(tensor: Tensor) -> None:
        out.write(tensor.view(-1).view(torch.uint8).numpy().data)

    with path.open("wb") as out, ThreadPoolExecutor(1) as pool:
        out.write(file_header(tensors, format="pt"))
        written: Future[None] | None = None
        for name, tensor in weights:
            if name in tensors:
                if written:
                    written.result()
                written = pool.submit(write, tensor.cpu().contiguous())
            del tensor  # before the next tensor is gathered
        if written:
            written.result()
        out.flush()
        os.fsync(out.fileno())


def weight_folders(folder: str | Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the existing folders of a run's weights by expert; {"": folder} for a net without experts.

    names: names of the net's submodules, or "" for the net itself.

    Raises:
        ValueError: none exists.
    """
    folders = {name: Path(folder) / name for name in names if (Path(folder) / name).is_dir()}
    if not folders:
        raise ValueError(f"folder must have a folder of {' or '.join(name or '.' for name in names)}, got {folder}")
    return folders


def saved_files(folder: str | Path, *, part: str = "transformer") -> list[Path]:
    """Return the files of the full weights of `part` in a folder; empty if the folder has an adapter.

    Raises:
        ValueError: the folder has neither.
    """
    full = sorted((Path(folder) / part).glob("*.safetensors"))
    if not full and not find_adapter(folder):
        raise ValueError(f"folder must hold {LORA_FILE}, {PEFT_FILE} or {part}/{FULL_FILE}, got {folder}")
    return full


def check_weights(module: nn.Module, folder: str | Path, *, part: str = "transformer") -> None:
    """Check that `load_weights` would succeed, without reading weights; the module may be on the meta device.

    Raises:
        ValueError: the folder does not hold weights of such a module; the message names file and tensor.
    """
    if files := saved_files(folder, part=part):
        check_files(module, files)
        return
    saved, state = read_adapter(folder, part=part), module.state_dict()
    weights = {base_name(name): tuple(value.shape) for name, value in state.items()}
    unfit = [layer for layer in saved.names if not _fits_layer(saved, layer, weights.get(f"{layer}.weight", ()))]
    if unfit:
        count = f"{len(unfit)} of {len(saved.names)} layers, such as {min(unfit)}"
        raise ValueError(f"{saved.file} does not fit {type(module).__name__}: {count}")


def load_weights(module: nn.Module, folder: str | Path, *, part: str = "transformer") -> None:
    """Load a folder of `save_weights` into an unsharded diffusers model: full weights in place, or a new LoRA adapter.

    Raises:
        ValueError: the folder has neither, the weights do not match the module or are not finite, or the module has
            no `load_lora_adapter`.
    """
    check_weights(module, folder, part=part)
    if files := saved_files(folder, part=part):
        read_tensors(module.state_dict(keep_vars=True), files)
        return
    load_lora_adapter = getattr(module, "load_lora_adapter", None)
    if load_lora_adapter is None:
        raise ValueError(f"module must have load_lora_adapter(), as diffusers models do, got {type(module).__name__}")
    load_lora_adapter(scaled_state(read_adapter(folder, part=part)), prefix=None)


def _saved_shapes(layer: AdaptedLayer, adapter: str) -> Sequence[Tensor]:
    """Return tensors shaped like those in a file; with PiSSA they have no values."""
    trained = _factors_with_initial(layer, adapter)
    return (
        adapter_tensors(layer, adapter)
        if len(trained) == 2
        else _trained_factors(*(factor.detach().to("meta") for factor in trained))
    )


def _factors_with_initial(layer: AdaptedLayer, name: str) -> list[nn.Parameter]:
    """Return A and B of one layer's adapter, followed by the initial A and B of PiSSA, if used."""
    return [factor for adapter in (name, INITIAL) if adapter in layer.lora_A for factor in factors(layer, adapter)]


def _trained_factors(down: Tensor, up: Tensor, *initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B; with initial factors, those of the trained change, in a form robust to rounding by readers."""
    if not initial:
        return down, up
    return torch.cat([down, down - initial[0]]), torch.cat([up - initial[1], initial[1]], dim=1)


def _fits_layer(saved: SavedAdapter, layer: str, weight: tuple[int, ...]) -> bool:
    """True if A [rank, in], B [out, rank] and any magnitudes [out] of a layer match its weight [out, in]."""
    down, up, *magnitudes = (saved.shapes[name] for name in saved.names[layer])
    fits = len(weight) == len(down) == len(up) == 2 and down[1] == weight[1] and up == (weight[0], down[0])
    return fits and all(shape == weight[:1] for shape in magnitudes)


def _gather_full(value: Tensor, owners: Mapping[Tensor, int] = MappingProxyType({})) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach()
    if value not in owners:
        return value.full_tensor()
    local = value.to_local().detach()
    whole = local if len(local) else local.new_empty(value.shape)
    torch.distributed.broadcast(whole, group=value.device_mesh.get_group(), group_src=owners[value])
    return whole


def _config(module: nn.Module) -> str:
    """Return diffusers' configuration of the module, with the class name that sharding replaced."""
    to_json_string = getattr(module, "to_json_string", None)
    if to_json_string is None:
        raise ValueError(f"module must have to_json_string(), as diffusers models do, got {type(module).__name__}")
    cls = type(module)
    name = cls.__bases__[1].__name__ if issubclass(cls, FSDPModule) else cls.__name__
    return json.dumps(json.loads(to_json_string()) | {"_class_name": name}, indent=2, sort_keys=True) + "\n"
