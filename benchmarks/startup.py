"""CPU seconds to start a trainer: for its help, for a dry run, and until the first training step.

python benchmarks/startup.py
python benchmarks/startup.py --against ../other-checkout --rounds 5

The result is the minimum over the rounds, in which the checkouts take turns, with the packages of this environment:
other load on the machine can only add to a round. The model is the shipped one; before the first step it generates
held-out samples for two prompts, which are scored by a server in this process.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import runner
from omni_reward.serving import serving_in_thread

REPO = Path(__file__).parents[1]
FLAGS = [
    "--preset",
    "tiny-signs",
    "--eval.prompts",
    "eval.txt",
    "--train-steps",
    "0",
    "--eval.num-inference-steps",
    "2",
]
CASES = {"help": ["--help"], "dry run": [*FLAGS, "--dry-run"], "first step": FLAGS}


def cpu_s(checkout: Path, flags: Sequence[str]) -> float:
    """Return the CPU seconds of a checkout's trainer and of its child processes."""
    sources = os.pathsep.join(map(str, sorted(checkout.glob("packages/*/src"))))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "eval.txt").write_text('a blue sign that says "AB"\na red sign that says "CD"\n')
        for name in ("checkpoints", "data"):
            (Path(folder) / name).symlink_to(checkout / name)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, str(checkout / "apps" / "train_flowgrpo.py"), *flags],
            env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout to measure too")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, after one that does not count")
    args = parser.parse_args(argv)
    checkouts = [REPO, *([args.against.resolve()] if args.against else [])]
    found: dict[tuple[Path, str], list[float]] = {}
    with serving_in_thread(lambda media, prompts, meta: [0.0] * len(prompts)) as url:
        for _ in range(args.rounds + 1):
            for checkout in checkouts:
                for case, flags in CASES.items():
                    found.setdefault((checkout, case), []).append(cpu_s(checkout, [*flags, "--scorer.url", url]))
    print(runner.stamp())
    print("| start |", " | ".join(map(str, checkouts)), "|")
    print("| --- |", " | ".join("---" for _ in checkouts), "|")
    for case in CASES:
        print(f"| {case} |", " | ".join(f"{min(found[each, case][1:]):.2f}" for each in checkouts), "|")


if __name__ == "__main__":
    main()
