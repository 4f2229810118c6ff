"""Prompt files: every line is checked before any weight is loaded."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from omni_train.hub import check_named, local_file, real_roots
from omni_train.prompts.table import media_folder, table_lines

MAX_LINE_CHARS = 2**16  # of a record, which is sent to the scorer with every image
MAX_SIDE = 16_384  # pixels
ROLES = ("system", "user", "assistant")
FILES = {"image": "images", "audio": "audio", "video": "video"}  # kinds of parts of messages -> the line's key of files


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of the file.

    index: counts prompts from 0 in file order. meta: all other keys of the line. images: files of references.
    size: (height, width) in pixels, None for the run's. audio, video: files that the prompt refers to.
    """

    index: int
    text: str
    negative: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)
    images: tuple[Path, ...] = ()
    size: tuple[int, int] | None = None
    audio: Path | None = None
    video: Path | None = None


RecordCheck = Callable[[PromptRecord], object]  # raises ValueError for what cannot be used
Parse = Callable[[int, str], PromptRecord]  # of an index and a line


def load_prompts(
    path: str | Path, *, check: RecordCheck | None = None, media_root: str | Path = ""
) -> list[PromptRecord]:
    """Return all prompts of a `.txt`, `.jsonl` or `.parquet` file, in file order.

    check: called with each prompt. media_root: another folder in which prompts may name files; "" is none.

    Raises:
        ValueError: another suffix, a file that cannot be read or is empty, a malformed line or what `check` raises
            (named with the number of the line or row), or pyarrow is not installed.
    """
    lines, parse = read_lines(path, check, media_root)
    return [parse(index, line) for index, line in enumerate(lines)]


def read_lines(place: str | Path, check: RecordCheck | None, media_root: str | Path) -> tuple[list[str], Parse]:
    """Return the checked lines of a file that hold a prompt, and the function that parses one."""
    check_named(place, (".txt", ".jsonl", ".parquet"))
    path = local_file(place)
    folders = [path.parent, media_folder(), *([media_root] if media_root else [])]
    place_of = partial(_file_in, [root for folder in folders for root in real_roots(folder)], path.parent)
    parse: Parse = PromptRecord if path.suffix == ".txt" else partial(_parse_json, place_of)
    is_table = path.suffix == ".parquet"
    lines = table_lines(path, (*FILES.values(), "messages")) if is_table else _text_lines(path)
    kept: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            if len(line) > MAX_LINE_CHARS:
                raise ValueError(f"must have at most {MAX_LINE_CHARS} characters, got {len(line)}")
            if line:
                record = parse(len(kept), line)
                if check:
                    check(record)
                kept.append(line)
        except ValueError as exc:
            raise ValueError(f"{path}, {'row' if is_table else 'line'} {number}: {exc}") from exc
    if not kept:
        raise ValueError(f"path must hold at least one prompt, {path} is empty")
    return kept, parse


def _text_lines(path: Path) -> Iterator[str]:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as exc:
        raise ValueError(f"path must be a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        number = data.count(b"\n", 0, exc.start) + 1
        raise ValueError(f"{path}, line {number}: must be UTF-8, got the byte {data[exc.start]:#04x}") from exc
    return map(str.strip, text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))


def _file_in(roots: Sequence[Path], folder: Path, key: str, name: str) -> Path:
    """Return the file that a line names under a key, relative to `folder`, which must be below one of the roots."""
    path = folder / name
    if not any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots):
        rule = "must name files in the folder of the prompts or below it, or below media_root"
        raise ValueError(f'"{key}" {rule}, got {name!r:.80}')
    return path


