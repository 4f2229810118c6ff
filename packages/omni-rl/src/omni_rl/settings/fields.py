"""What stands beside a setting's type, in its `Annotated`: its bounds, and what may be done with it.

A setting is one line: `lr: Annotated[float, between(0, 1)] = 3e-4  # Learning rate of AdamW`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

ConfigT = TypeVar("ConfigT")

FLOAT32_MAX = 3.4028234663852886e38


class Mark(Enum):
    """What may be done with a setting."""

    REQUIRED = auto()
    MAY_CHANGE = auto()
    SECRET = auto()


REQUIRED = Mark.REQUIRED  # empty by default, and must be given
MAY_CHANGE = Mark.MAY_CHANGE  # a run may continue with another value than its checkpoint has
SECRET = Mark.SECRET  # not for files that others may read


@dataclass(frozen=True)
class Bound:
    """The least and the greatest value of a number; infinite ones are those of its type."""

    least: float
    most: float


@dataclass(frozen=True)
class Was:
    """The name of a setting before it was one of a group, which files, flags and checkpoints know; "" is its own."""

    name: str = ""


def between(least: float, most: float) -> Bound:
    """Bound a number, both ends included."""
    return Bound(least, most)


def at_least(least: float) -> Bound:
    """Bound a number from below, the end included."""
    return Bound(least, math.inf)


def notes_of(kind: Any) -> tuple[Any, ...]:
    """Return what stands beside a type."""
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def kind_of(kind: Any) -> Any:
    """Return a type without what stands beside it."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@cache
def leaves(cls: Any, prefix: str = "") -> dict[str, Field[Any]]:
    """Return the settings of a dataclass by name, as lr; those of its groups with the group's, as correction.low."""
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
    """Return the dataclass of values by the names of `leaves`, or by `old_names`; others are its defaults."""
    old, own = old_names(cls), dict[str, Any]()
    shape: Any = cls
    groups = {each.name: kind_of(each.type) for each in fields(shape)}
    for name, value in values.items():
        group, _, rest = old.get(name, name).rpartition(".")
        own |= {group: replace(own.get(group, groups[group]()), **{rest: value})} if group else {rest: value}
    return cls(**own)


def change(config: ConfigT, **values: Any) -> ConfigT:
    """Return the dataclass with other values, by the names of `leaves` or by `old_names`."""
    old = old_names(type(config))
    return build(type(config), values_of(config) | {old.get(name, name): value for name, value in values.items()})


@cache
def old_names(cls: Any) -> dict[str, str]:
    """Return the names of settings in groups by their other names: correction.low by correction_low.

    A setting with another old name than that, which stands beside its type as `Was`, has both; the old one is last.
    """
    found: dict[str, str] = {}
    for name, own in leaves(cls).items():
        if "." in name:
            was = [note.name or own.name for note in notes_of(own.type) if isinstance(note, Was)]
            found |= dict.fromkeys([name.replace(".", "_"), *was], name)
    return found


def flat(config: Any) -> dict[str, object]:
    """Return the values of a dataclass as checkpoints hold them, by `old_names`."""
    plain = values_of(config)
    old = {name: name for name in plain} | {name: was for was, name in old_names(type(config)).items()}
    return {old[name]: [*map(asdict, own)] if isinstance(own, tuple) else own for name, own in plain.items()}


def marked(cls: Any, *marks: Mark) -> tuple[str, ...]:
    """Return the names of a dataclass's settings, as `leaves` has them, that have one of the marks."""
    return tuple(name for name, own in leaves(cls).items() if set(marks).intersection(notes_of(own.type)))


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def check_bounds(config: Any, place: str = "") -> None:
    """Check that numbers of a dataclass are within their bounds, and fit the arithmetic of their types.

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
    """Raises ValueError with the words of the first rule that does not hold."""
    for holds, words in rules:
        if not holds:
            raise ValueError(words)


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
