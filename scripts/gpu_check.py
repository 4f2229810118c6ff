"""Measure all speed, memory and exactness that need an accelerator, in one command.

python scripts/gpu_check.py            on one card of 80 GB or more, at most 25 minutes, without a network
python scripts/gpu_check.py --small    the same in a small size, on any device
python scripts/gpu_check.py --only gate versus

The model is Qwen-Image's transformer at full width and depth with random weights, beside a small text encoder and VAE.
Each part below is a function and a row of PARTS with its limit in seconds. It runs in its own process and writes
PART.json in the folder; a second call only runs parts that are missing, failed, or ran at another commit or device. A
row has the measured value, the predicted one, and a verdict. All rows together are page.md; in full size they also
become their device's section of docs/performance.md, or later with `--publish`, which runs nothing. The exit code is 1
if a part failed or an exact row does not hold.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import omni_train.kernels
import omni_train.prepare
import torch
from omni_rl.flow.sampling import prompts_of
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.fields import change
from omni_rl.tools import plan
from omni_rollout import replay
from omni_train.dist import (
    default_compute_dtype,
    deterministic,
    init_distributed,
    local_device,
    memory,
    reset_peak_memory,
)
from omni_train.files import write_atomically
from omni_train.kernels import check_attention, check_compiler
from torch import Tensor, nn
from torch.utils._pytree import tree_map

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import checkpoint
import engine_parity
import engine_speed
import engines
import fixed_cost
import framework_tax
import redundancy
import roofline
import trainer
import versus_plain
from trainer import VARIANTS, app

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs" / "performance.md"
FIRST, LAST = "<!-- found on accelerators -->\n", "<!-- end of found on accelerators -->\n"  # lines of it
NOTHING = "**Nothing on this page has been measured on an accelerator.**"
ALONE = "**Of this page only [this](#the-first-visit-to-an-accelerator) has been measured on an accelerator.**"
GB = 1e9
FAILS = "FAILS"


@dataclass(frozen=True)
class Row:
    """A measured and a predicted value; verdict: "holds", by how much it is off, or FAILS."""

    what: str
    found: str
    predicted: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Size:
    """How much is run. steps and samples: of the run that learns. state_gb: of the checkpoint."""

    random: int = 60
    random_heads: int = 24
    side: int = 512
    batch_size: int = 16
    rank: int = 64
    rounds: int = 2
    steps: int = 20
    samples: int = 8
    state_gb: float = 5.1
    logged: int = 200
    matrix: int = 8192


SMALL = Size(1, 1, 32, 2, 4, rounds=1, steps=4, samples=4, state_gb=0.02, logged=3, matrix=256)
FITS = "recomputed"  # fits 80 GB at the recipe's batch
FEW: dict[str, Any] = {"num_inference_steps": 3, "window_high": 2}  # both trained
KERNELS = ("auto", "cudnn", "flash", "efficient")  # --attention
FASTER = 1.8  # times a plain loop, on an H100 or H200
PLAIN_OVER_OURS = {"recomputed": 1.25, "compiled": 1.59}  # by arithmetic on kernels, for an H100


# 1. The parts


def ceilings(size: Size) -> Iterator[Row]:
    """Yield the peaks of the device."""
    found = roofline.measure_ceilings(local_device(), side=size.matrix)
    assumed = asdict(roofline.ASSUMED[kind]) if (kind := device_kind()) else {}
    for name, value in asdict(found).items():
        unit = 1e-6 if name == "launch" else 1e12
        what = f"{name.replace('_', ' ')}, {'us' if name == 'launch' else 'TB/s' if name == 'bandwidth' else 'TFLOP/s'}"
        yield near(what, value / unit, assumed.get(name, math.nan) / unit)


def gate(size: Size) -> Iterator[Row]:
    """Yield the largest |ratio - 1| before the first update: kernels of attention x whether blocks are recomputed."""
    for name in KERNELS:
        try:
            check_attention(name, local_device(), default_compute_dtype(local_device()))
        except ValueError:
            yield Row(f"attention {name}", "not there")
            continue
        for variant in ("as it is", FITS):
            (step,) = take(size, variant, 1, attention=name, **FEW)
            yield exact(f"attention {name}, {variant}: largest abs(ratio - 1)", step.gap, 0.0)


def variants(size: Size) -> Iterator[Row]:
    """Yield the gate, seconds and memory of a short step in each variant, beside the roofline and the plan."""
    here, kind = roofline.measure_ceilings(local_device(), side=size.matrix), device_kind()
    for variant in filter(can_run, VARIANTS):
        first, step = take(size, variant, 2, **FEW)
        yield exact(f"{variant}: largest abs(ratio - 1)", first.gap, 0.0)
        kept = VARIANTS[variant].settings
        recomputes = kept.get("memory_gradient_checkpointing", False), kept.get("memory_keep_products_gb", 0.0)
        kernels, least = (kernels_of(model_args(size, variant), *how) for how in (recomputes, (False, 0.0)))
        planned = plan_of(size, variant)
        for phase in ("rollout", "update"):
            yield near(
                f"{variant}: {phase}, s", step.seconds[phase], roofline.ASSUMED.get(kind, here).seconds(kernels[phase])
            )
            yield Row(
                f"{variant}: {phase}, share of the limit", f"{here.limit(least[phase]) / step.seconds[phase]:.2f}"
            )
        if local_device().type != "cpu":  # which cannot tell the peak of a step
            yield near(f"{variant}: peak, GB", step.peak / GB, planned / GB, within=0.05, must=True)


def bits(size: Size) -> Iterator[Row]:
    """Yield whether gradients repeat their bits and what that costs, and the gate by options of the compiler."""
    two, found = replace(size, random=min(size.random, 2)), list[Row]()

    def look(run: MediaRun[app.Args]) -> None:
        prompts, params = prompts_of(run, Step(0))[: run.args.batch_size], app.params_at(run, Step(0))
        batch, seconds = run.engine.generate(prompts, params), {}
        for only, name in ((True, "deterministic"), (False, "any")):
            passes = [gradients(run, batch, only) for _ in range(size.rounds + 1)]  # the first is slower
            seconds[name] = min(each.seconds for each in passes[1:])
            differ = max((a != b).sum().item() for a, b in zip(passes[0].grads, passes[1].grads, strict=True))
            what = f"gradients by {name} algorithms, elements of a weight that differ when repeated"
            found.append(exact(what, differ, 0.0) if only else Row(what, f"{differ}"))
        over = seconds["deterministic"] / seconds["any"]
        found.append(goal("backward pass by deterministic / any algorithms", over, 1.03))

    take(two, FITS, 0, look, **FEW)
    yield from found
    for name, (options, compiler) in (COMPILERS if can_run("compiled") else {}).items():
        torch.compiler.reset()
        with (
            patch.dict(omni_train.kernels.EXACT, options, clear=True),
            patch.object(omni_train.prepare, "compile_blocks", compiler),
        ):
            *_, step = take(two, "compiled", 2, **FEW)
        is_default = (options, compiler) == (DETERMINISTIC, omni_train.kernels.compile_blocks)
        what = f"compiled, {name}: largest abs(ratio - 1)"
        yield exact(what, step.gap, 0.0) if is_default else Row(what, f"{step.gap:.3g}")
        yield Row(
            f"compiled, {name}: rollout, update, s", f"{step.seconds['rollout']:.4g}, {step.seconds['update']:.4g}"
        )


def versus(size: Size) -> Iterator[Row]:
    """Yield the trainer's step and plain loops, in turn."""
    variant = "compiled" if can_run("compiled") else FITS
    args = replace(versus_plain.Args(), **asdict(model_args(size, variant)), rounds=size.rounds, variant=variant)
    found, dtype = versus_plain.measure(args), str(default_compute_dtype(local_device())).removeprefix("torch.")
    ours = found[versus_plain.OURS]
    yield Row(f"step of the trainer, {variant}, s", f"{ours.seconds:.4g}")
    for name, each in found.items():
        if name != versus_plain.OURS:
            is_predicted = name == versus_plain.PLAIN and device_kind()
            predicted = PLAIN_OVER_OURS[variant] if is_predicted else math.nan
            over = each.seconds / ours.seconds
            yield near(f"{name} / trainer, {variant}", over, predicted)
            if name == versus_plain.PLAIN:
                yield Row(
                    "the same", f"{over:.4g}", f"goal {FASTER:g} or more", "holds" if over >= FASTER else "missed"
                )
            difference, bound = abs(each.grad_norm / ours.grad_norm - 1), versus_plain.BOUNDS[dtype]
            yield exact(f"gradient norm, {name}, relative difference", difference, bound)


