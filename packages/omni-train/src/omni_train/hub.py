"""Files on the hub, downloaded by address. Needs huggingface_hub.

hf://datasets/OWNER/NAME/FILE               from a data set; from a model without datasets/
hf://datasets/OWNER/NAME@REVISION/FILE      at a branch, tag or commit
hf://datasets/OWNER/NAME/SPLIT              all files of a split: see `omni_train.prompts.splits`
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from omni_train.terminal import one_line

REPOSITORY = re.compile("(models|datasets|spaces)--")  # prefix of folder names in the hub's cache
ADDRESS = re.compile(r"hf://(datasets/)?(?!datasets/)([\w.-]+/[\w.-]+)(?:@([^/\s]+))?/((?!.*\.\.)\S+)")
DATA_SET = re.compile(
    r"(?P<set>hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/\s]+))?)(?:/(?P<rest>(?!.*\.\.)\S+?))?/?"
)
REVISIONS = {"~parquet": "refs/convert/parquet"}  # on the hub, which converts data sets to parquet
FETCHED: dict[str, list[Path]] = {}  # address -> files; within a process, a branch stays at its commit
MAX_CARD_BYTES = 2**20
WAIT_S = 10.0  # for the hub's list of files


def local_file(place: str | Path) -> Path:
    """Return the path itself, or for an address the file in the hub's cache, downloaded if it is missing.

    Raises:
        ValueError: the address has another form, or the file cannot be downloaded and is not in the cache.
    """
    text = str(place)
    if not text.startswith("hf:/"):
        return Path(place)
    if text not in FETCHED:
        FETCHED[text] = [_fetch(text)]
    return FETCHED[text][0]


def check_named(place: str | Path, suffixes: Sequence[str]) -> None:
    """Raise ValueError for a file with a wrong suffix, or a pipe or device, before it is downloaded or opened.

    suffixes: allowed suffixes; empty for any.
    """
    path = Path(place)
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"path must end in {' or '.join(', '.join(suffixes).rsplit(', ', 1))}, got {place}")
    with suppress(OSError):  # opening the file reports it
        if path.exists() and not path.is_file():
            raise ValueError(f"path must be a regular file, got {place}")


def is_from_hub(place: str) -> bool:
    """True for an address of the hub, or a file in its cache, whose folders are named KIND--OWNER--NAME."""
    path = Path(place)
    folders = {*path.absolute().parts, *path.resolve().parts}
    return place.startswith("hf:") or any(REPOSITORY.match(folder) for folder in folders)


def real_roots(folder: str | Path) -> list[Path]:
    """Return the resolved folders that hold the files of a folder: itself, and the blobs of the hub's cache.

    The files of a snapshot in the cache are links to blobs of the same repository.
    """
    home = Path(folder).resolve()
    caches = [up.parents[1] for up in (home, *home.parents) if up.parent.name == "snapshots"]
    return [home, *(cache / "blobs" for cache in caches if REPOSITORY.match(cache.name))]


def _fetch(address: str) -> Path:
    match = ADDRESS.fullmatch(address)
    if match is None:
        rule = "path must be hf://datasets/OWNER/NAME/FILE, maybe with @REVISION after NAME"
        raise ValueError(f"{rule}, or without datasets/ for a model, got {address}")
    is_data, repo, revision, file = match.groups()
    kind = "dataset" if is_data else "model"
    with _report_fetch_errors(address, f"{repo} {file} --repo-type {kind}", revision):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, file, repo_type=kind, revision=REVISIONS.get(revision, revision)))


def fetch_chosen(
    address: str, match: re.Match[str], choose: Callable[[Sequence[str], Mapping[str, Any]], Sequence[str]]
) -> list[Path]:
    """Return files of a data set, downloaded if missing from the hub's cache; offline, those in the cache.

    match: the match of the address with `DATA_SET`. choose: returns the names of the files to use, given all names and
    the fields of the data set's card.

    Raises:
        ValueError: they cannot be downloaded and are not in the cache, or as raised by `choose`.
    """
    if address not in FETCHED:
        repo, revision = match["repo"], REVISIONS.get(match["revision"], match["revision"])
        fetching = partial(_report_fetch_errors, address, f"{repo} --repo-type dataset", revision)
        with fetching():
            from huggingface_hub import hf_hub_download

            names, commit, fault = _list_files(repo, revision)
            download = partial(hf_hub_download, repo, repo_type="dataset", local_files_only=bool(fault))
            fetch = partial(_download_at_commit, download, revision, commit)
            card = fetch("README.md") if "README.md" in names else None
        chosen = choose(names, read_card(card) if card else {})
        with fetching():
            FETCHED[address] = [fetch(name) for name in chosen]
        if fault and os.environ.get("LOCAL_RANK", "0") == "0":
            listing = f"{', '.join(chosen[:8])}{f' and {len(chosen) - 8} more' if len(chosen) > 8 else ''}"
            print(
                f"{address}: the hub did not answer, {fault}; taken from its cache at {commit}: {listing}", flush=True
            )
    return FETCHED[address]


def _download_at_commit(download: Callable[..., str], revision: str | None, commit: str | None, name: str) -> Path:
    """Return a file as of the commit: by the revision, or by the commit if the revision has moved on.

    The revision is tried first, since the cache then records its commit, by which it is found without a network.
    """
    path = Path(download(filename=name, revision=revision))
    return path if commit in (None, *path.parts) else Path(download(filename=name, revision=commit))


def _list_files(repo: str, revision: str | None) -> tuple[list[str], str | None, str]:
    """Return the names of a data set's files, their commit, and why they come from the cache ("" if from the hub)."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().dataset_info(repo, revision=revision, timeout=WAIT_S)
        return [file.rfilename for file in info.siblings or ()], info.sha, ""
    except Exception as exc:  # from any HTTP client of the library
        try:
            folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True))
        except (OSError, ValueError):
            raise OSError(str(exc)) from exc
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return names, folder.name, " ".join(one_line(exc).split()) or type(exc).__name__


