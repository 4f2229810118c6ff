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
from omni_reward.media import check_media, check_references
from omni_train.files import read_jsonl, read_regular, write_atomically, write_folder_atomically

from omni_rl.report.media import STRIP_FRAMES, Media, files_of, still
from omni_rl.report.sheet import contact_sheet, score_label

if TYPE_CHECKING:
    from torch import Tensor

    Shown = np.ndarray | Tensor | Mapping[str, np.ndarray | Tensor]  # a picture, or media by kind
    AllMedia = Sequence[Shown] | Mapping[int, Shown] | np.ndarray | Tensor

MAX_SHEET = 64  # pictures on the sheet of an evaluation
SHEET_SIDE = 256  # pixels; larger pictures are reduced to this on the sheet
LIBRARIES = ("omni-", "torch", "diffusers", "transformers", "peft", "safetensors", "numpy", "pillow", "vllm", "triton")


@dataclass(frozen=True)
class Sample:
    """A sample's prompt, score and origin.

    Args:
        prompt: its text.
        reward: its score; None where the scorer gave none.
        group: samples of one group compete.
        seed: of its noise.
        details: what the scorer adds to the score; `target` and `read` are the text that was wanted and that was read.
        abstained: why there is no score.
        references: the pictures that it was made from, uint8 [H, W, 3] each, arrays or tensors.
        rates: how fast its media play: `fps` of video, `sample_rate` of audio.
        answer: the text that was drawn, where it is one; its media are then those that it answers.
    """

    prompt: str
    reward: float | None
    group: int = 0
    seed: int | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    abstained: str | None = None
    references: "Sequence[np.ndarray | Tensor]" = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None


def write_eval(
    folder: str | Path, step: int, media: "AllMedia", samples: Sequence[Sample], *, limit: int = 16, keep: int = 48
) -> None:
    """Keep the first `limit` samples of the evaluation after `step` steps, and a sheet of the first 64. Needs pillow.

    media: of each of `samples` its media by kind: `image` uint8 [H, W, 3], `video` uint8 [F, H, W, 3], `audio` float32
    [S, C], arrays or tensors on any device, of which only those that are kept are copied to the host; or a mapping of
    those alone, by their places. Pictures need no name: uint8 [N, H, W, 3] or N of uint8 [H, W, 3] do.
    keep: where there are more evaluations, those nearest to their neighbours go, never the first and the last.

    Raises:
        ValueError: media have another dtype or shape, or no rate, or `keep` is below 2.
    """
    if keep < 2:
        raise ValueError(f"keep must be >= 2, got {keep}")
    shown = host_media(media, samples, range(min(MAX_SHEET, len(samples))))
    rows, files = _rows(shown, samples, range(min(limit, len(samples))))
    labels = [score_label(sample.reward, sample.details) for sample in samples[:MAX_SHEET]]
    wide = STRIP_FRAMES if any("video" in own for own in shown.values()) else 1
    home = Path(folder) / "eval"
    write_folder_atomically(home / f"{step:06}", {"rows.json": _json(rows), **files})
    if all(shown.values()):  # texts alone have no sheet
        sheet = contact_sheet(
            [still(own) for own in shown.values()], labels, columns=-(-8 // wide), max_side=SHEET_SIDE * wide
        )
        file = io.BytesIO()
        sheet.save(file, "PNG")
        write_atomically(home / f"{step:06}.png", file.getvalue())
    stored = step_folders(home)
    while len(stored) > keep:
        nearest = min(range(1, len(stored) - 1), key=lambda i: stored[i + 1][0] - stored[i - 1][0])
        _, old = stored.pop(nearest)
        old.with_suffix(".png").unlink(missing_ok=True)
        shutil.rmtree(old)


def write_samples(
    folder: str | Path, step: int, media: "AllMedia", samples: Sequence[Sample], *, groups: int = 4, keep: int = 3
) -> None:
    """Keep best and worst sample of the step's first `groups` groups, and drop all but the last `keep` steps.

    media: as `write_eval` takes them. A group without any score keeps its first sample. Needs pillow.

    Raises:
        ValueError: media have another dtype or shape, or no rate, or `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}")
    entries: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for group, indices in first_groups(samples, groups).items():
        best = best_and_worst(samples, indices)
        shown, drawn = _rows(host_media(media, samples, best), samples, best)
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


def step_folders(home: Path, last: float = math.inf) -> list[tuple[int, Path]]:
    """(step, folder) of the folders named after a step up to `last`, in step order; none if `home` is missing."""
    if not home.is_dir():
        return []
    found = sorted(
        (int(path.name), path) for path in home.iterdir() if path.is_dir() and re.fullmatch("[0-9]+", path.name)
    )
    return [(step, path) for step, path in found if step <= last]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line torn by a crash; none if the file is missing.

    Raises:
        ValueError: any other line is no JSON object.
    """
    return read_jsonl(path) if path.exists() else []


def _json(document: object) -> str:
    """JSON without the credentials of URLs: nobody who reads a report needs them."""
    return re.sub(r"(?<=://)[^\s/\"]*@", "", json.dumps(document, default=str))


def host_media(media: "AllMedia", samples: Sequence[Sample], shown: Iterable[int]) -> dict[int, Media]:
    """The samples that are shown, by their places, as arrays by kind; no other is copied to the host."""
    if not isinstance(media, Mapping) and len(media) != len(samples):
        raise ValueError(f"media must be of {len(samples)} samples, got {len(media)}")
    hosted: dict[int, Media] = {}
    for i in shown:
        given = media[i]
        own = given if isinstance(given, Mapping) else {"image": given}
        hosted[i] = {kind: _host(array) for kind, array in own.items()}
        for kind, array in hosted[i].items():
            check_media(kind, array[None], [dict(samples[i].rates)])
    return hosted


def host_references(sample: Sample) -> list[np.ndarray]:
    """The sample's references as arrays, uint8 [H, W, 3]."""
    arrays = [_host(image) for image in sample.references]
    if arrays:
        check_references([tuple(arrays)], 1)
    return arrays


def _host(array: "np.ndarray | Tensor") -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


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
    shown: Mapping[int, Media], samples: Sequence[Sample], indices: Iterable[int]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The samples as JSON takes them, each with the names of its files, and the files."""
    rows: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for i in indices:
        row, own = files_of(f"{i:04}", shown[i], samples[i].rates)
        files |= own
        references = []
        for picture in host_references(samples[i]):
            name = (
                f"reference-{hashlib.sha256(picture.tobytes()).hexdigest()[:16]}"  # one file for samples that share it
            )
            reference, own = files_of(name, {"image": picture}, {})
            references.append(reference)
            files |= own
        details = {str(name): plain(value) for name, value in samples[i].details.items()}
        rows.append(vars(samples[i]) | row | {"details": details, "references": references})
    return rows, files


def plain(value: object) -> object:
    """The value if it is a text or a number, or else a short text of it, however deeply it is nested."""
    return value if isinstance(value, str | int | float | None) else reprlib.repr(value)


def _add_line(path: Path, entry: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = read_regular(path) if os.path.lexists(path) else b""
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
