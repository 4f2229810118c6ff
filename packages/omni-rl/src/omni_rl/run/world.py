"""The environment of a run: its ranks, their device, and the methods that open everything else."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from omni_train.display import Display
from omni_train.dist import Dist, free_memory, gather_json, init_distributed, local_device
from omni_train.log import RunLog
from omni_train.prompts.files import PromptRecord
from omni_train.roles import Roles, split
from omni_train.signals import STOP_SIGNALS

from omni_rl.flow.scorers import connect
from omni_rl.run.engines import ENGINES
from omni_rl.settings.args import RunArgs, dp_size, num_trainers
from omni_rl.settings.cli import end_imports
from omni_rl.settings.fields import flatten
from omni_rl.settings.groups import Scorer

ModelT = TypeVar("ModelT")


class ChecksFiles(Protocol):
    """A model whose files can be checked."""

    def check_files(self) -> None:
        """Raise ValueError unless all files exist."""


@dataclass(frozen=True)
class World:
    """The ranks that torchrun started, or only this process.

    In `omni_rl.tools.plan.PlannedWorld` memory is only counted. dist: the ranks with this rank's role. roles: the
    roles, if some ranks only sample. display: progress display of the main rank. signals: signals that ask a run to
    stop. has_values: True if tensors have values.
    """

    dist: Dist
    roles: Roles | None = field(default=None, kw_only=True)
    display: Display | None = field(default=None, kw_only=True)
    signals: ClassVar[Sequence[Any]] = STOP_SIGNALS
    has_values: ClassVar[bool] = True

    @classmethod
    def join(cls, args: RunArgs) -> "World":
        """Join the ranks of a run, and set the number of threads. A dry run is the first rank, without the others.

        Raises:
            ValueError: ranks have different settings.
        """
        end_imports()
        if args.run.dry_run:
            size = num_trainers(args)
            first_rank = Dist(rank=0, world_size=size, local_rank=0, device=local_device(), mesh=None)
            return cls(replace(first_rank, context=size // dp_size(args, size)))
        dist = init_distributed(timeout_s=args.run.hang_timeout_s, expandable_segments=args.sampling.has_trained_engine)
        if dist.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # fast with a scorer on the same CPU, and reproducible on any number of cores
        count, limit = args.sharding.rollout_ranks, args.run.hang_timeout_s
        roles = split(dist, count, timeout_s=limit) if count and dist.mesh else None
        role_dist = roles.dist if roles else dist
        world = cls(
            replace(role_dist, context=role_dist.world_size // dp_size(args, role_dist.world_size)), roles=roles
        )
        world.check_same_settings(flatten(args))
        return replace(world, display=Display()) if role_dist.is_main else world

    @property
    def all_ranks(self) -> Dist:
        """All ranks of all roles."""
        return self.roles.whole if self.roles else self.dist

    @property
    def is_sampler(self) -> bool:
        """True if this rank only samples, for others that train."""
        return self.dist.first > 0

    def check_same_settings(self, settings: dict[str, object]) -> None:
        """Raise ValueError on every rank of all roles unless all have the same settings and files."""
        first, *others = gather_json(self.all_ranks, settings)
        for rank, other in enumerate(others, start=1):
            if names := sorted(name for name, value in first.items() if other[name] != value):
                values = ", ".join(f"{name} = {other[name]!r} (rank 0: {first[name]!r})" for name in names)
                raise ValueError(f"all ranks must have the same settings, but rank {rank} has {values}")

    def check_files(self, model: ChecksFiles) -> None:
        """Raise ValueError unless all files of a model exist."""
        model.check_files()

    def print_plan(self, lines: str) -> bool:
        """Print the lines of a dry run; return True if the program ends after them."""
        if self.dist.is_main:
            print(lines, flush=True)
        return True

    def connect(
        self, urls: str, scorer_args: Scorer, canary: PromptRecord, kinds: Sequence[str], **options: Any
    ) -> tuple[Any, str]:
        """Return the scorer at a URL, and its name and version, as `omni_rl.flow.scorers.connect` does."""
        return connect(urls, scorer_args, self.dist, canary, kinds, **options)

    def instrument(self, model: ModelT) -> ModelT:
        """Return the model. A planned world returns one with counted forwards."""
        return model

    def open_engine(self, name: str, *options: Any) -> Any:
        """Open the engine `name` of `ENGINES`."""
        return ENGINES[name].open(*options)

    def free_memory(self) -> float:
        """Return the number of free bytes on the device."""
        return free_memory(self.dist.device)

    def open_log(self, log_class: Callable[..., RunLog], **options: Any) -> RunLog:
        """Return the log of the run."""
        return log_class(**options, display=self.display)

    def steps(self, run: Any, remaining: Iterable[Any]) -> Iterable[Any]:
        """Return the steps to run out of the remaining training steps."""
        return remaining
