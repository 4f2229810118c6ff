"""Prompts and random seeds as pure functions of the step, so that a resumed run needs no saved state.

Letters: P prompts a step takes, M prompts in the file. Step s takes the places s*P ... s*P + P - 1 of an endless list
that strings one ordering of the M prompts (an epoch) after another. Up to `MAX_SORTED` prompts are ordered by sorting
their hashes; of more each place is worked out when it is asked for, so that a million prompts take no time.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from omni_train.files import write_atomically
from omni_train.hub import check_named, local_file, real_roots

MAX_SORTED = 2**16
MAX_LINE_CHARS = 2**16  # of a record, which goes to the scorer with every image drawn from it
MAX_SIDE = 16_384  # pixels
ROLES = ("system", "user", "assistant")
FILES = {"image": "images", "audio": "audio", "video": "video"}  # kinds of parts of messages -> where a line has files
MAX_MEDIA_BYTES = 2**28  # of a file in a row of parquet
MIN_TABLE_BYTES = 2**26  # that any parquet file may unpack to; a large one to 64 times its own
MIN_TOTAL_BYTES = 2**30  # that all of its rows may hold, with a text counted as often as it occurs
SIGNS = {  # with which files begin -> the suffix that readers know them by
    rb"\x89PNG\r\n": ".png", rb"\xff\xd8\xff": ".jpg", rb"RIFF....WEBP": ".webp", rb"GIF8": ".gif",
    rb"RIFF....WAVE": ".wav",
}  # fmt: skip


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of the file.

    index: counts prompts from 0 in file order. meta: whatever else the line held. images: files of references.
    size: (height, width) in pixels, where the line says one. audio, video: files that the prompt speaks of.
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


class PromptSampler:
    """Draws P prompts a step, without replacement within an epoch and without repeats within a step.

    Files: `.txt` holds one prompt a line; `.jsonl` one object a line with "prompt", maybe "negative_prompt", maybe
    "images", the path of a reference, or a list of them, relative to the file, maybe "audio" and "video", paths too,
    maybe "height" and "width", and further keys that become `meta`, as do paths and sizes. Blank lines are skipped. In
    place of "prompt" it may hold "messages", a chat whose last message is the user's. `.parquet` holds such an object a
    row, in which files may also be bytes, as the datasets library has them: see `media_folder`.
    check, media_root: as `load_prompts`.

    Raises:
        ValueError: the file is empty or malformed, or `check` raises one (the line is named), or it holds fewer than P
            prompts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        prompts_per_step: int,
        seed: int,
        check: RecordCheck | None = None,
        media_root: str | Path = "",
    ) -> None:
        self._lines, self._split = _read_lines(path, check, media_root)
        if not 1 <= prompts_per_step <= len(self):
            raise ValueError(
                f"prompts_per_step must be between 1 and the number of prompts in {path} ({len(self)}), "
                f"got {prompts_per_step}"
            )
        self.prompts_per_step = prompts_per_step
        self.seed = seed

    def __len__(self) -> int:
        return len(self._lines)

    def at(self, step: int) -> list[PromptRecord]:
        """The P prompts of a step; the same for the same file, P, seed and step, on every rank."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        num, first = len(self._lines), step * self.prompts_per_step
        places = range(first, first + self.prompts_per_step)
        orders = {epoch: self._order(epoch) for epoch in {place // num for place in places}}
        drawn = [orders[place // num](place % num) for place in places]
        return [PromptRecord(index, *self._split(self._lines[index])) for index in drawn]

    def _order(self, epoch: int) -> "Order":
        """The order of an epoch: a permutation whose head avoids what the shared step took from the epoch before."""
        num, per_step = len(self._lines), self.prompts_per_step
        start = epoch - epoch % (per_step // math.gcd(num, per_step))  # here a step and an epoch begin together
        if num >= 2 * per_step:
            start = max(start, epoch - 1)  # what moves in the head cannot reach the tail: one epoch back is enough
        order = _permutation(self.seed, start, num)
        for later in range(start + 1, epoch + 1):
            num_tail, num_head = later * num % per_step, -later * num % per_step  # the shared step's two parts
            tail = {order(place) for place in range(num - num_tail, num)}
            order = _avoid(_permutation(self.seed, later, num), tail, num_head)
        return order


Order = Callable[[int], int]  # from a place to the prompt that stands there


def _avoid(order: Order, avoid: set[int], num_head: int) -> Order:
    """The order, but the first `num_head` that are not in `avoid` come before all others."""
    first = [order(place) for place in range(num_head + len(avoid))]  # which hold that many
    head = [i for i in first if i not in avoid][:num_head]
    taken = set(head)
    first = head + [i for i in first if i not in taken]
    return lambda place: first[place] if place < len(first) else order(place)


def _permutation(seed: int, epoch: int, num: int) -> Order:
    """0 ... num-1 as hashes say: the same on every machine and Python version, which `random` does not promise."""
    return _sorted(seed, epoch, num).__getitem__ if num <= MAX_SORTED else partial(_shuffled, seed, epoch, num)


@lru_cache(maxsize=4)
def _sorted(seed: int, epoch: int, num: int) -> list[int]:
    return sorted(range(num), key=lambda i: _hash(seed, epoch, i))


def _shuffled(seed: int, epoch: int, num: int, place: int) -> int:
    """What stands at one place of a permutation, from that place alone.

    A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations", 1988) permutes the numbers below
    a power of 4; a number that it sends beyond 0 ... num-1 goes through it again.
    """
    bits = ((num - 1).bit_length() + 1) // 2
    while True:
        left, right = place >> bits, place & (2**bits - 1)
        for turn in range(6):
            left, right = right, left ^ (_hash(seed, epoch, num, turn, right) & (2**bits - 1))
        place = left << bits | right
        if place < num:
            return place


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one sample's noise, in [0, 2**63): BLAKE2b over the four numbers.

    Each number, in [-2**63, 2**63), enters as 8 bytes, little-endian, signed; the digest is 8 bytes, little-endian, top
    bit cleared. Nothing else enters, so neither the number of ranks nor the batch size changes a sample.
    """
    return _hash(run_seed, step, prompt_index, sample_index)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & (2**63 - 1)


