"""Train one recipe with several values of its settings, and compare what came of them in a table and a picture.

    omni-rl sweep my.toml --vary lr=1e-4,3e-4 seed=0..2 --scorer-url http://127.0.0.1:8100

The same command continues: finished runs stay as they are, others go on from their newest checkpoint.
"""

import argparse
import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from omni_train.files import load_metrics, write_atomically

from omni_rl.args import MAY_CHANGE
from omni_rl.cli import flag_of, require, say
from omni_rl.command.__main__ import RANKS, known, launcher, split_ranks, trainers

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#97bbf5")


@dataclass(frozen=True)
class Member:
    """A run of the sweep: its folder, the values of what varies, all settings, and the command that trains it."""

    folder: Path
    values: Mapping[str, str]
    settings: Mapping[str, Any]
    command: Sequence[str]

    @property
    def log(self) -> Path:
        """The file of what it prints."""
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def group(self) -> str:
        """What it shares with the runs that differ in the seed alone."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items() if name != "seed") or "all"

    def lines(self) -> list[dict[str, float]]:
        """The steps in its log.

        Raises:
            ValueError: a line is damaged.
        """
        path = self.folder / "metrics.jsonl"
        return load_metrics(path) if path.exists() else []

    def num_steps(self) -> int:
        """Finished steps."""
        return int(max((line["step"] for line in self.lines()), default=0))

    def scores(self) -> list[tuple[float, float]]:
        """(step, held-out score) of every evaluation that has one."""
        lines = [line for line in self.lines() if math.isfinite(line.get("eval/reward", math.nan))]
        return [(line["step"], line["eval/reward"]) for line in lines]

    def is_finished(self) -> bool:
        """Whether it has come to its last step."""
        return bool(self.lines()) and self.num_steps() >= self.settings["train_steps"]


def main(argv: list[str] | None = None) -> None:
    """Run the command line: exit code 1 where a run failed, 2 for a mistake in it, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="omni-rl sweep",
        usage="omni-rl sweep RECIPE --vary NAME=VALUES [NAME=VALUES ...] [FLAG ...]",
        description=__doc__,
        epilog=f"Further flags, {RANKS} among them, go to the trainer of every run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="TOML file of settings, or the name of a preset")
    values = "values with commas between, lr=1e-4,3e-4, or whole numbers, seed=0..2"
    add("--vary", nargs="+", action="extend", required=True, metavar="NAME=VALUES", help=values)
    add("--trainer", help="flowgrpo, nft, ... (default: the one trainer that has all settings of RECIPE)")
    add("--jobs", type=int, default=1, metavar="N", help="runs at a time, which share the devices (default: 1)")
    add("--name", default="", help="folder of the runs below runs/ (default: the recipe's name and -sweep)")
    args, flags = parser.parse_known_args(argv)
    try:
        require((args.jobs >= 1, f"--jobs must be >= 1, got {args.jobs}"))
        members = plan(args.recipe, parse_vary(args.vary), flags, trainer=args.trainer, name=args.name)
        left = [member for member in members if not member.is_finished()]
        folder = members[0].folder.parent
        say(f"{len(members)} runs in {folder}, {len(left)} of them to make, {args.jobs} at a time")
        failed, interrupted = make(left, args.jobs)
        rows = table(members)
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_atomically(folder / "sweep.csv", text.getvalue())
        write_atomically(folder / "sweep.svg", picture(members))
    except KeyboardInterrupt:  # before the first run
        sys.exit(130)
    except (OSError, ValueError) as exc:
        parser.exit(2, f"{parser.prog}: error: {exc}\n")
    say("\n" + "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])))
    say(f"{folder}/sweep.csv, {folder}/sweep.svg; omni-rl report {folder}/*/ lays the runs over each other")
    if interrupted or failed:
        told = "interrupted" if interrupted else f"failed: {', '.join(str(member.folder) for member in failed)}"
        print(f"{told}; the same command continues", file=sys.stderr)
        sys.exit(130 if interrupted else 1)


# 1. Which runs


def parse_vary(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each setting in words such as lr=1e-4,3e-4 and seed=0..2.

    Raises:
        ValueError: a word has another form, or a setting or a value comes twice.
    """
    vary: dict[str, list[str]] = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        ends = re.fullmatch(r"(\d+)\.\.(\d+)", text)
        values = [str(n) for n in range(int(ends[1]), int(ends[2]) + 1)] if ends else text.split(",")
        is_whole = bool(name) and name not in vary and all(values) and 0 < len(set(values)) == len(values)
        rule = "--vary must be NAME=VALUE,VALUE or NAME=FIRST..LAST, each name and each value once"
        require(
            (is_whole, f"{rule}, got {word!r}"),
            (name != "name", "--vary must leave out name: each run gets one of its own"),
        )
        vary[name] = values
    return vary


def plan(
    recipe: str, vary: Mapping[str, Sequence[str]], flags: Sequence[str], *, trainer: str | None, name: str
) -> list[Member]:
    """The runs of the sweep, all of whose settings the trainer has checked.

    Raises:
        ValueError: the recipe, a flag or a value does not fit, or a folder holds a run with other settings.
    """
    ranks, flags = split_ranks(flags)
    source = ["--config" if recipe.endswith(".toml") else "--preset", recipe]
    program = find_trainer(recipe, source, trainer)
    name = name or f"{check(program, [*source, *flags], ranks)['name']}-sweep"
    members = []
    for values in product(*vary.values()):
        pairs = dict(zip(vary, values, strict=True))
        words = ",".join(f"{key}={value}" for key, value in pairs.items())
        folder = Path("runs") / name / words.replace("/", "_")
        own = [*source, *flags, *map(as_flag, pairs, values), "--name", str(folder.relative_to("runs"))]
        try:
            settings = check(program, own, ranks)
        except ValueError as exc:
            raise ValueError(f"--vary {words}: {exc}") from exc
        members.append(Member(folder, pairs, settings, [sys.executable, *launcher(ranks), str(program), *own]))
    num_folders = len({member.folder for member in members})
    require((num_folders == len(members), "--vary must give each run a name of its own, where / becomes _"))
    for member in members:
        check_folder(member)
    return members


def find_trainer(recipe: str, source: Sequence[str], trainer: str | None) -> Path:
    """The file of the trainer that is asked for, or that alone has all settings of the recipe.

    Raises:
        ValueError: there is no such trainer, or not one alone.
    """
    programs = trainers()
    if trainer is not None:
        return programs[known(trainer, programs, "--trainer")]
    answers = {name: ask(program, source) for name, program in programs.items()}
    fits = [name for name, answer in answers.items() if answer.stdout]
    mistakes = {mistake_of(answer) for answer in answers.values()}
    require((fits or len(mistakes) > 1, "".join(mistakes)))  # as that the file is not there
    if len(fits) != 1:
        which = f"{', '.join(fits)} have" if fits else "no trainer has"
        raise ValueError(f"--trainer must be given: {which} all settings of {recipe}")
    return programs[fits[0]]


def ask(program: Path, flags: Sequence[str], ranks: str = "") -> subprocess.CompletedProcess[str]:
    """What the trainer says to --check: its settings on stdout where it can read them, and a mistake on stderr."""
    env = os.environ | ({"WORLD_SIZE": ranks, "RANK": "0"} if ranks else {})
    command = [sys.executable, str(program), *flags, "--check"]
    return subprocess.run(command, env=env, capture_output=True, encoding="utf-8")


def check(program: Path, flags: Sequence[str], ranks: str) -> dict[str, Any]:
    """All settings of a run, checked by its trainer.

    Raises:
        ValueError: the trainer refuses them, in its own words.
    """
    answer = ask(program, flags, ranks)
    if answer.returncode:
        raise ValueError(mistake_of(answer))
    return tomllib.loads(answer.stdout)


def mistake_of(answer: subprocess.CompletedProcess[str]) -> str:
    """What the trainer says is wrong; "" where nothing is."""
    last = answer.stderr.strip().rpartition("\n")[2] if answer.returncode else ""
    return last.partition(": error: ")[2] or last


def as_flag(name: str, value: str) -> str:
    """A setting as a word of the command line."""
    if value in ("true", "false"):
        return flag_of(name) if value == "true" else f"--no-{flag_of(name)[2:]}"
    return f"{flag_of(name)}={value}"


def check_folder(member: Member) -> None:
    """Raise ValueError where the folder holds a run with other settings, which would be taken for this one."""
    path = member.folder / "config.toml"
    if not path.exists():
        return
    was = tomllib.loads(path.read_text("utf-8"))
    free = [name for name in MAY_CHANGE if not name.startswith("eval_")]  # scores are compared
    free += [] if member.is_finished() else ["train_steps"]
    names = (was.keys() | member.settings.keys()) - set(free)
    other = sorted(name for name in names if was.get(name) != member.settings.get(name))
    if other:
        told = ", ".join(f"{name} = {was.get(name)!r}, now {member.settings.get(name)!r}" for name in other)
        raise ValueError(
            f"{member.folder} holds a run with other settings, {told}: give another --name, or move it away"
        )


# 2. Making them


def make(members: Sequence[Member], jobs: int) -> tuple[list[Member], bool]:
    """Make the runs, so many at a time; those that failed, and whether the program was asked to stop.

    Ctrl-C reaches the trainers too, which finish their step and save; SIGTERM is passed on to them.
    """
    waiting, running = list(members), dict[subprocess.Popen[bytes], Member]()
    failed, stops = list[Member](), list[int]()

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        for process in running if number == signal.SIGTERM else ():
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not stops):
            while waiting and len(running) < jobs and not stops:
                member = waiting.pop(0)
                member.log.parent.mkdir(parents=True, exist_ok=True)
                with member.log.open("ab") as log:
                    process = subprocess.Popen(member.command, stdout=log, stderr=log)
                running[process] = member
                if signal.SIGTERM in stops:  # which came while it was being started
                    process.terminate()
                say(f"{member.folder.name}: started, prints to {member.log}")
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                member = running.pop(process)
                say(f"{member.folder.name}: {outcome(member, process.returncode)}")
                failed += [member] if process.returncode and not stops else []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return failed, bool(stops)


def outcome(member: Member, code: int) -> str:
    """What became of a run that has ended, in a few words."""
    if code:
        last = member.log.read_text("utf-8", errors="replace").strip().rpartition("\n")[2]
        return f"failed with exit code {code}: {last}"
    scores = [score for _, score in member.scores()]
    told = f", held-out {scores[0]:.3f} -> {scores[-1]:.3f}" if scores else ""
    return f"{member.num_steps()} of {member.settings['train_steps']} steps{told}"


# 3. What came of them


def table(members: Sequence[Member]) -> list[list[str]]:
    """Rows of text with a header: values, steps, scores and seconds of each run, and the scores over its seeds."""
    finals: dict[str, list[float]] = {}
    for member in members:
        finals.setdefault(member.group, []).extend(score for _, score in member.scores()[-1:])
    seeds = ["mean of seeds", "lowest", "highest"] if "seed" in members[0].values else []
    rows = [[*members[0].values, "steps", "final", "best", "at step", "seconds", *seeds]]
    for member in members:
        seconds = sum(line.get("time/step_s", 0.0) for line in member.lines())
        row = [*member.values.values(), str(member.num_steps())]
        if scores := member.scores():
            at, best = max(scores, key=lambda pair: pair[1])
            row += [f"{scores[-1][1]:.4f}", f"{best:.4f}", f"{at:.0f}", f"{seconds:.0f}"]
            group = finals[member.group]
            row += [f"{number:.4f}" for number in (mean(group), min(group), max(group))] if seeds else []
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows


def picture(members: Sequence[Member]) -> str:
    """An SVG of held-out scores over steps: a line for each run, of one color where the seed alone differs."""
    curves = [(member.group, member.scores()) for member in members if member.scores()]
    groups = list(dict.fromkeys(group for group, _ in curves))
    steps = [step for _, scores in curves for step, _ in scores] + [1]
    values = [score for _, scores in curves for _, score in scores] or [0.0]
    low, span = min(values), (max(values) - min(values)) or 1.0

    def point(step: float, score: float) -> str:
        return f"{60 + 560 * step / max(steps):.1f},{260 - 230 * (score - low) / span:.1f}"

    parts = ['<text x="60" y="18">held-out score</text>']
    parts.append(f'<text x="620" y="278" text-anchor="end">{max(steps):.0f} training steps</text>')
    for score in (low, low + span / 2, low + span):
        y = point(0, score).partition(",")[2]
        parts.append(f'<path d="M60 {y}H620" stroke="#ddd"/>')
        parts.append(f'<text x="52" y="{y}" dy="4" text-anchor="end">{score:.3f}</text>')
    for group, scores in curves:
        color = COLORS[groups.index(group) % len(COLORS)]
        line = " ".join(point(*pair) for pair in scores)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    for place, group in enumerate(groups):
        color, below = COLORS[place % len(COLORS)], 312 + 18 * place
        parts.append(f'<text x="60" y="{below}" fill="{color}" font-weight="bold">{escape(group)}</text>')
    height = 320 + 18 * len(groups)
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" viewBox="0 0 640 {height}" {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    main()
