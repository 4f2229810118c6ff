"""A run that is killed at any moment, or told to stop, ends where it would have ended without: bit for bit."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import omni_train.checkpoint.parts
import omni_train.checkpoint.store
import omni_train.prepare
import pytest
import torch
from apps import app_lives as lives
from helpers import REPO, TEST_SEED, sampled
from omni_rl.report.process import ReportProcess
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from omni_train.checkpoint.state import train_state
from omni_train.checkpoint.store import Checkpoint
from omni_train.remote import Remote
from s3_store import SECRET, s3_store
from safetensors.torch import load_file, save_file
from trainer_runs import shallow, write_eval_prompts
from trainer_table import cases, ranks
from trainer_table import settings as row_settings

STEPS = 4
KINDS = {  # ranks, settings
    "full": (1, {}),
    "LoRA and average": (1, {"lora_rank": 2, "lora_alpha": 4, "lora_init": "pissa", "ema_decay": 0.9, "lr": 1e-2}),
    "ddp": (2, {"sharding_mode": "ddp", "lora_rank": 2, "lora_use_dora": True, "lr": 1e-2}),
    "fsdp2": (2, {"sharding_mode": "fsdp2"}),
}
ALONE = {"full", "LoRA and average"}


@pytest.fixture
def enter(tmp_path, monkeypatch):
    """Make a folder of that name with the evaluation's prompts, and go there."""

    def enter(name):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_eval_prompts(tmp_path / name)
        return tmp_path / name

    return enter


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory, bright_url):
    """`in_peace(kind)` is the folder of a run of that kind that nobody disturbed."""

    @cache
    def run(kind):
        ranks, changes = KINDS[kind]
        home = tmp_path_factory.mktemp("peace")
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.chdir(home)
            write_eval_prompts(home)
            assert_ends_well(lives.train(home, settings(bright_url, **changes), ranks=ranks))
        return home

    return run


def settings(url, **changes):
    return change(lives.TINY, train_steps=STEPS, group_size=2, width=32, scorer_url=url, **changes)


def assert_ends_well(life):
    codes = life.wait()
    assert codes == [0] * len(codes), life.text()


def lines(home):
    """The log without what a clock, or the machine's memory, has to say."""
    entries = map(json.loads, (home / "runs/run/metrics.jsonl").read_text().splitlines())
    mine = ("time/", "perf/", "reward/busy_s")
    return [{name: value for name, value in entry.items() if not name.startswith(mine)} for entry in entries]


def outcome(home):
    """The bytes of all tensors of the last checkpoint, and of the exported weights."""
    saved, exported = f"runs/run/checkpoints/step-{STEPS:08}/*.safetensors", "runs/run/weights/**/*.safetensors"
    files = [*home.glob(saved), *home.glob(exported)]
    assert len(files) >= 2
    return {path.relative_to(home): path.read_bytes() for path in files}


def kill_in_save(victim, count):
    """Before a life: rank `victim` kills itself at that one of its changes of a checkpoint's files."""

    def before(rank):
        left = count

        def strike(event, args):
            nonlocal left
            is_change = (event == "open" and args[1] == "x") or event.startswith("os.")
            if is_change and args and "checkpoints/step-" in str(args[0]):
                left -= 1
                if left == 0:
                    with Path("events").open("a") as file:
                        file.write(f"rank {rank}: {event} {args[0]}\n")
                    os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim:
            sys.addaudithook(strike)

    return before


