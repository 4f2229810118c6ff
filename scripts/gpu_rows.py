"""Rows of scripts/gpu_check.py: functions that yield one row per result.

A row has a result, a prediction and a verdict. The model is Qwen-Image's transformer with random weights, with a small
text encoder and VAE. Planned bytes and counted kernels are in `Visit.predictions`: they take minutes on a CPU, so
`predict` computes them beforehand on any machine.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import omni_train.kernels
import torch
import torch.distributed as torch_dist
from omni_rl.flow.sampling import step_prompts
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.fields import change
from omni_rl.tools import plan
from omni_train.checkpoint.state import local_rows
from omni_train.dist import (
    default_compute_dtype,
    init_distributed,
    local_device,
    memory,
    reset_peak_memory,
    synchronize,
)
from omni_train.kernels import BACKENDS, EXACT, check_attention, check_compiler
from omni_train.memory.quantized import BYTES, quantize_blocks
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import engines
import roofline
import runner
import step_cost
import trainer
import versus_peer
import versus_plain
from runner import REPO
from trainer import VARIANTS, app

GB, MB = 1e9, 2**20
FAILS = "FAILS"
FITS = "recomputed"  # fits 80 GB at the recipe's batch
FEW: dict[str, Any] = {"num_inference_steps": 3, "window_high": 2}  # both are trained
FASTER = 1.8  # times faster than a plain loop, on an H100 or H200
PLAIN_OVER_OURS = {"recomputed": 1.25, "compiled": 1.59}  # calculated from kernels, for an H100
NEEDS_2_12 = ("products kept", "nf4", "int8")  # for a parameter of selective checkpoints; compiled blocks need another
CLASSES = {  # kernels by parts of their names, first match
    "attention": "flash|fmha|attention|sdpa",
    "matrix products": "gemm|nvjet|cutlass|xmma|(^|::)(add)?mm|cublas",
    "copies": "copy|memcpy|memset|fill",
    "elementwise and norms": "elementwise|reduce|norm|triton|softmax|foreach|multi_tensor|aten::",
}


class LeftOutError(Exception):
    """The reason why a row cannot be measured here."""


@dataclass(frozen=True)
class Row:
    """A measured and a predicted value; verdict: "holds", the deviation, or FAILS."""

    what: str
    found: str
    predicted: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Size:
    """Sizes of measurements. shallow: blocks if depth does not matter. steps and samples: those of the run that learns.

    state_gb: size of the checkpoint. policy: settings of a Qwen3; answer: tokens of its answers. scratch: blocks and
    heads of a net trained from scratch, 104 M weights, and the number of images rendered for it; learning_s: time limit
    of each of its three runs, in seconds; learning_steps: their maximum steps, for pretraining and reinforcement
    learning;
    words: their scorer.
    """

    random: int = 60
    random_heads: int = 24
    side: int = 512
    batch_size: int = 16
    rank: int = 64
    shallow: int = 2
    rounds: int = 2
    steps: int = 20
    samples: int = 8
    state_gb: float = 5.1
    logged: int = 200
    matrix: int = 8192
    policy: tuple[tuple[str, int], ...] = (
        ("hidden_size", 1024), ("intermediate_size", 3072), ("num_attention_heads", 16), ("num_key_value_heads", 8),
        ("head_dim", 128), ("num_hidden_layers", 28),
    )  # fmt: skip
    answer: int = 128
    scratch: tuple[int, int, int] = (11, 4, 50_000)
    learning_s: float = 600.0
    learning_steps: tuple[int, int] = (20_000, 1_000)
    words: str = "ocr --option reading=line"


SMALL = Size(
    1, 1, 32, 2, 4, 1, rounds=1, steps=4, samples=4, state_gb=0.02, logged=3, matrix=256, policy=(), answer=4,
    scratch=(1, 1, 16), learning_steps=(2, 1), words="jpeg",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A simulated short step. kernels, least: by phase; least without recomputed kernels. peaks: bytes."""

    kernels: Mapping[str, Counter[roofline.Kernel]]
    least: Mapping[str, Counter[roofline.Kernel]]
    peaks: Mapping[str, int]


@dataclass(frozen=True)
class Visit:
    """Inputs of the rows. predictions: by variant; may be empty. peer: a checkout of flow_grpo or DiffusionNFT, or "".

    folder: where images are stored; None stores none.
    """

    size: Size
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    peer: str = ""
    folder: Path | None = None


# 1. Does it run, and what is the device?


