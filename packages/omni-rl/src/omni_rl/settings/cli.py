"""Settings from a recipe, a TOML file and the command line. Imports nothing heavy.

Precedence: command line, then --config FILE.toml, then --preset NAME, then the defaults of the dataclass. A preset is a
TOML file too: recipes/APP/NAME.toml in this package.
"""

import argparse
import inspect
import json
import os
import re
import socket
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from omni_train.hub import check_named, is_from_hub, local_file

from omni_rl.settings.fields import flag_of

ConfigT = TypeVar("ConfigT")

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
OTHER_NAMES = {  # names that users bring from other projects, and what to use here
    "learning-rate": "--lr", "beta": "--kl-coef, --dpo-beta or --nft-beta", "kl-beta": "--kl-coef",
    "clip-eps": "--clip-range", "eta": "--noise-level", "num-generations": "--group-size",
    "train-batch-size": "--batch-size", "reward-url": "--scorer-url", "lora-r": "--lora-rank",
    "cfg": "--true-cfg-scale with Qwen-Image, --guidance-scale with other models",
    "cfg-scale": "--true-cfg-scale with Qwen-Image, --guidance-scale with other models",
    "resolution": "--height and --width", "image-size": "--height and --width",
    "resume": "the same command again, which continues the run",
    "resume-from-checkpoint": "the same command again, which continues the run",
    "weights": "--init-weights", "output-dir": "--name, as the run writes to runs/NAME", "run-name": "--name",
    "report-to": "--track", "wandb": "--track wandb", "tensorboard": "--track tensorboard",
    "steps": "--train-steps", "max-steps": "--train-steps", "max-train-steps": "--train-steps",
    "epochs": "--train-steps", "num-steps": "--num-inference-steps", "eval-num-steps": "--eval-num-inference-steps",
    "updates-per-step": "--num-minibatches", "best-of-n": "--best-worst-n", "drop-zero-signal": "--filter-groups",
    "window-iters": "--iters-per-window", "flash-ratio": "--compress-ratio", "share-noise": "--same-start-noise",
    "precision": "--dtype", "mixed-precision": "--dtype", "bf16": "--dtype bfloat16",
    "model-path": "--model", "pretrained-model-name-or-path": "--model",
    "nft": "train_nft.py", "awm": "train_nft.py", "dpo": "train_dpo.py", "srpo": "train_srpo.py",
    "teacher-path": "--teachers NAME=FOLDER", "opd": "train_distill.py",
}  # fmt: skip


class Note(NamedTuple):
    """The title of a field's group, and its help text."""

    group: str
    text: str


def parse_cli(
    cls: type[ConfigT],
    check: Callable[[ConfigT], None],
    argv: Sequence[str],
    *,
    app: str,
    description: str | None = None,
) -> ConfigT:
    """The settings that the command line asks for. A mistake in them ends the program with one line and exit code 2.

    With --check it prints the settings as TOML and, when they have been checked, ends with exit code 0.

    cls: a flat frozen dataclass whose fields all have defaults; see `field_notes` for its help. check: raises
    ValueError where settings do not fit together. app: name of the program, under which its recipes stand.
    description: what --help prints before the settings; its indented lines that begin with python or torchrun are
    examples, and come after them.
    """
    presets = recipes(app)
    try:
        config = read_settings(cls, argv, presets, description or "")
        if "--check" in argv:
            print(to_toml(config), end="", flush=True)
        if not getattr(config, "verbose", False):
            hush()
        check(config)
        if "--check" not in argv and not getattr(config, "dry_run", False):
            knock(getattr(config, "scorer_url", ""))
    except ValueError as exc:
        text = "".join(presets.get(word, "") for word in argv)  # of the preset, which says what it goes with
        prompts = re.search(r"^# Prompts: (bring .* as (data/\w+))", text, re.MULTILINE)
        scorer = re.search(r"^# Scorer: (.*)", text, re.MULTILINE)
        hints = [prompts[1]] if prompts and f"got {prompts[2]}/" in str(exc) else []
        hints += [f"start one: {scorer[1]}"] if scorer and " a reward server" in str(exc) else []
        refuse("; ".join([str(exc), *hints]))
    if "--check" in argv:
        sys.exit(0)
    return config


def knock(urls: str) -> None:
    """Raise ValueError where nothing listens at a scorer's URL on this machine: the check that needs no torch."""
    for url in filter(None, urls.split(",")):
        place = urlsplit(url)
        if place.hostname in ("127.0.0.1", "localhost", "::1"):
            port = place.port or (443 if place.scheme == "https" else 80)
            try:
                socket.create_connection((place.hostname, port), timeout=1).close()
            except TimeoutError:  # whoever is busy is asked later
                pass
            except OSError as exc:
                raise ValueError(f"--scorer-url must be a reward server that answers: {url}: {exc}") from exc


