"""The prompt files of a place: a file, or a split of a folder or of a data set on the hub.

Splits are those configured in the data set's card, README.md, or otherwise those in file names: the word before
-00000-of-00002 in a file name, or one of SPLITS in a file or folder name. Other files form one split without a name.
"""

import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from omni_train.hub import DATA_SET, check_named, fetch_chosen, local_file, read_card

TABLES = (".parquet", ".jsonl", ".csv", ".tsv")  # the kinds of files of folders and data sets
SPLITS = {"train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}
SHARD = re.compile(r"(\w[\w-]*)-[0-9]{5}-of-([0-9]{5})\b.*")
MAX_DEPTH, MAX_NAMES = 3, 100_000  # limits for the tables of a listed folder
CARD = "README.md"


def data_files(place: str | Path) -> list[Path]:
    """Return the prompt files of a place, of one kind and in one folder, sorted by name.

    A file stands for itself. A folder, or hf://datasets/OWNER/NAME, optionally with @REVISION, stands for its only
    split; followed by /SPLIT, /SUBSET or /SUBSET/SPLIT, for that split. Files of an address are downloaded if the hub's
    cache does not have them.

    Raises:
        ValueError: there is no such file, folder or split, or there are several splits, which the message lists.
    """
    text, path = str(place), Path(place)
    if text.startswith("hf:") and path.suffix not in (".txt", *TABLES) and (match := DATA_SET.fullmatch(text)):
        if "." not in (requested := match["rest"] or ""):
            return fetch_chosen(text, match, lambda names, card: _hub_files(names, card, requested, match["set"]))
    elif not text.startswith("hf:"):
        for folder in (path, *path.parents[:2]):
            is_split = folder != path and not path.suffix and not path.exists() and folder != Path()
            if folder.is_dir() and (folder == path or (is_split and _has_splits(folder, path))):
                card = read_card(folder / CARD) if (folder / CARD).is_file() else {}
                requested = path.relative_to(folder).as_posix() if is_split else ""
                return [folder / name for name in split_files(_names(folder), card, requested, str(folder))]
    kinds = f"{', '.join(('.txt', *TABLES[:-1]))} or {TABLES[-1]}, or be a folder or a data set of such files"
    if path.suffix not in (".txt", *TABLES):
        raise ValueError(f"path must end in {kinds}, got {place}")
    check_named(place, ())
    return [local_file(place)]


def split_files(names: Sequence[str], card: Mapping[str, Any], requested: str, place: str) -> list[str]:
    """Return the names of a split's files, sorted.

    names: all files of a folder or a data set, relative to it. card: fields of its card. requested: a split, a subset,
    or SUBSET/SPLIT; "" means the only split. place: the folder or the data set.

    Raises:
        ValueError: as in `data_files`; or files of the split are missing, or of several kinds or in several folders.
    """
    data = [name for name in names if name.endswith(TABLES) and not re.search(r"(^|/)[._]", name)]
    if not data:
        arrow = any(name.endswith(".arrow") for name in names)
        hint = "; Dataset.to_parquet writes one of the .arrow files there" if arrow else ""
        kinds = f"{', '.join(TABLES[:-1])} or {TABLES[-1]}"
        raise ValueError(f"path must be a folder or a data set with files of {kinds}, found none in {place}{hint}")
    splits: dict[tuple[str, str], list[str]] = {}
    for subset, split, name in (
        _files_from_card(data, card["configs"]) if card.get("configs") else map(_split_from_name, data)
    ):
        splits.setdefault((subset, split), []).append(name)
    if any(split for _, split in splits):
        splits = {key: files for key, files in splits.items() if key[1]}
    matching = [key for key in splits if requested in ("", *key, "/".join(key))]
    if len(matching) != 1:
        first = len({subset for subset, _ in splits}) == 1  # first part of a name that differs from all others
        listed = sorted("/".join((place, *filter(None, key[first:]))) for key in splits)
        got = f"{place}/{requested}" if requested else place
        raise ValueError(f"path must name one of the splits {', '.join(listed[:20])}, got {got}")
    files = sorted({*splits[matching[0]]})
    if missing := sorted({*files}.difference(data)):
        rule = f"a split must have all of its files, of {', '.join(TABLES)}"
        raise ValueError(f"{rule}, {place} has no {missing[0]}, which {CARD} names")
    _check_split(files, place)
    return files


def _hub_files(names: Sequence[str], card: Mapping[str, Any], requested: str, place: str) -> list[str]:
    script = f"{place.split('@')[0].rpartition('/')[2]}.py"
    if script in names:
        hint = "give one of its files by name, or the hub's own conversion, NAME@~parquet"
        raise ValueError(
            f"path must be a data set of files, got {place}, whose {script} is a script, never run: {hint}"
        )
    return split_files(names, card, requested, place)


def _has_splits(folder: Path, path: Path) -> bool:
    """Return True if a folder above a path may have it as a split: it has tables or, one level up, a card."""
    return next(_tables(folder), None) is not None if folder == path.parent else (folder / CARD).is_file()


def _names(folder: Path) -> list[str]:
    """Return the names of a folder's tables, relative to it. Raises ValueError if there are more than MAX_NAMES."""
    if len(names := [*islice(_tables(folder), MAX_NAMES + 1)]) > MAX_NAMES:
        raise ValueError(f"path must be a folder with at most {MAX_NAMES} files of prompts, got {folder}")
    return names


def _tables(folder: Path) -> Iterator[str]:
    """Yield the names of a folder's tables and .arrow files, relative to it, down to MAX_DEPTH levels."""
    for home, folders, files in os.walk(folder):
        relative = Path(home).relative_to(folder)
        deeper = len(relative.parts) < MAX_DEPTH - 1
        folders[:] = [name for name in folders if deeper and not name.startswith((".", "_"))]
        for name in files:
            if name.endswith((*TABLES, ".arrow")) and (Path(home) / name).is_file():
                yield (relative / name).as_posix()


def _files_from_card(names: Sequence[str], configs: object) -> Iterator[tuple[str, str, str]]:
    """Yield the subset, split and name of each file that a card configures; a file that it names may be missing.

    Raises:
        ValueError: the card does not have the hub's format.
    """
    for config in configs if isinstance(configs, list) else [configs]:
        if not isinstance(config, dict):
            raise ValueError(f"{CARD}: configs must be a list of objects, got {reprlib.repr(config):.80}")
        subset, folder = (_read_text_field(config, key) for key in ("config_name", "data_dir"))
        home = f"{folder.strip('/')}/" if folder.strip("/") else ""
        if not (data_files := config.get("data_files")):
            yield from ((subset, _split_from_name(name)[1], name) for name in names if name.startswith(home))
        for split, patterns in _patterns(data_files or []):
            for pattern in (f"{home}{path.removeprefix('./')}" for path in patterns):
                files = (
                    [name for name in names if _matches(name, pattern)] if re.search(r"[*?[]", pattern) else [pattern]
                )
                yield from ((subset, split, name) for name in files)


def _read_text_field(config: Mapping[str, object], key: str) -> str:
    """Return the text under a key of a config, "" if it has none."""
    if (value := config.get(key)) is not None and not isinstance(value, str):
        raise ValueError(f"{CARD}: {key} must be a text, got {reprlib.repr(value):.80}")
    return value or ""


def _patterns(value: object) -> Iterator[tuple[str, list[str]]]:
    """Yield the splits in a card's data_files, and the patterns of their files."""
    for part in value if isinstance(value, list) else [value]:
        if not isinstance(part, dict):
            pairs = [("train", part)]
        else:
            pairs = [(part["split"], part.get("path"))] if "split" in part else [*part.items()]
        for split, paths in pairs:
            patterns = paths if isinstance(paths, list) else [paths]
            if not (isinstance(split, str) and all(isinstance(item, str) for item in patterns)):
                rule = "data_files must be a path, a list, or a list of splits with paths"
                raise ValueError(f"{CARD}: {rule}, got {reprlib.repr(part):.80}")
            yield split, [*map(str, patterns)]


def _split_from_name(name: str) -> tuple[str, str, str]:
    """Return the subset and split that a file's name and folders indicate, and the name."""
    *folders, file = name.split("/")
    if shard := SHARD.fullmatch(file):
        return "/".join(folders), shard[1], name
    for place, text in reversed([*enumerate([*folders, file])]):
        if splits := [word for word in re.split("[^a-z]+", text.lower()) if word in SPLITS]:
            return "/".join(folders[:place]), splits[0], name
    return "/".join(folders), "", name


def _matches(name: str, pattern: str) -> bool:
    """Return True if a name matches a pattern, in which ** matches any folders."""
    parts = name.split("/")
    places = {0}  # positions in the name up to which the pattern matches
    for piece in pattern.removeprefix("./").split("/"):
        if piece == "**":
            places = set(range(min(places, default=len(parts) + 1), len(parts) + 1))
        else:
            places = {place + 1 for place in places if place < len(parts) and fnmatchcase(parts[place], piece)}
    return len(parts) in places


def _check_split(files: Sequence[str], place: str) -> None:
    """Raise ValueError unless the files of a split are of one kind, in one folder, and complete."""
    paths = [*map(PurePosixPath, files)]
    for rule, kinds in (("of one kind", {p.suffix for p in paths}), ("in one folder", {str(p.parent) for p in paths})):
        if len(kinds) > 1:
            raise ValueError(f"the files of a split must be {rule}, got {', '.join(sorted(kinds))} in {place}")
    counts = {shard[2] for path in paths if (shard := SHARD.fullmatch(path.name))}
    if counts not in (set(), {f"{len(files):05}"}):
        raise ValueError(f"a split must have all of its files, got {len(files)} in {place}, as {files[0]}")
