"""The files of a run folder from which its report is generated, and the functions that write them.

    runs/NAME/
      metrics.jsonl      a line per step                                           RunLog
      config.toml        the settings                                              the app
      versions.jsonl     a line per start: command, commit, versions               write_versions
      eval/000080/       the same prompts and seeds at every evaluation            write_eval
      eval/000080.png    a contact sheet of more of them, with their scores        write_eval
      samples/000082/    best and worst of some groups, of the last steps          write_samples
      now.json           the current activity, until the run ends                  write_now
      report.html        one page with all of this                                 write_report

Folders of images are written atomically, and a line truncated by a crash is ignored. Only one rank writes. Texts do not
contain credentials of URLs.
"""

import hashlib
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
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omni_reward.media import check_media, check_references
from omni_train.files import read_regular, write_atomically, write_folder_atomically
from omni_train.terminal import strip_credentials

from omni_rl.media.write import STRIP_FRAMES, Media, contact_sheet, encode_png, sample_files, score_label, still_image

if TYPE_CHECKING:
    from torch import Tensor

    Shown = np.ndarray | Tensor | Mapping[str, np.ndarray | Tensor]  # an image, or media by kind
    AllMedia = Sequence[Shown] | Mapping[int, Shown] | np.ndarray | Tensor

MAX_SHEET = 64  # images on the contact sheet of an evaluation
MAX_IMAGES = 16  # images of an evaluation with files
MAX_EVALS = 48  # evaluations in the folder
MAX_STEPS = 3  # steps with samples in the folder
MAX_GROUPS = 4  # groups shown of a step
SHEET_SIDE = 256  # pixels; larger images are scaled down to this on the sheet
LIBRARIES = ("omni-", "torch", "diffusers", "transformers", "peft", "safetensors", "numpy", "pillow", "vllm", "triton")


@dataclass(frozen=True)
class Sample:
    """A sample's prompt, score and origin.

    Args:
        prompt: text of the prompt.
        reward: score; None if the scorer abstained.
        group: the samples of a group are compared with each other.
        seed: seed of the noise.
        details: details of the score, from the scorer; `target` and `read` are the wanted and the recognized text.
        abstained: reason for a missing score.
        references: the input images of an edit, uint8 [H, W, 3] each, arrays or tensors.
        rates: `fps` of video, `sample_rate` of audio.
        answer: sampled text of a text model; the media are then the prompt's.
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


def write_now(folder: str | Path, text: str) -> None:
    """Write the current activity of the run."""
    write_atomically(Path(folder) / "now.json", json.dumps({"text": text, "at": time.time()}))


def write_eval(folder: str | Path, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
    """Write the first 16 samples of the evaluation after `step` steps, and a contact sheet of the first 64.

    The folder keeps 48 evaluations: the one closest to its neighbors is deleted, never the first or last.

    media: the media of each sample by kind: `image` uint8 [H, W, 3], `video` uint8 [F, H, W, 3], `audio` float32
    [S, C], arrays or tensors on any device; only written samples are copied to the host. A mapping by index may hold
    only these samples. Images may be given without a kind: uint8 [N, H, W, 3], or N arrays, uint8 [H, W, 3].

    Raises:
        ValueError: media have the wrong dtype or shape, or no rate.
    """
    shown = host_media(media, samples, range(min(MAX_SHEET, len(samples))))
    rows, files = _rows(shown, samples, range(min(MAX_IMAGES, len(samples))))
    labels = [score_label(sample.reward, sample.details) for sample in samples[:MAX_SHEET]]
    num_wide = STRIP_FRAMES if any("video" in sample_media for sample_media in shown.values()) else 1
    eval_folder = Path(folder) / "eval"
    write_folder_atomically(eval_folder / f"{step:06}", {"rows.json": _json(rows), **files})
    if all(shown.values()):  # text has no sheet
        stills = [still_image(sample_media) for sample_media in shown.values()]
        sheet = contact_sheet(stills, labels, columns=-(-8 // num_wide), max_side=SHEET_SIDE * num_wide)
        write_atomically(eval_folder / f"{step:06}.png", encode_png(np.asarray(sheet)))
    stored = step_folders(eval_folder)
    while len(stored) > MAX_EVALS:
        index = min(range(1, len(stored) - 1), key=lambda i: stored[i + 1][0] - stored[i - 1][0])
        _, dropped = stored.pop(index)
        dropped.with_suffix(".png").unlink(missing_ok=True)
        shutil.rmtree(dropped)


def write_samples(folder: str | Path, step: int, media: "AllMedia", samples: Sequence[Sample]) -> None:
    """Write the best and worst sample of the step's first 4 groups, and delete all but the last 3 steps.

    If a group has no scores, its first sample is written. media: see `write_eval`.

    Raises:
        ValueError: media have the wrong dtype or shape, or no rate.
    """
    entries: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for group, indices in first_groups(samples).items():
        best = best_and_worst(samples, indices)
        shown, shown_files = _rows(host_media(media, samples, best), samples, best)
        rewards = [samples[i].reward for i in indices]
        entries.append({"group": group, "prompt": samples[indices[0]].prompt, "rewards": rewards, "shown": shown})
        files |= shown_files
    samples_folder = Path(folder) / "samples"
    write_folder_atomically(samples_folder / f"{step:06}", {"groups.json": _json(entries), **files})
    for _, dropped in step_folders(samples_folder)[:-MAX_STEPS]:
        shutil.rmtree(dropped)


def write_versions(
    folder: str | Path,
    *,
    argv: Sequence[str] | None = None,
    hide: Iterable[str] = (),
    changed: Iterable[str] = (),
    facts: Mapping[str, Any] = {},
) -> None:
    """Add a start of the run: its command, the commit of the program and the versions of the libraries.

    Args:
        folder: the run folder.
        argv: the program and its arguments; None: those of this process.
        hide: flags whose values are omitted, such as `--scorer.url`.
        changed: settings of `config.toml` that differ from their defaults; the report shows them first.
        facts: additional entries, such as the number of ranks.
    """
    arguments = list(sys.argv if argv is None else argv)
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{_launcher()} {command_line(arguments, hide)}",
        "commit": _commit(Path(arguments[0]).resolve().parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "changed": list(changed),
        **facts,
    }
    _add_line(Path(folder) / "versions.jsonl", entry | {"packages": _packages()})


@cache
def _packages() -> dict[str, str]:
    """Return the versions of LIBRARIES, found by folder name, because reading all distributions' metadata is slow."""
    folders = chain.from_iterable(Path(place).glob("*.dist-info") for place in sys.path)
    names = {folder.name.partition("-")[0].lower().replace("_", "-") for folder in folders}
    return {name: version(name) for name in sorted(names) if name.startswith(LIBRARIES)}


