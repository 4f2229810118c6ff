"""`make gpu-check` on little, on an accelerator; and how it goes on, ends what hangs, and says what it leaves out."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import gpu_check
import gpu_rows
import pytest
from emulated import emulated_runs as runs
from emulated.npu import build
from gpu_check import Row, Visit
from helpers import REPO, in_turn, sampled

GROUPS = {
    "start": ("machine", "tiny-signs", "ceilings", "attention", "profile", "dequantization", "decoding"),
    "gate": ("gate: auto", "gate: math, recomputed"),
    "bits": ("backward repeated", "bits"),
    "steps": ("step: recomputed", "step: nf4", "step: blocks offloaded", "step: fsdp2"),
    "speed": ("beside plain loops", "checkpoint", "around"),
}
EXACT = ("tiny-signs", "gate", "backward", "bits", "step", "beside")  # the others tell speed, which a CPU cannot


@in_turn(0, 3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", sampled(GROUPS, 1))
def test_its_rows_hold_on_the_emulated_accelerator(tmp_path, alone, group):
    build()
    words = ["--small", "--folder", str(tmp_path), "--predictions", str(tmp_path / "predictions.json")]
    if group == "steps":
        gpu_check.main([*words, "--predict"])
    assert alone(runs.check, [*words, "--only", *GROUPS[group]]) == 0
    found = gpu_check.read(tmp_path)
    assert [name for name in gpu_check.TIMETABLE if name.startswith(GROUPS[group])] == list(found)
    for name, record in found.items():
        assert (record.device.split()[0], record.size, record.error) == ("npu", "small", "")
        verdicts = {row.verdict for row in record.rows}
        assert gpu_check.FAILS not in verdicts
        assert not name.startswith(EXACT) or "holds" in verdicts
        assert f"| {name}, " in (tmp_path / "page.md").read_text()
        held = {row.what for row in record.rows if row.verdict == "holds"}
        assert not name.startswith("step") or "peak - loaded, GB" in held  # as planned


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_rows_that_start_trainers_hold(tmp_path):
    names = ["a second life", "a Qwen3", "from scratch"]
    gpu_check.main(["--small", "--folder", str(tmp_path), "--only", *names], here=True)
    found = gpu_check.read(tmp_path)
    assert {found[name].rows[0].verdict for name in names[:2]} == {"holds"}
    assert [row.what.partition(":")[0] for row in found["from scratch"].rows[::2]] == ["pretraining", "FlowGRPO", "AWM"]
    for run, last in {"pretraining": 2, "FlowGRPO": 1, "AWM": 1}.items():
        assert (tmp_path / f"{run}-000000.png").is_file()
        assert (tmp_path / f"{run}-{last:06}.png").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_rows_of_compiled_blocks_hold_on_a_cpu(tmp_path):
    """By torch's own compiler, which the emulated accelerator lacks."""
    names = ["gate: compiled, as it is", "gate: compiled, all weights"]
    gpu_check.run(names, Visit(gpu_rows.SMALL), tmp_path)
    assert {name: record.rows[0].verdict for name, record in gpu_check.read(tmp_path).items()} == dict.fromkeys(
        names, "holds"
    )


def test_the_row_beside_a_peer_is_asked_with_a_checkout_only(tmp_path, capsys):
    for words, is_there in (([], False), (["--peer", str(tmp_path)], True)):
        gpu_check.main(["--dry-run", *words])
        assert ("beside a peer" in capsys.readouterr().out) == is_there
    check(tmp_path / "found", "--peer", str(tmp_path), "--only", "beside a peer")
    (row,) = gpu_check.read(tmp_path / "found")["beside a peer"].rows
    assert row.what == "left out"
    assert "--peer must be a folder with flow_grpo's scripts/train_sd3.py" in row.found


