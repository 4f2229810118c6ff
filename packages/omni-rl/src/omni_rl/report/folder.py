"""What a run folder holds for its report, and the functions with which a trainer writes it.

    runs/NAME/
      metrics.jsonl      a line a step                                             RunLog
      config.toml        the settings                                              the app
      versions.jsonl     a line a start: command, commit, versions                 write_versions
      alarms.jsonl       a line an alarm: step, what, numbers, what to look at     write_alarm
      eval/000080/       the same prompts and seeds at every evaluation            write_eval
      samples/000082/    best and worst of some groups, of the last steps          write_samples
      report.html        all of it in one page                                     write_report

A folder of pictures appears whole or not at all, and a line torn by a crash is left out. One rank writes it all.
"""

import io
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

EXACT_SIDE = 128  # pixels; pictures no larger keep every bit, as PNG
MAX_SIDE = 320  # pixels; larger pictures are reduced to this and stored as WebP
LIBRARIES = ("omni-", "torch", "diffusers", "transformers", "peft", "safetensors", "numpy", "pillow", "vllm", "triton")


@dataclass(frozen=True)
class Sample:
    """What is known of a picture.

    Args:
        prompt: what it was drawn from.
        reward: its score; None where the scorer gave none.
        group: samples of one group compete.
        seed: of its noise.
        details: what the scorer says of the score; `target` and `read` are shown as what was wanted and what was read.
        abstained: why there is no score.
    """

    prompt: str
    reward: float | None
    group: int = 0
    seed: int | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    abstained: str | None = None


def write_eval(
    folder: str | Path, step: int, images: Any, samples: Sequence[Sample], *, limit: int = 16, keep: int = 48
) -> None:
    """Keeps the first `limit` pictures of the evaluation after `step` steps. Needs pillow.

    images: uint8 [N, 3, H, W], RGB, an array or a tensor on any device, one for each of `samples`. keep: where there
    are more evaluations, those nearest to their neighbours go, never the first and the last.

    Raises:
        ValueError: images have another dtype or shape, or `keep` is below 2.
    """
    if keep < 2:
        raise ValueError(f"keep must be >= 2, got {keep}")
    pictures = _pictures(images, len(samples))
    rows, files = _rows(pictures, samples, range(min(limit, len(samples))))
    home = Path(folder) / "eval"
    _write_folder(home / f"{step:06}", "rows.json", rows, files)
    stored = step_folders(home)
    while len(stored) > keep:
        nearest = min(range(1, len(stored) - 1), key=lambda i: stored[i + 1][0] - stored[i - 1][0])
        shutil.rmtree(stored.pop(nearest)[1])


