"""Experts that stay on their rank: the numbers of one process, no gather of an expert, and what is refused."""

from collections import Counter
from itertools import product

import pytest
import torch
from helpers import REPO, sampled
from model_rows import ROWS
from omni_rollout.models import open_model
from omni_rollout.models.tokens import open_token_model
from omni_train.checkpoint.state import train_state
from omni_train.checkpoint.store import Checkpoint
from omni_train.dist import shard_mesh
from omni_train.experts import find_experts, num_gathered
from omni_train.lora import add_lora, init_adapter
from omni_train.memory.recompute import Recompute, recompute_blocks
from omni_train.optim import SummedBackward, build_adamw, optimizer_step, plain_backward
from omni_train.planned import PLANNED, Meter, PlannedDevice, planned_ranks
from omni_train.shard import shard
from omni_train.weights.full import named_weights, save_weights
from omni_train.weights.load import load_sharded
from omni_train.weights.snapshot import Ema
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

MODELS = {
    "thinker": open_token_model(REPO / "checkpoints" / "tiny-beeps-qwen3-omni"),
    "hunyuan-image": open_model(ROWS["hunyuan-image"].checkpoint()),
}
LENGTHS = (7, 3, 5, 1)  # of the texts of four batches: ranks have different numbers of tokens
SHARES = {2: ((0, 1), (2, 3)), 4: ((0,), (1,), (2,), (3,))}  # batches of each rank


def build(name, mesh=None, *, lora=False, idle=False, experts=True):
    """A net of four experts in each block, sharded if there is a mesh. idle: all tokens go to the same two of them."""
    model = MODELS[name]
    own = {"block_names": model.BLOCK_NAMES, "expert_names": model.EXPERT_NAMES if experts else ()}
    from_files = mesh is not None and name == "hunyuan-image" and not idle
    net = model.empty_net(buffers=True) if from_files else model.load_net(device="cpu", dtype=torch.float32)
    net.requires_grad_(not lora)
    for part in getattr(model, "FROZEN", ()):
        net.get_submodule(part).requires_grad_(False)
    for path, param in net.named_parameters() if idle else ():
        if path.endswith(("mlp.gate.weight", "mlp.gate.wg.weight")):
            torch.nn.init.zeros_(param)
    if lora:
        add_lora(net, model.LORA_TARGETS, rank=2, alpha=4, seed=0)
    if idle and name == "thinker":
        net.set_experts_implementation("eager")  # without tokens its output needs no gradient
    if from_files:
        load_sharded(net, model.weight_files(), mesh, **own)
    elif mesh is not None:
        shard(net, mesh, mode="fsdp2", **own)
    if lora:
        init_adapter(net, seed=0)
    return net


def loss_of(name, net, batch):
    """The loss of one of four batches."""
    generator, length = torch.Generator().manual_seed(batch), LENGTHS[batch]
    ids = torch.randint(1, 200, (1 + batch % 2, length), generator=generator)
    if name == "thinker":
        logits = net(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), ids.flatten())
    given = {"input_ids": ids, "marks": ids[:, :1].expand(-1, 3), "lengths": torch.full((len(ids),), length)}
    x = torch.randn(len(ids), 16, 3, length, generator=generator)
    return net(hidden_states=x, timestep=torch.full((len(ids),), 0.1 + 0.25 * batch), **given).square().mean()


class Training:
    """Steps on some of the batches. Adam's epsilon is large: it would divide gradients of rounding by themselves."""

    def __init__(self, name, net, dist, batches):
        self.name, self.net, self.dist, self.batches = name, net, dist, batches
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.optimizer, self.ema = build_adamw(self.params, lr=1e-3, eps=1e-4), Ema(self.params, decay=0.5)
        self.backward = SummedBackward(net, dist.mesh, mode="fsdp2") if dist.mesh else plain_backward

    def gradients(self):
        """Add the gradients; the losses."""
        losses = [loss_of(self.name, self.net, batch) for batch in self.batches]
        for loss in losses:
            self.backward(loss, of=len(losses))
        return [loss.item() for loss in losses]

    def step(self):
        """The losses, and the norm of the gradients."""
        losses = self.gradients()
        norm = optimizer_step(self.optimizer, self.params, lr=1e-3, max_grad_norm=0.5, dist=self.dist).grad_norm
        self.ema.update(0)
        return losses, norm

    def run(self):
        """Losses and norms of two steps, the weights after them, and, in their place, the gradients of a third one."""
        steps = [self.step() for _ in range(2)]
        weights = copied(self.net)
        self.gradients()
        with torch.no_grad():
            for p in self.params:
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        return steps, weights | {f"gradient {name}": tensor for name, tensor in copied(self.net).items()}


def copied(net):
    return {name: weight.detach().clone() for name, weight in named_weights(net)}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = max(1.0, tensor.abs().max().item())  # of a gradient
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5 * largest)


CASES = [" ".join(case) for case in product(MODELS, ("lora", "all", "idle"), ("2", "4"))]


