"""Compare all algorithms on tiny-signs: train each with three seeds, then write the data, the table and the pictures.

    python scripts/leaderboard.py                       what is missing in runs/leaderboard, then docs/
    python scripts/leaderboard.py --only flowgrpo,nft   these rows
    python scripts/leaderboard.py --try                 two steps of each, in runs/leaderboard-try; nothing in docs/
    python scripts/leaderboard.py --page-only           table and pictures, from docs/evidence/leaderboard.jsonl

Started again, it continues runs that were stopped. All runs share one OCR scorer, and each has one thread.
"""

import argparse
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leaderboard_page import ENTRIES, Entry, Row, blocks, by_algorithm, digest, draw, fill, read_rows
from omni_reward.serving import Server, serving
from omni_rl.settings.toml import plain, recipes
from omni_train.files import load_metrics

ROOT = Path(__file__).parents[1]
IMAGES = 3840  # that each row draws to train on
SEEDS = "0,1,2"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
OURS = {
    "name",
    "scorer.name",
    "sharding.mode",
    "model",
    "prompts",
    "eval.prompts",
    "reward_model",
}  # settings that a run here has of its own


@dataclass(frozen=True)
class Job:
    """A run to make. trial: of two steps, in a folder of its own."""

    entry: Entry
    seed: int
    trial: bool

    @property
    def name(self) -> str:
        """Name of the run, a folder below runs/."""
        return f"leaderboard{'-try' * self.trial}/{self.entry.name}-{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder that the trainer writes to."""
        return ROOT / "runs" / self.name

    @property
    def pairs(self) -> Path | None:
        """Folder of the preference file, where the row trains on one; made.json is in it once it is whole."""
        return self.folder.with_name(f"pairs-{self.seed}") if self.entry.preset.endswith("offline") else None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the recipe that a run keeps."""
        recipe = plain(tomllib.loads(recipes(self.entry.app)[self.entry.preset]))
        steps = {"train_steps": 2, "eval.every": 2} if self.trial else {}
        return {name: value for name, value in (recipe | steps).items() if name not in OURS}

    def is_finished(self) -> bool:
        """True once the run has come to its last step."""
        log = self.folder / "metrics.jsonl"
        lines = load_metrics(log) if log.exists() else []
        return bool(lines) and lines[-1]["step"] >= self.settings()["train_steps"]


# 1. Running


def measure(jobs: Sequence[Job], at_a_time: int) -> list[str]:
    """Make the runs that are not finished, so many at a time; the names of those that failed."""
    left = [job for job in jobs if not job.is_finished()]
    say(f"{len(jobs)} runs, {len(left)} of them to make, {at_a_time} at a time")
    running: set[subprocess.Popen[bytes]] = set()
    failed = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended too
    with (
        serving("ocr", "--option", "reading=line", token=secrets.token_urlsafe(32), env=ENVIRONMENT) as server,
        ThreadPoolExecutor(at_a_time) as pool,
    ):
        futures = {pool.submit(make, job, server, running): job for job in left}
        try:
            for future in as_completed(futures):
                say(f"{futures[future].name}: {future.exception() or 'done'}")
                failed += [futures[future].name] if future.exception() else []
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()  # trainers save
            raise
    return failed


def make(job: Job, server: Server, running: set[subprocess.Popen[bytes]]) -> None:
    """Train the job's run to its end, after its preference file where it needs one."""
    if job.pairs and not (job.pairs / "made.json").exists():
        shutil.rmtree(job.pairs, ignore_errors=True)  # half made
        start = time.monotonic()
        images, steps = 512 if job.trial else IMAGES, 10
        counts = {"num-prompts": images // 8, "group-size": 8, "num-inference-steps": steps, "seed": job.seed}
        words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
        flags = [word.replace("scorer.", "scorer-") for word in server.flags]
        run(job, ["scripts/build_preferences.py", "--out", str(job.pairs), *words, *flags], running)
        made = {"images": images, "forwards": images * steps, "seconds": time.monotonic() - start}
        (job.pairs / "made.json").write_text(json.dumps(made))
    run(job, train_command(job, server), running)


def train_command(job: Job, server: Server) -> list[str]:
    """Return the command of the row's trainer with its recipe; with a gradient the OCR only evaluates."""
    flags = ["--preset", job.entry.preset, "--name", job.name, "--seed", str(job.seed), "--sharding.mode", "none"]
    flags += ["--eval.prompts", "data/tiny-signs/test.txt"]
    flags += ["--train-steps", "2", "--eval.every", "2"] if job.trial else []
    flags += ["--preferences", str(job.pairs / "pairs.jsonl")] if job.pairs else []
    scored = server.flags if job.entry.app != "train_srpo" else ["--scorer.watch-url", *server.flags[1:]]
    return [f"apps/{job.entry.app}.py", *flags, *scored]


def run(job: Job, command: Sequence[str], running: set[subprocess.Popen[bytes]]) -> None:
    """Run a Python program to its end; what it prints goes to a file beside the run.

    Raises:
        RuntimeError: it ended with another exit code than 0.
    """
    log = job.folder.with_suffix(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=file
        )
        running.add(process)
        code = process.wait()
        running.discard(process)
    if code:
        raise RuntimeError(f"{command[0]} ended with exit code {code}, see {log}")


def say(words: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), words, flush=True)


