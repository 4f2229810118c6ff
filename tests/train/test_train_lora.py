"""Adapters: what is trained, which one runs, and how one follows another."""

import pytest
import torch
from omni_train.dist import init_distributed
from omni_train.lora import (
    adapter,
    adapter_params,
    add_lora,
    ema_update,
    ema_update_params,
    lora_layers,
    reference,
    same_initial_weights,
    unadapted_params,
)
from omni_train.optim import build_adamw
from omni_train.shard import shard
from omni_train.weights.adapters import LORA_FILE, PEFT_FILE, check_adapter, load_adapter
from omni_train.weights.full import (
    check_weights,
    named_adapter,
    named_weights,
    save_peft,
    save_weights,
)
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.down = nn.Linear(6, 2)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def make_net(*adapters, seed=1, dtype=torch.float32, **own):
    torch.manual_seed(0)
    net = Net().to(dtype)
    for name in adapters:
        add_lora(net, ["up", "down"], rank=2, alpha=4, adapter=name, seed=seed, **own)
    return net


def fill(net, name, value):
    """Give an adapter an effect: a fresh one has none."""
    for p in adapter_params(net, name):
        p.data.fill_(value)


X = torch.tensor([[1.0, -2.0, 0.5]])


def trainable(net):
    return [name for name, p in net.named_parameters() if p.requires_grad]


def test_a_fresh_adapter_changes_no_output_and_is_all_that_trains():
    net = make_net("default")
    assert torch.equal(net(X), make_net()(X))
    assert trainable(net) == [
        "up.lora_A.default.weight",
        "up.lora_B.default.weight",
        "down.lora_A.default.weight",
        "down.lora_B.default.weight",
    ]


def test_factors_are_float32_over_a_bfloat16_base():
    net = make_net("default", dtype=torch.bfloat16)
    assert {p.dtype for p in adapter_params(net, "default")} == {torch.float32}
    out = net(X.bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in adapter_params(net, "default"))


def test_the_output_is_the_base_plus_alpha_over_rank_times_the_product():
    net = make_net("default")
    layer = net.up
    fill(net, "default", 0.1)
    a, b = adapter_params(net, "default")[:2]
    expected = linear(X, layer.weight, layer.bias) + (4 / 2) * X @ a.T @ b.T
    torch.testing.assert_close(layer(X), expected)


def test_initial_factors_depend_on_the_seed_alone():
    first, other = make_net("default", seed=1), make_net("default", seed=2)
    second = make_net()
    torch.manual_seed(123)
    add_lora(second, ["up", "down"], rank=2, alpha=4, seed=1)
    assert all(map(torch.equal, adapter_params(first, "default"), adapter_params(second, "default")))
    assert not torch.equal(adapter_params(first, "default")[0], adapter_params(other, "default")[0])


@pytest.mark.parametrize(("init", "std"), [("default", (1 / 64 / 3) ** 0.5), ("gaussian", 1 / 32)])
def test_the_first_factor_has_the_spread_of_its_init_and_the_second_is_zero(init, std):
    net = nn.Sequential(nn.Linear(64, 8))
    add_lora(net, ["0"], rank=32, alpha=32, seed=1, init=init)
    down, up = adapter_params(net, "default")
    assert down.std().item() == pytest.approx(std, rel=0.05)
    assert down.abs().max() > (3 if init == "gaussian" else 1.5) * std  # a uniform ends at 1.73
    assert (down.abs().max() < 1.74 * std) == (init == "default")
    assert not up.any()


