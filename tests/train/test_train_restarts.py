"""docs/machines.md and scripts/cluster: the command of each machine, two of which are this one, and a killed rank."""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from socket import create_server

import pytest
import yaml
from forked_torchrun import torchrun
from helpers import REPO, sampled
from omni_rl.settings.cli import parse_cli
from s3_store import s3_store
from train import restarted_training

CLUSTER = REPO / "scripts" / "cluster"
PAGE, SCRIPTS = "machines.md", sorted(path.name for path in CLUSTER.iterdir())
STUBS = {  # what the scripts call, in place of which these are
    "torchrun": 'printf "%s\\n" "$@" >words.part; mv words.part words; ${WAIT:-true}',
    "srun": 'exec "$@"',
    "scontrol": 'echo "$*" >>scontrol; echo node0; echo node1',
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the prompts that the commands name, and stubs of the programs of a cluster on the PATH."""
    monkeypatch.chdir(tmp_path)
    for name in ("my_prompts.txt", "my_eval.txt"):
        Path(name).write_text("".join(f'a sign that says "{i}"\n' for i in range(64)))
    (tmp_path / "bin").mkdir()
    for name, text in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    own = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "HEAD_NODE": "node0"}
    for name, value in (own | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def words_of(name):
    """The words after torchrun in the page or a script, with one word a flag and its value each."""
    if name == PAGE:
        text = re.search(r"^torchrun (.*?)\n```", (REPO / "docs" / name).read_text(), re.MULTILINE | re.DOTALL)[1]
        words = shlex.split(text.replace("\\\n", " "))
    elif name.endswith(".yaml"):
        (job,) = [each for each in yaml.safe_load_all((CLUSTER / name).read_text()) if each["kind"] == "Job"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["torchrun"]
        words = container["args"]
    else:
        subprocess.run([CLUSTER / name], check=True, timeout=60)
        words = Path("words").read_text().splitlines()
    return [each for word in words for each in (word.split("=", 1) if re.match("--[^ =]+=", word) else [word])]


def command_of(name, port, url):
    """The words with one rank a machine, ports of this machine, and another trainer."""
    words = words_of(name)
    script = words.index("apps/train_flowgrpo.py")
    own = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}"}
    given = dict(zip(words[:script:2], words[1:script:2], strict=True))
    assert given["--nnodes"] == "2"
    assert own.keys() < given.keys()
    flags = [word for pair in (given | own).items() for word in pair]
    trained = [str(REPO / "tests/train/restarted_training.py"), *(["--checkpoint-url", url] if url else [])]
    assert ("--checkpoint-url" in words[script:]) == bool(url)
    return [*flags, "--local-addr", "127.0.0.1", *trained]


@pytest.fixture
def in_peace(run_ranks, tmp_path_factory, monkeypatch):
    """The weights of a run of two ranks of which none is killed."""
    monkeypatch.chdir(tmp_path_factory.mktemp("peace"))
    run_ranks(lambda dist: restarted_training.train(dist, is_killed=False))
    return Path("weights-0.json").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sampled([PAGE, *SCRIPTS], 1))
def test_ranks_of_two_machines_start_anew_after_one_is_killed_and_train_on(in_peace, here, name):
    """From their checkpoint, to the same weights; with a script the machines have no folder in common.

    The store that torchrun keeps has the addresses of ranks that have ended; nobody may call them. The page's torchrun
    is a program with programs for ranks, as a user has it; those of scripts are forks, which take a fifth of its time.
    """
    with closing(create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    folders = [here / ("shared" if name == PAGE else f"machine-{number}") for number in range(2)]
    with s3_store() as bucket:
        command = command_of(name, port, "" if name == PAGE else f"{bucket}/run")
        machines = []
        for number, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            machines.append(torchrun(command, folder, here / f"said-{number}", is_forked=name != PAGE))
        codes = [machine.wait() for machine in machines]
    assert codes == [0, 0], "\n".join(machine.output.read_text() for machine in machines)
    assert len({path.parent for path in here.glob("*/log-*")}) == len(set(folders))
    assert [path.read_text() for path in here.glob("*/log-*")] == ["start\n1\n2\nstart\n3\n4\n"] * 2
    assert len(list(here.glob("*/killed"))) == 1
    assert [path.read_text() for path in here.glob("*/weights-*.json")] == [in_peace] * 2
    assert len(json.loads(in_peace)) == 4
    assert restarted_training.STEPS == 4


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_trainer_takes_the_settings_of_a_script(here, monkeypatch, name):
    words = words_of(name)
    script, ranks = words.index("apps/train_flowgrpo.py"), int(words[words.index("--nproc-per-node") + 1])
    monkeypatch.setenv("WORLD_SIZE", str(2 * ranks))
    monkeypatch.setenv("RANK", "0")
    app = importlib.import_module("train_flowgrpo")
    args = parse_cli(app.Args, app.check_args, words[script + 1 :], app=app.__name__)
    assert args.run.checkpoint_url == "s3://my-bucket/runs/ocr"
    assert args.sharding.size == ranks


def test_a_job_of_slurm_whose_time_ends_is_stopped_and_queued_again(here, monkeypatch):
    monkeypatch.setenv("WAIT", "exec sleep 60")  # it ends by the signal that srun passes on
    job = subprocess.Popen([CLUSTER / "slurm.sh"])
    while not Path("words").exists():
        assert job.poll() is None
        time.sleep(0.01)
    time.sleep(0.5)  # until the script waits
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 0
    assert Path("scontrol").read_text().splitlines() == ["show hostnames node[0-1]", "requeue 17"]
    assert "#SBATCH --signal=B:TERM@300\n" in (CLUSTER / "slurm.sh").read_text()


def test_a_job_of_slurm_that_fails_is_not_queued_again(here, monkeypatch):
    monkeypatch.setenv("WAIT", "exit 3")
    assert subprocess.run([CLUSTER / "slurm.sh"], timeout=60).returncode == 3
    assert "requeue" not in Path("scontrol").read_text()


def test_the_pods_have_the_names_that_the_command_has():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    endpoint = words_of("kubernetes.yaml")[words_of("kubernetes.yaml").index("--rdzv-endpoint") + 1]
    assert endpoint == f"{name}-0.{service['metadata']['name']}:29500"


def test_scripts_of_the_shell_are_sound():
    scripts = [
        path for path in REPO.glob("scripts/**/*") if path.is_file() and path.read_bytes()[:15] == b"#!/usr/bin/env "
    ]
    scripts = [path for path in scripts if b"bash" in path.read_bytes()[:20]]
    assert CLUSTER / "slurm.sh" in scripts
    subprocess.run([Path(sys.executable).with_name("shellcheck"), *scripts], check=True)
