"""Noise levels for models with two experts: each training step stays on one side of the boundary."""

import torch
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.prompts.sampler import sample_seed
from torch import Tensor

from omni_rl.run.run import MediaRun, Step
from omni_rl.settings.args import MediaArgs

NO_PROMPT = -1  # replaces a prompt's index, for a random number shared by all samples of a step


def restrict_to_expert(run: MediaRun[MediaArgs], step: Step, quantiles: Tensor, cut: float, number: int) -> Tensor:
    """Rescale uniform quantiles [B] in (0, 1) to one expert's side of `cut`; the first expert is used below `cut`.

    The side is random and the same for all batches and ranks of a step. Its probability is its width, so that over many
    steps the quantiles stay uniform. If only one expert is trained, its side is used. number: index of the random
    choice.

    Raises:
        ValueError: only one expert is trained, and its side is empty.
    """
    is_first = "high" in run.trained
    if len(run.trained) > 1:
        seed = sample_seed(run.args.run.seed, step.number, NO_PROMPT, number)
        is_first = bool(torch.special.ndtr(step_noise([seed], INITIAL_NOISE, (1,)).double()) < cut)
    if cut <= 0 if is_first else cut >= 1:
        raise ValueError(
            f"--train-experts {run.args.policy.train_experts} takes none of the noise levels that are trained at"
        )
    cut = min(max(cut, 0.0), 1.0)
    return quantiles * cut if is_first else cut + quantiles * (1 - cut)


def clamp_to_side(run: MediaRun[MediaArgs], sigma: Tensor, side: Tensor) -> Tensor:
    """Clamp noise levels [B] to the level `side`'s side of the boundary."""
    boundary = torch.tensor(run.model.boundary, dtype=sigma.dtype)
    if side >= boundary:
        return sigma.clamp(min=boundary)
    return sigma.clamp(max=torch.nextafter(boundary, torch.zeros_like(boundary)))