@pytest.mark.parametrize("case", sampled(CASES, 1))
def test_ranks_train_as_one_process(run_ranks, alone, tmp_path, case):
    name, kind, ranks = case.split()
    options = {"lora": kind == "lora", "idle": kind == "idle"}

    def work(dist):
        net = build(name, dist.mesh, **options)
        if ranks == "2":
            recompute_blocks(net, Recompute(1e9 * dist.rank))  # one rank keeps products
        held = [p.to_local().numel() / p.numel() for path, p in net.named_parameters() if ".experts." in path]
        assert sum(held) == len(held) / int(ranks)
        training = Training(name, net, dist, SHARES[int(ranks)][dist.rank])
        training.gradients()
        grads = [p.grad for path, p in net.named_parameters() if ".experts." in path]
        assert all((grad is None) == (kind == "lora") for grad in grads)  # also of an expert without tokens
        has_tokens = any(grad.to_local().any() for grad in grads if grad is not None)
        training.optimizer.zero_grad()
        steps, tensors = training.run()
        save_file(tensors, tmp_path / f"{dist.rank}.safetensors")
        return *steps, bool(has_tokens)

    steps, tensors = Training(name, build(name, **options), alone, range(4)).run()
    found = run_ranks(work, int(ranks))
    for number, (losses, norm) in enumerate(steps):
        assert [loss for each in found for loss in each[number][0]] == pytest.approx(losses, rel=1e-5)
        assert [each[number][1] for each in found] == pytest.approx([norm] * int(ranks), rel=1e-5)
    if kind == "idle":
        assert {has_tokens for *_, has_tokens in found} == {True, False}
    for rank in {0, int(ranks) - 1}:
        assert_close(load_file(tmp_path / f"{rank}.safetensors"), tensors)


