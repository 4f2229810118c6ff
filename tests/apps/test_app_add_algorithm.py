"""docs/contributing.md adds an algorithm: taken literally, on a copy, its changes apply, keep the rules, and train."""

import shlex

import pytest
from arch.test_arch_sizes import docstring_faults
from guides import Guide
from helpers import REPO

GUIDE = Guide("Add an algorithm", "omni-losses")
CONFIGURE, TRAIN = map(shlex.split, ["scripts/configuration.py", GUIDE.commands[-1]])


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree that has the algorithm."""
    folder = tmp_path_factory.mktemp("copy")
    GUIDE.follow(folder, "apps", "packages/omni-losses/src", *CONFIGURE, "docs/configuration.md", "pyproject.toml")
    return folder


def test_it_adds_fewer_than_40_lines():
    assert 10 < len(GUIDE.lines("+")) < 40


def test_its_changes_apply_and_keep_the_rules(copy):
    for path in GUIDE.changed:
        before, after = ((root / path).read_text("utf-8") for root in (REPO, copy))
        assert docstring_faults(after) == docstring_faults(before)
    GUIDE.python(copy, "-m", "ruff", "check", *GUIDE.changed, GUIDE.file)
    GUIDE.python(copy, "-m", "ruff", "format", "--check", *GUIDE.changed, GUIDE.file)
    assert f"`python {' '.join(CONFIGURE)}`" in GUIDE.section
    GUIDE.python(copy, *CONFIGURE)
    assert "`cispo`" in (copy / "docs" / "configuration.md").read_text("utf-8")


def test_its_test_passes(copy):
    assert "1 passed" in GUIDE.python(copy, "-m", "pytest", "-q", GUIDE.file)


def test_its_command_trains_and_leaves_the_repository_alone(copy, bright_url):
    for line in GUIDE.train(copy, TRAIN, bright_url):
        assert line["policy/ratio_max_dev"] > 0  # the second update's, whose weights are no longer the old ones
    assert GUIDE.leaves_the_tree_alone(" cispo_loss")
