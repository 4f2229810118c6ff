"""docs/contributing.md adds a step rule: taken literally, on a copy, its changes apply, keep the rules, and train."""

import shlex

import pytest
from arch.test_arch_sizes import docstring_faults
from guides import Guide
from helpers import REPO

GUIDE = Guide("Add a step rule", "omni-sched")
(TRAIN,) = map(shlex.split, GUIDE.commands)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree that has the rule."""
    folder = tmp_path_factory.mktemp("copy")
    GUIDE.follow(folder, "apps", "packages/omni-sched/src", "pyproject.toml")
    return folder


def test_its_changes_apply_and_keep_the_rules(copy):
    assert 10 < len(GUIDE.lines("+")) < 40
    for path in GUIDE.changed:
        before, after = ((root / path).read_text("utf-8") for root in (REPO, copy))
        assert docstring_faults(after) == docstring_faults(before)
    GUIDE.python(copy, "-m", "ruff", "check", *GUIDE.changed, GUIDE.file)
    GUIDE.python(copy, "-m", "ruff", "format", "--check", *GUIDE.changed, GUIDE.file)


def test_its_test_passes(copy):
    assert "2 passed" in GUIDE.python(copy, "-m", "pytest", "-q", GUIDE.file)


def test_its_command_trains_and_leaves_the_repository_alone(copy, bright_url):
    GUIDE.train(copy, TRAIN, bright_url)
    assert GUIDE.leaves_the_tree_alone("linear_step")
