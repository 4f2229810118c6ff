"""Where tests stand and how they find what they share."""

from collections import Counter

from helpers import REPO


def test_no_two_files_that_tests_may_import_share_a_name():
    paths = [path for folder in ("apps", "scripts", "tests") for path in REPO.glob(f"{folder}/**/*.py")]
    names = Counter(path.name for path in paths if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
    assert "__init__.py" not in names
