"""The oldest torch that the packages allow has all that they use, as far as the installed one has it.

scripts/release/torch_floor.py has read that from the oldest one.
"""

import json
import re
import tomllib

import pytest
import torch_floor
from helpers import REPO

FLOOR = json.loads(torch_floor.FILE.read_text("utf-8"))


def test_the_oldest_torch_has_what_packages_and_apps_use():
    used = set().union(*map(torch_floor.uses, torch_floor.sources()))
    missing = [use for use in sorted(used - set(FLOOR["uses"])) if torch_floor.is_there(use)]
    assert missing == [], (
        f"torch {FLOOR['torch']} may lack these: run scripts/release/torch_floor.py as it says, or raise the floor"
    )


def test_all_packages_ask_for_that_torch():
    texts = [path.read_text("utf-8") for path in REPO.glob("packages/*/pyproject.toml")]
    floors = {floor for text in texts for floor in re.findall(r"\btorch>=([\d.]+)", json.dumps(tomllib.loads(text)))}
    assert floors == {".".join(FLOOR["torch"].split(".")[:2])}


@pytest.mark.parametrize(
    ("source", "use", "is_there"),
    [
        ("import torch\ntorch.compile(f, recompile_limit=1)", "torch.compile(recompile_limit)", True),
        ("import torch\ntorch.compile(f, no_such=1)", "torch.compile(no_such)", False),
        ("import torch.distributed as dist\ndist.no_such(x)", "torch.distributed.no_such", False),
        ("from torch.distributed.fsdp import no_such", "torch.distributed.fsdp.no_such", False),
        ("from torch import nn\nnn.functional.silu(x)", "torch.nn.functional.silu", True),
        ("from torch import Tensor\ndef f(x: Tensor): x.no_such", "torch.Tensor.no_such", False),
        (
            "from torch.utils.checkpoint import SelectiveCheckpointContext as C\ndef f(c: C): c.op_output",
            "torch.utils.checkpoint.SelectiveCheckpointContext.op_output",
            True,
        ),
    ],
)
def test_a_use_is_found_and_asked_for(source: str, use: str, is_there: bool):
    assert use in torch_floor.uses(source)
    assert torch_floor.is_there(use) == is_there


def test_names_of_others_are_no_uses():
    assert (
        torch_floor.uses(
            "import numpy as np\nfrom safetensors import torch as files\nnp.compile(x, y=1)\nfiles.load(x)"
        )
        == set()
    )
