"""Files on the hub, fetched by their address. Needs huggingface_hub.

hf://datasets/OWNER/NAME/FILE               of a data set; of a model without datasets/
hf://datasets/OWNER/NAME@REVISION/FILE      at a branch, tag or commit
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

REPOSITORY = re.compile("(models|datasets|spaces)--")  # begins the names of folders in the hub's cache
ADDRESS = re.compile(r"hf://(datasets/)?(?!datasets/)([\w.-]+/[\w.-]+)(?:@([^/\s]+))?/((?!.*\.\.)\S+)")
FETCHED: dict[str, Path] = {}  # address -> file; within a process a branch stays at its commit


def local_file(place: str | Path) -> Path:
    """Return the path itself, or for an address the file in the hub's cache, fetched if it is missing.

    Raises:
        ValueError: an address of another form, or a file that cannot be fetched and is not in the cache.
    """
    text = str(place)
    if not text.startswith("hf:/"):
        return Path(place)
    if text not in FETCHED:
        FETCHED[text] = _fetch(text)
    return FETCHED[text]


def check_named(place: str | Path, suffixes: Sequence[str]) -> None:
    """Raise ValueError for a file with another suffix, or a pipe or device, before it is fetched or opened.

    suffixes: the possible ones; empty for any.
    """
    path = Path(place)
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"path must end in {' or '.join(', '.join(suffixes).rsplit(', ', 1))}, got {place}")
    with suppress(OSError):  # which opening it reports
        if path.exists() and not path.is_file():
            raise ValueError(f"path must be a regular file, got {place}")


def is_from_hub(place: str) -> bool:
    """True if the place is an address of the hub, or a file in its cache, whose folders are named KIND--OWNER--NAME."""
    path = Path(place)
    folders = {*path.absolute().parts, *path.resolve().parts}
    return place.startswith("hf:") or any(REPOSITORY.match(folder) for folder in folders)


def real_roots(folder: str | Path) -> list[Path]:
    """Return the folders that hold the files of a folder, without links: itself, and the blobs of the hub's cache.

    The files of a snapshot in the cache are links to blobs of the same repository.
    """
    home = Path(folder).resolve()
    caches = [up.parents[1] for up in (home, *home.parents) if up.parent.name == "snapshots"]
    return [home, *(cache / "blobs" for cache in caches if REPOSITORY.match(cache.name))]


def _fetch(address: str) -> Path:
    found = ADDRESS.fullmatch(address)
    if found is None:
        rule = "path must be hf://datasets/OWNER/NAME/FILE, maybe with @REVISION after NAME"
        raise ValueError(f"{rule}, or without datasets/ for a model, got {address}")
    is_data, repo, revision, file = found.groups()
    kind = "dataset" if is_data else "model"
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, file, repo_type=kind, revision=revision))
    except (ImportError, OSError, ValueError) as exc:
        fault = " ".join(str(exc).split()).rstrip(".")
        pin = f" --revision {revision}" if revision else ""
        raise ValueError(
            f"path must be a file that can be fetched from the hub, got {address}: {fault}. Fetch it where there is a "
            f"network, with `hf download {repo} {file} --repo-type {kind}{pin}`, or give a file"
        ) from exc


def pinned(place: str) -> str:
    """Return the place itself, or a fetched address with the commit of its revision."""
    found = ADDRESS.fullmatch(place)
    if found is None:
        return place
    is_data, repo, _, file = found.groups()
    commit = local_file(place).parts[-len(Path(file).parts) - 1]  # of .../snapshots/COMMIT/FILE
    return f"hf://{is_data or ''}{repo}@{commit}/{file}"
