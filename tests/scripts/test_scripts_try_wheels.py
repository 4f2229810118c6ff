"""What `make test-wheels` runs: every example of the packages' READMEs but those that need vLLM."""

import sys
import zipfile
from pathlib import Path

import pytest
import try_wheels
import wheels


def test_every_package_is_tried():
    assert {"omni-reward", *try_wheels.ON_TORCH} == set(wheels.PACKAGES)


def test_examples_are_the_blocks_of_python():
    found = {package: len(try_wheels.examples(package)) for package in wheels.PACKAGES}
    assert found["omni-sched"] == 2
    assert found["omni-rollout"] == 1  # the other one needs vLLM
    assert all(found[package] for package in set(wheels.PACKAGES) - {"omni-rl"})


def test_an_example_that_fails_ends_the_trial(tmp_path):
    with pytest.raises(try_wheels.subprocess.CalledProcessError):
        try_wheels.run(Path(sys.executable), "raise SystemExit(3)", tmp_path)


def test_an_example_sees_no_sources_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "hidden.py").write_text("")
    with pytest.raises(try_wheels.subprocess.CalledProcessError):
        try_wheels.run(Path(sys.executable), "import hidden", tmp_path)
    assert not try_wheels.has(Path(sys.executable), "hidden")


def test_the_wheel_of_omni_rl_has_the_trainers_themselves(tmp_path):
    (wheel,) = wheels.build(tmp_path, ("omni-rl",))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"omni_rl/apps/{path.name}" for path in (wheels.ROOT / "apps").glob("*.py")} <= names
    text = zipfile.ZipFile(wheel).read("omni_rl/apps/train_flowgrpo.py")
    assert text == (wheels.ROOT / "apps" / "train_flowgrpo.py").read_bytes()
