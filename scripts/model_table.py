"""Train every model with every algorithm, two steps of small checkpoints, and write which did to docs/models.md.

    python scripts/model_table.py              every model, in minutes
    python scripts/model_table.py z-image      this one; the other rows stay

The runs are the tests of tests/apps/test_app_matrix.py; if one fails, the page stays as it is.
"""

import subprocess
import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from leaderboard_page import fill

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


def table(cells: Collection[str], run: str, block: str) -> str:
    """A row for each model and a column for each algorithm, and when it was run; rows of `block` that it lacks stay."""
    models, algorithms = (list(dict.fromkeys(cell.split(": ")[side] for cell in cells)) for side in range(2))
    rows = {line.split(" | ")[0]: line for line in block.splitlines()[2:]}
    for model in models:
        words = ["yes" if f"{model}: {name}" in cells else "" for name in algorithms]
        rows[f"| {model}"] = f"| {' | '.join([model, *words, run])} |"
    head = f"| {' | '.join(['model', *algorithms, 'run'])} |"
    return "\n".join([head, "|---" * (2 + len(algorithms)) + "|", *rows.values()]) + "\n"


def main(models: Iterable[str]) -> int:
    """The exit code."""
    trained, page = Trained(), PAGE.read_text("utf-8")
    wanted = " or ".join(f"[{model}:" for model in models) or "trains_a_model"
    tests = [str(ROOT / "tests" / "apps" / "test_app_matrix.py"), "-k", wanted]
    if code := pytest.main(["-q", f"--rootdir={ROOT}", *tests], plugins=[trained]):
        return code
    words = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    block = page.partition("<!-- trained -->")[2].partition("<!-- end -->")[0].strip()
    run = f"{datetime.now(UTC):%Y-%m-%d}, {commit}"
    PAGE.write_text(fill(page, {"trained": table(trained.cells, run, block)}), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
