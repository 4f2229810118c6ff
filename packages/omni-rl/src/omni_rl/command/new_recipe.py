"""Write a recipe of your own, a TOML file that starts from a preset: `omni-rl train TRAINER --config NAME.toml`.

omni-rl new-recipe mine --from tiny-signs --trainer flowgrpo --set lr=1e-4 seed=1
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from omni_rl.cli import flag_of, recipes, require
from omni_rl.command.__main__ import known, trainers
from omni_rl.command.sweep import as_flag, ask, mistake_of


def main(argv: list[str] | None = None) -> None:
    """Run the command line. A mistake ends it with one line and exit code 2, and nothing is written."""
    parser = argparse.ArgumentParser(
        prog="omni-rl new-recipe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help="name of the run; NAME.toml is written")
    parser.add_argument("--from", dest="preset", required=True, metavar="PRESET", help="preset to start from")
    parser.add_argument("--trainer", required=True, help="flowgrpo, nft, ...: whose preset it is")
    values = "settings that differ, as lr=1e-4 seed=1"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=values)
    args = parser.parse_args(argv)
    path = Path(f"{args.name.removesuffix('.toml')}.toml")
    try:
        text, note = write_recipe(path.stem, args.preset, args.trainer, args.set)
        require((not path.exists(), f"NAME must be new, and {path} is there"))
        path.write_text(text, "utf-8")
    except (OSError, ValueError) as exc:
        parser.exit(2, f"{parser.prog}: error: {exc}\n")
    print(f"{path} is written; omni-rl train {args.trainer} --config {path} starts it")
    if note:
        print(f"before that it needs: {note}")


def write_recipe(name: str, preset: str, trainer: str, changes: Sequence[str]) -> tuple[str, str]:
    """The text of a recipe that starts from a preset, and what its trainer still misses, such as a file of prompts.

    changes: settings that differ, as lr=1e-4.

    Raises:
        ValueError: there is no such trainer, preset or setting, or a value does not fit it.
    """
    program = trainers()[known(trainer, trainers(), "--trainer")]
    presets = recipes(program.stem)
    before, bracket, tables = presets[known(preset, presets, "--from")].partition("\n[[")
    source = before.splitlines()
    changed = {"name": name}
    for word in changes:
        key, is_pair, value = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        is_new = key and is_pair and key not in changed
        require((is_new, f"--set must be NAME=VALUE, each name once and not name, got {word!r}"))
        changed[key] = value
    answer = ask(program, ["--preset", preset, *map(as_flag, changed, changed.values()), "--dry-run"])
    mistake = mistake_of(answer)
    if not answer.stdout or {*map(flag_of, changed)} & {*mistake.replace(":", " ").split()}:
        raise ValueError(f"--set: {mistake}")
    lines = {line.partition(" = ")[0]: line for line in answer.stdout.partition("\n[[")[0].splitlines()}
    title, *notes = (line for line in source if line.startswith("#"))
    notes = [line for line in notes if not line.startswith("# Run here:")]
    told = ", ".join(list(changed)[1:]) or "nothing"
    notes += [f"# From the preset {preset} of {program.stem}; changed here: {told}.", "# Run here: no.", ""]
    body = {line.partition(" = ")[0]: line for line in source if line and not line.startswith("#")}
    body |= {key: lines.get(key, "") for key in changed}  # none of a setting that is None, its default
    return "\n".join([f"# {name}: {title[2:]}", *notes, *filter(None, body.values()), ""]) + bracket + tables, mistake


if __name__ == "__main__":
    main()
