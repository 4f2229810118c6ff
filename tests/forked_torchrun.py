"""torchrun as a fork of this process, whose ranks are also forks, so that none starts Python and imports torch."""

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


@dataclass(frozen=True)
class Torchrun:
    """A started torchrun, and the file with its output and that of its ranks."""

    pid: int
    output: Path

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def torchrun(words: Sequence[str], folder: Path, output: Path, *, is_forked: bool = True) -> Torchrun:
    """Start torchrun in a folder with the words of its command line, which include a script.

    is_forked: False to start it as a user does, as a program whose ranks are programs.
    """
    if pid := os.fork():
        return Torchrun(pid, output)
    code = 1
    try:
        os.chdir(folder)
        with output.open("w") as said:
            for place in (1, 2):
                os.dup2(said.fileno(), place)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ["OMP_NUM_THREADS"] = "1"
        if not is_forked:
            os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
        config, _, script = config_from_args(parse_args(words))
        elastic_launch(replace(config, start_method="fork"), run_script)(*script[script[0] == "-u" :])
        code = 0
    except ChildFailedError as exc:
        print(exc, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # a forked process must not run pytest's teardown


def run_script(path: str, *words: str) -> None:
    """Run the script as a rank, to its end. If it succeeds, return, as torchrun waits until all ranks have."""
    sys.argv = [path, *words]
    code: object = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exc:
        code = exc.code
    sys.stdout.flush()
    if code:
        os._exit(code if isinstance(code, int) else 1)