def sleep(size: Size) -> Iterator[Row]:
    """Yield the embedded engine before and after sleep; then parity, speed and sleep of vLLM-Omni, if installed."""
    latents: list[Tensor] = []

    def look(run: MediaRun[app.Args]) -> None:
        prompts, params = prompts_of(run, Step(0))[: run.args.batch_size], app.params_at(run, Step(0))
        for _ in range(2):
            latents.append(run.engine.generate(prompts, params).x0)
            run.engine.sleep()
            run.engine.wake()

    take(size, FITS, 0, look, **FEW)
    yield exact(
        "embedded engine: largest difference of samples after sleep", (latents[0] - latents[1]).abs().max().item(), 0.0
    )
    if find_spec("vllm_omni") is None:
        yield Row("parity, speed and sleep of vLLM-Omni", "not run: it is not installed")
        return
    blocks, device = min(size.random, 12), local_device()
    sizes = {"random": blocks, "random_heads": size.random_heads, "height": size.side, "width": size.side}
    dtype, least = default_compute_dtype(device), engine_parity.Args(**sizes)
    with engines.checkpoint(least, device, dtype) as path:
        for row in engine_parity.measure(least, path, device, dtype):
            yield goal(
                f"vLLM-Omni, {row[0]}, guidance {row[1]}: gap in the first half of the steps", float(row[3]), 4e-3
            )
        bench = engine_speed.Bench(engine_speed.Args(**sizes), device, dtype, engines.open_model(path))
        for what, embedded, other, _ in engine_speed.measure(bench):
            yield Row(f"{what}: embedded, vLLM-Omni", f"{embedded}, {other}")


