"""The files of docker/: what they copy and run is there. No test builds them, as that needs a daemon."""

import re
import tomllib

import pytest
from helpers import REPO

FILES = sorted((REPO / "docker").glob("*.Dockerfile"))


def test_there_is_one_for_each_kind_of_device():
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "npu.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_they_start_is_there(path):
    text = path.read_text("utf-8")
    for script in re.findall(r"\b(scripts/\w+)", text):
        assert (REPO / script).is_file()
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = set(re.findall(r"omni-rl:\w+ make ([\w-]+)", text))
    assert commands or "omni-rl:npu omni-rl doctor" in text
    assert commands <= targets
    project = tomllib.loads((REPO / "packages" / "omni-rl" / "pyproject.toml").read_text("utf-8"))["project"]
    (command,) = re.findall(r'^CMD \["([\w-]+)"', text, re.MULTILINE)
    assert command in project["scripts"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_their_python_is_one_that_the_packages_name(path):
    (version,) = re.findall(r"^FROM \S*\bpy(?:thon:)?([\d.]+)", path.read_text("utf-8"), re.MULTILINE)
    classifiers = tomllib.loads((REPO / "packages" / "omni-rl" / "pyproject.toml").read_text("utf-8"))["project"][
        "classifiers"
    ]
    assert f"Programming Language :: Python :: {version}" in classifiers


def test_no_image_takes_history_or_secrets():
    ignored = set((REPO / ".dockerignore").read_text("utf-8").split())
    assert {".git", "**/.env*", "*token*", "**/*.token", "**/.netrc", "wandb", "trackio"} <= ignored