def machine(visit: Visit) -> Iterator[Row]:
    """Yield versions, and the memory of device and host."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Row("torch, CUDA, cores", f"{torch.__version__}, {torch.version.cuda}, {os.cpu_count()}")
    yield Row("memory of the host, GB", f"{pages / GB:.0f}")
    with suppress(RuntimeError, AttributeError):
        free, total = torch.accelerator.get_memory_info(local_device())
        yield Row("memory of the device, GB, and free of it", f"{total / GB:.1f}, {free / GB:.1f}")


def learn(visit: Visit) -> Iterator[Row]:
    """Yield the rewards of a few steps of tiny-signs, in which images get brighter."""
    size, rewards = visit.size, list[float]()
    args = trainer.Args(prompts_per_step=size.samples // 2, group_size=size.samples, batch_size=size.samples)
    own: dict[str, Any] = {
        "lora_rank": 0,
        "true_cfg_scale": 1.0,
        "noise_level": 0.7,
        "window_high": 9,
        "window_size": 3,
        "clip_range": 1e-3,
        "lr": 3e-4,
        "optim_weight_decay": 0.0,
        "dtype": "float32",
    }

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        for number in range(size.steps):
            yield (step := Step(number))
            rewards.append(step.metrics["reward/mean"])

    trainer.train(trainer.settings(args, args.model, **own), steps, trainer.brightness)
    part = max(1, size.steps // 4)
    first, last = (sum(some) / part for some in (rewards[:part], rewards[-part:]))
    what = f"mean reward of tiny-signs, first and last {part} of {size.steps} steps"
    yield Row(what, f"{first:.4f}, {last:.4f}", "rises", "holds" if last > first else FAILS)


def ceilings(visit: Visit) -> Iterator[Row]:
    """Yield the peak rates of the device."""
    found, kind = ceilings_here(visit.size), device_kind()
    assumed = asdict(roofline.ASSUMED[kind]) if kind else {}
    for name, value in asdict(found).items():
        unit = 1e-6 if name == "launch" else 1e12
        what = f"{name.replace('_', ' ')}, {'us' if name == 'launch' else 'TB/s' if name == 'bandwidth' else 'TFLOP/s'}"
        yield near(what, value / unit, assumed.get(name, math.nan) / unit)


def attention(visit: Visit, name: str) -> Iterator[Row]:
    """Yield the rates of an attention kernel, forward and backward."""
    has_attention(name)
    with sdpa_kernel(BACKENDS[name]):
        rates = roofline.attention_rates(local_device(), side=visit.size.matrix)
        for what, rate in zip(("forward", "backward"), rates, strict=True):
            yield Row(f"{what}, TFLOP/s", f"{rate / 1e12:.4g}")


# 2. Bits


def gate(visit: Visit, attention: str, variant: str, *, masked: bool = False, how: str = "as it is") -> Iterator[Row]:
    """Yield the largest |ratio - 1| before the first update, and the gate class that the run reports.

    Compiled blocks are checked over two steps, as nothing is compiled before the first rollout.

    masked: True for two texts in a batch. how: a key of COMPILERS.
    """
    has_attention(attention)
    what, count = "largest abs(ratio - 1), and its class", 1 + compiles(variant)
    torch.compiler.reset()
    try:
        with patch.dict(omni_train.kernels.EXACT, COMPILERS[how], clear=True):
            taken = take(shallow(visit.size), variant, count, masked=masked, attention=attention, **FEW)
    except RuntimeError as problem:
        if "No available kernel" in str(problem):
            raise LeftOutError(f"attention {attention} takes no mask here") from problem
        if "the ratio must be 1" not in str(problem):
            raise
        yield Row(what, f"wrong: {problem}", "0, exact", FAILS)
        return
    must, step, gap = how == "as it is", taken[-1], max(each.gap for each in taken)
    verdict = HOLDS[step.gate == "exact" and gap == 0] if must else ""
    yield Row(what, f"{gap:.3g}, {step.gate}", "0, exact" * must, verdict)
    if compiles(variant):
        seconds = sum(taken[0].seconds[phase] for phase in roofline.PHASES)
        yield Row("the first step, s", f"{seconds:.4g}")
        yield Row("rollout, update, s", f"{step.seconds['rollout']:.4g}, {step.seconds['update']:.4g}")


def repeated(visit: Visit) -> Iterator[Row]:
    """Yield whether a repeated update gives the same gradients, bit for bit, and the cost of that."""
    seconds = {}
    for flag, must in (("deterministic", True), ("no-deterministic", False)):
        taken = take(shallow(visit.size), FITS, 3, keeps_bits=True, deterministic=must, **FEW)
        count, seconds[must] = len({each.bits for each in taken}), min(each.seconds["update"] for each in taken)
        found = "equal" if count == 1 else f"{count} different ones"
        yield Row(f"gradients of 3 equal updates, --{flag}", found, "equal" * must, HOLDS[count == 1] if must else "")
    yield goal("seconds of the update, deterministic / not", seconds[True] / seconds[False], 1.03)


def same_bits(visit: Visit, variant: str) -> Iterator[Row]:
    """Yield whether a variant's gradients are bitwise equal to those with gradient checkpointing."""
    bits = [take(shallow(visit.size), name, 1, keeps_bits=True, **FEW)[0].bits for name in (FITS, variant)]
    is_same = bits[0] == bits[1]
    yield Row("gradients and those of recomputed blocks", "equal" if is_same else "differ", "equal", HOLDS[is_same])


