"""One step that all ranks take or skip together."""

import math

import pytest
import torch
from helpers import sampled
from omni_train.optim import (
    SummedBackward,
    build_adamw,
    optimizer_step,
    plain_backward,
    reduce_gradients,
    scaled_backward,
    scheduled_lr,
)
from omni_train.shard import shard
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def param_with_gradient(*gradient):
    param = nn.Parameter(torch.zeros(len(gradient)))
    param.grad = torch.tensor(gradient)
    return param


def test_a_group_of_parameters_may_have_a_learning_rate_of_its_own(alone):
    params = [param_with_gradient(0.5), param_with_gradient(0.5)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "lr_scale": 0.1}]
    optimizer_step(torch.optim.SGD(groups, lr=0), params, lr=2.0, max_grad_norm=1.0, dist=alone)
    assert [param.item() for param in params] == pytest.approx([-1.0, -0.1])


def test_a_small_gradient_is_not_scaled(alone):
    param = param_with_gradient(0.3, 0.4)
    result = optimizer_step(torch.optim.SGD([param], lr=0), [param], lr=2.0, max_grad_norm=1.0, dist=alone)
    assert result.grad_norm == pytest.approx(0.5)
    assert not result.skipped
    torch.testing.assert_close(param.detach(), torch.tensor([-0.6, -0.8]))
    assert param.grad is None


def test_a_large_gradient_is_scaled_to_the_limit(alone):
    params = [param_with_gradient(30.0), param_with_gradient(40.0)]
    result = optimizer_step(torch.optim.SGD(params, lr=0), params, lr=1.0, max_grad_norm=0.5, dist=alone)
    assert result.grad_norm == pytest.approx(50.0)
    torch.testing.assert_close(torch.cat([p.detach() for p in params]), torch.tensor([-0.3, -0.4]))


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e-8, 1e-11])
def test_the_share_that_an_epsilon_takes_of_a_step_is_what_the_weights_do_not_move(alone, unit):
    """Of a gradient whose elements are all of one size, at AdamW's first step."""
    param, lr = param_with_gradient(unit, -unit, unit), 0.1
    result = optimizer_step(build_adamw([param], lr=lr), [param], lr=lr, max_grad_norm=math.inf, dist=alone)
    assert result.eps_share == pytest.approx(1e-8 / (unit + 1e-8), rel=1e-5)
    assert param.abs().max().item() == pytest.approx(lr * (1 - result.eps_share), rel=1e-4)
    param.grad = torch.full((3,), 1e3)
    clipped = optimizer_step(build_adamw([param], lr=lr), [param], lr=lr, max_grad_norm=1e-8 * 3**0.5, dist=alone)
    assert clipped.eps_share == pytest.approx(0.5, rel=1e-5)
    assert optimizer_step(build_adamw([param], lr=lr), [param], lr=lr, max_grad_norm=1.0, dist=alone).eps_share == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_neither_parameters_nor_state(alone, bad):
    param = param_with_gradient(1.0)
    optimizer = build_adamw([param], lr=0.1)
    optimizer_step(optimizer, [param], lr=0.1, max_grad_norm=1.0, dist=alone)
    before = param.item(), {key: value.clone() for key, value in optimizer.state[param].items()}
    param.grad = torch.tensor([bad])
    result = optimizer_step(optimizer, [param], lr=0.1, max_grad_norm=1.0, dist=alone)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert param.grad is None
    assert param.item() == before[0]
    assert all(torch.equal(optimizer.state[param][key], value) for key, value in before[1].items())


