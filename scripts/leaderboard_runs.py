"""Making the runs of the leaderboard: a shared scorer, some trainers at a time, and what each has measured."""

import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from leaderboard_rows import Entry, Evaluation, Row
from omni_train.log import load_metrics

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "data" / "tiny-signs"

# What differs between a preset and a run of it here, names files, or is noted as what it came to.
OURS = {
    "name", "seed", "shard", "model", "reward_model", "prompts", "eval_prompts", "preferences", "scorer_url",
    "scorer_token_file", "watch_scorer_url", "old_log_prob", "ratio_tolerance",
}  # fmt: skip
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run to make: an algorithm, a seed, the settings, the images a row has, and the folder below runs/."""

    entry: Entry
    seed: int
    settings: Any
    images: int
    home: str

    @property
    def label(self) -> str:
        """Algorithm and seed."""
        return f"{self.entry.name}-{self.seed}"

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.home}/{self.label}"

    @property
    def folder(self) -> Path:
        """Where the trainer writes."""
        return ROOT / "runs" / self.name

    @property
    def logs(self) -> Path:
        """Where LABEL.txt holds what its programs print, and LABEL.commit what they were started from."""
        return ROOT / "runs" / self.home / "logs"

    @property
    def pairs(self) -> Path:
        """Where the preference file is made; beside it made.json once it is whole."""
        return ROOT / "runs" / self.home / f"pairs-{self.seed}"


def changed(settings: Any) -> dict[str, Any]:
    """What settings say beyond their trainer's defaults, without the name."""
    default, given = asdict(type(settings)()), asdict(settings)
    return {name: value for name, value in given.items() if name != "name" and value != default[name]}


def images_of(settings: Any) -> int:
    """Images that a run with these settings draws to train on."""
    return int(settings.steps * settings.prompts_per_step * settings.group_size)


def is_finished(job: Job) -> bool:
    """Whether the run has come to its last step.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    path = job.folder / "config.toml"
    if not path.exists():
        return False
    config, default = tomllib.loads(path.read_text("utf-8")), type(job.settings)()
    for name in (field.name for field in fields(default) if field.name not in OURS):
        wanted = getattr(job.settings, name)
        there = config.get(name, wanted if wanted is None else getattr(default, name))
        if there != wanted:
            raise ValueError(f"{job.folder} holds a run with {name} = {there}, not {wanted}: move it away")
    metrics = job.folder / "metrics.jsonl"
    lines = load_metrics(metrics) if metrics.exists() else []
    return bool(lines) and lines[-1]["step"] >= job.settings.steps


# 1. Running


@dataclass(frozen=True)
class Scorer:
    """The reward server of all runs."""

    url: str
    token_file: Path


@contextmanager
def scorer() -> Iterator[Scorer]:
    """An OCR server that ends with the block.

    Raises:
        RuntimeError: it does not start.
    """
    with TemporaryDirectory() as scratch:  # its owner's alone
        token, url = Path(scratch) / "token", Path(scratch) / "url"
        token.write_text(secrets.token_urlsafe(32))
        flags = ["--scorer", "ocr", "--token-file", str(token), "--url-file", str(url)]
        process = subprocess.Popen(
            [sys.executable, "-m", "omni_reward.server", *flags], env=os.environ | ENVIRONMENT, start_new_session=True
        )
        try:
            while not (url.exists() and url.read_text()):
                if process.poll() is not None:
                    raise RuntimeError(f"the OCR server ended with exit code {process.returncode}")
                time.sleep(0.2)
            yield Scorer(url.read_text().strip(), token)
        finally:
            process.terminate()
            process.wait()


def next_command(job: Job, server: Scorer) -> list[str] | None:
    """What brings the run further, from what is on disk; None when it is finished."""
    if is_finished(job):
        return None
    asks = ["--scorer-token-file", str(server.token_file)]
    if job.entry.offline and not (job.pairs / "made.json").exists():
        if job.pairs.exists():  # half made
            shutil.rmtree(job.pairs)
        return [
            *("scripts/build_preferences.py", "--scorer-url", server.url, *asks, "--out", str(job.pairs)),
            *(word for flag, value in pair_flags(job).items() for word in (flag, str(value))),
        ]
    args = job.settings
    return [
        *(f"apps/{job.entry.app}.py", "--preset", job.entry.preset, "--name", job.name, "--seed", str(job.seed)),
        *("--steps", str(args.steps), "--eval-every", str(args.eval_every), "--shard", "none"),
        *("--eval-prompts", str(PROMPTS / "test.txt"), *asks),
        *("--watch-scorer-url" if job.entry.watched else "--scorer-url", server.url),
        *(("--preferences", str(job.pairs / "pairs.jsonl")) if job.entry.offline else ()),
    ]


def pair_flags(job: Job) -> dict[str, int]:
    """What a preference file of as many images is made with: groups of 8 samples, larger where prompts do not suffice.

    Raises:
        ValueError: no size of groups gives that number.
    """
    num_prompts = len((PROMPTS / "train.txt").read_text("utf-8").splitlines())
    for size in range(8, 65):
        if job.images % size == 0 and job.images // size <= num_prompts:
            counts = {"--num-prompts": job.images // size, "--group-size": size, "--batch-size": size}
            return counts | {"--num-steps": job.settings.num_steps, "--seed": job.seed}
    raise ValueError(f"no preference file of {job.images} images of at most {num_prompts} prompts")


@dataclass
class Running:
    """A process that works on a run."""

    job: Job
    process: subprocess.Popen[bytes]
    script: str
    start: float


def begin(job: Job, command: list[str]) -> Running:
    """Starts a command; what it prints goes to a file of the run's name."""
    job.logs.mkdir(parents=True, exist_ok=True)
    (job.logs / f"{job.label}.commit").write_text(commit())
    with (job.logs / f"{job.label}.txt").open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=file,
            start_new_session=True,  # so that an interrupt reaches us alone, and we end it gently
        )  # fmt: skip
    say(f"{job.name}: {command[0]}")
    return Running(job, process, command[0], time.monotonic())


