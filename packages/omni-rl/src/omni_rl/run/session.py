"""The folder of a run, with its lock, log, report and checkpoints."""

import tomllib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch
from omni_train import progress
from omni_train.breaker import Breaker
from omni_train.checkpoint.index import saved_steps, step_folder
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import Dist, same_error
from omni_train.files import check_replaceable, read_regular, write_atomically
from omni_train.flops import device_name
from omni_train.hub import FETCHED, pin_revision
from omni_train.kernels import BACKENDS
from omni_train.lock import RunLock
from omni_train.log import RunLog, claim_folder
from omni_train.profiling import ProfiledLog
from torch import nn

from omni_rl.report import write_now, write_report, write_versions
from omni_rl.report.process import ReportProcess
from omni_rl.run.metrics import COLUMNS
from omni_rl.run.notify import print_line
from omni_rl.run.world import World
from omni_rl.settings.args import RunArgs, secret_flags, without_secrets
from omni_rl.settings.fields import build, flatten
from omni_rl.settings.saved import RUN_KEYS, check_same
from omni_rl.settings.toml import to_toml

# also stored with a checkpoint at a URL
CHECKPOINT_FILES = ("config.toml", "metrics.jsonl", "versions.jsonl", "weights")
ATOMIC_FOLDERS = ("weights", "best")  # folders that a run replaces atomically


