"""The order of settings in --help and in recipes: by groups, what most recipes set first. Imports nothing heavy."""

from collections import Counter
from collections.abc import Mapping

from omni_rl.settings.fields import REQUIRED, SHOWN, leaves, marked
from omni_rl.settings.notes import Note, notes_of_help
from omni_rl.settings.toml import from_toml

MOST_SHOWN = 35  # settings in --help; --help-all has the others
FIRST = ("Required", "scorer")  # without which nothing is trained


def title_of(cls: type, name: str, notes: Mapping[str, Note]) -> str:
    """Return the title below which a setting stands: that of what must be given, its table, or its group."""
    return "Required" if name in marked(cls, REQUIRED) else name.rpartition(".")[0] or notes[name].group


def counts_of(cls: type, presets: Mapping[str, str]) -> Counter[str]:
    """Return how many recipes set each setting. presets: TOML by name."""
    return Counter(name for preset, text in presets.items() for name in from_toml(text, cls, preset))


def in_order(cls: type, presets: Mapping[str, str]) -> list[str]:
    """Return the names of all settings: FIRST, then groups by the number of settings that most recipes set.

    In a group those come first, then what some recipes set, then others; of equal ones the trainer's own, in the order
    of the dataclass. So one recipe more rarely changes the order. presets: TOML by name.
    """
    counts, notes, names = counts_of(cls, presets), notes_of_help(cls), list(leaves(cls))
    levels = {name: (2 * counts[name] >= max(1, len(presets))) + (counts[name] > 0) for name in names}
    titles = {name: title_of(cls, name, notes) for name in names}

    def rank(title: str) -> tuple[bool, int, int]:
        found = [levels[name] for name in names if titles[name] == title]
        return title not in FIRST, -found.count(2), -found.count(1)

    groups = sorted(dict.fromkeys(titles.values()), key=rank)
    own = cls.__annotations__
    return sorted(names, key=lambda name: (groups.index(titles[name]), -levels[name], name not in own))


def most_used(cls: type, presets: Mapping[str, str]) -> set[str]:
    """Return the names of the settings in --help: required ones, those of the machine, and what most recipes set."""
    counts, always = counts_of(cls, presets), marked(cls, REQUIRED, SHOWN)
    others = [name for name in leaves(cls) if counts[name] and name not in always]
    others.sort(key=lambda name: -counts[name])
    return {*always, *others[: MOST_SHOWN - len(always)]}