def test_adding_an_adapter_leaves_the_global_random_state_alone():
    net = make_net()
    before = torch.get_rng_state()
    add_lora(net, ["up"], rank=2, alpha=4, seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_second_adapter_is_frozen_and_inactive():
    net = make_net("default")
    names = trainable(net)
    fill(net, "default", 0.1)
    expected = net(X)
    add_lora(net, ["up", "down"], rank=2, alpha=4, adapter="old", seed=1)
    assert trainable(net) == names
    fill(net, "old", 0.3)
    assert torch.equal(net(X), expected)


def test_another_adapter_runs_inside_the_block_only():
    net = make_net("default", "old")
    fill(net, "default", 0.1)
    fill(net, "old", 0.3)
    names, now = trainable(net), net(X)
    with adapter(net, "old"):
        old = net(X)
        assert trainable(net) == names
    fill(net, "default", 0.3)
    assert not torch.equal(old, now)
    assert torch.equal(net(X), old)
    assert trainable(net) == names


def test_the_reference_is_the_module_before_training():
    net = make_net("default")
    fill(net, "default", 0.1)
    names, now = trainable(net), net(X)
    with reference(net):
        assert torch.equal(net(X), make_net()(X))
        assert trainable(net) == names
    assert torch.equal(net(X), now)
    assert trainable(net) == names


@pytest.mark.parametrize("block", [lambda net: adapter(net, "old"), reference], ids=["adapter", "reference"])
def test_an_error_inside_the_block_restores_the_policy(block):
    net = make_net("default", "old")
    fill(net, "default", 0.1)
    names, now = trainable(net), net(X)
    with pytest.raises(KeyError), block(net):
        raise KeyError
    assert torch.equal(net(X), now)
    assert trainable(net) == names


def test_the_optimizer_still_trains_the_policy_after_switching():
    net = make_net("default", "old")
    optimizer = build_adamw(net, lr=0.1)
    with torch.no_grad(), adapter(net, "old"), reference(net):
        net(X)
    before = [p.detach().clone() for p in adapter_params(net, "default")]
    old = [p.detach().clone() for p in adapter_params(net, "old")]
    net(X).sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, adapter_params(net, "default"), strict=True))
    assert all(map(torch.equal, old, adapter_params(net, "old")))
    assert all(p.grad is None for p in adapter_params(net, "old"))


def test_an_adapter_follows_another_and_becomes_it_with_decay_zero():
    net = make_net("default", "old")
    fill(net, "default", 1.0)
    fill(net, "old", 0.0)
    ema_update(net, "default", "old", decay=0.75)
    assert all(torch.equal(p, torch.full_like(p, 0.25)) for p in adapter_params(net, "old"))
    ema_update(net, "default", "old", decay=0.0)
    assert all(map(torch.equal, adapter_params(net, "default"), adapter_params(net, "old")))
    assert not any(p.requires_grad for p in adapter_params(net, "old"))


def test_moving_average_of_whole_modules():
    src, dst = [torch.tensor([1.0, 2.0])], [torch.tensor([0.0, 4.0])]
    ema_update_params(src, dst, decay=0.5)
    torch.testing.assert_close(dst[0], torch.tensor([0.5, 3.0]))
    ema_update_params(src, dst, decay=1.0)
    torch.testing.assert_close(dst[0], torch.tensor([0.5, 3.0]))


