"""Train every model with every algorithm for two steps, on small checkpoints; write docs/evidence/models.md.

    python scripts/model_table.py              every model, in minutes
    python scripts/model_table.py z-image      this model; the other rows are kept
    python scripts/model_table.py --only distill      this algorithm; the other columns are kept

The runs are the tests in tests/apps/test_app_matrix.py; if one fails, the page is not changed.
"""

import argparse
import subprocess
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from leaderboard_page import fill

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "models.md"


class Trained:
    """A pytest plugin that collects the cells, `MODEL: ALGORITHM`, that the tests report as trained."""

    def __init__(self) -> None:
        self.cells: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the cells of a passed test; pytest calls it after each part of a test."""
        if report.when == "call" and report.passed:
            self.cells += [str(cell) for name, cell in report.user_properties if name == "trained"]


def table(cells: Collection[str], run: str, block: str, *, only: str = "") -> str:
    """Return a row per model and a column per algorithm, with the date of the run; other cells of `block` are kept.

    only: the only algorithm that was run; it comes last, and its run is listed with that of the others.
    """
    models, algorithms = (list(dict.fromkeys(cell.split(": ")[side] for cell in cells)) for side in range(2))
    head, _, *lines = [line.strip("| ").split(" | ") for line in block.splitlines()] or [[], []]
    before = {model: dict(zip(head[1:], [*told, when], strict=True)) for model, *told, when in lines}
    if only:
        algorithms = [*(name for name in head[1:-1] if name != only), only]
    for model in models:
        own, old = {name: "yes" for name in algorithms if f"{model}: {name}" in cells}, before.get(model, {})
        when = f"{old.get('run', '').partition(f'; {only} ')[0]}; {only} {run}" if only else run
        before[model] = (old if only else {}) | own | {"run": when}
    rows = [[model, *(told.get(name, "").strip() for name in (*algorithms, "run"))] for model, told in before.items()]
    made = [f"| {' | '.join(row)} |" for row in [["model", *algorithms, "run"], *rows]]
    return "\n".join([made[0], "|---" * (2 + len(algorithms)) + "|", *made[1:]]) + "\n"


def main(words: Sequence[str]) -> int:
    """Run the tests and write the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--only", default="", metavar="ALGORITHM")
    args = parser.parse_args(words)
    trained, page = Trained(), PAGE.read_text("utf-8")
    wanted = "trains_a_model and (" + (" or ".join(f"[{model}:" for model in args.models) or "trains") + ")"
    wanted += f" and {args.only.split()[-1]}]" if args.only else ""
    tests = [str(ROOT / "tests" / "apps" / "test_app_matrix.py"), "-m", "not gpu", "-k", wanted]
    if code := pytest.main(["-q", f"--rootdir={ROOT}", *tests], plugins=[trained]):
        return code
    git = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    block = page.partition("<!-- trained -->")[2].partition("<!-- end -->")[0].strip()
    run = f"{datetime.now(UTC):%Y-%m-%d}, {commit}"
    PAGE.write_text(fill(page, {"trained": table(trained.cells, run, block, only=args.only)}), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