class Session:
    """The folder of a run, and the objects that write to it.

    saved: the checkpoint from which the run resumes, if there is one. num_done: finished steps, -1 for a new run.
    config: settings and digests that must be the same when the run resumes. report: the process to which rank 0 sends
    samples. servers: the reward servers started by this run.
    """

    def __init__(self, args: RunArgs, dist: Dist) -> None:
        self.folder = Path("runs") / args.run.name
        self.lock: RunLock | None = None
        self.report: ReportProcess | None = None
        self.servers = ExitStack()
        self._report_breaker = Breaker("the report")
        self.checkpoints = Checkpoint(
            self.folder / "checkpoints",
            dist,
            keep=args.run.keep_checkpoints,
            wait_for=self._await_samples,
            url=args.run.checkpoint_url,
            run_files=[self.folder / name for name in CHECKPOINT_FILES],
        )
        if args.run.checkpoint_url and not (args.run.dry_run or args.eval.only or dist.first):
            self.lock = RunLock(self.folder, dist, url=args.run.checkpoint_url)
        self.saved = None if dist.first else self.checkpoints.latest()  # ranks that only sample receive the weights
        self.num_done = self.saved.step if self.saved else -1
        self.config: dict[str, object] = {}
        self._is_fetched = False  # True if another machine has continued the run
        self.log = RunLog("", is_main=False, total_steps=args.run.train_steps)
        if args.eval.only:
            self.folder /= f"eval-{max(self.num_done, 0):06}"

    @property
    def start_message(self) -> str:
        """Text on where the run begins."""
        return f"continues after step {self.saved.step}" if self.saved else "new run"

    def check(self, args: RunArgs, make_net: Callable[[], nn.Module]) -> None:
        """Verify the checkpoint. make_net: returns the net on the meta device, with its trained parameters.

        Raises:
            ValueError: it is damaged, or has other settings; the same on every rank.
        """
        if self.saved:
            check_same(args, self.saved, self.config)
            self.config |= {name: value for name, value in self.saved.config.items() if name in RUN_KEYS}
            self.checkpoints.verify(self.saved, make_net())

    def record_scorer(self, args: RunArgs, version: str) -> None:
        """Record the scorer's name and version.

        Raises:
            ValueError: the run began with another scorer.
        """
        self.config["scorer"] = version
        saved_version = self.saved.config.get("scorer", "") if self.saved else version
        if saved_version != version and not (args.eval.only or args.run.dry_run):
            raise ValueError(
                f"{args.scorer.flag} must be the scorer that the run began with, {saved_version}, got {version}"
            )

    def claim(self, args: RunArgs, world: World, mode: str) -> None:
        """Lock the folder for this run, open the report, and print the first line."""
        dist = world.dist
        if dist.first:
            return
        self.lock = self.lock or RunLock(self.folder, dist)
        if self.checkpoints.latest() != self.saved:
            raise ValueError(f"{self.folder} has another checkpoint, from a run that has ended meanwhile: start again")
        if not args.eval.only:
            with same_error(dist):
                for name in ATOMIC_FOLDERS if dist.is_main else ():
                    check_replaceable(self.folder / name)
                self.fetch(dist)
        claim_folder(
            dist, self.folder, has_checkpoint=self.saved is not None, hint=self.resume_hint(args.run.checkpoint_url)
        )
        if dist.is_main:
            self.open_report(args, world)
            start = self.start_message if self.saved else "begins"
            start = f"evaluates step {self.saved.step if self.saved else 0}" if args.eval.only else start
            ranks = f"{dist.world_size} {'rank' if dist.world_size == 1 else 'ranks'} on {dist.device.type}"
            ranks += f", {dist.context} of them for each sample" if dist.context > 1 else ""
            ranks += f", {count} more only sample" if (count := args.sharding.rollout_ranks) else ""
            place = f"report in {self.folder}/report.html; loading {args.policy.model}"
            print_line(f"{self.folder} {start}: {ranks}, weights {mode}; {place}")

    def resume_hint(self, url: str) -> str:
        """Return how to resume the folder's run if its checkpoints are not at --checkpoint-url; else ""."""
        path, saved_url = self.folder / "config.toml", ""
        with suppress(OSError, ValueError):  # no settings in the folder
            saved_url = tomllib.loads(read_regular(path).decode()).get("checkpoint_url", "")
        if saved_url != url and saved_url:
            return f"it goes on with --checkpoint-url {saved_url}, where its checkpoints are, or give another --name"
        if url and (steps := saved_steps(self.folder / "checkpoints")):
            place = step_folder(self.folder / "checkpoints", steps[-1])
            return f"it goes on from {place} without --checkpoint-url, or give another --name"
        return ""

    def fetch(self, dist: Dist) -> None:
        """Update the folder from the checkpoint at a URL, if another machine has continued the run.

        Raises:
            ValueError: the folder belongs to another run, or an object differs from the one that was uploaded.
            OSError: a file or object could not be read or written.
        """
        remote = self.checkpoints.remote
        if not (remote and self.saved and dist.is_main):
            return
        name, step = "metrics.jsonl", self.saved.step
        remote_log, path = remote.read_run_file(step, name), self.folder / name
        local_log = read_regular(path) if path.exists() else b""
        if remote_log is None:  # the checkpoint was copied from a folder
            return
        if (
            local_log and local_log.splitlines()[:1] != remote_log.splitlines()[:1]
        ):  # the times of step 0 differ between any two runs
            raise ValueError(f"{self.folder} holds another run than {remote.remote.url}: give another --name")
        if local_log.splitlines()[: step + 1] == remote_log.splitlines()[: step + 1]:
            return
        remote.fetch_run_folder(step, "weights", self.folder / "weights")
        if starts := remote.read_run_file(step, "versions.jsonl"):
            write_atomically(self.folder / "versions.jsonl", starts)
        write_atomically(path, remote_log)
        self._is_fetched = True

    def fetch_best(self, step: int) -> None:
        """Download, on the first rank, the weights of the best checkpoint at a URL, unless the folder has them."""
        remote, best = self.checkpoints.remote, self.folder / "best"
        if remote and (self._is_fetched or not best.exists()) and step in remote.steps():
            remote.fetch_run_folder(step, "weights", best)

    def open_report(self, args: RunArgs, world: World) -> None:
        """Write the settings and a report with the current activity; start the process that updates it.

        Raises:
            ValueError: a tracker of a new run could not be opened.
        """
        folder = self.folder
        write_atomically(folder / "config.toml", to_toml(without_secrets(args)))
        (folder / "metrics.jsonl").touch()
        with suppress(Exception):  # the report's process writes both again and reports errors
            write_now(folder, progress.describe())
            write_report(folder)
        self.report = self._report_breaker(ReportProcess, folder, args.run.tracking.to, args.run.tracking.project)
        error = self.report.tracker_error if self.report else ""
        if error and not self.saved:  # nothing is lost yet
            raise ValueError(f"--tracking.to must be a tracker that opens, got {args.run.tracking.to}: {error}")
        if error:
            Breaker("a tracker").fail(error)
        if self.report and world.display:
            world.display.listeners.append(self.report.show_now)

    def open_log(
        self, args: RunArgs, world: World, nets: Sequence[nn.Module], rewards: Sequence[str], unshard: Sequence[str]
    ) -> None:
        """Open the log, with the report and trackers as a sink, and record all versions.

        nets: the nets to profile. rewards: names of held-out metrics besides that of --eval.prompts. unshard: the
        phases in which weights are gathered once.
        """
        dist, folder = world.dist, self.folder
        if dist.is_main:
            Breaker("the record of versions")(self._record_start, args, world, unshard)
        self.log = world.open_log(
            partial(ProfiledLog, step=args.run.profile, nets=set(nets)) if args.run.profile else RunLog,
            folder=folder,
            is_main=dist.is_main,
            total_steps=args.run.train_steps,
            eval_every=args.eval.every,
            columns=[*COLUMNS[:2], *rewards, *COLUMNS[2:]],
            resume_step=-1 if args.eval.only else self.num_done,
            sinks=[self.report] if self.report else [],
        )

    def _record_start(self, args: RunArgs, world: World, unshard: Sequence[str]) -> None:
        """Add this start to the folder's versions.jsonl."""
        ranks, device = world.all_ranks.world_size, str(world.dist.device)
        facts: dict[str, object] = {"ranks": ranks, "device": device, "threads": torch.get_num_threads()}
        facts["attention"] = ", ".join(backend.name for backend in BACKENDS[args.policy.attention])
        facts |= {"device_name": name} if (name := device_name(world.dist.device)) else {}
        facts |= {"gathered": "once in " + " and ".join(unshard)} if unshard else {}
        if FETCHED:
            facts["hub"] = ", ".join(pin_revision(place, files[0]) for place, files in FETCHED.items())
        defaults = flatten(build(type(args), {}))
        changed = [name for name, value in flatten(args).items() if value != defaults[name]]
        write_versions(self.folder, hide=secret_flags(type(args)), changed=changed, facts=facts)

    def _await_samples(self) -> None:
        """Wait until the samples of evaluations are on disk, because a resumed run does not generate them again.

        Raises:
            OSError: another run has taken over the URL of the checkpoints.
        """
        if self.lock:
            self.lock.check()
        if self.report:
            self._report_breaker(self.report.wait)
