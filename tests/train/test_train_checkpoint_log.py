"""The log of a run that resumes."""

import json
import os

import pytest
from omni_train.dist import init_distributed
from omni_train.log import RunLog, claim_folder


def write(folder, steps, **options):
    with RunLog(folder, is_main=True, total_steps=9, **options) as log:
        for step in steps:
            log.log(step, {"loss": float(step)})


def steps_in(folder):
    """Of every line as it stands in the file."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("resume_step", "kept"), [(2, [0, 1, 2]), (0, [0]), (-1, []), (4, [0, 1, 2, 3, 4])])
def test_lines_that_will_come_again_are_dropped(tmp_path, resume_step, kept):
    write(tmp_path, range(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn
    write(tmp_path, [], resume_step=resume_step)
    assert steps_in(tmp_path) == kept
    write(tmp_path, range(resume_step + 1, 8), resume_step=resume_step)
    assert steps_in(tmp_path) == list(range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_log_that_is_not_told_keeps_every_whole_line(tmp_path):
    write(tmp_path, range(3))
    write(tmp_path, [1])
    assert steps_in(tmp_path) == [0, 1, 2, 1]


def test_a_crash_while_lines_are_dropped_loses_none(tmp_path, monkeypatch):
    write(tmp_path, range(5))
    with monkeypatch.context() as patch:
        patch.setattr("omni_train.files.write_file", full_disk)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path, [], resume_step=2)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]
    write(tmp_path, [3], resume_step=2)  # what the crash left does not stand in the way
    assert steps_in(tmp_path) == [0, 1, 2, 3]


def test_lines_that_a_power_failure_took_are_told(tmp_path):
    write(tmp_path, range(3))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl lacks the steps 3 to 5: they were lost"):
        write(tmp_path, [6], resume_step=5)
    assert steps_in(tmp_path) == [0, 1, 2, 6]


def test_damaged_metrics_are_found_before_the_run_is_loaded(run_ranks, tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"step": 1', b"\0" * 10))

    def work(dist):
        with pytest.raises(ValueError, match=r"rank 0: \S+metrics\.jsonl, line 2: not valid JSON .* Delete the line"):
            claim_folder(dist, tmp_path, has_checkpoint=True)

    run_ranks(work)
    with pytest.raises(ValueError, match=r"line 2: not valid JSON"):
        write(tmp_path, [], resume_step=2)


def full_disk(path, data):
    path.touch()
    raise OSError("No space left on device")


def test_a_line_is_on_the_disk_when_the_step_is_logged(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        "os.fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    write(tmp_path, [0, 1])
    assert synced == [str(tmp_path / "metrics.jsonl")] * 2


def test_a_folder_with_training_steps_is_claimed_by_the_run_that_resumes_only(run_ranks, tmp_path):
    alone = init_distributed()
    folder = tmp_path / "run"
    claim_folder(alone, folder, has_checkpoint=False)
    write(folder, [0])
    claim_folder(alone, folder, has_checkpoint=False)  # it died before its first checkpoint: nothing was trained
    with pytest.raises(ValueError, match="holds a run already"):
        claim_folder(alone, folder)  # a run without checkpoints never continues
    write(folder, [1])
    claim_folder(alone, folder, has_checkpoint=True)

    def work(dist):
        with pytest.raises(ValueError, match=f"rank 0: {folder} holds a run already: give another --name"):
            claim_folder(dist, folder, has_checkpoint=False)

    run_ranks(work)
    with pytest.raises(ValueError, match=f"{folder} holds a run already: it goes on with --checkpoint-url s3://a$"):
        claim_folder(alone, folder, has_checkpoint=False, hint="it goes on with --checkpoint-url s3://a")


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_metrics_that_lead_elsewhere_are_refused_and_nothing_is_written_there(tmp_path, link, is_there):
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    if is_there or link is os.link:
        elsewhere.write_text('{"step": 0}\n')
    link(elsewhere, path)
    with pytest.raises(ValueError, match=r"run/metrics\.jsonl must be a regular file and no link"):
        claim_folder(init_distributed(), path.parent, has_checkpoint=False)
    with pytest.raises(ValueError, match=r"run/metrics\.jsonl must be a regular file and no link"):
        write(path.parent, [1])
    assert not elsewhere.exists() or elsewhere.read_text() == '{"step": 0}\n'