def benchmarks(size: Size) -> Iterator[Row]:
    """Yield the overhead of the framework, and the goals for it."""
    tax = framework_tax.Args(
        random=size.random,
        random_heads=size.random_heads,
        height=size.side,
        width=size.side,
        batch_size=1,
        group_size=2,
        prompts_per_step=1,
        steps=1,
    )
    found = framework_tax.measure(tax)
    yield goal("step / (forward + backward)", found["step"] / (found["forward"] + found["backward"]), 1.03)
    two = replace(model_args(size, "as it is"), random=2, batch_size=2, group_size=2)
    for name, work in redundancy.rows(two, ["LoRA, guidance", "the same, `--memory.keep-products-gb 8`"]):
        yield goal(f"operations computed / needed, {name}", work.computed / work.needed, 1.0)
    saved = checkpoint.measure(size.state_gb, 1, None, init_distributed())
    yield goal(f"copy of a checkpoint of {size.state_gb:g} GB, s", saved["copy, s"], 0.2 * size.state_gb)
    yield Row("save that training waits for, s", f"{saved['save that training waits for, s']:.3g}")
    logged = fixed_cost.Args(size.logged, 0, size.side, 64, 0.05, 50, 10)
    with fixed_cost.quiet():
        seconds = [each["wall"] for _, each in fixed_cost.measure(logged)]
    yield goal("step beside the model, s", sum(seconds) / len(seconds), 0.05)
    orders = torch.contiguous_format, torch.channels_last
    apart, beside = (trainer.decoding_s(size.side, order, rounds=size.rounds) for order in orders)
    yield goal("decoding, a pixel's channels side by side / apart", beside / apart, 1.0)


