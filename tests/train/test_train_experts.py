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
from omni_train.dist import init_distributed, shard_mesh
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
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


CASES = [" ".join(case) for case in product(MODELS, ("lora", "all", "idle"), ("2", "4"))]


@pytest.mark.parametrize("case", sampled(CASES, 1, always=("thinker idle 4", "hunyuan-image all 4", "thinker lora 2")))
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
        for experts in (False, True):
            net = build(name, dist.mesh, experts=experts)
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
    (own, plain, kept), (_, _, other) = run_ranks(work)
    assert plain["_allgather_base_"] - kept["_allgather_base_"] == 2 * 2 * 4 * own  # batches, passes, bytes
    print(name, own, plain, kept, other, rows, width)
    assert kept["all_to_all_single"] + other["all_to_all_single"] == 4 * 4 * rows["all"] * width.pop()
