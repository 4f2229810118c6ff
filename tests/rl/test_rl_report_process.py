"""The process beside a run: what it is handed is on the disk at the end, it costs the run nothing, and may die."""

import json
import math
import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace

import torch
from omni_rl.report import data, write_eval, write_report, write_samples
from omni_rl.report import process as process_module
from omni_rl.report.process import ReportProcess
from omni_train.log import RunLog
from rl.report_runs import RATES, film, images, metrics, samples, tone, write_metrics, write_run

FLAKY = """
from pathlib import Path
def tell(word):
    with open(Path(__file__).with_name("told.txt"), "a") as file:
        file.write(f"{word} ")
class Run:
    def log(self, metrics, step):
        if step == 1:
            raise ConnectionError("503")
        tell(step)
    def finish(self):
        tell("end")
def init(**how):
    return Run()
def Image(path): pass
"""


def tree(folder):
    """The bytes of all pictures and of what is told of them."""
    files = [path for home in ("eval", "samples") for path in folder.glob(f"{home}/**/*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_folder_is_the_one_that_the_functions_write(tmp_path):
    """Pictures, the sheet and the page; the samples' files alone are numbered within the groups that are shown."""
    lines, rows = metrics(12), samples([0.1, 0.9, 0.5, 0.4, 0.2, 0.2, 0.2, 0.2], group_size=4)
    direct = write_run(tmp_path / "direct")
    write_metrics(direct, lines)
    handed = tmp_path / "handed"
    handed.mkdir()
    (handed / "config.toml").write_text((direct / "config.toml").read_text())
    (handed / "versions.jsonl").write_text((direct / "versions.jsonl").read_text())
    with closing(ReportProcess(handed)) as report:
        for line in lines:
            step = line["step"]
            if step % 4 == 0:
                pictures = [torch.from_numpy(picture) for picture in images(3, seed=step)]
                report.show_eval(step, pictures, samples([step / 50, step / 50 + 0.1, None], read=f"AT{step}"))
            if step == 12:
                report.show_samples(step, images(8), rows)
            write_metrics(handed, lines[: step + 1])
            report(step, {name: value for name, value in line.items() if name != "step"})
    assert tree(handed) == tree(direct)
    assert data.run_data(handed) | {"name": "", "logged_at": 0} == data.run_data(direct) | {"name": "", "logged_at": 0}
    page = (handed / "report.html").read_bytes()
    write_report(handed)
    assert len(page) == len((handed / "report.html").read_bytes())


def test_only_what_is_shown_is_copied_to_the_host(tmp_path):
    class Picture(torch.Tensor):
        copied = 0

        def cpu(self):
            Picture.copied += 1
            return super().cpu()

    pictures = [torch.zeros(8, 8, 3, dtype=torch.uint8).as_subclass(Picture) for _ in range(64)]
    rows = samples([i / 64 for i in range(64)], group_size=8)
    write_samples(tmp_path, 1, pictures, rows)
    assert Picture.copied == 8  # best and worst of four groups
    with closing(ReportProcess(tmp_path)) as report:
        report.show_samples(1, pictures, rows)
    assert Picture.copied == 16


def test_lines_that_a_run_which_resumes_writes_anew_are_not_in_the_page(tmp_path):
    write_metrics(tmp_path, metrics(9))
    with RunLog(tmp_path, is_main=True, total_steps=9, resume_step=5, sinks=[ReportProcess(tmp_path)]) as log:
        log.log(6, {"reward/mean": 0.5, "policy/kl": math.nan})
    found = data.run_data(tmp_path)
    assert found["curves"]["reward/mean"]["x"] == [1, 2, 3, 4, 5, 6]
    page = (tmp_path / "report.html").read_text()
    assert '"step":6,' in page
    assert '"step":9,' not in page
    assert "policy/kl is not finite" in page


def test_a_step_does_not_wait_for_a_process_that_stands_still(tmp_path):
    """It is stopped; samples of all but the last steps are dropped, lines and evaluations are not."""
    report = ReportProcess(tmp_path)
    os.kill(report._process.pid, signal.SIGSTOP)
    rows = samples([0.5] * 8, group_size=2)
    for step in range(50):
        if step == 7:
            report.show_eval(step, images(8), rows)
        report.show_samples(step, images(8, 512, 512), rows)
        report(step, {"loss": 1.0})
        (tmp_path / "metrics.jsonl").touch()
    os.kill(report._process.pid, signal.SIGCONT)
    report.close()
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["000047", "000048", "000049"]
    assert (tmp_path / "eval" / "000007.png").is_file()


def test_who_waits_finds_the_images_of_all_evaluations(tmp_path):
    with closing(ReportProcess(tmp_path)) as report:
        report.wait()
        for step in (1, 2):
            report.show_eval(step, images(8), samples([0.5] * 8))
        report.wait()
        found = sorted(path.name for path in (tmp_path / "eval").iterdir())
        assert found == ["000001", "000001.png", "000002", "000002.png"]


def test_nobody_waits_for_ever(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(process_module, "WAIT_S", 0.1)
    report = ReportProcess(tmp_path)
    os.kill(report._process.pid, signal.SIGSTOP)
    report.show_eval(1, images(8), samples([0.5] * 8))
    report.wait()
    assert "an evaluation is not in" in capfd.readouterr().err
    report._process.send_signal(signal.SIGCONT)
    report.close()


def test_nobody_waits_for_an_evaluation_that_cannot_be_sent(tmp_path, monkeypatch, capfd):
    """Its sender fails while the other thread waits."""
    is_waiting, dumps = threading.Event(), json.dumps

    def fail(message, **options):
        if message["kind"] == "eval":
            is_waiting.wait(20)
            raise TypeError("keys must be str")
        return dumps(message, **options)

    write_metrics(tmp_path, metrics(1))
    with closing(ReportProcess(tmp_path)) as report:
        monkeypatch.setattr(json, "dumps", fail)
        report.show_eval(1, images(1), samples([0.5]))
        threading.Timer(0.2, is_waiting.set).start()
        start = time.monotonic()
        report.wait()
        assert time.monotonic() - start < 10
    assert capfd.readouterr().err == "WARNING: the samples of the report failed: TypeError: keys must be str\n"


def test_a_disk_that_is_full_for_a_while_costs_only_its_images_and_pages(tmp_path, capfd):
    """In place of a full disk, a file where a folder goes and a folder where the page goes."""
    write_metrics(tmp_path, metrics(1))
    (tmp_path / "eval").touch()
    (tmp_path / "report.html").mkdir()
    with closing(ReportProcess(tmp_path)) as report:
        report.show_eval(1, images(1), samples([0.5]))
        report(1, {"reward/mean": 0.5})
        told = ""
        while "the page of the report failed" not in told:
            time.sleep(0.05)
            told += capfd.readouterr().err
        (tmp_path / "eval").unlink()
        (tmp_path / "report.html").rmdir()
        report.show_eval(2, images(1), samples([0.5]))
        report(2, {"reward/mean": 0.5})
    assert "the samples of the report failed" in told
    assert (tmp_path / "eval" / "000002.png").is_file()
    assert (tmp_path / "report.html").is_file()
    assert capfd.readouterr().err == ""


def test_a_tracker_that_fails_once_gets_the_next_steps_and_its_end(tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb.py").write_text(FLAKY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    write_metrics(run, metrics(1))
    with closing(ReportProcess(run, "wandb", "project")) as report:
        assert report.tracker_error == ""
        for step in range(4):
            report(step, {"reward/mean": 0.5})
    assert (tmp_path / "told.txt").read_text() == "0 2 3 end "
    assert capfd.readouterr().err == "WARNING: the tracker wandb failed: ConnectionError: 503\n"


def test_progress_that_cannot_be_removed_leaves_trackers_their_end(tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb.py").write_text(FLAKY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    write_metrics(run, metrics(1))
    (run / "now.json").mkdir()
    with closing(ReportProcess(run, "wandb", "project")) as report:
        report(0, {"reward/mean": 0.5})
    assert (tmp_path / "told.txt").read_text() == "0 end "
    assert capfd.readouterr().err.count("the progress in the report failed: IsADirectoryError") == 1


def test_a_process_that_dies_is_said_once_and_the_run_goes_on(tmp_path, capfd):
    report = ReportProcess(tmp_path)
    with RunLog(tmp_path, is_main=True, total_steps=3, sinks=[report]) as log:
        os.kill(report._process.pid, signal.SIGKILL)
        for step in range(4):
            report.show_samples(step, images(8), samples([0.5] * 8))
            log.log(step, {"loss": 1.0})
            report._process.wait()
    told = capfd.readouterr().err
    assert told.count("has ended (exit code -9): training continues without new images") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_the_process_ends_with_a_run_that_dies(tmp_path, capfd):
    """It has read half of a message and waits for the rest. Ctrl-C reaches the run only, as it has another session."""
    report = ReportProcess(tmp_path)
    assert os.getsid(report._process.pid) == report._process.pid != os.getsid(0)
    os.write(report._connection.fileno(), (100).to_bytes(4, "big") + b"half")
    report._connection.close()
    assert report._process.wait(30) == 0
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


def test_a_tracker_that_does_not_open_is_told_and_the_report_goes_on(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "wandb.py").write_text("raise RuntimeError('no key')")
    monkeypatch.setenv("PYTHONPATH", str(broken), prepend=os.pathsep)
    with closing(ReportProcess(tmp_path, "wandb", "project")) as report:
        assert report.tracker_error == "RuntimeError: no key"
        report.show_eval(1, images(8), samples([0.5] * 8))
    assert (tmp_path / "eval" / "000001.png").is_file()


def test_a_damaged_file_and_a_full_disk_are_said_once_and_stop_nothing(tmp_path, capfd):
    """In place of a full disk, a file where a folder goes and a folder where the page goes."""
    folder = write_run(tmp_path / "damaged")
    (folder / "versions.jsonl").write_bytes(b"[]\n")
    full = tmp_path / "full"
    write_metrics(full, metrics(1))
    (full / "eval").touch()
    (full / "report.html").mkdir()
    for place, wanted in ((folder, 1), (full, 2)):  # once for the page, and once for the images
        with closing(ReportProcess(place)) as report:
            for step in (13, 14):
                if place is full:
                    report.show_eval(2, images(1), samples([0.5]))
                report(step, {"reward/mean": 0.5})
        told = capfd.readouterr().err
        assert len(told.splitlines()) == wanted, told
        assert place is full or "versions.jsonl, line 1: must be a JSON object, got list" in told


def test_references_and_strided_media_reach_the_process(tmp_path):
    shared, own = (torch.from_numpy(images(1, 8, 12, seed=seed)[0]) for seed in (1, 2))
    rows = [replace(s, references=(shared, own) if s.group else (shared,)) for s in samples([0.1, 0.9, 0.5, 0.4])]
    strided = [{"video": film(9, 8, 16).transpose(0, 2, 1, 3), "audio": tone()[::-1]}] * 4
    with closing(ReportProcess(tmp_path / "process")) as report:
        report.show_eval(4, images(4), rows)
        report.show_samples(4, images(4), rows)
        report.show_eval(8, strided, [replace(row, rates=RATES) for row in rows])
    write_eval(tmp_path / "here", 4, images(4), rows)
    write_samples(tmp_path / "here", 4, images(4), rows)
    write_eval(tmp_path / "here", 8, strided, [replace(row, rates=RATES) for row in rows])
    assert tree(tmp_path / "process") == tree(tmp_path / "here")


def test_the_first_reason_of_a_sample_without_a_score_is_said_once(tmp_path, capfd):
    no_word = [replace(row, abstained="no\x1b[2J word at http://user:key@host") for row in samples([None])]
    write_metrics(tmp_path, metrics(3))
    with closing(ReportProcess(tmp_path)) as report:
        report.show_samples(1, images(1), samples([0.5]))
        report.show_eval(2, images(3), [*samples([0.1, 0.2]), *no_word])
        report.show_samples(3, images(1), no_word)
    told = "WARNING: 1 of 3 samples of the evaluation after step 2 have no score; first: no [2J word at http://host\n"
    assert capfd.readouterr().err == told
