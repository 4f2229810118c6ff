"""Count the operations of a training step on an accelerator: host waits, copies, collectives, memory, by phase.

python tests/emulated/count_waits.py
python tests/emulated/count_waits.py nft dpo srpo
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "scripts")]

import torch
from emulated.emulated_runs import run
from emulated.npu import Event, load, place, tell
from omni_train.log import RunLog
from records import record

BATCHES = 2
SHAPE: dict[str, Any] = record.LORA | {
    "sharding_mode": "ddp", "prompts_per_step": 4, "group_size": 4, "batch_size": 4, "eval_every": 3, "save_every": 3,
    "train_steps": 3,
}  # fmt: skip
GUIDED: dict[str, Any] = SHAPE | {"true_cfg_scale": 3.0}
WINDOW: dict[str, Any] = {"num_inference_steps": 10, "window_size": 2, "window_high": 5}
CASES = {  # 2 ranks, or pairs, each with 2 batches of 4 images; dpo takes given pairs of images
    "flowgrpo": record.grpo(ranks=2, **GUIDED, **WINDOW),
    "flowgrpo, context": record.grpo(ranks=4, sharding_context_parallel=2, **SHAPE, **WINDOW),
    "nft": record.nft(ranks=2, **GUIDED),
    "dgpo": record.nft(ranks=2, algo="dgpo", kl_coef=0.1, **SHAPE),
    "dpo": record.dpo(ranks=2, **SHAPE),
    "srpo": record.srpo(ranks=2, **SHAPE | {"prompts_per_step": 16, "group_size": 1}),
}
COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")


@dataclass
class Phase:
    """One phase of a step. operators: number on the device. peak_mb: peak device memory in MB of 2**20."""

    name: str
    events: list[Event] = field(default_factory=list)
    operators: int = 0
    peak_mb: float = 0.0

    def count(self, kind: str) -> int:
        """Return the number of events of one kind."""
        return sum(each.kind == kind for each in self.events)

    def waits(self) -> Counter[str]:
        """Return how often the host waited, by place."""
        return Counter(each.place for each in self.events if each.waits)


def trace() -> None:
    """Write the events in each phase of this process's run to trace-RANK.jsonl in its folder."""
    library, told, phase, before = load(), list[Event](), RunLog.phase, 0
    path = Path(f"trace-{os.environ.get('RANK', '0')}.jsonl")

    def write(name: str) -> None:
        nonlocal before
        operators, peak = library.emulated_operators(), library.emulated_peak() / 2**20
        with path.open("a") as file:
            file.write(json.dumps(asdict(Phase(name, told, operators - before, peak))) + "\n")
        told.clear()
        before = operators
        library.emulated_reset_peak()

    @contextmanager
    def written(log: RunLog, name: str) -> Iterator[None]:
        write("")
        with phase(log, name):
            yield
        write(name)

    def counted(name: str) -> Callable[..., object]:
        function = getattr(torch.distributed, name)

        def call(*args: object, **options: object) -> object:
            tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
            if all(each.is_cpu for each in tensors):
                told.append(Event("host collective", name, sum(each.nbytes for each in tensors), False, place()))
            return function(*args, **options)

        return call

    tell(told.append)
    RunLog.phase = written  # type: ignore[method-assign]
    for name in COLLECTIVES:
        setattr(torch.distributed, name, counted(name))


def step_of(path: Path, number: int) -> list[Phase]:
    """Return the phases of a training step, counted from 0; what happens between phases has the name ""."""
    steps: list[list[Phase]] = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        phase = Phase(entry["name"], [Event(**each) for each in entry["events"]], entry["operators"], entry["peak_mb"])
        if phase.name == "rollout":
            steps.append([])
        if steps:
            steps[-1].append(phase)
    return steps[number]


def measure(name: str = "flowgrpo", number: int = 1) -> list[Phase]:
    """Return rank 0's phases of a case's training step `number`, which neither evaluates nor saves."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as home, record.scoring() as url:
        folder = Path(home) / "run"
        run(case, folder, url, lives=(case.settings["train_steps"],), before=trace)
        return step_of(folder / "trace-0.jsonl", number)


def merged(phases: Sequence[Phase]) -> list[Phase]:
    """Merge all that happens between the phases into one entry."""
    between = [phase for phase in phases if not phase.name]
    events = [event for phase in between for event in phase.events]
    rest = Phase("between", events, sum(p.operators for p in between), max(p.peak_mb for p in between))
    return [phase for phase in phases if phase.name] + [rest]


def table(phases: Sequence[Phase]) -> str:
    """Return the counts in Markdown: the phases, and the places where the host waits."""
    head = ("phase", "operators", "to device", "to host", "waits", "collectives", "on the host", "peak, MB")
    rows = [
        (phase.name, phase.operators, phase.count("to device"), phase.count("to host"), phase.waits().total(),
         phase.count("collective"), phase.count("host collective"), f"{phase.peak_mb:.1f}")
        for phase in phases
    ]  # fmt: skip
    waits = [(phase.name, where, number) for phase in phases for where, number in phase.waits().items()]
    return "\n\n".join(_markdown(*each) for each in ((head, rows), (("phase", "place", "waits"), waits)))


def _markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    for each in sys.argv[1:] or ["flowgrpo"]:
        print(each, table(merged(measure(each))), sep="\n\n", end="\n\n")
