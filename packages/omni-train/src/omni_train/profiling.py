"""Traces of host and device in each phase of a step, for chrome://tracing or Perfetto."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_train.breaker import Breaker
from omni_train.log import RunLog

MAX_CALLS = 32  # calls of the nets in a phase, after which its trace ends: a large net's would be too long to read


class ProfiledLog(RunLog):
    """A log that also tries to write `<folder>/trace/<step>-<phase>.json.gz` for each phase of one step.

    step: number of the step in the log. nets: a trace ends after MAX_CALLS of their calls.
    """

    def __init__(
        self, folder: str | Path, *, step: int, nets: Collection[nn.Module], resume_step: int, **options: Any
    ) -> None:
        super().__init__(folder, resume_step=resume_step, **options)
        self._traced, self._nets, self._folder = step, nets, Path(folder) / "trace"
        self._step = resume_step + 1  # step of the next phase
        self._breaker = Breaker("the profile")

    def log(self, step: int, *args: Any, **options: Any) -> None:
        """Report after `step` finished steps, as in `RunLog.log`."""
        super().log(step, *args, **options)
        self._step = step + 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block, and trace it if it is in the step; a nested phase is in its outer phase's trace."""
        path = self._folder / f"{self._traced:06}-{name}.json.gz"
        if not self._is_main or self._step != self._traced or self._current_phase or path.exists():
            with super().phase(name):
                yield
            return
        trace = self._breaker(_Trace, self._nets, self._breaker)
        try:
            with super().phase(name):
                yield
        finally:
            if trace:
                trace.remove_hooks()
                self._breaker(trace.end)
        if trace:
            self._breaker(trace.write, path)


class _Trace:
    """A trace from now on, which ends after MAX_CALLS of the nets' calls."""

    def __init__(self, nets: Collection[nn.Module], breaker: Breaker) -> None:
        self._calls, self._has_ended = 0, False
        self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities(), record_shapes=True)
        self._profile.start()
        see = breaker.wrap(self._record_call)
        self._hooks = [net.register_forward_pre_hook(see) for net in nets]

    def _record_call(self, *_: object) -> None:
        self._calls += 1
        if self._calls > MAX_CALLS:
            self.end()

    def end(self) -> None:
        """End the trace, if it has not ended; only once, even if that fails."""
        if not self._has_ended:
            self._has_ended = True
            self._profile.stop()

    def remove_hooks(self) -> None:
        """Stop counting the nets' calls."""
        for hook in self._hooks:
            hook.remove()

    def write(self, path: Path) -> None:
        """Write the trace and print its path."""
        path.parent.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(path))
        print(f"profile of step {int(path.name.partition('-')[0])}: {path}", flush=True)
