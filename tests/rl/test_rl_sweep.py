"""A sweep makes each run once, goes on after an interruption and past a failure, and adds up what came of them."""

import csv
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from omni_rl.command import sweep

STUB = '''
"""A trainer whose held-out score is its learning rate plus a hundredth of its seed, reached in a few steps."""
import json, os, sys, time
from dataclasses import dataclass
from pathlib import Path
from omni_rl.cli import parse_cli, require, to_toml

@dataclass(frozen=True)
class Args:
    name: str = "stub"  # Name
    seed: int = 0  # Seed
    train_steps: int = 2  # Steps
    lr: float = 0.1  # Rate
    lr_decay: bool = False  # Decay
    step_s: float = 0.0  # Seconds of a step

def check_args(args):
    require((args.lr <= 1, f"--lr must be <= 1, got {args.lr}"))

args = parse_cli(Args, check_args, sys.argv[1:], app="stub", description=__doc__)
folder = Path("runs", args.name)
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.toml").write_text(to_toml(args))
if Path("broken").exists() and args.seed == 1:
    sys.exit("the disk is full")
log = folder / "metrics.jsonl"
done = len(log.read_text().splitlines()) if log.exists() else 0
print("starts at", done, "of", os.environ.get("WORLD_SIZE", "one"), flush=True)
for step in range(done, args.train_steps + 1):
    score = (args.lr + args.seed / 100) * step / args.train_steps
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "time/step_s": 2.0, "eval/reward": score}) + "\\n")
    time.sleep(args.step_s)
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_stub.py").write_text(STUB)
    (tmp_path / "my.toml").write_text('name = "mine"\ntrain_steps = 4\n')
    monkeypatch.setattr(sweep, "trainers", lambda: {"stub": tmp_path / "train_stub.py"})
    return tmp_path


def rows(folder: str = "mine-sweep") -> list[dict[str, str]]:
    with Path("runs", folder, "sweep.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_sweep_makes_the_product_of_the_values_and_compares_over_seeds(place: Path, capsys):
    sweep.main(["my.toml", "--vary", "lr=0.1,0.3", "seed=0..2", "--jobs", "2", "--lr-decay"])
    found = rows()
    assert [(row["lr"], row["seed"]) for row in found] == [(lr, seed) for lr in ("0.1", "0.3") for seed in "012"]
    assert [row["final"] for row in found] == ["0.1000", "0.1100", "0.1200", "0.3000", "0.3100", "0.3200"]
    assert {(row["steps"], row["at step"], row["seconds"]) for row in found} == {("4", "4", "10")}
    spread = {(row["lr"], row["mean of seeds"], row["lowest"], row["highest"]) for row in found}
    assert spread == {("0.1", "0.1100", "0.1000", "0.1200"), ("0.3", "0.3100", "0.3000", "0.3200")}
    config = tomllib.loads((place / "runs/mine-sweep/lr=0.3,seed=1/config.toml").read_text())
    assert (config["lr"], config["seed"], config["lr_decay"], config["train_steps"]) == (0.3, 1, True, 4)
    printed = capsys.readouterr().out
    assert "| lr | seed | steps | final | best | at step | seconds | mean of seeds | lowest | highest |" in printed
    assert "| 0.3 | 2 | 4 | 0.3200 | 0.3200 | 4 | 10 | 0.3100 | 0.3000 | 0.3200 |" in printed
    drawn = ElementTree.fromstring((place / "runs/mine-sweep/sweep.svg").read_text())
    lines = [node for node in drawn.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 6
    assert len({node.get("stroke") for node in lines}) == 2


def test_the_same_command_goes_on_past_what_is_finished_and_a_failure_stops_no_other_run(place: Path, capsys):
    (place / "broken").touch()
    words = ["my.toml", "--vary", "seed=0,1,2"]
    with pytest.raises(SystemExit, match=r"^1$"):
        sweep.main(words)
    told = capsys.readouterr()
    assert "seed=1: failed with exit code 1: the disk is full" in told.out
    assert told.err == "failed: runs/mine-sweep/seed=1; the same command continues\n"
    assert [row["final"] for row in rows()] == ["0.1000", "", "0.1200"]
    (place / "broken").unlink()
    sweep.main(words)
    assert "3 runs in runs/mine-sweep, 1 of them to make" in capsys.readouterr().out
    assert [row["final"] for row in rows()] == ["0.1000", "0.1100", "0.1200"]
    assert (place / "runs/mine-sweep/seed=0.txt").read_text().count("starts") == 1


def test_ctrl_c_starts_no_further_run_and_the_same_command_continues(place: Path):
    driver = place / "driver.py"
    driver.write_text(
        "import pathlib\nfrom omni_rl.command import sweep\n"
        "sweep.trainers = lambda: {'stub': pathlib.Path('train_stub.py')}\nsweep.main()\n"
    )
    words = [sys.executable, str(driver), "my.toml", "--vary", "seed=0,1"]
    process = subprocess.Popen(
        [*words, "--step-s", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log = place / "runs/mine-sweep/seed=0/metrics.jsonl"
    while not log.exists() or not log.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted; the same command continues\n"
    assert not (place / "runs/mine-sweep/seed=1").exists()


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["my.toml", "--vary", "lr=0.1,2"], "--vary lr=2: --lr must be <= 1, got 2.0"),
        (["my.toml", "--vary", "lr=fast"], "--vary lr=fast: --lr must be a number, got 'fast'"),
        (["my.toml", "--vary", "lrr=1"], "--vary lrr=1: unknown flag --lrr; did you mean '--lr'?"),
        (["my.toml", "--vary", "lr"], "--vary must be NAME=VALUE,VALUE or NAME=FIRST..LAST"),
        (["my.toml", "--vary", "seed=2..1"], "--vary must be NAME=VALUE,VALUE or NAME=FIRST..LAST"),
        (["my.toml", "--vary", "seed=1,1"], "--vary must be NAME=VALUE,VALUE or NAME=FIRST..LAST"),
        (["my.toml", "--vary", "seed=0,1", "seed=2"], "--vary must be NAME=VALUE,VALUE or NAME=FIRST..LAST"),
        (["my.toml", "--vary", "name=a,b"], "--vary must leave out name: each run gets one of its own"),
        (["my.toml", "--vary", "seed=0", "--lr", "3"], "--lr must be <= 1, got 3.0"),
        (["my.toml", "--vary", "seed=0", "--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["no.toml", "--vary", "seed=0"], "--config must be a readable TOML file, got no.toml: "),
        (["my.toml", "--vary", "seed=0", "--trainer", "stubb"], "--trainer must be one of stub, got 'stubb'"),
    ],
)
def test_a_mistake_is_named_before_any_run(place: Path, capsys, words: list[str], mistake: str):
    with pytest.raises(SystemExit, match=r"^2$"):
        sweep.main(words)
    assert capsys.readouterr().err.startswith(f"omni-rl sweep: error: {mistake}")
    assert not (place / "runs").exists()


def test_a_folder_with_other_settings_is_refused(place: Path, capsys):
    sweep.main(["my.toml", "--vary", "seed=0"])
    with pytest.raises(SystemExit, match=r"^2$"):
        sweep.main(["my.toml", "--vary", "seed=0", "--lr", "0.5"])
    assert "runs/mine-sweep/seed=0 holds a run with other settings, lr = 0.1, now 0.5" in capsys.readouterr().err
    sweep.main(["my.toml", "--vary", "seed=0", "--lr", "0.5", "--name", "other/again"])
    assert rows("other/again")[0]["final"] == "0.5000"
    sweep.main(["my.toml", "--vary", "seed=0", "--train-steps", "4", "--trainer", "stub"])


def test_a_switch_is_varied_and_ranks_are_told_to_the_check(place: Path):
    members = sweep.plan(
        "my.toml", sweep.parse_vary(["lr-decay=true,false"]), ["--nproc-per-node", "2"], trainer=None, name=""
    )
    assert [member.settings["lr_decay"] for member in members] == [True, False]
    assert members[0].command[1:6] == ["-m", "omni_rl.ranks", "--nproc-per-node", "2", str(place / "train_stub.py")]
    assert members[1].command[-3:] == ["--no-lr-decay", "--name", "mine-sweep/lr_decay=false"]


def test_a_stop_reaches_the_run_that_is_just_being_started(place: Path, monkeypatch: pytest.MonkeyPatch):
    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sweep.subprocess, "Popen", Interrupted)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert sweep.make([sweep.Member(place / "runs" / "a", {}, {"train_steps": 1}, command)], 1) == ([], True)
    assert time.monotonic() - start < 30


def test_nobody_has_to_read_what_a_sweep_prints(place: Path):
    code = (
        "import sys; from pathlib import Path; from omni_rl.command import sweep\n"
        "sweep.trainers = lambda: {'stub': Path('train_stub.py').resolve()}\nsweep.main(sys.argv[1:])"
    )
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-c", code, "my.toml", "--vary", "seed=0,1"]
    ended = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (place / "runs" / "mine-sweep" / "sweep.csv").is_file()
