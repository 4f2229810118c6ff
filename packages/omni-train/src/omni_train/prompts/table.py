"""Prompts in tables: rows become JSON lines, and files in rows of parquet files become files in a cache folder."""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from omni_train.files import write_atomically

MAX_MEDIA_BYTES = 2**28  # maximum size of a file in a row
MAX_UNPACKED = 64  # maximum unpacked size relative to the size of the file
MIN_BYTES = 2**26  # minimum limit for the unpacked size of a file
MIN_TOTAL_BYTES = 2**30  # minimum limit for all rows; a text counts each time it occurs
MIN_ROWS = 2**16  # minimum limit for any file; a large file may have as many rows as it has bytes
WHOLE = re.compile("[0-9]{1,9}")
SIGNS = {  # the first bytes of a file -> its suffix
    rb"\x89PNG\r\n": ".png", rb"\xff\xd8\xff": ".jpg", rb"RIFF....WEBP": ".webp", rb"GIF8": ".gif",
    rb"RIFF....WAVE": ".wav", rb"fLaC": ".flac", rb"OggS": ".ogg", rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]": ".mp3",
}  # fmt: skip


def table_lines(path: Path, media_keys: Collection[str], *, skip_bytes: bool = False) -> Iterator[str]:
    """Yield the rows of a parquet file as JSON lines, without null values, as each row has the keys of all rows.

    media_keys: columns that may hold files as bytes. skip_bytes: True omits other columns with bytes, which otherwise
    raise an error.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as exc:
        raise ValueError(f"{path} needs pyarrow, which is not installed: pip install 'pyarrow>=14.0.1'") from exc
    count = total = 0
    try:
        limit = max(MIN_BYTES, MAX_UNPACKED * path.stat().st_size)
        texts = _check_table(parquet.ParquetFile(path).metadata, path, limit)
        # Texts stay dictionary indices, so they are measured before a small file takes much memory.
        file, columns = parquet.ParquetFile(path, read_dictionary=texts), None
        if skip_bytes:
            schema = file.schema_arrow
            columns = [field.name for field in schema if field.name in media_keys or "binary" not in str(field.type)]
        for batch in file.iter_batches(batch_size=16, columns=columns):
            if (size := sum(map(_num_bytes, batch.columns))) > limit:
                rule = f"must have at most {limit} bytes with the 15 rows after it"
                raise ValueError(f"{path}, row {count + 1}: {rule}, got {size}")
            if (total := total + size) > (max_total := max(MIN_TOTAL_BYTES, limit)):
                rule = f"must have at most {max_total} bytes with the rows before it"
                raise ValueError(f"{path}, row {count + 1}: {rule}, got {total}")
            for row in batch.to_pylist():
                count += 1
                yield _row_line(row, media_keys, f"{path}, row {count}")
    except (OSError, NotImplementedError, ArrowException) as exc:  # such as an unknown type
        raise ValueError(f"path must be a parquet file that can be read, got {path}: {exc}") from exc


def csv_lines(text: str, path: Path) -> Iterator[str]:
    """Yield the rows of a `.csv` or `.tsv` file as JSON lines, with an empty line for the header, which is row 1.

    Cells are texts, except height and width, which are integers; empty cells and columns without a name are omitted.
    """
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    header: list[str] = []
    try:
        for number, row in enumerate(rows, start=1):
            if not header:
                header = [name.strip() for name in row]
                if duplicates := sorted(name for name, count in Counter(filter(None, header)).items() if count > 1):
                    raise ValueError(f"{path}, row {number}: must name each column once, got {duplicates}")
            elif row and len(row) != len(header):
                rule = f"must have {len(header)} cells, as the header {header} has"
                raise ValueError(f"{path}, row {number}: {rule}, got {len(row)}: {row!r:.80}")
            elif row:
                cells = {name: cell for name, cell in zip(header, row, strict=True) if name and cell}
                sizes = {name: cells[name] for name in ("height", "width") if WHOLE.fullmatch(cells.get(name, ""))}
                yield json.dumps(cells | {name: int(size) for name, size in sizes.items()}, ensure_ascii=False)
                continue
            yield ""
    except csv.Error as exc:
        raise ValueError(f"{path}, line {rows.line_num}: no table of cells in quotes or without: {exc}") from exc


def _check_table(facts: Any, path: Path, most_bytes: int) -> list[str]:
    """Check a parquet file by its metadata, and return the names of its text and bytes columns.

    Raises:
        ValueError: it has too many rows, values or bytes for its size, as a file made to exhaust memory would.
    """
    groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    file_bytes = path.stat().st_size
    rows = max(MIN_ROWS, file_bytes)
    for name, actual, limit in (
        ("rows", facts.num_rows, rows),
        ("values", sum(column.num_values for column in columns), MAX_UNPACKED * rows),
        ("bytes", sum(column.total_uncompressed_size for column in columns), most_bytes),
    ):
        if actual > limit:
            raise ValueError(f"{path} must have at most {limit} {name} in a file of {file_bytes} bytes, got {actual}")
    return sorted({column.path_in_schema for column in columns if column.physical_type == "BYTE_ARRAY"})


def _num_bytes(values: Any) -> int:
    """Return the bytes of an Arrow array, counting a text each time it occurs."""
    if hasattr(values, "dictionary"):
        counts = Counter(values.indices.to_pylist())
        return sum(num * values.dictionary[i].as_buffer().size for i, num in counts.items() if i is not None)
    if not hasattr(values, "flatten"):
        return int(values.nbytes)
    parts = [values.keys, values.items] if hasattr(values, "keys") else values.flatten()  # maps have keys and items
    return sum(map(_num_bytes, parts if isinstance(parts, list) else [parts]))


def _row_line(row: dict[str, object], media_keys: Collection[str], place: str) -> str:
    for key, value in row.items():
        try:
            if key in media_keys:
                row[key] = _replace_bytes(value)
            json.dumps(row[key], allow_nan=False)
        except (TypeError, ValueError) as exc:
            rule = "must hold text, finite numbers, lists and structs, and files only as images, audio or video"
            fault = exc if isinstance(exc, _NoFileError) else f"got {value!r:.80}"
            raise ValueError(f'{place}: "{key}" {rule}, {fault}') from exc
    return json.dumps(_drop_null(row), ensure_ascii=False)


class _NoFileError(ValueError):
    """Bytes that are not a file that a prompt may have."""


def _replace_bytes(value: object) -> object:
    """Return a value of a row with bytes, or a struct of bytes and a path, replaced by a path."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    if isinstance(value, bytes):
        return str(_save_file(value))
    if isinstance(value, dict):
        return {key: _replace_bytes(item) for key, item in value.items()}
    return [_replace_bytes(item) for item in value] if isinstance(value, list) else value


def _save_file(data: bytes) -> Path:
    """Return the file with these bytes in `media_folder`; it is named by SHA-256, so all writers write the same."""
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
    """Return the folder of files from bytes in parquet: omni-rl/media below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni-rl" / "media"


def _drop_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _drop_null(item) for key, item in value.items() if item is not None}
    return [_drop_null(item) for item in value] if isinstance(value, list) else value
