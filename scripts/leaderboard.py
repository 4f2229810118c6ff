"""Compare all algorithms on tiny-signs: train each with several seeds, then write the data, tables and images.

    python scripts/leaderboard.py                       rows missing from docs/evidence/leaderboard.jsonl, then docs/
    python scripts/leaderboard.py --images 20480        the larger budget, after tuning the learning rates
    python scripts/leaderboard.py --only flowgrpo,nft   these rows
    python scripts/leaderboard.py --again --only nft    these rows, even if the data has them
    python scripts/leaderboard.py --try                 two steps of each, in runs/leaderboard-try; nothing in docs/
    python scripts/leaderboard.py --page-only           only tables and images, from the data

A run that is in the data with the same settings is not repeated. A second start continues stopped runs. All runs share
one reward server, and each has one thread.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from leaderboard_page import (
    ENTRIES,
    RATES,
    Entry,
    Row,
    blocks,
    by_algorithm,
    digest,
    draw,
    fill,
    key,
    order,
    read_rows,
    tuned_rate,
)
from omni_reward.serving import Server, serving
from omni_rl.settings.toml import flatten_tables, load_recipes
from omni_train.files import load_metrics
from tiny_signs import write_prompts

ROOT = Path(__file__).parents[1]
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
}  # settings that differ between runs here
WORDS = ("ocr", "--option", "reading=line")
WORDS_AND_COLORS = ("0.5*ocr + 0.5*color", "--option", "ocr.reading=line")
SIGNS = Path("data") / "tiny-signs"
VALIDATION = Path("runs") / "leaderboard" / "validation.txt"  # its words are in no other file


@dataclass(frozen=True)
class Budget:
    """The number of training images per row, their scorer, the held-out prompts, and the number of evaluations.

    data: file in docs/evidence.
    """

    images: int
    scorer: Sequence[str]
    prompts: Path
    evaluations: int
    data: str


SHORT = Budget(3840, WORDS, SIGNS / "test.txt", 2, "leaderboard.jsonl")
LONG = Budget(20_480, WORDS_AND_COLORS, SIGNS / "test.txt", 4, "leaderboard_20480.jsonl")
TUNING = Budget(2560, WORDS_AND_COLORS, VALIDATION, 1, "leaderboard_tuning.jsonl")
TUNING_SEED = 100  # used in no row
NUM_WORDS = 2048  # in train.txt
PAIRING = Lock()  # runs with the same seed share their pairs
JUDGED = "test"  # evaluation set of a trainer with a different training reward
Rows = dict[str, list[Row]]  # the data of each budget, by file name


@dataclass(frozen=True)
class Job:
    """A run to make. rate: multiple of the recipe's learning rate. trial: True for two steps, in a separate folder."""

    entry: Entry
    seed: int
    budget: Budget = SHORT
    rate: float = 1.0
    trial: bool = False

    @property
    def name(self) -> str:
        """The name of the run, a folder below runs/."""
        rate = f"-x{self.rate:g}" if self.rate != 1 else ""
        return f"leaderboard{'-try' * self.trial}/{self.budget.images}/{self.entry.name}-{self.seed}{rate}"

    @property
    def folder(self) -> Path:
        """The folder that the trainer writes to."""
        return ROOT / "runs" / self.name

    def beside(self, suffix: str) -> Path:
        """Return the file next to the folder, with this suffix."""
        return self.folder.with_name(self.folder.name + suffix)

    @property
    def pairs(self) -> Path | None:
        """The folder of the preference file, if the row trains on one; it contains made.json once it is complete."""
        return self.folder.with_name(f"pairs-{self.seed}") if self.entry.preset.endswith("offline") else None

    def settings(self) -> dict[str, Any]:
        """Return the recipe's settings that a run keeps, with the steps and learning rate of this one."""
        recipe = flatten_tables(tomllib.loads(load_recipes(self.entry.app)[self.entry.preset]))
        steps = recipe["train_steps"] * self.budget.images // SHORT.images
        own = {"train_steps": steps, "eval.every": steps // self.budget.evaluations, "lr": recipe["lr"] * self.rate}
        own |= {"train_steps": 2, "eval.every": 2} if self.trial else {}
        return {name: value for name, value in (recipe | own).items() if name not in OURS}

    def is_finished(self) -> bool:
        """True once the run has reached its last step."""
        log = self.folder / "metrics.jsonl"
        lines = load_metrics(log) if log.exists() else []
        return bool(lines) and lines[-1]["step"] >= self.settings()["train_steps"]

    def is_in(self, rows: Sequence[Row]) -> bool:
        """True if the data has this run with the current settings."""
        return any(
            key(row) == (self.entry.name, self.seed, self.rate) and row["settings"] == self.settings() for row in rows
        )


# 1. Running


def waves(
    entries: Sequence[Entry], seeds: Sequence[int], budget: Budget, rows: Rows, *, trial: bool
) -> Iterator[list[Job]]:
    """Yield jobs that may run in parallel: with the larger budget, first those that tune the rows, then the rows."""
    if budget is not LONG:
        yield [Job(entry, seed, budget, trial=trial) for seed in seeds for entry in entries]
        return
    yield [Job(entry, TUNING_SEED, TUNING, rate, trial) for entry in entries for rate in RATES]
    tuned = {entry: 1.0 if trial else tuned_rate(rows[TUNING.data], entry) for entry in entries}
    yield [Job(entry, seed, budget, rate, trial) for seed in seeds for entry, rate in tuned.items() if rate]


def measure(jobs: Sequence[Job], at_a_time: int, server: Server) -> list[str]:
    """Make the unfinished runs, `at_a_time` in parallel; return the names of those that failed."""
    left = [job for job in jobs if not job.is_finished()]
    say(f"{len(jobs)} runs, {len(left)} of them to make, {at_a_time} at a time")
    running: set[subprocess.Popen[bytes]] = set()
    failed = []
    with ThreadPoolExecutor(at_a_time) as pool:
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
    """Complete the job's run, after its preference file if it needs one."""
    if job.pairs:
        with PAIRING:
            if not (job.pairs / "made.json").exists():
                make_pairs(job, job.pairs, server, running)
    run(job, train_command(job, server), running)


def make_pairs(job: Job, folder: Path, server: Server, running: set[subprocess.Popen[bytes]]) -> None:
    """Sample the images of the job's budget before training, and make the preference file from them."""
    shutil.rmtree(folder, ignore_errors=True)  # incomplete
    start = time.monotonic()
    images, steps = 512 if job.trial else job.budget.images, 10
    group = 10 if images > 8 * NUM_WORDS else 8
    counts = {"num-prompts": images // group, "group-size": group, "num-inference-steps": steps, "seed": job.seed}
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    flags = [word.replace("scorer.", "scorer-") for word in server.flags]
    cpu_s = run(job, ["scripts/build_preferences.py", "--out", str(folder), *words, *flags], running)
    made = {"images": images, "forwards": images * steps, "seconds": time.monotonic() - start, "cpu_s": cpu_s}
    (folder / "made.json").write_text(json.dumps(made))


def train_command(job: Job, server: Server) -> list[str]:
    """Return the command of the row's trainer with its recipe; for reward gradients, the scorer only evaluates."""
    own, prompts = job.settings(), str(job.budget.prompts)
    flags = ["--preset", job.entry.preset, "--name", job.name, "--seed", str(job.seed), "--sharding.mode", "none"]
    flags += ["--eval.prompts", prompts, "--train-steps", str(own["train_steps"])]
    flags += ["--eval.every", str(own["eval.every"]), "--lr", str(own["lr"])]
    flags += ["--preferences", str(job.pairs / "pairs.jsonl")] if job.pairs else []
    url, token = server.url, server.flags[2:]
    if job.entry.app != "train_srpo":
        scored = ["--scorer.url", url, *token]
    elif job.budget is SHORT:
        scored = ["--scorer.watch-url", url, *token]
    else:  # watching does not report the parts of a score
        judged = job.beside(".toml")
        judged.parent.mkdir(parents=True, exist_ok=True)
        judged.write_text(f'[[eval.sets]]\nname = "{JUDGED}"\nprompts = "{prompts}"\nscorer_url = "{url}"\n', "utf-8")
        scored = ["--config", str(judged), *token]
    return [f"apps/{job.entry.app}.py", *flags, *scored]


def run(job: Job, command: Sequence[str], running: set[subprocess.Popen[bytes]]) -> float:
    """Run a Python program to its end, with its output in a file next to the run. Return its CPU seconds.

    Raises:
        RuntimeError: its exit code is not 0.
    """
    log = job.beside(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=file
        )
        running.add(process)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        running.discard(process)
    if code:
        raise RuntimeError(f"{command[0]} ended with exit code {code}, see {log}")
    return used.ru_utime + used.ru_stime


def say(words: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), words, flush=True)


# 2. The row of a run


def collect(job: Job) -> Row:
    """Return the row of a finished run, from its folder.

    Raises:
        ValueError: the run's settings differ from the recipe's, or an evaluation has no score.
    """
    config = flatten_tables(tomllib.loads((job.folder / "config.toml").read_text("utf-8")))
    settings = job.settings()
    if other := sorted(name for name, value in settings.items() if config.get(name) != value):
        raise ValueError(f"{job.folder} holds a run with other settings, {', '.join(other)}: move it away")
    lines = load_metrics(job.folder / "metrics.jsonl")
    made: dict[str, Any] = {"images": 0, "forwards": 0, "seconds": 0.0, "cpu_s": 0.0}
    per_step = config["prompts_per_step"] * config["group_size"]
    if job.pairs:
        made, per_step = json.loads((job.pairs / "made.json").read_text("utf-8")), 0
    forwards, seconds, evaluations = made["forwards"], made["seconds"], []
    for line in lines:
        forwards += round(line.get("perf/forwards", 0))
        seconds += line["time/step_s"] - line.get("time/eval_s", 0.0) if line["step"] else 0.0
        if found := held_out(line, job.budget):
            images = made["images"] + int(line["step"]) * per_step
            evaluations.append({"step": int(line["step"]), **found, "images": images, "forwards": forwards})
    if len(evaluations) < 2 or not all(math.isfinite(e["score"]) for e in evaluations):
        raise ValueError(f"{job.folder} must have a score in every evaluation")
    version = json.loads((job.folder / "versions.jsonl").read_text("utf-8").splitlines()[-1])
    return {
        "name": job.entry.name,
        "seed": job.seed,
        "rate": job.rate,
        "settings": settings,
        "evaluations": evaluations,
        "images": evaluations[-1]["images"],
        "forwards": forwards,
        "backwards": round(sum(line.get("perf/backwards", 0) for line in lines)),
        "cpu_s": round(made["cpu_s"] + sum(line.get("perf/cpu_s", 0) for line in lines), 1),
        "peak_memory_mb": round(max(line.get("perf/peak_memory_mb", 0.0) for line in lines), 1),
        "wall_s": round(seconds, 1),
        "ratio_deviation": ratio_deviation(lines, config),
        "torch": version["packages"]["torch"],
        "commit": version["commit"],
        "cores": os.cpu_count() or 1,
    }


def held_out(line: Mapping[str, float], budget: Budget) -> dict[str, float]:
    """Return the scores of an evaluation: of the words, and of the colors if they are part of the reward."""
    if budget is SHORT:
        score = line.get("eval/watch", line.get("eval/reward"))
        return {} if score is None else {"score": score}
    place = f"eval/{JUDGED}" if f"eval/{JUDGED}/ocr" in line else "eval"
    return {"score": line[f"{place}/ocr"], "color": line[f"{place}/color"]} if f"{place}/ocr" in line else {}


def ratio_deviation(lines: Sequence[dict[str, float]], config: dict[str, Any]) -> float | None:
    """Return the largest |ratio - 1| before a step's first update (for AWM in the first step); None without a ratio."""
    seen = [line["policy/first_ratio_max_dev"] for line in lines if "policy/first_ratio_max_dev" in line]
    if not seen and config["num_minibatches"] == 1:
        seen = [line["policy/ratio_max_dev"] for line in lines if line["step"] == 1 and "policy/ratio_max_dev" in line]
    return max(seen, default=None)


# 3. The whole


def keep(rows: Rows, jobs: Sequence[Job]) -> None:
    """Add the finished runs to the data, each replacing an older one with its name, seed and rate."""
    for job in jobs:
        if not job.trial and job.is_finished():
            row = collect(job)
            found = key(row) if job.budget is TUNING else key(row)[:2]
            rows[job.budget.data] = [old for old in rows[job.budget.data] if key(old)[: len(found)] != found] + [row]


def read_all(docs: Path) -> Rows:
    """Return the data of each budget, by file name."""
    return {budget.data: read_rows(docs / "evidence" / budget.data) for budget in (SHORT, LONG, TUNING)}


def write(rows: Rows, docs: Path) -> None:
    """Write data, tables and images; the text around the tables is kept."""
    page = fill((docs / "evidence" / "leaderboard.md").read_text("utf-8"), blocks(*rows.values()))
    draw(rows[SHORT.data], rows[LONG.data], docs / "images")
    for name, own in rows.items():
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in sorted(own, key=order)]
        (docs / "evidence" / name).write_text("".join(lines), "utf-8")
    (docs / "evidence" / "leaderboard.md").write_text(page, "utf-8")


