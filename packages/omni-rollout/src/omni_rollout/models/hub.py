"""Checkpoints by name: a folder or a hub id; for plans, also the released models' configurations in this package."""

from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread

from omni_rollout.models.parts import RELEASED, one_line

PROBE_S = 3.0  # longest wait for the hub


def released_models() -> dict[str, Path]:
    """Return the folders in this package with configurations of released models, by hub id."""
    return {f"{folder.parent.name}/{folder.name}": folder for folder in sorted(RELEASED.glob("*/*/"))}


def local_folder(path: str | Path, *patterns: str) -> Path:
    """Return the folder of a checkpoint; for a hub id, first fetch its configuration, or the files of `patterns`.

    If the hub cannot be reached, the files in its cache are used.

    Raises:
        ValueError: the folder or hub id does not exist.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.is_file():
        hint = "diffusers' from_single_file and save_pretrained write the folder"
        raise ValueError(f"model must be a folder in diffusers' layout or a hub id, got the file {path}: {hint}")
    if folder.is_absolute() or str(path).count("/") != 1 or str(path).startswith("."):
        raise ValueError(f"model must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at {path}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    allowed, fault = list(patterns) or ["*.json", "*.txt", "*.model", "*.jinja"], hub_fault()
    try:
        snapshot = snapshot_download(
            str(path), allow_patterns=allowed, ignore_patterns=["*.fp16*"], local_files_only=bool(fault)
        )
        return Path(snapshot)
    except (OSError, ValueError) as exc:
        fault = fault or " ".join(str(exc).split()).rstrip(".")
        hint = f"Fetch it where there is a network, with `hf download {path}`, or give a folder"
        if isinstance(exc, GatedRepoError):
            hint = f"Accept its license at https://huggingface.co/{path}, then `hf auth login`, or set HF_TOKEN"
        raise ValueError(
            f"model must be a folder or a hub id that can be fetched, got {path}: {fault}. {hint}"
        ) from exc


@cache
def hub_fault() -> str:
    """Return why the hub cannot be reached, or "" if it answers; probed once, for at most PROBE_S."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    answer: Future[int] = Future()

    def ask() -> None:
        try:
            answer.set_result(get_session().head(constants.ENDPOINT, timeout=PROBE_S).status_code)
        except Exception as exc:  # from any HTTP client of the library
            answer.set_exception(exc)

    Thread(target=ask, daemon=True).start()  # DNS lookup has no timeout
    try:
        fault = answer.exception(timeout=PROBE_S)
    except TimeoutError:
        return f"{constants.ENDPOINT} does not answer within {PROBE_S:g} s"
    if fault:
        return f"{constants.ENDPOINT} cannot be reached, {one_line(fault)}"
    return f"{constants.ENDPOINT} answers with status {answer.result()}" if answer.result() >= 500 else ""
