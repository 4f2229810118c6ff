"""Metadata of settings in `Annotated`: their bounds, and how they may be used.

A setting is one line: `lr: Annotated[float, between(0, 1)] = 3e-4  # Learning rate of AdamW`.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

import tyro

ConfigT = TypeVar("ConfigT")
GroupT = TypeVar("GroupT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

FLOAT32_MAX = 3.4028234663852886e38


class Mark(Enum):
    """Property of a setting."""

    REQUIRED = auto()
    MAY_CHANGE = auto()
    SECRET = auto()


REQUIRED = Mark.REQUIRED  # empty by default, must be given
MAY_CHANGE = Mark.MAY_CHANGE  # may differ from the value in the checkpoint that a run resumes from
SECRET = Mark.SECRET  # not written to files that others may read
NO_FLAG = tyro.conf.Suppress  # a table of a TOML file, without a flag
SCORER_FLAG = tyro.conf.arg(name="scorer", prefix_name=False)  # the flag of scorer.name is --scorer
FLAT = tyro.conf.arg(name="")
Flat = Annotated[GroupT, FLAT]  # a group whose settings have no prefix


@dataclass(frozen=True)
class Bound:
    """The least and the greatest value of a number; an infinite bound is the limit of its type."""

    least: float
    most: float


def between(least: float, most: float) -> Bound:
    """Bound a number to [least, most]."""
    return Bound(least, most)


def at_least(least: float) -> Bound:
    """Bound a number to [least, inf)."""
    return Bound(least, math.inf)


def type_metadata(kind: Any) -> tuple[Any, ...]:
    """Return the metadata of an `Annotated` type."""
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def strip_metadata(kind: Any) -> Any:
    """Return a type without its metadata."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def cached(function: FunctionT) -> FunctionT:
    """Cache the results of a function. A wrapper, because mypy does not know that classes are hashable."""
    return cast("FunctionT", cache(function))


def group_prefix(own: Field[Any], prefix: str) -> str:
    """Return the prefix of the settings in a field's group, such as "lora."; a flat group adds none."""
    return prefix if FLAT in type_metadata(own.type) else f"{prefix}{own.name}."


@cached
def leaves(cls: Any, prefix: str = "") -> dict[str, Field[Any]]:
    """Return the settings of a dataclass by name, such as lr, or correction.low for one in a group."""
    found: dict[str, Field[Any]] = {}
    for own in fields(cls):
        group = strip_metadata(own.type)
        inner = leaves(group, group_prefix(own, prefix)) if is_dataclass(group) else {f"{prefix}{own.name}": own}
        found |= inner
    return found


def values_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a dataclass by the names of `leaves`."""
    found: dict[str, Any] = {}
    for own in fields(config):
        value = getattr(config, own.name)
        inner = values_of(value, group_prefix(own, prefix)) if is_dataclass(value) else {f"{prefix}{own.name}": value}
        found |= inner
    return found


def build(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build the dataclass from values by the names of `leaves`, and its defaults for the rest."""
    return cls(**vars(build_unresolved(cls, values)))


