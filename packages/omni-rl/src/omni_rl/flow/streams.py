"""Separate losses for the frames and the sound of one sample, each with its own advantage, and their weighted sum.

A joint latent holds one stream after the other. Its log-probability is a mean over elements, so the many elements of
the frames outweigh those of the sound, and one advantage applies to both. Here each stream m has a weight s_m in the
loss and its own advantage: the sum over the rewards that judge m, alone or with the other stream (the modality-wise
routing of OmniNFT, arXiv 2605.12480).

    L = sum_m s_m L_m(stream m, A_m)

Notation: N samples of a step over all ranks, B of a batch; M streams, in the order of STREAMS.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from omni_losses import LossOutput
from torch import Tensor


def stream_weights(sizes: Collection[int], sound_weight: float | None) -> tuple[float, ...]:
    """Return the weight of each stream in the loss: its share of elements, unless --streams.sound-weight is given.

    sizes: number of elements of each stream, as in `run.streams`.
    """
    return tuple(size / sum(sizes) for size in sizes) if sound_weight is None else (1 - sound_weight, sound_weight)


def select_stream(values: Tensor, m: int) -> Tensor:
    """Return the m-th column of values [B, M], or values [B] themselves, which all streams share."""
    return values[:, m] if values.dim() > 1 else values


def sum_losses(losses: Sequence[LossOutput], shares: Sequence[float]) -> LossOutput:
    """Return the weighted sum of the losses and metrics of the streams. Metrics named max_dev take the maximum."""

    def weighted_sum(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([share * value for share, value in zip(shares, values, strict=True)]).sum()

    metrics = {name: torch.stack([output.metrics[name] for output in losses]) for name in losses[0].metrics}
    metrics = {
        name: values.max() if name.endswith("max_dev") else weighted_sum([*values]) for name, values in metrics.items()
    }
    return LossOutput(weighted_sum([output.loss for output in losses]), metrics)


def loss_over_streams(loss_of: Callable[..., LossOutput], shares: Sequence[float]) -> Callable[..., LossOutput]:
    """Return a policy loss of log-probabilities [B, M], with advantages [B] or [B, M] and weights [B] or None."""

    def loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, weights: Tensor | None) -> LossOutput:
        losses = [
            loss_of(log_prob[:, m], old_log_prob[:, m], select_stream(advantages, m), weights=weights)
            for m in range(len(shares))
        ]
        return sum_losses(losses, shares)

    return loss