def learn(size: Size) -> Iterator[Row]:
    """Yield a few steps of tiny-signs, whose images get brighter."""
    args = trainer.Args(prompts_per_step=size.samples // 2, group_size=size.samples, batch_size=size.samples)
    settings = trainer.settings(
        args,
        args.model,
        lora_rank=0,
        true_cfg_scale=1.0,
        noise_level=0.7,
        window_high=9,
        window_size=3,
        clip_range=1e-3,
        lr=3e-4,
        weight_decay=0.0,
        dtype="float32",
    )
    rewards = []

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        for number in range(size.steps):
            yield (step := Step(number))
            rewards.append(step.metrics["reward/mean"])

    trainer.train(settings, steps, trainer.brightness)
    part = max(1, size.steps // 4)
    first, last = (sum(some) / part for some in (rewards[:part], rewards[-part:]))
    rises = "holds" if last > first else FAILS
    yield Row(
        f"mean reward of tiny-signs, first and last {part} of {size.steps} steps",
        f"{first:.4f}, {last:.4f}",
        "rises",
        rises,
    )


PARTS: dict[str, tuple[Callable[[Size], Iterator[Row]], int]] = {  # with a limit in seconds, 25 minutes in all
    "ceilings": (ceilings, 40),
    "gate": (gate, 250),
    "bits": (bits, 110),
    "variants": (variants, 320),
    "versus": (versus, 330),
    "sleep": (sleep, 150),
    "benchmarks": (benchmarks, 240),
    "learn": (learn, 60),
}


# 2. What parts share


@dataclass(frozen=True)
class Passed:
    """A backward pass: its gradients, and its seconds."""

    grads: list[Tensor]
    seconds: float


def gradients(run: MediaRun[app.Args], batch: Any, only_deterministic: bool) -> Passed:
    """Take the gradients of a batch's log-probs at its first trained step."""
    loss = replay(run.model, run.policy.net, batch, 0).log_prob.sum()
    start = engines.now(run.dist.device)
    with deterministic(only_deterministic):
        loss.backward()
    seconds = engines.now(run.dist.device) - start
    grads = [p.grad for p in run.policy.params if p.grad is not None]
    run.policy.optimizer.zero_grad(set_to_none=True)
    return Passed(grads, seconds)


def as_one_graph(module: nn.Module, block_names: Collection[str], *, attention: str) -> None:
    """Compile blocks to one graph each, which has gradients of all inputs, also where none is wanted."""
    omni_train.kernels.compile_blocks(module, block_names, attention=attention)
    for block in module.modules():
        if type(block).__name__ in block_names:
            block.forward = partial(as_trained, block.forward)


def as_trained(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a compiled block as for gradients of all inputs, and drop them unless they are wanted."""
    is_wanted = torch.is_grad_enabled()

    def trained(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()) or value.requires_grad:
            return value
        return value.detach().requires_grad_()

    with torch.enable_grad():
        given, named = tree_map(trained, (args, kwargs))
        out = forward(*given, **named)
    return out if is_wanted else tree_map(Tensor.detach, out)


DETERMINISTIC = dict(omni_train.kernels.EXACT)
COMPILERS = {  # the options of the compiler, and what compiles
    "as it is": (DETERMINISTIC, omni_train.kernels.compile_blocks),
    "without deterministic": ({"emulate_precision_casts": True}, omni_train.kernels.compile_blocks),
    "and without shape padding": (
        {"emulate_precision_casts": True, "shape_padding": False},
        omni_train.kernels.compile_blocks,
    ),
    "as it is, with fused products and sums": ({"deterministic": True}, omni_train.kernels.compile_blocks),
    "one graph, as it is": (DETERMINISTIC, as_one_graph),
    "one graph, without deterministic": ({"emulate_precision_casts": True}, as_one_graph),
}


@dataclass(frozen=True)
class Taken:
    """A training step: |ratio - 1| before its first update at most, seconds by phase, and the most bytes."""

    gap: float
    seconds: Mapping[str, float]
    peak: float


def take(
    size: Size,
    variant: str,
    count: int,
    look: Callable[[MediaRun[app.Args]], None] = lambda run: None,
    **changes: Any,
) -> list[Taken]:
    """Run the first training step of a variant several times, and then `look`."""
    taken: list[Taken] = []
    before = memory(local_device()).current_mb  # of what is there already, such as libraries' own caches

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        spent, device = Counter[str](), run.dist.device
        trainer.clock(run, spent)
        for _ in range(count):
            spent.clear()
            reset_peak_memory(device)
            yield (step := Step(0))
            if step.metrics["policy/skipped_updates"]:
                raise RuntimeError(f"{variant}: the optimizer step was skipped, so that it has no moments")
            seconds = spent | {"rollout": spent["rollout"] - spent["decode"]}
            peak = (memory(device).peak_mb - before) * 2**20
            taken.append(Taken(step.metrics["policy/first_ratio_max_dev"], seconds, peak))
        look(run)

    any_gap = {"ratio_tolerance": 1e30, "clip_range": 1e31}
    with trainer.model(model_args(size, variant)) as path:
        trainer.train(settings_of(size, variant, path, lr=0.0, **any_gap, **changes), steps, trainer.brightness)
    return taken


def model_args(size: Size, variant: str) -> trainer.Args:
    """Return one group in the batches of a variant."""
    _, smaller, blocks = VARIANTS[variant]
    batch = max(1, size.batch_size // smaller)
    return trainer.Args(
        random=min(size.random, blocks),
        random_heads=size.random_heads,
        height=size.side,
        width=size.side,
        lora_rank=size.rank,
        batch_size=batch,
        group_size=max(2, batch),
        prompts_per_step=1,
    )


def settings_of(size: Size, variant: str, path: str, **changes: Any) -> app.Args:
    """Return the trainer's settings in a variant."""
    lora = {"lora_rank": size.rank, "lora_alpha": 2 * size.rank}
    return trainer.settings(model_args(size, variant), path, **lora | VARIANTS[variant].settings | changes)


@cache
def can_run(variant: str) -> bool:
    """True if a variant can run here: a compiled one needs a compiler for the device."""
    if VARIANTS[variant].settings.get("compile"):
        try:
            check_compiler(local_device())
        except ValueError as problem:
            print(f"{variant}: not run: {problem}", flush=True)
            return False
    return True


@cache
def kernels_of(args: trainer.Args, checkpointing: bool, products_gb: float) -> dict[str, Counter[roofline.Kernel]]:
    """Return the kernels of a short step by phase, of blocks that are recomputed or not."""
    changes = {
        "lora_rank": args.lora_rank,
        "memory_gradient_checkpointing": checkpointing,
        "memory_keep_products_gb": products_gb,
    }
    with trainer.model(args) as path:
        return roofline.count(trainer.settings(args, path, **changes, **FEW))


def plan_of(size: Size, variant: str) -> int:
    """Return the planned peak bytes of a short step in a variant, after loading."""
    with trainer.model(model_args(size, variant)) as path, fixed_cost.quiet():
        Path("prompts.txt").write_text("\n".join(trainer.TEXTS) + "\n")
        settings = settings_of(size, variant, path, **FEW)
        peaks = plan.measure(app.main, change(settings, dry_run=True, memory_device_gb=80.0), 1).peaks
    return max(peaks[name] for name in ("rollout", "decode", "update"))


def device_kind() -> str:
    """Return the row of roofline.ASSUMED for the device at hand, or ""."""
    return next((kind for kind in roofline.ASSUMED if kind in engines.device_name(local_device())), "")


def exact(what: str, found: float, bound: float) -> Row:
    """Return a row of a value that must not exceed a bound."""
    return Row(what, f"{found:.3g}", f"<= {bound:g}" if bound else "0", "holds" if found <= bound else FAILS)


def near(what: str, found: float, predicted: float, *, within: float = 0.25, must: bool = False) -> Row:
    """Return a row of a predicted value, unless that is NaN. must: True to fail if it is off by more."""
    if math.isnan(predicted):
        return Row(what, f"{found:.4g}")
    holds, off = abs(found / predicted - 1) <= within, FAILS if must else f"{found / predicted:.2f} x"
    verdict = "holds" if holds else off
    return Row(what, f"{found:.4g}", f"{predicted:.4g}", verdict)


def goal(what: str, found: float, most: float) -> Row:
    """Return a row of a value with an upper goal."""
    return Row(what, f"{found:.4g}", f"goal {most:g}", "holds" if found <= most else "missed")


# 3. One after the other, each in a process of its own


@dataclass(frozen=True)
class Done:
    """A part that ran, as its file has it. error: why it broke."""

    date: str
    commit: str
    device: str
    size: str
    seconds: float
    rows: list[Row]
    error: str = ""

    @property
    def is_good(self) -> bool:
        """True if it ended, and every exact row holds."""
        return not self.error and all(row.verdict != FAILS for row in self.rows)


def run_part(name: str, size: Size, folder: Path) -> None:
    """Run a part here, and leave its file, which has the rows so far at any time."""
    start, place, rows = time.perf_counter(), where(size), list[Row]()
    for row in PARTS[name][0](size):
        print(f"{name}: {row.what}: {' | '.join(filter(None, (row.found, row.predicted, row.verdict)))}", flush=True)
        rows.append(row)
        write(name, Done(*place, time.perf_counter() - start, rows, "broke off"), folder)
    write(name, Done(*place, time.perf_counter() - start, rows), folder)


def start(name: str, size: Size, folder: Path) -> None:
    """Run a part in a process of its own, until its limit."""
    command = [sys.executable, __file__, "--part", name, "--folder", str(folder), *["--small"] * (size == SMALL)]
    began, limit = time.perf_counter(), PARTS[name][1]
    try:
        error = f"its process ended with {subprocess.run(command, timeout=limit).returncode}"
    except subprocess.TimeoutExpired:
        error = f"took more than {limit} s"
    done = read(name, folder) or Done(*where(size), time.perf_counter() - began, [], error)
    if done.error:
        print(f"{name}: {error}", flush=True)
        write(name, replace(done, error=error), folder)


def where(size: Size) -> tuple[str, str, str, str]:
    """Return date, commit, device and size."""
    device = f"{engines.device_name(local_device())}, torch {torch.__version__}"
    return str(date.today()), engines.commit(), device, "small" if size == SMALL else "full"


def write(name: str, done: Done, folder: Path) -> None:
    """Leave the file of a part."""
    write_atomically(folder / f"{name}.json", json.dumps(asdict(done), indent=1))


def read(name: str, folder: Path) -> Done | None:
    """Read the file of a part; None if there is none."""
    file = folder / f"{name}.json"
    if not file.is_file():
        return None
    entry = json.loads(file.read_text())
    return Done(**entry | {"rows": [Row(**row) for row in entry["rows"]]})


def found_in(folder: Path) -> dict[str, Done]:
    """Return the parts that have files."""
    return {name: done for name in PARTS if (done := read(name, folder))}


def page(parts: Mapping[str, Done]) -> str:
    """Return Markdown: a row for each row of each part."""
    head = ("date", "commit", "device", "part", "what", "found", "predicted", "verdict")
    rows = []
    for name, done in parts.items():
        found = [*done.rows, *([Row(done.error, "", "", FAILS)] if done.error else [])]
        place = (done.date, done.commit, f"{done.device}, {done.size}", f"{name}, {done.seconds:.0f} s")
        rows += [(*place, row.what, row.found, row.predicted, row.verdict) for row in found]
    return engines.table(head, [[cell.replace("|", "/") for cell in row] for row in rows]) + "\n"


def published(text: str, parts: Mapping[str, Done]) -> str:
    """Return docs/performance.md with a new section of these parts for their device.

    Raises:
        ValueError: the page has not each of the lines FIRST and LAST once.
    """
    if [text.count(line) for line in (FIRST, LAST)] != [1, 1]:
        raise ValueError(f"the page must have these two lines once: {FIRST}{LAST}")
    before, rest = text.split(FIRST)
    found, after = rest.split(LAST)
    sections = dict(re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", found, re.MULTILINE))
    cards = dict.fromkeys(card(done) for done in parts.values())
    sections |= {name: page({part: done for part, done in parts.items() if card(done) == name}) for name in cards}
    listed = "".join(f"\n### {name}\n\n{rows}" for name, rows in sections.items())
    before = before.replace(NOTHING, ALONE) if sections else before.replace(ALONE, NOTHING)
    return before + FIRST + listed + "\n" * bool(listed) + LAST + after


def card(done: Done) -> str:
    """Return the name of the device that a part ran on, without torch's version."""
    return done.device.split(", torch ")[0]


def publish(parts: Mapping[str, Done], docs: Path) -> None:
    """Put what was found in full size into the page, but of a device that has no name: a CPU, or an emulated one."""
    # A card has a name with capital letters; in place of one, `engines.device_name` has the kind, which has none.
    full = {name: done for name, done in parts.items() if done.size == "full" and not card(done).islower()}
    if full:
        write_atomically(docs, published(docs.read_text(), full))


def main(argv: Sequence[str] | None = None, launch: Callable[[str, Size, Path], None] = start) -> int:
    """Run the parts that are not done; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="little of everything, on any device")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--folder", type=Path, default=REPO / "runs" / "gpu-check", help="where their files are")
    parser.add_argument("--publish", action="store_true", help="only put the folder's files into the page")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the page that gets what was found in full size")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    size, folder = SMALL if args.small else Size(), args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.part:
        run_part(args.part, size, folder)
        return 0
    if args.publish:
        publish(found_in(folder), args.docs)
        return 0
    if not args.small and not torch.accelerator.is_available():
        print("gpu-check: there is no accelerator; run it where there is one, or try scripts/gpu_check.py --small here")
        return 1
    place = where(size)[1:]
    for name in args.only:
        before = read(name, folder)
        if before and before.is_good and (before.commit, before.device, before.size) == place:
            print(f"{name}: done", flush=True)
            continue
        (folder / f"{name}.json").unlink(missing_ok=True)
        launch(name, size, folder)
        found = found_in(folder)
        write_atomically(folder / "page.md", page(found))
        publish(found, args.docs)  # after each part, as a visit may be cut short
    found = found_in(folder)
    print(f"\n{page(found)}\nThe same is in {folder / 'page.md'}", flush=True)
    return int(not all(name in found and found[name].is_good for name in args.only))


if __name__ == "__main__":
    sys.exit(main())
