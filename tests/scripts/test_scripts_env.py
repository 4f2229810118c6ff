"""scripts/env with a uv that notes what it is told."""

import os
import shutil
import subprocess

import pytest
from helpers import REPO

UV = """#!/bin/sh
echo "$@" >> told
[ "$1" != venv ] || mkdir -p .venv
"""


@pytest.fixture
def told(tmp_path):
    """A function that runs scripts/env in a folder of its own, and returns what uv was told."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(REPO / "scripts/env", tmp_path / "scripts/env")
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)

    def run():
        (tmp_path / "told").write_text("")
        env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        subprocess.run([tmp_path / "scripts/env", "true"], check=True, env=env)
        return (tmp_path / "told").read_text().splitlines()

    return run


def test_what_is_installed_is_compiled_once_for_each_list_of_it(told, tmp_path):
    sync = "sync --quiet --inexact"
    assert told() == ["venv --quiet --seed .venv", f"{sync} --compile-bytecode"]
    assert told() == [sync]
    stamp = (tmp_path / ".venv/compiled").stat().st_mtime
    (tmp_path / "uv.lock").touch()
    os.utime(tmp_path / "uv.lock", (stamp + 10, stamp + 10))
    assert told() == [f"{sync} --compile-bytecode"]
