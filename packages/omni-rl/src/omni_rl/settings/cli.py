"""Settings from a recipe, a TOML file and the command line, parsed by tyro. Imports nothing heavy.

Precedence: command line, then --config FILE.toml, then --preset NAME, then the defaults of the dataclass. A preset is
also a TOML file: recipes/APP/NAME.toml in this package.
"""

import gc
import inspect
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_args

import tyro
from omni_train.terminal import one_line, printable
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from omni_rl.settings.args import num_ranks
from omni_rl.settings.fields import (
    accepts_none,
    build_unresolved,
    change,
    field_comments,
    flag_of,
    leaves,
    require,
    strip_metadata,
    values_of,
)
from omni_rl.settings.printing import ignore_closed_pipe, print_error
from omni_rl.settings.toml import KINDS, from_files, load_recipes, suggest, to_toml

ConfigT = TypeVar("ConfigT")
RULES = ConstructorRegistry()


@dataclass(frozen=True)
class Program:
    """Flags of every program that are not settings."""

    preset: str = ""  # Recipe that gives the defaults of the settings
    config: str = ""  # TOML file of settings, which overrides the preset
    check: tyro.conf.FlagCreatePairsOff[bool] = False  # Check and print the settings, not the model, and exit
    list_presets: tyro.conf.FlagCreatePairsOff[bool] = False  # List the recipes, and exit


@dataclass(frozen=True)
class Command(Generic[ConfigT]):
    """A command line."""

    program: Annotated[Program, tyro.conf.arg(name="")]
    settings: Annotated[ConfigT, tyro.conf.arg(name="")]