def hush() -> None:
    """Show no bars, notices and warnings of other libraries, which read their variables as they are imported."""
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    warnings.formatwarning = lambda message, *place: f"WARNING: {message}\n"
    warnings.filterwarnings("ignore", module=r"(torch|diffusers|transformers|peft|accelerate|huggingface_hub)\b")


def recipes(app: str) -> dict[str, str]:
    """The recipes of a program by name, as TOML."""
    folder = files("omni_rl") / "recipes" / app
    if not folder.is_dir():
        return {}
    names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name: (folder / f"{name}.toml").read_text("utf-8") for name in names}


def read_settings(cls: type[ConfigT], argv: Sequence[str], presets: Mapping[str, str], description: str) -> ConfigT:
    """The settings, not yet checked against each other; with --help in `argv` it prints the help and exits.

    presets: TOML by name. description: see `parse_cli`.

    Raises:
        ValueError: an unknown flag, preset or key (the nearest known one is suggested), or a value that does not fit.
    """
    values: dict[str, Any] = {}
    given = parse_flags(cls, argv, presets)
    wants_help, preset, path = given.pop("help", False), given.pop("preset", None), given.pop("config", None)
    given.pop("check", None)
    if preset is not None:
        if preset not in presets:
            raise ValueError(f"--preset must be one of {', '.join(presets)}, got {preset!r}{suggest(preset, presets)}")
        values |= from_toml(presets[preset], cls, f"--preset {preset}")
    if path is not None:
        with flag("--config: "):
            check_named(path, (".toml",) if is_from_hub(path) else ())
            file = local_file(path)
        try:
            found = from_toml(file.read_text(encoding="utf-8"), cls, path)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as exc:
            raise ValueError(f"--config must be a readable TOML file, got {path}: {exc}") from exc
        if is_from_hub(path):
            check_foreign(found, path)
        values |= found
    config = cls(**values | given)
    if wants_help:
        print_help(config, presets, description)
        sys.exit(0)
    return config


def check_foreign(values: Mapping[str, Any], path: str) -> None:
    """Check settings of a file from the hub, which must not choose a server, a secret, a media root or Python to run.

    Raises:
        ValueError: one of them does.
    """
    for row in [*map(vars, values.get("eval", ())), values]:
        for key, value in row.items():
            is_place = key in ("scorer_url", "watch_scorer_url", "scorer_token_file", "media_root")
            what = f"a {key}" if is_place else f"python: in {key}"
            rule = f"must not name {what}: give the flag, or a copy of the file that you have read"
            is_fine = not value if is_place else "python:" not in str(value)
            require((is_fine, f"--config {path} {rule}, got {value!r}"))


def parse_flags(cls: type, argv: Sequence[str], presets: Mapping[str, str]) -> dict[str, Any]:
    """The values of the flags in `argv` by the names of their settings; help, check, preset and config are among them.

    Raises:
        ValueError: as `read_settings`.
    """
    kinds = get_type_hints(cls)
    # A negative number may look like a flag to argparse: it is joined to the word before. No word holds a NUL.
    words = re.sub(r"(?<=[^\0])\0(?=-[\d.])", "=", "\0".join(["", *argv])).split("\0")[1:]
    words = [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in words]
    try:
        found, unknown = build_parser(cls, presets).parse_known_args(words)
    except argparse.ArgumentError as exc:
        rule = exc.message.replace("expected one argument", "needs a value")
        rule = rule.replace("ignored explicit argument", "takes no value, got")
        raise ValueError(f"{(exc.argument_name or '').partition('/')[0]} {rule}") from exc
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            raise ValueError(f"unexpected {word!r}: a flag begins with --")
        flags = [name for name, kind in kinds.items() if get_origin(kind) is not tuple]
        known = [*map(flag_of, flags), *(f"--no-{flag_of(k)[2:]}" for k, kind in kinds.items() if kind is bool)]
        raise ValueError(f"unknown flag {name}{suggest(name, [*known, '--preset', '--config', '--check'])}")
    return {
        name: fitting(kinds[name], from_text(kinds[name], value), flag_of(name)) if name in kinds else value
        for name, value in vars(found).items()
    }


