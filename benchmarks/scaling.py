"""From 1 to 1,024 GPUs: counted communication of a training step, and its simulated cost.

    python benchmarks/scaling.py simulate
    python benchmarks/scaling.py waits --ranks 64

Counted, on this machine: messages between ranks, gathers of weights and sums of gradients in a step of FlowGRPO, on 2
gloo ranks with a tiny net, as seen by torch's dispatcher. A test compares the prediction from 2 ranks for 4 with 4
ranks.
Simulated: everything in seconds. No GPU is used: a step's operations are planned (docs/performance.md), and the speeds
are assumed, as arguments. Efficiency is the time of a step's operations at full batches over its predicted time.

waits: seconds of a step after its last image, for many ranks with one server per machine.
"""

import json
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import omni_rl.run.session
import runner
import torch
import torch.multiprocessing
import trainer
from omni_reward import RewardClient
from omni_reward.serving import serving_in_thread
from omni_rl.flow.scorers import LocalScorer
from omni_rl.run.loop import Loop
from omni_rl.run.run import Step
from omni_rl.run.world import World
from omni_rl.settings.fields import at_least, require
from omni_train.dist import shutdown
from torch.utils._python_dispatch import TorchDispatchMode
from trainer import app

KINDS = {  # operations of torch.distributed, and the argument with a rank's data
    "allgather_": ("messages", 1), "_allgather_base_": ("gathers", 1), "_reduce_scatter_base_": ("scatters", 1),
    "allreduce_": ("reductions", 0),
}  # fmt: skip
TINY = trainer.Args(random=1, random_heads=1)  # bytes are reported as shares of the trained weights
MACHINE = 8  # GPUs
SIZES = (1, 8, 16, 64, 256, 512, 1024)


@dataclass(frozen=True)
class Args:
    """Assumed speeds; nothing here was measured on a GPU."""

    tflops: Annotated[float, at_least(1)] = 350.0  # Of a large forward pass in bfloat16; an H100's data sheet: 989
    decode_tflops: Annotated[float, at_least(1)] = 100.0  # Of a VAE's convolutions
    nvlink_gbs: Annotated[float, at_least(1)] = 300.0  # GB/s of a GPU within a machine; data sheet: 450 each way
    net_gbs: Annotated[float, at_least(1)] = 40.0  # GB/s of a GPU between machines; 400 Gb/s are 50
    disk_gbs: Annotated[float, at_least(0.1)] = 1.2  # GB/s at which a rank writes a file
    hop_us: Annotated[float, at_least(0)] = 40.0  # Microseconds of a message from host to host, over TCP
    kernel_us: Annotated[float, at_least(0)] = 4.5  # Microseconds for the host to launch a kernel


# Counted


class Exchanges(TorchDispatchMode):
    """Number of calls and bytes of each kind of collective on this rank."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and call it."""
        if func.namespace == "c10d" and (kind := KINDS.get(func.overloadpacket.__name__)):
            given = args[kind[1]]
            self.found[kind[0]] += 1
            self.found[f"{kind[0]}, bytes"] += sum(t.nbytes for t in (given if isinstance(given, list) else [given]))
        elif func.namespace == "c10d":
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    """Work of a rank in a step. size: number of ranks that share a copy of the weights, 0 for all."""

    batches: int
    updates: int
    lora: bool
    size: int = 0


def count(cases: Sequence[Case], ranks: int) -> list[Counter[str]]:
    """Return the communication of a rank in a step of each case, the second step of a run with `ranks` ranks.

    Raises:
        RuntimeError: ranks differ.
    """
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in cases]
        ports = [each.getsockname()[1] for each in free]
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel  # noqa: F401 - once for all forks
    from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: F401

    with tempfile.TemporaryDirectory() as folder, trainer.model(TINY) as model:
        (Path(folder) / "prompts.txt").write_text("".join(f'a blue sign that says "{i}"\n' for i in range(64)))
        arguments = (cases, ranks, ports, folder, model)
        torch.multiprocessing.start_processes(_rank, args=arguments, nprocs=ranks, start_method="fork")
        first, *others = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    if any(other != first for other in others):
        raise RuntimeError(f"ranks must exchange the same, got {first} and {others}")
    return [Counter(found) for found in first]


