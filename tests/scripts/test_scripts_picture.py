"""The script that draws the documents' pictures: what it cannot draw is one line."""

import sys

import picture
import pytest
from rl.report_runs import metrics, write_metrics, write_run


def refused(monkeypatch, capsys, *words):
    """What the script says last, before it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["picture.py", *map(str, words)])
    with pytest.raises(SystemExit, match=r"^2$"):
        picture.main()
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_without_evaluations_is_named(tmp_path, monkeypatch, capsys):
    line = refused(monkeypatch, capsys, tmp_path, tmp_path / "out")
    assert line == f"picture.py: error: {tmp_path} must hold two evaluations or more, it holds 0"


def test_seeds_with_other_evaluations_are_named(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "a")
    write_metrics(tmp_path / "b", metrics(12, eval_every=6))
    line = refused(monkeypatch, capsys, run, tmp_path / "out", "--seeds", tmp_path / "b")
    told = f"eval/reward is at steps 0, 4, 8, 12 in {run}, at steps 0, 6, 12 in {tmp_path / 'b'}"
    assert line == f"picture.py: error: --seeds must be runs evaluated alike: {told}"