def build_unresolved(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build the dataclass as `build` does, but without `__post_init__`, which derives defaults from other values.

    Raises:
        TypeError: a name is not a setting.
    """
    shape: Any = cls
    if unknown := values.keys() - leaves(cls):
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    return with_values(cls, {own.name: own.default for own in fields(shape)}, values)


def with_values(
    cls: type[ConfigT], defaults: Mapping[str, Any], values: Mapping[str, Any], prefix: str = ""
) -> ConfigT:
    """Build the dataclass from its defaults by field name, overridden by values by the names of `leaves`."""
    shape: Any = cls
    config = object.__new__(cls)
    for own in fields(shape):
        value = defaults[own.name]
        if is_dataclass(value):
            vars(config)[own.name] = with_values(type(value), vars(value), values, group_prefix(own, prefix))
        else:
            vars(config)[own.name] = values.get(f"{prefix}{own.name}", value)
    return config


def change(config: ConfigT, **values: Any) -> ConfigT:
    """Return a copy of the dataclass with other values, by the names of `leaves` with _ for dots: lora_rank."""
    names = {name.replace(".", "_"): name for name in leaves(type(config))}
    return build(type(config), values_of(config) | {names.get(name, name): own for name, own in values.items()})


def flatten(config: Any) -> dict[str, object]:
    """Return the values of a dataclass by the names of `leaves`, in the form that checkpoints store."""
    return {name: [*map(asdict, own)] if isinstance(own, tuple) else own for name, own in values_of(config).items()}


@cached
def field_comments(cls: Any) -> dict[str, str]:
    """Return the comments beside the fields of a dataclass and its bases, by name."""
    found, bases = dict[str, str](), list[Any](filter(is_dataclass, reversed(cls.__mro__)))
    for base in bases:
        source = inspect.getsource(sys.modules[base.__module__])
        body = re.search(rf"^( *)class {base.__name__}\b.*\n((?:(?:\1 .*)?\n)*)", source, re.MULTILINE)
        found |= re.findall(r"^ +(\w+): .*?  # (.*)$", body[2] if body else "", re.MULTILINE)
    return found


def marked_settings(cls: Any, *marks: Mark) -> tuple[str, ...]:
    """Return the names, as in `leaves`, of the settings that have one of the marks."""
    return tuple(name for name, own in leaves(cls).items() if set(marks).intersection(type_metadata(own.type)))


def accepts_none(own: Field[Any]) -> bool:
    """Return True if a setting is optional and empty by default, so that the word none empties it."""
    return own.default in ("", None) and REQUIRED not in type_metadata(own.type)


def flag_of(name: str) -> str:
    """Return the flag of a setting; the flag of `scorer.name` is --scorer."""
    return f"--{name.removesuffix('.name').replace('_', '-')}"


def flags_by_name(cls: Any, group: str = "") -> dict[str, str]:
    """Return the flags of settings by name, for `map_error_names`; settings of `group` also by name without its prefix."""
    found = {name: flag_of(name) for name in leaves(cls)}
    own = {name.removeprefix(f"{group}."): value for name, value in found.items() if name.startswith(f"{group}.")}
    return found | own


def check_bounds(config: Any, place: str = "") -> None:
    """Check that the numbers of a dataclass are within their bounds and the limits of their types.

    Floats must be finite in float32, and integers without a bound must fit 32 bits. place: the name of the dataclass
    in messages, such as eval.sets[1]; without it, messages name the flag.

    Raises:
        ValueError: a number is out of bounds.
    """
    values = values_of(config)
    for key, own in leaves(config).items():
        value = values[key]
        if type(value) in (int, float):
            bound = next(
                (note for note in type_metadata(own.type) if isinstance(note, Bound)), Bound(-math.inf, math.inf)
            )
            limit = FLOAT32_MAX if type(value) is float else 2**31 - 1
            least, most = (end if math.isfinite(end) else math.copysign(limit, end) for end in vars(bound).values())
            if not least <= value <= most:
                rule = f">= {least:.10g}" if value < least else f"<= {most:.10g}" if value > most else "a number"
                name = f"{place}.{key}" if place else flag_of(key)
                raise ValueError(f"{name} must be {rule}, got {value}")


def require(*rules: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first rule that does not hold."""
    for holds, words in rules:
        if not holds:
            raise ValueError(words)


@contextmanager
def prefix_errors(words: str) -> Iterator[None]:
    """Prefix the message of an OSError or ValueError in the block with words such as "--prompts: ".

    If the message begins with that name or an extension of it, as in "prompts_per_step must be ...", the name is
    replaced by its flag instead.

    Raises:
        ValueError: in place of either exception.
    """
    try:
        yield
    except (OSError, ValueError) as exc:
        fault = re.sub(r"^--(\S+): (\1\w*) ", lambda found: f"{flag_of(found[2])} ", f"{words}{exc}")
        raise ValueError(fault) from exc


@contextmanager
def map_error_names(names: Mapping[str, str]) -> Iterator[None]:
    """Replace argument names by flags in the message of an OSError or ValueError in the block.

    names: the flag of each argument, or a flag and a name in its value. All arguments at the start of the message are
    replaced, as in "height and width must be ...". After that, only names with an underscore are replaced, and only by
    plain flags, because other names may be ordinary words.

    Raises:
        ValueError: in place of either exception.
    """

    def named(found: re.Match[str]) -> str:
        own = names.get(found[0].replace("-", "_"), found[0])
        return own if found.start() < begins or ("_" in found[0] and " " not in own) else found[0]

    try:
        yield
    except (OSError, ValueError) as exc:
        begins = len("".join(re.findall(r"^[\w.-]+(?:(?:, | and | x )[\w.-]+)*", str(exc))))
        raise ValueError(re.sub(r"(?<![\w./-])[a-z][\w.-]*\w", named, str(exc))) from exc
