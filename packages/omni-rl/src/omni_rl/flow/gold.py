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
    eval_set: HeldOut[Params, Scorer],
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
    params = eval_set.params
    sampling = params.num_inference_steps, params.height, params.width, params.guidance_scale, params.guidance
    identity = repr([*sampling, *((p.text, p.seed, p.size) for p in prompts)])
    name, stored = f"gold-{hashlib.sha256(identity.encode()).hexdigest()}", run.session.checkpoints.kept
    first = stored.setdefault(name, rows) if rows.isfinite().all() else stored.get(name, rows)
    metrics, spread = dict[str, float](), (2 * first.var(dim=0).mean()).sqrt().item()
    if spread:
        within = (2 * rows.unflatten(0, (-1, eval_set.samples)).var(dim=1).mean()).sqrt().item()
        drift = (rows - first).square().mean().sqrt().item()
        metrics |= {"diversity": within / spread, "drift": drift / spread}
    if not math.isnan(correlation := rank_correlation(rewards, golds)):
        metrics["rank_correlation"] = correlation
    return {eval_set.metric(name): value for name, value in metrics.items()}


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's correlation of scores [N], over samples with both; NaN if either score is constant."""
    scored = ~(first.isnan() | second.isnan())
    first_ranks, second_ranks = ranks(first[scored]).tolist(), ranks(second[scored]).tolist()
    return (
        correlation(first_ranks, second_ranks) if min(len(set(first_ranks)), len(set(second_ranks))) > 1 else math.nan
    )


def gather_latents(dist: Dist, batches: Sequence[Trajectory], total: int) -> Tensor:
    """Return elements [total, D] of the latents of all ranks' samples, in the order of their indices."""
    rank_rows = dict[int, list[float]]()
    for batch in batches:
        flat = batch.x0.flatten(1)
        places = torch.linspace(0, flat.shape[1] - 1, min(NUM_ELEMENTS, flat.shape[1])).long()
        rank_rows |= zip(batch.indices.tolist(), flat.float().cpu()[:, places].tolist(), strict=True)
    all_rows = {index: row for rank in gather_json(dist, list(rank_rows.items())) for index, row in rank}
    return torch.tensor([all_rows[index] for index in range(total)])
