"""Time of a step of the demonstration by part, besides the net's forward and backward passes.

python benchmarks/demonstration.py

The recipe `tiny-signs-demo` runs on one rank and one thread, with a function in this process as the scorer, which is
another process in `make demo`. Each millisecond of this process's CPU time counts for the Python code that runs then;
a profiler's hooks on each call would change the result.
"""

import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import runner
import torch
from omni_rl.flow.scorers import LocalScorer
from omni_rl.run.world import World
from omni_rl.settings.fields import at_least, change
from omni_rl.settings.toml import from_toml, load_recipes
from omni_train.log import RunLog
from step_cost import grade  # also makes apps/ importable

import train_nft

EVERY_S = 0.001
OURS = "ours"
PARTS = {  # by suffix of a file's name; the outermost matching frame determines the part
    "transformers/transformer_qwenimage.py": "the net's forwards",
    "torch/autograd/graph.py": "the net's backwards",
    "autoencoders/autoencoder_kl_qwenimage.py": "decoding",
    "omni_rollout/models/qwen_image_vae.py": "decoding",
    "models/qwen2_5_vl/modeling_qwen2_5_vl.py": "text encoder",
    "torch/optim/optimizer.py": "AdamW",
    "torch/optim/adamw.py": "AdamW",
}


@dataclass(frozen=True)
class Args:
    """Settings of the steps."""

    steps: Annotated[int, at_least(1)] = 8  # Counted steps, after two that do not count
    functions: Annotated[int, at_least(0)] = 12  # Number of our functions to list, the slowest first


class Moments:
    """CPU seconds of this process by part, and of our functions, while it is running."""

    def __init__(self) -> None:
        self.parts, self.functions, self.last = Counter[str](), Counter[str](), 0.0

    def start(self) -> None:
        """Start counting."""
        signal.signal(signal.SIGPROF, self.count)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        self.last = time.process_time()

    def stop(self) -> None:
        """Stop counting."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def count(self, number: int, frame: FrameType | None) -> None:
        """Add the seconds since the last sample to the part that is running; a longer operator counts as a whole."""
        seconds = time.process_time() - self.last
        part, function = OURS, ""
        while frame:
            file = frame.f_code.co_filename
            part = next((name for end, name in PARTS.items() if file.endswith(end)), part)
            if not function and ("/omni_" in file or "/apps/" in file):
                function = f"{Path(file).stem}.{frame.f_code.co_qualname}"
            frame = frame.f_back
        self.parts[part] += seconds
        if part == OURS:
            self.functions[function] += seconds
        self.last = time.process_time()


def demonstration(args: Args) -> None:
    """Print the shares of a step's CPU time by part, and our slowest functions."""
    moments = moments_of(args.steps)
    whole = sum(moments.parts.values())
    print(runner.stamp(args))
    for head, found in (("part", moments.parts), ("function of ours", moments.functions)):
        rows = [
            (name, f"{1000 * seconds / args.steps:.1f}", f"{100 * seconds / whole:.1f}")
            for name, seconds in found.most_common(args.functions)
        ]
        print(runner.table((head, "ms of a step", "% of a step"), rows))


def moments_of(steps: int, **changes: Any) -> Moments:
    """Return the CPU time of a run's steps. changes: changed settings of the recipe."""
    moments, logged, connect, calls = Moments(), RunLog.log, World.connect, [0]

    def log(self: RunLog, *arguments: Any, **options: Any) -> None:
        logged(self, *arguments, **options)
        calls[0] += 1
        if calls[0] == 3:  # line 0, and two steps
            moments.start()
        elif calls[0] == 3 + steps:
            moments.stop()

    torch.set_num_threads(1)
    data = runner.REPO / "data" / "tiny-signs"
    settings = from_toml(load_recipes("train_nft")["tiny-signs-demo"], train_nft.Args, "tiny-signs-demo") | {
        "model": str(runner.REPO / "checkpoints" / "tiny-signs-qwen-image"),
        "prompts": str(data / "train.txt"),
        "eval_prompts": str(data / "eval.txt"),
        "eval_num_prompts": 2,
        "scorer_url": "http://127.0.0.1:1",
        "scorer_name": "",
        "train_steps": steps + 3,
        "sharding_mode": "none",
        **changes,
    }
    RunLog.log = log  # type: ignore[method-assign, assignment]
    World.connect = lambda *_, **__: (LocalScorer(grade), "none")  # type: ignore[assignment, return-value]
    try:
        with runner.quiet():
            own = change(train_nft.Args(), **settings)
            train_nft.main(own, World.join(own))
    finally:
        moments.stop()
        RunLog.log, World.connect = logged, connect  # type: ignore[method-assign]
    return moments


if __name__ == "__main__":
    runner.run(__doc__, demonstration)
