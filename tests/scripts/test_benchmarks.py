"""The benchmarks of the training loop run, and what they count is there; seconds are not looked at."""

import pytest
from helpers import REPO


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Benchmarks as a user starts them, in a folder of their own."""
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    monkeypatch.chdir(tmp_path)


def table(text):
    """The rows of the table that was printed, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_fixed_cost_speaks_of_every_step(capfd):
    import fixed_cost

    fixed_cost.main(["--steps", "4", "--start", "2", "--side", "32", "--work-s", "0", "--eval-every", "3"])
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["3 to 6"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
