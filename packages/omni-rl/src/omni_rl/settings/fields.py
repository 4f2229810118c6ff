"""Metadata of settings in `Annotated`: their bounds, and how they may be used.

A setting is one line: `lr: Annotated[float, between(0, 1)] = 3e-4  # Learning rate of AdamW`.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro

ConfigT = TypeVar("ConfigT")
GroupT = TypeVar("GroupT")

FLOAT32_MAX = 3.4028234663852886e38


REQUIRED = "required"  # empty by default, must be given
MAY_CHANGE = "may change"  # may differ from the value in the checkpoint that a run resumes from
SECRET = "secret"  # not written to files that others may read
NO_FLAG = tyro.conf.Suppress  # a table of a TOML file, without a flag
SCORER_FLAG = tyro.conf.arg(name="scorer", prefix_name=False)  # the flag of scorer.name is --scorer
FLAT = tyro.conf.arg(name="")
Flat = Annotated[GroupT, FLAT]  # a group whose settings have no prefix


@dataclass(frozen=True)
class Bound:
    """The least and the greatest value of a number; an infinite bound is the limit of its type."""

    low: float = -math.inf
    high: float = math.inf


at_least = between = Bound  # at_least(low), between(low, high)


def type_metadata(kind: Any) -> tuple[Any, ...]:
    """Return the metadata of an `Annotated` type."""
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def strip_metadata(kind: Any) -> Any:
    """Return a type without its metadata."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def group_prefix(setting: Field[Any], prefix: str) -> str:
    """Return the prefix of the settings in a field's group, such as "lora."; a flat group adds none."""
    return prefix if FLAT in type_metadata(setting.type) else f"{prefix}{setting.name}."


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield the name, such as lr, or correction.low for one in a group, the field, and the value of each setting.

    config: a dataclass, or its class, whose settings have their defaults, or their types without one.
    """
    for setting in fields(config):
        value = getattr(config, setting.name, strip_metadata(setting.type))
        if is_dataclass(value):
            yield from walk(value, group_prefix(setting, prefix))
        else:
            yield f"{prefix}{setting.name}", setting, value


def leaves(config: Any) -> dict[str, Field[Any]]:
    """Return the settings of a dataclass by the names of `walk`."""
    return {name: setting for name, setting, _ in walk(config)}


def values_of(config: Any) -> dict[str, Any]:
    """Return the values of a dataclass, or the defaults of its class, by the names of `walk`."""
    return {name: value for name, _, value in walk(config)}


def build(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build the dataclass from values by the names of `walk`, and its defaults for the rest.

    Raises:
        TypeError: a name is not a setting.
    """
    return cls(**vars(build_unresolved(cls, values)))


