"""The files of a run folder that its report is drawn from, and the functions with which a trainer writes them.

    runs/NAME/
      metrics.jsonl      a line a step                                             RunLog
      config.toml        the settings                                              the app
      versions.jsonl     a line a start: command, commit, versions                 write_versions
      eval/000080/       the same prompts and seeds at every evaluation            write_eval
      eval/000080.png    more of them on one sheet, with their scores              write_eval
      samples/000082/    best and worst of some groups, of the last steps          write_samples
      report.html        all of it in one page                                     write_report

A folder of pictures appears whole or not at all, and a line torn by a crash is left out. One rank writes it all.
Credentials in URLs are left out of every text.
"""

import hashlib
import io
import json
import math
import os
import platform
import re
import reprlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omni_train.files import read_jsonl, write_atomically, write_folder_atomically

from omni_rl.report.sheet import contact_sheet, score_label

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    Images = Sequence[np.ndarray | Tensor] | Mapping[int, np.ndarray | Tensor] | np.ndarray | Tensor

EXACT_SIDE = 128  # pixels; pictures no larger keep every bit, as PNG
MAX_SIDE = 320  # pixels; larger pictures are reduced to this and stored as WebP
MAX_SHEET = 64  # pictures on the sheet of an evaluation
SHEET_SIDE = 256  # pixels; larger pictures are reduced to this on the sheet
LIBRARIES = ("omni-", "torch", "diffusers", "transformers", "peft", "safetensors", "numpy", "pillow", "vllm", "triton")


@dataclass(frozen=True)
class Sample:
    """A picture's prompt, score and origin.

    Args:
        prompt: its text.
        reward: its score; None where the scorer gave none.
        group: samples of one group compete.
        seed: of its noise.
        details: what the scorer adds to the score; `target` and `read` are the text that was wanted and that was read.
        abstained: why there is no score.
        references: the pictures that it was made from, uint8 [H, W, 3] each, arrays or tensors.
    """

    prompt: str
    reward: float | None
    group: int = 0
    seed: int | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    abstained: str | None = None
    references: "Sequence[np.ndarray | Tensor]" = ()


def write_eval(
    folder: str | Path,
    step: int,
    images: "Images",
    samples: Sequence[Sample],
    *,
    limit: int = 16,
    keep: int = 48,
) -> None:
    """Keep the first `limit` pictures of the evaluation after `step` steps, and a sheet of the first 64. Needs pillow.

    images: RGB, one for each of `samples`: uint8 [N, H, W, 3], or N of uint8 [H, W, 3], arrays or tensors on any
    device, of which only those that are kept are copied to the host; or a mapping of those alone, by their places.
    keep: where there are more evaluations, those nearest to their neighbours go, never the first and the last.

    Raises:
        ValueError: images have another dtype or shape, or `keep` is below 2.
    """
    if keep < 2:
        raise ValueError(f"keep must be >= 2, got {keep}")
    pictures = host_pictures(images, samples, range(min(MAX_SHEET, len(samples))))
    rows, files = _rows(pictures, samples, range(min(limit, len(samples))))
    labels = [score_label(sample.reward, sample.details) for sample in samples[:MAX_SHEET]]
    sheet = contact_sheet(list(pictures.values()), labels, max_side=SHEET_SIDE)
    home = Path(folder) / "eval"
    write_folder_atomically(home / f"{step:06}", {"rows.json": _json(rows), **files})
    write_atomically(home / f"{step:06}.png", _png(sheet))
    stored = step_folders(home)
    while len(stored) > keep:
        nearest = min(range(1, len(stored) - 1), key=lambda i: stored[i + 1][0] - stored[i - 1][0])
        _, old = stored.pop(nearest)
        old.with_suffix(".png").unlink(missing_ok=True)
        shutil.rmtree(old)


def write_samples(
    folder: str | Path,
    step: int,
    images: "Images",
    samples: Sequence[Sample],
    *,
    groups: int = 4,
    keep: int = 3,
) -> None:
    """Keep best and worst sample of the step's first `groups` groups, and drop all but the last `keep` steps.

    images: as `write_eval` takes them. A group without any score keeps its first sample. Needs pillow.

    Raises:
        ValueError: images have another dtype or shape, or `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}")
    entries: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for group, indices in first_groups(samples, groups).items():
        best = best_and_worst(samples, indices)
        shown, drawn = _rows(host_pictures(images, samples, best), samples, best)
        rewards = [samples[i].reward for i in indices]
        entries.append({"group": group, "prompt": samples[indices[0]].prompt, "rewards": rewards, "shown": shown})
        files |= drawn
    home = Path(folder) / "samples"
    write_folder_atomically(home / f"{step:06}", {"groups.json": _json(entries), **files})
    for _, old in step_folders(home)[:-keep]:
        shutil.rmtree(old)


def write_versions(
    folder: str | Path,
    *,
    argv: Sequence[str] | None = None,
    hide: Iterable[str] = (),
    changed: Iterable[str] = (),
    facts: Mapping[str, Any] = {},
) -> None:
    """Add a start of the run: its command, the commit of the program, the versions of the libraries.

    Args:
        folder: the run folder.
        argv: the program and its arguments; None takes those of this process.
        hide: flags whose values are left out, such as `--scorer-url`.
        changed: settings of `config.toml` that differ from their defaults; the report shows them first.
        facts: further facts to show, such as the number of ranks.
    """
    words = list(sys.argv if argv is None else argv)
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{_launcher()} {command_line(words, hide)}",
        "commit": _commit(Path(words[0]).resolve().parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "changed": list(changed),
        **facts,
    }
    _add_line(Path(folder) / "versions.jsonl", entry | {"packages": _packages()})


@cache
def _packages() -> dict[str, str]:
    """The libraries that a run depends on, and their versions; metadata of all that is installed is slow to read."""
    found = {dist.name.lower().replace("_", "-"): dist.version for dist in distributions() if dist.name}
    return {name: found[name] for name in sorted(found) if name.startswith(LIBRARIES)}


def command_line(argv: Sequence[str], hide: Iterable[str] = ()) -> str:
    """Return the command in a shell's words, with `...` for the values of the flags in `hide`, however spelt."""
    hidden, words = set(hide), []
    for before, word in pairwise(("", *argv)):
        flag, equals, _ = word.partition("=")
        if before.replace("_", "-") in hidden:
            words.append("...")
        else:
            words.append(f"{flag}=..." if equals and flag.replace("_", "-") in hidden else shlex.quote(word))
    return " ".join(words)