@pytest.mark.parametrize("own", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_sharded_adapters_switch_average_and_train(run_ranks, own):
    """Also if the first forward of a sharded module is under another adapter."""

    def work(dist):
        net = make_net("default", "old", **own)
        fill(net, "default", 0.1)
        fill(net, "old", 0.3)
        shard(net, dist.mesh, mode="fsdp2")
        outputs = []
        with torch.no_grad():
            with reference(net):
                outputs.append(net(X))
            with adapter(net, "old"):
                outputs.append(net(X))
            ema_update(net, "default", "old", decay=0.5)
            with adapter(net, "old"):
                outputs.append(net(X))
            ema_update(net, "default", "old", decay=0.0)
            with adapter(net, "old"):
                outputs.append(net(X))
        policy = net(X)
        policy.sum().backward()
        gradients = [p.grad is not None for p in adapter_params(net, "default")]
        return [t.tolist() for t in [*outputs, policy.detach()]], gradients

    net = make_net("default", **own)
    expected = [make_net()(X)]
    for value in (0.3, 0.2, 0.1, 0.1):
        fill(net, "default", value)
        expected.append(net(X))
    for outputs, gradients in run_ranks(work):
        torch.testing.assert_close(torch.tensor(outputs), torch.stack(expected).detach())
        assert gradients == [True] * (6 if own else 4)


def test_adapters_of_a_diffusers_model_run_where_they_should(tiny_qwen):
    model = tiny_qwen.build()
    expected = tiny_qwen.run(model)
    add_lora(model, tiny_qwen.targets, rank=4, alpha=8, seed=3)
    add_lora(model, tiny_qwen.targets, rank=4, alpha=8, adapter="old", seed=3)
    assert len(lora_layers(model)) == 8
    assert torch.equal(tiny_qwen.run(model), expected)
    fill(model, "default", 0.01)
    assert not torch.allclose(tiny_qwen.run(model), expected)
    with reference(model):
        assert torch.equal(tiny_qwen.run(model), expected)


def test_errors_name_the_argument(run_ranks):
    with pytest.raises(ValueError, match="rank must be >= 1, got 0"):
        add_lora(Net(), ["up"], rank=0, alpha=1, seed=0)
    with pytest.raises(ValueError, match="'default' again"):
        add_lora(make_net("default"), ["up"], rank=2, alpha=1, seed=0)
    for targets in (["up", "nowhere"], "nowhere"):
        net = Net()
        with pytest.raises(ValueError, match=r"targets must all name layers of Net, found none named \['nowhere'\]"):
            add_lora(net, targets, rank=2, alpha=1, seed=0)
        assert lora_layers(net) == {}
    with pytest.raises(ValueError, match=r"found none named \[\]"):
        add_lora(Net(), [], rank=2, alpha=1, seed=0)
    with pytest.raises(ValueError, match=r"must name linear layers, got 0, a Conv2d"):
        add_lora(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1)), ["0", "1"], rank=2, alpha=1, seed=0)
    with pytest.raises(ValueError, match=r"init must be one of \('default', 'gaussian', 'pissa'\), got 'zero'"):
        add_lora(Net(), ["up"], rank=2, alpha=1, seed=0, init="zero")
    with (
        pytest.raises(ValueError, match=r"adapter must be one of \['default'\], got 'old'"),
        adapter(make_net("default"), "old"),
    ):
        pass
    with pytest.raises(ValueError, match="got none"), reference(Net()):
        pass
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got 2"):
        ema_update_params([], [], 2)
    with pytest.raises(ValueError, match="same shapes"):
        ema_update_params([X], [], 0.5)

    def work(dist):
        net = shard(Net(), dist.mesh, mode="fsdp2")
        with pytest.raises(ValueError, match="before it is sharded"):
            add_lora(net, ["up"], rank=2, alpha=1, seed=0)

    run_ranks(work, world_size=1)


def test_a_regular_expression_takes_whole_names_and_no_longer_ones():
    net = nn.Sequential()
    net.q, net.inner = nn.Linear(2, 2), nn.Sequential()
    net.inner.q = nn.Linear(2, 2)
    assert add_lora(net, "q", rank=1, alpha=1, seed=0) == 1
    assert list(lora_layers(net)) == ["q"]


def test_the_scale_of_rslora_is_alpha_over_the_root_of_the_rank_in_layers_merged_weights_and_files():
    net = make_net()
    add_lora(net, ["up", "down"], rank=4, alpha=6, use_rslora=True, seed=1)
    fill(net, "default", 0.5)
    plain, merged = make_net(), dict(named_weights(net))
    delta = 6 / 2 * 4 * 0.25  # alpha / sqrt(4), over a rank of four products
    expected = linear(torch.tanh(linear(X, plain.up.weight + delta, plain.up.bias)), plain.down.weight + delta)
    torch.testing.assert_close(net(X), expected + plain.down.bias)
    torch.testing.assert_close(merged["up.weight"], plain.up.weight.detach() + delta)
    written = dict(named_adapter(net))
    torch.testing.assert_close(written["up.lora_B.weight"] @ written["up.lora_A.weight"], torch.full((6, 3), delta))