@RULES.struct_rule
def dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Read the fields of a dataclass, with their comments as help, ten times as fast as tyro."""
    if not is_dataclass(info.type) or info.type is Command:
        return None
    comments, attributes = field_comments(info.type), list[Any](fields(info.type))
    settings = [
        StructFieldSpec(
            own.name,
            own.type,
            getattr(info.default, own.name, own.default),
            comments.get(own.name) or inspect.getdoc(strip_metadata(own.type)) or "",
        )
        for own in attributes
    ]
    return StructConstructorSpec(info.type, tuple(settings))


@RULES.primitive_rule
def number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float | None] | None:
    """Read a number, or None from the word none if the type allows it."""
    parse, *others = get_args(info.type) or (info.type,)
    if parse not in (int, float) or {*others} - {type(None)}:
        return None

    def convert(words: list[str]) -> float | None:
        try:
            return None if others and words[0] in ("none", "None") else parse(words[0])
        except ValueError:
            raise ValueError(f"must be {KINDS[parse]}, got {words[0]!r}") from None

    metavar = f"{parse.__name__.upper()}{'|none' * len(others)}"
    return PrimitiveConstructorSpec(1, metavar, convert, lambda value: True, lambda value: [str(value).lower()])


def parse_cli(
    cls: type[ConfigT],
    check: Callable[[ConfigT], None],
    argv: Sequence[str],
    *,
    app: str,
    description: str | None = None,
) -> ConfigT:
    """Parse the command line into settings. An error in them ends the program with one line and exit code 2.

    With --check, print the settings as TOML, check them, and end with exit code 0. The model and servers are checked
    when the run opens them, before it loads any weights.

    cls: a frozen dataclass of groups, whose fields all have defaults and a comment as help. check: raises ValueError
    if settings do not fit together. app: name of the program and of its folder of recipes. description: the text that
    --help prints before the settings.
    """
    presets = load_recipes(app)
    try:
        config = read_settings(cls, argv, presets, description or "")
        values = values_of(config)
        if values.get("dry_run") and os.environ.get("RANK", "0") != "0":
            sys.exit(0)  # the first rank plans without the others
        if "--check" in argv:
            print(to_toml(config), end="", flush=True)
        if not values.get("verbose"):
            silence_libraries()
        check(config)
    except ValueError as exc:
        exit_with_error(add_remedy(str(exc), argv, presets))
    except OSError as exc:  # such as a name that is too long
        exit_with_error(f"{find_flag(str(exc.filename), argv)} must be a path that can be opened: {exc.strerror}")
    if "--check" in argv:
        sys.exit(0)
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: the settings are checked; loading torch, then {values['model']}", flush=True)
    if "torch" not in sys.modules:
        gc.disable()  # the imports that follow create no garbage, and collection would take a sixth of their time
    return config


def add_remedy(message: str, argv: Sequence[str], presets: Mapping[str, str]) -> str:
    """Return an error with the command, in the head of the recipe, that makes what is missing."""
    text = "".join(presets.get(word.removeprefix("--preset="), "") for word in argv)  # the recipe
    heads: dict[str, str] = dict(re.findall(r"^# (Prompts|Scorer): (.*)", text, re.MULTILINE))
    place = re.search(r"(?:got|at) '?(?:python:)?((?:checkpoints|data|prompts|scripts)/[\w./-]*\w)", message)
    if place and re.search(rf'{re.escape(place[1])}[":]', text) and not Path(place[1]).exists():
        is_made = "Prompts" in heads and not place[1].startswith("checkpoints/")
        message += (
            f"; to get it: {heads['Prompts']}" if is_made else "; the clone of omni-rl has it: start in its folder"
        )
    if "Scorer" in heads and " a reward server" in message:
        message += f"; start one: {heads['Scorer']}"
    if "ranks" in message and num_ranks() > 1 and "RANK" not in os.environ:
        remedy = f"unset it, or start them with omni-rl train NAME --nproc-per-node {num_ranks()}"
        message += f"; their number is WORLD_SIZE in the environment: {remedy}"
    return message


def end_imports() -> None:
    """Enable garbage collection again after the imports that follow `parse_cli`, excluding their objects."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def find_flag(path: str, argv: Sequence[str]) -> str:
    """Return the flag whose value is the path or its nearest parent, or the start of the path if no flag has it."""
    pieces = [part for word in argv for part in word.split("=", word.startswith("--"))]
    parents = [(value, flag) for flag, value in pairwise(pieces) if value and path.startswith(value)]
    return max(parents, key=lambda parent: len(parent[0]), default=("", f"{path:.80}"))[1]


def read_settings(cls: type[ConfigT], argv: Sequence[str], presets: Mapping[str, str], description: str) -> ConfigT:
    """Return the settings before checking them against each other. With --help, print the help and exit.

    presets: TOML by name. description: see `parse_cli`.

    Raises:
        ValueError: an unknown flag, preset or key (the message suggests the nearest), or a value that does not fit.
    """
    invalid_word = next((word for word in argv if re.search("[\ud800-\udfff]", word)), "")
    require((not invalid_word, f"the command line must be UTF-8 text, got {invalid_word!r}"))
    flag_values = dict(pairwise(part for word in argv for part in word.split("=", word.startswith("--"))))
    values = from_files(cls, flag_values.get("--preset", ""), flag_values.get("--config", ""), presets)
    command_type: Any = Command
    parse: Callable[..., Any] = partial(
        tyro.cli,
        command_type[cls],
        prog=Path(sys.argv[0]).name,
        description=inspect.cleandoc(description),
        default=Command(Program(), build_unresolved(cls, values)),
        registry=RULES,
    )
    if not {"-h", "--help"}.isdisjoint(argv):
        with ignore_closed_pipe():
            with suppress(SystemExit):
                parse(args=["--help"])
            if presets:
                print(f"{len(presets)} recipes for --preset, which --list-presets lists.")
        sys.exit(0)
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            command, unknown = parse(args=argv, return_unknown_args=True)
    except SystemExit as end:
        if not end.code:  # after printing a shell completion
            raise
        raise ValueError(parse_tyro_error(errors.getvalue())) from None
    for word in unknown:
        reject_word(cls, word, argv)
    if command.program.list_presets:
        print_presets(presets)
        sys.exit(0)
    config: ConfigT = command.settings
    cleared = {name for name, value in values_of(config).items() if value == "none" and accepts_none(leaves(cls)[name])}
    return change(config, **dict.fromkeys(cleared, "")) if cleared else config


