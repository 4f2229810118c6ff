"""Train every model with every algorithm, two steps of small checkpoints, and write which did to docs/models.md.

    python scripts/model_table.py

The runs are the tests of tests/apps/test_app_matrix.py, all of them, in minutes; if one fails, the page stays as it is.
"""

import subprocess
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import pytest
from leaderboard_page import fill, markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"


class Trained:
    """A plugin of pytest that keeps the cells, `MODEL: ALGORITHM`, of which the tests say that they trained."""

    def __init__(self) -> None:
        self.cells: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each part of a test."""
        if report.when == "call" and report.passed:
            self.cells += [str(cell) for name, cell in report.user_properties if name == "trained"]


def table(cells: Collection[str]) -> str:
    """A row for each model and a column for each algorithm."""
    models, algorithms = (list(dict.fromkeys(cell.split(": ")[side] for cell in cells)) for side in range(2))
    rows = [[model, *("yes" if f"{model}: {name}" in cells else "" for name in algorithms)] for model in models]
    return markdown([["model", *algorithms], ["---"] * (1 + len(algorithms)), *rows])


def main() -> int:
    """The exit code."""
    trained = Trained()
    tests = [str(ROOT / "tests" / "apps" / "test_app_matrix.py"), "-m", "not gpu", "-k", "trains_a_model"]
    if code := pytest.main(["-q", f"--rootdir={ROOT}", *tests], plugins=[trained]):
        return code
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    head = f"Run on {datetime.now(UTC):%Y-%m-%d} at commit {commit}.\n\n"
    PAGE.write_text(fill(PAGE.read_text("utf-8"), {"trained": head + table(trained.cells)}), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
