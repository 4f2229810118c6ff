"""Notes beside a setting's type, in its `Annotated`: its bounds, and how it may be used.

A setting is one line: `lr: Annotated[float, between(0, 1)] = 3e-4  # Learning rate of AdamW`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

ConfigT = TypeVar("ConfigT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

FLOAT32_MAX = 3.4028234663852886e38


class Mark(Enum):
    """How a setting may be used."""

    REQUIRED = auto()
    MAY_CHANGE = auto()
    SECRET = auto()
    SHOWN = auto()


REQUIRED = Mark.REQUIRED  # empty by default, and must be given
MAY_CHANGE = Mark.MAY_CHANGE  # a run may continue with another value than its checkpoint has
SECRET = Mark.SECRET  # kept out of files that others may read
SHOWN = Mark.SHOWN  # in --help though no recipe sets it, as it depends on the machine


@dataclass(frozen=True)
class Bound:
    """The least and the greatest value of a number; infinite ones are those of its type."""

    least: float
    most: float


@dataclass(frozen=True)
class Was:
    """The old flat name of a setting in a group, for files, flags and checkpoints; "" is its name in the group.

    switch: the values that mean off and on, of a setting that was a switch.
    """

    name: str = ""
    switch: tuple[str, ...] = ()


def between(least: float, most: float) -> Bound:
    """Bound a number, both ends included."""
    return Bound(least, most)


def at_least(least: float) -> Bound:
    """Bound a number from below, the end included."""
    return Bound(least, math.inf)


def notes_of(kind: Any) -> tuple[Any, ...]:
    """Return the notes beside a type."""
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def kind_of(kind: Any) -> Any:
    """Return a type without its notes."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def cached(function: FunctionT) -> FunctionT:
    """Cache the results of a function; mypy does not see that a class can be hashed."""
    return cast("FunctionT", cache(function))


@cached
def leaves(cls: Any, prefix: str = "") -> dict[str, Field[Any]]:
    """Return the settings of a dataclass by name, such as lr, or correction.low in a group."""
    found: dict[str, Field[Any]] = {}
    for own in fields(cls):
        group = kind_of(own.type)
        found |= leaves(group, f"{own.name}.") if is_dataclass(group) else {f"{prefix}{own.name}": own}
    return found


def values_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a dataclass by the names of `leaves`."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        found |= values_of(value, f"{name}.") if is_dataclass(value) else {f"{prefix}{name}": value}
    return found


def build(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Return the dataclass with values by the names of `leaves` or `old_names`, and its defaults."""
    own = dict[str, Any]()
    shape: Any = cls
    groups = {each.name: kind_of(each.type) for each in fields(shape)}
    for name, value in renewed(cls, values).items():
        group, _, rest = name.rpartition(".")
        own |= {group: replace(own.get(group, groups[group]()), **{rest: value})} if group else {rest: value}
    return cls(**own)


def change(config: ConfigT, **values: Any) -> ConfigT:
    """Return the dataclass with other values, by the names of `leaves` or by `old_names`."""
    return build(type(config), values_of(config) | renewed(type(config), values))


def renewed(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of `leaves`, from those by the names of `leaves` or `old_names`."""
    old, words = old_names(cls), old_switches(cls)
    return {
        old.get(name, name): words[name][value] if name in words and isinstance(value, bool) else value
        for name, value in values.items()
    }


@cached
def old_names(cls: Any) -> dict[str, str]:
    """Return the names of settings in groups by their other names, such as correction.low by correction_low.

    The name of a `Was` follows that one.
    """
    found: dict[str, str] = {}
    for name, own in leaves(cls).items():
        if "." in name:
            was = [note.name or own.name for note in notes_of(own.type) if isinstance(note, Was)]
            found |= dict.fromkeys([name.replace(".", "_"), *was], name)
    return found


def flat(config: Any) -> dict[str, object]:
    """Return the values of a dataclass as checkpoints hold them, by `old_names`."""
    plain, words = values_of(config), old_switches(type(config))
    old = {name: name for name in plain} | {name: was for was, name in old_names(type(config)).items()}
    found = {old[name]: [*map(asdict, own)] if isinstance(own, tuple) else own for name, own in plain.items()}
    return found | {was: found[was] == on for was, (off, on) in words.items() if found[was] in (off, on)}


@cached
def old_switches(cls: Any) -> dict[str, tuple[str, ...]]:
    """Return the values that mean off and on of settings that were switches, by their names of before."""
    notes = [note for own in leaves(cls).values() for note in notes_of(own.type)]
    return {note.name: note.switch for note in notes if isinstance(note, Was) and note.switch}


def marked(cls: Any, *marks: Mark) -> tuple[str, ...]:
    """Return the names of settings, as in `leaves`, that have one of the marks."""
    return tuple(name for name, own in leaves(cls).items() if set(marks).intersection(notes_of(own.type)))


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def check_bounds(config: Any, place: str = "") -> None:
    """Check that numbers of a dataclass are within their bounds and those of their types.

    Floats are finite in float32, and integers without a bound have 32 bits. place: what the messages call the
    dataclass, as eval.sets[1]; a setting of the command line is called by its flag.

    Raises:
        ValueError: one is not.
    """
    values = values_of(config)
    for key, own in leaves(config).items():
        value = values[key]
        if type(value) in (int, float):
            bound = next((note for note in notes_of(own.type) if isinstance(note, Bound)), Bound(-math.inf, math.inf))
            limit = FLOAT32_MAX if type(value) is float else 2**31 - 1
            least, most = (end if math.isfinite(end) else math.copysign(limit, end) for end in vars(bound).values())
            if not least <= value <= most:
                rule = f">= {least:.10g}" if value < least else f"<= {most:.10g}"
                name = f"{place}.{key}" if place else flag_of(key)
                raise ValueError(f"{name} must be {rule}, got {value}")


def require(*rules: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first rule that does not hold."""
    for holds, words in rules:
        if not holds:
            raise ValueError(words)


@contextmanager
def flag(words: str) -> Iterator[None]:
    """Put words, such as "--prompts: ", before the message of an OSError or ValueError in the block.

    One that begins with that name or a longer one, as "prompts_per_step must be ...", begins with its flag instead.

    Raises:
        ValueError: in place of either.
    """
    try:
        yield
    except (OSError, ValueError) as exc:
        fault = re.sub(r"^--(\S+): (\1\w*) ", lambda found: f"{flag_of(found[2])} ", f"{words}{exc}")
        raise ValueError(fault) from exc
