"""Tools that a language model calls in its answer: Python functions of a text, after whose result the answer continues.

The tokens of a result are in the answer and in the net's context, but the policy has not sampled them: they are masked
in losses, ratios and divergences, as in Search-R1 (arXiv 2503.09516).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_rollout.tokens import TokenModel

MARKS = ("<tool>", "</tool>", "<result>", "</result>")
MAX_CHARACTERS = 2000  # of a result; the rest is dropped


@dataclass(frozen=True)
class Tool:
    """A function of a call's text. marks: texts before and after a call, and before and after its result."""

    function: Callable[[str], object]
    marks: tuple[str, str, str, str] = MARKS

    def __post_init__(self) -> None:
        if len(self.marks) != 4 or not all(self.marks) or self.marks[3].endswith(self.marks[1]):
            rule = "marks must be four texts, and the last must not end with the second"
            raise ValueError(f"{rule}, got {self.marks}")

    def run_call(self, answer: str) -> str:
        """Return the result of the call at the end of an answer, or "" without one.

        An exception is also a result, which the model reads.
        """
        before, after, *around = self.marks
        if not answer.endswith(after):
            return ""
        call = answer.removesuffix(after).rpartition(before)[2]
        try:
            result = str(self.function(call))
        except (Exception, SystemExit) as exc:  # a user's function may raise anything
            result = f"{type(exc).__name__}: {exc}"
        return result[:MAX_CHARACTERS].join(around)


class ToolCalls:
    """Tool results that continue the answers of a batch while it is sampled."""

    def __init__(self, tool: Tool, model: TokenModel, count: int) -> None:
        """Begin without results. count: B."""
        self._tool, self._model = tool, model
        self._waiting = [deque[int]() for _ in range(count)]

    def next(self, answers: Tensor) -> Tensor:
        """Return the next token of a result, -1 where the policy samples, int64 [B]. answers: tokens so far [B, t]."""
        mark, on_host = self._tool.marks[1], answers.cpu()
        for tokens, waiting in zip(on_host, self._waiting, strict=True):
            if waiting or not len(tokens) or int(tokens[-1]) in self._model.ends:
                continue
            if self._model.decode(tokens[-len(mark.encode()) :]).endswith(mark):  # a token has at least one byte
                waiting += self._model.tokenize(self._tool.run_call(self._model.decode(tokens)))
        return torch.tensor([waiting.popleft() if waiting else -1 for waiting in self._waiting], device=answers.device)
