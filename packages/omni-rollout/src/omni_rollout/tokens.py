"""Policies over tokens: parameters and answers, the protocol of their models, and the answers' log-probabilities.

Shapes: B samples, P tokens of the longest prompt, T tokens of the longest answer, V vocabulary size. Log-probabilities
are in nats per token.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from omni_rollout.types import Cond, Prompt, Samples, WeightedEngine, to_device

MAX_LOGITS = 2**26  # scored at a time: 0.27 GB in float32, and three times that for their softmax


@dataclass(frozen=True)
class TokenParams:
    """Sampling parameters of all answers of one call.

    max_new_tokens: the largest T, including the end token. temperature: divisor of the logits, in sampling and in
    log-probabilities. top_p: probability mass of the most likely tokens to sample from; log-probabilities ignore it, so
    training requires 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not self.temperature > 0 or not 0 < self.top_p <= 1:
            rule = "max_new_tokens must be >= 1, temperature > 0 and top_p in (0, 1]"
            raise ValueError(f"{rule}, got {self.max_new_tokens}, {self.temperature} and {self.top_p}")


@dataclass(frozen=True)
class TokenTrajectory(Samples):
    """The B answers of a batch.

    encoded: results of `TokenModel.encode`, on the host. tokens: int64 [B, T], arbitrary after the end. mask:
    bool [B, T], True up to the end token. forced: bool [B, T], True for tokens of a tool's results, which the policy
    has not sampled. rollout_log_prob: the sampling policy's log-probabilities, float32 [B, T], 0 after the end and
    where forced. ended: bool [B], True if there is an end token. answers: B texts.
    """

    encoded: tuple[Cond, ...]
    tokens: Tensor
    mask: Tensor
    forced: Tensor
    rollout_log_prob: Tensor
    ended: Tensor
    answers: tuple[str, ...]
    params: TokenParams

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each answer, int64 [B]."""
        return self.mask.sum(dim=1)

    @property
    def sampled(self) -> Tensor:
        """True for the tokens that the policy has sampled, which are trained on, bool [B, T]."""
        return self.mask & ~self.forced

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the samples of `parts`, padded to the longest answer. Raises like `Samples.cat`."""
        length = max(part.tokens.shape[1] for part in parts)
        return super().cat([part._resize(length) for part in parts])

    def trim(self) -> Self:
        """Return the same samples without positions after the longest answer."""
        return self._resize(int(self.lengths.max()))

    def _resize(self, length: int) -> Self:
        """Return the same answers, padded or truncated to `length`."""
        change = [0, length - self.tokens.shape[1]]  # a negative number truncates
        names = ("tokens", "mask", "forced", "rollout_log_prob")
        resized: dict[str, Any] = {name: pad(getattr(self, name), change) for name in names}
        return replace(self, **resized)


class TokenPredictor(Protocol):
    """A model of token probabilities."""

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that no answer may contain: media placeholders."""

    def inputs(self, encoded: Sequence[Cond], tokens: Tensor, mask: Tensor) -> Cond:
        """Return the net's inputs for left-padded prompts and answers [B, T], on the device of `tokens`."""

    def predict(self, net: nn.Module, inputs: Cond) -> Tensor:
        """Return the output [B, P + T, ...] of the net's head."""