class Half(nn.Module):
    """A frozen layer in float16, whose gradients below 3e-8 are 0, behind a trained one in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).half().requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.trained(x).half()).float()


def test_a_scaled_loss_in_float16_has_the_gradients_of_float32(alone):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    norms = {}
    for name, factor in {"float32": 0, "float16": 0, "scaled": 2.0**16}.items():
        net = Half()
        net = net if name != "float32" else nn.Sequential(net.trained, net.frozen.float())
        backward, scaler = plain_backward, GradScaler("cpu", init_scale=factor) if factor else None
        if scaler:
            backward = scaled_backward(backward, scaler)
        backward(1e-8 * net(x).square().mean(), of=1)
        params = [p for p in net.parameters() if p.requires_grad]
        step = optimizer_step(build_adamw(net, lr=0.1), params, lr=0.1, max_grad_norm=1.0, dist=alone, scaler=scaler)
        norms[name] = step.grad_norm
    assert norms["scaled"] == pytest.approx(norms["float32"], rel=0.01)
    assert norms["float16"] == 0


def test_the_factor_of_a_loss_follows_torchs_own_loop_through_overflows(alone):
    nets, optimizers, scalers = [], [], []
    for _ in range(2):
        nets.append(Half())
        optimizers.append(build_adamw(nets[-1], lr=0.1))
        scalers.append(GradScaler("cpu", init_scale=2.0**15, growth_interval=2))
    backward, skipped = scaled_backward(plain_backward, scalers[0]), []
    for number in range(8):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)) * (40 if number % 4 == 0 else 1)
        backward(nets[0](x).square().mean(), of=1)
        params = [*nets[0].trained.parameters()]
        made = optimizer_step(optimizers[0], params, lr=0.1, max_grad_norm=math.inf, dist=alone, scaler=scalers[0])
        skipped.append(made.skipped)
        scalers[1].scale(nets[1](x).square().mean()).backward()
        scalers[1].step(optimizers[1])
        scalers[1].update()
        optimizers[1].zero_grad()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    assert {True, False} == {*skipped}


@pytest.mark.parametrize("mode", ["none", "ddp", "fsdp2"])
def test_an_overflow_on_one_rank_lowers_the_factor_on_all(run_ranks, mode):
    def work(dist):
        net = shard(make_net(), dist.mesh, mode=mode)
        params, scaler = list(net.parameters()), GradScaler("cpu", init_scale=8.0)
        backward = SummedBackward(net, dist.mesh, mode=mode) if dist.mesh else plain_backward
        backward = scaled_backward(backward, scaler)
        optimizer, found = build_adamw(net, lr=0.1), []
        for factor in (1.0, math.inf, 1.0):
            backward((factor if dist.rank == dist.world_size - 1 else 1.0) * net(X).sum(), of=1)
            step = optimizer_step(optimizer, params, lr=0.1, max_grad_norm=1.0, dist=dist, scaler=scaler)
            found.append([step.skipped, scaler.get_scale(), step.grad_norm if not step.skipped else 0.0])
        return found

    steps = run_ranks(work, 1 if mode == "none" else 2)
    assert all(own == steps[0] for own in steps)
    assert [own[:2] for own in steps[0]] == [[False, 8.0], [True, 4.0], [False, 4.0]]


@pytest.mark.parametrize("mode", ["none", "ddp", "fsdp2"])
def test_a_gradient_of_zero_takes_no_step_whatever_the_momentum(run_ranks, mode):
    def work(dist):
        net = shard(make_net(), dist.mesh, mode=mode)
        params = list(net.parameters())
        optimizer = build_adamw(net, lr=0.1, weight_decay=0.5)

        def step(scale):
            (scale * net(X)).sum().backward()
            reduce_gradients(net, dist.mesh, mode=mode)
            return optimizer_step(optimizer, params, lr=0.1, max_grad_norm=1.0, dist=dist)

        assert not step(1.0).skipped
        before = [full(p).clone() for p in params]
        none, zero = optimizer_step(optimizer, params, lr=0.1, max_grad_norm=1.0, dist=dist), step(0.0)
        unchanged = all(map(torch.equal, before, map(full, params)))
        one_sided = step(float(dist.is_main))  # a sample of one rank is enough
        return [none.skipped, none.grad_norm, zero.skipped, zero.grad_norm, unchanged, one_sided.skipped]

    world_size = 1 if mode == "none" else 2
    assert run_ranks(work, world_size) == [[True, 0.0, True, 0.0, True, False]] * world_size


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_step_like_one(run_ranks, alone, mode):
    def train(dist, mode, x):
        net = shard(make_net(), dist.mesh, mode=mode)
        optimizer = build_adamw(net, lr=0.1, weight_decay=0.01)
        norms = []
        for _ in range(3):
            (net(x).square().sum() / len(X)).backward()
            reduce_gradients(net, dist.mesh, mode=mode)
            result = optimizer_step(optimizer, list(net.parameters()), lr=0.1, max_grad_norm=0.1, dist=dist)
            norms.append(result.grad_norm)
        return norms, [full(p).flatten().tolist() for p in net.parameters()]

    norms, params = train(alone, "none", X)
    assert norms[0] > 0.1  # so that the steps are scaled
    for got_norms, got_params in run_ranks(lambda dist: train(dist, mode, X[dist.rank : dist.rank + 1])):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for got, expected in zip(got_params, params, strict=True):
            assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("on_host", sampled([False, True], 1))
def test_sharded_parameters_step_together_with_the_same_bits(run_ranks, on_host):
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            self.calls += func.namespace == "aten" and not func.is_view
            return func(*args, **(kwargs or {}))

    def work(dist):
        told = []
        for foreach in (None, True):
            net = shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), dist.mesh, mode="fsdp2")
            with torch.no_grad():
                for i, p in enumerate(net.parameters()):
                    p.to_local().copy_(torch.arange(p.to_local().numel()).view_as(p.to_local()) / 7 + i)
            optimizer, count = build_adamw(net, lr=0.1, on_host=on_host, foreach=foreach), Count()
            for number in range(3):
                for i, p in enumerate(net.parameters()):
                    p.grad = p.detach().clone().mul_(number + i / 3).sin_()
                count.calls = 0
                with count:
                    optimizer.step()
            told.append((count.calls, [p.to_local().tolist() for p in net.parameters()]))
        return told

    for (one_by_one, before), (together, after) in run_ranks(work):
        assert before == after
        assert together < one_by_one / 3


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_nan_on_one_rank_skips_on_both(run_ranks, mode):
    def work(dist):
        net = shard(make_net(), dist.mesh, mode=mode)
        before = [full(p).clone() for p in net.parameters()]
        optimizer = build_adamw(net, lr=0.1)
        net(X).sum().backward()
        if dist.rank == 1:
            grad = net[0].weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(math.nan)
        result = optimizer_step(optimizer, list(net.parameters()), lr=0.1, max_grad_norm=1.0, dist=dist)
        after = [full(p) for p in net.parameters()]
        return result.skipped, all(map(torch.equal, before, after)), len(optimizer.state)

    assert run_ranks(work) == [[True, True, 0], [True, True, 0]]


def test_the_norm_of_sharded_gradients_counts_every_slice_once(run_ranks):
    def work(dist):
        params = list(shard(make_net(), dist.mesh, mode="fsdp2").parameters())
        for p in params:
            p.grad = p.detach().clone()
        return optimizer_step(build_adamw(params, lr=1.0), params, lr=1.0, max_grad_norm=math.inf, dist=dist).grad_norm

    expected = nn.utils.get_total_norm(list(make_net().parameters())).item()
    assert run_ranks(work) == pytest.approx([expected, expected], rel=1e-6)


def test_warmup_rises_in_equal_parts_and_stays():
    rates = [scheduled_lr(step, 9, lr=1.0, kind="constant", warmup=3) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert scheduled_lr(0, 0, lr=0.3, kind="constant", warmup=0) == 0.3


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_the_schedules_of_torch(kind):
    def torchs(optimizer):
        """A warm-up over 3 steps, times the schedule over 10."""
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 4, total_iters=3)
        if kind == "cosine":
            return rise, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return rise, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, float(kind == "constant"), total_iters=10)

    theirs = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedulers = torchs(optimizer)
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    ours = [scheduled_lr(step, 10, lr=0.3, kind=kind, warmup=3) for step in range(10)]
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)
    assert scheduled_lr(10, 10, lr=0.3, kind=kind, warmup=3) == pytest.approx(0.3 * (kind == "constant"))


def test_adamw_takes_its_betas_its_epsilon_and_its_decay():
    """A few steps by the published algorithm (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), in float64."""
    beta1, beta2, eps, decay, lr = 0.5, 0.75, 0.1, 0.25, 0.125
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_adamw([param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    weight, mean, square = param.detach().double(), torch.zeros(2).double(), torch.zeros(2).double()
    for step, gradient in enumerate(torch.tensor([[0.5, -1.0], [0.25, 4.0], [-3.0, 0.0]]), start=1):
        param.grad = gradient.clone()
        optimizer.step()
        mean = beta1 * mean + (1 - beta1) * gradient.double()
        square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        weight = weight * (1 - lr * decay)
        weight -= lr * mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
        torch.testing.assert_close(param.detach().double(), weight, rtol=1e-6, atol=1e-7)


def test_only_float32_parameters_are_trained():
    with pytest.raises(ValueError, match=r"torch.float32, got \['torch.bfloat16'\]"):
        build_adamw(make_net().bfloat16(), lr=1.0)
    net = make_net()
    net[2].bfloat16().requires_grad_(False)
    assert len(build_adamw(net, lr=1.0).param_groups[0]["params"]) == 2
    with pytest.raises(ValueError, match="at least one trainable"):
        build_adamw(net.requires_grad_(False), lr=1.0)


def test_moments_that_wait_on_the_host_step_alike():
    """A few parameters at a time, also where one of them has no gradient at first."""
    nets = [make_net(), make_net()]
    optimizers = [build_adamw(net, lr=0.1, on_host=on_host) for net, on_host in zip(nets, (False, True), strict=True)]
    for step in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(X).square().sum().backward()
            if not step:
                net[0].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert all(torch.equal(states[0][i][name], states[1][i][name]) for i in range(4) for name in states[0][i])


def test_max_grad_norm_must_be_positive(alone):
    param = param_with_gradient(1.0)
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_grad_norm must be > 0"):
            optimizer_step(torch.optim.SGD([param]), [param], lr=1.0, max_grad_norm=value, dist=alone)
