"""Checkpoints from which a run continues bit for bit.

A checkpoint is a folder `step-00000120` with safetensors files and one `checkpoint.json`. It is written under a
temporary name and renamed when all of it is on the disk: a folder of that name is complete, and a temporary name was
left by a crash. At a URL, a checkpoint with a `checkpoint.json` is complete. No file is ever written twice.

`async_save` copies the state to host memory and returns; threads write the copy while training continues. No thread
calls a collective (see `checkpoint.saving`); `poll`, called once per step, reports the result to all ranks.

Every rank writes the rows that it holds, and the index has the file and first row of each piece of a tensor. So
nothing is gathered, no host needs room for more than one file per rank, and any number of ranks, sharded or not, can
read a checkpoint. All ranks must see the same folder, or upload what they have written to a URL. Nothing is pickled.

The states of torch's default random generators are not saved: all random numbers of a run derive from a seed and step.
"""

import json
import platform
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import safetensors
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from omni_train import __version__
from omni_train.checkpoint import parts
from omni_train.checkpoint.index import INDEX_FILE, Config, Saved, index_digest, step_folder, tensor_files
from omni_train.checkpoint.index import check_config as check_config
from omni_train.checkpoint.index import config_differences as config_differences
from omni_train.checkpoint.places import NUM_THREADS, Place, RemoteFolder, SharedFolder, draft_folders
from omni_train.checkpoint.saving import Saving
from omni_train.checkpoint.state import Copies, allocate_kept, allocate_optimizer, kept_state, train_state
from omni_train.dist import Dist, gather_json, same_error, synchronize
from omni_train.files import check_file
from omni_train.remote import Remote

WAIT_S = 5.0  # between two exchanges while ranks wait for each other's files