class TokenModel(TokenPredictor, Protocol):
    """A language model for one checkpoint; it has the checkpoint's configuration but no weights."""

    BLOCK_NAMES: tuple[str, ...]  # classes of the net's blocks, the units of sharding and recomputing
    EXPERT_NAMES: ClassVar[tuple[str, ...]]  # classes of the net's modules of experts
    LORA_TARGETS: str  # pattern for the full names of the layers that get LoRA
    FROZEN: ClassVar[tuple[str, ...]]  # prefixes of the names of modules that are never trained, but for adapters
    MEDIA: ClassVar[tuple[str, ...]]  # kinds of media that prompts may hold
    config: dict[str, Any]  # configuration of the net
    sample_rate: int  # of sound in prompts, Hz; 0 for a model without sound
    ends: tuple[int, ...]  # tokens that end an answer
    prefix: str  # prefix of the net's names in the checkpoint's files, with its dot
    boundary: float  # 0, because there is one net
    reads_weights: bool  # if False, `check_files` requires no weights, and nets are uninitialized
    dtype: torch.dtype  # of the net's computation and media; set it if the net is loaded in another dtype
    reading: Callable[[str, int], AbstractContextManager[None]]  # entered while a part (name, bytes) is read

    @property
    def nets(self) -> Mapping[str, str]:
        """The single net, whose name is empty."""

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the checkpoint's weights, according to its configuration."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Tokens by their texts."""

    def check_files(self) -> None:
        """Raise ValueError unless the weight files exist; no weights are read."""

    def weight_bytes(self) -> int:
        """Return the size of the weight files, except those of a hub id that are not yet fetched."""

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Return the net with the checkpoint's weights, frozen, in eval mode."""

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """Return the net on the meta device, for names and shapes."""

    def encode(self, prompt: Prompt) -> Cond:
        """Return a prompt's `input_ids` [P] and the tensors of its media under the net's names."""

    def decode(self, tokens: Tensor) -> str:
        """Return the text of one answer, without special tokens."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text in an answer, without end and suppressed tokens."""

    def save(self, net: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write full weights, under the net's names, in transformers' layout, with the checkpoint's other files."""


class TokenEngine(WeightedEngine, Protocol):
    """An engine that samples answers to prompts."""

    def generate(self, prompts: Sequence[Prompt], params: TokenParams) -> TokenTrajectory:
        """Return one answer per prompt, in order."""


@dataclass(frozen=True)
class TokenScores:
    """A net's scores of answers, float32 [B, T], arbitrary after the end. entropy: NaN if gradients are needed."""

    log_prob: Tensor
    entropy: Tensor


def score_tokens(model: TokenPredictor, net: nn.Module, batch: TokenTrajectory) -> TokenScores:
    """Return the log-probability of each token of the answers under `net`, with the batch's sampling parameters.

    The same batch gives bit-identical results before and in an update: the ratio is exactly 1 until the weights change.
    """
    score = partial(_score, suppressed=model.suppressed, params=batch.params)
    scores = score_logits(model, net, batch, batch.tokens, score)
    return TokenScores(scores[..., 0], scores[..., 1])


def score_logits(
    model: TokenPredictor,
    net: nn.Module,
    batch: TokenTrajectory,
    targets: Tensor,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the results [n, S] of `score(logits [n, V], targets [n, ...])` for the answers' tokens, as [B, T, S].

    targets: [B, T, ...]. `score` is called with MAX_LOGITS logits at a time, and again in the backward pass.
    """
    device = next(net.parameters()).device
    tokens, mask = batch.tokens.to(device), batch.mask.to(device)
    whole: Any = net  # has an output head like all transformers models
    head = whole.get_output_embeddings()
    whole.set_output_embeddings(ScoringHead(head, targets.to(device), score))
    try:
        return model.predict(net, model.inputs(batch.encoded, tokens, mask))
    finally:
        whole.set_output_embeddings(head)


def _score(logits: Tensor, tokens: Tensor, *, suppressed: Sequence[int], params: TokenParams) -> Tensor:
    """Return the log-probabilities of tokens [n] from their logits [n, V], and the entropies: [n, 2]."""
    log_probs = token_log_probs(logits, suppressed, params)
    chosen = log_probs.gather(-1, tokens[:, None])
    if torch.is_grad_enabled():
        return torch.cat([chosen, torch.full_like(chosen, torch.nan)], dim=1)
    entropy = -torch.where(log_probs.isinf(), 0.0, log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)
    return torch.cat([chosen, entropy], dim=1)


def token_log_probs(logits: Tensor, suppressed: Sequence[int], params: TokenParams) -> Tensor:
    """Return the log-probs [..., V], float32, of all tokens, -inf for suppressed ones. Sampling and scoring call it."""
    scaled = logits.float() / params.temperature
    if suppressed:
        scaled = scaled.index_fill(-1, to_device(torch.tensor(suppressed), scaled.device), -torch.inf)
    return scaled.log_softmax(dim=-1)


class ScoringHead(nn.Module):
    """Replacement of a net's output head that returns `score` of logits and targets [B, T, ...] instead of logits.

    The head and `score` run on MAX_LOGITS logits at a time and are recomputed in the backward pass: with a vocabulary
    of 150,000, the logits of 1,000 tokens take 0.6 GB. The pieces depend only on shapes.
    """

    def __init__(self, head: nn.Module, targets: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.targets, self.score = head, targets, score

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores [B, T, S] for hidden states [B, P + T, D]; the last state predicts no token."""
        rows = hidden[:, -self.targets.shape[1] - 1 : -1].flatten(0, 1)
        size = max(1, MAX_LOGITS // self.head.out_features)  # type: ignore[operator]  # a linear layer, maybe adapted
        pieces = list(zip(rows.split(size), self.targets.flatten(0, 1).split(size), strict=True))
        if len(pieces) == 1:
            whole = self._score_piece(*pieces[0])
        elif torch.is_grad_enabled():
            scores = [
                checkpoint(self._score_piece, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces
            ]
            whole = torch.cat(scores)
        else:
            whole = self._score_pieces(pieces, len(rows))
        return whole.unflatten(0, self.targets.shape[:2])

    def _score_pieces(self, pieces: Sequence[tuple[Tensor, Tensor]], count: int) -> Tensor:
        """Return the scores [count, S] of all pieces without holding them twice in memory."""
        whole, end = torch.empty(0), 0
        for hidden, targets in pieces:
            scores = self._score_piece(hidden, targets)
            whole = whole if end else scores.new_empty(count, scores.shape[1])
            whole[end : end + len(scores)] = scores
            end += len(scores)
        return whole

    def _score_piece(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.score(self.head(hidden), targets)
