"""Where tests stand and how they find what they share."""

import tomllib
from collections import Counter

import helpers
from helpers import REPO


def test_helpers_know_the_repository_and_the_checkpoint():
    assert (REPO / "pyproject.toml").is_file()
    assert helpers.CHECKPOINT.is_relative_to(REPO / "checkpoints")


def test_pytest_imports_files_by_their_path():
    options = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert "--import-mode=importlib" in options["addopts"].split()
    assert options["pythonpath"] == ["apps", "scripts", "tests"]


def test_no_two_files_that_tests_may_import_share_a_name():
    paths = [path for folder in ("apps", "scripts", "tests") for path in REPO.glob(f"{folder}/**/*.py")]
    names = Counter(path.name for path in paths if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
    assert "__init__.py" not in names
