"""The vLLM-Omni engine compared with the embedded engine: numerical parity, speed, cost of a sync, and memory.

    python benchmarks/engines.py parity
    python benchmarks/engines.py parity --random 12 --height 512 --width 512
    python benchmarks/engines.py speed
    python benchmarks/engines.py speed --random 12 --height 512 --width 512 --rounds 5

Needs vLLM-Omni.
"""

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import runner
import torch
from omni_rl.settings.fields import at_least
from omni_rollout import Model, Params, Parts, Prompt, Trajectory, replay
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import Transition, cps_step, dance_step, sde_step
from omni_train.dist import default_compute_dtype, local_device, memory, reset_peak_memory
from omni_train.lora import add_lora, reference, unadapted_params
from omni_train.weights.full import named_weights
from runner import ModelArgs
from torch import nn

MB = 2**20


# The model and the engine


def prompts(args: ModelArgs) -> list[Prompt]:
    """Return one group of prompts."""
    return [Prompt(runner.TEXT, group=0, index=i, seed=i) for i in range(args.batch_size)]


@contextmanager
def checkpoint(args: ModelArgs, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield the folder of the pipeline, with a random transformer if `args.random` is set."""
    if not args.random:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(args.model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("transformer"))
        text_width = runner.config(folder, "text_encoder")["text_config"]["hidden_size"]
        net = runner.random_transformer(args.random, args.random_heads, text_width, device=device, dtype=dtype)
        net.save_pretrained(Path(folder) / "transformer")
        del net
        yield folder


def open_engine(model: Model, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the vLLM-Omni engine. It is imported here, so that its memory can be told from the rest."""
    from omni_rollout.engines.vllm_omni.engine import VllmOmniEngine

    return VllmOmniEngine(model, device=device, dtype=dtype)


def setting(args: ModelArgs, path: str, device: torch.device) -> str:
    """Return one line that describes the measurement, with place and date."""
    from diffusers import QwenImageTransformer2DModel

    shape = runner.config(path, "transformer")
    with torch.device("meta"):
        num_params = QwenImageTransformer2DModel.from_config(shape).num_parameters()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("diffusers", "vllm-omni"))
    return runner.stamp(
        versions,
        f"{shape['num_layers']} blocks, {shape['num_attention_heads']} heads of "
        f"{shape['attention_head_dim']}, {num_params / 1e6:.1f} M parameters{', random' if args.random else ''}",
        f"{args.width} x {args.height} pixels, {args.num_inference_steps} steps, batch of {args.batch_size}",
    )


# Parity


STEPS: dict[str, tuple[Callable[..., Transition], float]] = {  # with the noise levels of the README
    "sde": (sde_step, 0.7),
    "cps": (cps_step, 0.8),
    "dance": (dance_step, 0.3),
}
LORA_LR, FULL_LR = 1e-2, 1e-4
PARITY = (
    "dtype", "step", "guidance", "before", "before, first half", "without sync", "LoRA, merged",
    "all weights, shared", "x0",
)  # fmt: skip


@dataclass(frozen=True)
class Parity(ModelArgs):
    """Settings of the comparison of numbers."""

    dtype: Literal["both", "float32", "bfloat16"] = "both"  # Dtype of weights and products
    true_cfg_scale: Annotated[float, at_least(1.001)] = 4.0  # Guidance in the half of the cases that use it


def parity(args: Parity) -> None:
    """Compare log-probs of the vLLM-Omni engine with the trainer's, and its samples with the embedded engine's.

    A gap is the largest |log-prob(trainer) - log-prob(engine)| over the samples of a batch and all steps except the
    last; if it is small, it equals |ratio - 1|, which the trainer checks before every update. The first half of the
    steps is listed separately, since gaps grow towards the end, and recipes with few trained steps choose them there.
    `x0` is the largest difference of a clean latent from the embedded engine's, before any update.
    """
    device = local_device()
    rows: list[list[str]] = []
    for name in ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,):
        dtype = getattr(torch, name)
        with checkpoint(args, device, dtype) as path:
            if not rows:
                print(setting(args, path, device) + "\n")
            rows += [[name, *row] for row in gaps_of(args, path, device, dtype)]
    print(runner.table(PARITY, rows))


