"""Trainer runs in forked processes that have imported everything, for tests that start, kill and restart them.

A life is one start of the program on one or more ranks. It reports the exit codes and the output of its ranks.
"""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import omni_rl.run.engines
import omni_rl.run.run
import omni_rl.run.session
import omni_train.prepare
import torch
from omni_rl.run.engines import EngineRow
from omni_rl.run.failures import launch
from omni_rl.settings.cli import parse_cli
from omni_train.flops import FlopTable
from trainer_runs import import_all, recipe, tiny

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), name="run", algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None,
    prompts_per_step=2, group_size=4, batch_size=2, width=64, train_steps=4, save_every=1, lr=1e-3,
    optim_lr_scheduler_type="constant", hang_timeout_s=60.0,
)  # fmt: skip


def nothing(rank: int) -> None:
    """Do nothing; the default of `before`."""


@dataclass
class Life:
    """Forked ranks of one start of the program."""

    pids: list[int]
    outputs: list[Path]
    agent: int  # process with the ranks' rendezvous store
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self, timeout_s: float = 60.0) -> list[int]:
        """Return the exit codes of all ranks, -9 for SIGKILL; fail if a rank is still alive after the timeout."""
        deadline = time.monotonic() + timeout_s
        while len(self.codes) < len(self.pids):
            for rank in range(len(self.pids)):
                self.has_ended(rank)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still there after {timeout_s} s:\n{self.text()}")
            time.sleep(0.005)
        self.kill()
        return [self.codes[rank] for rank in range(len(self.pids))]

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank has ended."""
        if rank not in self.codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        return rank in self.codes

    def kill(self) -> None:
        """Send SIGKILL to the remaining processes."""
        for rank, pid in enumerate(self.pids):
            if not self.has_ended(rank):
                os.kill(pid, signal.SIGKILL)
                self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self.agent:
            os.kill(self.agent, signal.SIGKILL)
            os.waitpid(self.agent, 0)
            self.agent = 0

    def text(self) -> str:
        """Return the output of all ranks, rank by rank."""
        return "\n".join(path.read_text() for path in self.outputs)


def start(
    folder: Path,
    work: Callable[[], Any],
    *,
    ranks: int = 1,
    before: Callable[[int], None] = nothing,
    counts_flops: bool = False,
    reports: bool = False,
) -> Life:
    """Start ranks that run `before(rank)` and `work()`, and print to files in `folder`.

    They rendezvous as under torchrun, at a store that outlives them. counts_flops: True to count operations, which
    takes a third of the time of a small run. reports: True to write the report in its own process.
    """
    import_all()
    agent, port = _start_agent() if ranks > 1 else (0, 0)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    life = Life([], [folder / f"out-{rank}.txt" for rank in range(ranks)], agent)
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            if not counts_flops:
                FlopTable._record_call = lambda *call: None
            if not reports:
                omni_rl.run.session.ReportProcess = lambda *folder_and_tracker: None
            _live(life.outputs[rank], place | {name: str(n) for name, n in numbers.items()}, work, before)
        life.pids.append(pid)
    return life


def _start_agent() -> tuple[int, int]:
    """Start a store in a fork, because its threads would not survive the next fork; return its process id and port."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, store.port.to_bytes(2))
        signal.alarm(300)  # it must not outlive a killed test
        signal.pause()
    port = int.from_bytes(os.read(read, 2))
    os.close(read)
    os.close(write)
    return pid, port


def _live(output: Path, place: dict[str, str], work: Callable[[], Any], before: Callable[[int], None]) -> None:
    """Run to the end and exit without pytest's teardown."""
    code = 0
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    try:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have disabled it for its jobs
        if place["WORLD_SIZE"] != "1":
            os.environ |= place
        before(int(place["RANK"]))
        work()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        os._exit(code)


def train(folder: Path, args: Any, *, trainer: Any = app, **how: Any) -> Life:
    """Start a trainer with these settings."""
    return start(folder, lambda: launch(trainer.main, args), **how)


def command(folder: Path, flags: Sequence[str], *, trainer: Any = app, **how: Any) -> Life:
    """Start a trainer with this command line."""

    def work() -> None:
        sys.argv = [f"{trainer.__name__}.py", *flags]
        launch(trainer.main, parse_cli(trainer.Args, trainer.check_args, flags, app=trainer.__name__))

    return start(folder, work, **how)


def no_loading(rank: int) -> None:
    """Make a run exit with code 99 when it loads weights."""
    omni_train.prepare.load_sharded = lambda *args, **options: os._exit(99)
    omni_rl.run.engines.ENGINES["diffusers"] = EngineRow(lambda *args: os._exit(99))


def assert_refused(folder: Path, flags: Sequence[str], message: str, *, ranks: int = 1, trainer: Any = app) -> None:
    """Check that the trainer, with tiny.toml and these flags, exits with code 2 and only this error line."""
    life = command(folder, ["--config", "tiny.toml", *flags], trainer=trainer, ranks=ranks, before=no_loading)
    name = f"{trainer.__name__}.py"
    codes, text = life.wait(), re.sub(f"(?m)^{name}: the settings are checked; .*\n", "", life.text()).strip()
    assert codes == [2] * ranks, text
    assert text.startswith(f"{name}: error: ")
    assert len(text.splitlines()) == 1, text
    assert re.search(message, text), text


def rewrite(path: Path, text: str) -> None:
    """Replace the content of a file in a folder of links."""
    path.unlink()
    path.write_text(text)


def cut(file: Path) -> None:
    """Cut a file in a folder of links to its first half."""
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: len(data) // 2])


def deepen(file: Path, extra: int) -> None:
    """Give a configuration `extra` more blocks than there are weights for."""
    config = json.loads(file.read_text())
    rewrite(file, json.dumps(config | {"num_layers": config["num_layers"] + extra}))