def sleep(visit: Visit) -> Iterator[Row]:
    """Yield the difference of the embedded engine's samples before and after sleep."""
    latents: list[Tensor] = []

    def look(run: MediaRun[app.Args]) -> None:
        prompts, params = step_prompts(run, Step(0))[: run.args.data.batch_size], app.step_params(run, Step(0))
        for _ in range(2):
            latents.append(run.engine.generate(prompts, params).x0)
            run.engine.sleep()
            run.engine.wake()

    take(shallow(visit.size), FITS, 0, look=look, **FEW)
    yield exact("largest difference of samples", (latents[0] - latents[1]).abs().max().item(), 0.0)


def second_life(visit: Visit) -> Iterator[Row]:
    """Yield whether a killed and resumed run ends with the same bits as an uninterrupted one."""
    steps, signs = visit.size.steps, REPO / "data" / "tiny-signs"
    flags = {
        "preset": "tiny-signs",
        "model": trainer.Args().model,
        "prompts": signs / "train.txt",
        "scorer": "jpeg",
        "eval.prompts": signs / "eval.txt",
        "eval.every": steps,
        "save-every": 1,
        "train-steps": steps,
        "prompts-per-step": 2,
        "group-size": 4,
        "batch-size": 4,
        "eval.num-prompts": 2,
    }
    with tempfile.TemporaryDirectory() as place:
        for name, kills in (("one", 0), ("two", steps // 2)):
            for after in (kills, 0)[not kills :]:
                run_app("train_flowgrpo", flags | {"name": name}, Path(place), kill_after=after)
        digests = [digest_of(Path(place) / "runs" / name / "weights") for name in ("one", "two")]
    what = f"weights after {steps} steps, killed after {steps // 2} or not"
    yield Row(what, "equal" if digests[0] == digests[1] else "differ", "equal", HOLDS[digests[0] == digests[1]])


def from_scratch(visit: Visit) -> Iterator[Row]:
    """Yield the held-out scores of a net that is pretrained on rendered signs, then trained by FlowGRPO and by AWM.

    The words of the evaluation are in no image and no prompt of training. Each run ends after `learning_s` at most.
    """
    import tiny_signs

    size, signs, device = visit.size, REPO / "data" / "tiny-signs", local_device()
    blocks, heads, count = size.scratch
    every = [max(1, steps // 20) for steps in size.learning_steps]
    small = {"prompts-per-step": 2, "batch-size": 2, "eval.num-prompts": 2} if size == SMALL else {}
    own = {"eval.prompts": signs / "eval.txt", "scorer": size.words, "save-every": 1_000_000} | small
    runs: dict[str, tuple[str, dict[str, object]]] = {
        "pretraining": ("train_sft", {"preset": "tiny-signs", "prompts": "signs/samples.jsonl", "lr": 3e-4}),
        "FlowGRPO": ("train_flowgrpo", {"preset": "tiny-signs-flowgrpo", "prompts": signs / "train.txt", "lr": 3e-5}),
        "AWM": ("train_nft", {"preset": "tiny-signs-awm", "prompts": signs / "train.txt", "lr": 3e-5}),
    }
    args = runner.ModelArgs(random=blocks, random_heads=heads)
    with tempfile.TemporaryDirectory() as name, engines.checkpoint(args, device, torch.float32) as model:
        place = Path(name)
        tiny_signs.write_prompts(place / "train.txt", count=count, evaluation=False)
        tiny_signs.write_samples(place / "signs", place / "train.txt")
        for what, (app_name, flags) in runs.items():
            is_first = what == "pretraining"
            steps = {"train-steps": size.learning_steps[not is_first], "eval.every": every[not is_first]}
            group = {"group-size": 2} if small and not is_first else {}
            flags |= own | steps | group | {"model": model, "name": what}
            run_app(app_name, flags, place, stop_after=size.learning_s)
            yield from curve(what, place / "runs" / what, visit.folder)
            if is_first:
                shutil.copytree(
                    place / "runs" / what / "weights" / "transformer", f"{model}/transformer", dirs_exist_ok=True
                )


def curve(what: str, run: Path, folder: Path | None) -> Iterator[Row]:
    """Yield the first and last held-out score of a run; store the images of both evaluations in the folder."""
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    scores = {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}
    if len(scores) < 2:
        raise RuntimeError(f"{what} ended before its second evaluation, after {lines[-1]['step']} steps")
    first, *_, last = scores.values()
    yield Row(
        f"{what}: held-out score, first and last of {len(scores)}, {lines[-1]['step']} steps",
        f"{first:.4f}, {last:.4f}",
        "rises",
        "holds" if last > first else "missed",
    )
    yield Row(f"{what}: the curve", ", ".join(f"{score:.3f}" for score in scores.values()))
    for step in (min(scores), max(scores)):
        if folder:
            shutil.copy(run / "eval" / f"{step:06}.png", folder / f"{what}-{step:06}.png")


def tokens(visit: Visit) -> Iterator[Row]:
    """Yield the gate, and the gap between sampler and update, for two steps of a random Qwen3."""
    sys.path.append(str(REPO / "scripts"))
    import build_tiny_models as tiny
    from transformers import Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as place:
        model, tokenizer = Path(place) / "model", tiny.build_chat_tokenizer()
        with torch.device(local_device()):
            net = tiny.build_qwen3(
                Qwen3ForCausalLM, tokenizer, eos_token_id=tokenizer.eos_token_id, **dict(visit.size.policy)
            )
        tiny.LanguageModel(net.bfloat16(), tokenizer).save_pretrained(model)
        del net
        texts = Path(place) / "texts.jsonl"
        texts.write_text('{"prompt": "a sign", "pattern": "[a-m]"}\n{"prompt": "red", "pattern": "[A-Z]"}\n')
        flags = {
            "model": model,
            "prompts": texts,
            "eval.prompts": texts,
            "eval.every": 2,
            "train-steps": 2,
            "name": "one",
            "prompts-per-step": 2,
            "group-size": 8,
            "batch-size": 8,
            "max-new-tokens": visit.size.answer,
            "reward": "regex",
            "lr": 1e-6,
            "lora.rank": visit.size.rank,
            "save-every": 2,
        }
        run_app("train_gspo", flags, Path(place))
        lines = (Path(place) / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "policy/first_ratio_max_dev" in line]
    if not steps:
        raise RuntimeError(f"all answers have one score, so that no step was trained on: {lines[-1]}")
    names = {name for line in steps for name in line if name.startswith("policy/gap_")}
    found = names.pop().removeprefix("policy/gap_").replace("_", "-") if names else "exact"
    most = {key: max(line[f"policy/{key}"] for line in steps) for key in ("first_ratio_max_dev", "rollout_gap")}
    moved = f"{most['first_ratio_max_dev']:.3g}, {found}"
    yield Row("largest abs(ratio - 1), and its class", moved, "0, exact", HOLDS[found == "exact"])
    yield goal("the sampler's gap to the update", most["rollout_gap"], 1e-2)
    for what in ("step", "rollout", "update"):
        yield Row(f"{what}, s", f"{steps[-1][f'time/{what}_s']:.3g}")


# 3. Seconds and bytes


def step(visit: Visit, variant: str, **changes: Any) -> Iterator[Row]:
    """Yield the gate, time and memory of a short step in a variant, with the roofline and the plan."""
    has_attention(changes.get("attention", "auto"))
    collectives: list[str] = []

    def look(run: MediaRun[app.Args]) -> None:
        if run.dist.mesh:
            collectives.append(str(torch_dist.get_backend_config(run.dist.mesh.get_group())))

    first, second = take(visit.size, variant, 2, look=look, **ANY_GAP, **FEW, **changes)
    yield exact("largest abs(ratio - 1)", first.gap, 0.0)
    yield from (Row("collectives of one rank", backends) for backends in collectives)
    yield Row("the first step, s", f"{sum(first.seconds[phase] for phase in roofline.PHASES):.4g}")
    planned, here = visit.predictions.get(variant), ceilings_here(visit.size)
    if planned is None:
        yield Row("predictions", "none: run scripts/gpu_check.py --predict on any CPU before")
    for phase in roofline.PHASES:
        seconds = roofline.ASSUMED.get(device_kind(), here).seconds(planned.kernels[phase]) if planned else math.nan
        yield near(f"{phase}, s", second.seconds[phase], seconds)
        if planned:
            share = here.limit(planned.least[phase]) / second.seconds[phase]
            yield Row(f"{phase}, share of the limit", f"{share:.2f}")
    if local_device().type != "cpu":  # a CPU cannot report the peak of a step
        peaks = planned.peaks if planned else dict.fromkeys(("load", *roofline.PHASES), math.nan)
        most = max(peaks[name] for name in roofline.PHASES)
        yield near("loaded, GB", second.loaded / GB, peaks["load"] / GB, within=0.1)
        # weights dominate the peak, and would hide an error in the rest
        over = (second.peak - second.loaded) / GB, (most - peaks["load"]) / GB
        yield near("peak - loaded, GB", *over, within=0.1, must=True)
        for what, size in (("reserved by the allocator", second.reserved), ("used of the device", second.used)):
            if not math.isnan(size):
                yield Row(f"{what} - peak, GB", f"{(size - second.peak) / GB:.4g}")


def versus(visit: Visit) -> Iterator[Row]:
    """Yield the trainer's step and plain loops, which take turns."""
    variant = "compiled" if can_run("compiled") else FITS
    own = asdict(model_args(visit.size, variant)) | {"rounds": visit.size.rounds, "variant": variant}
    args = replace(versus_plain.Args(), **own)
    dtype = str(default_compute_dtype(local_device())).removeprefix("torch.")
    found = {name: versus_plain.fastest(rounds) for name, rounds in versus_plain.measure(args).items()}
    ours = found[versus_plain.OURS]
    yield Row(f"step of the trainer, {variant}, s", f"{ours.seconds:.4g}")
    for name, each in found.items():
        if name != versus_plain.OURS:
            over, is_plain = each.seconds / ours.seconds, name == versus_plain.PLAIN
            yield near(f"{name} / trainer", over, PLAIN_OVER_OURS[variant] if is_plain and device_kind() else math.nan)
            if is_plain:
                verdict = "holds" if over >= FASTER else "missed"
                yield Row("the same", f"{over:.4g}", f"goal {FASTER:g} or more", verdict)
            difference, bound = abs(each.grad_norm / ours.grad_norm - 1), versus_plain.BOUNDS[dtype]
            yield exact(f"gradient norm, {name}, relative difference", difference, bound)


def beside_peer(visit: Visit) -> Iterator[Row]:
    """Yield the time and memory of a peer's own trainer, and of this one, eager and compiled."""
    small = (
        {"side": 32, "num_inference_steps": 3, "batch_size": 2, "blocks": 2, "heads": 1} if visit.size == SMALL else {}
    )
    args = versus_peer.Args(peer=visit.peer, device_rows=True, rounds=1, **small)
    try:
        args.check()
    except ValueError as problem:
        raise LeftOutError(str(problem)) from problem
    _, found = versus_peer.measure(args)
    for phase, side, value, over in versus_peer.rows_of(found):
        yield Row(f"{phase}, {side}", value, f"{over} of {next(iter(found))}")


def profile(visit: Visit) -> Iterator[Row]:
    """Yield the shares of kernel classes in a step with some blocks, and the names of attention kernels."""
    size, found = replace(visit.size, random=min(visit.size.random, 12)), []

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        yield Step(0)
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as trace:
            yield Step(0)
        found.extend(trace.key_averages())

    with trainer.model(model_args(size, FITS)) as path:
        trainer.train(settings_of(size, FITS, path, lr=0.0, **ANY_GAP, **FEW), steps, trainer.brightness)
    kernels, spent = kernel_times(found), dict.fromkeys((*CLASSES, "others"), 0.0)
    for name, microseconds in kernels.items():
        kind = next((kind for kind, parts in CLASSES.items() if re.search(parts, name, re.IGNORECASE)), "others")
        spent[kind] += microseconds
    for kind, microseconds in sorted(spent.items(), key=lambda one: -one[1]):
        yield Row(f"{kind}, share of the kernels' time", f"{microseconds / max(1, sum(spent.values())):.2f}")
    names = [name for name in kernels if re.search(CLASSES["attention"], name, re.IGNORECASE)]
    yield Row("kernels of attention", "; ".join(name[:60] for name in names[:6]) or "none by name")


def dequantization(visit: Visit, bits: Any) -> Iterator[Row]:
    """Yield the time to dequantize the net's blocks once."""
    has_torch(bits)
    size, device = visit.size, local_device()
    net = runner.random_transformer(1, size.random_heads, 64, device=device, dtype=default_compute_dtype(device))
    kind = type(net.transformer_blocks[0]).__name__
    layers = [each for each in net.transformer_blocks[0].modules() if isinstance(each, nn.Linear)]
    numel = sum(layer.weight.numel() for layer in layers)
    quantize_blocks(net, bits, {kind}, device)
    seconds = roofline.fastest(lambda: [layer.weight for layer in layers], device)
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as trace:
        weights = [layer.weight for layer in layers]
        synchronize()
    del weights
    own = sum(kernel_times(trace.key_averages()).values()) / 1e6
    least = numel * (BYTES[bits] + 2) / ceilings_here(size).bandwidth
    yield near(
        f"kernels of {size.random} blocks, s, and if each byte moved once", size.random * own, size.random * least
    )
    yield Row("the same with their launches, s", f"{size.random * seconds:.4g}")


def decoding(visit: Visit) -> Iterator[Row]:
    """Yield the time to decode images, for each form of the VAE's convolutions."""
    side, base = visit.size.side, 96 * visit.size.side // 512
    for batch, pixels in ((visit.size.batch_size, side), (max(1, visit.size.batch_size // 4), 2 * side)):
        found = {
            form: trainer.decoding_s(pixels, form, batch=batch, base_dim=base, rounds=visit.size.rounds)
            for form in trainer.CONVOLUTIONS
        }
        ours = found[trainer.CONVOLUTIONS[0]]
        for form, seconds in found.items():
            fast = "" if form == trainer.CONVOLUTIONS[0] else "holds" if seconds >= ours else "missed"
            yield Row(f"{batch} of {pixels} pixels, {form}, s", f"{seconds:.4g}", f">= {ours:.4g}" * bool(fast), fast)


def saving(visit: Visit) -> Iterator[Row]:
    """Yield the time of a checkpoint."""
    size = visit.size.state_gb
    saved = step_cost.checkpoint_s(size, 1, None, init_distributed())
    yield goal(f"copy of {size:g} GB, s", saved["copy, s"], 0.2 * size)
    yield Row("save that training waits for, s", f"{saved['save that training waits for, s']:.3g}")


def tax(visit: Visit) -> Iterator[Row]:
    """Yield the cost of the framework: around the model, between its calls, and for noise."""
    size = visit.size
    own = step_cost.Framework(
        random=size.random,
        random_heads=size.random_heads,
        height=size.side,
        width=size.side,
        batch_size=1,
        group_size=2,
        prompts_per_step=1,
        steps=1,
    )
    (found,) = step_cost.steps_of(own)
    yield goal("step / (forward + backward)", found["step"] / (found["forward"] + found["backward"]), 1.03)
    with runner.quiet():
        logged = step_cost.Beside(size.logged, 0, size.side, 64, 0.05, 50, 10)
        seconds = [each["wall"] for _, each in step_cost.beside_s(logged)]
    yield goal("step beside the model, s", sum(seconds) / len(seconds), 0.05)
    drawn = min(step_cost.noise_s(7)["step_noise"])
    yield Row(f"noise of {step_cost.BATCH} samples of 512 pixels, ms", f"{drawn * 1e3:.3g}")


def vllm_omni(visit: Visit) -> Iterator[Row]:
    """Yield parity, speed and sleep of vLLM-Omni."""
    if find_spec("vllm_omni") is None:
        raise LeftOutError("vLLM-Omni is not installed")
    size, device = visit.size, local_device()
    sizes = {"random": min(size.random, 12), "random_heads": size.random_heads, "height": size.side, "width": size.side}
    dtype, least = default_compute_dtype(device), engines.Parity(**sizes)
    with engines.checkpoint(least, device, dtype) as path:
        for row in engines.gaps_of(least, path, device, dtype):
            yield goal(f"{row[0]}, guidance {row[1]}: gap in the first half of the steps", float(row[3]), 4e-3)
        bench = engines.Bench(engines.Speed(**sizes), device, dtype, engines.open_model(path))
        for what, embedded, other, _ in engines.costs_of(bench):
            yield Row(f"{what}: embedded, vLLM-Omni", f"{embedded}, {other}")


# 4. Shared by rows


def kernel_times(found: Sequence[Any]) -> dict[str, float]:
    """Return the microseconds of a profile's kernels by name, or of its operators if it has no device times."""
    kernels = {each.key: each.self_device_time_total for each in found if each.device_type.name != "CPU"}
    return kernels or {each.key: each.self_cpu_time_total for each in found}


HOLDS = {True: "holds", False: FAILS}


ROUNDED = {"emulate_precision_casts": True}
COMPILERS = {  # torch's options
    "as it is": dict(EXACT),
    "not deterministic": ROUNDED,
    "no padding": ROUNDED | {"shape_padding": False},
    "fused products and sums": {"deterministic": True, "shape_padding": False},
}
ANY_GAP: dict[str, Any] = {"ratio_tolerance": 1e30, "clip_range": 1e31}  # reports times for any ratio


@dataclass(frozen=True)
class Taken:
    """A training step: largest |ratio - 1| before its first update, its class, seconds by phase, and bytes.

    loaded, peak: allocated before the first step, and at the peak. reserved, used: peak reserved by the allocator, and
    used on the device; NaN if unknown. bits: a digest of all gradients, if requested.
    """

    gap: float
    gate: str
    seconds: Mapping[str, float]
    loaded: float
    peak: float
    reserved: float
    used: float
    bits: str


def take(
    size: Size,
    variant: str,
    count: int,
    *,
    masked: bool = False,
    keeps_bits: bool = False,
    look: Callable[[MediaRun[app.Args]], None] = lambda run: None,
    **changes: Any,
) -> list[Taken]:
    """Run the first training step of a variant several times, and then `look`."""
    has_torch(variant)
    taken: list[Taken] = []
    device, bits = local_device(), [""]
    reset_peak_memory(device)
    before = memory(device).current_mb  # memory already in use, such as libraries' caches

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        spent, stepped = Counter[str](), run.optimizer_step
        loaded = (memory(device).peak_mb - before) * MB

        def noted(*args: Any, **options: Any) -> Any:
            bits[0] = digest_of(run.policy.params)
            return stepped(*args, **options)

        if keeps_bits:
            run.optimizer_step = noted  # type: ignore[method-assign]
        trainer.clock(run, spent)
        for _ in range(count):
            spent.clear()
            reset_peak_memory(device)
            yield (step := Step(0))
            if step.metrics["policy/skipped_updates"]:
                raise RuntimeError(f"{variant}: the optimizer step was skipped, so that it has no moments")
            seconds = spent | {"rollout": spent["rollout"] - spent["decode"]}
            now, gap = memory(device), f"policy/gap_{run.gate.replace('-', '_')}"
            gaps = step.metrics.get(gap, step.metrics["policy/first_ratio_max_dev"])
            peak = (now.peak_mb - before) * MB
            taken.append(Taken(gaps, run.gate, seconds, loaded, peak, now.reserved_mb * MB, now.used_mb * MB, bits[0]))
        look(run)

    with trainer.model(model_args(size, variant)) as path:
        own = settings_of(size, variant, path, masked=masked, lr=0.0, **changes)
        trainer.train(own, steps, trainer.brightness, trainer.TEXTS if masked else trainer.TEXTS[:1])
    return taken


def shallow(size: Size) -> Size:
    """Return a size with few blocks of full width."""
    return replace(size, random=min(size.random, size.shallow))


def model_args(size: Size, variant: str, *, masked: bool = False) -> trainer.Args:
    """Return one group in a variant's batches. masked: two groups per batch, with texts of different lengths."""
    _, smaller, blocks = VARIANTS[variant]
    batch = max(1 + masked, size.batch_size // (smaller if size.random > size.shallow else 1))
    return trainer.Args(
        random=min(size.random, blocks),
        random_heads=size.random_heads,
        height=size.side,
        width=size.side,
        lora_rank=size.rank,
        batch_size=2 * max(2, batch // 2) if masked else batch,
        group_size=max(2, batch // (1 + masked)),
        prompts_per_step=1 + masked,
    )


def settings_of(size: Size, variant: str, path: str, *, masked: bool = False, **changes: Any) -> app.Args:
    """Return the trainer's settings for a variant."""
    lora = {"lora_rank": size.rank, "lora_alpha": 2 * size.rank}
    own = lora | VARIANTS[variant].settings | changes
    return trainer.settings(model_args(size, variant, masked=masked), path, **own)


def run_app(
    name: str, flags: Mapping[str, object], place: Path, *, kill_after: int = 0, stop_after: float = math.inf
) -> None:
    """Run a trainer in a folder. kill_after: number of steps after which it is killed; 0 lets it end.

    stop_after: seconds after which it is interrupted, as by Ctrl-C.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    log, lines = place / "log.txt", place / "runs" / str(flags["name"]) / "metrics.jsonl"
    with log.open("w") as out:
        command = [sys.executable, str(REPO / "apps" / f"{name}.py"), *words]
        process = subprocess.Popen(command, cwd=place, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        end, is_asked = time.monotonic() + stop_after, False
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() > end and not is_asked:
                    process.send_signal(signal.SIGINT)
                    is_asked = True
                if kill_after and lines.is_file() and len(lines.read_text().splitlines()) > kill_after:
                    return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode and not is_asked:
        raise RuntimeError(f"{name} ended with {process.returncode}: {log.read_text()[-500:]}")


def digest_of(what: Path | Sequence[nn.Parameter]) -> str:
    """Return a digest of a folder's weights, or of the gradients of parameters."""
    total = hashlib.sha256()
    if isinstance(what, Path):
        files = sorted(what.rglob("*.safetensors"))
        if not files:
            raise RuntimeError(f"{what} has no weights")
        for file in files:
            total.update(file.read_bytes())
        return total.hexdigest()
    for p in what:
        if p.grad is not None:
            total.update(local_rows(p.grad)[0].float().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def has_attention(name: str) -> None:
    """Raise LeftOutError if the device does not have these attention kernels."""
    try:
        check_attention(name, local_device(), default_compute_dtype(local_device()))
    except ValueError as problem:
        raise LeftOutError(str(problem)) from problem


def has_torch(variant: str) -> None:
    """Raise LeftOutError if a variant needs a newer torch or a missing compiler."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if (variant in NEEDS_2_12 or compiles(variant)) and version < (2, 12):
        raise LeftOutError(f"{variant} needs torch 2.12, and this is {torch.__version__}")
    if compiles(variant):
        try:
            check_compiler(local_device())
        except ValueError as problem:
            raise LeftOutError(str(problem)) from problem


def compiles(variant: str) -> bool:
    """True if a variant compiles blocks."""
    return bool(VARIANTS[variant].settings.get("compile"))


def can_run(variant: str) -> bool:
    """True if a variant can run here."""
    with suppress(LeftOutError):
        has_torch(variant)
        return True
    return False


@cache
def ceilings_here(size: Size) -> roofline.Ceilings:
    """Return the ceilings of this device."""
    return roofline.measure_ceilings(local_device(), side=size.matrix)


def device_kind() -> str:
    """Return this device's key in roofline.ASSUMED, or ""."""
    return next((kind for kind in roofline.ASSUMED if kind in runner.device_name(local_device())), "")


def exact(what: str, found: float, bound: float) -> Row:
    """Return the row of a value that must not exceed a bound."""
    return Row(what, f"{found:.3g}", f"<= {bound:g}" if bound else "0", HOLDS[found <= bound])


def near(what: str, found: float, predicted: float, *, within: float = 0.25, must: bool = False) -> Row:
    """Return the row of a predicted value, unless that is NaN. must: True to fail if the deviation is larger."""
    if math.isnan(predicted):
        return Row(what, f"{found:.4g}")
    holds, off = abs(found / predicted - 1) <= within, FAILS if must else f"{found / predicted:.2f} x"
    return Row(what, f"{found:.4g}", f"{predicted:.4g}", "holds" if holds else off)


def goal(what: str, found: float, most: float) -> Row:
    """Return the row of a value with an upper goal."""
    return Row(what, f"{found:.4g}", f"goal {most:g}", "holds" if found <= most else "missed")


# 5. Predictions, on any CPU

PREDICTED = ("recomputed", "as it is", "compiled", "products kept", "offloaded", "blocks offloaded", "gathered", "nf4")


def predict(size: Size, variant: str) -> Prediction:
    """Plan and count a short step of a variant, without the kernels that dequantize."""
    kept = VARIANTS[variant].settings
    recomputes = bool(kept.get("memory_gradient_checkpointing")) and variant != "products kept"
    args = model_args(size, variant)
    return Prediction(kernels_of(args, recomputes), kernels_of(args, False), peaks_of(size, variant))


def kernels_of(args: trainer.Args, checkpointing: bool) -> dict[str, Counter[roofline.Kernel]]:
    """Return the kernels of a short step by phase, with or without gradient checkpointing.

    All blocks except the first and last have the same kernels, so two and three blocks determine the count for more.
    """
    if args.random <= 3:
        return _counted(args, checkpointing)
    two, three = (_counted(replace(args, random=count), checkpointing) for count in (2, 3))
    more = {phase: Counter(three[phase]) for phase in three}
    for phase, kernels in more.items():
        kernels.subtract(two[phase])
    return {
        phase: Counter({k: two[phase][k] + n * (args.random - 2) for k, n in kernels.items()})
        for phase, kernels in more.items()
    }


@cache
def _counted(args: trainer.Args, checkpointing: bool) -> dict[str, Counter[roofline.Kernel]]:
    """Count each kernel."""
    own = {"lora_rank": args.lora_rank, "memory_gradient_checkpointing": checkpointing, "dtype": "bfloat16"}
    with trainer.model(args) as path:
        return roofline.count(trainer.settings(args, path, **own, **FEW))


def peaks_of(size: Size, variant: str) -> dict[str, int]:
    """Return the planned peak bytes of the phases of a short step in a variant."""
    with trainer.model(model_args(size, variant)) as path, runner.quiet():
        Path("prompts.txt").write_text(f"{trainer.TEXTS[0]}\n")  # a plan assumes the maximum length for all prompts
        settings = settings_of(size, variant, path, dtype="bfloat16", **FEW)
        return dict(plan.measure(app.main, change(settings, dry_run=True, memory_device_gb=80.0), 1).peaks)
