"""The `omni-rl` command, which replaces its process with the program of a sub-command.

`omni-rl train nft --preset tiny-signs` runs `python apps/train_nft.py --preset tiny-signs`, with the same exit codes,
Ctrl-C and terminal. With several ranks the settings are checked once, before they start. Imports nothing heavy.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

from omni_rl import __version__

APPS = Path(__file__).parents[1] / "apps"  # links to the files of a clone; in a wheel, the files
RANKS = "--nproc-per-node"
HELP = ("-h", "--help", "help")
COMMANDS = {  # sub-command -> description, and the arguments of Python that start it
    "train": ("Train a model: omni-rl train flowgrpo --preset tiny-signs", []),
    "sample": ("Sample from a model, with or without trained weights", [str((APPS / "sample.py").resolve())]),
    "report": ("Write the report of a run, or a comparison of several", ["-m", "omni_rl.report"]),
    "push": ("Push a run's weights, model card and settings to the hub", ["-m", "omni_rl.tools.hub"]),
    "serve": ("Start a reward server: omni-rl serve --scorer ocr --port 8100", ["-m", "omni_reward.server"]),
    "score": ("Score files: omni-rl score --scorer ocr FILE.png --prompt TEXT", ["-m", "omni_rl.tools.score"]),
    "prompts": ("Fetch prompts that recipes name: omni-rl prompts ocr", ["-m", "omni_rl.tools.prompts"]),
    "lora": ("Convert LoRA files from and to the forms of other trainers", ["-m", "omni_rl.tools.lora"]),
    "doctor": ("Report what is installed, and how to install what is missing", ["-m", "omni_rl.tools.doctor"]),
}


def main() -> None:
    """Start the program that the command line names. Errors end it with one line and exit code 2."""
    argv = sys.argv[1:] or ["--help"]
    try:
        if argv[0] in HELP:
            print(overview())
        elif argv[0] == "--version":
            print(f"omni-rl {__version__}")
        elif argv[0] == "train" and (not argv[1:] or (len(argv) == 2 and argv[1] in HELP)):
            print(trainers_overview())
        else:
            command = python_args(argv)
            sys.stdout.flush()
            if argv[0] == "train":
                if "omni_rl.run.ranks" in command:
                    _, _, _, ranks, *program = command
                    if check_once(ranks, *program):  # True for a dry run, which is one process
                        os.environ["WORLD_SIZE"], command = ranks, program
                command_line = os.environ.get("OMNI_RL_COMMAND") or shlex.join(["omni-rl", *argv])
                os.environ["OMNI_RL_COMMAND"] = command_line  # the command that resumes the run
            os.execv(sys.executable, [sys.executable, *command])
    except ValueError as exc:
        from omni_rl.settings.printing import print_error

        print_error(exc, "omni-rl")
        sys.exit(2)
    except KeyboardInterrupt:  # while the settings are checked; later the program handles it
        sys.exit(130)


def check_once(ranks: str, *program: str) -> bool:
    """Check a trainer's settings before its ranks start, and return True for a dry run.

    If the settings are invalid, or the trainer only prints, this program ends.
    """
    env = os.environ | {"WORLD_SIZE": ranks, "RANK": "0"}
    prints_only = not {"-h", "--help", "--check", "--list-presets"}.isdisjoint(program)
    command = [sys.executable, *program, *([] if prints_only else ["--check"])]
    result = subprocess.run(
        command, env=env, stdout=None if prints_only else subprocess.PIPE, encoding="utf-8", check=False
    )
    if prints_only or result.returncode:
        sys.exit(result.returncode)
    if tomllib.loads(result.stdout)["dry_run"]:
        return True
    print(f"omni-rl: the settings are checked; starting {ranks} ranks", flush=True)
    return False


def overview() -> str:
    """Return the help of `omni-rl`."""
    lines = [f"  {name:<12}{text}" for name, (text, _) in COMMANDS.items()]
    ending = "`omni-rl COMMAND --help` lists its flags; `omni-rl --version` prints the version."
    return "\n".join(["usage: omni-rl COMMAND [FLAG ...]", "", *lines, "", ending])


def trainers() -> dict[str, Path]:
    """Return the files of the trainers by name, such as flowgrpo."""
    return {path.stem.removeprefix("train_"): path.resolve() for path in sorted(APPS.glob("train_*.py"))}


def trainers_overview() -> str:
    """Return the help of `omni-rl train`."""
    lines = []
    for name, path in trainers().items():
        description = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        lines.append(f"  {name:<12}{description.partition(chr(10))[0]}")
    usage = f"usage: omni-rl train TRAINER [{RANKS} N] [--preset NAME] [--config FILE] [--SETTING VALUE ...]"
    ranks = f"{RANKS} starts N ranks on this machine with torchrun; without it there is one, without torchrun."
    ending = "`omni-rl train TRAINER --help` lists settings and presets."
    return "\n".join([usage, "", *lines, "", ranks, ending])


def python_args(argv: Sequence[str]) -> list[str]:
    """Return the arguments of Python for a command line of `omni-rl`.

    Raises:
        ValueError: the sub-command or trainer does not exist, or the number of ranks is invalid.
    """
    name, rest = argv[0], argv[1:]
    if name != "train":
        _, command = COMMANDS[check_known(name, COMMANDS, "the command")]
        return [*command, *rest]
    path = trainers()[check_known(rest[0], trainers(), "the trainer")]
    ranks, rest = split_ranks(rest[1:])
    return [*launcher(ranks), str(path), *rest]


def split_ranks(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the number of --nproc-per-node, or "" without that flag, and the other words.

    Raises:
        ValueError: it is not a whole number >= 1.
    """
    argv = [re.sub("^--nproc_per_node(?=$|=)", RANKS, word) for word in argv]  # torchrun accepts this spelling too
    rest = [piece for word in argv for piece in (word.split("=", 1) if word.startswith(f"{RANKS}=") else [word])]
    if RANKS not in rest:
        return "", rest
    index = rest.index(RANKS)
    number = "".join(rest[index + 1 : index + 2])
    if not number.isdecimal() or not int(number):
        raise ValueError(f"{RANKS} must be a whole number >= 1, got {number!r}")
    return number, rest[:index] + rest[index + 2 :]


def launcher(ranks: str) -> list[str]:
    """Return the arguments of Python that start torchrun with this number of ranks, or none for ""."""
    return ["-m", "omni_rl.run.ranks", RANKS, ranks] if ranks else []


def check_known(name: str, names: Collection[str], what: str) -> str:
    """Return the name.

    Raises:
        ValueError: it is not one of the names; the message suggests the nearest.
    """
    if name not in names:
        from omni_rl.settings.toml import suggest

        raise ValueError(f"{what} must be one of {', '.join(names)}, got {name!r}{suggest(name, names)}")
    return name


if __name__ == "__main__":
    main()