@pytest.mark.parametrize("kind", sampled(KINDS, 1))
def test_kills_change_neither_the_weights_nor_the_metrics(enter, bright_url, in_peace, kind):
    ranks, changes = KINDS[kind]
    args = settings(bright_url, **changes)
    peace = in_peace(kind)
    seconds = sum(json.loads(line)["time/step_s"] for line in (peace / "runs/run/metrics.jsonl").open())
    killed = enter("killed")
    rng = random.Random(f"{TEST_SEED} {kind}")
    for most in (12, 4):  # inside a save, in which the first rank changes much, any other one file
        victim = rng.randrange(ranks if kind == "fsdp2" else 1)  # otherwise the first rank writes all
        before = kill_in_save(victim, rng.randint(1, most // 4 if victim else most))
        life = lives.train(killed, args, ranks=ranks, before=before)
        while not life.has_ended(victim):
            time.sleep(0.002)
        life.kill()
        assert life.codes[victim] == -signal.SIGKILL, life.text()
    assert len((killed / "events").read_text().splitlines()) == 2
    life = lives.train(killed, args, ranks=ranks)
    time.sleep(rng.uniform(0.2, 0.8) * seconds)  # from outside, between any two instructions
    life.kill()
    assert_ends_well(lives.train(killed, args, ranks=ranks))
    assert [line["step"] for line in lines(killed)] == list(range(STEPS + 1))
    assert lines(killed) == lines(peace)
    assert outcome(killed) == outcome(peace)
    kept = sorted(os.listdir(killed / "runs/run/checkpoints"))  # one more if a kill came before the oldest went
    assert kept[-2:] == ["step-00000003", "step-00000004"]
    assert len(kept) <= 3


def kill_in_first_save(rank):
    """Before a life: nothing of the first checkpoint is written before the run has logged a trained step or waits.

    Then each rank that writes is killed.
    """
    is_waiting, wait, log = threading.Event(), Checkpoint.wait, Path("runs/run/metrics.jsonl")

    def watched_wait(checkpoints):
        if checkpoints.is_saving:
            is_waiting.set()
        wait(checkpoints)

    def write(path, *data):
        while not is_waiting.is_set() and log.read_bytes().count(b"\n") < 2:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    Checkpoint.wait, omni_train.checkpoint.parts.write_file = watched_wait, write


@pytest.mark.parametrize("case", cases("continues after a kill in its first save"))
def test_a_run_that_is_killed_in_its_first_save_continues_with_the_same_command(enter, bright_url, case):
    home, number = enter("home"), ranks(case[-1])
    trainer, args = row_settings(case[0], bright_url, *case[1:], save_every=1)
    life = lives.train(home, args, trainer=trainer, ranks=number, before=kill_in_first_save)
    assert -signal.SIGKILL in life.wait(), life.text()
    assert os.listdir(home / "runs/run/checkpoints") == ["step-00000000.tmp"]
    assert_ends_well(lives.train(home, args, trainer=trainer, ranks=number))
    assert [line["step"] for line in lines(home)] == [0, 1, 2]


def stop_the_report(rank):
    """Before a life: the process that writes evaluations stands still, and "reached" tells of the first checkpoint."""
    begin, digest = ReportProcess.__init__, omni_train.checkpoint.store.index_digest

    def begin_and_stop(report, *args):
        begin(report, *args)
        os.kill(report._process.pid, signal.SIGSTOP)
        Path("report").write_text(str(report._process.pid))

    def note(content):
        Path("reached").touch()
        return digest(content)

    ReportProcess.__init__, omni_train.checkpoint.store.index_digest = begin_and_stop, note


def test_a_kill_loses_no_image_of_an_evaluation(enter, bright_url):
    """A checkpoint is complete when the images of the evaluations before it are on the disk."""
    home = enter("home")
    life = lives.train(home, settings(bright_url), before=stop_the_report, reports=True)
    while not (home / "reached").exists():
        assert not life.has_ended(0), life.text()
        time.sleep(0.002)
    time.sleep(0.5)
    life.kill()
    os.kill(int((home / "report").read_text()), signal.SIGKILL)
    assert os.listdir(home / "runs/run/checkpoints") == ["step-00000000.tmp"]
    assert_ends_well(lives.train(home, settings(bright_url), reports=True))
    shown = sorted(path.name for path in (home / "runs/run/eval").iterdir())
    assert shown == [f"{step:06}{end}" for step in (0, 2, 4) for end in ("", ".png")]


STOPS = {  # kind of run, the signal, whether all ranks get it, as from torchrun, or only the last one
    "Ctrl-C": ("full", signal.SIGINT, True),
    "Ctrl-C on two ranks": ("fsdp2", signal.SIGINT, True),
    "SIGTERM": ("full", signal.SIGTERM, True),
    "SIGTERM to one of two ranks": ("fsdp2", signal.SIGTERM, False),
}


@pytest.mark.parametrize("stop", sampled(STOPS, 1))
def test_a_run_that_is_told_to_stop_saves_and_continues(enter, bright_url, in_peace, stop):
    kind, number, to_all = STOPS[stop]
    ranks, changes = KINDS[kind]
    args, peace = settings(bright_url, save_every=10, **changes), in_peace(kind)
    stopped = enter("stopped")
    life = lives.train(stopped, args, ranks=ranks)
    log = stopped / "runs/run/metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 2:
        assert not life.has_ended(0), life.text()
        time.sleep(0.002)
    for pid in life.pids if to_all else life.pids[-1:]:
        os.kill(pid, number)
    assert_ends_well(life)
    assert "Traceback" not in life.text()
    assert life.text().count("stopping after this step; Ctrl-C once more ends at once") == (number == signal.SIGINT)
    told = r"^stopped after step (\d); this continues:\n(.*)$"
    ((step, command),) = re.findall(told, life.text(), flags=re.MULTILINE)
    assert command.startswith("torchrun --nproc-per-node 2 " if ranks == 2 else shlex.quote(sys.orig_argv[0]))
    assert 1 <= int(step) < STEPS
    assert (stopped / f"runs/run/checkpoints/step-{step:0>8}").is_dir()
    assert_ends_well(lives.train(stopped, args, ranks=ranks))
    assert lines(stopped) == lines(peace)
    assert outcome(stopped) == outcome(peace)


def hang_in_second_update(*ranks):
    """Before a life: these ranks do not come back from their second update, and leave a file each as they hang."""
    update = lives.app.update

    def hang(run, step, *others):
        if step.number == 1:
            Path(f"hangs-{run.dist.rank}").touch()
            time.sleep(60)
        return update(run, step, *others)

    def before(rank):
        if rank in ranks:
            lives.app.update = hang

    return before


@pytest.mark.parametrize("hanging", sampled(["0", "0,1", "1"], 1))
def test_a_second_ctrl_c_ends_at_once(enter, bright_url, hanging):
    """Also where one rank hangs for good, while the other waits for it."""
    hanging = [int(rank) for rank in hanging.split(",")]
    home, ranks = enter("home"), 1 + max(hanging)
    life = lives.train(home, settings(bright_url), ranks=ranks, before=hang_in_second_update(*hanging))
    while len(list(home.glob("hangs-*"))) < len(hanging):
        assert not life.has_ended(0), life.text()
        time.sleep(0.002)
    for _ in range(2):
        assert not any(life.has_ended(rank) for rank in range(ranks)), life.text()
        for pid in life.pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
    assert life.wait(5)[hanging[0]] == 130, life.text()
    assert len(re.findall("this continues from the newest", life.text())) == 1, life.text()
    assert sorted(os.listdir(home / "runs/run/checkpoints")) == ["step-00000000", "step-00000001"]


@pytest.mark.parametrize("ranks", sampled([1, 2], 1))
def test_ctrl_c_before_the_first_step_tells_the_command_too(enter, bright_url, ranks):
    home = enter("home")

    def before(rank):
        omni_train.prepare.load_sharded = lambda *args, **options: signal.raise_signal(signal.SIGINT)

    life = lives.train(home, settings(bright_url), ranks=ranks, before=before)
    assert life.wait() == [130] * ranks, life.text()
    assert life.text().count("interrupted; this continues from the newest checkpoint:\n") == 1
    assert "Traceback" not in life.text()


def on_machines(home):
    """Before a life: each rank is the only one of a machine with a folder of its own."""

    def before(rank):
        os.environ["LOCAL_RANK"] = "0"
        folder = home / f"machine-{rank}"
        folder.mkdir(exist_ok=True)
        write_eval_prompts(folder)
        os.chdir(folder)

    return before


@pytest.mark.parametrize("kind", sampled(KINDS, 1))
def test_a_run_with_a_url_goes_on_on_other_machines(enter, bright_url, in_peace, kind):
    """They share no folder; it ends as the run with one did, and no file and no line has a credential."""
    ranks, changes = KINDS[kind]
    peace, first, second = in_peace(kind), enter("first"), enter("second")
    with s3_store() as bucket:
        args = settings(bright_url, checkpoint_url=f"{bucket}/run", keep_checkpoints=1, **changes)
        how = {"ranks": ranks, "reports": True}
        assert_ends_well(lives.train(first, change(args, train_steps=2), before=on_machines(first), **how))
        for rank in range(ranks):
            assert os.listdir(first / f"machine-{rank}/runs/run/checkpoints") == []
        again = lives.train(second, args, before=on_machines(second), **how)
        assert_ends_well(again)
        assert "runs/run continues after step 2: " in again.text()
        remote, last = Remote(f"{bucket}/run"), f"step-{STEPS:08}"
        assert {name.partition("/")[0] for name in remote.sizes()} == {last}  # the lock was given back
        place = Path(f"runs/run/checkpoints/{last}")
        found = {place / name: remote.read(f"{last}/{name}") for name in remote.sizes(last)}
    home = second / "machine-0"
    assert lines(home) == lines(peace)
    assert (home / "runs/run/config.toml").read_text().count(f"{bucket}/run") == 1
    exported = home.glob("runs/run/weights/**/*.safetensors")
    saved = {path: data for path, data in found.items() if path.parent == place and path.suffix == ".safetensors"}
    assert saved | {path.relative_to(home): path.read_bytes() for path in exported} == outcome(peace)
    written = [path for folder in (first, second) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert not [path for path, data in found.items() if SECRET.encode() in data]
    assert len(written) > 10


def whole(checkpoint):
    """Every tensor of a checkpoint, put together from its pieces as the index says."""
    index = json.loads((checkpoint / "checkpoint.json").read_text())
    files = {name: load_file(checkpoint / name) for name in index["files"]}
    pieces = {name: [files[file][name] for file, _ in entry["pieces"]] for name, entry in index["tensors"].items()}
    return {name: torch.cat(parts).view(index["tensors"][name]["shape"]) for name, parts in pieces.items()}


@pytest.mark.parametrize("shard", sampled(["ddp", "fsdp2"], 1))
def test_a_checkpoint_of_two_ranks_opens_on_one(enter, bright_url, shard):
    home = enter("home")
    assert_ends_well(lives.train(home, settings(bright_url, sharding_mode=shard), ranks=2))

    def only_load(rank):
        def save(run, *others):
            save_file(train_state(run.policy.net, run.policy.optimizer, run.policy.ema), home / "loaded")
            sys.exit(0)

        lives.app.Loop = save

    assert_ends_well(lives.train(home, settings(bright_url, sharding_mode="auto"), before=only_load))
    saved, loaded = whole(home / f"runs/run/checkpoints/step-{STEPS:08}"), load_file(home / "loaded")
    assert loaded.keys() == {name for name in saved if not name.startswith("rng/")}
    assert all(torch.equal(loaded[name], saved[name]) for name in loaded)
    assert_ends_well(lives.train(home, change(settings(bright_url), train_steps=STEPS + 1)))
    assert [line["step"] for line in lines(home)] == list(range(STEPS + 2))
    assert lines(home)[-1]["policy/first_ratio_max_dev"] == 0


def test_the_program_prints_a_command_that_continues(enter, bright_url):
    """As a user has it: a program in a shell, Ctrl-C, and a command to paste into the shell."""
    home = enter("home")
    (home / "tiny run.toml").write_text(to_toml(change(settings(bright_url), train_steps=200)))
    command = [
        sys.executable,
        str(REPO / "apps/train_flowgrpo.py"),
        "--config",
        "tiny run.toml",
        "--optim.lr-scheduler-type",
        "constant",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        first, second = process.stdout.readline(), process.stdout.readline()
        for line in process.stdout:
            assert "it/s]" not in line  # a bar of another library
            if line.startswith("step=1/"):
                process.send_signal(signal.SIGINT)
            if line.startswith("stopped after step"):
                resume = next(process.stdout).strip()
    assert process.returncode == 0
    assert first == f"train_flowgrpo.py: the settings are checked; loading torch, then {shallow()}\n"
    assert second.startswith("runs/run begins: 1 rank on cpu")
    assert shlex.split(resume) == command
    life = lives.command(home, [*command[2:], "--train-steps", str(len(lines(home)))])
    assert_ends_well(life)
    assert re.search(r"^held-out score 0\.\d+ -> 0\.\d+; report, weights and metrics in runs/run$", life.text(), re.M)
