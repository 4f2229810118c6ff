"""Settings from a recipe, a TOML file and the command line. Imports nothing heavy; tyro prints the help.

Precedence: command line, then --config FILE.toml, then --preset NAME, then the defaults of the dataclass. A preset is
also a TOML file: recipes/APP/NAME.toml in this package.
"""

import gc
import inspect
import logging
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_args

import tyro
from omni_train.terminal import one_line, printable
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from omni_rl.settings.args import num_ranks
from omni_rl.settings.fields import (
    NO_FLAG,
    build,
    field_comments,
    flag_of,
    leaves,
    require,
    strip_metadata,
    type_metadata,
    values_of,
)
from omni_rl.settings.printing import ignore_closed_pipe, print_error
from omni_rl.settings.toml import coerce, from_files, load_recipes, suggest, to_toml

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
    except (OSError, ValueError) as exc:
        message, text = str(exc), "".join(presets.get(word, "") for word in argv)  # text: the preset's TOML
        places = "|".join(map(re.escape, re.findall(r'"((?:python:)?[\w.-]+/\S+)"', text)))
        if places and re.search(f"got '?({places})", message):
            prompts = re.search(r"^# Prompts: (.*)", text, re.MULTILINE)
            message += f"; to get it: {prompts[1]}" if prompts else "; the clone of omni-rl has it: start in its folder"
        scorer = re.search(r"^# Scorer: (.*)", text, re.MULTILINE)
        if scorer and " a reward server" in message:
            message += f"; start one: {scorer[1]}"
        if "ranks" in message and num_ranks() > 1 and "RANK" not in os.environ:
            remedy = f"unset it, or start them with omni-rl train NAME --nproc-per-node {num_ranks()}"
            message += f"; their number is WORLD_SIZE in the environment: {remedy}"
        exit_with_error(message)
    if "--check" in argv:
        sys.exit(0)
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: the settings are checked; loading torch, then {values['model']}", flush=True)
    if "torch" not in sys.modules:
        gc.disable()  # the imports that follow create no garbage, and collection would take a sixth of their time
    return config


def end_imports() -> None:
    """Enable garbage collection again after the imports that follow `parse_cli`, excluding their objects."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def read_settings(cls: type[ConfigT], argv: Sequence[str], presets: Mapping[str, str], description: str) -> ConfigT:
    """Return the settings before checking them against each other. With --help, print the help and exit.

    presets: TOML by name. description: see `parse_cli`.

    Raises:
        ValueError: an unknown flag, preset or key (the message suggests the nearest), or a value that does not fit.
    """
    invalid_word = next((word for word in argv if re.search("[\ud800-\udfff]", word)), "")
    require((not invalid_word, f"the command line must be UTF-8 text, got {invalid_word!r}"))
    if not {"-h", "--help"}.isdisjoint(argv):
        print_help(cls, presets, description)
        sys.exit(0)
    values = from_flags(cls, argv)
    program = {name: values.pop(name, default) for name, default in values_of(Program).items()}
    if program["list_presets"]:
        print_presets(presets)
        sys.exit(0)
    return build(cls, from_files(cls, program["preset"], program["config"], presets) | values)


def from_flags(cls: type, argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the words of a command line by the names of `walk`, also those of `Program`.

    Raises:
        ValueError: an unknown flag, a flag without its value, or a value of another type.
    """
    settings = leaves(Program) | leaves(cls)
    names = {flag_of(name): name for name, own in settings.items() if NO_FLAG not in type_metadata(own.type)}
    switches = {flag: name for flag, name in names.items() if strip_metadata(settings[name].type) is bool}
    negated = {negated_flag(name): name for name in switches.values()}
    values, words = dict[str, Any](), deque(argv)
    while words:
        word = words.popleft()
        key, equals, text = word.partition("=")
        flag = re.sub("(?<!^)_", "-", key)
        if name := switches.get(flag) or negated.get(flag):
            words.extendleft([text] if equals else ())
            rule = f"{flag} takes no value, got {''.join([*words][:1])!r}: give {flag_of(name)} or {negated_flag(name)}"
            require((not words or words[0].startswith("-"), rule))
            values[name] = flag in switches
        elif name := names.get(flag):
            require((equals or (words and not words[0].startswith("--")), f"{flag} needs a value"))
            values[name] = coerce(
                settings[name], parse_number(settings[name], text if equals else words.popleft()), flag
            )
        else:
            require((word.startswith("-"), f"unexpected {word!r}: a flag begins with --"))
            flags, moved = sorted([*names, *negated]), re.sub(r"^--no-(.+\.)", r"--\1no-", key)
            hint = f"; did you mean {moved!r}?" if moved in negated else suggest(key, flags)
            other = "; --help lists all, docs/coming-from.md those of other projects"
            raise ValueError(f"unknown flag {key}{hint or other}")
    return values


def parse_number(setting: Field[Any], text: str) -> object:
    """Return the number in a text if the setting may be one, else the text."""
    kind = strip_metadata(setting.type)
    kinds = {member if isinstance(member, type) else type(member) for member in get_args(kind) or (kind,)}
    for number in (int, float):
        if number in kinds:
            with suppress(ValueError):
                return number(text)
    return text


def negated_flag(name: str) -> str:
    """Return the flag that turns a setting off, such as --eval.no-first."""
    group, dot, key = name.rpartition(".")
    return flag_of(f"{group}{dot}no_{key}")


def print_help(cls: type, presets: Mapping[str, str], description: str) -> None:
    """Print the help. presets, description: see `read_settings`."""
    command_type: Any = Command
    with ignore_closed_pipe():
        with suppress(SystemExit):
            tyro.cli(
                command_type[cls],
                prog=Path(sys.argv[0]).name,
                description=inspect.cleandoc(description),
                args=["--help"],
                registry=RULES,
            )
        if presets:
            print(f"{len(presets)} recipes for --preset, which --list-presets lists.")


def print_presets(presets: Mapping[str, str]) -> None:
    """Print the names and titles of the recipes."""
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