def _rank(rank: int, cases: Sequence[Case], ranks: int, ports: Sequence[int], folder: str, model: str) -> None:
    """Train for a few steps in each case, in a forked process, and write the counts."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1"}
    found = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        found.append(_counted(case, ranks, model))
    Path(f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a forked process must not run its parent's exit handlers


def _counted(case: Case, ranks: int, model: str) -> Counter[str]:
    """Run two steps; return the communication of the second, which neither evaluates nor saves."""
    marks: list[Counter[str]] = []
    trained: list[int] = []

    class Steps(Loop):
        def __iter__(self) -> Iterator[Step]:
            with Exchanges() as seen:
                trained.extend(p.numel() * p.element_size() for p in self.run.policy.params)
                for step in super().__iter__():
                    marks.append(Counter(seen.found))
                    if len(marks) == 3:
                        return
                    yield step

    app.Loop = Steps  # type: ignore[misc, assignment]
    World.connect = lambda *_, **__: (LocalScorer(trainer.in_order), "none")  # type: ignore[method-assign, assignment]
    omni_rl.run.session.ReportProcess = lambda *_: None  # type: ignore[misc, assignment]
    given = {"batch_size": 2, "group_size": 2, "prompts_per_step": ranks * case.batches, "num_inference_steps": 3}
    lora = {"lora_rank": 4, "lora_alpha": 8} if case.lora else {"lora_rank": 0, "lora_alpha": 0, "true_cfg_scale": 1.0}
    full = {"sharding_mode": "fsdp2", "sharding_size": case.size, "sharding_unshard": "rollout"}
    mode = {"sharding_mode": "ddp"} if case.lora else full
    few = {"train_steps": 3, "save_every": 99, "eval_every": 99, "eval_first": False, "eval_num_prompts": ranks}
    shape = given | {"num_minibatches": case.updates, "window_size": 2, "window_high": 2, "width": 32}
    name = f"{case.lora}-{case.batches}-{case.updates}-{case.size}"
    files = {"prompts": "prompts.txt", "eval_prompts": "prompts.txt", "name": name}
    args = trainer.settings(TINY, model, **lora, **mode, **few, **shape, **files)
    app.check_args(args)
    app.main(args, World.join(args))
    shutdown()
    return (marks[2] - marks[1]) + Counter({"trained, bytes": sum(trained)})


@dataclass(frozen=True)
class Rates:
    """A count of a step, linear in its batches and optimizer steps."""

    step: float
    batch: float
    update: float

    def __call__(self, batches: float, updates: float) -> float:
        """Return the count of a step."""
        return self.step + self.batch * batches + self.update * updates


def rates(cases: Sequence[Case], counts: Sequence[Mapping[str, int]]) -> dict[str, Rates]:
    """Return the rates of each count from three cases: one batch, two, and two with two optimizer steps."""
    if [(case.batches, case.updates) for case in cases] != [(1, 1), (2, 1), (2, 2)]:
        raise ValueError(f"cases must be of 1, 2 and 2 batches with 1, 1 and 2 optimizer steps, got {list(cases)}")
    one, two, twice = counts
    found = {}
    for kind in sorted(set().union(*counts)):
        batch, update = two.get(kind, 0) - one.get(kind, 0), twice.get(kind, 0) - two.get(kind, 0)
        found[kind] = Rates(one.get(kind, 0) - batch - update, batch, update)
    return found


def predicted(known: Mapping[str, Rates], case: Case, ranks: int, *, known_ranks: int = 2) -> dict[str, float]:
    """Return the predicted counts of a step with other numbers of ranks, batches and optimizer steps.

    Each rank contributes its rows to a gather of weights, so with twice the ranks each contributes half the bytes.
    """
    found = {kind: rate(case.batches, case.updates) for kind, rate in known.items()}
    if "gathers, bytes" in found:
        found["gathers, bytes"] *= known_ranks / ranks
    return {kind: value for kind, value in found.items() if value}


COUNTED = [(1, 1), (2, 1), (2, 2)]


def cases(*, lora: bool) -> list[Case]:
    """Return the cases needed by `rates`."""
    return [Case(batches, updates, lora) for batches, updates in COUNTED]


# Simulated


@dataclass(frozen=True)
class Job:
    """A recipe's step. Operations are FLOP per sample; float32 takes 4 bytes per parameter."""

    name: str
    weights: float  # Parameters
    trained: float
    samples: int
    rollout: float
    update: float
    forward: float  # Of one denoising step, with guidance
    kernels: int  # Of one call of the net
    batch: int
    denoising: int  # Steps of a sample
    passes: int  # Forward and backward passes of a batch in the update
    updates: int  # Optimizer steps
    score_s: float
    decode: float  # FLOP of a sample's decoding
    tiled: float  # The same in four tiles, including the overlap that is computed twice
    evaluation: float  # FLOP of one evaluation; the next field is the number of steps between evaluations
    eval_every: int
    guided: bool = True

    @property
    def is_full(self) -> bool:
        """True if all weights are trained."""
        return self.trained == self.weights


