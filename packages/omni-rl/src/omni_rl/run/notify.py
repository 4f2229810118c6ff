"""Announcements of alarms and of the end of a run, on the terminal and to a command of the user."""

import shlex
import subprocess
import sys
from contextlib import suppress
from typing import TextIO

from omni_train.terminal import printable

from omni_rl.settings.args import RunArgs

WAIT_S = 10.0  # for the command


def announce(text: str, args: RunArgs, file: TextIO | None = None, *, more: str = "") -> None:
    """Print a text, and pass it, after the run's name, to the standard input of the command of `--tracking.notify`.

    The command runs without a shell, and its output is discarded. It never stops the run: if it fails, or takes longer
    than `WAIT_S`, a line reports that, without the command, which may contain a token.

    Args:
        text: one or more lines. Control characters and credentials in URLs are removed.
        args: settings of the run.
        file: where to print (default: standard output).
        more: printed after the text but not passed to the command, because it may contain tokens.
    """
    print_line((text := printable(text)) + more, file)
    if not args.run.tracking.notify or args.run.dry_run:
        return
    argv = shlex.split(args.run.tracking.notify)
    try:
        subprocess.run(
            argv,
            input=f"{args.run.name}: {text}\n".encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as exc:
        failure = f"exit code {exc.returncode}"
    except subprocess.TimeoutExpired:
        failure = f"no end after {WAIT_S:g} s"
    except Exception as exc:
        failure = (isinstance(exc, OSError) and exc.strerror) or type(exc).__name__
    else:
        return
    print_line(f"the command of --tracking.notify, which starts without a shell, failed: {failure}", sys.stderr)


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print a text (default: on standard output). The run continues if the terminal is closed."""
    with suppress(OSError, ValueError):
        print(text, file=file or sys.stdout, flush=True)
