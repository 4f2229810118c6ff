"""Policies that think before they draw: what is drawn, and the door to their models.

Shapes: B samples, P tokens before a thought, V of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from omni_rollout.model import Model
from omni_rollout.tokens import TokenParams, TokenTrajectory, Writer
from omni_rollout.types import Cond, Params, Trajectory


class ThinkingModel(Model, Writer, Protocol):
    """A model that writes a thought, and draws what prompt and thought say."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a thought."""

    def ask(self, ids: Tensor) -> Cond:
        """What a thought follows, of a prompt's `ids` [P] by `encode`: `input_ids` on the host."""

    def start(self, encoded: Sequence[Cond], device: torch.device) -> "Writing":
        """Thoughts to be written, of which there is no token."""

    def decode_text(self, tokens: Tensor) -> str:
        """The text of one thought, without marks."""

    def told(self, cond: Cond, thoughts: TokenTrajectory) -> Cond:
        """The conditioning of the drawing: `cond` with the thoughts after the prompts."""


class Writing(Protocol):
    """Thoughts that are being written."""

    def next_logits(self, net: nn.Module, tokens: Tensor | None) -> Tensor:
        """The logits [B, V] of what follows the tokens [B] that were chosen last; None before the first."""


@dataclass(frozen=True)
class ThinkingParams(Params):
    """How all samples of one call are thought about, and drawn."""

    thought: TokenParams = field(default_factory=lambda: TokenParams(1024))


@dataclass(frozen=True)
class ThoughtTrajectory(Trajectory):
    """Samples, the stochastic steps of each, and on the host the thoughts that they were drawn after."""

    thoughts: TokenTrajectory
