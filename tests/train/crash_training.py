"""Train a tiny net that saves after every step, undisturbed and killed many times: `crash_training.py FOLDER SEED`.

Writes FOLDER/peace and FOLDER/killed, each with the run's `metrics.jsonl` and its last state, `final.safetensors`. For
each killed life, prints the event or time of the kill and the newest checkpoint that it left. Every life is a fork of
this process, which has imported everything by then.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch
from omni_train.checkpoint.state import train_state
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import init_distributed
from omni_train.log import RunLog, claim_folder
from omni_train.optim import build_adamw, optimizer_step
from omni_train.weights.snapshot import Ema
from safetensors.torch import save_file

NUM_STEPS, NUM_KILLS = 150, 20
EVENTS = ("open", "os.fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "life.")  # of `sys.audit`


def train(folder: Path, num_steps: int = NUM_STEPS) -> None:
    """Run one life: continue from the last checkpoint to the end."""
    dist = init_distributed()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    params = list(net.parameters())
    optimizer, ema = build_adamw(params, lr=0.01), Ema(params, decay=0.9)
    checkpoints = Checkpoint(folder / "checkpoints", dist)
    if saved := checkpoints.latest():
        checkpoints.load(saved, net, optimizer, ema)
    sys.audit("life.loaded")
    last = saved.step if saved else -1
    claim_folder(dist, folder, has_checkpoint=saved is not None)
    with RunLog(folder, is_main=True, total_steps=num_steps, resume_step=last) as log:
        for step in range(last + 1, num_steps + 1):
            metrics = {}
            if step:
                x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
                loss = (net(x) - x.sum(dim=1, keepdim=True)).square().mean()
                sys.audit("life.forward")
                loss.backward()
                result = optimizer_step(optimizer, params, lr=0.01, max_grad_norm=1.0, dist=dist)
                ema.update(step)
                metrics = {"loss": loss, "grad_norm": result.grad_norm}
            log.log(step, metrics)
            sys.audit("life.logged")
            checkpoints.poll()
            checkpoints.async_save(step, net, optimizer, ema, config={})
            if step == 0:
                checkpoints.wait()
            sys.audit("life.saved")
        checkpoints.wait()
    save_file(train_state(net, optimizer, ema), folder / "final.safetensors")


def live(folder: Path, kill_at: int | None = None, *, in_save: bool = False) -> int:
    """Return the process id of a new life, which kills itself at event number `kill_at` and writes it to FOLDER/event.

    in_save: True to count only events on files of a checkpoint.
    """
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drops the progress
    count = 0

    def strike(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if not event.startswith(EVENTS) or (event == "open" and not str(args[0]).startswith(str(folder))):
            return
        name = Path(str(args[0])).name if args else ""
        if in_save and not name.startswith(("step-", "rank-")):
            return
        count += 1
        if count == kill_at:
            (folder.parent / "event").write_text(f"{event} {name}".strip())
            os.kill(os.getpid(), signal.SIGKILL)

    fsync = os.fsync

    def audited_fsync(number: int) -> None:  # the one call of a save that has no event of its own
        sys.audit("os.fsync", os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    os.fsync = audited_fsync
    sys.addaudithook(strike)
    train(folder)
    os._exit(0)


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint after a kill; raise if its files do not have their sizes."""
    saved = Checkpoint(folder / "checkpoints", init_distributed()).latest()
    return saved.step if saved else -1


def main(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    with redirect_stdout(None):
        train(folder / "warm", num_steps=2)  # runs torch's late imports
    assert os.waitpid(live(folder / "peace"), 0)[1] == 0
    rng, killed = random.Random(seed), folder / "killed"
    for number in range(NUM_KILLS):
        # Every other kill comes from outside, at any instruction.
        seconds, kill_at = (rng.uniform(0.0, 0.1), None) if number % 2 else (None, rng.randint(1, 80))
        pid = live(killed, kill_at, in_save=number % 4 == 0)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        event = (folder / "event").read_text() if kill_at else f"{seconds:.3f} s"
        print(json.dumps({"event": event, "newest": newest(killed)}))
    assert os.waitpid(live(killed), 0)[1] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