def command_line(argv: Sequence[str], hide: Iterable[str] = ()) -> str:
    """Return the command as a shell line, with `...` for values of flags in `hide`, spelled with - or _."""
    hidden, quoted = set(hide), []
    for previous, word in pairwise(("", *argv)):
        flag, equals, _ = word.partition("=")
        if previous.replace("_", "-") in hidden:
            quoted.append("...")
        else:
            quoted.append(f"{flag}=..." if equals and flag.replace("_", "-") in hidden else shlex.quote(word))
    return " ".join(quoted)


def step_folders(parent: Path, last: float = math.inf) -> list[tuple[int, Path]]:
    """Return (step, folder) of the step folders up to `last`, in step order; empty if `parent` is missing."""
    if not parent.is_dir():
        return []
    folders = [path for path in parent.iterdir() if path.is_dir() and re.fullmatch("[0-9]+", path.name)]
    return sorted((step, path) for path in folders if (step := int(path.name)) <= last)


def _json(document: object) -> str:
    """Return JSON without the credentials of URLs."""
    return strip_credentials(json.dumps(document, default=str))


def host_media(media: "AllMedia", samples: Sequence[Sample], shown: Iterable[int]) -> dict[int, Media]:
    """Return the media of the samples at `shown` as arrays by kind. Only these samples are copied to the host."""
    if not isinstance(media, Mapping) and len(media) != len(samples):
        raise ValueError(f"media must have {len(samples)} samples, got {len(media)}")
    arrays: dict[int, Media] = {}
    for i in shown:
        sample = media[i]
        by_kind = sample if isinstance(sample, Mapping) else {"image": sample}
        arrays[i] = {kind: _host(array) for kind, array in by_kind.items()}
        for kind, array in arrays[i].items():
            check_media(kind, array[None], [dict(samples[i].rates)])
    return arrays


def host_references(sample: Sample) -> list[np.ndarray]:
    """Return the sample's references as arrays, uint8 [H, W, 3]."""
    images = [_host(image) for image in sample.references]
    if images:
        check_references([tuple(images)], 1)
    return images


def _host(array: "np.ndarray | Tensor") -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def first_groups(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Return the groups of a step to show, each with the indices of its samples."""
    members: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(i)
    return dict(list(members.items())[:MAX_GROUPS])


def best_and_worst(samples: Sequence[Sample], indices: Sequence[int]) -> list[int]:
    """Return the indices of the best and the worst sample, or one index if they are equal or there are no scores."""
    scored = [(reward, i) for i in indices if (reward := samples[i].reward) is not None and math.isfinite(reward)]
    if not scored:
        return list(indices[:1])
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    return list(dict.fromkeys((best[1], worst[1])))


def _rows(
    shown: Mapping[int, Media], samples: Sequence[Sample], indices: Iterable[int]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the samples as JSON rows with the names of their files, and the files."""
    rows: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for i in indices:
        row, row_files = sample_files(f"{i:04}", shown[i], samples[i].rates)
        files |= row_files
        references = []
        for image in host_references(samples[i]):
            digest = hashlib.sha256(image.tobytes()).hexdigest()[:16]  # samples with the same reference share its file
            reference, row_files = sample_files(f"reference-{digest}", {"image": image}, {})
            references.append(reference)
            files |= row_files
        details = {str(name): simplify(value) for name, value in samples[i].details.items()}
        rows.append(vars(samples[i]) | row | {"details": details, "references": references})
    return rows, files


def simplify(value: object) -> object:
    """Return the value if it is a string or a number, else a short representation."""
    return value if isinstance(value, str | int | float | None) else reprlib.repr(value)


def _add_line(path: Path, entry: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = read_regular(path) if os.path.lexists(path) else b""
    complete_lines = content[: content.rfind(b"\n") + 1]  # the rest was truncated by a crash
    write_atomically(path, complete_lines + _json(entry).encode() + b"\n")


def _launcher() -> str:
    """Return the launcher of this process: python, or torchrun with its number of nodes and processes per node."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "python"
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    return f"torchrun{f' --nnodes {nodes}' * (nodes != '1')} --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"


def _commit(folder: Path) -> str:
    """Return the commit of the folder's repository, with `+` if files are modified; empty without a repository."""
    git = shutil.which("git")
    git_args = ["-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    return subprocess.run([git, *git_args], capture_output=True, text=True).stdout.strip() if git else ""