def stale(docs: Path) -> list[str]:
    """Return the files that were not made from the current data."""
    rows = read_all(docs)
    short, long, _ = rows.values()
    page = (docs / "evidence" / "leaderboard.md").read_text("utf-8")
    of_short = ["leaderboard.svg", *(f"algorithms/{entry.name}.svg" for entry in by_algorithm(short))]
    made = dict.fromkeys(of_short, short) | ({"leaderboard_20480.svg": long} if long else {})
    images = {docs / "images" / name: own for name, own in made.items()}
    old = [path.name for path, own in images.items() if not path.exists() or digest(own) not in path.read_text("utf-8")]
    return old + (["leaderboard.md"] if fill(page, blocks(*rows.values())) != page else [])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--images", type=int, default=SHORT.images, choices=(SHORT.images, LONG.images), help="Budget")
    parser.add_argument("--only", default=",".join(names), help="Names of rows in order, separated by commas")
    parser.add_argument("--seeds", default=SEEDS, help="Seeds, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="Number of runs at a time")
    parser.add_argument("--again", action="store_true", help="Repeat rows that are in the data")
    parser.add_argument("--try", dest="trial", action="store_true", help="Make two steps of each row, nothing in docs/")
    parser.add_argument("--page-only", action="store_true", help="Only write the tables and the images")
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(names):
        parser.error(f"--only must be of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    return args


def measure_all(args: argparse.Namespace, rows: Rows) -> list[str]:
    """Make the runs missing from the data, and add them to it; return the names of those that failed."""
    budget, failed = LONG if args.images == LONG.images else SHORT, list[str]()
    by_name = {entry.name: entry for entry in ENTRIES}
    entries, seeds = [by_name[name] for name in args.only.split(",")], [int(seed) for seed in args.seeds.split(",")]
    if args.trial:
        shutil.rmtree(ROOT / "runs" / "leaderboard-try", ignore_errors=True)
    taken = [ROOT / SIGNS / name for name in ("train.txt", "eval.txt", "test.txt")]
    write_prompts(ROOT / VALIDATION, count=256, evaluation=True, avoid=taken)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are ended too
    with serving(*budget.scorer, token=secrets.token_urlsafe(32), env=ENVIRONMENT) as server:
        for wave in waves(entries, seeds, budget, rows, trial=args.trial):
            left = [job for job in wave if args.again or args.trial or not job.is_in(rows[job.budget.data])]
            try:
                failed += measure(left, args.jobs, server)
            finally:
                keep(rows, left)
    return failed


def main(argv: Sequence[str] | None = None) -> None:
    args, docs = parse(argv), ROOT / "docs"
    rows, failed = read_all(docs), list[str]()
    try:
        failed = [] if args.page_only else measure_all(args, rows)
    finally:
        if not args.trial:
            write(rows, docs)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the same command makes these again")


if __name__ == "__main__":
    main()
