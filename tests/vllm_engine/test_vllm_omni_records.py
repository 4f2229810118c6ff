"""The records of vLLM-Omni's BAGEL and HunyuanImage-3.0 that tests compare ours with are what these ports draw."""

import subprocess
import sys

import pytest
import torch
from helpers import REPO
from safetensors import safe_open
from safetensors.torch import load_file


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["bagel", "hunyuan_image"])
def test_the_record_is_what_the_port_draws(tmp_path, model):
    script, again = REPO / "scripts" / f"record_{model}.py", tmp_path / "again.safetensors"
    subprocess.run([sys.executable, script, again], check=True, cwd=tmp_path)
    record = REPO / "tests" / "rollout" / f"{model}_of_vllm_omni.safetensors"
    kept, drawn = load_file(record), load_file(again)
    assert kept.keys() == drawn.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(drawn[name], tensor, rtol=0, atol=3e-5, msg=name)
    with safe_open(record, "pt") as old, safe_open(again, "pt") as new:
        assert old.metadata()["facts"] == new.metadata()["facts"]  # beside them is the version that drew them
