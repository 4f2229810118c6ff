"""Groups of settings that trainers share, each a table of a TOML file. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from omni_rl.settings.fields import MAY_CHANGE, SCORER_FLAG, SECRET, at_least, between

Shard = Literal["auto", "none", "ddp", "fsdp2"]
Unshard = Literal["auto", "none", "rollout", "all"]
OnFailure = Literal["raise", "mask", "mask_group"]
BaseDtype = Literal["auto", "int8", "fp8", "nf4"]
RolloutDtype = Literal["auto", "int8", "fp8"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Tracking:
    """Trackers beside the report, and who is notified."""

    to: Annotated[str, MAY_CHANGE] = "none"  # Trackers: tensorboard,wandb,trackio,swanlab,mlflow
    project: Annotated[str, MAY_CHANGE] = "omni-rl"  # Project name in the trackers
    notify: Annotated[str, MAY_CHANGE, SECRET] = ""  # Command that reads each alarm and the end of the run on stdin


@dataclass(frozen=True)
class Sharding:
    """Spread of the weights over ranks."""

    mode: Annotated[Shard, MAY_CHANGE] = "auto"  # Replicas (ddp) or shards; auto: ddp for LoRA, else fsdp2
    size: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Ranks that share a copy in fsdp2; 0 is all
    unshard: Annotated[Unshard, MAY_CHANGE] = "auto"  # Phases in which fsdp2 keeps gathered weights
    experts: Annotated[bool, MAY_CHANGE] = False  # With fsdp2, keep each expert on one rank and send tokens to it


@dataclass(frozen=True)
class MediaSharding(Sharding):
    """Spread of the weights, and of each sample's tokens, over ranks."""

    context_parallel: Annotated[int, at_least(1), MAY_CHANGE] = 1  # Consecutive ranks that compute each sample together


@dataclass(frozen=True)
class RolloutSharding(MediaSharding):
    """Spread of the weights, of each sample's tokens, and of sampling and training, over ranks."""

    rollout_ranks: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Number of ranks, the last ones, that only sample


@dataclass(frozen=True)
class Lora:
    """LoRA adapters."""

    rank: Annotated[int, between(0, 65_536)] = 0  # Rank of the adapters; 0 trains all weights of the denoiser
    alpha: Annotated[int, at_least(0)] = 0  # The scale is alpha / rank; 0 gives a scale of about 2
    use_rslora: bool = False  # Use the scale alpha / sqrt(rank)
    use_dora: bool = False  # Also train the norm of each row of a changed weight
    dtype: Literal["auto", "float32"] = "auto"  # Data type in which adapters compute: --dtype, or float32
    targets: str = ""  # Layers that get adapters, separated by commas; empty: the model's own list
    exclude: str = ""  # Layers to exclude from these, separated by commas
    init: Literal["default", "gaussian", "pissa"] = "default"  # First values of A: random, or pissa: A and B of W


@dataclass(frozen=True)
class Optim:
    """AdamW and its learning rate."""

    lr_scheduler_type: Schedule = "constant"  # Schedule of lr: constant, or falling to 0
    warmup_steps: Annotated[int, at_least(0)] = 0  # Training steps over which the learning rate rises
    weight_decay: Annotated[float, between(0, 1e3)] = 1e-4  # Weight decay of AdamW
    max_grad_norm: Annotated[float, at_least(1e-12)] = 1.0  # Gradient norm above which gradients are scaled down
    adam_beta1: Annotated[float, between(0, 0.999999)] = 0.9  # Decay of the mean of gradients, per update
    adam_beta2: Annotated[float, between(0, 0.999999)] = 0.999  # Decay of the mean of squared gradients, per update
    adam_epsilon: Annotated[float, at_least(1e-30)] = 1e-8  # Added to the root of the mean square


@dataclass(frozen=True)
class MediaOptim(Optim):
    """AdamW and its learning rate in a run on images, videos or sound."""

    low_expert_lr: float | None = None  # Learning rate of the low-noise expert; none: --lr


@dataclass(frozen=True)
class RewardGradientOptim(MediaOptim):
    """AdamW and its learning rate in a run on the gradient of a reward."""

    max_grad_norm: Annotated[float, at_least(1e-12)] = 0.1  # Gradient norm above which gradients are scaled down


@dataclass(frozen=True)
class Memory:
    """Ways to save memory."""

    gradient_checkpointing: bool = False  # Recompute activations in the backward pass
    keep_products_gb: Annotated[float, at_least(0), MAY_CHANGE] = 0.0  # GB for matrix products that are kept
    offload: Annotated[str, MAY_CHANGE] = ""  # Parts on the host: encoder, engine, optimizer, activations, blocks
    base_dtype: BaseDtype = "auto"  # Format of the frozen weights of blocks; auto is --dtype
    engine_sleep: Annotated[bool, MAY_CHANGE] = True  # Move an engine's own weights to the host during updates
    device_gb: Annotated[float, at_least(0), MAY_CHANGE] = 0.0  # Device memory for the plan of a dry run


@dataclass(frozen=True)
class MediaMemory(Memory):
    """Ways to save memory in a run on images, videos or sound."""

    decode_batch_size: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Samples decoded at a time; 0: 4 megapixels
    rollout_dtype: RolloutDtype = "auto"  # Format of the engine's own linear layers; auto is --dtype
    decode_tile: Annotated[int, at_least(0)] = 0  # Longest side of a decoded tile, in pixels; 0: whole
    text_cache_mb: Annotated[float, at_least(0), MAY_CHANGE] = 1024.0  # Memory per rank for encoded texts
    text_cache: Annotated[str, MAY_CHANGE] = ""  # Folder for encoded texts, shared by runs; empty: none


@dataclass(frozen=True)
class Scorer:
    """Requests to reward servers."""

    token_file: Annotated[str, SECRET] = ""  # File with the token of the reward servers
    timeout_s: Annotated[float, between(1e-3, 1e6), MAY_CHANGE] = 120.0  # Timeout for scores, in seconds
    batch_size: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Samples per request, at most; 0: any
    proxy: Annotated[Literal["none", "env"], MAY_CHANGE] = "none"  # Proxy for other hosts; env: HTTP_PROXY
    on_failure: Annotated[OnFailure, MAY_CHANGE] = "raise"  # End the run, or drop the samples or groups


@dataclass(frozen=True)
class MediaScorer(Scorer):
    """Requests of a run on images, videos or sound."""

    watch_url: Annotated[str, SECRET] = ""  # URL of a second server, for evaluations only


@dataclass(frozen=True)
class ScoredScorer(MediaScorer):
    """Requests of a run whose samples a reward server grades."""

    name: Annotated[str, SCORER_FLAG, MAY_CHANGE] = ""  # Scorer to start, as "ocr --option reading=line"
    url: Annotated[str, SECRET] = ""  # URL of a running reward server to use instead, or several with commas
    sleep: Annotated[bool, MAY_CHANGE] = False  # Keep the scorer's weights on the host except while it scores

    @property
    def given(self) -> bool:
        """True if there is a scorer."""
        return bool(self.name or self.url)


@dataclass(frozen=True)
class Streams:
    """Video and sound that a model samples as one latent."""

    freeze_audio: bool = False  # Freeze weights that act only on the sound


@dataclass(frozen=True)
class JudgedStreams(Streams):
    """Video and sound that are graded separately."""

    reward_media: str = ""  # Parts that grade only one medium, as clap=audio,hpsv3=video
    sound_weight: Annotated[float | None, between(0, 1)] = None  # Share of the sound in the loss; none: by size
