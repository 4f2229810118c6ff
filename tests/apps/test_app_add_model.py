"""docs/contributing.md adds a model: taken literally, on a copy, its changes apply, keep the rules, draw and train."""

import re
import shlex

import pytest
from arch.test_arch_sizes import docstring_faults
from guides import Guide

GUIDE = Guide("Add a model", "omni-rollout")
PYTEST, BUILD, TRAIN = map(shlex.split, GUIDE.commands)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree that has the model."""
    folder = tmp_path_factory.mktemp("copy")
    GUIDE.follow(folder, "apps", "packages", "scripts", "tests", "pyproject.toml")
    return folder


def test_a_model_is_a_file_of_at_most_90_lines_a_row_a_builder_and_a_row_of_the_tests(copy):
    assert len(GUIDE.code.splitlines()) <= 90
    assert GUIDE.file.startswith("packages/omni-rollout/src/omni_rollout/models/")
    files = [path.rpartition("/")[2] for path in GUIDE.changed]
    assert files == ["__init__.py", "build_tiny_models.py", "model_rows.py"]
    assert GUIDE.lines("-") == []
    assert docstring_faults(GUIDE.code) == []
    GUIDE.python(copy, "-m", "ruff", "check", GUIDE.file, *GUIDE.changed)
    GUIDE.python(copy, "-m", "ruff", "format", "--check", GUIDE.file, *GUIDE.changed)


def test_its_pictures_are_those_of_the_stock_pipeline_and_it_is_held_to_all_that_models_are(copy):
    said = GUIDE.python(copy, *PYTEST)
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) >= 20
    assert "skipped" not in said


def test_it_trains_and_the_repository_does_not_know_it(copy, bright_url):
    GUIDE.python(copy, *BUILD)
    GUIDE.train(copy, TRAIN, bright_url)
    assert GUIDE.leaves_the_tree_alone("ovis")
