"""Compare a FlowGRPO step with the limits of the device, by phase.

python benchmarks/roofline.py
python benchmarks/roofline.py --random 60 --height 512 --width 512 --batch-size 16 --group-size 16 \
    --prompts-per-step 1 --lora-rank 64 --variant recomputed --no-measured

Counted: the operators of the trainer's forward pass, of its forward and backward pass, and of the VAE, with shapes but
no values (`omni_train.planned`). Measured: short matrix products, attention and copies on this device, which are its
ceilings. An operator then takes the longest of three times: its bytes over the bandwidth, its operations over the rate
of its kind, and a kernel launch; the sum is the time of eager kernels at these rates. The limit counts only the
operations, without any that are recomputed. Fractions are the limit over the time of the trainer's step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import runner
import torch
import trainer
from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.fields import change
from omni_rollout import Params
from omni_rollout.models import open_model
from omni_rollout.models.diffusers_model import DiffusersModel
from omni_train.dist import default_compute_dtype, local_device
from omni_train.kernels import BACKENDS
from omni_train.lora import add_lora
from omni_train.memory.recompute import Recompute
from omni_train.planned import PLANNED, PlannedDevice
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._pytree import tree_leaves
from trainer import app

Kernel = tuple[str, int, int]  # kind, a field of Ceilings or "elementwise"; bytes; floating-point operations
PHASES = ("rollout", "decode", "update")
FREE = ("detach", "lift_fresh", "_unsafe_view", "empty", "new_empty")  # name prefixes of operators that move no bytes


@dataclass(frozen=True)
class Ceilings:
    """Limits of a device: bytes per second, operations per second by kind, and seconds of the smallest kernel."""

    bandwidth: float
    bfloat16: float
    float32: float
    attention: float
    attention_backward: float
    launch: float

    def seconds(self, kernels: Mapping[Kernel, int]) -> float:
        """Return the seconds of these kernels in sequence."""
        return sum(
            n * max(size / self.bandwidth, self.work(kind, flops), self.launch)
            for (kind, size, flops), n in kernels.items()
        )

    def limit(self, kernels: Mapping[Kernel, int]) -> float:
        """Return the seconds of their operations only."""
        return sum(n * self.work(kind, flops) for (kind, _, flops), n in kernels.items())

    def work(self, kind: str, flops: int) -> float:
        """Return the seconds of a kernel's operations."""
        return flops / float(getattr(self, kind)) if flops else 0.0


ASSUMED = {  # the H200's are measured (docs/evidence/performance.md), the H100's are not
    "H100": Ceilings(2.9e12, 660e12, 50e12, 330e12, 255e12, 7e-6),
    "H200": Ceilings(4.1e12, 770e12, 51e12, 330e12, 255e12, 7e-6),
}


