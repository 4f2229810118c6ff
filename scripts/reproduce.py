"""Run a recipe from its prompts to a record of the result: `python scripts/reproduce.py flowgrpo/tiny-signs`.

It downloads the prompts and starts the scorer named in the recipe, trains, evaluates, and writes record.json to the
run's folder. Further flags are the trainer's, such as --nproc-per-node 8, or --scorer.url URL for a running scorer. The
same command continues a run that stopped. docs/reproduce.md has records, and explains how to submit one.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from omni_rl.report.data import metric_points
from omni_rl.report.folder import command_line
from omni_rl.run.metrics import drop_stale_evaluations
from omni_rl.settings.args import secret_flags
from omni_rl.settings.printing import Parser
from omni_rl.settings.toml import load_recipes
from omni_rl.tools.command import check_known, trainers
from omni_rl.tools.prompts import fetch_set, prompt_sets
from omni_train.files import file_digest, load_metrics, read_jsonl, write_atomically

PROMPTS = re.compile(r"^# Prompts: omni-rl prompts (\w+)$", re.MULTILINE)
SCORER = re.compile(r"^# Scorer: omni-rl serve --scorer (.+) --port \d+$", re.MULTILINE)
COMMAND = ("-m", "omni_rl.tools.command", "train")
FACTS = ("command", "started", "commit", "python", "platform", "ranks", "device", "packages")  # of a start of the run


def recipe_of(name: str) -> tuple[str, str, str]:
    """Return the trainer, the preset and the text of a recipe TRAINER/PRESET.

    Raises:
        ValueError: there is no recipe of that name; the closest one is suggested.
    """
    trainer, _, preset = name.partition("/")
    texts = load_recipes(f"train_{check_known(trainer, trainers(), 'the trainer of TRAINER/PRESET')}")
    return trainer, preset, texts[check_known(preset, texts, "the preset of TRAINER/PRESET")]


def train(words: Sequence[str], typed: str) -> int:
    """Run `omni-rl train` with these arguments to its end; return its exit code. Ctrl-C and SIGTERM go to the trainer.

    typed: the command that continues the run.
    """
    command = [sys.executable, *COMMAND, *words]
    with subprocess.Popen(command, env=os.environ | {"OMNI_RL_COMMAND": typed}) as program, passed_on(program):
        while program.returncode is None:
            try:
                program.wait()
            except KeyboardInterrupt:  # the trainer has received it too
                continue
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


@contextmanager
def passed_on(program: "subprocess.Popen[Any]") -> Iterator[None]:
    """Forward SIGTERM to a program while the block waits for its end."""

    def send(number: int, frame: FrameType | None) -> None:
        program.send_signal(number)

    before = signal.signal(signal.SIGTERM, send)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def record_of(folder: Path, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the record of a finished run: its curves, hours, peak memory, versions, and hashes of its weights.

    Curves are from evaluations with the last settings. Facts are from the last start; earlier starts have their own.

    words: the trainer's arguments besides the recipe, without the values of secrets.

    Raises:
        ValueError: the run has not completed all of its steps.
    """
    steps = drop_stale_evaluations(load_metrics(folder / "metrics.jsonl"))
    wanted = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    if steps[-1]["step"] != wanted["train_steps"]:
        rule = f"{folder} must have taken {wanted['train_steps']} steps, has {steps[-1]['step']:.0f}"
        raise ValueError(f"{rule}: the same command continues it")
    *earlier, start = map(facts_of, read_jsonl(folder / "versions.jsonl"))
    weights = folder / "weights"
    points = {name: metric_points(steps, name) for name in sorted({name for line in steps for name in line})}
    return {
        "recipe": recipe,
        "words": list(words),
        "curves": {name: own for name, own in points.items() if own and name.startswith("eval/")},
        "hours": sum(seconds for _, seconds in points["time/step_s"]) / 3600,
        "memory_mb": {
            name: max(value for _, value in own)
            for name, own in points.items()
            if re.fullmatch("perf/.*memory.*mb", name)
        },
        "weights": {
            str(path.relative_to(weights)): file_digest(path) for path in sorted(weights.rglob("*.safetensors"))
        },
        **{name: value for name, value in start.items() if name != "command"},
        **({"earlier_starts": earlier} if earlier else {}),
    }


def facts_of(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a start of the run for a record, from a line of its versions.jsonl."""
    return {"device_name": start.get("device_name", ""), **{name: start[name] for name in FACTS}}


def main(argv: list[str] | None = None) -> None:
    """Run the command line. A failure before or after training prints one line and exits with code 2."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="TRAINER/PRESET", help="such as flowgrpo/tiny-signs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run in runs/reproduce/TRAINER-PRESET-SEED")
    args, words = parser.parse_known_args(argv)
    try:
        trainer, preset, text = recipe_of(args.recipe)
        for prompts in PROMPTS.findall(text):
            fetch_set(prompt_sets()[prompts], Path("data", prompts))
        flags = {word.partition("=")[0] for word in words}
        is_given = flags & {"--scorer", "--scorer.url"}
        named = [] if is_given else SCORER.findall(text)
        scorer = [word for own in named for word in ("--scorer", own.replace('"', ""))]
        name = f"reproduce/{trainer}-{preset}-{args.seed}"
        own = [*scorer, "--preset", preset, "--seed", str(args.seed), "--name", name]
        typed = shlex.join(["python", "scripts/reproduce.py", args.recipe, "--seed", str(args.seed), *words])
        if code := train([trainer, *words, *own], typed):
            sys.exit(code)
        hidden = command_line(words, hide=secret_flags(import_module(f"omni_rl.apps.train_{trainer}").Args))
        record = record_of(Path("runs", name), args.recipe, shlex.split(hidden))
        write_atomically(file := Path("runs", name, "record.json"), json.dumps(record, indent=1) + "\n")
        print(f"record in {file}")
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