class Traffic(TorchDispatchMode):
    """The bytes that a rank gathers, and those that it sends to the ranks of experts."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "all_to_all_single"):
            self.bytes[name] += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_no_expert_is_gathered_and_each_row_travels_there_and_back_twice(run_ranks, name):
    def work(dist):
        counts = []
        for experts, recomputed in ((False, False), (True, False), (True, True)):
            net = build(name, dist.mesh, experts=experts)
            if recomputed:
                recompute_blocks(net, Recompute(0))
            training = Training(name, net, dist, SHARES[2][dist.rank])
            with Traffic() as seen:
                training.gradients()
            counts.append(dict(seen.bytes))
        own = sum(p.numel() for path, p in net.named_parameters() if ".experts." in path)
        assert num_gathered(net) == sum(p.numel() for p in net.parameters()) - own
        return own, *counts

    net = build(name)
    rows, width = Counter(), set()

    def count(module, args):
        rows["all"] += args[1].numel()
        width.add(args[0].shape[1])

    for *_, experts in find_experts(net, MODELS[name].EXPERT_NAMES, 2):
        experts.register_forward_pre_hook(count)
    for batch in range(4):
        loss_of(name, net, batch)
    (own, plain, kept, recomputed), (*_, other, other_recomputed) = run_ranks(work)
    assert plain["_allgather_base_"] - kept["_allgather_base_"] == 2 * 2 * 4 * own  # batches, passes, bytes
    sent = 4 * rows["all"] * width.pop()  # bytes of all rows, once
    assert kept["all_to_all_single"] + other["all_to_all_single"] == 4 * sent
    assert recomputed["all_to_all_single"] + other_recomputed["all_to_all_single"] == 6 * sent


@pytest.mark.parametrize("name", sampled(MODELS, 1))
def test_a_checkpoint_of_two_ranks_continues_on_four_and_without_sharded_experts(run_ranks, alone, tmp_path, name):
    first, second = (str(tmp_path / each) for each in ("first", "second"))

    def begin(dist):
        training = Training(name, build(name, dist.mesh), dist, SHARES[2][dist.rank])
        training.step()
        Checkpoint(first, dist).save(1, training.net, training.optimizer, training.ema, config={})
        return sum(v.to_local().numel() for v in (training.optimizer.state[p]["exp_avg"] for p in training.params))

    def resumed(dist, folder, *, batches, **options):
        training, checkpoints = (
            Training(name, build(name, dist.mesh, **options), dist, batches),
            Checkpoint(folder, dist),
        )
        checkpoints.load(checkpoints.latest(), training.net, training.optimizer, training.ema)
        return training

    def go_on(dist):
        training = resumed(dist, first, batches=SHARES[4][dist.rank])
        Checkpoint(second, dist).save(1, training.net, training.optimizer, training.ema, config={})
        losses, norm = training.step()
        save_file(copied(training.net), tmp_path / f"{dist.rank}.safetensors")
        if name == "hunyuan-image":
            save_weights(training.net, tmp_path / "weights", dist)
        plain = resumed(dist, second, batches=(dist.rank,), experts=False)
        return losses, norm, plain.step()

    moments = run_ranks(begin)
    assert max(moments) < 0.51 * sum(moments)
    found = run_ranks(go_on, 4)
    states = [
        train_state(one.net, one.optimizer, one.ema)
        for one in (resumed(alone, f, batches=range(4)) for f in (first, second))
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    training = resumed(alone, first, batches=range(4))
    losses, norm = training.step()
    assert [each[0][0] for each in found] == pytest.approx(losses, rel=1e-5)
    for _, own, plain in found:
        assert [own, plain[1]] == pytest.approx([norm, norm], rel=1e-5)
    assert_close(load_file(tmp_path / "3.safetensors"), copied(training.net))
    if name == "hunyuan-image":
        assert_close(
            load_file(tmp_path / "weights/transformer/diffusion_pytorch_model.safetensors"), copied(training.net)
        )


def test_what_cannot_be_sharded_is_named(run_ranks):
    with pytest.raises(ValueError, match="experts must divide evenly among the 3 ranks, got 4 in a block"):
        find_experts(MODELS["thinker"].empty_net(), MODELS["thinker"].EXPERT_NAMES, 3)
    with pytest.raises(ValueError, match="experts must be of a model whose experts can be sharded, got Linear"):
        find_experts(torch.nn.Linear(2, 2), (), 2)
    with pytest.raises(ValueError, match=r"targets must all name layers of Qwen3OmniMoeThinker.*, found none named"):
        add_lora(MODELS["thinker"].empty_net(), ["experts.gate_up_proj"], rank=2, alpha=4, seed=0)

    def work(dist):
        for mode, mesh in (("ddp", dist.mesh), ("fsdp2", shard_mesh(dist, 2))):
            with pytest.raises(ValueError, match=f"expert_names need mode 'fsdp2' and a 1-D mesh, got mode '{mode}'"):
                shard(torch.nn.Linear(2, 2), mesh, mode=mode, expert_names=("Linear",))

    run_ranks(work, 4)


def test_a_plan_counts_what_a_rank_takes(run_ranks):
    """Its experts get as many tokens as the planned ones do; the peak is that of a pass, beyond the weights."""

    def passed(net, meter, device):
        given = {"timestep": torch.full((2,), 0.5), "input_ids": torch.ones(2, 12, dtype=torch.long)}
        given |= {"marks": torch.ones(2, 3, dtype=torch.long), "lengths": torch.full((2,), 12)}
        given |= {"hidden_states": torch.zeros(2, 16, 4, 8)}
        L = len(net.model.layers)
        for key, size in (("text_routes", 12), ("routes", 36)):
            given[key] = (torch.arange(2 * size * L * 2) % 4).to(torch.uint8).view(2, size, L, 2)
        given = {key: value.to(device) for key, value in given.items()}
        meter.start_window()
        held = meter.live
        net(**given).square().mean().backward()
        return held, meter.window

    def work(dist):
        with Meter(torch.device("cpu")) as meter:
            net = build("hunyuan-image", dist.mesh)
            return passed(net, meter, "cpu")

    model = MODELS["hunyuan-image"]
    with planned_ranks(2) as dist, PlannedDevice() as device:
        net = model.empty_net(buffers=True).requires_grad_(True)
        own = {"block_names": model.BLOCK_NAMES, "expert_names": model.EXPERT_NAMES}
        planned = passed(load_sharded(net, None, dist.mesh, **own), device, PLANNED)
    held, peak = run_ranks(work)[0]
    assert planned == (held, pytest.approx(peak, rel=0.05))


@pytest.mark.parametrize("name", sampled(MODELS, 1))
def test_in_bfloat16_experts_compute_as_gathered_ones(run_ranks, name):
    """Over float32 weights, which get float32 gradients, or over frozen ones that are stored in it."""

    def work(dist):
        found = []
        for lora, experts in product((False, True), (False, True)):
            net, model = MODELS[name].load_net(device="cpu", dtype=torch.float32), MODELS[name]
            net.requires_grad_(not lora)
            if lora:
                add_lora(net, model.LORA_TARGETS, rank=2, alpha=4, seed=0)
            own = {"block_names": model.BLOCK_NAMES, "expert_names": model.EXPERT_NAMES if experts else ()}
            shard(net, dist.mesh, mode="fsdp2", compute_dtype=torch.bfloat16, **own)
            loss = loss_of(name, net, dist.rank)
            loss.backward()
            kinds = {str(p.dtype) for path, p in net.named_parameters() if ".experts." in path}
            norm = sum(p.grad.to_local().square().sum().item() for p in net.parameters() if p.grad is not None)
            found.append((loss.item(), norm, *kinds, len(copied(net))))
        return found

    for rank in run_ranks(work):
        for gathered, kept in (rank[:2], rank[2:]):
            assert kept == [pytest.approx(gathered[0], rel=1e-2), pytest.approx(gathered[1], rel=0.1), *gathered[2:]]
        assert [each[2] for each in rank] == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2
