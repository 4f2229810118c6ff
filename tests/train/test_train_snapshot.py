"""A copy of the weights that stays as it is."""

import pytest
import torch
from omni_train.shard import shard
from omni_train.weights.snapshot import Snapshot
from torch import nn


def test_the_copy_stays_and_the_weights_come_back():
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    snapshot = Snapshot([param])
    with torch.no_grad():
        param.add_(0.1)
    trained = param.detach().clone()
    for _ in range(2):
        with snapshot.applied():
            assert param.tolist() == [1.0, 2.0]
        assert torch.equal(param, trained)


def test_the_weights_come_back_after_an_error():
    param = nn.Parameter(torch.zeros(2))
    snapshot = Snapshot([param])
    with torch.no_grad():
        param.fill_(1.0)
    with pytest.raises(KeyError), snapshot.applied():
        raise KeyError
    assert param.tolist() == [1.0, 1.0]


def test_copies_can_be_written_to_but_not_while_they_are_applied():
    param = nn.Parameter(torch.zeros(2))
    snapshot = Snapshot([param])
    ((owner, copy),) = snapshot.pairs()
    assert owner is param
    copy.fill_(5.0)
    with snapshot.applied():
        assert param.tolist() == [5.0, 5.0]
        with pytest.raises(RuntimeError, match=r"inside applied\(\)"):
            snapshot.pairs()
    assert param.tolist() == [0.0, 0.0]


def test_two_ranks_run_a_sharded_module_as_it_was(run_ranks):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    x = torch.tensor([[1.0, -2.0, 0.5]])

    def work(dist):
        net = shard(make(), dist.mesh, mode="fsdp2")
        snapshot = Snapshot(list(net.parameters()))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2.0)
            now = net(x)
            with snapshot.applied():
                return [now.item(), net(x).item()]

    before = make()(x).item()
    for now, then in run_ranks(work):
        assert then == pytest.approx(before, abs=1e-6)
        assert now != pytest.approx(before, abs=1e-2)
