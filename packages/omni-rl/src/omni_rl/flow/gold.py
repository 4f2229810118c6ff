"""The gold set, whose prompts and scorer are not used in training: metrics that detect reward hacking.

Distances are between latents, at NUM_ELEMENTS evenly spaced elements. Their unit is the distance of two random samples
of the run's first evaluation of the set, which checkpoints store. Notation: N samples of all ranks, D elements.
"""

import hashlib
import math
from collections.abc import Sequence
from statistics import correlation

import torch
from omni_losses import ranks
from omni_rollout import Params, Prompt, Trajectory
from omni_train.dist import Dist, gather_json
from torch import Tensor

from omni_rl.flow.evals import HeldOut
from omni_rl.flow.scorers import Scorer
from omni_rl.run.run import MediaRun
from omni_rl.settings.args import MediaArgs

NUM_ELEMENTS = 256  # per latent; a sample's mean square is within a tenth of that over all elements, a set's closer


def gold_metrics(
    run: MediaRun[MediaArgs],
    held: HeldOut[Params, Scorer],
    prompts: Sequence[Prompt],
    batches: Sequence[Trajectory],
    rewards: Tensor,
    golds: Tensor,
) -> dict[str, float]:
    """Return rank correlation, diversity and drift of the gold set's samples by their names in the log.

    Diversity and drift are left out if all samples of the first evaluation were the same.

    prompts: the N prompts of all ranks. batches: this rank's, including samples that only fill them up. rewards, golds:
    scores [N] of the run's scorer and of the gold scorer.
    """
    rows = gather_latents(run.dist, batches, len(prompts))
    params = held.params
    sampling = params.num_inference_steps, params.height, params.width, params.guidance_scale, params.guidance
    about = repr([*sampling, *((p.text, p.seed, p.size) for p in prompts)])
    name, kept = f"gold-{hashlib.sha256(about.encode()).hexdigest()}", run.session.checkpoints.kept
    first = kept.setdefault(name, rows) if rows.isfinite().all() else kept.get(name, rows)
    found, spread = dict[str, float](), (2 * first.var(dim=0).mean()).sqrt().item()
    if spread:
        within = (2 * rows.unflatten(0, (-1, held.samples)).var(dim=1).mean()).sqrt().item()
        moved = (rows - first).square().mean().sqrt().item()
        found |= {"diversity": within / spread, "drift": moved / spread}
    if not math.isnan(correlation := rank_correlation(rewards, golds)):
        found["rank_correlation"] = correlation
    return {held.metric(name): value for name, value in found.items()}


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's correlation of scores [N], over samples with both; NaN if either score is constant."""
    scored = ~(first.isnan() | second.isnan())
    own, others = ranks(first[scored]).tolist(), ranks(second[scored]).tolist()
    return correlation(own, others) if min(len(set(own)), len(set(others))) > 1 else math.nan


def gather_latents(dist: Dist, batches: Sequence[Trajectory], total: int) -> Tensor:
    """Return elements [total, D] of the latents of all ranks' samples, in the order of their indices."""
    own = dict[int, list[float]]()
    for batch in batches:
        flat = batch.x0.flatten(1)
        places = torch.linspace(0, flat.shape[1] - 1, min(NUM_ELEMENTS, flat.shape[1])).long()
        own |= zip(batch.indices.tolist(), flat.float().cpu()[:, places].tolist(), strict=True)
    found = {index: row for rank in gather_json(dist, list(own.items())) for index, row in rank}
    return torch.tensor([found[index] for index in range(total)])
