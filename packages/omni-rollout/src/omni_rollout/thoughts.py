"""Policies that think before they generate an image: their samples, and the protocol of their models.

Shapes: B samples, P tokens before a thought, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from omni_rollout.model import Model
from omni_rollout.tokens import TokenParams, TokenPredictor, TokenTrajectory
from omni_rollout.types import Cond, Params, Trajectory


class ThinkingModel(Model, TokenPredictor, Protocol):
    """Model that writes a thought, then generates an image from the prompt and thought."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a thought."""

    def thought_inputs(self, ids: Tensor) -> Cond:
        """Return the tokens before a thought, `input_ids` on the host, for a prompt's `ids` [P] from `encode`."""

    def start(self, encoded: Sequence[Cond], device: torch.device) -> "PartialThoughts":
        """Return thoughts without any tokens yet."""

    def decode_text(self, tokens: Tensor) -> str:
        """Return the text of one thought, without marks."""

    def with_thoughts(self, cond: Cond, thoughts: TokenTrajectory) -> Cond:
        """Return the image's conditioning: `cond` with the thoughts after the prompts."""


class PartialThoughts(Protocol):
    """Unfinished thoughts."""

    def next_logits(self, net: nn.Module, tokens: Tensor | None) -> Tensor:
        """Return the logits [B, V] after the last sampled tokens [B], or None before the first ones."""


@dataclass(frozen=True)
class ThinkingParams(Params):
    """Sampling parameters of the thoughts and samples of one call."""

    thought: TokenParams = field(default_factory=lambda: TokenParams(1024))


@dataclass(frozen=True)
class ThoughtTrajectory(Trajectory):
    """Samples with their stochastic steps and, on the host, their thoughts."""

    thoughts: TokenTrajectory
