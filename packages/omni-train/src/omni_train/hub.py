"""Files on the hub: prompts and recipes fetched by their address, weights of a run pushed. Needs huggingface_hub.

hf://datasets/OWNER/NAME/FILE               of a data set; of a model without datasets/
hf://datasets/OWNER/NAME@REVISION/FILE      at a branch, tag or commit
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omni_train.weights.card import CARD_FILE

REPOSITORY = re.compile("(models|datasets|spaces)--")  # begins the names of folders in the hub's cache
ADDRESS = re.compile(r"hf://(datasets/)?(?!datasets/)([\w.-]+/[\w.-]+)(?:@([^/\s]+))?/((?!.*\.\.)\S+)")
FETCHED: dict[str, Path] = {}  # address -> file; within a process a branch stays at its commit

EXPORTED = (".safetensors", ".json", ".txt", ".jinja", ".model")  # kinds of files that an export has beside its card


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
    """Check a file before it is fetched or opened: its suffix, and that it is no pipe or device, which may never end.

    suffixes: those it may have; empty for any.

    Raises:
        ValueError: it has another one, or exists and is no regular file.
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
    """Return the place itself, or a fetched address with the commit that it stood for."""
    found = ADDRESS.fullmatch(place)
    if found is None:
        return place
    is_data, repo, _, file = found.groups()
    commit = local_file(place).parts[-len(Path(file).parts) - 1]  # of .../snapshots/COMMIT/FILE
    return f"hf://{is_data or ''}{repo}@{commit}/{file}"


def files_to_push(run: str | Path) -> dict[str, Path]:
    """Return the files that `push_to_hub` uploads, by their names there: weights, card, and settings as recipe.toml.

    Other files in the folder of the weights, and hidden ones, are left out.

    Raises:
        ValueError: the run has no weights, or links among its files, which may lead to other files.
    """
    weights, settings = Path(run) / "weights", Path(run) / "config.toml"
    found = {path.relative_to(weights): path for path in sorted(weights.rglob("*"))}
    shown = {name: path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    if links := [path for path in (weights, *shown.values(), settings) if path.is_symlink()]:
        raise ValueError(f"run must have files of its own to push, but {links[0]} is a link")
    exported = {name: path for name, path in shown.items() if name.suffix in EXPORTED or name.name == CARD_FILE}
    files = {name.as_posix(): path for name, path in exported.items() if path.is_file()}
    if not any(name.endswith(".safetensors") for name in files):
        raise ValueError(f"run must be a folder with weights, which an evaluation writes, found none in {weights}")
    return files | ({"recipe.toml": settings} if settings.is_file() else {})


def push_to_hub(run: str | Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a run's weights, model card and settings in one commit, and return its URL.

    Args:
        run: the run folder.
        repo_id: of the model on the hub, OWNER/NAME, created if it is missing.
        private: True to create it as private.

    Raises:
        ValueError: the run has no weights, or the hub does not take them.
    """
    files = files_to_push(run)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi

        api, adds = HfApi(), [CommitOperationAdd(name, file) for name, file in files.items()]
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.create_commit(repo_id, adds, commit_message=f"Add {Path(run).name}").commit_url)
    except Exception as exc:  # of any HTTP client that the library has
        rule = "repo_id must be OWNER/NAME on the hub, where you may write after `hf auth login`"
        raise ValueError(f"{rule}, got {repo_id}: {type(exc).__name__}: {exc}") from exc
