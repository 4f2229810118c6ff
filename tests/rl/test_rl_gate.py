"""The ratio gate, and the metrics of an update."""

import math
from types import SimpleNamespace

import pytest
import torch
from omni_rl.run.run import Run, Step
from omni_rl.run.world import World
from omni_train.dist import Dist
from omni_train.optim import StepResult, build_adamw
from torch import nn
from torch.amp import GradScaler

ALONE = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)
HERE = SimpleNamespace(
    dist=ALONE, world=World(ALONE), session=SimpleNamespace(num_done=-1), policy=SimpleNamespace(scaler=None)
)


def test_within_the_tolerance_it_returns_the_worst():
    assert Run.check_ratio(HERE, [torch.tensor(0.0), torch.tensor(0.5)], tolerance=0.5, step=Step(0)) == 0.5


@pytest.mark.parametrize("bad", [1e-7, math.inf])
def test_any_deviation_beyond_it_names_the_forward(bad):
    with pytest.raises(RuntimeError, match=r"step 3: .* in 1 of 2 forwards, first in forward 1 of rank 0"):
        Run.check_ratio(HERE, [torch.tensor(0.0), torch.tensor(bad)], tolerance=0.0, step=Step(3))


def test_log_probs_that_are_not_finite_are_told_from_a_deviation():
    with pytest.raises(FloatingPointError, match=r"step 3: log-probs must be finite, but are not on rank 0"):
        Run.check_ratio(HERE, [torch.tensor(0.0), torch.tensor(math.nan)], tolerance=math.inf, step=Step(3))


def test_overflows_of_float16_are_no_skipped_updates_until_no_factor_is_left():
    param = nn.Parameter(torch.zeros(1))
    policy = SimpleNamespace(params=[param], optimizer=build_adamw([param], lr=0.1), scaler=GradScaler("cpu"))
    optim = SimpleNamespace(lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0)
    args, results = SimpleNamespace(optim=optim, run=SimpleNamespace(train_steps=9), lr=0.1), []
    run, step = SimpleNamespace(dist=ALONE, policy=policy, args=args), Step(0)
    while policy.scaler.get_scale() > 1:
        policy.scaler.scale(param.sum() * math.inf).backward()
        results.append(Run.optimizer_step(run, step))
    metrics = Run.policy_metrics(run, [{"loss": torch.tensor(1.0)}], results)
    assert len(results) == 16
    assert metrics == {"policy/loss": 1.0, "policy/loss_scale": 1.0, "policy/skipped_updates": 0}
    policy.scaler.scale(param.sum()).backward()
    results.append(Run.optimizer_step(run, step))
    assert Run.policy_metrics(run, [{"loss": torch.tensor(1.0)}], results)["policy/grad_norm"] == 1.0
    policy.scaler.scale(param.sum() * math.inf).backward()
    with pytest.raises(FloatingPointError, match=r"gradients must be finite in float16 at some loss scale >= 1"):
        Run.optimizer_step(run, step)


def test_metrics_of_an_update_are_means_and_extremes_of_its_forwards():
    rows = {"loss": (1.0, 2.0), "kl_max": (3.0, 1.0), "correction_ratio_min": (0.5, 0.25)}
    seen = [{name: torch.tensor(values[i]) for name, values in rows.items()} for i in (0, 1)]
    metrics = Run.policy_metrics(HERE, seen, [StepResult(grad_norm=2.0, skipped=False)])
    assert (metrics["policy/loss"], metrics["policy/kl_max"]) == (1.5, 3.0)
    assert metrics["policy/correction_ratio_min"] == 0.25