def measure_ceilings(device: torch.device, *, side: int = 0) -> Ceilings:
    """Measure the ceilings of this device. side: size of square matrices; 0 chooses one that fills the device."""
    side, rates = side or (1024 if device.type == "cpu" else 8192), {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        rates[dtype] = 2 * side**3 / fastest(lambda a=a, b=b: torch.mm(a, b), device)
    with sdpa_kernel(BACKENDS["auto"]):  # the trainer's backends, not torch's first choice
        forward, backward = attention_rates(device, side=side)
    small = torch.ones(16, device=device)
    return Ceilings(
        bandwidth=2 * a.nbytes / fastest(a.clone, device),
        bfloat16=rates[torch.bfloat16],
        float32=rates[torch.float32],
        attention=forward,
        attention_backward=backward,
        launch=fastest(lambda: [small.add_(1) for _ in range(100)], device) / 100,
    )


def attention_rates(device: torch.device, *, side: int) -> tuple[float, float]:
    """Return operations per second of attention, forward and backward, over a quarter of `side` tokens."""
    low = default_compute_dtype(device)
    q, k, v = (torch.randn(4, 8, side // 4, 128, device=device, dtype=low, requires_grad=True) for _ in range(3))
    flops = 4 * q.numel() * q.shape[2]
    with torch.no_grad():
        forward = fastest(lambda: attend(q, k, v), device)
    both = fastest(lambda: torch.autograd.grad(attend(q, k, v).sum(), (q, k, v)), device)
    return flops / forward, 2.5 * flops / max(both - forward, forward)


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, from the fastest of five series; the first call does not count."""
    call()
    number, found = 1 if device.type == "cpu" else 10, []
    for _ in range(5):
        start = runner.now(device)
        for _ in range(number):
            call()
        found.append((runner.now(device) - start) / number)
    return min(found)


class Kernels(PlannedDevice):
    """Records each kernel that would run on the planned device, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, Counter[Kernel]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, and record it unless it only returns a view."""
        before = self.flops.total()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        flops, name = self.flops.total() - before, func.overloadpacket.__name__
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.device == PLANNED}
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.device == PLANNED]
        if written and not func.is_view and not name.startswith(FREE):
            size = sum(map(extent, [*read.values(), *written]))
            self.kernels.setdefault(self.current, Counter())[kind_of(name, written[0], flops), size, flops] += 1
        return out


def kind_of(name: str, out: Tensor, flops: int) -> str:
    """Return the ceiling that applies to an operator's operations."""
    if not flops:
        return "elementwise"
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    return "bfloat16" if out.dtype == torch.bfloat16 else "float32"


def extent(tensor: Tensor) -> int:
    """Return the bytes of a tensor, counting expanded elements once."""
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize


def count(args: app.Args) -> dict[str, Counter[Kernel]]:
    """Return the kernels of a step by phase."""
    model, dtype = open_model(args.policy.model), getattr(torch, args.policy.dtype)
    assert isinstance(model, DiffusersModel)
    model.reads_weights = False
    params = Params(
        args.sampling.num_inference_steps,
        args.sampling.height,
        args.sampling.width,
        guidance={"true_cfg_scale": args.sampling.true_cfg_scale},
    )
    batches = args.data.prompts_per_step * args.data.group_size // args.data.batch_size
    tokenizer: Any = model._load("tokenizer", "cpu", dtype)
    lengths = {"": len(tokenizer(trainer.TEXTS[0]).input_ids), "negative_": len(tokenizer(" ").input_ids)}
    width = model.config["transformer"]["joint_attention_dim"]
    with Kernels() as device:
        parts = model.load(device=PLANNED, dtype=dtype)
        add_lora(parts.net, model.LORA_TARGETS, rank=args.lora.rank, alpha=args.lora.alpha, seed=0)
        if args.memory.gradient_checkpointing:
            parts.net.enable_gradient_checkpointing(Recompute(args.memory.keep_products_gb * 1e9))  # type: ignore[operator]
        x = torch.zeros(args.data.batch_size, *model.latent_shape(params)).to(PLANNED)
        cond = {}
        for side, length in lengths.items():
            cond[f"{side}embeds"] = torch.zeros(len(x), length, width, dtype=dtype).to(PLANNED)
            cond[f"{side}embeds_mask"] = torch.ones(len(x), length, dtype=torch.bool)

        def predict() -> Tensor:
            return model.predict_velocity(parts.net, x, torch.full((len(x),), 0.5).to(PLANNED), cond, params)

        with torch.no_grad():
            predict()  # moves to the device what stays there
            with device.phase("rollout"):
                predict()
            with device.phase("decode"):
                model.decode(parts, x, cond, params)
        predict().sum().backward()  # blocks measure what they may keep
        with device.phase("update"):
            predict().sum().backward()
    times = {
        "rollout": args.sampling.num_inference_steps * batches,
        "decode": batches,
        "update": (args.window.window_size or 1) * batches,
    }
    return {name: Counter({kernel: n * times[name] for kernel, n in device.kernels[name].items()}) for name in PHASES}


def measure(args: app.Args) -> dict[str, float]:
    """Return the seconds of each phase in the second step of a run."""
    spent = Counter[str]()

    def steps(run: MediaRun[app.Args]) -> Iterator[Step]:
        trainer.clock(run, spent)
        yield Step(0)
        spent.clear()
        yield Step(0)

    trainer.train(args, steps)
    return {"rollout": spent["rollout"] - spent["decode"], "decode": spent["decode"], "update": spent["update"]}


def table(
    kernels: Mapping[str, Counter[Kernel]],
    least: Mapping[str, Counter[Kernel]],
    devices: Mapping[str, Ceilings],
    took: Mapping[str, float],
) -> str:
    """Return Markdown: the work of each phase, its time on each device, and its measured time on the last one.

    least: the kernels without recomputed ones. took: seconds; may be empty.
    """
    *_, last = devices.values()
    rows = []
    for name in (*PHASES, "all"):
        phases = [phase for phase in PHASES if name in (phase, "all")]
        every, few = (sum((each[phase] for phase in phases), Counter[Kernel]()) for each in (kernels, least))
        flops, size = (sum(n * kernel[i] for kernel, n in every.items()) for i in (2, 1))
        cells = [flops / 1e12, size / 1e9, every.total(), *(device.seconds(every) for device in devices.values())]
        if took:
            seconds, limit = sum(took[phase] for phase in phases), last.limit(few)
            cells += [limit, seconds, limit / seconds]
        rows.append([name, *(f"{cell:,.4g}" for cell in cells)])
    head = ["phase", "TFLOP", "GB", "kernels", *(f"{name} eager, s" for name in devices)]
    return runner.table(head + ["limit, s", "took, s", "limit / took"] * bool(took), rows)


@dataclass(frozen=True)
class Args(trainer.Args):
    """Settings of the step."""

    variant: str = "as it is"  # Memory and speed settings of the trainer, a row of trainer.VARIANTS
    measured: bool = True  # Measure this device and a step on it; otherwise only count


def roofline(args: Args) -> None:
    """Count, measure, and print two tables."""
    device = local_device()
    print(f"{runner.stamp(args)}\n")
    devices = ASSUMED | ({"here": measure_ceilings(device)} if args.measured else {})
    rows = [[name, *(f"{value:.3g}" for value in asdict(each).values())] for name, each in devices.items()]
    print(runner.table(["device", *(field.name for field in fields(Ceilings))], rows) + "\n")
    with trainer.model(args) as path:
        lora = {"lora_rank": args.lora_rank, "lora_alpha": 2 * args.lora_rank}
        settings = trainer.settings(args, path, **lora | trainer.VARIANTS[args.variant].settings)
        settings = settings if args.measured else change(settings, dtype="bfloat16")
        least = count(change(settings, memory_gradient_checkpointing=False, memory_keep_products_gb=0.0))
        print(table(count(settings), least, devices, measure(settings) if args.measured else {}))


if __name__ == "__main__":
    runner.run(__doc__, roofline)
