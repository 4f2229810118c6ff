"""Trace one training step of a real run: the functions of this tree that run, and the frames around the loss.

PYTHONPATH=tests:scripts python tests/arch/step_trace.py [SETTING=VALUE ...]

prints the files of a FlowGRPO step with the code lines of the functions that ran.
"""

import ast
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import count_lines
import torch
from omni_train.log import RunLog
from records import record

REPO = Path(__file__).parents[2]
LOOP = "main"  # the function of a trainer that has the loop
Function = tuple[str, str, int]
STEP = {"train_steps": 1, "eval_every": 100, "num_inference_steps": 4, "batch_size": 4, "async_save": False}


@dataclass(frozen=True)
class Trace:
    """One step: what the loop's body runs, without what happens between steps.

    loop: (file, name, first line) of each function that ran on the loop's thread. others: the same for the threads that
    send images to the scorer, but not the one that sends some to the report. chain: names from this tree's outermost
    frame to the frame that takes the maximum of a clipped and an unclipped loss.
    """

    loop: set[Function]
    others: set[Function]
    chain: list[str]

    @property
    def frames(self) -> int:
        """Number of calls between the loop and the arithmetic of the loss."""
        return len(self.chain) - 1 - self.chain.index(LOOP)


def code_lines(functions: set[Function], repo: Path = REPO) -> dict[str, int]:
    """Return the number of code lines of these functions in each of their files."""
    counts = {}
    for file in sorted({file for file, _, _ in functions}):
        source = (repo / file).read_text("utf-8")
        starts = {line for name, _, line in functions if name == file}
        spans = [
            range(node.lineno, (node.end_lineno or 0) + 1)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) in starts
        ]
        counts[file] = len(count_lines.code_lines(source) & {line for span in spans for line in span})
    return counts


def trace(url: str, repo: Path = REPO, **settings: Any) -> Trace:
    """Train FlowGRPO for one step with these settings in forked processes, and trace the first rank."""
    case = record.grpo(**(STEP | settings))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record.write_data(folder)
        follower = _Follower(repo, folder / "trace.json")
        record.train(case.app, record.flags(case, repo, url), repo, folder, ranks=case.ranks, before=follower.install)
        text = json.loads((folder / "trace.json").read_text())
    loop, others = ({(file, name, line) for file, name, line in text[where]} for where in ("loop", "others"))
    return Trace(loop, others, text["chain"])


class _Follower:
    """Recorder of calls in the tree, from the first one in the loop's body after log line 0 until the sync ends."""

    def __init__(self, repo: Path, out: Path) -> None:
        self._roots = tuple(f"{repo}/{name}/" for name in ("apps", "packages"))
        self._repo, self._out = repo, out
        self._active = False
        self._functions: dict[str, set[Function]] = {"loop": set(), "others": set()}
        self._chain: list[str] = []

    def install(self) -> None:
        """Trace this thread and the threads that it starts, once the first line is logged."""
        self._thread = threading.get_ident()
        threading.setprofile(self._see)
        log, phase, follower = RunLog.log, RunLog.phase, self

        def logged(self: RunLog, *args: Any, **options: Any) -> None:
            log(self, *args, **options)
            sys.setprofile(follower._wait)

        @contextmanager
        def followed(self: RunLog, name: str) -> Iterator[None]:
            with phase(self, name):
                yield
            if name == "sync" and follower._active:
                follower._end()

        RunLog.log, RunLog.phase = logged, followed  # type: ignore[method-assign]

    def _wait(self, frame: FrameType, event: str, arg: object) -> None:
        """Begin with the first function of the tree that the loop's body calls."""
        caller = frame.f_back
        from_loop = caller is not None and caller.f_code.co_name == LOOP and self._is_ours(caller)
        if event == "call" and from_loop and self._is_ours(frame) and not frame.f_code.co_filename.endswith("loop.py"):
            self._active = True
            sys.setprofile(self._see)
            self._see(frame, event, arg)

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        if not self._active:
            return
        if event == "call" and self._is_ours(frame):
            code = frame.f_code
            file = os.path.relpath(code.co_filename, self._repo)
            where = "loop" if threading.get_ident() == self._thread else "others"
            if where == "others" and "/omni_rl/report/" in file:
                return
            self._functions[where].add((file, code.co_qualname, code.co_firstlineno))
        if event == "c_call" and arg is torch.maximum and not self._chain and self._is_ours(frame):
            self._chain = self._names(frame)

    def _is_ours(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._roots)

    def _names(self, frame: FrameType | None) -> list[str]:
        """Return the running functions of this tree, outermost first."""
        names: list[str] = []
        while frame:
            names += [frame.f_code.co_name] if self._is_ours(frame) else []
            frame = frame.f_back
        return names[::-1]

    def _end(self) -> None:
        self._active = False
        sys.setprofile(None)
        functions = {where: sorted(found) for where, found in self._functions.items()}
        if os.environ.get("RANK", "0") == "0":
            self._out.write_text(json.dumps(functions | {"chain": self._chain}))


def main() -> None:
    repo = Path(os.environ.get("REPO", REPO)).resolve()
    with record.scoring() as url:
        followed = trace(url, repo, **dict(word.split("=") for word in sys.argv[1:]))
    counts = code_lines(followed.loop | followed.others, repo)
    for file, count in counts.items():
        print(f"{count:5}  {file}")
    on_loop = code_lines(followed.loop, repo)
    print(f"{len(counts)} files, {sum(counts.values())} code lines")
    print(f"{len(on_loop)} files, {sum(on_loop.values())} code lines on the loop's thread")
    print(" > ".join(followed.chain))


if __name__ == "__main__":
    main()