def build_unresolved(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build the dataclass as `build` does, but without `__post_init__`, which derives defaults from other values."""
    if unknown := values.keys() - leaves(cls):
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    config = object.__new__(cls)
    vars(config).update(with_values(cls, values))
    return config


def with_values(config: Any, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a dataclass by field name, with those in `values` by the names of `walk`."""
    changed: dict[str, Any] = {}
    for setting in fields(config):
        value = getattr(config, setting.name)
        group: Any = type(value)
        changed[setting.name] = (
            group(**with_values(value, values, group_prefix(setting, prefix)))
            if is_dataclass(value)
            else values.get(f"{prefix}{setting.name}", value)
        )
    return changed


def change(config: ConfigT, **values: Any) -> ConfigT:
    """Return a copy of the dataclass with other values, by the names of `walk` with _ for dots: lora_rank."""
    names = {name.replace(".", "_"): name for name in leaves(type(config))}
    return build(type(config), values_of(config) | {names.get(name, name): value for name, value in values.items()})


def flatten(config: Any) -> dict[str, object]:
    """Return the values of a dataclass by the names of `walk`, in the form that checkpoints store."""
    return {
        name: [*map(asdict, value)] if isinstance(value, tuple) else value for name, value in values_of(config).items()
    }


@cache
def field_comments(cls: Any) -> dict[str, str]:
    """Return the comments beside the fields of a dataclass and its bases, by name."""
    comments, bases = dict[str, str](), list[Any](filter(is_dataclass, reversed(cls.__mro__)))
    for base in bases:
        source = inspect.getsource(sys.modules[base.__module__])
        body = re.search(rf"^( *)class {base.__name__}\b.*\n((?:(?:\1 .*)?\n)*)", source, re.MULTILINE)
        comments |= re.findall(r"^ +(\w+): .*?  # (.*)$", body[2] if body else "", re.MULTILINE)
    return comments


def marked_settings(cls: Any, *marks: str) -> tuple[str, ...]:
    """Return the names, as in `walk`, of the settings that have one of the marks."""
    return tuple(name for name, setting in leaves(cls).items() if set(marks).intersection(type_metadata(setting.type)))


def accepts_none(setting: Field[Any]) -> bool:
    """Return True if a setting is optional and empty by default, so that the word none empties it."""
    return setting.default in ("", None) and REQUIRED not in type_metadata(setting.type)


def flag_of(name: str) -> str:
    """Return the flag of a setting; the flag of `scorer.name` is --scorer."""
    return f"--{name.removesuffix('.name').replace('_', '-')}"


def flags_by_name(cls: Any, group: str = "") -> dict[str, str]:
    """Return the flags of settings by name, for `map_error_names`; those of `group` also without its prefix."""
    flags = {name: flag_of(name) for name in leaves(cls)}
    group_flags = {
        name.removeprefix(f"{group}."): value for name, value in flags.items() if name.startswith(f"{group}.")
    }
    return flags | group_flags


def check_bounds(config: Any, place: str = "") -> None:
    """Check that the numbers of a dataclass are within their bounds and the limits of their types.

    Floats must be finite in float32, and integers without a bound must fit 32 bits. place: the name of the dataclass
    in messages, such as eval.sets[1]; without it, messages name the flag.

    Raises:
        ValueError: a number is out of bounds.
    """
    for key, setting, value in walk(config):
        if type(value) in (int, float):
            bound = next((each for each in type_metadata(setting.type) if isinstance(each, Bound)), Bound())
            limit = FLOAT32_MAX if type(value) is float else 2**31 - 1
            low, high = (end if math.isfinite(end) else math.copysign(limit, end) for end in vars(bound).values())
            if not low <= value <= high:
                rule = f">= {low:.10g}" if value < low else f"<= {high:.10g}" if value > high else "a number"
                name = f"{place}.{key}" if place else flag_of(key)
                raise ValueError(f"{name} must be {rule}, got {value}")


def require(*rules: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first rule that does not hold."""
    for condition, message in rules:
        if not condition:
            raise ValueError(message)


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Prefix the message of an OSError or ValueError in the block with words such as "--prompts: ".

    If the message begins with that name or an extension of it, as in "prompts_per_step must be ...", the name is
    replaced by its flag instead.

    Raises:
        ValueError: in place of either exception.
    """
    try:
        yield
    except (OSError, ValueError) as exc:
        message = re.sub(r"^--(\S+): (\1\w*) ", lambda match: f"{flag_of(match[2])} ", f"{prefix}{exc}")
        raise ValueError(message) from exc


@contextmanager
def map_error_names(names: Mapping[str, str]) -> Iterator[None]:
    """Replace argument names by flags in the message of an OSError or ValueError in the block.

    names: the flag of each argument, or a flag and a name in its value. All arguments at the start of the message are
    replaced, as in "height and width must be ...". After that, only names with an underscore are replaced, and only by
    plain flags, because other names may be ordinary words.

    Raises:
        ValueError: in place of either exception.
    """

    def replace_name(match: re.Match[str]) -> str:
        flag = names.get(match[0].replace("-", "_"), match[0])
        return flag if match.start() < subject_end or ("_" in match[0] and " " not in flag) else match[0]

    try:
        yield
    except (OSError, ValueError) as exc:
        subject_end = len("".join(re.findall(r"^[\w.-]+(?:(?:, | and | x )[\w.-]+)*", str(exc))))
        raise ValueError(re.sub(r"(?<![\w./-])[a-z][\w.-]*\w", replace_name, str(exc))) from exc
