"""The moving average of weights."""

import pytest
import torch
from omni_train.planned import PLANNED, PlannedDevice, planned_ranks
from omni_train.weights.snapshot import Ema
from torch.distributed.tensor import DTensor, Shard


def test_the_average_follows_and_the_weights_come_back():
    param = torch.nn.Parameter(torch.zeros(3))
    ema = Ema([param], decay=0.5)
    with torch.no_grad():
        param.fill_(8.0)
    ema.update(step=100)
    with ema.applied():
        assert param.tolist() == [4.0] * 3  # half of 0 and half of 8
    assert param.tolist() == [8.0] * 3
    ema.update(step=101)
    with ema.applied():
        assert param.tolist() == [6.0] * 3


def test_the_first_steps_forget_the_start():
    param = torch.nn.Parameter(torch.zeros(1))
    ema = Ema([param], decay=0.99)
    with torch.no_grad():
        param.fill_(10.0)
    ema.update(step=0)
    with ema.applied():
        assert param.item() == pytest.approx(9.0)  # (1 + 0) / (10 + 0) of the old


def test_the_weights_come_back_after_an_error():
    param = torch.nn.Parameter(torch.randn(5))
    before = param.detach().clone()
    ema = Ema([param], decay=0.9)
    with torch.no_grad():
        param.add_(1.0)
    with pytest.raises(RuntimeError), ema.applied():
        raise RuntimeError
    assert torch.equal(param, before + 1.0)


def test_decay_zero_keeps_no_copy():
    param = torch.nn.Parameter(torch.ones(2))
    ema = Ema([param], decay=0.0)
    ema.update(step=0)
    with ema.applied():
        assert param.tolist() == [1.0, 1.0]


def test_a_decay_that_never_moves_is_refused():
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1.0"):
        Ema([], decay=1.0)


@pytest.mark.parametrize("decay", [0.99, 0.999, 0.9999])
def test_of_weights_that_stand_still_it_stops_as_near_as_float32_takes_steps(decay):
    """At 2^-24 / (1 - decay) of their size at most, and not far below that for some of them."""
    bound = 2.0**-24 / (1 - decay)
    weights = torch.linspace(1.0, 2.0, 64)[:-1] * torch.tensor([1e-3, 1.0, 30.0])[:, None]
    param = torch.nn.Parameter(weights * (1 + 4 * bound))
    ema = Ema([param], decay=decay)
    with torch.no_grad():
        param.copy_(weights)
    for step in range(int(5 / (1 - decay))):
        ema.update(step=10**9 + step)

    def distance():
        with ema.applied():
            return ((param - weights).abs() / weights).max().item()

    before = distance()
    ema.update(step=10**9)
    assert before == distance()  # it has stopped
    assert bound / 4 < before < 1.01 * bound


def test_the_average_of_sharded_weights_moves_by_the_rows_of_a_rank_in_a_plan_too():
    with planned_ranks(8) as dist, PlannedDevice() as device:
        rows = torch.empty(100, 1000, device=PLANNED)
        ema = Ema([DTensor.from_local(rows, dist.mesh, [Shard(0)])], decay=0.9)
        before = device.live
        with device.phase("update"):
            ema.update(step=0)
    assert device.peaks["update"] == before == 2 * rows.nbytes