def _parse_json(place_of: Callable[[str, str], Path], index: int, line: str) -> PromptRecord:
    try:
        entry, end = _DECODER.raw_decode(line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"not valid JSON: {getattr(exc, 'msg', exc)}") from exc
    if end < len(line):
        raise ValueError(f"not valid JSON: more than one value, the second at character {end + 1}")
    if type(entry) is not dict:
        raise ValueError(f"must be a JSON object, got {type(entry).__name__}")
    if "prompt" not in entry and "messages" not in entry:
        raise ValueError(f'must have the key "prompt" or "messages", got the keys {sorted(entry)}')
    is_chat = "messages" in entry or type(entry["prompt"]) is list
    text, negative = _take_chat(entry) if is_chat else entry.pop("prompt"), entry.pop("negative_prompt", "")
    for key, value in (("prompt", text), ("negative_prompt", negative)):
        if type(value) is not str:
            raise ValueError(f'"{key}" must be a string, got {type(value).__name__}')
    if not text.strip() and not is_chat:  # a message may be only a sound
        raise ValueError('"prompt" must not be empty')
    images = entry.get("images", [])
    names = [images] if type(images) is str else images
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError(f'"images" must be a path or a list of paths, got {images!r:.80}')
    if _SURROGATE.search(line):  # an escape, maybe half of a pair, which is not valid UTF-8
        try:
            json.dumps([text, negative, entry], ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"must be Unicode, got {exc.object[exc.start]!r}, half of a surrogate pair") from exc
    references = tuple(place_of("images", name) for name in names)
    audio, video = (_path(entry, key, place_of) for key in ("audio", "video"))
    return PromptRecord(index, text, negative, entry, references, _size(entry), audio, video)


def _take_chat(entry: dict[str, object]) -> str:
    """Return the text of a chat's last message; move its files to the keys of other lines, the chat to "messages"."""
    messages = entry.pop("messages") if "messages" in entry else entry.pop("prompt")
    for key in ("prompt", "system"):
        if key in entry:
            raise ValueError(f'"{key}" must be left out beside messages, got {entry[key]!r:.80}')
    if type(messages) is not list or not messages:
        raise ValueError(f'"messages" must be a list with at least one, got {messages!r:.80}')
    files: dict[str, list[object]] = {kind: [] for kind in FILES}
    chat: list[dict[str, object]] = []
    text = ""
    for number, message in enumerate(messages, start=1):
        if type(message) is not dict or message.keys() != {"role", "content"} or message["role"] not in ROLES:
            rule = f'message {number} must have "content" and a "role" of {", ".join(ROLES)}, and no more'
            raise ValueError(f"{rule}, got {message!r:.80}")
        content = message["content"]
        given = [{"type": "text", "text": content}] if type(content) is str else content
        if type(given) is not list:
            raise ValueError(f'message {number}: "content" must be a string or a list of parts, got {content!r:.80}')
        parts = [_part(part, files, number) for part in given]
        text = "".join(part.get("text", "") for part in parts)
        is_text = all(part["type"] == "text" for part in parts)
        if is_text and not text.strip():
            raise ValueError(f"message {number} must not be empty")
        chat.append({"role": message["role"], "content": text if is_text else parts})
    if chat[-1]["role"] != "user":
        raise ValueError(f"the last message must be the user's, got {chat[-1]['role']!r}")
    for kind, key in FILES.items():
        _place_files(entry, key, files[kind])
    entry["messages"] = chat
    return text


def _part(part: object, files: Mapping[str, list[object]], number: int) -> dict[str, str]:
    """Return a part of a message as templates read it; append its file to `files`, or None if the line names it."""
    given = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    kind = given.get("type")
    if kind == "text" and given.keys() == {"type", "text"} and type(given["text"]) is str:
        return {"type": "text", "text": given["text"]}
    names = [value for key, value in given.items() if key != "type" and key in (kind, "path")]
    if type(kind) is str and kind in FILES and len(given) == 1 + len(names) <= 2 and all(type(n) is str for n in names):
        files[kind].append(names[0] if names else None)
        return {"type": kind}
    rule = 'must be {"type": "text", "text": TEXT} or {"type": "image", "image": PATH}, "audio" and "video" likewise'
    raise ValueError(f"message {number}: a part {rule}, got {part!r:.80}")


def _place_files(entry: dict[str, object], key: str, files: list[object]) -> None:
    """Put the files that a chat's parts name under a key of the line, or check those that the line names itself."""
    own = entry.get(key)
    given = own if isinstance(own, list) else [own] * (own is not None)
    named = [name for name in files if name is not None]
    is_whole = len(files) == len(named or given) and not (named and given)
    if not is_whole or (len(files) > 1 and key != "images"):
        most = "" if key == "images" else ", at most one"
        rule = f'messages must have a part for each file of "{key}"{most}, which the parts name, or else the line'
        raise ValueError(f"{rule}, got parts {files} and files {given!r:.80}")
    if named:
        entry[key] = named if key == "images" else named[0]


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


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