Size = tuple[int, int]
# Text, negative, meta, images, size, audio, video:
Parts = tuple[str, str, dict[str, object], tuple[Path, ...], Size | None, Path | None, Path | None]


def load_prompts(
    path: str | Path, *, check: RecordCheck | None = None, media_root: str | Path = ""
) -> list[PromptRecord]:
    """Return all prompts of a `.txt`, `.jsonl` or `.parquet` file, in file order.

    check: called with each prompt. media_root: folder in which prompts may name files too, beside that of their file;
    "" is none.

    Raises:
        ValueError: another suffix, a file that cannot be read or is empty, a malformed line or what `check` raises
            (named with the number of the line or row), or pyarrow is not installed.
    """
    lines, split = _read_lines(path, check, media_root)
    return [PromptRecord(index, *split(line)) for index, line in enumerate(lines)]


def _read_lines(
    place: str | Path, check: RecordCheck | None, media_root: str | Path
) -> tuple[list[str], Callable[[str], Parts]]:
    """Return the lines of a file that hold a prompt, all of them checked, and the function that takes one apart."""
    check_named(place, (".txt", ".jsonl", ".parquet"))
    path = local_file(place)
    folders = [path.parent, media_folder(), *([media_root] if media_root else [])]
    place_of = partial(_file_in, [root for folder in folders for root in real_roots(folder)], path.parent)
    split = partial(_split_json, place_of) if path.suffix != ".txt" else _split_text
    is_table = path.suffix == ".parquet"
    lines: Iterable[str] = _table_lines(path) if is_table else _text_lines(path)
    kept: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            if len(line) > MAX_LINE_CHARS:
                raise ValueError(f"must have at most {MAX_LINE_CHARS} characters, got {len(line)}")
            if line:
                record = PromptRecord(len(kept), *split(line))
                if check:
                    check(record)
                kept.append(line)
        except ValueError as exc:
            raise ValueError(f"{path}, {'row' if is_table else 'line'} {number}: {exc}") from exc
    if not kept:
        raise ValueError(f"path must hold at least one prompt, {path} is empty")
    return kept, split


