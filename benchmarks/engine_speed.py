"""The vLLM-Omni engine beside the embedded one: images a second, what a sync costs, what is held in memory.

    python benchmarks/engine_speed.py
    python benchmarks/engine_speed.py --random 12 --height 512 --width 512 --rounds 5

Prints one table. Both engines take turns in one process, sample the same prompts and seeds, and sample with the same
storage where it can be shared; of each the fastest round counts. On a CPU the seconds are those of this process's own
work, since others may use the machine. Needs vLLM-Omni.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from engines import MB, checkpoint, now, open_engine, prompts, setting, table
from engines import Args as Common
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import at_least, check_bounds
from omni_rollout import Model, Params, Parts
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.dist import default_compute_dtype, local_device, memory, reset_peak_memory
from omni_train.lora import add_lora, unadapted_params
from omni_train.weights.full import named_weights
from torch import nn

HEADER = ("", "embedded", "vLLM-Omni", "vLLM-Omni / embedded")


@dataclass(frozen=True)
class Args(Common):
    """Settings of the benchmark."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Of weights and products; auto is the device's own
    true_cfg_scale: Annotated[float, at_least(1.001)] = 4.0  # Of the rows that have guidance
    rounds: Annotated[int, at_least(1)] = 3  # Of which the fastest counts


@dataclass(frozen=True)
class Bench:
    """Inputs of every row."""

    args: Args
    device: torch.device
    dtype: torch.dtype
    model: Model


def main(args: Args) -> None:
    device = local_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    dtype = default_compute_dtype(device) if args.dtype == "auto" else getattr(torch, args.dtype)
    with checkpoint(args, device, dtype) as path:
        print(f"{setting(args, path, device)}, {dtype}\n")
        print(table(HEADER, measure(Bench(args, device, dtype, open_model(path)))))


def measure(bench: Bench) -> list[list[str]]:
    """The table's rows. The engine is opened sharing nothing, then shares all, then all that LoRA does not change."""
    start, model = memory(bench.device).current_mb, bench.model
    parts = model.load(device=bench.device, dtype=bench.dtype)
    embedded = DiffusersEngine(model, parts)
    opened = memory(bench.device).current_mb
    engine = open_engine(model, bench.device, bench.dtype)
    taken = [opened - start, memory(bench.device).current_mb - opened]
    held, sync = [], []

    sync.append(sync_rows(bench, "all weights copied", embedded, engine, parts.net))
    held.append(held_row("nothing shared", parts, engine))

    engine.adopt(parts.net.named_parameters())
    sync.append(sync_rows(bench, "all weights shared", embedded, engine, parts.net))
    held.append(held_row("all weights shared", parts, engine))
    images = image_rows(bench, "", embedded, engine)
    held.append(asleep_row(bench, engine))

    net = model.load_net(device=bench.device, dtype=bench.dtype)
    add_lora(net, model.LORA_TARGETS, rank=bench.args.lora_rank, alpha=2 * bench.args.lora_rank, seed=0)
    engine.adopt(unadapted_params(net))
    adapted = Parts(**vars(parts) | {"net": net})
    lora = f"LoRA of rank {bench.args.lora_rank}"
    sync.append(sync_rows(bench, f"{lora}, merged", embedded, engine, net))
    held.append(held_row(lora, adapted, engine))
    images += image_rows(bench, f", {lora}", DiffusersEngine(model, adapted), engine)
    engine.close()
    kind = "resident memory" if bench.device.type == "cpu" else "device memory"
    return [*images, *(row for rows in sync for row in rows), *held, row(f"{kind} that opening takes, MB", *taken)]


def image_rows(bench: Bench, what: str, embedded: Any, engine: Any) -> list[list[str]]:
    """Images a second without and with guidance, and the most memory that sampling takes."""
    rows, group = [], prompts(bench.args)
    for scale in (1.0, bench.args.true_cfg_scale):
        guidance = {"true_cfg_scale": scale}
        params = Params(bench.args.num_inference_steps, bench.args.height, bench.args.width, guidance=guidance)

        def sample(engine: Any, params: Params = params) -> Callable[[], object]:
            return lambda: engine.generate(group, params)

        seconds = fastest(bench, sample(embedded), sample(engine))
        named = f"guidance {scale:g}" if scale > 1 else "no guidance"
        rows.append(row(f"images/s, {named}{what}", *(len(group) / s for s in seconds)))
        if bench.device.type != "cpu":  # a process cannot reset the peak of its resident memory
            peaks = [peak_mb(bench, sample(embedded)), peak_mb(bench, sample(engine))]
            rows.append(row(f"peak while sampling, {named}{what}, MB", *peaks))
    return rows


def sync_rows(bench: Bench, what: str, embedded: Any, engine: Any, net: nn.Module) -> list[list[str]]:
    """Milliseconds and bytes of a sync."""
    seconds = fastest(
        bench,
        lambda: embedded.load_weights((), version=1),
        lambda: engine.load_weights(named_weights(net), version=1),
    )
    milliseconds = [1000 * s for s in seconds]
    return [
        row(f"sync, {what}, ms", *milliseconds, ratio=False),
        row(f"sync, {what}, MB moved", 0, engine.moved_bytes / MB, ratio=False),
    ]


def held_row(what: str, parts: Parts, engine: Any) -> list[str]:
    """The weights that trainer and engine hold together, each storage counted once."""
    own = held_mb(*(part for part in vars(parts).values() if isinstance(part, nn.Module)))
    return row(f"weights of trainer and engine, {what}, MB", own, held_mb(parts.net, engine.pipeline))


def asleep_row(bench: Bench, engine: Any) -> list[str]:
    """Device memory in use while the engine sleeps, below that while it is awake."""
    before = memory(bench.device).current_mb
    engine.sleep()
    freed = before - memory(bench.device).current_mb if bench.device.type != "cpu" else 0.0
    engine.wake()
    return row("freed by sleep, all weights shared, MB", 0, freed, ratio=False)


def fastest(bench: Bench, *calls: Callable[[], object]) -> list[float]:
    """The fastest round of each, in seconds; they take turns, after one round that warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(bench.args.rounds + 1):
        for call, series in zip(calls, times, strict=True):
            start = now(bench.device)
            call()
            if i:
                series.append(now(bench.device) - start)
    return [min(series) for series in times]


def peak_mb(bench: Bench, call: Callable[[], object]) -> float:
    """The most memory that a call takes above what is in use before it."""
    reset_peak_memory(bench.device)
    before = memory(bench.device).current_mb
    call()
    return memory(bench.device).peak_mb - before


def held_mb(*modules: nn.Module) -> float:
    """MB of the distinct storages of all parameters and buffers."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / MB


def row(name: str, embedded: float, ours: float, *, ratio: bool = True) -> list[str]:
    """One row; a ratio where it says something."""
    return [name, f"{embedded:.4g}", f"{ours:.4g}", f"{ours / embedded:.3f}" if ratio else ""]


def check_args(args: Args) -> None:
    """Raises ValueError for sizes that leave nothing to time."""
    check_bounds(args)


if __name__ == "__main__":
    main(parse_cli(Args, check_args, sys.argv[1:], app="engine_speed", description=__doc__))