def write_samples(
    folder: str | Path, step: int, images: Any, samples: Sequence[Sample], *, groups: int = 4, keep: int = 3
) -> None:
    """Keeps best and worst sample of the step's first `groups` groups, and drops all but the last `keep` steps.

    images: as `write_eval` takes them. A group without any score keeps its first sample. Needs pillow.

    Raises:
        ValueError: images have another dtype or shape, or `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}")
    pictures = _pictures(images, len(samples))
    members: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(i)
    entries: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for group, indices in list(members.items())[:groups]:
        shown, drawn = _rows(pictures, samples, _best_and_worst(samples, indices))
        rewards = [samples[i].reward for i in indices]
        entries.append({"group": group, "prompt": samples[indices[0]].prompt, "rewards": rewards, "shown": shown})
        files |= drawn
    home = Path(folder) / "samples"
    _write_folder(home / f"{step:06}", "groups.json", entries, files)
    for _, old in step_folders(home)[:-keep]:
        shutil.rmtree(old)


def write_alarm(
    folder: str | Path, step: int, title: str, *, numbers: Mapping[str, float] | None = None, look: str = ""
) -> None:
    """Adds an alarm after `step` steps: what is wrong, the numbers that say so, and what to look at."""
    entry = {"step": step, "title": title, "numbers": dict(numbers or {}), "look": look}
    _add_line(Path(folder) / "alarms.jsonl", entry)


def write_versions(
    folder: str | Path, *, argv: Sequence[str] | None = None, hide: Iterable[str] = (), facts: Mapping[str, Any] = {}
) -> None:
    """Adds a start of the run: its command, the commit of the program, the versions of what it uses.

    Args:
        folder: the run folder.
        argv: the program and its arguments; None takes those of this process.
        hide: flags whose values are left out, as `--scorer-url`.
        facts: what else is worth knowing, as the number of ranks.
    """
    words = list(sys.argv if argv is None else argv)
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{_launcher()} {command_line(words, hide)}",
        "commit": _commit(Path(words[0]).resolve().parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **facts,
    }
    found = {dist.name.lower().replace("_", "-"): dist.version for dist in distributions()}
    packages = {name: found[name] for name in sorted(found) if name.startswith(LIBRARIES)}
    _add_line(Path(folder) / "versions.jsonl", entry | {"packages": packages})


def command_line(argv: Sequence[str], hide: Iterable[str] = ()) -> str:
    """The command as a shell takes it, with `...` for the values of the flags in `hide`."""
    hidden, words = set(hide), []
    for before, word in pairwise(("", *argv)):
        flag, equals, _ = word.partition("=")
        if before in hidden:
            words.append("...")
        else:
            words.append(f"{flag}=..." if equals and flag in hidden else shlex.quote(word))
    return " ".join(words)


def encode(image: np.ndarray) -> tuple[bytes, str]:
    """A picture, uint8 [3, H, W], as the bytes of a small file, and the suffix of its name."""
    from PIL import Image

    picture, file = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))), io.BytesIO()
    if max(picture.size) <= EXACT_SIDE:
        picture.save(file, "PNG", optimize=True)
        return file.getvalue(), ".png"
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
        ValueError: any other line is not valid JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is empty or torn
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as exc:
        raise ValueError(f"{path}: not valid JSON: {exc}") from exc


def write_whole(path: Path, data: bytes) -> None:
    """Puts the file in its place at once: whoever opens it meanwhile sees the old one or the new one, whole."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _pictures(images: Any, count: int) -> np.ndarray:
    array = np.asarray(images.cpu() if hasattr(images, "cpu") else images)
    if array.dtype != np.uint8:
        raise ValueError(f"images must be uint8, got {array.dtype}")
    if array.ndim != 4 or array.shape[:2] != (count, 3):
        raise ValueError(f"images must have the shape ({count}, 3, H, W), one for each sample, got {array.shape}")
    return array


def _best_and_worst(samples: Sequence[Sample], indices: Sequence[int]) -> list[int]:
    """Best first; one index where both are the same, or where nothing has a score."""
    scored = [(reward, i) for i in indices if (reward := samples[i].reward) is not None and math.isfinite(reward)]
    if not scored:
        return list(indices[:1])
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    return list(dict.fromkeys((best[1], worst[1])))


def _rows(
    pictures: np.ndarray, samples: Sequence[Sample], indices: Iterable[int]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The samples as JSON takes them, each with the name of its file, and the files."""
    rows, files = [], {}
    for i in indices:
        data, suffix = encode(pictures[i])
        height, width = pictures.shape[2:]
        rows.append(asdict(samples[i]) | {"file": f"{i:04}{suffix}", "size": [width, height]})
        files[f"{i:04}{suffix}"] = data
    return rows, files


def _write_folder(target: Path, name: str, document: object, files: Mapping[str, bytes]) -> None:
    """Writes `document` as `name` and the files beside it; the folder replaces one that was there."""
    scratch = target.with_name(f".{target.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / name).write_text(json.dumps(document, default=str), encoding="utf-8")
    for file, data in files.items():
        (scratch / file).write_bytes(data)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


def _add_line(path: Path, entry: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    line = json.dumps(entry, default=str).encode() + b"\n"
    write_whole(path, before[: before.rfind(b"\n") + 1] + line)  # what follows the last newline is torn


def _launcher() -> str:
    """What started this process: python, or torchrun with its numbers of nodes and of processes on each."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "python"
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    return f"torchrun{f' --nnodes {nodes}' * (nodes != '1')} --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"


def _commit(folder: Path) -> str:
    """The commit of the repository that holds the folder, `+` behind it where files differ; empty without one."""
    git = shutil.which("git")
    if git is None:
        return ""
    commit = subprocess.run([git, "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode:
        return ""
    changed = subprocess.run([git, "-C", str(folder), "diff", "--quiet", "HEAD"], capture_output=True)
    return commit.stdout.strip() + ("+" if changed.returncode else "")
