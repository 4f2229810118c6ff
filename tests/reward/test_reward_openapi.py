"""The OpenAPI document: it is served, it is what the server does, and no generated call gets an answer beyond it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import requests
from omni_reward.media import MEDIA_KINDS
from omni_reward.wire import MAX_ID_CHARS, PROTOCOL
from reward.reward_helpers import halves

TESTS = Path(__file__).parents[1]


def schemathesis(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """All of its checks on the server there, with valid bodies from schemathesis_hooks.py and its own invalid calls."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"SCHEMATHESIS_HOOKS": "reward.schemathesis_hooks", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--checks", "all"]
    command += ["--max-examples", "100", "--seed", "1", "--generation-database", "none", "--no-color", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_no_generated_call_gets_an_answer_beyond_the_document(serve: Callable[..., str], tmp_path: Path) -> None:
    done = schemathesis(serve(halves, token="s3cret"), tmp_path, "--header", "Authorization: Bearer s3cret")
    assert done.returncode == 0, done.stdout + done.stderr
    (count,) = re.findall(r"(\d+) generated, \1 passed", done.stdout)
    assert int(count) > 100


def test_the_document_has_the_bounds_and_kinds_of_the_code(serve: Callable[..., str]) -> None:
    schemas = requests.get(serve(halves) + "/openapi.json", timeout=10).json()["components"]["schemas"]
    info, reply = schemas["Info"]["properties"], schemas["Reply"]["properties"]
    assert info["protocol"]["const"] == reply["protocol"]["const"] == PROTOCOL
    assert info["media"]["items"]["enum"] == sorted(MEDIA_KINDS)
    assert reply["request_id"]["maxLength"] == MAX_ID_CHARS
    live = requests.get(serve(halves) + "/info", timeout=10).json()
    assert live.keys() == info.keys()
    assert live["limits"].keys() == info["limits"]["properties"].keys()
