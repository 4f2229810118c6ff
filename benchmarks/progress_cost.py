"""Share of a step of the tiny model that its progress takes: calls of the training thread, and looks of the display's.

python benchmarks/progress_cost.py

The calls of a step are counted by a profile; each kind is timed in a loop, and the step in a run without a profile. The
display looks at the progress every few seconds, however long a step takes.
"""

import argparse
import cProfile
import io
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import engines
from omni_reward.serving import serving_here
from omni_rl.run.world import World
from omni_rl.settings.fields import build, change
from omni_rl.settings.toml import from_toml, recipes
from omni_train import display, progress
from omni_train.display import Display
from omni_train.files import load_metrics

REPO = Path(__file__).parents[1]
TIMES = 2000  # that a call is timed


def train(name: str, prompts: int, url: str) -> float:
    """Train a step of the recipe tiny-signs with so many prompts in the working folder; its seconds."""
    sys.path.insert(0, str(REPO / "apps"))
    import train_flowgrpo as app

    args = build(app.Args, from_toml(recipes("train_flowgrpo")["tiny-signs"], app.Args, "tiny-signs"))
    places = {"model": str(REPO / "checkpoints/tiny-signs-qwen-image"), "eval_first": False, "eval_every": 10}
    places |= {
        "prompts": str(REPO / "data/tiny-signs/train.txt"),
        "eval_prompts": str(REPO / "data/tiny-signs/eval.txt"),
    }
    small = {"prompts_per_step": prompts, "group_size": 8, "batch_size": 8, "train_steps": 1, "eval_num_prompts": 1}
    args = change(args, **places, **small, name=name, scorer_url=url, scorer_name="")
    with redirect_stdout(io.StringIO()):
        app.main(args, World.join(args))
    return load_metrics(Path("runs") / name / "metrics.jsonl")[-1]["time/step_s"]


def counted(profile: cProfile.Profile) -> dict[str, int]:
    """The calls of the functions of `omni_train.progress`, by name."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # as its documentation has it
    return {name: count for (file, _, name), (_, count, *_) in stats.items() if file == progress.__file__}


def seconds_of(call: Callable[[], object]) -> float:
    """The CPU seconds of a call, within a phase."""
    progress.begin("step 1", 64, "samples")
    start = time.thread_time()
    for _ in range(TIMES):
        call()
    return (time.thread_time() - start) / TIMES


def phase() -> None:
    """Begin and end a phase."""
    with progress.doing("rollout"):
        pass


def look_s(*, tty: bool) -> float:
    """The seconds of a look at the progress, of a bar or of lines."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with patch.object(sys, "stdout", terminal), patch.object(Display, "_watch", lambda self: None):
        shown = Display(tty=tty)
        shown.begin(100, Path("runs/plain/metrics.jsonl"))
        seconds = seconds_of(shown.look)
        shown.close()
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of the step, of 8 samples each")
    args = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving_here(lambda media, texts, meta: [*map(float, range(len(texts)))]) as url,
    ):
        os.chdir(folder)
        step_s = train("plain", args.prompts, url)
        with cProfile.Profile() as profile:
            train("profiled", args.prompts, url)
        calls = counted(profile)
        each = {
            "advance": progress.advance,
            "beat": progress.beat,
            "doing": phase,
            "begin": lambda: progress.begin("step 1"),
        }
        rows = [(name, calls.get(name, 0) / step_s, seconds_of(call)) for name, call in each.items()]
        rows.append(("look of a bar", 1 / display.BAR_S, look_s(tty=True)))
        rows.append(("look of lines", 1 / display.LINES_S, look_s(tty=False)))
        os.chdir(REPO)
    print(engines.stamp(args))
    print(f"a step of {step_s:.2f} s", "| call | times a second | microseconds | share of a step |", sep="\n")
    print("| --- | --- | --- | --- |")
    for name, rate, seconds in rows:
        print(f"| {name} | {rate:.1f} | {1e6 * seconds:.1f} | {100 * rate * seconds:.4f} % |")


if __name__ == "__main__":
    main()