class Checkpoint:
    """The last `keep` checkpoints of a run. Every rank calls every method, and an error of one is raised on all.

    kept: additional state of the run, float32 host tensors by name, the same on every rank: saved and loaded.
    """

    def __init__(
        self,
        folder: str | Path,
        dist: Dist,
        *,
        keep: int = 2,
        wait_for: Callable[[], object] = lambda: None,
        url: str = "",
        run_files: Sequence[Path] = (),
    ) -> None:
        """Open the folder.

        Args:
            folder: folder of the checkpoints, created by the first save; with `url`, that of the checkpoint being
                uploaded.
            dist: the ranks.
            keep: number of newest checkpoints to keep.
            wait_for: called by the first rank before a checkpoint is complete, in the thread that writes it, and with
                `url` before anything is deleted. It may wait for other files, which are then on the disk if the
                checkpoint is.
            url: URL of a folder for the checkpoints, for ranks that share no disk; see `omni_train.remote`.
            run_files: files and folders of the first rank that are stored with a checkpoint at a URL.

        Raises:
            ValueError: `keep` or `url` is invalid.
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.folder = Path(folder)
        self.remote = RemoteFolder(Remote(url), self.folder, run_files, wait_for) if url else None
        self._place: Place = self.remote or SharedFolder(self.folder)
        self.dist = dist
        self.keep, self._wait_for = keep, wait_for
        self.pinned: int | None = None  # step of a checkpoint that is kept regardless of its age
        self.kept: dict[str, Tensor] = {}
        self._verified: Saved | None = None
        self._saving: tuple[int, Saving] | None = None
        self._memory: list[Tensor] = []  # one per file, for the copies written during training

    def latest(self) -> Saved | None:
        """Return the newest checkpoint, reading only its index; None if there is none.

        Raises:
            ValueError: it is damaged (the message names the file and the next older checkpoint with all its files), or
                a file or link has the name of an unfinished checkpoint.
        """
        with same_error(self.dist):
            steps = self._place.steps() if self.dist.is_main else []
        newest = gather_json(self.dist, steps[-1:])[0]  # as the first rank sees the folder
        if not newest:
            return None
        with same_error(self.dist):
            try:
                return self._open(newest[0])
            except ValueError as exc:
                raise self._damaged(newest[0], exc) from exc

    def verify(self, saved: Saved, module: nn.Module | None = None) -> None:
        """Check a whole checkpoint before any model is loaded; `load` then skips this check.

        The ranks divide the files among them, so that each file is read once. Without a process group, as in a dry run
        for several ranks, this rank reads all files.

        Args:
            saved: the result of `latest`.
            module: a module with the names and shapes of the one to load into; may be on the meta device.

        Raises:
            ValueError: it is damaged, holds NaN or infinity, or its weights do not match the module.
        """
        with same_error(self.dist):
            if module is not None:
                state = train_state(module, None, None).items()
                entries = {name: entry for name, entry in saved.tensors.items() if name.startswith("weight/")}
                parts.check_fits(entries, {name: tensor for name, tensor in state if name.startswith("weight/")})
            names = sorted(tensor_files(saved.tensors))
            if self.dist.mesh is not None:
                names = names[self.dist.rank :: self.dist.world_size]

            def check(name: str) -> None:
                with self._place.file(saved.step, name) as path:
                    check_file(path, saved.files[name])
                    parts.check_part(path, saved.tensors)

            with ThreadPoolExecutor(NUM_THREADS) as pool:
                try:
                    list(pool.map(check, names))
                except ValueError as exc:
                    raise self._damaged(saved.step, exc) from exc
        self._verified = saved

    def save(
        self, step: int, module: nn.Module, optimizer: Optimizer | None = None, ema: Copies = None, *, config: Config
    ) -> Path:
        """Write the state that training changes; return the folder. Earlier checkpoints stay complete after any error.

        With a URL, the folder is removed once all of it has been uploaded.

        A rank has only one file's tensors in host memory at a time.

        Args:
            step: number of finished training steps.
            module: its trained parameters, the factors of all its adapters, and the buffers of layers in training mode
                are saved; sharded or not.
            optimizer: its state is saved, if passed.
            ema: one or more averages or snapshots to save; do not call it inside their `applied()`.
            config: the run's settings, as JSON values; see `check_config`.

        Raises:
            OSError: a rank could not write. The unfinished folder is removed.
            ValueError: a tensor (named in the message) holds NaN or infinity, or a checkpoint of this step exists.
        """
        files, attempt = self._begin(step, module, optimizer, ema, config)
        memory = torch.empty(max(map(parts.num_bytes, files.values()), default=0), dtype=torch.uint8)
        written = (parts.PartFile(name, rows, memory) for name, rows in files.items())
        self._start(step, written, config, attempt, num_threads=1)
        self.wait()
        return self._path(step)

    def async_save(
        self, step: int, module: nn.Module, optimizer: Optimizer | None = None, ema: Copies = None, *, config: Config
    ) -> None:
        """Copy the state that training changes to host memory, and write the copy while training continues.

        It waits for the previous save. The memory is reused by the next save, and pinned if there is an accelerator.
        The save may fail until `poll` or `wait` has reported it as complete.

        Args:
            step: number of finished training steps.
            module, optimizer, ema, config: as in `save`.

        Raises:
            OSError, ValueError: as in `save`, for this save or the previous one.
        """
        files, attempt = self._begin(step, module, optimizer, ema, config)
        try:
            with same_error(self.dist):
                copies = self._copy(files)
        except (OSError, ValueError, RuntimeError):
            self._remove(step)
            raise
        self._start(step, copies, config, attempt, num_threads=NUM_THREADS)

    @property
    def is_saving(self) -> bool:
        """True if a save is in progress, or has ended and is not reported yet; the same on every rank."""
        return self._saving is not None

    def poll(self) -> None:
        """Check the save in progress, if any; end it if all ranks are done or one has failed.

        Raises:
            OSError, ValueError: as in `save`, on every rank. The unfinished folder is removed.
        """
        if self._saving:
            states = set(gather_json(self.dist, self._saving[1].state))
            if states != {"writing"} and (states == {"done"} or "failed" in states):
                self.wait()

    def wait(self) -> None:
        """Wait until the save in progress, if any, is complete. Raises as in `poll`."""
        if not self._saving:
            return
        (step, saving), self._saving = self._saving, None
        try:
            for wait in (saving.wait_written, saving.wait_finished):
                while not all(gather_json(self.dist, wait(WAIT_S))):  # so that no rank appears to hang
                    pass
                with same_error(self.dist):
                    saving.check()
        except (OSError, ValueError, RuntimeError):
            saving.give_up()
            self._remove(step)
            raise
        self._clear()

    def wait_alone(self) -> None:
        """Write this rank's part of the save in progress, after an error that other ranks may not have.

        The checkpoint is then complete if all ranks write their parts. This method calls no collective.
        """
        if self._saving:
            self._saving[1].wait_alone()

    def load(self, saved: Saved, module: nn.Module, optimizer: Optimizer | None = None, ema: Copies = None) -> None:
        """Load a checkpoint into a module, optimizer and averages like those passed to `save`, and into `kept`.

        Every byte is checked first, unless `verify` has done so. After an error, the module may be partly loaded.

        Args:
            saved: the result of `latest`; a newer checkpoint is not considered.
            module: as passed to `save`.
            optimizer: as passed to `save`; its current state is dropped.
            ema: as passed to `save`; its averages are overwritten.

        Raises:
            ValueError: the checkpoint is damaged, does not match the module, or holds NaN or infinity.
        """
        if self._verified is not saved:
            self.verify(saved)
        with same_error(self.dist):
            shapes = {name: entry["shape"] for name, entry in saved.tensors.items()}
            if optimizer is not None:
                allocate_optimizer(module, optimizer, shapes)
            kept = allocate_kept(shapes, sum(int(info["bytes"]) for info in saved.files.values()))
            state = train_state(module, optimizer, ema) | kept_state(kept)
            parts.check_fits(saved.tensors, state)
            parts.read_tensors(partial(self._place.file, saved.step), saved.tensors, state)
        if self.dist.is_main and saved.versions != _versions():
            warnings.warn(
                f"made with {saved.versions}, read with {_versions()}: the last bits may differ", stacklevel=2
            )
        self.kept = kept

    def _path(self, step: int, suffix: str = "") -> Path:
        return step_folder(self.folder, step, suffix)

    def _open(self, step: int) -> Saved:
        """Return the index of a step; raise ValueError unless all files have the right size."""
        saved = self._place.open(step)
        if saved.step != step:
            raise ValueError(f"{INDEX_FILE} is of step {saved.step}: the folder was copied or renamed")
        return saved

    def _damaged(self, step: int, reason: ValueError) -> ValueError:
        """Return the error for a damaged checkpoint; it names the next older one that has all its files."""
        message = f"checkpoint {self._place.location(step)} is damaged: {reason}."
        for older in reversed([s for s in self._place.steps() if s < step]):
            try:
                self._open(older)
            except ValueError:
                continue
            return ValueError(
                f"{message} Move it away to continue from {self._place.location(older)}, which has all its files"
            )
        return ValueError(f"{message} There is no older one: move it away to start anew")

    def _begin(
        self, step: int, module: nn.Module, optimizer: Optimizer | None, ema: Copies, config: Config
    ) -> tuple[dict[str, list[parts.Row]], str]:
        """Wait for the previous save and create the folder of a new one; return this rank's files by name and an id."""
        json.dumps(dict(config))  # raises for a value that JSON cannot represent, before anything is written
        self.wait()
        attempt = str(gather_json(self.dist, uuid4().hex)[0])
        with same_error(self.dist):
            files = parts.part_files(self.dist, train_state(module, optimizer, ema) | kept_state(self.kept))
            if self.dist.is_main:
                if step in self._place.steps():
                    raise ValueError(f"step must be new, but {self._place.location(step)} exists")
                self._place.begin(self._path(step, ".tmp"))
            self._clear()
        if self.remote:
            with same_error(self.dist):  # after all machines have removed their drafts, as some may share a disk
                if self._is_first_here:
                    self._path(step, ".tmp").mkdir(parents=True, exist_ok=True)
        return files, attempt

    def _copy(self, files: Mapping[str, Sequence[parts.Row]]) -> list[parts.PartFile]:
        """Copy the files to host memory, reusing that of the previous save if it is large enough."""
        for i, size in enumerate(map(parts.num_bytes, files.values())):
            if i == len(self._memory):
                self._memory.append(parts.host_memory(size, self.dist.device))
            elif len(self._memory[i]) < size:
                self._memory[i] = parts.host_memory(size, self.dist.device)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            map_files = pool.map if self.dist.device.type == "cpu" else map  # an accelerator copies asynchronously
            copies = list(map_files(parts.PartFile, files, files.values(), self._memory))
        synchronize()  # before training changes the tensors being copied
        return copies

    def _start(
        self, step: int, files: Iterable[parts.PartFile], config: Config, attempt: str, *, num_threads: int
    ) -> None:
        metadata = {"step": step, "config": dict(config), "versions": _versions(), "world_size": self.dist.world_size}
        draft, entries = (
            self._path(step, ".tmp"),
            {"attempt": attempt} | ({"about": metadata} if self.dist.is_main else {}),
        )
        saving = Saving(draft, self._place, self.dist, files, entries, self._finish, num_threads=num_threads)
        self._saving = step, saving

    @property
    def _is_first_here(self) -> bool:
        """True on the rank that creates and removes drafts: the first one, or with a URL the first on each machine."""
        return self.dist.local_rank == 0 if self.remote else self.dist.is_main

    def _clear(self) -> None:
        """Remove the drafts of this machine."""
        for draft in draft_folders(self.folder) if self.remote and self._is_first_here else []:
            shutil.rmtree(draft, ignore_errors=True)  # machines may share it

    def _remove(self, step: int) -> None:
        """Free the space of an unfinished save; the next save removes what cannot be removed now."""
        if self.dist.is_main and not self.remote:
            shutil.rmtree(self._path(step, ".tmp"), ignore_errors=True)

    def _finish(self, indices: Sequence[parts.Index]) -> None:
        """Complete the checkpoint from the parts; then delete checkpoints that are too old."""
        metadata: dict[str, Any] = indices[0]["about"]
        index = parts.merge_parts(indices)
        content = asdict(Saved(**(metadata | index)))
        text = json.dumps({"sha256": index_digest(content)} | content, indent=1)
        self._wait_for()
        self._place.commit(self._path(metadata["step"], ".tmp"), index["files"], text.encode())
        for step in set(self._place.steps()[: -self.keep]) - {self.pinned}:
            self._place.delete(step)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "omni-train": __version__}
    return versions | {"torch": str(torch.__version__), "safetensors": safetensors.__version__}
