"""Settings from a preset and a TOML file, ready to be overridden on the command line. Imports nothing heavy.

Precedence: command line, then file, then preset, then the defaults of the dataclass.
"""

import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

ConfigT = TypeVar("ConfigT")

FLOAT32_MAX = 3.4028234663852886e38
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def parse_cli(
    cls: type[ConfigT],
    presets: Mapping[str, ConfigT],
    check: Callable[[ConfigT], None],
    argv: Sequence[str],
    *,
    description: str | None = None,
) -> ConfigT:
    """The settings that the command line asks for. A mistake in them ends the program with one line and exit code 2.

    cls: a flat frozen dataclass whose fields all have defaults. check: raises ValueError where settings do not fit
    together. Needs tyro.
    """
    import tyro

    try:
        preset, path, rest = split_config_flags(argv)
        base = base_config(cls(), presets, preset=preset, path=path)
        if not {"--help", "-h"} & set(rest):
            check_flags(cls, rest)
        config = tyro.cli(cls, default=base, args=rest, description=description)
        check(config)
    except ValueError as exc:
        refuse(exc)
    return config


def refuse(mistake: object) -> NoReturn:
    """Ends the program with exit code 2 and one line; of several ranks on a machine, the first prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {mistake}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextmanager
def flag(words: str) -> Iterator[None]:
    """Puts words, such as "--prompts: ", before the message of an OSError or ValueError in the block.

    Raises:
        ValueError: in place of either.
    """
    try:
        yield
    except (OSError, ValueError) as exc:
        raise ValueError(f"{words}{exc}") from exc


def check_flags(cls: type, words: Sequence[str]) -> None:
    """Returns when the words are flags of the dataclass with values that fit.

    Raises:
        ValueError: an unknown flag (the nearest known one is suggested), a value that is missing or does not fit, or a
            word that belongs to no flag.
    """
    known = {"--" + name.replace("_", "-"): kind for name, kind in get_type_hints(cls).items()}
    switches = {flag for name, kind in known.items() if kind is bool for flag in (name, "--no-" + name[2:])}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not flag.startswith("--"):
            raise ValueError(f"unexpected {word!r}: a flag begins with --")
        if flag in switches:
            if equals:
                raise ValueError(f"{flag} takes no value, got {value!r}")
        elif flag not in known:
            raise ValueError(f"unknown flag {flag}{suggest(flag, [*known, *switches, '--preset', '--config'])}")
        else:
            _checked(known[flag], _parsed(known[flag], value if equals else next(rest, None), flag), flag)


def check_least(config: object, least: Mapping[str, float]) -> None:
    """Raises ValueError when a setting is below its least value, or no number at all (NaN)."""
    for name, bound in least.items():
        value = getattr(config, name)
        require((value >= bound, f"--{name.replace('_', '-')} must be >= {bound:g}, got {value}"))


def check_most(config: object, most: Mapping[str, float]) -> None:
    """Raises ValueError when a setting is above its greatest value, or no number at all (NaN)."""
    for name, bound in most.items():
        value = getattr(config, name)
        require((value <= bound, f"--{name.replace('_', '-')} must be <= {bound:g}, got {value}"))


def check_finite(config: Any) -> None:
    """Raises ValueError when a number of the dataclass does not fit its type's arithmetic.

    The seed is a signed 64-bit integer, other integers have 32 bits, and floats are finite in float32.
    """
    for name, value in vars(config).items():
        if type(value) in (int, float):
            bits = 63 if name == "seed" else 31
            words = f"finite, within +-{FLOAT32_MAX:.1e}" if type(value) is float else f"a whole number below 2^{bits}"
            bound = FLOAT32_MAX if type(value) is float else 2**bits - 1
            require((abs(value) <= bound, f"--{name.replace('_', '-')} must be {words}, got {value}"))


def require(*rules: tuple[object, str]) -> None:
    """Raises ValueError with the words of the first rule that does not hold."""
    for holds, words in rules:
        if not holds:
            raise ValueError(words)


def split_config_flags(argv: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """The values of `--preset` and `--config`, None where absent, and the other arguments.

    Raises:
        ValueError: one of the two stands without a value.
    """
    found: dict[str, str | None] = {"--preset": None, "--config": None}
    rest = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in found:
            rest.append(word)
            continue
        given = value if equals else next(words, "")
        if not given or given.startswith("--"):
            raise ValueError(f"{name} needs a value")
        found[name] = given
    return found["--preset"], found["--config"], rest


def base_config(
    defaults: ConfigT, presets: Mapping[str, ConfigT], *, preset: str | None = None, path: str | None = None
) -> ConfigT:
    """The preset, or `defaults` without one, with the keys of the TOML file at `path` put in their place.

    Raises:
        ValueError: an unknown preset or key (the nearest known one is suggested), or a file that is no TOML.
    """
    base = defaults
    if preset is not None:
        if preset not in presets:
            raise ValueError(f"--preset must be one of {', '.join(presets)}, got {preset!r}{suggest(preset, presets)}")
        base = presets[preset]
    return base if path is None else replace(base, **_read_toml(Path(path), base))  # type: ignore[type-var]


def suggest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """'; did you mean ...?' with the nearest known name, or nothing."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_toml(config: Any) -> str:
    """The dataclass as TOML, one key a line; keys that are None are left out, as they are their own default."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in asdict(config).items() if value is not None)


def _read_toml(path: Path, base: Any) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ValueError(f"--config must be a readable TOML file, got {path}: {exc}") from exc
    known = get_type_hints(type(base))
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}{suggest(key, known)}")
        values[key] = _checked(known[key], value, f"{path}: {key}")
    return values


def _parsed(wanted: Any, text: str | None, place: str) -> object:
    """What a word of the command line says where that type is wanted; the word itself where it says nothing of it."""
    if text is None:
        raise ValueError(f"{place} needs a value")
    kinds = get_args(wanted) or (wanted,)
    if type(None) in kinds and text == "None":
        return None
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                return text
    return text


def _checked(wanted: Any, value: object, place: str) -> object:
    """`value` if it has the wanted type; an integer also where a float is wanted."""
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            hint = suggest(str(value), get_args(wanted))
            raise ValueError(f"{place} must be one of {', '.join(map(repr, get_args(wanted)))}, got {value!r}{hint}")
        return value
    kinds = get_args(wanted) or (wanted,)  # the members of a union such as int | None
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{place} must be {_KINDS[kinds[0]]}, got {value!r}")
    return value


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
