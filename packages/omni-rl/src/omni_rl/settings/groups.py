"""Groups of settings that trainers share, each a table of a TOML file. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from omni_rl.settings.fields import MAY_CHANGE, Was, at_least

Shard = Literal["auto", "none", "ddp", "fsdp2"]
Unshard = Literal["auto", "none", "rollout", "all"]


@dataclass(frozen=True)
class Tracking:
    """Trackers beside the report."""

    to: Annotated[str, Was("track"), MAY_CHANGE] = "none"  # Trackers: tensorboard, wandb, trackio, with commas between
    project: Annotated[str, Was("project"), MAY_CHANGE] = "omni-rl"  # Project name in the trackers


@dataclass(frozen=True)
class Sharding:
    """Spread of the weights over ranks."""

    mode: Annotated[Shard, Was("shard"), MAY_CHANGE] = "auto"  # Copies (ddp) or parts; auto: ddp for LoRA, else fsdp2
    size: Annotated[int, Was("shard_size"), at_least(0), MAY_CHANGE] = 0  # Ranks that share a copy in fsdp2; 0 is all
    unshard: Annotated[Unshard, Was("unshard"), MAY_CHANGE] = "auto"  # Phases in which fsdp2 keeps gathered weights