@dataclass(frozen=True)
class How:
    """Settings of a run that affect its scaling."""

    name: str
    server_gpus: int = 0  # GPUs per scorer; 0 means one scorer for all
    copy_gpus: int = 0  # GPUs per copy of sharded weights; 0 means all
    ahead: bool = False
    lean: bool = False  # a tenth of the recipe's evaluation
    context: bool = False  # GPUs share a sample if there are more GPUs than samples
    tiles: bool = False  # those GPUs decode it together


def video(
    name: str, weights: float, layers: int, width: int, tokens: int, samples: int, *, decode: float, tiled: float
) -> Job:
    """Return a video model by its published shape: 2 FLOP per weight and token, attention of all tokens, guidance."""
    forward = 2 * (2 * weights * tokens + 4 * layers * tokens**2 * width)
    costs = {"rollout": 10 * forward, "update": 2 * 4 * forward, "forward": forward}  # 2 of 10 trained, recomputed
    return Job(
        name,
        weights,
        300e6,
        samples,
        **costs,
        kernels=2500,
        batch=1,
        denoising=10,
        passes=2,
        updates=1,
        score_s=1.0,
        decode=decode,
        tiled=tiled,
        evaluation=64 * 20 * forward,
        eval_every=50,
    )


# Planned TFLOP of docs/evidence/performance.md over its images: 39,570 and 24,570 for 128; 10,010 and 8,058 for 64.
# Evaluations are the recipes': 1,018 prompts of 50 steps every 30 steps. torch's FlopCounterMode counts decoding in the
# VAEs of these models, whole and in tiles of at most 672 x 672 (Wan2.2) and 448 x 448 pixels (Wan2.1).
LORA = Job("20B LoRA, 512 images", 20.4e9, 425e6, 512, 309e12, 192e12, 30.9e12, 4500, 16, 10, 2, 2, 0.05, 1.1e12,
           1.1e12, 1018 * 50 * 30.9e12, 30)  # fmt: skip
FULL = Job("20B all weights, 512 images", 20.4e9, 20.4e9, 512, 156e12, 126e12, 15.6e12, 4500, 16, 10, 2, 2, 0.05,
           1.1e12, 1.1e12, 1018 * 50 * 15.6e12, 30, guided=False)  # fmt: skip
JOBS = (
    LORA,
    replace(LORA, name="20B LoRA, 16 images per GPU", samples=0),
    FULL,
    replace(FULL, name="20B all weights, 16 images per GPU", samples=0),
    video("14B video LoRA, 256 videos of 81 x 480 x 832", 14e9, 40, 5120, 32760, 256, decode=275e12, tiled=335e12),
    video("5B video LoRA, 256 videos of 121 x 704 x 1280", 5e9, 30, 3072, 27280, 256, decode=2011e12, tiled=2302e12),
)
LADDER = [How("one scorer")]
for _name, _change in (
    ("+ a scorer for each machine", {"server_gpus": MACHINE}), ("+ `--sharding.size 8`", {"copy_gpus": MACHINE}),
    ("+ `--draw-ahead 1`", {"ahead": True}), ("+ a tenth of the evaluation", {"lean": True}),
    ("+ context parallel", {"context": True}), ("+ `--memory.decode-tile`", {"tiles": True}),
):  # fmt: skip
    LADDER.append(replace(LADDER[-1], name=_name, **_change))  # type: ignore[arg-type]
