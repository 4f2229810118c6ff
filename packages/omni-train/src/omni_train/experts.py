"""Experts that stay on their rank: tokens are sent to them and back, and no expert is gathered.

A rank's experts get the tokens of all ranks, and therefore the sum of all ranks' gradients.

Shapes: R tokens of this rank, k experts per token, E experts, W ranks, N rows that this rank receives, D width.
"""

from collections.abc import Collection, Iterator

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.nn.functional import pad


class ShardedExperts(nn.Module):
    """A mixture's experts, E / W of them on each rank, with the names and place of the module that they replace.

    A fused parameter [E, ...] is sharded by rows. In a list of experts, all rows of each expert are on its owner, which
    `DTensor.full_tensor` does not support: `owners` has the owner of each parameter.
    """

    def __init__(self, experts: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        """Keep the rows of this rank.

        experts: a list, or fused as in transformers; called with states [R, D], the experts [R, k] of each state, and
        their weights [R, k]. dtype: compute dtype; None means that of the parameters.
        """
        super().__init__()
        self.mesh, self.dtype, self.count = mesh, dtype, _num_experts(experts)
        self.share = self.count // mesh.size()
        self.owners: dict[nn.Parameter, int] = {}
        rows = slice(mesh.get_local_rank() * self.share, (mesh.get_local_rank() + 1) * self.share)
        if isinstance(experts, nn.ModuleList):
            for i, expert in enumerate(experts):
                _shard_params(expert, mesh, slice(None) if rows.start <= i < rows.stop else slice(0))
                self.owners |= dict.fromkeys(expert.parameters(), i // self.share)
                self.add_module(str(i), expert)
            local: nn.Module = experts[rows]
        else:
            _shard_params(experts, mesh, rows)
            for name, param in experts.named_parameters():
                self.register_parameter(name, param)
            local, local.num_experts = experts, self.share  # type: ignore[assignment]  # a number
        self._local = (local,)  # not a submodule, as its parameters have their names here

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the output [R, D] for states [R, D], the experts [R, k] of each state, and their weights [R, k]."""
        experts, order = chosen.flatten().sort(stable=True)
        sent, received = self._counts(experts)
        local_experts = (
            torch.arange(self.share).repeat(len(received)).repeat_interleave(received.flatten()).to(states.device)
        )
        send_sizes, recv_sizes = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        rows = all_to_all_single_autograd(states[order // chosen.shape[1]], recv_sizes, send_sizes, self.mesh)
        rows = all_to_all_single_autograd(
            self._run(rows, local_experts, weights.dtype), send_sizes, recv_sizes, self.mesh
        )
        by_token = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, chosen.shape)
        return (by_token * weights[..., None]).sum(dim=1).to(states.dtype)

    def _counts(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many rows this rank sends to each expert, and each rank to the experts of this one, [W, E / W].

        Both are on the host. experts: the expert of each row, sorted.
        """
        shape = self.mesh.size(), self.share
        if isinstance(experts, FakeTensor):  # on a planned device: the same number for each
            sent = (torch.arange(self.count + 1) * len(experts) // self.count).diff().view(shape)
            return sent, sent[:1].expand(shape)
        ends = torch.searchsorted(experts, torch.arange(self.count, device=experts.device), right=True)
        sent = ends.diff(prepend=ends.new_zeros(1)).view(shape)
        received = torch.empty_like(sent)
        torch_dist.all_to_all_single(received, sent, group=self.mesh.get_group())
        sent, received = torch.stack([sent, received]).cpu().unbind()  # the only synchronization with the device
        return sent, received

    def _run(self, rows: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output [N, D] for rows [N, D] and their experts [N] on this rank. dtype: of the weights, all 1."""
        number, (local,) = len(rows), self._local
        if not number:  # otherwise exchanges that other ranks wait for would be missing from the graph
            rows, experts = pad(rows, [0, 0, 0, 1]), experts.new_zeros(1)
        params = {name: p.to_local().to(self.dtype or p.dtype) for name, p in _sharded(local)}
        ones = torch.ones(len(rows), 1, dtype=dtype, device=rows.device)
        rows = functional_call(local, params, (rows, experts[:, None], ones))[:number]
        others = [p.to_local().flatten() for _, p in _sharded(self) if p.requires_grad and not p.to_local().numel()]
        return rows + torch.cat(others).sum() if others else rows  # 0, for their gradients: every rank has the same


def shard_experts(
    module: nn.Module, names: Collection[str], mesh: DeviceMesh, dtype: torch.dtype | None
) -> set[nn.Parameter]:
    """Replace a module's experts with sharded ones; return their parameters. Arguments as in `shard`."""
    sharded = set[nn.Parameter]()
    for parent, name, experts in find_experts(module, names, mesh.size()):
        replacement = ShardedExperts(experts, mesh, dtype)
        setattr(parent, name, replacement)
        sharded.update(replacement.parameters())
    return sharded


def find_experts(module: nn.Module, names: Collection[str], num_ranks: int) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the expert modules with these class names, each with its parent and its name there.

    Raises:
        ValueError: there are none, or the ranks cannot divide them evenly.
    """
    parents = list(module.modules())
    matches = [(p, name, child) for p in parents for name, child in p.named_children() if type(child).__name__ in names]
    if not matches:
        raise ValueError(f"experts must be of a model whose experts can be sharded, got {type(module).__name__}")
    if uneven := [count for *_, child in matches if (count := _num_experts(child)) % num_ranks]:
        raise ValueError(f"experts must divide evenly among the {num_ranks} ranks, got {uneven[0]} in a block")
    return matches


def expert_owners(module: nn.Module) -> dict[Tensor, int]:
    """Return the owner rank in the mesh of each parameter of experts in lists."""
    layers = [layer for layer in module.modules() if isinstance(layer, ShardedExperts)]
    return {param: owner for layer in layers for param, owner in layer.owners.items()}


def num_gathered(module: nn.Module) -> int:
    """Return the number of a module's weights that sharded ranks gather."""
    kept = {param for layer in module.modules() if isinstance(layer, ShardedExperts) for param in layer.parameters()}
    return sum(param.numel() for param in module.parameters() if param not in kept)


def _num_experts(experts: nn.Module) -> int:
    """Return the number of experts in a module."""
    return len(experts) if isinstance(experts, nn.ModuleList) else int(experts.num_experts)  # type: ignore[arg-type]


def _sharded(module: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Yield the parameters of a module, all DTensors, by name."""
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor)
        yield name, param


def _shard_params(module: nn.Module, mesh: DeviceMesh, rows: slice) -> None:
    """Replace each parameter with a DTensor of which this rank holds these rows, on its device."""
    for owner in module.modules():
        for name, whole in list(owner.named_parameters(recurse=False)):
            local = whole.detach()[rows].clone()
            local = local if local.is_meta else local.to(mesh.device_type)
            sharded = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            owner.register_parameter(name, nn.Parameter(sharded, whole.requires_grad))
