"""Report devices, engines and packages, and how to install missing ones. Uses no network."""

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
from omni_rl.run.sinks import TRACKERS
from omni_rl.settings.printing import Parser

REQUIRED_PACKAGES = ("torch", "diffusers", "transformers", "peft")  # required by every trainer
EXTRAS = {  # module -> its purpose, and the extra of omni-rl that installs it
    "rapidocr": ("the scorer ocr", "scorer"),
    "pyarrow": ("prompts in .parquet", "parquet"),
    "s3fs": ("--checkpoint-url s3://", "remote"),
    **{name: (f"--tracking.to {name}", name) for name in TRACKERS},
}
CLONE = "clone the sources of omni-rl, and start in their folder"


class Finding(NamedTuple):
    """One line of the report. get: how to install a missing part."""

    name: str
    state: Literal["ok", "missing", "note"]
    text: str
    get: str = ""


def main(argv: list[str] | None = None) -> None:
    """Run the command line. The exit code is 1 if no trainer can run."""
    parser = Parser(prog="omni-rl doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    findings = [*machine(), *packages(), *engines(), *files(), *hub()]
    can_train = not any(finding.state == "missing" for finding in findings if finding.name in REQUIRED_PACKAGES)
    if args.json:
        print(json.dumps({"can_train": can_train, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        lines = [f"{row.state:<9}{row.name:<19} {row.text}{row.get and f': {row.get}'}" for row in findings]
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
    except (ImportError, OSError) as exc:  # OSError: a shared library is missing
        yield Finding("torch", "missing", str(exc), 'pip install "omni-rl"')
        return
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        yield Finding("devices", "note", "only the CPU")
        return
    count, free = torch.accelerator.device_count(), free_memory(torch.device(kind.type, 0)) / 1e9
    yield Finding("devices", "ok", f"{count} of {kind.type}, the first with {free:.1f} GB free")


def packages() -> Iterator[Finding]:
    """Report the libraries required by trainers and by the extras."""
    for name in (*REQUIRED_PACKAGES, *EXTRAS):
        purpose, extra = EXTRAS.get(name, ("every trainer needs it", ""))
        if is_installed(name):
            yield Finding(name, "ok", version(name))
        else:
            yield Finding(name, "missing", purpose, f'pip install "omni-rl{extra and f"[{extra}]"}"')


def is_installed(name: str) -> bool:
    """Return True if a module is installed. A plain folder of that name, such as wandb's, does not count."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def engines() -> Iterator[Finding]:
    """Report the engines of --engine."""
    for name, row in ENGINES.items():
        if all(map(is_installed, (row.library,) if row.library else REQUIRED_PACKAGES)):
            yield Finding(f"--engine {name}", "ok", "works")
        else:
            yield Finding(f"--engine {name}", "missing", "samples", row.install or 'pip install "omni-rl"')


def files() -> Iterator[Finding]:
    """Report the files in the working folder for presets named tiny-..."""
    for folder, contents in (("checkpoints", "small models"), ("data", "prompts")):
        names = sorted(path.name for path in Path(folder).glob("*/") if path.is_dir())
        missing = Finding(folder, "missing", f"{contents} other than those of tiny-signs", CLONE)
        yield Finding(folder, "ok", ", ".join(names)) if names else missing


def hub() -> Iterator[Finding]:
    """Report the token for downloads from the hub."""
    if not is_installed("huggingface_hub"):
        return
    from huggingface_hub import get_token

    get = "accept the model's license on its page, then `hf auth login`, or set HF_TOKEN"
    if get_token():
        text = f"{'HF_TOKEN' if os.environ.get('HF_TOKEN') else 'that of `hf auth login`'}; gated models also"
        yield Finding("token of the hub", "ok", f"{text} need their license to be accepted")
    else:
        yield Finding("token of the hub", "missing", "gated models, such as SD3.5 and FLUX.1-dev, need one", get)


if __name__ == "__main__":
    main()
