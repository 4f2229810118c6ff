"""The policy of a run: its nets, its optimizer, and the old, reference and teacher policies."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from omni_train import lora
from omni_train.lora_layer import adapter_tensors
from omni_train.optim import plain_backward
from omni_train.shard import reshard
from omni_train.weights.snapshot import Ema, Snapshot
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer


@dataclass
class Policy:
    """The trained net, with its old, reference and teacher policies.

    ema: the moving average of the trained parameters, for evaluations. old: a copy of them, unless the old policy is an
    adapter. reference_net, teachers: frozen nets, unless these policies are adapters. adapters: the names of frozen
    adapters. unshard: the phases in which sharded weights are gathered once. backward: `backward(loss, of=n)` adds the
    gradient of one of the n losses of an optimizer step. scaler: loss scaler for float16. params: trained parameters.
    """

    net: nn.Module
    optimizer: Optimizer
    ema: Ema
    old: Snapshot | None = None
    reference_net: nn.Module | None = None
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    unshard: tuple[str, ...] = ()
    backward: Callable[..., None] = plain_backward
    scaler: GradScaler | None = None

    def __post_init__(self) -> None:
        self.params = [p for p in self.net.parameters() if p.requires_grad]

    @property
    def averages(self) -> tuple[Snapshot, ...]:
        """The averages that checkpoints contain, besides the net and its optimizer."""
        return (self.ema, self.old) if self.old else (self.ema,)

    @property
    def sampling_tensors(self) -> list[Tensor]:
        """The tensors of sampling policies that change: the trained parameters and the old policy."""
        if "old" in self.adapters:
            layers = lora.lora_layers(self.net).values()
            return [*self.params, *(tensor for layer in layers for tensor in adapter_tensors(layer, "old"))]
        return [*self.params, *(copy for _, copy in self.old.pairs())] if self.old else list[Tensor](self.params)

    @contextmanager
    def use_old(self) -> Iterator[None]:
        """Make `net` the old policy in the `with` block."""
        with self.old.applied() if self.old else lora.adapter(self.net, "old"):
            if self.old:
                reshard(self.net)
            yield
        if self.old:
            reshard(self.net)

    def move_old(self, decay: float) -> None:
        """Update the old policy as an exponential moving average of the trained one with this decay."""
        if self.old:
            self.old.move(decay)
        else:
            lora.ema_update(self.net, "default", "old", decay)

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Yield the policy before training."""
        if self.reference_net is not None:
            yield self.reference_net
        else:
            with lora.adapter(self.net, "reference") if "reference" in self.adapters else lora.reference(self.net):
                yield self.net

    @contextmanager
    def teacher(self, name: str) -> Iterator[nn.Module]:
        """Yield the teacher `name`."""
        if name in self.teachers:
            yield self.teachers[name]
        else:
            with lora.adapter(self.net, f"teacher_{name}"):
                yield self.net