def test_the_timetable_takes_90_minutes_and_its_first_10_tell_what_no_card_has_told(capsys):
    assert 60 < sum(entry.minutes for entry in gpu_check.TIMETABLE.values()) <= 90
    assert gpu_check.main(["--dry-run", "--time", "10m"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    fits = [row[0] for row in rows if "another call" not in row]
    assert len(rows) == len(gpu_check.TIMETABLE) - 1 > len(fits)  # without a peer
    assert {
        "gate: compiled, as it is",
        "gate: compiled, all weights",
        "a second life",
        "step: nf4",
        "step: fsdp2, NCCL",
    } <= {*fits}
    assert "from scratch" not in fits
    assert "beside plain loops" not in fits


def one(visit):
    yield Row("a number", "1", "1", "holds")


def bad(visit):
    yield gpu_rows.exact("a difference", 0.5, 0.0)


def broken(visit):
    yield from one(visit)
    raise RuntimeError("no")


def absent(visit):
    raise gpu_rows.LeftOutError("there is no such library")
    yield


@pytest.fixture
def rows(monkeypatch):
    """Entries that take no time: one breaks, one holds, one is wrong, one is left out."""
    asked = {"broken": broken, "one": one, "bad": bad, "absent": absent}
    table = {name: gpu_check.Entry(ask, 0.01) for name, ask in asked.items()}
    monkeypatch.setattr(gpu_check, "TIMETABLE", table)
    return table


def check(folder, *words):
    """Run the command in this process."""
    with suppress(RuntimeError):
        return gpu_check.main(["--small", "--folder", str(folder), *words], here=True)


def test_a_second_call_goes_on_behind_the_rows_that_stand_and_tries_broken_ones_last(tmp_path, rows, capsys):
    check(tmp_path)
    assert list(gpu_check.read(tmp_path)) == ["broken"]
    capsys.readouterr()
    check(tmp_path)
    told = capsys.readouterr().out
    assert [told.index(f"{name}: ") for name in ("one", "bad", "absent", "broken")] == sorted(
        told.index(f"{name}: ") for name in rows
    )
    assert (tmp_path / "rows.jsonl").read_text().count('"one"') == 3  # as it began, its row, and its end
    check(tmp_path)
    assert "one: done\nbad: done\nabsent: done\nbroken: a number" in capsys.readouterr().out
    found = gpu_check.read(tmp_path)
    assert {name: record.error for name, record in found.items() if record.error} == {"broken": "RuntimeError: no"}
    assert found["broken"].rows == list(one(None))
    assert found["absent"].rows == [Row("left out", "there is no such library")]


def test_rows_of_another_commit_do_not_stand(tmp_path, rows, capsys, monkeypatch):
    check(tmp_path, "--only", "one")
    monkeypatch.setattr(gpu_check.runner, "commit", lambda: "another")
    check(tmp_path, "--only", "one")
    assert "one: done" not in capsys.readouterr().out


def test_the_exit_code_tells_of_a_wrong_row_and_the_page_has_all(tmp_path, rows):
    assert check(tmp_path, "--only", "one", "absent") == 0
    assert check(tmp_path, "--only", "one", "bad") == 1
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if ", 0 s |" in line]
    assert [line.split(" | ")[-1] for line in lines] == ["holds |", "FAILS |", " |"]


def test_rows_for_which_no_time_is_left_are_for_another_call(tmp_path, rows, capsys):
    visit, soon = Visit(gpu_rows.Size()), time.time() + 30
    rows["one"] = replace(rows["one"], minutes=1.0)
    gpu_check.run(["one", "bad"], visit, tmp_path, soon)
    assert "one: left for another call: it takes 1 minutes" in capsys.readouterr().out
    assert list(gpu_check.read(tmp_path)) == ["bad"]


HANGS = """
import json, sys, time
name = sys.argv[sys.argv.index("--rows") + 1]
record = dict(name=name, since=time.time(), commit="a", device="b", size="small", seconds=1.0, error={error!r})
open({file!r}, "a").write(json.dumps(record | {{"rows": [dict(what="a number", found="1")]}}) + "\\n")
time.sleep(60 if name == "one" else 0)
sys.exit(3)
"""


def test_a_row_that_hangs_or_kills_its_process_ends_alone_and_keeps_what_it_found(tmp_path, rows, monkeypatch):
    script = HANGS.format(error=gpu_check.RUNNING, file=str(tmp_path / "rows.jsonl"))
    (tmp_path / "hangs.py").write_text(script)
    monkeypatch.setattr(gpu_check, "__file__", str(tmp_path / "hangs.py"))
    monkeypatch.setattr(gpu_check, "LEAST_S", 1)
    rows["bad"] = replace(rows["bad"], minutes=1.0)
    gpu_check.run_apart(["one", "bad"], tmp_path, time.time() + 300, [])
    found = gpu_check.read(tmp_path)
    assert found["one"].error == "took more than 3 s"
    assert found["bad"].error == "its process ended with 3"
    assert [row.found for record in found.values() for row in record.rows] == ["1", "1"]


def test_a_process_for_which_time_runs_out_before_its_first_row_leaves_the_page_to_be_written(
    tmp_path, rows, monkeypatch
):
    (tmp_path / "late.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu_check, "__file__", str(tmp_path / "late.py"))
    gpu_check.run_apart(["one", "bad"], tmp_path, time.time() + 0.5, [])
    assert gpu_check.read(tmp_path) == {}


def test_a_machine_without_an_accelerator_is_told_so_in_a_line(tmp_path, capsys):
    assert gpu_check.main(["--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variant", ["compiled", "products kept"])
def test_an_old_torch_leaves_out_what_needs_a_newer_one(tmp_path, monkeypatch, variant):
    monkeypatch.setattr(gpu_rows.torch, "__version__", "2.11.0+cu130")
    name = {"compiled": "step: compiled", "products kept": "gate: auto, products kept, masks"}[variant]
    check(tmp_path, "--only", name)
    reason = f"{variant} needs torch 2.12, and this is 2.11.0+cu130"
    assert gpu_check.read(tmp_path)[name].rows == [Row("left out", reason)]


def test_kernels_of_two_and_three_blocks_tell_those_of_more():
    args = gpu_rows.model_args(replace(gpu_rows.SMALL, random=4), "recomputed")
    assert gpu_rows.kernels_of(args, True) == gpu_rows._counted(args, True)


def test_predictions_are_read_as_they_were_made(tmp_path, monkeypatch):
    made = gpu_rows.Prediction({"update": {("bfloat16", 8, 9): 3}}, {"update": {("float32", 1, 2): 4}}, {"load": 5})
    monkeypatch.setattr(gpu_check.ask, "predict", lambda size, variant: made)
    file = tmp_path / "runs" / "predictions.json"
    for words in (["--small"], []):
        assert gpu_check.main([*words, "--predict", "--predictions", str(file), "--folder", str(tmp_path)]) == 0
    read = gpu_check.predictions_in(file)
    assert read == {size: dict.fromkeys(gpu_rows.PREDICTED, made) for size in ("small", "full")}
    assert {*gpu_rows.PREDICTED} <= {*gpu_rows.VARIANTS}


NO_NETWORK = """
import sys
def refuse(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if host not in (None, "", "localhost", "127.0.0.1", "::1"):
        with open(FILE, "a") as file:
            file.write(f"{host}\\n")
        raise OSError(f"there is no network to reach {host}")
sys.addaudithook(refuse)
"""


def with_network_refused(folder, *command):
    """A command ended, and the hosts that it or a process of its own asked for."""
    (asked := folder / "asked").touch()
    (folder / "sitecustomize.py").write_text(NO_NETWORK.replace("FILE", repr(str(asked))))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done, asked.read_text().split()


@in_turn(1, 3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "rows",
    [
        ("machine", "gate: auto, nf4, masks"),
        pytest.param(("tiny-signs", "a second life", "a Qwen3"), marks=pytest.mark.slow),
    ],
)
def test_it_asks_for_no_host_so_that_it_runs_without_a_network_as_with_one(tmp_path, rows):
    words = ["--small", "--folder", str(tmp_path / "found"), "--time", "9m", "--only", *rows]
    done, hosts = with_network_refused(tmp_path, sys.executable, str(REPO / "scripts" / "gpu_check.py"), *words)
    assert (done.returncode, hosts) == (0, []), done.stdout + done.stderr
    found = gpu_check.read(tmp_path / "found")
    assert len(found) == len(rows)
    assert all(record.is_good for record in found.values())


def test_a_program_that_asks_for_a_host_is_found(tmp_path):
    asks = "import urllib.request as u; u.urlopen('http://hub.test')"
    done, hosts = with_network_refused(
        tmp_path, sys.executable, "-c", f"import subprocess as s, sys; s.run([sys.executable, '-c', {asks!r}])"
    )
    assert (done.returncode, hosts) == (0, ["hub.test"])


@in_turn(2, 3)
def test_it_runs_from_a_folder_of_packages_that_are_not_installed(tmp_path):
    for package in (REPO / "packages").glob("*/src"):
        shutil.copytree(package, tmp_path / "site", dirs_exist_ok=True)
    libraries = [path for path in sys.path if path.endswith("-packages")]
    place = os.pathsep.join([str(tmp_path / "site"), *libraries])
    script = [sys.executable, "-S", str(REPO / "scripts" / "gpu_check.py")]  # -S: nothing that is installed for editing
    words = ["--small", "--folder", str(tmp_path / "found"), "--only", "machine"]
    environment = os.environ | {"PYTHONPATH": place, "COMMIT": "abc"}
    done = subprocess.run([*script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "machine: torch" in done.stdout
    where = subprocess.run(
        [sys.executable, "-S", "-c", "import omni_rl; print(omni_rl.__file__)"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(tmp_path))


def found_on(card, torch="2.13.0", since=1.9e9):
    """The rows of a visit in full size that found a number."""
    return {"one": gpu_check.Record("one", since, "abc", f"{card}, torch {torch}", "full", 1.0, list(one(None)))}


def test_a_card_that_is_new_comes_behind_those_on_the_page_and_one_that_is_not_in_its_place():
    text = gpu_check.DOCS.read_text()
    assert gpu_check.published(text, {}) == text
    more = gpu_check.published(text, found_on("Card X"))
    assert "### NVIDIA H200\n\n2026-11-27, commit eb67dcca, " in more
    assert more.count("### Card X\n\n2030-03-17, commit abc, Card X, torch 2.13.0, full size:\n\n| row |") == 1
    assert gpu_check.published(more, found_on("Card X")) == more
    other = gpu_check.published(more, found_on("NVIDIA H200"))
    assert "eb67dcca" not in other.partition(gpu_check.FIRST)[2].partition(gpu_check.LAST)[0]
    assert other.count("### Card X") == 1


@pytest.mark.parametrize(("device", "is_there"), [("Card X", True), ("npu x86_64", False), ("cpu aarch64", False)])
def test_only_a_card_is_on_the_page_even_where_one_row_alone_ran(tmp_path, rows, device, is_there):
    (docs := tmp_path / "page.md").write_text(f"{gpu_check.FIRST}{gpu_check.LAST}")
    gpu_check.write(found_on(device)["one"], tmp_path)
    gpu_check.main(["--publish", "--folder", str(tmp_path), "--docs", str(docs)])
    assert (f"### {device}" in docs.read_text()) == is_there


def test_what_is_found_in_small_is_not_published(tmp_path, rows):
    docs = gpu_check.DOCS.read_bytes()
    check(tmp_path, "--only", "one")
    gpu_check.main(["--publish", "--folder", str(tmp_path)])
    assert gpu_check.DOCS.read_bytes() == docs
