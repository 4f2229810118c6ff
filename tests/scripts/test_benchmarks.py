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


def test_checkpoint_tells_the_copy_from_the_save(capfd, monkeypatch):
    import checkpoint

    monkeypatch.setattr(checkpoint, "ROWS", 8)
    checkpoint.main(["--gb", "1e-6", "--saves", "1", "--folder", "."])
    rows = dict(table(capfd.readouterr().out))
    assert {"save that training waits for, s", "copy, s", "until complete, s"} < rows.keys()
    assert all(float(value) > 0 for value in rows.values())


def test_framework_tax_is_a_step_over_the_model_in_it(capfd, monkeypatch):
    import framework_tax

    sizes = ["--prompts-per-step", "1", "--group-size", "2", "--batch-size", "2", "--num-inference-steps", "5"]
    framework_tax.main([*sizes, "--steps", "1"])
    ((step, forward, backward, tax),) = table(capfd.readouterr().out)
    assert float(step) > float(forward) + float(backward) > float(backward) > 0
    assert float(tax) > 1