# 2. The row of a run


def collect(job: Job) -> Row:
    """Return the row of a finished run, from its folder.

    Raises:
        ValueError: the run had other settings than the recipe, or an evaluation has no score.
    """
    config = plain(tomllib.loads((job.folder / "config.toml").read_text("utf-8")))
    settings = job.settings()
    if other := sorted(name for name, value in settings.items() if config.get(name) != value):
        raise ValueError(f"{job.folder} holds a run with other settings, {', '.join(other)}: move it away")
    lines = load_metrics(job.folder / "metrics.jsonl")
    made: dict[str, Any] = {"images": 0, "forwards": 0, "seconds": 0.0}
    per_step = config["prompts_per_step"] * config["group_size"]
    if job.pairs:
        made, per_step = json.loads((job.pairs / "made.json").read_text("utf-8")), 0
    forwards, seconds, evaluations = made["forwards"], made["seconds"], []
    for line in lines:
        forwards += round(line.get("perf/forwards", 0))
        seconds += line["time/step_s"] - line.get("time/eval_s", 0.0) if line["step"] else 0.0
        score = line.get("eval/watch", line.get("eval/reward"))
        if score is not None:
            images = made["images"] + int(line["step"]) * per_step
            evaluations.append({"step": int(line["step"]), "score": score, "images": images, "forwards": forwards})
    if len(evaluations) < 2 or not all(math.isfinite(e["score"]) for e in evaluations):
        raise ValueError(f"{job.folder} must have a score in every evaluation")
    version = json.loads((job.folder / "versions.jsonl").read_text("utf-8").splitlines()[-1])
    return {
        "name": job.entry.name,
        "seed": job.seed,
        "settings": settings,
        "evaluations": evaluations,
        "images": evaluations[-1]["images"],
        "forwards": forwards,
        "peak_memory_mb": round(max(line.get("perf/peak_memory_mb", 0.0) for line in lines), 1),
        "wall_s": round(seconds, 1),
        "ratio_deviation": ratio_deviation(lines, config),
        "torch": version["packages"]["torch"],
        "commit": version["commit"],
        "cores": os.cpu_count() or 1,
    }


def ratio_deviation(lines: Sequence[dict[str, float]], config: dict[str, Any]) -> float | None:
    """Return the largest |ratio - 1| before a step's first update; AWM's in the first step; None without a ratio."""
    seen = [line["policy/first_ratio_max_dev"] for line in lines if "policy/first_ratio_max_dev" in line]
    if not seen and config["num_minibatches"] == 1:
        seen = [line["policy/ratio_max_dev"] for line in lines if line["step"] == 1 and "policy/ratio_max_dev" in line]
    return max(seen, default=None)


# 3. The whole


def write(rows: Sequence[Row], docs: Path) -> None:
    """Write data, table and pictures; the text around the table stays."""
    page = fill((docs / "evidence" / "leaderboard.md").read_text("utf-8"), blocks(rows))
    draw(rows, docs / "images")
    lines = [json.dumps(row, allow_nan=False) + "\n" for group in by_algorithm(rows).values() for row in group]
    (docs / "evidence" / "leaderboard.jsonl").write_text("".join(lines), "utf-8")
    (docs / "evidence" / "leaderboard.md").write_text(page, "utf-8")


def stale(docs: Path) -> list[str]:
    """Return the files that were not made from the current data."""
    rows = read_rows(docs / "evidence" / "leaderboard.jsonl")
    page = (docs / "evidence" / "leaderboard.md").read_text("utf-8")
    names = ["leaderboard.svg", *(f"algorithms/{entry.name}.svg" for entry in by_algorithm(rows))]
    pictures = [docs / "images" / name for name in names]
    old = [path.name for path in pictures if not path.exists() or digest(rows) not in path.read_text("utf-8")]
    return old + (["leaderboard.md"] if fill(page, blocks(rows)) != page else [])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--only", default=",".join(names), help="Names of rows, separated by commas")
    parser.add_argument("--seeds", default=SEEDS, help="Seeds, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="Number of runs at a time")
    parser.add_argument("--try", dest="trial", action="store_true", help="Make two steps of each row, nothing in docs/")
    parser.add_argument("--page-only", action="store_true", help="Only write the table and the pictures")
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(names):
        parser.error(f"--only must be of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, docs = parse(argv), ROOT / "docs"
    rows, failed = read_rows(docs / "evidence" / "leaderboard.jsonl"), list[str]()
    if not args.page_only:
        entries = [entry for entry in ENTRIES if entry.name in args.only.split(",")]
        jobs = [Job(entry, int(seed), args.trial) for seed in args.seeds.split(",") for entry in entries]
        if args.trial:
            shutil.rmtree(ROOT / "runs" / "leaderboard-try", ignore_errors=True)
        failed = measure(jobs, args.jobs)
        made = [collect(job) for job in jobs if job.is_finished()]
        keys = {(row["name"], row["seed"]) for row in made}
        rows = [row for row in rows if (row["name"], row["seed"]) not in keys] + made
    if not args.trial:
        write(rows, docs)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the same command makes these again")


if __name__ == "__main__":
    main()