def gaps_of(args: Parity, path: str, device: torch.device, dtype: torch.dtype) -> list[list[str]]:
    """Return the table's rows for one dtype: for each step function, one without and one with guidance."""
    cases = [params_of(args, step, scale) for step in STEPS for scale in (1.0, args.true_cfg_scale)]
    names = [[step, scale] for step in STEPS for scale in ("off", f"{args.true_cfg_scale:g}")]
    model = open_model(path)
    embedded = DiffusersEngine(model, model.load(device=device, dtype=dtype))
    expected = [embedded.generate(prompts(args), params).x0 for params in cases]
    del embedded
    engine = open_engine(model, device, dtype)

    def sample() -> list[Trajectory]:
        return [engine.generate(prompts(args), params) for params in cases]

    def trainer() -> Trainer:
        return Trainer(model, model.load_net(device=device, dtype=dtype))

    before = sample()
    columns = lora_columns(args, engine, trainer(), before, sample)
    columns.append(full_column(engine, trainer(), before, sample))
    columns.append([(one.x0 - x0).abs().max().item() for one, x0 in zip(before, expected, strict=True)])
    engine.close()
    return [[*name, *(f"{value:.1e}" for value in values)] for name, *values in zip(names, *columns, strict=True)]


def params_of(args: Parity, step: str, scale: float) -> Params:
    """Return parameters that keep all steps except the last."""
    rule, noise_level = STEPS[step]
    return Params(
        args.num_inference_steps,
        args.height,
        args.width,
        guidance={"true_cfg_scale": scale},
        rule=rule,
        noise_level=noise_level,
        sde_steps=tuple(range(args.num_inference_steps - 1)),
    )


Sample = Callable[[], list[Trajectory]]


@dataclass(frozen=True)
class Trainer:
    """The trained model."""

    model: Model
    net: Any

    def gaps(self, sampled: list[Trajectory], *, num_steps: int | None = None) -> list[float]:
        """Return, for each trajectory, the largest log-prob difference from the engine's over all or some steps."""
        found = []
        for trajectory in sampled:
            expected = trajectory.rollout_log_prob[:, :num_steps]
            with torch.no_grad():
                scores = [replay(self.model, self.net, trajectory, k).log_prob for k in range(expected.shape[1])]
            found.append((torch.stack(scores, dim=1) - expected).abs().max().item())
        return found

    def update(self, trajectory: Trajectory, *, lr: float) -> None:
        """Make the first kept step more likely. Every weight moves by `lr`, as in Adam's first step.

        It uses no optimizer, whose state would leave no room for a large model.
        """
        self.net.enable_gradient_checkpointing()
        replay(self.model, self.net, trajectory, 0).log_prob.mean().backward()
        with torch.no_grad():
            for param in self.net.parameters():
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=lr)
                    param.grad = None


