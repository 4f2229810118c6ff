"""Traces of host and device in each phase of a step, for chrome://tracing or Perfetto."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_train.log import RunLog

MAX_CALLS = 32  # of the nets in a phase, after which its trace ends: a large net's would be too long to read


class ProfiledLog(RunLog):
    """A log that also writes `<folder>/trace/<step>-<phase>.json.gz` for each phase of one step.

    step: its number in the log. nets: a trace ends after MAX_CALLS of their calls.
    """

    def __init__(
        self, folder: str | Path, *, step: int, nets: Collection[nn.Module], resume_step: int, **options: Any
    ) -> None:
        super().__init__(folder, resume_step=resume_step, **options)
        self._traced, self._nets, self._folder = step, nets, Path(folder) / "trace"
        self._step = resume_step + 1  # of the next phase

    def log(self, step: int, *args: Any, **options: Any) -> None:
        """Report after `step` finished steps, as `RunLog.log`."""
        super().log(step, *args, **options)
        self._step = step + 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block, and trace it if it belongs to the step; a nested one is in the trace of its outer."""
        path = self._folder / f"{self._traced:06}-{name}.json.gz"
        if not self._is_main or self._step != self._traced or self._within or path.exists():
            with super().phase(name):
                yield
            return
        calls, profile = 0, torch.profiler.profile(activities=torch.profiler.supported_activities(), record_shapes=True)

        def see(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == MAX_CALLS + 1:
                profile.stop()

        hooks = [net.register_forward_pre_hook(see) for net in self._nets]
        profile.start()
        try:
            with super().phase(name):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            if calls <= MAX_CALLS:
                profile.stop()
        self._folder.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(path))
        print(f"profile of step {self._traced}: {path}", flush=True)