def _text_lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as exc:
        raise ValueError(f"path must be a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        number = data.count(b"\n", 0, exc.start) + 1
        raise ValueError(f"{path}, line {number}: must be UTF-8, got the byte {data[exc.start]:#04x}") from exc
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


def _table_lines(path: Path) -> Iterator[str]:
    """Yield the rows of a parquet file as lines of JSON, without what is null: a row has the keys of all."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as exc:
        raise ValueError(f"{path} needs pyarrow, which is not installed: pip install 'pyarrow>=14.0.1'") from exc
    count = total = 0
    try:
        most = max(MIN_TABLE_BYTES, 64 * path.stat().st_size)
        texts = _check_table(parquet.ParquetFile(path).metadata, path, most)
        # Texts stay indices into those that differ, and so are measured before a small file takes much memory.
        for batch in parquet.ParquetFile(path, read_dictionary=texts).iter_batches(batch_size=16):
            if (size := sum(map(_num_bytes, batch.columns))) > most:
                rule = f"must have at most {most} bytes with the 15 rows after it"
                raise ValueError(f"{path}, row {count + 1}: {rule}, got {size}")
            if (total := total + size) > (most_in_all := max(MIN_TOTAL_BYTES, most)):
                rule = f"must have at most {most_in_all} bytes with the rows before it"
                raise ValueError(f"{path}, row {count + 1}: {rule}, got {total}")
            for row in batch.to_pylist():
                count += 1
                yield _row_line(row, f"{path}, row {count}")
    except (OSError, NotImplementedError, ArrowException) as exc:  # such as of a type that it does not know
        raise ValueError(f"path must be a parquet file that can be read, got {path}: {exc}") from exc


def _check_table(facts: Any, path: Path, most_bytes: int) -> list[str]:
    """Check a parquet file by its metadata, and return the names of its columns of text and bytes.

    Raises:
        ValueError: it has more rows, values or bytes than a file of its size has unless it is made to fill the memory.
    """
    groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    file_bytes = path.stat().st_size
    rows = max(MAX_SORTED, file_bytes)
    for name, found, most in (
        ("rows", facts.num_rows, rows),
        ("values", sum(column.num_values for column in columns), 64 * rows),
        ("bytes", sum(column.total_uncompressed_size for column in columns), most_bytes),
    ):
        if found > most:
            raise ValueError(f"{path} must have at most {most} {name} in a file of {file_bytes} bytes, got {found}")
    return sorted({column.path_in_schema for column in columns if column.physical_type == "BYTE_ARRAY"})


def _num_bytes(values: Any) -> int:
    """Return the bytes of an Arrow array, with a text counted as often as it occurs."""
    if hasattr(values, "dictionary"):
        counts = Counter(values.indices.to_pylist())
        return sum(num * values.dictionary[i].as_buffer().size for i, num in counts.items() if i is not None)
    if not hasattr(values, "flatten"):
        return int(values.nbytes)
    parts = [values.keys, values.items] if hasattr(values, "keys") else values.flatten()  # of a map
    return sum(map(_num_bytes, parts if isinstance(parts, list) else [parts]))


def _row_line(row: dict[str, object], place: str) -> str:
    for key, value in row.items():
        try:
            if key in (*FILES.values(), "messages"):
                row[key] = _with_paths(value)
            json.dumps(row[key], allow_nan=False)
        except (TypeError, ValueError) as exc:
            rule = "must hold text, finite numbers, lists and structs, and files only as images, audio or video"
            told = exc if isinstance(exc, _NoFileError) else f"got {value!r:.80}"
            raise ValueError(f'{place}: "{key}" {rule}, {told}') from exc
    return json.dumps(_without_null(row), ensure_ascii=False)


class _NoFileError(ValueError):
    """Bytes that are no file that a prompt may have."""


def _with_paths(value: object) -> object:
    """A value of a row with paths in place of bytes, and of structs of bytes and a path."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    if isinstance(value, bytes):
        return str(_kept_file(value))
    if isinstance(value, dict):
        return {key: _with_paths(own) for key, own in value.items()}
    return [_with_paths(own) for own in value] if isinstance(value, list) else value


def _kept_file(data: bytes) -> Path:
    """The file of these bytes in `media_folder`, whose name is their SHA-256: whoever writes it writes the same."""
    suffix = next((suffix for sign, suffix in SIGNS.items() if re.match(sign, data, re.DOTALL)), None)
    if suffix is None or len(data) > MAX_MEDIA_BYTES:
        kinds = ", ".join(SIGNS.values())
        raise _NoFileError(f"of the kinds {kinds} and at most {MAX_MEDIA_BYTES} bytes, got {len(data)}: {data[:16]!r}")
    path = media_folder() / f"{hashlib.sha256(data).hexdigest()}{suffix}"
    if not (path.is_file() and path.stat().st_size == len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return path


def media_folder() -> Path:
    """Where files that stand as bytes in parquet are kept: omni-rl/media below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni-rl" / "media"


def _without_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null(own) for key, own in value.items() if own is not None}
    return [_without_null(own) for own in value] if isinstance(value, list) else value


def _split_text(line: str) -> Parts:
    return line, "", {}, (), None, None, None


def _file_in(roots: Sequence[Path], folder: Path, key: str, name: str) -> Path:
    """Return the file that a line names under a key, relative to `folder`, which must be below one of the roots."""
    path = folder / name
    if not any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots):
        rule = "must name files in the folder of the prompts or below it, or below media_root"
        raise ValueError(f'"{key}" {rule}, got {name!r:.80}')
    return path


def _split_json(place_of: Callable[[str, str], Path], line: str) -> Parts:
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
    if not text.strip() and not is_chat:  # a message may be a sound alone
        raise ValueError('"prompt" must not be empty')
    images = entry.get("images", [])
    names = [images] if type(images) is str else images
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError(f'"images" must be a path or a list of paths, got {images!r:.80}')
    if _SURROGATE.search(line):  # an escape, maybe one of a pair: a character of its own is no UTF-8
        try:
            json.dumps([text, negative, entry], ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"must be Unicode, got {exc.object[exc.start]!r}, half of a surrogate pair") from exc
    audio, video = (_path(entry, key, place_of) for key in ("audio", "video"))
    return text, negative, entry, tuple(place_of("images", name) for name in names), _size(entry), audio, video


def _take_chat(entry: dict[str, object]) -> str:
    """The text of a chat's last message. Its files move to where other lines have them, and templates can read it."""
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
    """A part of a message as templates read it; its file goes to `files`, or None where the line names it."""
    said = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    kind = said.get("type")
    if kind == "text" and said.keys() == {"type", "text"} and type(said["text"]) is str:
        return {"type": "text", "text": said["text"]}
    names = [value for key, value in said.items() if key != "type" and key in (kind, "path")]
    if type(kind) is str and kind in FILES and len(said) == 1 + len(names) <= 2 and all(type(n) is str for n in names):
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
    """The file that a line names under a key, if it does."""
    name = entry.get(key)
    if name is not None and type(name) is not str:
        raise ValueError(f'"{key}" must be a path, got {name!r:.80}')
    return place_of(key, name) if isinstance(name, str) else None


def _size(entry: Mapping[str, object]) -> Size | None:
    """The (height, width) that a line says, if it does."""
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
