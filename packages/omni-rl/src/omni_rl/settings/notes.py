"""The help of settings, from the comments beside them."""

import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import NamedTuple

from omni_rl.settings.fields import kind_of


class Note(NamedTuple):
    """The title of a field's group, and its help text."""

    group: str
    text: str


def notes_of_help(cls: type) -> dict[str, Note]:
    """Return the notes of a dataclass's settings, of those that it inherits and of those in its groups."""
    notes: dict[str, Note] = {}
    for base in reversed(cls.__mro__[:-1]):
        notes = field_notes(source_of(base), notes)
    for group in [own for own in fields(cls) if is_dataclass(kind_of(own.type))]:
        inner = notes_of_help(kind_of(group.type))
        notes |= {f"{group.name}.{name}": note for name, note in inner.items()}
    return notes


@cache
def source_of(cls: type) -> str:
    """Return the source of a class at the top of its module. `inspect` would parse the module for each class."""
    module = inspect.getsource(sys.modules[cls.__module__])
    found = re.search(rf"^class {cls.__name__}\b.*?(?=^[^\s)\]])", module + "#", re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def field_notes(source: str, inherited: Mapping[str, Note]) -> dict[str, Note]:
    """Return the inherited notes and those of a dataclass's fields, from the comments in its source.

    The comment beside a field is its help; one on a line of its own is the title of the fields after it. An inherited
    field before any title keeps its own.
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
