"""An engine for the tests of a file: a process has one at a time, and the next file creates another."""

from importlib.util import find_spec

import pytest
import torch
from train.conftest import run_ranks as run_ranks
from vllm_omni_helpers import load_net, open_engine

if find_spec("vllm_omni") is None:  # tests/conftest.py says so at the end of the run
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def engine():
    engine = open_engine()
    yield engine
    engine.close()


@pytest.fixture
def net(engine):
    """A trainer's own transformer; afterwards the engine has the checkpoint's weights again."""
    net = load_net()
    before = {name: view.clone() for name, view in engine.weights().items()}
    yield net
    with torch.no_grad():
        for name, view in engine.weights().items():
            view.copy_(before[name])
    engine._adopted.clear()
