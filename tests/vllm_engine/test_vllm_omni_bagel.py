"""The record of vLLM-Omni's BAGEL that tests compare ours with is what that port draws."""

import subprocess
import sys

import pytest
import torch
from helpers import REPO
from safetensors import safe_open
from safetensors.torch import load_file


@pytest.mark.timeout(300)
def test_the_record_is_what_the_port_draws(tmp_path):
    script, again = REPO / "scripts" / "record_bagel.py", tmp_path / "again.safetensors"
    subprocess.run([sys.executable, script, again], check=True, cwd=tmp_path)
    record = REPO / "tests" / "rollout" / "bagel_of_vllm_omni.safetensors"
    kept, drawn = load_file(record), load_file(again)
    assert kept.keys() == drawn.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(drawn[name], tensor, rtol=0, atol=3e-5, msg=name)
    with safe_open(record, "pt") as old, safe_open(again, "pt") as new:
        assert old.metadata() == new.metadata()
