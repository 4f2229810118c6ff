"""Every algorithm trains every model: two steps of all weights on a small checkpoint, guided, in this process.

Each pair of a model and an algorithm is a test; TEST_SEED draws those that are not marked slow. test_app_dtypes.py has
every model and every algorithm once. `scripts/model_table.py` runs all pairs and writes docs/evidence/models.md.
"""

import math
import shutil
from functools import lru_cache

import pytest
import torch
from helpers import sampled, ulps
from model_rows import ROWS
from omni_rollout.models import open_model
from row_runs import ALGORITHMS, exported, idle_experts, settings
from trainer_runs import train

import train_dpo
import train_flowgrpo
import train_srpo

CELLS = [
    f"{model}: {algorithm}"
    for model, row in ROWS.items()
    for algorithm in ALGORITHMS
    if row.has_size or algorithm != "srpo"  # whose rewards hear nothing
]


@lru_cache(maxsize=1)  # cells of one model come one after the other
def untrained(model):
    """The weights of a checkpoint by name."""
    return dict(open_model(model).load_net(device="cpu", dtype=torch.float32).named_parameters())


@pytest.mark.parametrize("cell", sampled(CELLS, 1))
def test_an_algorithm_trains_a_model(cell, tmp_path, monkeypatch, bright_urls, record_property):
    name, algorithm = cell.split(": ")
    app, row = ALGORITHMS[algorithm][0], ROWS[name]
    monkeypatch.chdir(tmp_path)
    args = settings(name, algorithm, tmp_path, bright_urls)
    lines = train(app, args)[1:]
    assert len(lines) == 2
    assert all(line["policy/grad_norm"] > 0 and math.isfinite(line["policy/loss"]) for line in lines)
    if app is train_flowgrpo:
        assert [line["policy/first_ratio_max_dev"] for line in lines] == [0.0, 0.0]
    if app is train_dpo:
        # The policy is the reference still. Frozen and trained weights may pass other matrix products, which round
        # the four errors otherwise, of which dpo_beta / 2 reaches the loss.
        assert lines[0]["policy/loss"] == pytest.approx(math.log(2), abs=args.dpo_beta / 2 * ulps(4, 2.0))
    nets = open_model(row.checkpoint()).nets
    before, after = untrained(row.checkpoint()), exported(tmp_path / "runs" / args.run.name / "weights", nets)
    idle = idle_experts(nets, lines)
    assert len(idle) < len(nets)
    idle += row.unseen if app is train_srpo else ()  # whose reward sees no more than the pictures
    left = {weight for weight, value in before.items() if torch.equal(after[weight], value)}
    assert left == row.without_gradient | {weight for weight in before if idle and weight.startswith(idle)}
    record_property("trained", cell)
    shutil.rmtree(tmp_path / "runs")  # 10 MB
