"""A FlowGRPO step over the transformer's forwards and backwards inside it: what the framework around the model costs.

python benchmarks/framework_tax.py
python benchmarks/framework_tax.py --random 6 --random-heads 4 --height 256 --width 256 --group-size 2 --batch-size 2

The trainer runs as it is; the scorer is one in its process that looks at a few pixels. On a CPU the seconds are those
of this process's work, which others may share; on an accelerator those of the clock, the device waited for at both
ends of each forward and backward. `--random` trains LoRA on a random transformer with guidance instead of the preset's
weights.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import numpy as np
import torch
import trainer
from fixed_cost import quiet
from omni_reward import Score
from omni_rl.flow.scorers import LocalScorer
from omni_rl.run.world import World
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import change
from omni_rl.settings.toml import from_toml, recipes
from omni_train.dist import default_compute_dtype, local_device
from omni_train.log import RunLog
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
LORA = {"lora_rank": 16, "lora_alpha": 32, "true_cfg_scale": 4.0, "algo": "flowgrpo", "noise_level": 1.2,
        "window_size": 2, "window_low": 0, "window_high": 5}  # fmt: skip


@dataclass(frozen=True)
class Args(engines.Args):
    """Settings of the benchmark."""

    group_size: int = 8  # Samples of each of the prompts
    prompts_per_step: int = 2  # Prompts of a step
    steps: int = 2  # Steps that count, after one that does not
    compile: bool = False  # Compile the transformer's blocks, which the step that does not count does


def grade(media: Mapping[str, np.ndarray], texts: Sequence[str]) -> list[Score]:
    """Scores that differ, at no cost."""
    return [Score(float(image[::8, ::8].mean()) / 255) for image in media["image"]]


def measure(args: Args) -> dict[str, float]:
    """Seconds of a step, and in it of forwards, backwards and decoding, by name."""
    if args.compile and args.group_size % args.batch_size:
        rule = "batch_size must divide group_size with compile, as padded batches compile a graph in a step that counts"
        raise ValueError(f"{rule}, got {args.batch_size} and {args.group_size}")
    sys.path.append(str(REPO / "apps"))
    import train_flowgrpo as app

    device = local_device()
    spent, marks, started = Counter[str](), list[dict[str, float]](), list[float]()

    def log(self: RunLog, *arguments: Any, **options: Any) -> None:
        logged(self, *arguments, **options)
        marks.append({"step": engines.now(device), **spent})

    def part(module: nn.Module) -> str | None:
        return None if torch.compiler.is_compiling() else watched.get(type(module).__name__.removeprefix("FSDP"))

    def before(module: nn.Module, inputs: object) -> None:
        if part(module):
            started.append(engines.now(device))

    def after(module: nn.Module, inputs: object, output: object) -> None:
        if name := part(module):
            spent[name] += engines.now(device) - started.pop()

    def backward(self: Tensor, *arguments: Any, **options: Any) -> None:
        start = engines.now(device)
        went_back(self, *arguments, **options)
        spent["backward"] += engines.now(device) - start

    with trainer.model(args) as model:
        settings = from_toml(recipes("train_flowgrpo")["tiny-signs"], app.Args, "tiny-signs") | {
            "model": str(Path(model).resolve()), "scorer_url": "http://127.0.0.1:1",
            "prompts": str(REPO / "data/tiny-signs/train.txt"), "eval_prompts": "eval.txt",
            "train_steps": args.steps + 2, "eval_every": 1000, "save_every": 1000, "height": args.height,
            "width": args.width, "prompts_per_step": args.prompts_per_step, "group_size": args.group_size,
            "batch_size": args.batch_size, "num_inference_steps": args.num_inference_steps, "sharding_mode": "auto",
            "compile": args.compile,
        }  # fmt: skip
        dtype = str(default_compute_dtype(device)).removeprefix("torch.")
        settings |= LORA | {"dtype": dtype} if args.random else {}
        watched = {engines.config(model, "transformer")["_class_name"]: "forward", "QwenImageDecoder3d": "decode"}
        logged, went_back, connect = RunLog.log, Tensor.backward, World.connect
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(before),
            nn.modules.module.register_module_forward_hook(after),
        ]
        RunLog.log, Tensor.backward = log, backward  # type: ignore[method-assign, assignment]
        World.connect = lambda *_, **__: (LocalScorer(grade), "none")  # type: ignore[assignment, return-value]
        try:
            with quiet():
                Path("eval.txt").write_text(f"{engines.TEXT}\n")
                own = change(app.Args(), **settings)
                app.main(own, World.join(own))
        finally:
            RunLog.log, Tensor.backward = logged, went_back  # type: ignore[method-assign]
            World.connect = connect  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()
    first, last = marks[1], marks[1 + args.steps]  # line 0 evaluates, as the last step does
    return {name: (value - first.get(name, 0.0)) / args.steps for name, value in last.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_cli(Args, lambda args: None, words, app="framework_tax", description=__doc__)
    found = measure(args)
    inside = found["forward"] + found["backward"]
    print(engines.stamp(args))
    print("| step, s | forward, s | backward, s | decode, s | step / (forward + backward) | without decode |")
    print("| --- | --- | --- | --- | --- | --- |")
    step, decode = found["step"], found["decode"]
    times = " | ".join(f"{found[name]:.3f}" for name in ("step", "forward", "backward", "decode"))
    print(f"| {times} | {step / inside:.3f} | {(step - decode) / inside:.3f} |")


if __name__ == "__main__":
    main()
