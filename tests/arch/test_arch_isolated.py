"""Each package installs alone, with its own dependencies and no more, and imports there."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers import REPO, sampled

pytestmark = pytest.mark.timeout(900)  # the first time, uv may have to fetch what it then keeps

MODULES = {  # package -> what must import without any extra
    "omni-sched": ["omni_sched"],
    "omni-losses": ["omni_losses"],
    "omni-reward": ["omni_reward", "omni_reward.client", "omni_reward.wire"],
    "omni-rollout": ["omni_rollout", "omni_rollout.types", "omni_rollout.testing"],
    "omni-train": [
        f"omni_train.{name}"
        for name in (
            *("dist", "shard", "lora", "weights.full", "optim", "prompts.sampler", "log"),
            *("checkpoint.store", "weights.card", "signals"),
        )
    ],
}
SIBLINGS = {"omni-rollout": {"omni-sched"}}  # what else of ours is installed along
ABSENT = {
    "omni-sched": {"diffusers", "transformers", "peft", "safetensors", "requests", "numpy", "tyro"},
    "omni-losses": {"diffusers", "transformers", "peft", "safetensors", "requests", "numpy", "tyro"},
    "omni-reward": {"torch", "diffusers", "starlette", "uvicorn", "rapidocr", "onnxruntime"},
    "omni-rollout": {"diffusers", "transformers", "peft", "requests", "vllm", "tyro"},
    "omni-train": {"diffusers", "starlette", "rapidocr", "tyro"},
}
PROBE = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
try:
    import torch
except ModuleNotFoundError:
    torch = None
installed = [dist.name.lower().replace("_", "-") for dist in importlib.metadata.distributions()]
print(json.dumps({"installed": installed, "torch": torch is not None}))
"""


def probe(package: str) -> subprocess.CompletedProcess[str]:
    """Installs the package into an environment of its own, imports its modules there and tells what is there."""
    uv = shutil.which("uv") or shutil.which("uv", path=REPO / ".tools" / "bin")
    assert uv, "uv must be on the PATH or in .tools/bin"
    env = os.environ | {"UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")}
    command = [uv, "run", "--quiet", "--isolated", "--exact", "--no-dev", "--python", sys.executable]
    command += ["--package", package, "python", "-I", "-c", PROBE, *MODULES[package]]
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("package", sampled(MODULES, 1, always=["omni-reward"]))  # `make test-wheels` takes each
def test_the_package_installs_and_imports_alone(package: str):
    result = probe(package)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    installed = set(found["installed"])
    assert installed & ABSENT[package] == set()
    assert {name for name in installed if name.startswith("omni-")} == {package} | SIBLINGS.get(package, set())
    assert found["torch"] == (package != "omni-reward")
