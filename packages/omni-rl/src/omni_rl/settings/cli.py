"""Settings from a recipe, a TOML file and the command line, which tyro parses. Imports nothing heavy.

Precedence: command line, then --config FILE.toml, then --preset NAME, then the defaults of the dataclass. A preset is a
TOML file too: recipes/APP/NAME.toml in this package.
"""

import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from itertools import pairwise
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from omni_rl.settings.args import MediaArgs, RunArgs
from omni_rl.settings.early import check_model, check_reward, check_sides, check_unchanged, knock
from omni_rl.settings.fields import build, flag_of, kind_of, leaves, old_names, old_switches, require, values_of
from omni_rl.settings.notes import Note, notes_of_help
from omni_rl.settings.order import in_order, most_used, title_of
from omni_rl.settings.printing import until_closed
from omni_rl.settings.toml import fitting, from_files, from_text, recipes, suggest, to_toml

ConfigT = TypeVar("ConfigT")

OWN = {  # flags of every program, which are no settings
    "preset": (str, "", "Recipe that gives the defaults of the settings"),
    "config": (str, "", "TOML file of settings, which goes before the preset"),
    "check": (bool, False, "Check the settings and print them, all without torch, and exit"),
    "help_all": (bool, False, "Show all settings and exit, not only those that recipes set most"),
    "list_presets": (str, "", "List the recipes, or those with this word in name or title, and exit"),
}


class MistakeError(Exception):
    """A mistake in a word of the command line. It is no ValueError, since tyro would print that in its own words."""


def parse_cli(
    cls: type[ConfigT],
    check: Callable[[ConfigT], None],
    argv: Sequence[str],
    *,
    app: str,
    description: str | None = None,
) -> ConfigT:
    """Return the settings of the command line. A mistake in them ends the program with one line and exit code 2.

    With --check, print the settings as TOML, check them, and end with exit code 0.

    cls: a frozen dataclass with groups, whose fields all have defaults; see `field_notes` for its help. check: raises
    ValueError where settings do not fit together. app: name of the program, under which its recipes stand.
    description: what --help prints before the settings.
    """
    presets = recipes(app)
    try:
        config = read_settings(cls, argv, presets, description or "")
        if "--check" in argv:
            print(to_toml(config), end="", flush=True)
        if not getattr(config, "verbose", False):
            hush()
        check(config)
        if isinstance(config, RunArgs) and config.model:
            check_model(config.model, reads_texts=not config.dry_run)
            if isinstance(config, MediaArgs):
                check_sides(config.model, config.height, config.width)
            check_reward(values_of(config).get("scorer.name", ""))
            check_reward(config.eval.gold_scorer, "eval.gold_scorer")
            check_unchanged(config)
        if "--check" not in argv and not getattr(config, "dry_run", False):
            knock(values_of(config))
    except ValueError as exc:
        fault, text = str(exc), "".join(presets.get(word, "") for word in argv)  # of the preset: what it goes with
        prompts = re.search(r"^# Prompts: ((?:write (?:data/)?|omni-rl prompts )(\w+).*)", text, re.MULTILINE)
        if prompts and re.search(rf"got (data/)?{prompts[2]}/", fault):
            fault += f"; {prompts[1].replace('omni-rl', 'fetch them: omni-rl')}"
        if text and re.search(r"(got|at) (data|checkpoints)/tiny-", fault):
            fault += "; the clone of omni-rl has what this recipe names: start in its folder"
        scorer = re.search(r"^# Scorer: (.*)", text, re.MULTILINE)
        if scorer and " a reward server" in fault:
            fault += f"; start one: {scorer[1]}"
        refuse(fault)
    if "--check" in argv:
        sys.exit(0)
    if os.environ.get("RANK", "0") == "0":
        model = values_of(config).get("model", "")
        print(f"{Path(sys.argv[0]).name}: the settings are checked; loading torch, then {model}", flush=True)
    return config


def read_settings(cls: type[ConfigT], argv: Sequence[str], presets: Mapping[str, str], description: str) -> ConfigT:
    """Return the settings before they are checked against each other; with --help, print the help and exit.

    presets: TOML by name. description: see `parse_cli`.

    Raises:
        ValueError: an unknown flag, preset or key (the nearest known one is suggested), or a value that does not fit.
    """
    given = dict(pairwise(part for word in argv for part in word.split("=", word.startswith("--"))))
    values = from_files(cls, given.get("--preset", ""), given.get("--config", ""), presets)
    names = [*(OWN if presets else ("config", "check")), *leaves(cls)]
    if "--list-presets" in argv:
        print_presets(presets, given.get("--list-presets", "").removeprefix("--"))
        sys.exit(0)
    if not {"-h", "--help", "--help-all"}.isdisjoint(argv):
        some = most_used(cls, presets) if presets and "--help-all" not in argv else {*leaves(cls)}
        shown = [*names[: -len(leaves(cls))], *(name for name in in_order(cls, presets) if name in some)]
        print_help(view_of(cls, values, notes_of_help(cls), shown), presets, description)
        sys.exit(0)
    old = {flag_of(key): flag_of(name) for key, name in old_names(cls).items()}
    old |= {f"--no-{flag_of(key)[2:]}": off_flag(name) for key, name in old_names(cls).items()}
    for key, (off, on) in old_switches(cls).items():
        old |= {f"--no-{flag_of(key)[2:]}": f"{old[flag_of(key)]}={off}", flag_of(key): f"{old[flag_of(key)]}={on}"}
    words = [re.sub("^--[^=]+", lambda name: old.get(flag_of(name[0][2:]), name[0]), word) for word in argv]
    view: Any
    try:
        view, unknown = tyro.cli(view_of(cls, values, {}, names), args=words, return_unknown_args=True)
    except MistakeError as exc:
        raise ValueError(exc) from exc
    switches = {flag_of(key): off_flag(key) for key, own in leaves(cls).items() if kind_of(own.type) is bool}
    either = {flag: f"{on} or {off}" for on, off in switches.items() for flag in (on, off)}
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            pieces = pairwise(part for each in words for part in each.split("=", each.startswith("--")))
            flag = next((flag for flag, value in pieces if value == word and flag in either), "")
            require((not flag, f"{flag} takes no value, got {word!r}: give {either.get(flag)}"))
            raise ValueError(f"unexpected {word!r}: a flag begins with --")
        hint = suggest(name, sorted([*map(flag_of, names), *switches.values()]))
        elsewhere = "; --help-all lists all, docs/coming-from.md those of other projects"
        raise ValueError(f"unknown flag {name}{hint or elsewhere}")
    for name, value in values_of(view).items():  # settings are below a title, what is every program's is not
        _, below, field_name = name.partition(".")
        values |= {field_name.replace("__", "."): value} if below else {}
    return build(cls, values)