def encode(image: np.ndarray) -> tuple[bytes, str]:
    """A picture, uint8 [H, W, 3], as the bytes of a small file, and the suffix of its name."""
    from PIL import Image

    picture, file = Image.fromarray(image), io.BytesIO()
    if max(picture.size) <= EXACT_SIDE:
        return _png(picture), ".png"
    picture.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    picture.save(file, "WEBP", quality=82)
    return file.getvalue(), ".webp"


def step_folders(home: Path, last: float = math.inf) -> list[tuple[int, Path]]:
    """(step, folder) of the folders named after a step up to `last`, in step order; none if `home` is missing."""
    if not home.is_dir():
        return []
    found = sorted((int(path.name), path) for path in home.iterdir() if path.is_dir() and path.name.isdecimal())
    return [(step, path) for step, path in found if step <= last]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line torn by a crash; none if the file is missing.

    Raises:
        ValueError: any other line is no JSON object.
    """
    return read_jsonl(path) if path.exists() else []


def _png(picture: "Image.Image") -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _json(document: object) -> str:
    """JSON without the credentials of URLs: nobody who reads a report needs them."""
    return re.sub(r"(?<=://)[^\s/\"]*@", "", json.dumps(document, default=str))


def host_pictures(images: "Images", samples: Sequence[Sample], shown: Iterable[int]) -> dict[int, np.ndarray]:
    """The images that are shown, by their places, as arrays uint8 [H, W, 3]; no other is copied to the host."""
    chosen = {i: images[i] for i in shown}
    arrays = {i: image if isinstance(image, np.ndarray) else image.cpu().numpy() for i, image in chosen.items()}
    for array in arrays.values():
        if array.dtype != np.uint8:
            raise ValueError(f"images must be uint8, got {array.dtype}")
    is_each = isinstance(images, Mapping) or len(images) == len(samples)
    if not is_each or any(array.shape[2:] != (3,) for array in arrays.values()):
        got = f"{len(images)} of {sorted({array.shape for array in arrays.values()})}"
        raise ValueError(f"images must be {len(samples)} of shape (H, W, 3), one for each sample, got {got}")
    return arrays


def host_references(sample: Sample) -> list[np.ndarray]:
    """The sample's references as arrays, uint8 [H, W, 3]."""
    arrays = [image if isinstance(image, np.ndarray) else image.cpu().numpy() for image in sample.references]
    for array in arrays:
        if array.dtype != np.uint8 or array.shape[2:] != (3,):
            raise ValueError(f"references must be uint8 of shape (H, W, 3), got {array.dtype} {array.shape}")
    return arrays


def first_groups(samples: Sequence[Sample], count: int) -> dict[int, list[int]]:
    """The first `count` groups of a step, each with the places of its samples."""
    members: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(i)
    return dict(list(members.items())[:count])


def best_and_worst(samples: Sequence[Sample], indices: Sequence[int]) -> list[int]:
    """Best first; one index where both are the same, or where nothing has a score."""
    scored = [(reward, i) for i in indices if (reward := samples[i].reward) is not None and math.isfinite(reward)]
    if not scored:
        return list(indices[:1])
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    return list(dict.fromkeys((best[1], worst[1])))


def _rows(
    pictures: Mapping[int, np.ndarray], samples: Sequence[Sample], indices: Iterable[int]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The samples as JSON takes them, each with the name of its file, and the files."""
    rows, files = [], {}
    for i in indices:
        data, suffix = encode(pictures[i])
        height, width = pictures[i].shape[:2]
        details = {str(name): plain(value) for name, value in samples[i].details.items()}
        row = vars(samples[i]) | {"details": details, "file": f"{i:04}{suffix}", "size": [width, height]}
        files[f"{i:04}{suffix}"] = data
        references = []
        for reference in host_references(samples[i]):
            data, suffix = encode(reference)
            name = f"reference-{hashlib.sha256(data).hexdigest()[:16]}{suffix}"  # samples that share one share the file
            references.append({"file": name, "size": [reference.shape[1], reference.shape[0]]})
            files[name] = data
        rows.append(row | {"references": references})
    return rows, files


def plain(value: object) -> object:
    """The value if it is a text or a number, or else a short text of it, however deeply it is nested."""
    return value if isinstance(value, str | int | float | None) else reprlib.repr(value)


def _add_line(path: Path, entry: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    kept = before[: before.rfind(b"\n") + 1]  # what follows the last newline is torn
    write_atomically(path, kept + _json(entry).encode() + b"\n")


def _launcher() -> str:
    """What started this process: python, or torchrun with its numbers of nodes and of processes on each."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "python"
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    return f"torchrun{f' --nnodes {nodes}' * (nodes != '1')} --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"


def _commit(folder: Path) -> str:
    """The commit of the repository that holds the folder, `+` behind it where files differ; empty without one."""
    git = shutil.which("git")
    words = ["-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    return subprocess.run([git, *words], capture_output=True, text=True).stdout.strip() if git else ""
