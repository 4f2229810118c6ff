"""Report what is installed, the devices and engines, and how to get what is missing. Uses no network."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from omni_rl import __version__
from omni_rl.run.engines import ENGINES

NEEDED = ("torch", "diffusers", "transformers", "peft")  # by every trainer
EXTRAS = {  # module -> what it is for, and the extra of omni-rl that brings it
    "rapidocr": ("the scorer ocr", "scorer"),
    "av": (".mp4, .webm and .flac", "video"),
    "pyarrow": ("prompts in .parquet", "parquet"),
    "tensorboard": ("--tracking.to tensorboard", "tensorboard"),
    "wandb": ("--tracking.to wandb", "wandb"),
    "trackio": ("--tracking.to trackio", "trackio"),
}
CLONE = "clone the sources of omni-rl, and start in their folder"


class Finding(NamedTuple):
    """One line of the report. get: how to get what is missing."""

    name: str
    state: Literal["ok", "missing", "note"]
    text: str
    get: str = ""


def main(argv: list[str] | None = None) -> None:
    """Run the command line, with exit code 1 if nothing can train."""
    parser = argparse.ArgumentParser(prog="omni-rl doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    found = [*machine(), *packages(), *engines(), *files()]
    can_train = not any(finding.state == "missing" for finding in found if finding.name in NEEDED)
    if args.json:
        print(json.dumps({"can_train": can_train, "findings": [finding._asdict() for finding in found]}, indent=1))
    else:
        lines = [f"{it.state:<9}{it.name:<20}{it.text}{it.get and f': {it.get}'}" for it in found]
        ending = "Trainers can run here." if can_train else 'No trainer can run here: pip install "omni-rl"'
        print("\n".join([*lines, "", ending]))
    sys.exit(0 if can_train else 1)


def machine() -> Iterator[Finding]:
    """Report Python, the threads and, if torch is installed, the devices."""
    yield Finding("omni-rl", "ok", f"{__version__}, Python {platform.python_version()} on {platform.platform()}")
    threads = os.environ.get("OMP_NUM_THREADS", "not set, so a rank on a CPU takes one")
    yield Finding("threads", "note", f"{os.cpu_count()} CPUs; OMP_NUM_THREADS {threads}")
    try:
        import torch
        from omni_train.dist import free_memory
    except (ImportError, OSError) as exc:  # OSError: one of its libraries is missing
        yield Finding("torch", "missing", str(exc), 'pip install "omni-rl"')
        return
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        yield Finding("devices", "note", "the CPU alone")
        return
    count, free = torch.accelerator.device_count(), free_memory(torch.device(kind.type, 0)) / 1e9
    yield Finding("devices", "ok", f"{count} of {kind.type}, the first with {free:.1f} GB free")


def packages() -> Iterator[Finding]:
    """Report the libraries that trainers need, and those of the extras."""
    for name in (*NEEDED, *EXTRAS):
        purpose, extra = EXTRAS.get(name, ("every trainer needs it", ""))
        if is_installed(name):
            yield Finding(name, "ok", version(name))
        else:
            yield Finding(name, "missing", purpose, f'pip install "omni-rl{extra and f"[{extra}]"}"')


def is_installed(name: str) -> bool:
    """True if a module is installed. A folder of that name in the working folder, as wandb leaves one, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def engines() -> Iterator[Finding]:
    """Report the engines that --engine may name."""
    for name, row in ENGINES.items():
        if all(map(is_installed, (row.library,) if row.library else NEEDED)):
            yield Finding(f"--engine {name}", "ok", "works")
        else:
            yield Finding(f"--engine {name}", "missing", "samples", row.install or 'pip install "omni-rl"')


def files() -> Iterator[Finding]:
    """Report the files that presets named tiny-... need in the working folder."""
    for folder, what in (("checkpoints", "small models"), ("data", "prompts")):
        names = sorted(path.name for path in Path(folder).glob("*/") if path.is_dir())
        yield Finding(folder, "ok", ", ".join(names)) if names else Finding(folder, "missing", f"the {what}", CLONE)


if __name__ == "__main__":
    main()
