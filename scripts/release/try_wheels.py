"""Test an installation with plain pip: `make test-wheels`.

It builds the wheels, installs them from the lowest package up in clean environments, and runs the examples of each
package's README right after its installation, so that an example can use only what its package installs. Then
`omni-rl train` takes two steps in an empty folder.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import wheels

ROOT = Path(__file__).parents[2]
ON_TORCH = {  # package -> its extras, and a module that must not be installed with it
    "omni-sched": ("", "requests"),
    "omni-losses": ("", "requests"),
    "omni-train": ("", "diffusers"),
    "omni-rollout": ("[diffusers]", "omni_reward"),
    "omni-rl": ("[scorer]", "vllm"),
}
START_S = 120


def main() -> None:
    """Build, install and run; stop at the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("checkpoints", "data"):
            (place / name).symlink_to(ROOT / name)
        built = dict(zip(wheels.PACKAGES, wheels.build(place / "dist", wheels.PACKAGES), strict=True))
        try_rewards(place, built["omni-reward"])
        python = environment(place / "on-torch")
        for package, (extras, absent) in ON_TORCH.items():
            if package == "omni-rl":
                install(python, f"{built['omni-reward']}[server,ocr]")
            install(python, f"{built[package]}{extras}")
            assert not has(python, absent), f"{package} brings {absent}"
            for code in examples(package):
                run(python, code, place)
        (place / "empty").mkdir()
        try_command(place / "empty", python)
    print("all wheels install, and their READMEs' examples run")


def environment(folder: Path) -> Path:
    """Create an environment of this Python with pip and nothing else, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, what: str) -> None:
    """Install a wheel with plain pip; under Python 3.11, with the versions used by the other tests."""
    pins = ["-c", str(ROOT / "constraints" / "cpu-py311.txt")] if sys.version_info[:2] == (3, 11) else ["torch==2.13.0"]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", what, *pins], check=True)
    print("installed", Path(what).name, flush=True)


def has(python: Path, module: str) -> bool:
    """True if the environment has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], env=clean()).returncode == 0


def examples(package: str) -> list[str]:
    """Return the Python blocks in a package's README that do not need vLLM."""
    text = (ROOT / "packages" / package / "README.md").read_text("utf-8")
    return [code for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "vllm" not in code]


def run(python: Path, code: str, place: Path) -> None:
    """Run a program in the folder, away from the sources."""
    (place / "example.py").write_text(code, "utf-8")
    subprocess.run([str(python), "example.py"], cwd=place, env=clean(), check=True)


def clean() -> dict[str, str]:
    """Return this process's environment variables without those that point to other modules."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def try_rewards(place: Path, wheel: Path) -> None:
    """Install the client, then the server, in an environment without torch, and call it as in the README."""
    python = environment(place / "rewards")
    install(python, str(wheel))
    run(python, "import omni_reward", place)
    install(python, f"{wheel}[server,ocr]")
    assert not has(python, "torch"), "omni-reward brings torch"
    ports = {"8100": free_port(), "8101": free_port()}
    servers = [
        subprocess.Popen(
            [str(python), "-m", "omni_reward.server", "--scorer", "ocr", "--option", "reading=line", "--port", port],
            cwd=place,
            env=clean(),
        )
        for port in ports.values()
    ]
    try:
        for port in ports.values():
            wait_for(port)
        for code in examples("omni-reward"):
            for known, port in ports.items():
                code = code.replace(f"127.0.0.1:{known}", f"127.0.0.1:{port}")
            run(python, code, place)
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def free_port() -> str:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def wait_for(port: str) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def try_command(place: Path, python: Path) -> None:
    """Take two training steps in an empty folder with the trainer, recipe, model and prompts in the wheel."""
    (place / "few.txt").write_text('a pink sign that says "K7QX"\na blue sign that says "AB12"\n', "utf-8")
    train = [str(python.parent / "omni-rl"), "train", "flowgrpo", "--preset", "tiny-signs", "--name", "tried"]
    little = [
        "--train-steps",
        "2",
        "--prompts-per-step",
        "2",
        "--group-size",
        "2",
        "--batch-size",
        "4",
        "--eval.prompts",
        "few.txt",
    ]
    subprocess.run([*train, *little], cwd=place, env=clean(), check=True)
    assert (place / "runs" / "tried" / "report.html").exists()


if __name__ == "__main__":
    main()