def commit() -> str:
    """The commit of the programs, `+` behind it where they differ from it; empty without one.

    A trainer notes that too, but sees the page change that this script writes.
    """
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    paths = ["apps", "packages", "scripts", "checkpoints", "data"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *paths], capture_output=True)
    return head + "+" * bool(changed.returncode)


def finish(running: Running) -> None:
    """What follows a command that has ended well: a preference file is whole, and its cost is known."""
    if running.script == "scripts/build_preferences.py":
        images = running.job.images
        made = {"images": images, "forwards": images * running.job.settings.num_steps}  # without guidance
        seconds = {"seconds": round(time.monotonic() - running.start, 1)}
        (running.job.pairs / "made.json").write_text(json.dumps(made | seconds))


def carry_out(jobs: Sequence[Job], server: Scorer, *, at_a_time: int) -> Generator[tuple[Job, str]]:
    """Makes the runs, so many at a time; yields each that is finished or has failed, and why it has."""
    waiting, running = list(jobs), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                job = waiting.pop(0)
                try:
                    command = next_command(job, server)
                except ValueError as exc:  # a preset that has changed meanwhile
                    yield job, str(exc)
                    continue
                if command is None:
                    yield job, ""
                else:
                    running.append(begin(job, command))
            time.sleep(0.2)
            for done in [r for r in running if r.process.poll() is not None]:
                running.remove(done)
                if code := done.process.returncode:
                    yield done.job, f"exit code {code}, see {done.job.logs}/{done.job.label}.txt"
                else:
                    finish(done)
                    waiting.insert(0, done.job)  # for its next command, or to be seen as finished
    finally:
        for r in running:
            r.process.terminate()  # trainers save
        for r in running:
            r.process.wait()


def say(words: str) -> None:
    """A line on the terminal."""
    print(time.strftime("%H:%M:%S"), words, flush=True)


# 2. What a run has measured


def collect(job: Job) -> Row:
    """The row of a finished run, from its folder.

    Raises:
        ValueError: something that the page needs was not logged, or is no number.
    """
    lines = load_metrics(job.folder / "metrics.jsonl")
    trained = [line for line in lines if line["step"] > 0]
    if any("perf/forwards" not in line for line in trained):
        raise ValueError(f"{job.folder}/metrics.jsonl must have perf/forwards in every line")
    made: Any = {"images": 0, "forwards": 0, "seconds": 0.0}
    per_step = job.settings.prompts_per_step * job.settings.group_size
    if job.entry.offline:
        made, per_step = json.loads((job.pairs / "made.json").read_text("utf-8")), 0
    score, images, forwards = "eval/watch" if job.entry.watched else "eval/reward", made["images"], made["forwards"]
    evaluations = []
    for line in lines:
        images += per_step if line["step"] else 0
        forwards += round(line["perf/forwards"]) if line["step"] else 0
        if score in line:
            evaluations.append(Evaluation(int(line["step"]), line[score], images, forwards))
    if not evaluations or not all(math.isfinite(e.score) for e in evaluations):
        raise ValueError(f"{job.folder}/metrics.jsonl must have {score}, a number, in every evaluation")
    with (job.folder / "versions.jsonl").open(encoding="utf-8") as file:
        version = json.loads(list(file)[-1])
    return Row(
        job.entry.name, job.seed, changed(job.settings), evaluations, images, forwards,
        round(max(line["perf/peak_memory_mb"] for line in trained), 1),
        round(made["seconds"] + sum(line["time/step_s"] - line.get("time/eval_s", 0.0) for line in trained), 1),
        ratio_deviation(job, trained),
        version["packages"]["torch"], (job.logs / f"{job.label}.commit").read_text(), os.cpu_count() or 1,
    )  # fmt: skip


def ratio_deviation(job: Job, trained: Sequence[dict[str, float]]) -> float | None:
    """The largest |ratio - 1| before an update of the policy that has sampled; None where there is no ratio.

    Where only ratios of all updates are logged, as by AWM, it is known for a first step of one update.
    """
    seen = [line["policy/first_ratio_max_dev"] for line in trained if "policy/first_ratio_max_dev" in line]
    if not seen and job.settings.updates_per_step == 1:
        seen = [line["policy/ratio_max_dev"] for line in trained[:1] if "policy/ratio_max_dev" in line]
    return max(seen, default=None)
