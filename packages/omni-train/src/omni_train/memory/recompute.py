"""Gradient checkpointing that keeps the most expensive activations within a memory budget.

Matrix products and attention are nearly all of a block's operations and less than half of its activations. A block that
keeps its products recomputes only the rest. Kept and recomputed values have the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint

from omni_train.dist import deterministic
from omni_train.kernels import is_sampling
from omni_train.memory.offload import saved_on_host

PRODUCTS = (
    "mm",
    "addmm",
    "addmm_",
    "_scaled_dot_product_",
    "npu_fusion_attention",
)  # prefixes of operator names
Context = AbstractContextManager[Any]


class Recompute:
    """A function that runs one block with checkpointing, for diffusers' `enable_gradient_checkpointing`.

    The products of a block are kept if all of them fit into the budget. The first block of a new kind, or with inputs
    of new shapes, keeps none: their size is measured first.

    For a compiled block, the compiler chooses what to keep, products first. Such a block is not recomputed if the
    budget has room for that.

    budget: bytes kept at a time. They count from a forward pass to its backward pass, which must follow.
    on_host: True to offload the inputs of recomputed blocks.
    """

    def __init__(self, budget: float, *, compiled: bool = False, on_host: bool = False) -> None:
        self.room = budget
        self.inputs: Callable[[], Context] = saved_on_host if on_host else nullcontext
        self.sizes: dict[object, int] = {}
        self.compiled = compiled

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Return the block's output; activations for the backward pass are kept or recomputed."""
        if is_sampling():
            return block(*args)
        kind = (type(block), *(arg.shape for arg in tree_leaves(args) if isinstance(arg, Tensor)))
        keep = self.sizes.get(kind, self.room + 1) <= self.room
        as_now = deterministic(torch.get_deterministic_debug_mode())  # also in the backward pass
        run = partial(checkpoint, as_now(block.__call__), *args, use_reentrant=False)
        if self.compiled and self.room > 0 and (keep or kind not in self.sizes):
            return self._run_kept(kind, block, args)
        with self.inputs():
            if self.compiled or (not keep and (kind in self.sizes or self.room <= 0)):
                return run()
            return run(context_fn=partial(self._contexts, kind, keep))

    def _run_kept(self, kind: object, block: nn.Module, args: tuple[Any, ...]) -> Any:
        """Run the block without recomputation, and measure what its graph keeps."""
        external = {t.untyped_storage()._cdata for t in (*args, *block.parameters()) if isinstance(t, Tensor)}
        kept: dict[int, int] = {}

        def record(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept.setdefault(storage._cdata, storage.nbytes())
            return tensor

        with saved_tensors_hooks(record, lambda tensor: tensor):
            out = block(*args)
        size = sum(size for key, size in kept.items() if key not in external)
        self.sizes[kind] = max(size, self.sizes.get(kind, 0))  # smaller if inputs need no gradient
        self.room -= size

        def release(grad: Tensor) -> None:
            self.room += size

        trained = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        register_multi_grad_hook(trained, release, mode="any")
        return out

    def _contexts(self, kind: object, keep: bool) -> tuple[Context, Context]:
        """Return the contexts of a block's forward pass and of its recomputation in the backward pass."""
        products: dict[int, tuple[Tensor, int]] = {}  # each with its required version at the end

        def policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if not op.overloadpacket.__name__.startswith(PRODUCTS):
                return CheckpointPolicy.PREFER_RECOMPUTE
            for out in tree_leaves(context.op_output):
                if isinstance(out, Tensor):
                    products[out.untyped_storage()._cdata] = out, out._version + op._schema.is_mutable
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        # addmm_ writes to the product that it adds to; both are kept and are the same tensor.
        create = torch.utils.checkpoint.create_selective_checkpoint_contexts
        forward, backward = create(policy, allow_cache_entry_mutation=True)
        return self._forward_context(forward, kind, keep, products), self._recompute_context(backward, kind, keep)

    @contextmanager
    def _forward_context(
        self, mode: Context, kind: object, keep: bool, products: dict[int, tuple[Tensor, int]]
    ) -> Iterator[None]:
        with mode:
            yield
        if any(tensor._version != version for tensor, version in products.values()):
            raise RuntimeError("a block must not write into a product's output, which could then not be kept")
        self.sizes[kind] = sum(tensor.nbytes for tensor, _ in products.values())
        self.room -= keep * self.sizes[kind]
        products.clear()

    @contextmanager
    def _recompute_context(self, mode: Context, kind: object, keep: bool) -> Iterator[None]:
        try:
            with mode:
                yield
        finally:  # torch ends it with an exception as soon as the backward pass has its inputs
            self.room += keep * self.sizes[kind]


def recompute_blocks(net: nn.Module, run_block: Recompute) -> None:
    """Make a diffusers or transformers model run its blocks through `run_block` if gradients are required."""
    if hasattr(net, "enable_gradient_checkpointing"):
        net.enable_gradient_checkpointing(run_block)  # type: ignore[operator]  # all diffusers models have it
        return
    blocks = [module for module in net.modules() if hasattr(module, "gradient_checkpointing")]

    def choose(module: nn.Module, args: object) -> None:
        for block in blocks:  # transformers checks whether a block is in training; dropout checks its submodules
            block.training = torch.is_grad_enabled()

    for block in blocks:
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, run_block  # type: ignore[assignment]
    net.register_forward_pre_hook(choose)
