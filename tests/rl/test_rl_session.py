"""What a machine keeps of a run whose checkpoints are at a URL, where another machine has trained on."""

import json
import shutil

import pytest
from omni_rl.run.session import CHECKPOINT_FILES, Session
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from torch import nn


def session(folder, url):
    """A machine's view of the run, which goes on from the newest checkpoint."""
    found = object.__new__(Session)
    found.folder, found.lock, found.report, found._is_fetched = folder, None, None, False
    beside = [folder / name for name in CHECKPOINT_FILES]
    found.checkpoints = Checkpoint(folder / "checkpoints", init_distributed(), url=url, run_files=beside)
    found.saved = found.checkpoints.latest()
    found.fetch(init_distributed())
    return found


def train(run, first, last, *, who, weights):
    """Write lines of steps, and exported weights."""
    (run.folder / "weights").mkdir(parents=True, exist_ok=True)
    (run.folder / "weights/weight").write_text(weights)
    with (run.folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "who": who}) + "\n")


def kept(run):
    """Who has trained each step, and the weights and the best."""
    lines = [json.loads(line)["who"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return "".join(map(str, lines)), *((run.folder / name / "weight").read_text() for name in ("weights", "best"))


@pytest.mark.parametrize("died_at", [4, 6], ids=["before the other's checkpoint", "after it"])
def test_a_machine_that_comes_back_has_the_lines_and_weights_of_the_run_and_not_its_own(tmp_path, died_at):
    url, net = f"file://{tmp_path}/store", nn.Linear(2, 2)
    one = session(tmp_path / "one", url)
    train(one, 0, 2, who=1, weights="one, 2")
    shutil.copytree(one.folder / "weights", one.folder / "best")
    one.checkpoints.save(2, net, config={})
    train(one, 3, died_at, who=1, weights="one, later")
    other = session(tmp_path / "other", url)
    train(other, 3, 5, who=2, weights="other, 5")
    other.checkpoints.save(5, net, config={})
    one = session(tmp_path / "one", url)
    one.fetch_best(5)
    assert kept(one) == ("111222", "other, 5", "other, 5")
    train(one, 6, 8, who=1, weights="one, 8")
    again = session(tmp_path / "one", url)  # after a crash: its own lines up to the checkpoint are those of the run
    again.fetch_best(5)
    assert kept(again) == ("111222111", "one, 8", "other, 5")


def test_a_run_whose_checkpoints_are_elsewhere_is_told_where(tmp_path):
    run = object.__new__(Session)
    run.folder = tmp_path / "run"
    assert run.resume_hint("s3://b/new") == run.resume_hint("") == ""  # of a new run
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "config.toml").write_text('checkpoint_url = "s3://b/old"\n')
    for url in ("", "s3://b/new"):
        assert run.resume_hint(url).startswith("it goes on with --checkpoint-url s3://b/old, where its checkpoints are")
    assert run.resume_hint("s3://b/old") == ""
    (run.folder / "config.toml").write_text('checkpoint_url = ""\n')
    assert run.resume_hint("s3://b/new") == ""
    Checkpoint(run.folder / "checkpoints", init_distributed()).save(3, nn.Linear(2, 2), config={})
    place = run.folder / "checkpoints/step-00000003"
    assert run.resume_hint("s3://b/new").startswith(f"it goes on from {place} without --checkpoint-url, or ")
    assert run.resume_hint("") == ""