def build_parser(
    cls: type, presets: Mapping[str, str], notes: Mapping[str, Note] | None = None, **layout: Any
) -> argparse.ArgumentParser:
    """A parser of the settings' flags, which are switches or take a word, in groups as the notes say.

    layout: further arguments of ArgumentParser.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, **layout)
    parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="Print this and exit")
    if presets:
        text = "Recipe that gives the defaults of the settings; the names are below"
        parser.add_argument("--preset", metavar="NAME", default=argparse.SUPPRESS, help=text)
    text = "TOML file of settings" + ", which goes before the preset" * bool(presets)
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
    text = "Check the settings and print them, all without torch, and exit"
    parser.add_argument("--check", action="store_true", default=argparse.SUPPRESS, help=text)
    groups = {}
    for name, kind in get_type_hints(cls).items():
        if get_origin(kind) is tuple:  # tables of a TOML file
            continue
        note = (notes or {}).get(name, Note("Settings", ""))
        if note.group not in groups:
            groups[note.group] = parser.add_argument_group(note.group)
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind is not bool:
            options = {"metavar": {int: "INT", float: "FLOAT"}.get((*get_args(kind), kind)[0], "TEXT")}
        text = note.text.replace("%", "%%")
        groups[note.group].add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help=text, **options)
    return parser


def print_help(config: Any, presets: Mapping[str, str], description: str) -> None:
    """Print the description, every setting with its default in `config`, the examples and the presets."""
    width = min(100, get_terminal_size().columns - 2)
    lines = re.sub(r"\\\n *", "", description).splitlines()
    commands = [line.strip() for line in lines if re.match(" +(python|torchrun) ", line)]
    prose = "\n".join(line for line in lines if line.strip() not in commands)
    epilog = ["examples:", *(wrap_command(command, width) for command in commands)] if commands else []
    epilog += ["", "presets:"] if presets else []
    for name, recipe in presets.items():
        line = f"  {name:<28} {recipe.partition(chr(10))[0].lstrip('# ')}"
        epilog.append(textwrap.fill(line, width, subsequent_indent=" " * 31))
    parser = build_parser(
        type(config),
        presets,
        help_notes(config),
        usage=f"%(prog)s {'[--preset NAME] ' * bool(presets)}[--config FILE] [--SETTING VALUE ...]",
        description=wrap_prose(prose, width),
        epilog="\n".join(epilog),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width),
    )
    say(parser.format_help().removesuffix("\n"))


def say(text: str) -> None:
    """Print a line at once, or nothing from when on nobody reads it, as after `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """Return a text of somebody else for a terminal: without credentials of URLs and without control characters."""
    bare = re.sub(r"(?<=://)[^\s/\"]*@", "", text)
    return "".join(letter if letter.isprintable() else " " for letter in bare)


def help_notes(config: Any) -> dict[str, Note]:
    """The notes of each setting, with its choices and its default in `config` at the end of the text."""
    cls = type(config)
    notes: dict[str, Note] = {}
    for base in reversed(cls.__mro__[:-1]):
        notes = field_notes(inspect.getsource(base), notes)
    for name, kind in get_type_hints(cls).items():
        value = getattr(config, name)
        shown = ("on" if value else "off") if kind is bool else "" if value is None else str(value)
        choices = [", ".join(map(str, get_args(kind)))] if get_origin(kind) is Literal else []
        facts = "; ".join(choices + ([f"default: {shown}"] if shown else []))
        if name in notes:
            notes[name] = notes[name]._replace(text=f"{notes[name].text} ({facts})" if facts else notes[name].text)
    return notes


def wrap_prose(text: str, width: int) -> str:
    """Paragraphs, numbered points and indented lines, each wrapped to the width."""
    wrapped = []
    for piece in re.split(r"\n(?=\s*\n|\d+\. |    )", text.strip()):
        indent = " " * (len(piece.lstrip("\n")) - len(piece.lstrip()))
        hanging = indent + ("   " if re.match(r"\d+\. ", piece) else "  " * bool(indent))
        words = " ".join(piece.split())
        words = textwrap.fill(words, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False)
        wrapped.append("\n" * piece.startswith("\n") + words)
    return "\n".join(wrapped)


def wrap_command(command: str, width: int) -> str:
    """A command that can be copied, broken with backslashes before flags where it is wider than the width."""
    glued = command.replace(" --", "\n--").replace(" ", "\0").replace("\n", " ")
    lines = textwrap.wrap(glued, width - 6, break_long_words=False, break_on_hyphens=False)
    return "  " + " \\\n      ".join(lines).replace("\0", " ")


def field_notes(source: str, inherited: Mapping[str, Note]) -> dict[str, Note]:
    """The inherited notes, and those of the fields of a dataclass, from the comments in its source.

    The comment beside a field is its help text; one on a line of its own is the title of the fields after it. A field
    before any title that stands in `inherited` already stays in its group.
    """
    name, group, notes = "", "", dict(inherited)
    for line in textwrap.dedent(source).splitlines():
        code, _, comment = line.partition("# ")
        text = comment.partition("# fmt:")[0].strip()
        if field := re.match(r" {4}(\w+): ", code):
            name = field[1]  # the comment of a field of several lines stands beside the last one
        if text and code.strip():
            notes[name] = Note(group or (notes[name].group if name in notes else "Settings"), text)
        elif text:
            group = text
    return notes


def refuse(mistake: object) -> NoReturn:
    """Ends the program with exit code 2 and one line; of several ranks on a machine, the first prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {mistake}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextmanager
def flag(words: str) -> Iterator[None]:
    """Puts words, such as "--prompts: ", before the message of an OSError or ValueError in the block.

    A message that begins with that name itself, as "model must be ...", becomes "--model must be ...".

    Raises:
        ValueError: in place of either.
    """
    try:
        yield
    except (OSError, ValueError) as exc:
        raise ValueError(re.sub(r"^--(\S+): \1 ", r"--\1 ", f"{words}{exc}")) from exc


def require(*rules: tuple[object, str]) -> None:
    """Raises ValueError with the words of the first rule that does not hold."""
    for holds, words in rules:
        if not holds:
            raise ValueError(words)


def suggest(name: str, known: Iterable[str]) -> str:
    """'; use ...' for a name of another project, '; did you mean ...?' with the nearest known name, or nothing."""
    known = list(known)
    ours = {word.lstrip("-").replace("_", "-") for word in known}
    other = OTHER_NAMES.get(name.lstrip("-").replace("_", "-").lower(), "")
    flags = re.findall("--([a-z-]+)", other)
    if other and (not flags or ours & set(flags)):
        return f"; use {other}"
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_toml(config: Any) -> str:
    """The dataclass as TOML, one key a line; keys that are None are left out, as they are their own default."""
    tables = {key: value for key, value in vars(config).items() if isinstance(value, tuple)}
    values = {key: value for key, value in vars(config).items() if value is not None and key not in tables}
    text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    for name, rows in tables.items():
        text += "".join(f"\n[[{name}]]\n{to_toml(row)}" for row in rows)
    return text.replace("\x7f", "\\u007f")  # JSON escapes what TOML does, but for DEL


def from_toml(text: str, cls: type, place: str) -> dict[str, Any]:
    """The settings in a TOML text. place: what the messages call it.

    Raises:
        ValueError: the text is no TOML, or has an unknown key, a table, or a value of another type.
    """
    values, kinds = tomllib.loads(text), get_type_hints(cls)
    for key, value in values.items():
        if isinstance(value, dict):
            raise ValueError(f"{place}: [{key}] is a table, but settings stand side by side, as lr = 1e-4")
        if key not in kinds:
            raise ValueError(f"{place}: unknown key {key!r}{suggest(key, kinds)}")
        is_table = get_origin(kinds[key]) is tuple
        values[key] = (read_tables if is_table else fitting)(kinds[key], value, f"{place}: {key}")
    return values


def read_tables(wanted: Any, value: object, place: str) -> tuple[object, ...]:
    """The tables [[key]] as dataclasses of the wanted kind. place: what the messages call them.

    Raises:
        ValueError: the value is no list of tables, or one has an unknown key or a value of another type.
    """
    cls, kinds = get_args(wanted)[0], get_type_hints(get_args(wanted)[0])
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError(f"{place} must be tables, each below a line of its own with two brackets, got {value!r:.80}")
    for number, row in enumerate(value, start=1):
        for key in row.keys() - kinds.keys():
            raise ValueError(f"{place}[{number}]: unknown key {key!r}{suggest(key, kinds)}")
    return tuple(
        cls(**{key: fitting(kinds[key], own, f"{place}[{number}].{key}") for key, own in row.items()})
        for number, row in enumerate(value, start=1)
    )


def from_text(wanted: Any, text: str) -> object:
    """The word of a command line converted to the wanted type, or unchanged if it does not convert."""
    kinds = get_args(wanted) or (wanted,)
    if type(None) in kinds and text == "None":
        return None
    if {int, float} & {*kinds, *map(type, kinds)}:  # the kinds of a Literal are values
        with suppress(ValueError):
            return float(text) if float in kinds else int(text)
    return text


def fitting(wanted: Any, value: object, place: str) -> object:
    """`value` if it has the wanted type; an integer also where a float is wanted.

    Raises:
        ValueError: it has not; the message begins with `place`.
    """
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            hint = suggest(str(value), [str(choice) for choice in get_args(wanted)])
            raise ValueError(f"{place} must be one of {', '.join(map(repr, get_args(wanted)))}, got {value!r}{hint}")
        return value
    kinds = get_args(wanted) or (wanted,)  # the members of a union such as int | None
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{place} must be {KINDS[kinds[0]]}, got {value!r}")
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{place} must be UTF-8 text, got {value!r}")
    return value