def parse_tyro_error(box: str) -> str:
    """Return the error in a box printed by tyro as one line, without the title and the help below a horizontal rule."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip("\u2502 ") for line in box.splitlines()]
    parts = [" ".join(part) for is_rule, part in groupby(lines, lambda line: not line.strip("\u2500-")) if not is_rule]
    text = parts[0].partition("\u256e ")[2] or " ".join(parts[1:2])  # the title ends with a corner or a rule
    if match := re.fullmatch(r"Error parsing (\S+): (must .*)", text):
        return f"{match[1]} {match[2]}"
    if match := re.match(r"Missing value for argument '(\S+)'", text):
        return f"{match[1]} needs a value"
    if match := re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)' ?\. Expected one of \((.*?),?\) ?\.", text):
        word, flag, choices = match.groups()
        hint = suggest(word, re.findall("'(.*?)'", choices))
        return f"{flag} must be one of {choices}, got {word!r}{hint}"
    return text


def reject_word(cls: type, word: str, argv: Sequence[str]) -> NoReturn:
    """Raise ValueError for a word that is not a flag, or that follows a flag without a value."""
    switches = {
        flag_of(name): negated_flag(name)
        for name, setting in leaves(cls).items()
        if strip_metadata(setting.type) is bool
    }
    name = word.partition("=")[0]
    if not name.startswith("-"):
        pieces = pairwise(part for arg in argv for part in arg.split("=", arg.startswith("--")))
        preceding = {flag for flag, value in pieces if value == word}
        for on, off in switches.items():
            for switch in preceding & {on, off}:
                raise ValueError(f"{switch} takes no value, got {word!r}: give {on} or {off}")
        raise ValueError(f"unexpected {word!r}: a flag begins with --")
    flags = sorted([*map(flag_of, [*leaves(Program), *leaves(cls)]), *switches.values()])
    moved_flag = re.sub(r"^--no-(.+\.)", r"--\1no-", name)
    hint = f"; did you mean {moved_flag!r}?" if moved_flag in flags else suggest(name, flags)
    raise ValueError(f"unknown flag {name}{hint or '; --help lists all, docs/coming-from.md those of other projects'}")


def negated_flag(name: str) -> str:
    """Return the flag that turns a setting off, such as --eval.no-first."""
    group, dot, key = name.rpartition(".")
    return flag_of(f"{group}{dot}no_{key}")


def print_presets(presets: Mapping[str, str]) -> None:
    """Print the names and titles of the recipes. Raises ValueError if there are none."""
    require((presets, "--list-presets: this program has no recipes"))
    with ignore_closed_pipe():
        for name, text in presets.items():
            print(f"{name:<{max(map(len, presets))}}  {text.partition(chr(10))[0].lstrip('# ')}")


def silence_libraries() -> None:
    """Hide progress bars and warnings of other libraries, and the traceback of Ctrl-C while they are imported."""
    sys.excepthook = lambda kind, *exc: (
        kind is KeyboardInterrupt or sys.stderr.write(printable("".join(format_exception(kind, *exc))))
    )
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    for name in ("torchao", "torch.utils._pytree"):  # peft imports torchao, which uses deprecated pytree functions
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.formatwarning = lambda message, *place: f"WARNING: {one_line(message)}\n"
    warnings.filterwarnings("ignore", module=r"(torch|diffusers|transformers|peft|accelerate|huggingface_hub)\b")


def exit_with_error(error: object) -> NoReturn:
    """Print an error as one line, on the first rank of each machine, and exit with code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_error(error)
    sys.exit(2)