@pytest.mark.parametrize("own", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["LoRA", "rsLoRA", "DoRA"])
def test_merged_weights_and_excluded_layers_are_those_of_peft(own):
    net = nn.Sequential(Net(), Net())
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["up", "down"], exclude_modules=["1.down"], **own)
    peft_net = get_peft_model(nn.Sequential(Net(), Net()), config)
    add_lora(net, ["up", "down"], exclude=["1.down"], rank=3, alpha=5, seed=1, **own)
    for p in adapter_params(net, "default"):
        nn.init.normal_(p)
    peft_net.base_model.model.load_state_dict(net.state_dict())  # the same names, so the same layers
    merged = peft_net.merge_and_unload()
    torch.testing.assert_close(net[0](X), merged[0](X))
    torch.testing.assert_close(dict(named_weights(net)), dict(merged.state_dict()))


def test_layers_that_are_excluded_get_no_adapter():
    net = nn.ModuleDict({"first": Net(), "last": Net()})
    assert add_lora(net, ["up", "down"], exclude=["last.down"], rank=2, alpha=4, seed=1) == 3
    assert list(lora_layers(net)) == ["first.up", "first.down", "last.up"]


@pytest.mark.parametrize("exclude", [["left"], ["up", "down"], ["u"]])
def test_what_excludes_nothing_or_all_is_refused(exclude):
    with pytest.raises(ValueError, match="exclude must name some of the layers that targets name, got"):
        add_lora(make_net(), ["up", "down"], exclude=exclude, rank=2, alpha=4, seed=1)


