"""Settings as TOML, in recipes, files and the folders of runs. Imports nothing heavy."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field
from difflib import get_close_matches
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from omni_train.hub import check_named, is_from_hub, local_file

from omni_rl.settings.fields import (
    SECRET,
    build,
    flag_of,
    leaves,
    prefix_errors,
    require,
    strip_metadata,
    type_metadata,
    values_of,
    walk,
)

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def load_recipes(app: str) -> dict[str, str]:
    """Return the recipes of a program, as TOML texts by name."""
    folder = files("omni_rl") / "recipes" / app
    if not folder.is_dir():
        return {}
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return {name: (folder / f"{name}.toml").read_text("utf-8") for name in names}


def from_files(cls: type, preset: str, path: str, presets: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a preset, overridden by those of a TOML file; "" for none.

    Raises:
        ValueError: the preset does not exist, or the file cannot be read or has settings that do not fit.
    """
    values: dict[str, Any] = {}
    if preset:
        if preset not in presets:
            hint = suggest(preset, presets)
            raise ValueError(f"--preset must name a recipe, which --list-presets lists, got {preset!r}{hint}")
        settings = from_toml(presets[preset], cls, f"--preset {preset}")
        values |= {name: resolve_place(value) for name, value in settings.items()}
    if path:
        with prefix_errors("--config: "):
            check_named(path, (".toml",) if is_from_hub(path) else ())
            file = local_file(path)
        try:
            settings = from_toml(file.read_text(encoding="utf-8"), cls, path)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as exc:
            raise ValueError(f"--config must be a readable TOML file, got {path}: {exc}") from exc
        if is_from_hub(path):
            check_hub_config(cls, settings, path)
        values |= settings
    return values


def resolve_place(value: object) -> object:
    """Return a recipe's value, or the path in this package of a file that is missing in the working folder."""
    if isinstance(value, str) and value.startswith(("checkpoints/", "data/")) and not Path(value).exists():
        shipped = Path(str(files("omni_rl") / "shipped" / value))
        return str(shipped) if shipped.exists() else value
    return value


def from_toml(text: str, cls: type, place: str) -> dict[str, Any]:
    """Return the settings in a TOML text by the names of `walk`. place: name of the text in messages.

    Raises:
        ValueError: the text is not TOML, or has an unknown key or table, or a value of the wrong type.
    """
    settings, values = leaves(cls), dict[str, Any]()
    for name, value in flatten_tables(tomllib.loads(text)).items():
        if name not in settings:
            raise ValueError(f"{place}: unknown key {name!r}{suggest(name, settings)}")
        read = read_tables if get_origin(strip_metadata(settings[name].type)) is tuple else coerce
        values[name] = read(settings[name], value, f"{place}: {name}")
    return values


def flatten_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a TOML text by name, such as correction.low for low in [correction]."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        values |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return values


def read_tables(setting: Field[Any], value: object, place: str) -> tuple[object, ...]:
    """Return the tables [[key]] as dataclasses of the setting's type. place: their name in messages.

    Raises:
        ValueError: the value is not a list of tables, or a table has an unknown key or a value of the wrong type.
    """
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError(f"{place} must be tables, each below a line of its own with two brackets, got {value!r:.80}")
    cls, rows = get_args(strip_metadata(setting.type))[0], []
    keys = leaves(cls)
    for number, row in enumerate(value, start=1):
        for key in row.keys() - keys.keys():
            raise ValueError(f"{place}[{number}]: unknown key {key!r}{suggest(key, keys)}")
        rows.append(cls(**{key: coerce(keys[key], item, f"{place}[{number}].{key}") for key, item in row.items()}))
    return tuple(rows)


def to_toml(config: Any) -> str:
    """Return the dataclass as TOML, one key per line, without keys that are None."""
    tables, rows = {"": ""}, ""
    for name, value in values_of(config).items():
        group, _, key = name.rpartition(".")
        if isinstance(value, tuple):
            rows += "".join(f"\n[[{name}]]\n{to_toml(row)}" for row in value)
        elif value is not None:
            head = f"\n[{group}]\n" * bool(group)
            tables[group] = f"{tables.get(group, head)}{key} = {json.dumps(value, ensure_ascii=False)}\n"
    return ("".join(tables.values()) + rows).replace("\x7f", "\\u007f")  # JSON does not escape DEL, TOML does


def check_hub_config(cls: type, values: Mapping[str, Any], path: str) -> None:
    """Check that settings of a file from the hub choose no server, secret, command, media root or Python code.

    Raises:
        ValueError: a setting does.
    """
    for name, setting, value in chain(*map(walk, values.get("eval.sets", ())), walk(build(cls, values))):
        is_place = SECRET in type_metadata(setting.type) or name == "media_root"
        words = ("python:", "://") if name in ("scorer.name", "eval.gold_scorer") else ("python:",)
        found = name if is_place and value else next((f"{word} in {name}" for word in words if word in str(value)), "")
        rule = f"must not name {found}: give the flag, or a copy of the file that you have read"
        require((not found, f"--config {path} {rule}, got {value!r}"))


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name, beginning with "; ", or "" if no name is close.

    The order is: what other_names.toml says, a very close known name, the first known name that contains this one, the
    closest known name.
    """
    names, word, others = list(known), flag_of(name.lstrip("-")).lstrip("-"), read_other_names()
    flags, last_part = {flag_of(candidate.lstrip("-")) for candidate in names}, word.rpartition(".")[2]
    if last_part in others["missing"] and not any(flag.endswith(f".{last_part}") for flag in flags):
        return f"; {others['missing'][last_part]}"
    equivalents = others["equivalents"].get(word, ())
    if found := [each for each in equivalents if each[:2] != "--" or each.split()[0].strip(",") in flags]:
        return f"; use {' or '.join(found)}"
    containing = [candidate for candidate in names if name in candidate and len(name) > 3]
    closest, close = (get_close_matches(name, names, n=1, cutoff=cutoff) for cutoff in (0.9, 0.7))
    matches = closest or containing or close
    return f"; did you mean {matches[0]!r}?" if matches else ""


def read_other_names() -> dict[str, dict[str, Any]]:
    """Return the tables of other_names.toml."""
    return tomllib.loads(Path(__file__).with_name("other_names.toml").read_text("utf-8"))


def coerce(setting: Field[Any], value: object, place: str) -> object:
    """Return the value as the type of a setting; an integer may stand for a float, and the word none for None.

    Raises:
        ValueError: the value has another type; the message begins with `place`.
    """
    kind = strip_metadata(setting.type)
    kinds = get_args(kind) or (kind,)  # choices, or the members of a union such as int | None
    if type(None) in kinds and value in ("none", "None"):
        return None
    if get_origin(kind) is Literal:
        if value not in kinds:
            hint = suggest(str(value), map(str, kinds))
            raise ValueError(f"{place} must be one of {', '.join(map(repr, kinds))}, got {value!r}{hint}")
        return value
    if float in kinds and type(value) is int:
        return float(value)
    require((type(value) in kinds, f"{place} must be {KINDS.get(kinds[0])}, got {value!r}"))
    return value