def read_card(path: Path) -> dict[str, Any]:
    """Return the fields of a data set's card, from the YAML at its head; empty if there is none.

    Raises:
        ValueError: the card has more than MAX_CARD_BYTES, invalid YAML, or aliases, which may expand to far more data.
    """
    from huggingface_hub import metadata_load
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            raise ValueError(f"has more than {MAX_CARD_BYTES} bytes")
        if head := REGEX_YAML_BLOCK.search(path.read_text("utf-8")):
            anchors, aliases = ({*re.findall(rf"{sign}([\w-]+)", head[2])} for sign in ("&", r"\*"))
            if shared := sorted(anchors & aliases):
                raise ValueError(f"has the alias *{shared[0]:.80}, which must be written out")
        return dict(metadata_load(path) or {})
    except Exception as exc:  # including those of the library's YAML parser
        raise ValueError(f"{path} must have YAML at its head that can be read: {' '.join(str(exc).split())}") from exc


@contextmanager
def _report_fetch_errors(address: str, what: str, revision: str | None) -> Iterator[None]:
    """Raise ValueError for errors in the block, with the command that downloads `what`, at a revision."""
    try:
        yield
    except (ImportError, OSError, ValueError) as exc:
        fault = " ".join(str(exc).split()).rstrip(".")
        pin = f" --revision {revision}" if revision else ""
        raise ValueError(
            f"path must be a file that can be fetched from the hub, got {address}: {fault}. Fetch it where there is a "
            f"network, with `hf download {what}{pin}`, or give a file"
        ) from exc


def pin_revision(place: str, file: Path) -> str:
    """Return the place itself, or an address with the commit of its revision. file: one of the downloaded files."""
    match = ADDRESS.fullmatch(place) or DATA_SET.fullmatch(place)
    commit = next((up.name for up in file.parents if up.parent.name == "snapshots"), "")
    if match is None or not commit:
        return place
    return re.sub(r"^(hf://(?:datasets/)?[\w.-]+/[\w.-]+)(@[^/\s]+)?", rf"\1@{commit}", place)