def lora_columns(
    args: Parity, engine: Any, trainer: Trainer, before: list[Trajectory], sample: Sample
) -> list[list[float]]:
    """Return gaps before an adapter's update, for all steps and the first half; then without and with a sync."""
    net = trainer.net
    add_lora(net, trainer.model.LORA_TARGETS, rank=args.lora_rank, alpha=2 * args.lora_rank, seed=0)
    engine.adopt(unadapted_params(net))
    columns = [trainer.gaps(before), trainer.gaps(before, num_steps=args.num_inference_steps // 2)]
    trainer.update(before[0], lr=LORA_LR)
    columns.append(trainer.gaps(before))
    engine.load_weights(named_weights(net), version=1)
    columns.append(trainer.gaps(sample()))
    with reference(net):
        engine.load_weights(named_weights(net), version=2)  # the checkpoint's weights again
    return columns


def full_column(engine: Any, trainer: Trainer, before: list[Trajectory], sample: Sample) -> list[float]:
    """Return the gaps after an update of all weights, which the engine has adopted."""
    engine.adopt(trainer.net.requires_grad_(True).named_parameters())
    trainer.update(before[0], lr=FULL_LR)
    engine.load_weights(named_weights(trainer.net), version=3)
    return trainer.gaps(sample())


# Speed, sync and memory


SPEED = ("", "embedded", "vLLM-Omni", "vLLM-Omni / embedded")


@dataclass(frozen=True)
class Speed(ModelArgs):
    """Settings of the comparison of seconds and bytes."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Dtype of weights and products; auto is the device's
    true_cfg_scale: Annotated[float, at_least(1.001)] = 4.0  # Guidance in the rows that use it
    rounds: Annotated[int, at_least(1)] = 3  # Rounds, in which both engines take turns


@dataclass(frozen=True)
class Bench:
    """Inputs shared by all rows."""

    args: Speed
    device: torch.device
    dtype: torch.dtype
    model: Model


def speed(args: Speed) -> None:
    """Compare images per second, the cost of a sync, and memory.

    Both engines take turns in one process, with the same prompts and seeds, and the same weight storage where it can be
    shared. Numbers are from the fastest round; the ratio of images per second is the median over the rounds, with its
    range. On a CPU, seconds are CPU time of this process, since others may use the machine.
    """
    device = local_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    dtype = default_compute_dtype(device) if args.dtype == "auto" else getattr(torch, args.dtype)
    with checkpoint(args, device, dtype) as path:
        print(f"{setting(args, path, device)}, {dtype}\n")
        print(runner.table(SPEED, costs_of(Bench(args, device, dtype, open_model(path)))))


def costs_of(bench: Bench) -> list[list[str]]:
    """Return the table's rows. The engine first shares no weights, then all, then all that LoRA does not change."""
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
    """Return images per second without and with guidance, and the peak memory of sampling."""
    rows, group = [], prompts(bench.args)
    for scale in (1.0, bench.args.true_cfg_scale):
        guidance = {"true_cfg_scale": scale}
        params = Params(bench.args.num_inference_steps, bench.args.height, bench.args.width, guidance=guidance)

        def sample(engine: Any, params: Params = params) -> Callable[[], object]:
            return lambda: engine.generate(group, params)

        times = take_turns(bench, sample(embedded), sample(engine))
        named = f"guidance {scale:g}" if scale > 1 else "no guidance"
        fastest = [len(group) / min(series) for series in times]
        rows.append([*row(f"images/s, {named}{what}", *fastest)[:3], runner.ratio(*times)])
        if bench.device.type != "cpu":  # a process cannot reset the peak of its resident memory
            peaks = [peak_mb(bench, sample(embedded)), peak_mb(bench, sample(engine))]
            rows.append(row(f"peak while sampling, {named}{what}, MB", *peaks))
    return rows


def sync_rows(bench: Bench, what: str, embedded: Any, engine: Any, net: nn.Module) -> list[list[str]]:
    """Return the milliseconds and bytes of a sync."""
    times = take_turns(
        bench,
        lambda: embedded.load_weights((), version=1),
        lambda: engine.load_weights(named_weights(net), version=1),
    )
    milliseconds = [1000 * min(series) for series in times]
    return [
        row(f"sync, {what}, ms", *milliseconds, ratio=False),
        row(f"sync, {what}, MB moved", 0, engine.moved_bytes / MB, ratio=False),
    ]


def held_row(what: str, parts: Parts, engine: Any) -> list[str]:
    """Return the MB of weights held by trainer and engine together, counting each storage once."""
    own = held_mb(*(part for part in vars(parts).values() if isinstance(part, nn.Module)))
    return row(f"weights of trainer and engine, {what}, MB", own, held_mb(parts.net, engine.pipeline))


def asleep_row(bench: Bench, engine: Any) -> list[str]:
    """Return the device memory freed while the engine sleeps."""
    before = memory(bench.device).current_mb
    engine.sleep()
    freed = before - memory(bench.device).current_mb if bench.device.type != "cpu" else 0.0
    engine.wake()
    return row("freed by sleep, all weights shared, MB", 0, freed, ratio=False)


def take_turns(bench: Bench, *calls: Callable[[], object]) -> list[list[float]]:
    """Return the seconds of each call in each round."""
    named = {str(i): call for i, call in enumerate(calls)}
    return [*runner.take_turns(named, bench.args.rounds, partial(runner.now, bench.device)).values()]


def peak_mb(bench: Bench, call: Callable[[], object]) -> float:
    """Return the peak memory of a call, above the memory in use before it."""
    reset_peak_memory(bench.device)
    before = memory(bench.device).current_mb
    call()
    return memory(bench.device).peak_mb - before


def held_mb(*modules: nn.Module) -> float:
    """Return the MB of the distinct storages of all parameters and buffers."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / MB


def row(name: str, embedded: float, ours: float, *, ratio: bool = True) -> list[str]:
    """Return one row, with a ratio if it is meaningful."""
    return [name, f"{embedded:.4g}", f"{ours:.4g}", f"{ours / embedded:.3f}" if ratio else ""]


if __name__ == "__main__":
    runner.run(__doc__, parity, speed)
