"""What stands beside a setting's type, in its `Annotated`: its bounds, and what may be done with it.

A setting is one line: `lr: Annotated[float, between(0, 1)] = 3e-4  # Learning rate of AdamW`.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Annotated, Any, get_args, get_origin

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


def between(least: float, most: float) -> Bound:
    """Bound a number, both ends included."""
    return Bound(least, most)


def at_least(least: float) -> Bound:
    """Bound a number from below, the end included."""
    return Bound(least, math.inf)


def notes_of(kind: Any) -> tuple[Any, ...]:
    """Return what stands beside a type."""
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def marked(cls: Any, *marks: Mark) -> tuple[str, ...]:
    """Return the names of a dataclass's settings that have one of the marks."""
    return tuple(field.name for field in fields(cls) if set(marks).intersection(notes_of(field.type)))


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def check_bounds(config: Any, place: str = "") -> None:
    """Check that numbers of a dataclass are within their bounds, and fit the arithmetic of their types.

    Floats are finite in float32, and integers without a bound have 32 bits. place: what the messages call the
    dataclass, as eval[1]; a setting of the command line is called by its flag.

    Raises:
        ValueError: one is not.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) in (int, float):
            bound = next((note for note in notes_of(field.type) if isinstance(note, Bound)), Bound(-math.inf, math.inf))
            limit = FLOAT32_MAX if type(value) is float else 2**31 - 1
            least, most = (end if math.isfinite(end) else math.copysign(limit, end) for end in vars(bound).values())
            if not least <= value <= most:
                rule = f">= {least:.10g}" if value < least else f"<= {most:.10g}"
                name = f"{place}.{field.name}" if place else flag_of(field.name)
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
