"""Error reporting of a distributed run: one message from one rank, with rank, phase and remedy.

`reports` are the messages that the ranks sent each other (`omni_train.dist.tell_failure`): by rank, the phase and the
error, or "" if another rank is the cause. A rank without a report hangs or was killed.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from omni_reward import RewardError
from omni_train.dist import is_lost_rank, shutdown, tell_failure
from omni_train.kernels import has_own_attention
from omni_train.signals import Stop, catch_stop, resume_command
from omni_train.terminal import printable

from omni_rl.flow.scorers import scorer_to_start
from omni_rl.run.notify import announce
from omni_rl.run.run import AnyRun
from omni_rl.run.world import World
from omni_rl.settings.args import RunArgs
from omni_rl.settings.cli import add_remedy, end_imports
from omni_rl.settings.fields import values_of
from omni_rl.settings.printing import print_error
from omni_rl.settings.toml import load_recipes

ArgsT = TypeVar("ArgsT", bound=RunArgs)


def launch(main: Callable[[ArgsT, World], None], args: ArgsT) -> None:
    """Run a trainer as a program. Exit codes: 0, 1 (the run failed), 2 (invalid settings or files), 130 (Ctrl-C)."""
    end_imports()
    try:
        if args.memory.device_gb:
            from omni_rl.tools.plan import fit

            sys.exit(fit(main, args))
        world = World.join(args)
        with closing(world.display) if world.display else nullcontext():
            main(args, world)
        shutdown()
        return
    except (ValueError, OSError, ImportError) as exc:
        code = 2
        report_mistake(exc)
    except KeyboardInterrupt:
        code = 130
        if os.environ.get("RANK", "0") == "0" and not args.run.dry_run:
            print(f"\ninterrupted; this continues from the newest checkpoint:\n{resume_command()}", file=sys.stderr)
    except Exception as exc:
        code = 1
        failure = exc if isinstance(exc, BrokenRunError) else BrokenRunError("start", exc)
        report_failure(failure, args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a failed rank must not wait, in an exit handler of a library, for ranks that wait for it


@contextmanager
def catch_failures(run: AnyRun) -> Iterator[Stop]:
    """Catch requests to stop in the `with` block. Afterwards, close the log and, if the block succeeded, the run.

    Raises:
        BrokenRunError: the block raised an exception.
    """
    try:
        with catch_stop(run.world.signals) as stop, run.session.log:
            yield stop
    except Exception as error:
        raise BrokenRunError(run.session.log.last_phase, error) from error
    run.close()


class BrokenRunError(RuntimeError):
    """A run that cannot continue; its cause is the original error."""

    def __init__(self, phase: str, cause: BaseException) -> None:
        super().__init__(f"phase {phase}: {type(cause).__name__}: {cause}")
        self.phase, self.cause = phase, cause


def report_mistake(error: Exception) -> None:
    """Print an error in the settings as one line."""
    if _should_print(tell_failure(str(error))):
        print_error(add_remedy(str(error), sys.argv[1:], load_recipes(Path(sys.argv[0]).stem)))


def report_failure(failure: BrokenRunError, args: RunArgs) -> None:
    """Print the error and its place, what to change, and, except for a dry run, the command that resumes the run.

    The traceback is printed first, unless a scorer, the disk or the store of --checkpoint-url failed.
    """
    is_echo = is_lost_rank(failure.cause)
    reports = tell_failure("" if is_echo else str(failure))
    if not _should_print(reports):
        return
    if not (is_scorer_error(failure.cause) or is_disk_error(failure.cause) or is_store_error(failure.cause, args)):
        print(printable("".join(traceback.format_exception(failure.cause))), end="", file=sys.stderr)
    message = describe(reports, int(os.environ.get("WORLD_SIZE", "1")))
    location = f" in phase {failure.phase}" if is_echo else ""
    text = f"{Path(sys.argv[0]).name}: {message}{location}\n{advise(failure.cause, args)}"
    hint = "\nCheckpoints that were complete stay; this continues from the newest:\n" + resume_command()
    announce(text, args, sys.stderr, more="" if args.run.dry_run else hint)


def describe(reports: Mapping[int, str], num_ranks: int) -> str:
    """Return one line per distinct error with its ranks, or a line with the ranks that sent no report."""
    ranks_by_cause: dict[str, list[str]] = {}
    for rank in sorted(rank for rank, cause in reports.items() if cause):
        ranks_by_cause.setdefault(reports[rank], []).append(str(rank))
    if ranks_by_cause:
        return "\n".join(f"rank {', '.join(ranks)}, {cause}" for cause, ranks in ranks_by_cause.items())
    silent = [str(rank) for rank in range(num_ranks) if rank not in reports]
    subject = f"{'one of the ranks' if len(silent) > 1 else 'rank'} {', '.join(silent)} was killed or hangs"
    return f"{subject if silent else 'the ranks lost each other'}; rank {min(reports)} waited for it"


def is_scorer_error(error: BaseException) -> bool:
    """Return True if a scorer failed or gave no score."""
    return isinstance(error, RewardError) or str(error).startswith("the scorer ")


def is_disk_error(error: BaseException) -> bool:
    """Return True if the run could not write to disk, judged by the message."""
    messages = ("No space left on device", "Disk quota exceeded", "Read-only file system", "Permission denied")
    return any(message in str(error) for message in messages)


def is_store_error(error: BaseException, args: RunArgs) -> bool:
    """Return True if the store of --checkpoint-url failed. Its errors contain the URL."""
    return bool(args.run.checkpoint_url) and args.run.checkpoint_url.rstrip("/") in str(error)


def advise(error: BaseException, args: RunArgs) -> str:
    """Return advice for the kind of error."""
    text = str(error)
    is_out_of_memory = any(phrase in text.lower() for phrase in ("can't allocate memory", "out of memory"))
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or is_out_of_memory:
        return (
            "Out of memory: turn on --memory.gradient-checkpointing, name parts in --memory.offload, or lower "
            "--batch-size. For images and videos --dry-run --memory.device-gb 80 plans what fits 80 GB."
        )
    if is_scorer_error(error):
        if name := scorer_to_start(args.scorer)[0]:
            return f"The run started this scorer: fix {name}, as the messages say. The same command starts it again."
        return "The scorer failed: check its log, and start it again."
    if is_lost_rank(error):
        return (
            "If the machine killed it for its memory (see its log), lower --batch-size. If it was only slow, raise "
            "--hang-timeout-s."
        )
    if "No available kernel" in text or "No viable backend" in text:
        return "The kernels of --attention do not take these inputs, such as a mask or float32: try --attention auto."
    if "does not have a deterministic implementation" in text:
        return "The device has no deterministic algorithm for this gradient: add --no-deterministic."
    if is_store_error(error, args) and "was taken by" in text:
        return "Another run uses the same --checkpoint-url: end one of them, or give one another URL and --name."
    if is_store_error(error, args):
        return "The store of --checkpoint-url refused or did not answer: check its permissions, space and network."
    if isinstance(error, OSError) or is_disk_error(error):
        return "The machine refused: check the free space and the permissions of the disk that holds runs/."
    if "ratio must be 1" in text:
        return advise_on_ratio(args)
    if isinstance(error, FloatingPointError) or "finite" in text:
        remedies = [f"lower --lr, now {args.lr:g}", *["try --dtype float32"] * (args.policy.dtype != "float32")]
        return f"In a run of another --name {', or '.join(remedies)}. The metrics of earlier steps show where it began."
    return "This is not an error in the settings: the traceback above shows where it happened."


def advise_on_ratio(args: RunArgs) -> str:
    """Return advice on the flags, supported by trainer and device, that may make the ratio 1 or let a run continue."""
    values, device = values_of(args), torch.accelerator.current_accelerator(check_available=True)
    prefix = "--old-log-prob recompute with " if "old_log_prob" in values else ""
    remedies = {
        "--attention math": args.policy.attention != "math" and not has_own_attention(device or torch.device("cpu")),
        "--no-compile": values.get("compile"),
        f"{prefix}--ratio-tolerance, above the deviation, in a run of another --name": "ratio_tolerance" in values,
    }
    suggestions = [f"try {remedy}" for remedy, is_available in remedies.items() if is_available]
    return f"{', or '.join(['Fix a cause that the message names', *suggestions])}."


def _should_print(reports: Mapping[int, str]) -> bool:
    """Return True if this rank prints: the first rank with a cause, or else the first that sent a report."""
    return int(os.environ.get("RANK", "0")) == min([rank for rank, cause in reports.items() if cause] or reports)
