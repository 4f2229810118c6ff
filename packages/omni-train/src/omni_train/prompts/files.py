"""Prompt files: every line is checked before any weights are loaded."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from omni_train.files import check_depth, check_fetched
from omni_train.hub import real_roots
from omni_train.prompts.chats import FILES, check_media, check_placeholders, extract_chat, single_text
from omni_train.prompts.splits import data_files
from omni_train.prompts.table import MAX_UNPACKED, MIN_TOTAL_BYTES, csv_lines, media_folder, table_lines

MAX_LINE_CHARS = 2**16  # of a record, which is sent to the scorer with every image
MAX_SIDE = 16_384  # pixels
TEXTS = (".txt", ".jsonl")


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of the file.

    index: number of the prompt in file order, from 0. meta: all other keys of the line. images: reference images.
    size: (height, width) in pixels; None for that of the run. audio, video: files that the prompt refers to.
    """

    index: int
    text: str
    negative: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)
    images: tuple[Path, ...] = ()
    size: tuple[int, int] | None = None
    audio: Path | None = None
    video: Path | None = None


RecordCheck = Callable[[PromptRecord], object]  # raises ValueError for an unusable record
Parse = Callable[[int, str], PromptRecord]  # from an index and a line


def load_prompts(
    path: str | Path, *, check: RecordCheck | None = None, media_root: str | Path = "", key: str = ""
) -> list[PromptRecord]:
    """Return all prompts of a file, or of the files of a folder or a data set, in order.

    path: a `.txt`, `.jsonl`, `.parquet`, `.csv` or `.tsv` file, or any other place that `splits.data_files` accepts.
    check: called with each prompt. media_root: another folder in which prompts may name files; "" means none. key: key
    of the prompt, a text or a chat; "" means "prompt" or "messages".

    Raises:
        ValueError: another suffix, an unreadable file, no prompts, a malformed line or an error raised by `check` (with
            the number of the line or row), or pyarrow is not installed.
    """
    lines, parse = read_lines(path, check, media_root, key)
    return [parse(index, line) for index, line in enumerate(lines)]


def read_lines(
    place: str | Path, check: RecordCheck | None, media_root: str | Path, key: str
) -> tuple[list[str], Parse]:
    """Return the checked lines of the files that hold a prompt, and the function that parses a line."""
    paths = data_files(place)
    home, suffix = paths[0].parent, paths[0].suffix
    folders = [home, media_folder(), *([media_root] if media_root else [])]
    place_of = partial(_resolve_file, [root for folder in folders for root in real_roots(folder)], home)
    parse: Parse = PromptRecord if suffix == ".txt" else partial(_parse_json, place_of, key)
    kept: list[str] = []
    size = sum(path.stat().st_size for path in paths if path.exists())
    num_chars, most_chars = 0, max(MIN_TOTAL_BYTES, MAX_UNPACKED * size)
    for path in paths:
        with suppress(OSError):  # reading the file reports it
            check_fetched(path)
        for number, line in enumerate(_raw_lines(path), start=1):
            try:
                if len(line) > MAX_LINE_CHARS:
                    raise ValueError(f"must have at most {MAX_LINE_CHARS} characters, got {len(line)}")
                if (num_chars := num_chars + len(line)) > most_chars:  # many small files may unpack to large ones
                    raise ValueError(f"must have at most {most_chars} characters with all before it, got {num_chars}")
                if line:
                    record = parse(len(kept), line)
                    if check:
                        check(record)
                    kept.append(line)
            except ValueError as exc:
                raise ValueError(f"{path}, {'line' if suffix in TEXTS else 'row'} {number}: {exc}") from exc
    if not kept:
        raise ValueError(f"path must hold at least one prompt, {place} is empty")
    return kept, parse


