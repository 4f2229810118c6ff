"""Compare log-probs of the vLLM-Omni engine with the trainer's, and its samples with the embedded engine's.

    python benchmarks/engine_parity.py
    python benchmarks/engine_parity.py --random 12 --height 512 --width 512

Prints one table. A gap is the largest |log-prob(trainer) - log-prob(engine)| over the samples of a batch and all steps
but the last; where it is small it is |ratio - 1|, which the trainer checks before every update. The first half of the
steps stands apart, since gaps grow towards the end, and recipes with few trained steps choose them there. `x0` is the
largest difference of a clean latent from the embedded engine's, before any update. Needs vLLM-Omni.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from engines import Args as Common
from engines import checkpoint, open_engine, prompts, setting, table
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import at_least, check_bounds
from omni_rollout import Model, Params, Trajectory, replay
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import Transition, cps_step, dance_step, sde_step
from omni_train.dist import local_device
from omni_train.lora import add_lora, reference, unadapted_params
from omni_train.weights.full import named_weights

STEPS: dict[str, tuple[Callable[..., Transition], float]] = {  # with the noise levels that the README shows
    "sde": (sde_step, 0.7),
    "cps": (cps_step, 0.8),
    "dance": (dance_step, 0.3),
}
LORA_LR, FULL_LR = 1e-2, 1e-4
HEADER = (
    "dtype", "step", "guidance", "before", "before, first half", "sync left out", "LoRA, merged",
    "all weights, shared", "x0",
)  # fmt: skip


@dataclass(frozen=True)
class Args(Common):
    """Settings of the benchmark."""

    dtype: Literal["both", "float32", "bfloat16"] = "both"  # Of weights and products
    true_cfg_scale: Annotated[float, at_least(1.001)] = 4.0  # Of the half of the cases that have guidance


def main(args: Args) -> None:
    device = local_device()
    rows: list[list[str]] = []
    for name in ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,):
        dtype = getattr(torch, name)
        with checkpoint(args, device, dtype) as path:
            if not rows:
                print(setting(args, path, device) + "\n")
            rows += [[name, *row] for row in measure(args, path, device, dtype)]
    print(table(HEADER, rows))


def measure(args: Args, path: str, device: torch.device, dtype: torch.dtype) -> list[list[str]]:
    """The table's rows for one dtype: one for each step function without and with guidance."""
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


def params_of(args: Args, step: str, scale: float) -> Params:
    """All steps but the last are kept."""
    rule, noise_level = STEPS[step]
    return Params(
        args.num_inference_steps, args.height, args.width, guidance={"true_cfg_scale": scale}, rule=rule,
        noise_level=noise_level, sde_steps=tuple(range(args.num_inference_steps - 1)),
    )  # fmt: skip


Sample = Callable[[], list[Trajectory]]


@dataclass(frozen=True)
class Trainer:
    """The trained model."""

    model: Model
    net: Any

    def gaps(self, sampled: list[Trajectory], *, num_steps: int | None = None) -> list[float]:
        """The largest difference of its log-probs from the engine's in each trajectory, or in its first steps."""
        found = []
        for trajectory in sampled:
            expected = trajectory.rollout_log_prob[:, :num_steps]
            with torch.no_grad():
                scores = [replay(self.model, self.net, trajectory, k).log_prob for k in range(expected.shape[1])]
            found.append((torch.stack(scores, dim=1) - expected).abs().max().item())
        return found

    def update(self, trajectory: Trajectory, *, lr: float) -> None:
        """Makes the first kept step more likely. Every weight moves by `lr`, as in Adam's first step.

        Without an optimizer, for whose state a large model would leave no room.
        """
        self.net.enable_gradient_checkpointing()
        replay(self.model, self.net, trajectory, 0).log_prob.mean().backward()
        with torch.no_grad():
            for param in self.net.parameters():
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=lr)
                    param.grad = None


def lora_columns(
    args: Args, engine: Any, trainer: Trainer, before: list[Trajectory], sample: Sample
) -> list[list[float]]:
    """The gaps before an update of an adapter, of all steps and of the first half; then without a sync and with one."""
    net = trainer.net
    add_lora(net, trainer.model.LORA_TARGETS, rank=args.lora_rank, alpha=2 * args.lora_rank, seed=0)
    engine.adopt(unadapted_params(net))
    columns = [trainer.gaps(before), trainer.gaps(before, num_steps=args.num_inference_steps // 2)]
    trainer.update(before[0], lr=LORA_LR)
    columns.append(trainer.gaps(before))
    engine.load_weights(named_weights(net), version=1)
    columns.append(trainer.gaps(sample()))
    with reference(net):
        engine.load_weights(named_weights(net), version=2)  # the checkpoint's again
    return columns


def full_column(engine: Any, trainer: Trainer, before: list[Trajectory], sample: Sample) -> list[float]:
    """The gaps after an update of all weights, which the engine has adopted."""
    engine.adopt(trainer.net.requires_grad_(True).named_parameters())
    trainer.update(before[0], lr=FULL_LR)
    engine.load_weights(named_weights(trainer.net), version=3)
    return trainer.gaps(sample())


def check_args(args: Args) -> None:
    """Raises ValueError for sizes that leave nothing to compare."""
    check_bounds(args)


if __name__ == "__main__":
    main(parse_cli(Args, check_args, sys.argv[1:], app="engine_parity", description=__doc__))