SMALL = {1: 0.70, 2: 0.80, 4: 0.865, 8: 0.94}  # Assumed speed at image batches of this size, relative to 16


def parts(job: Job, how: How, gpus: int, speed: Args, counts: Mapping[str, Rates]) -> dict[str, float]:
    """Return the predicted seconds of a step by cause; {} if the step cannot run.

    counts: for all weights if the job trains all, otherwise for LoRA.
    """
    samples = job.samples or 16 * gpus
    share = 1
    while samples < gpus // share and how.context:
        share *= 2
    shares = gpus // share
    if samples < shares or samples % shares or share > 16:
        return {}
    mine = samples // shares
    batch = min(job.batch, mine)
    batches, rate, machines = mine / batch, speed.tflops * 1e12, ceil(gpus / MACHINE)
    compute = (job.rollout + job.update) * mine / share / rate
    one = job.forward * batch / share / rate  # a forward pass's seconds
    host = job.kernels * speed.kernel_us * 1e-6 * (1 + job.guided)
    forwards = job.denoising + 4 * job.passes  # a backward pass is two, a recomputed forward pass one
    speed_of_batch = SMALL.get(batch, 1.0) if job.batch > 1 else 1.0
    found = {
        "compute": compute,
        "small batches": compute * (1 / speed_of_batch - 1),
        "starts of kernels": max(0.0, host - one) * forwards * batches,
        "decoding": (job.tiled / share if how.tiles and share > 1 else job.decode)
        * mine
        / (speed.decode_tflops * 1e12),
        "context parallel": compute * (0 if share == 1 else 0.08 if share <= MACHINE else 0.35),  # assumed
    }
    work = samples * job.score_s / (max(1, gpus // how.server_gpus) if how.server_gpus else 1)
    rollout = job.rollout * mine / share / rate
    exposed = max(work - rollout * (1 - 1 / batches), work / batches)
    found["scorer"] = max(0.0, work - compute) if how.ahead else exposed

    updates = min(job.updates, batches)
    step = {kind: rate_of(batches, updates) for kind, rate_of in counts.items()}
    hops = gpus - 1 if gpus <= 64 else machines - 1 + MACHINE - 1  # one ring, or by machine
    found["messages"] = step["messages"] * hops * speed.hop_us * 1e-6
    group = min(gpus, how.copy_gpus or gpus)
    inside, net = speed.nvlink_gbs * 1e9, speed.net_gbs * 1e9
    within = inside if group <= MACHINE else net
    if job.is_full and gpus > 1:
        gather, scatter = job.weights * 2 / within, job.weights * 4 / within
        num_gathers, num_sums = step["gathers, whole"], step["scatters, whole"]
        found["gathers"] = gather + max(0.0, num_gathers - 1) * max(0.0, gather - one)  # others overlap a forward
        found["sums of gradients"] = num_sums * max(0.0, scatter - 2 * one)
        if gpus > group:
            found["sums of gradients"] += updates * 2 * job.weights * 4 / group / net
    elif gpus > 1:
        copies = 2 * job.trained * 4 * (1 / inside + (machines > 1) / (net * MACHINE))
        found["sums of gradients"] = step["reductions, whole"] * copies
    found["save"] = job.trained * 12 / (gpus if job.is_full else 1) / 20e9 / 10  # to the host, every 10 steps
    found["evaluation"] = job.evaluation * (0.1 if how.lean else 1) / gpus / rate / job.eval_every
    files = max(1, min(gpus, int(job.trained * 4 // 5e9)))
    gathered = job.weights * 4 / within if job.is_full and gpus > 1 else 0.0
    found["export"] = (job.trained * 4 / files / (speed.disk_gbs * 1e9) + gathered) / job.eval_every
    return found


def efficiency(job: Job, how: How, gpus: int, speed: Args, counts: Mapping[str, Rates]) -> tuple[float, str]:
    """Return the share of operations and decoding in a step, and the largest other cause; (0, why) if it cannot run."""
    found = parts(job, how, gpus, speed, counts)
    if not found:
        return 0.0, "fewer samples than ranks"
    decoding = job.decode * (job.samples / gpus if job.samples else 16) / (speed.decode_tflops * 1e12)
    ideal = found["compute"] + decoding
    others = found | {"compute": 0.0, "decoding": found["decoding"] - decoding}
    wall = max(others, key=others.__getitem__)
    return ideal / sum(found.values()), f"{wall} {others[wall]:.2f} s of {sum(found.values()):.2f}"


def apart(job: Job, gpus: int, speed: Args, *, more: int = 0, share: float = 1.0) -> tuple[int, float]:
    """Return the number of sampling-only ranks with the shortest step, and its speedup over all `gpus` doing both.

    It assumes `--draw-ahead 1`, which keeps both roles busy. more: additional GPUs that can only sample, at a `share`
    of the speed. The trained weights are sent over the network before each sampled step.
    """
    samples, rate = job.samples or 16 * gpus, speed.tflops * 1e12
    sampling, training = (
        samples * (job.rollout / rate + job.decode / (speed.decode_tflops * 1e12)),
        samples * job.update / rate,
    )
    sending = job.trained * 4 / (speed.net_gbs * 1e9)
    together = (sampling + training) / gpus

    def step(count: int) -> float:
        power = more * share if more else count
        return max(sampling / power + sending, training / (gpus - (0 if more else count)))

    best = more or min(range(1, gpus), key=step)
    return best, together / step(best)


def whole(known: Mapping[str, Rates]) -> dict[str, Rates]:
    """Return the rates of 2 ranks, with bytes also as shares of all trained weights."""
    found, trained = dict(known), known["trained, bytes"].step
    for kind, given in (("gathers", trained / 2), ("scatters", trained), ("reductions", trained)):
        if rate := known.get(f"{kind}, bytes"):
            found[f"{kind}, whole"] = Rates(rate.step / given, rate.batch / given, rate.update / given)
    return found


def simulate(args: Args) -> None:
    """Count the communication of ranks, simulate steps with more ranks, and print both."""
    print(runner.stamp("counted on 2 gloo ranks, simulated beyond"))
    rows, counts = [], {}
    for lora in (True, False):
        given = cases(lora=lora)
        counts[lora] = whole(rates(given, count(given, 2)))
        for kind, rate in counts[lora].items():
            cells = (f"{value:,.4g}" for value in (rate.step, rate.batch, rate.update))
            rows.append((f"{'LoRA' if lora else 'all weights'}: {kind}", *cells))
    print("\n" + runner.table(("counted, a rank", "in a step", "in a batch", "in an optimizer step"), rows))
    for job in JOBS:
        print("\n".join(simulated(job, args, counts[not job.is_full])))
    rows = []
    for job in JOBS:
        best, speeds = apart(job, 64, args)[0], [apart(job, 64, args, more=m, share=0.4)[1] for m in (0, 64, 128)]
        rows.append((job.name, str(best), *(f"{each:.2f}" for each in speeds)))
    head = ("64 GPUs", "of which only sample", "speed", "64 additional slow GPUs sample", "128 additional slow GPUs")
    print("\n" + runner.table(head, rows))


def simulated(job: Job, speed: Args, counts: Mapping[str, Rates]) -> list[str]:
    """Return the lines of a job: one row per way to run it, and the largest costs of the first and last."""
    found = {how: [efficiency(job, how, gpus, speed, counts) for gpus in SIZES] for how in LADDER}
    rows = [(how.name, *(f"{share:.0%}" if share else "-" for share, _ in row)) for how, row in found.items()]
    lines = ["", f"**{job.name}**", "", runner.table(("simulated", *(f"{gpus:,}" for gpus in SIZES)), rows)]
    for how in (LADDER[0], LADDER[-1]):
        walls = [f"{gpus:,} GPUs {found[how][SIZES.index(gpus)][1]}" for gpus in (64, 1024)]
        lines += ["", f"First wall, {how.name}: {'; '.join(walls)}"]
    return lines


# How long ranks wait for their scores


@dataclass(frozen=True)
class Waits:
    """The ranks, the servers, and their times."""

    ranks: Annotated[int, at_least(1)] = 64  # Ranks that sample
    servers: Annotated[int, at_least(1)] = 8  # Servers, each for the same number of consecutive ranks
    images: Annotated[int, at_least(1)] = 512  # Images per step, the same number on each rank
    side: Annotated[int, at_least(16)] = 256  # Side of an image in pixels
    image_ms: Annotated[float, at_least(0)] = 50.0  # Milliseconds that the scorer takes per image
    rollout_s: Annotated[float, at_least(0)] = 7.0  # Seconds in which a rank samples its images of a step
    batches: str = "1,2,4,8"  # Comma-separated numbers of batches per rank, one row each

    def check(self) -> None:
        """Raise ValueError if settings are inconsistent."""
        fits = not (self.ranks % self.servers or self.images % self.ranks)
        rule = "--servers must divide --ranks, and --ranks --images"
        require((fits, f"{rule}, got {self.servers}, {self.ranks}, {self.images}"))
        of_rank, words = self.images // self.ranks, self.batches.split(",")
        wrong = [word for word in words if not word.isdecimal() or not int(word) or of_rank % int(word)]
        require((not wrong, f"--batches must divide the {of_rank} images of a rank, got {', '.join(wrong)}"))


def waits(args: Waits) -> None:
    """Run ranks and servers, and time a step after its last image.

    Simulated: the ranks are threads that sleep instead of sampling, and the scorer sleeps for each image. Real: the
    clients, the servers and their messages, all in this process. A server's total work is the same in each row; the
    rows differ in how much of it is done before the last image arrives.
    """
    print(runner.stamp())
    work = args.images * args.image_ms / 1000 / args.servers
    print(
        f"{args.images} images of {args.ranks} ranks, {args.servers} servers of {args.image_ms:g} ms an image: "
        f"{work:.2f} s of work for each server, {args.rollout_s:g} s of sampling\n"
    )
    rows = []
    with ExitStack() as stack:
        urls = [stack.enter_context(serving_in_thread(slow(args), name="slow")) for _ in range(args.servers)]
        for number in map(int, args.batches.split(",")):
            found, later = (waited_s(args, urls, number, ahead=ahead) for ahead in (False, True))
            rows.append((number, *(f"{s:.2f}" for s in (max(found), sum(found) / len(found), max(later)))))
    head = ("batches per rank", "seconds after the last image, slowest rank", "mean", "after another step's sampling")
    print(runner.table(head, rows))


def waited_s(args: Waits, urls: Sequence[str], num_batches: int, *, ahead: bool) -> list[float]:
    """Return the seconds that each rank waits for the scores of its own images once it needs them.

    ahead: True if it first samples the next step, as with `--draw-ahead`.
    """
    size = args.images // args.ranks // num_batches
    start = threading.Barrier(args.ranks)

    def rank(number: int) -> float:
        client = RewardClient(urls[number * args.servers // args.ranks], max_in_flight=max(8, num_batches))
        image = np.full((size, args.side, args.side, 3), number % 256, np.uint8)
        start.wait()
        futures = []
        for _ in range(num_batches):
            time.sleep(args.rollout_s / num_batches)
            futures.append(client.submit({"image": image}, ["a sign"] * size))
        if ahead:
            time.sleep(args.rollout_s)
        begin = time.perf_counter()
        scores = [score.value for future in futures for score in future.result()]
        waited = time.perf_counter() - begin
        client.close()
        if scores != [float(number % 256)] * (size * num_batches):
            raise RuntimeError(f"rank {number} must have the scores of its own images, got {scores}")
        return waited

    with ThreadPoolExecutor(args.ranks) as ranks:
        return list(ranks.map(rank, range(args.ranks)))


def slow(args: Waits) -> Any:
    """Return a slow score function; a score is an image's first byte."""

    def score(media: Mapping[str, np.ndarray], prompts: Sequence[str], meta: object = None) -> list[float]:
        time.sleep(args.image_ms / 1000 * len(prompts))
        return [float(image[0, 0, 0]) for image in media["image"]]

    return score


if __name__ == "__main__":
    runner.run(__doc__, simulate, waits)
