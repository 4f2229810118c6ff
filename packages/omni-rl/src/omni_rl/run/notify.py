"""Announcements of a run, its alarms and its end: on the terminal, and to a command of the user's."""

import shlex
import subprocess
import sys
from contextlib import suppress
from typing import TextIO

from omni_train.terminal import printable

from omni_rl.settings.args import RunArgs

WAIT_S = 10.0  # for the command


def announce(text: str, args: RunArgs, file: TextIO | None = None, *, more: str = "") -> None:
    """Print a text, and give it to the command of `--tracking.notify` on its standard input, after the run's name.

    The command starts without a shell. It never stops a run: where it fails, or runs longer than `WAIT_S`, a line says
    so, without the command, which may hold a token; what the command prints is not shown.

    Args:
        text: a line or more, of which control characters and the credentials of URLs are left out.
        args: settings of the run.
        file: where to print (default: standard output).
        more: printed after the text, and not given to the command: what continues the run may hold tokens.
    """
    say((text := printable(text)) + more, file)
    if not args.run.tracking.notify or args.run.dry_run:
        return
    words = shlex.split(args.run.tracking.notify)
    try:
        subprocess.run(
            words,
            input=f"{args.run.name}: {text}\n".encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as exc:
        failed = f"exit code {exc.returncode}"
    except subprocess.TimeoutExpired:
        failed = f"no end after {WAIT_S:g} s"
    except Exception as exc:
        failed = (isinstance(exc, OSError) and exc.strerror) or type(exc).__name__
    else:
        return
    say(f"the command of --tracking.notify, which starts without a shell, failed: {failed}", sys.stderr)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a text of a run (default: on standard output); the run continues if the terminal is closed."""
    with suppress(OSError, ValueError):
        print(text, file=file or sys.stdout, flush=True)