def view_of(cls: type, values: Mapping[str, Any], notes: Mapping[str, Note], shown: Sequence[str]) -> type:
    """Return the dataclass that tyro fills: the settings below their titles.

    values: take the place of the defaults. notes: as `field_notes`; without any, there is one title. shown: names of
    the settings in it, in their order.
    """
    titled: dict[str, list[Any]] = {}
    for name in [name for name in shown if name not in OWN]:
        own, note = leaves(cls)[name], notes.get(name, Note("Settings", ""))
        if get_origin(kind := kind_of(own.type)) is not tuple:  # tables of a TOML file
            title = title_of(cls, name, notes) if notes else note.group
            titled.setdefault(title, []).append(row_of(name, kind, values.get(name, own.default), note.text))
    flattened: Any = tyro.conf.OmitArgPrefixes
    rows = [row_of(name, *row) for name, row in OWN.items() if name in shown]
    for title, part in [(title, make_dataclass(title, part)) for title, part in titled.items() if part]:
        rows.append((title, flattened[part], field(default_factory=part)))
    return make_dataclass("Settings", rows)


def row_of(name: str, kind: Any, default: Any, text: str) -> tuple[str, Any, Any]:
    """Return a field for tyro that converts the word of a flag with our own messages."""
    identifier = name.replace(".", "__")
    if kind is bool:
        switch = tyro.conf.FlagCreatePairsOff[bool] if name in OWN else bool
        return identifier, Annotated[switch, tyro.conf.arg(name=name, help=text)], default

    def read(words: list[str]) -> object:
        """Convert the one word of a flag."""
        try:
            require(
                (words, f"{flag_of(name)} needs a value"),
                (len(words) == 1, f"{flag_of(name)} takes one value, got {' '.join(words)!r}"),
            )
            return fitting(kind, from_text(kind, words[0]), flag_of(name))
        except ValueError as exc:
            raise MistakeError(exc) from exc

    choices = ",".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    form = f"{{{choices}}}" if choices else {int: "INT", float: "FLOAT"}.get((*get_args(kind), kind)[0], "TEXT")
    spec = PrimitiveConstructorSpec("*", form, read, is_instance=lambda _: True, str_from_instance=lambda v: [str(v)])
    hint = "" if default in ("", None) else f"(default: {default})"
    return identifier, Annotated[kind, spec, tyro.conf.arg(name=name, help=text, help_behavior_hint=hint)], default


def off_flag(name: str) -> str:
    """Return the flag that turns a setting off, such as --eval.no-first."""
    group, dot, own = name.rpartition(".")
    return flag_of(f"{group}{dot}no_{own}")


def print_help(view: type, presets: Mapping[str, str], description: str) -> None:
    """Print the description and the settings."""
    with until_closed():
        with suppress(SystemExit):
            tyro.cli(view, args=["--help"], description=inspect.cleandoc(description))
        if presets:
            print(f"{len(presets)} recipes for --preset: --list-presets lists them, --list-presets WORD some.")


def print_presets(presets: Mapping[str, str], word: str) -> None:
    """Print the names and titles of recipes, of those with the word in either."""
    titles = {name: text.partition("\n")[0].lstrip("# ") for name, text in presets.items()}
    found = {name: title for name, title in titles.items() if word.lower() in f"{name} {title}".lower()}
    with until_closed():
        for name, title in found.items():
            print(f"{name:<{max(map(len, found))}}  {title}")


def hush() -> None:
    """Hide other libraries' progress bars and warnings before their import, and the traceback of a Ctrl-C during it."""
    sys.excepthook = lambda kind, *exc: (
        kind is KeyboardInterrupt or sys.stderr.write("".join(format_exception(kind, *exc)))
    )
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    for name in ("torchao", "torch.utils._pytree"):  # peft imports the first, which asks the second for what is old
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.formatwarning = lambda message, *place: f"WARNING: {message}\n"
    warnings.filterwarnings("ignore", module=r"(torch|diffusers|transformers|peft|accelerate|huggingface_hub)\b")


def printable(text: str) -> str:
    """Return a foreign text for a terminal, without credentials in URLs and control characters."""
    bare = re.sub(r"(?<=://)[^\s/\"]*@", "", text)
    return "".join(letter if letter.isprintable() else " " for letter in bare)


def refuse(mistake: object) -> NoReturn:
    """End the program with exit code 2 and one line, which only the first rank of a machine prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {mistake}", file=sys.stderr, flush=True)
    sys.exit(2)