def read_rows(path: Path, media_keys: Collection[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a table with any columns, each with its file and number.

    media_keys: columns of a parquet file that may hold files as bytes, which are replaced by paths in `media_folder`;
    other columns with bytes are omitted.

    Raises:
        ValueError: as in `load_prompts`, except for unknown keys.
    """
    for number, line in enumerate(_raw_lines(path, media_keys), start=1):
        place = f"{path}, {'line' if path.suffix in TEXTS else 'row'} {number}"
        if line:
            try:
                yield place, _parse_object(line)
            except ValueError as exc:
                raise ValueError(f"{place}: {exc}") from exc


def _raw_lines(path: Path, media_keys: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines of a file, or the rows of a table as JSON lines; a line without a prompt is empty."""
    if path.suffix == ".parquet":
        keys = media_keys or (*FILES.values(), "messages")
        return table_lines(path, keys, skip_bytes=bool(media_keys))
    text = _read_text(path)
    if path.suffix in TEXTS:
        return map(str.strip, text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    return csv_lines(text, path)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as exc:
        raise ValueError(f"path must be a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        number = data.count(b"\n", 0, exc.start) + 1
        raise ValueError(f"{path}, line {number}: must be UTF-8, got the byte {data[exc.start]:#04x}") from exc


def _resolve_file(roots: Sequence[Path], folder: Path, key: str, name: str) -> Path:
    """Return the file that a line names under a key, relative to `folder`; it must be below one of the roots."""
    path = folder / name
    if not any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots):
        rule = "must name files in the folder of the prompts or below it, or below media_root"
        raise ValueError(f'"{key}" {rule}, got {name!r:.80}')
    return path


def _parse_json(place_of: Callable[[str, str], Path], key: str, index: int, line: str) -> PromptRecord:
    """Parse the prompt of a JSON line. key: key of the prompt; "" means "prompt" or "messages"."""
    entry = _parse_object(line)
    check_media(entry)
    text, negative = _pop_prompt(entry, key), single_text(entry.pop("negative_prompt", None), "negative_prompt")
    images = entry.get("images")
    names = [images] if type(images) is str else [] if images is None else images
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError(f'"images" must be a path or a list of paths, got {images!r:.80}')
    if _SURROGATE.search(line):  # an escape, possibly half of a pair, which is not valid UTF-8
        try:
            json.dumps([text, negative, entry], ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"must be Unicode, got {exc.object[exc.start]!r}, half of a surrogate pair") from exc
    check_placeholders(text, entry)
    references = tuple(place_of("images", name) for name in names)
    audio, video = (_path(entry, key, place_of) for key in ("audio", "video"))
    return PromptRecord(index, text, negative, entry, references, _size(entry), audio, video)


def _parse_object(line: str) -> dict[str, object]:
    """Parse a JSON line that holds a single object."""
    try:
        entry, end = _DECODER.raw_decode(line)
        check_depth(entry, line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"not valid JSON: {getattr(exc, 'msg', exc)}") from exc
    if end < len(line):
        raise ValueError(f"not valid JSON: more than one value, the second at character {end + 1}")
    if type(entry) is not dict:
        raise ValueError(f"must be a JSON object, got {type(entry).__name__}")
    return entry


def _pop_prompt(entry: dict[str, object], key: str) -> str:
    """Remove the prompt from a line and return its text; a chat stays in the line, as "messages"."""
    name = key or ("messages" if "messages" in entry else "prompt")
    if name not in entry:
        expected = f"{json.dumps(key)}, as --prompt-key says" if key else '"prompt" or "messages"'
        others = "" if key else ": --prompt-key names another one"
        raise ValueError(f"must have the key {expected}, got the keys {sorted(entry)}{others}")
    value = entry.pop(name)
    if key:
        entry.pop("messages", None)  # not the prompt
    if name == "messages" or type(value) is list:
        for other in ("system",) if key else ("prompt", "system"):
            if other in entry:
                raise ValueError(f'"{other}" must be left out beside messages, got {entry[other]!r:.80}')
        return extract_chat(value, entry)
    if type(value) is not str:
        raise ValueError(f'"{name}" must be a string, got {type(value).__name__}')
    if not value.strip():
        raise ValueError(f'"{name}" must not be empty')
    if CHAT_TEXT.match(value):
        raise ValueError(f'"{name}" must be a chat or a text, got a chat that was written as text, {value!r:.80}')
    return value


def _path(entry: Mapping[str, object], key: str, place_of: Callable[[str, str], Path]) -> Path | None:
    """Return the file that a line names under a key, or None."""
    name = entry.get(key)
    if name is not None and type(name) is not str:
        raise ValueError(f'"{key}" must be a path, got {name!r:.80}')
    return place_of(key, name) if isinstance(name, str) else None


def _size(entry: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the (height, width) of a line, or None."""
    height, width = entry.get("height"), entry.get("width")
    if height is width is None:
        return None
    if not (type(height) is type(width) is int and 1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        rule = f'"height" and "width" must both be whole numbers of pixels from 1 to {MAX_SIDE}'
        raise ValueError(f"{rule}, got {height!r:.80} and {width!r:.80}")
    return height, width


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number:.40} is no finite number")
    return value


def _reject_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_reject_constant)
CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']""")  # a chat as a text in CSV
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