class Experts(nn.Module):
    """Three experts in fused parameters; each row of the input goes to one, and each expert gets one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        shapes = {"up": (3, 4, 2), "gate": (3, 4, 2), "down": (3, 2, 4)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        inner = torch.bmm(self.up, x[..., None]).tanh() * torch.bmm(self.gate, x[..., None])
        return torch.bmm(self.down, inner)[..., 0]


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.out = Experts(), nn.Linear(2, 2)

    def forward(self, x):
        return self.out(self.experts(x))


PARAMETERS = ["experts.up", "experts.gate", "experts.down"]
ROWS = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.5]])


def make_mixture(*adapters, rank=2):
    net = Mixture()
    for name in adapters:
        add_lora(net, ["out"], parameters=PARAMETERS, rank=rank, alpha=3, adapter=name, seed=1)
    return net


def test_experts_in_one_parameter_get_an_adapter_as_pefts(run_ranks):
    """Outputs, gradients, merged weights and names; also without the adapters, and on two ranks."""
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["out"], target_parameters=PARAMETERS)
    peft_net, net = get_peft_model(Mixture(), config), make_mixture("default", "old")
    assert torch.equal(net(ROWS), Mixture()(ROWS))
    torch.manual_seed(6)
    for p in adapter_params(net, "default"):
        nn.init.normal_(p)
    state = {name: value for name, value in net.state_dict().items() if ".old." not in name}
    peft_net.base_model.model.load_state_dict(state)
    assert len(trainable(net)) == 8

    (expected := peft_net(ROWS)).square().sum().backward()
    wanted = {name.removeprefix("base_model.model."): p.grad for name, p in peft_net.named_parameters()}

    def work(dist):
        own = make_mixture("default", "old")
        own.load_state_dict(net.state_dict())
        shard(own, dist.mesh, mode="fsdp2")
        out = own(ROWS)
        out.square().sum().backward()
        grads = {name: p.grad.full_tensor() for name, p in own.named_parameters() if p.grad is not None}
        with torch.no_grad(), reference(own):
            plain = own(ROWS)
        merged = {name: tensor.tolist() for name, tensor in named_weights(own)}
        return out.tolist(), {name: grad.tolist() for name, grad in grads.items()}, plain.tolist(), merged

    net(ROWS).square().sum().backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    torch.testing.assert_close(grads, {name: wanted[name] for name in grads})
    merged = dict(peft_net.merge_and_unload().state_dict())
    torch.testing.assert_close(dict(named_weights(net)), merged)
    for out, theirs, plain, weights in run_ranks(work):
        torch.testing.assert_close(torch.tensor(out), expected.detach())
        torch.testing.assert_close({name: torch.tensor(grad) for name, grad in theirs.items()},
                                   {name: 2 * grad for name, grad in grads.items()})  # fmt: skip
        torch.testing.assert_close(torch.tensor(plain), Mixture()(ROWS).detach())
        torch.testing.assert_close({name: torch.tensor(weight) for name, weight in weights.items()}, merged)


def test_an_adapter_of_experts_switches_averages_and_leaves_the_rest_to_a_receiver():
    net = make_mixture("default", "old")
    fill(net, "default", 0.5)
    ema_update(net, "default", "old", decay=0.5)
    with adapter(net, "old"):
        old = net(ROWS)
    fill(net, "default", 0.25)
    assert not torch.equal(old, net(ROWS).detach())
    assert [name for name, _ in unadapted_params(net)] == ["out.bias"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            ["experts.up", "side"],
            r"parameters must all name some of Mixture, found none named \['side'\]",
        ),
        (
            ["turned.up"],
            r"parameters must be \[experts, out, in\], got turned.up, whose module has \[experts, in, out\]",
        ),
        (["out.weight"], r"parameters must be \[experts, out, in\], got out.weight, \[2, 2\]"),
    ],
)
def test_a_parameter_that_is_none_of_experts_is_refused(parameters, message):
    net = Mixture()
    net.turned = Experts()
    net.turned.is_transposed = True
    with pytest.raises(ValueError, match=message):
        add_lora(net, ["out"], parameters=parameters, rank=2, alpha=3, seed=1)


def test_pissa_begins_and_trains_as_pefts_beside_a_reference_that_stays():
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights="pissa")
    net = Net()
    torch.manual_seed(3)
    plain = {name: nn.init.normal_(value.detach()) for name, value in net.state_dict().items()}
    for weight in (net.up.weight, net.down.weight):
        weight.data.mul_(5.0 ** -torch.arange(weight.shape[1]))  # singular values that differ
    peft_net = get_peft_model(net, config)
    net = Net()
    net.load_state_dict(plain)
    add_lora(net, ["up", "down"], rank=2, alpha=4, seed=1, init="pissa")
    add_lora(net, ["up", "down"], rank=2, alpha=4, adapter="old", seed=1, init="pissa")
    original = Net()
    original.load_state_dict(plain)
    assert trainable(net) == trainable(make_net("default"))
    torch.testing.assert_close(net(X), original(X))
    first = net(X).detach()
    products = [up @ down for down, up in zip(*[iter(adapter_params(net, "default"))] * 2, strict=True)]
    theirs = dict(peft_net.named_parameters())
    for name, product in zip(("up", "down"), products, strict=True):
        a, b = (theirs[f"base_model.model.{name}.lora_{which}.default.weight"] for which in "AB")
        torch.testing.assert_close(product, b @ a, rtol=1e-4, atol=1e-5)
        left = theirs[f"base_model.model.{name}.base_layer.weight"]
        torch.testing.assert_close(net.get_submodule(name).base_layer.weight, left, rtol=1e-4, atol=1e-5)

    for p in adapter_params(net, "default"):
        p.data.add_(torch.randn(p.shape) / 4)
    for block in (reference(net), adapter(net, "old")):
        with block:
            assert torch.equal(net(X), first)
    trained = original.up.weight + 2 * (net.up.lora_B.default.weight @ net.up.lora_A.default.weight - products[0])
    torch.testing.assert_close(dict(named_weights(net))["up.weight"], trained)
    torch.testing.assert_close(net.up(X), linear(X, trained, original.up.bias))
    written = dict(named_adapter(net))
    assert written["up.lora_A.weight"].shape == (4, 3)
    change = written["up.lora_B.weight"] @ written["up.lora_A.weight"]
    torch.testing.assert_close(change, trained - original.up.weight, rtol=1e-4, atol=1e-5)
    peft_up = peft_net.base_model.model.up
    peft_up.load_state_dict(
        {name: p for name, p in net.up.state_dict().items() if "initial" not in name and "old" not in name}
    )
    results = []
    for layer in (net.up, peft_up):
        (out := layer(X)).square().sum().backward()
        results.append([out, *(factor.grad for factor in (layer.lora_A.default.weight, layer.lora_B.default.weight))])
    assert all(map(torch.equal, *results))


def test_the_weights_before_pissa_stay_when_its_first_factors_are_those_of_another_device():
    net, trained = make_net(), make_net("default", init="pissa")
    for layer in lora_layers(trained).values():
        layer.lora_B.default.weight.data += 1
    state = {name: p for name, p in trained.state_dict().items() if "lora" in name}
    state |= {name: p + 0.01 * torch.randn(p.shape) for name, p in state.items() if ".initial." in name}
    with same_initial_weights(trained):
        trained.load_state_dict(state, strict=False)
    with reference(trained):
        torch.testing.assert_close(trained(X), net(X))
    with same_initial_weights(trained):
        before = trained.up.base_layer.weight.clone()
    assert torch.equal(trained.up.base_layer.weight, before)


def test_a_small_step_of_pissa_is_no_rounding_error_where_a_file_is_read_in_bfloat16():
    torch.manual_seed(7)
    net, x = nn.Sequential(nn.Linear(64, 48, bias=False)), torch.randn(16, 64).bfloat16()
    add_lora(net, ["0"], rank=8, alpha=16, seed=1, init="pissa")
    for p in adapter_params(net, "default"):
        p.data.add_(3e-5 * torch.randn(p.shape).sign())
    down, up = dict(named_adapter(net)).values()
    exact, rounded = linear(linear(x.float(), down), up), linear(linear(x, down.bfloat16()), up.bfloat16())
    assert (rounded.float() - exact).norm() < 0.02 * exact.norm()


def test_dora_begins_as_the_base_and_computes_and_trains_as_pefts():
    net = make_net("default", use_dora=True)
    assert torch.equal(net(X), make_net()(X))
    assert len(adapter_params(net, "default")) == len(trainable(net)) == 6
    for p in adapter_params(net, "default"):
        p.data.add_(torch.randn(p.shape) / 4)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], use_dora=True)
    theirs = get_peft_model(make_net(), config).base_model.model
    theirs.load_state_dict(net.state_dict())
    results = []
    for each in (net, theirs):
        (out := each(X)).square().sum().backward()
        results.append([out, *(p.grad for p in each.parameters() if p.requires_grad)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_magnitude_is_not_rounded_as_a_number_near_1_in_bfloat16():
    """Where 1.02 would be 1.0234."""
    torch.manual_seed(7)
    net, x = nn.Sequential(nn.Linear(64, 48)).bfloat16(), torch.randn(256, 64).bfloat16()
    add_lora(net, ["0"], rank=8, alpha=16, seed=1, use_dora=True)
    before = net(x)
    assert before.equal(net[0].base_layer(x))
    magnitudes = adapter_params(net, "default")[-1]
    assert magnitudes.dtype == torch.float32
    magnitudes.data.mul_(1.02)
    wide = linear(x.double(), net[0].base_layer.weight.double())
    moved = ((net(x) - before).double() * wide).sum() / wide.square().sum()
    assert moved.item() == pytest.approx(0.02, rel=0.02)


def test_an_adapter_with_magnitudes_goes_through_a_file_and_fits_no_other(tmp_path):
    net = make_net("default", use_dora=True)
    for p in adapter_params(net, "default"):
        p.data.add_(torch.randn(p.shape) / 4)
    folder = tmp_path / "weights"
    save_weights(net, folder, init_distributed(), card=None)
    other = make_net("default", seed=5, use_dora=True)
    load_adapter(other, folder)
    torch.testing.assert_close(other(X), net(X))
    (tmp_path / "peft").mkdir()
    save_peft(net, tmp_path / "peft" / "weights", init_distributed(), prefix="", base="some")
    config = LoraConfig.from_pretrained(tmp_path / "peft" / "weights")
    config.task_type = None  # this net is no language model
    theirs = get_peft_model(make_net(), config)
    found = set_peft_model_state_dict(theirs, load_file(tmp_path / "peft" / "weights" / PEFT_FILE))
    assert not found.unexpected_keys
    torch.testing.assert_close(theirs(X), net(X))
    with pytest.raises(ValueError, match="must be an adapter without use_dora, as the module's is"):
        check_adapter(make_net("default"), folder)
    check_weights(make_net(), folder)
    with pytest.raises(ValueError, match="does not fit Net: 2 of 2 layers, such as transformer"):
        check_weights(make_net(), folder, part="other")


def test_dora_refuses_a_row_of_zeros_by_whose_norm_it_would_divide():
    net = make_net()
    net.down.weight.data[1] = 0
    with pytest.raises(ValueError, match="use_dora must divide by the norms of rows, got a row of zeros in down"):
        add_lora(net, ["up", "down"], rank=2, alpha=4, seed=1, use_dora=True)


def test_shards_that_would_round_magnitudes_are_refused(run_ranks):
    def work(dist):
        net = make_net("default", use_dora=True)
        with pytest.raises(ValueError, match=r"compute_dtype must be float32 with DoRA, .* got torch.bfloat16"):
            shard(net, dist.mesh, mode="fsdp2", compute_dtype=torch.bfloat16)
        shard(net, dist.mesh, mode="fsdp2", compute_dtype=torch.float32)

    run_ranks(work, world_size=1)


@pytest.mark.parametrize("options", [{"init": "pissa"}, {"parameters": ["experts.up"]}])
def test_dora_is_of_linear_layers_that_begin_at_0(options):
    with pytest.raises(ValueError, match="use_dora is of linear layers that begin at 0, got init"):
        add_lora(Mixture(), ["out"], rank=2, alpha=3, seed=1, use_dora=True, **options)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"init": "pissa"}, {}, "must all begin as PiSSA's, with one rank and scale, or none"),
        ({}, {"init": "pissa"}, "must all begin as PiSSA's, with one rank and scale, or none"),
        ({"init": "pissa"}, {"init": "pissa", "alpha": 5}, "must all begin as PiSSA's, with one rank and scale"),
        ({"init": "pissa", "rank": 3}, {}, "rank must be at most 2 for init pissa, the smaller side of down, got 3"),
        ({"adapter": "initial"}, {}, "adapter must be a new name, got 'initial' again"),
    ],
)
def test_adapters_that_do_not_fit_pissa_are_refused(first, second, message):
    net, plain = Net(), {"rank": 2, "alpha": 4, "seed": 1}

    def add_both():
        for name, options in (("default", first), ("old", second)):
            add_lora(net, ["up", "down"], **({"adapter": name} | plain | options))

    with pytest.raises(ValueError, match=message):
        add_both()


def test_pissa_is_of_linear_layers_and_takes_no_values_of_others(tmp_path):
    with pytest.raises(ValueError, match=r"init pissa is of linear layers, got parameters \['experts.up'\]"):
        add_lora(Mixture(), ["out"], parameters=["experts.up"], rank=2, alpha=3, seed=1, init="pissa")
    net = Net()
    add_lora(net, ["up"], rank=2, alpha=4, seed=1, init="pissa")
    (tmp_path / LORA_FILE).touch()
    with pytest.raises(ValueError, match="must have adapters that begin at 0 to load another's values, got PiSSA's"):
        check_adapter(net, tmp_path)
