"""Groups of settings that trainers share, each a table of a TOML file. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from omni_rl.settings.fields import MAY_CHANGE, SECRET, SHOWN, Was, at_least, between

Shard = Literal["auto", "none", "ddp", "fsdp2"]
Unshard = Literal["auto", "none", "rollout", "all"]
OnFailure = Literal["raise", "mask", "mask_group"]
BaseDtype = Literal["auto", "int8", "fp8", "nf4"]
RolloutDtype = Literal["auto", "int8", "fp8"]
Schedule = Literal["constant", "linear", "cosine"]
LR_DECAY = Was("lr_decay", ("constant", "linear"))


@dataclass(frozen=True)
class Tracking:
    """Trackers beside the report, and who is notified."""

    to: Annotated[str, Was("track"), MAY_CHANGE, SHOWN] = "none"  # Trackers: tensorboard,wandb,trackio,swanlab,mlflow
    project: Annotated[str, Was(), MAY_CHANGE] = "omni-rl"  # Project name in the trackers
    notify: Annotated[str, MAY_CHANGE, SECRET] = ""  # Command that gets each alarm, and the end, on its standard input


@dataclass(frozen=True)
class Sharding:
    """Spread of the weights over ranks."""

    mode: Annotated[Shard, Was("shard"), MAY_CHANGE] = "auto"  # Copies (ddp) or parts; auto: ddp for LoRA, else fsdp2
    size: Annotated[int, Was("shard_size"), at_least(0), MAY_CHANGE] = 0  # Ranks that share a copy in fsdp2; 0 is all
    unshard: Annotated[Unshard, Was(), MAY_CHANGE] = "auto"  # Phases in which fsdp2 keeps gathered weights
    experts: Annotated[bool, MAY_CHANGE] = False  # In fsdp2 send tokens to the ranks of their experts, which stay there


@dataclass(frozen=True)
class MediaSharding(Sharding):
    """Spread of the weights, and of each sample's tokens, over ranks."""

    context_parallel: Annotated[int, at_least(1), MAY_CHANGE] = 1  # Ranks in a row that compute each sample together


@dataclass(frozen=True)
class RolloutSharding(MediaSharding):
    """Spread of the weights, of each sample's tokens, and of sampling and training, over ranks."""

    rollout_ranks: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Ranks that only sample, the last ones


@dataclass(frozen=True)
class Lora:
    """LoRA adapters."""

    rank: Annotated[int, between(0, 65_536)] = 0  # Rank of the adapters; 0 trains all weights of the denoiser
    alpha: Annotated[int, at_least(0)] = 0  # Scale times rank: the scale is alpha / rank; 0 is a scale of about 2
    use_rslora: bool = False  # Make the scale alpha / sqrt(rank)
    use_dora: bool = False  # Train the norm of each row of a changed weight too
    dtype: Literal["auto", "float32"] = "auto"  # In which adapters compute: that of --dtype, or float32 as in peft
    targets: str = ""  # Layers that get adapters, separated by commas (default: the model's own list)
    exclude: str = ""  # Those of them that get none, separated by commas
    init: Literal["default", "gaussian", "pissa"] = "default"  # First values of A: random, or pissa: A and B of W


@dataclass(frozen=True)
class TokenLora(Lora):
    """LoRA adapters of a language model."""

    target_parameters: str = ""  # Parameters of experts that get adapters too, as mlp.experts.down_proj, with commas


@dataclass(frozen=True)
class Optim:
    """AdamW and its learning rate."""

    lr_scheduler_type: Annotated[Schedule, LR_DECAY] = "constant"  # How lr falls to 0 by the last step, if at all
    warmup_steps: Annotated[int, Was(), at_least(0)] = 0  # Training steps over which the learning rate rises
    weight_decay: Annotated[float, Was(), between(0, 1e3)] = 1e-4  # Weight decay of AdamW
    max_grad_norm: Annotated[float, Was(), at_least(1e-12)] = 1.0  # Norm down to which larger gradients are scaled
    adam_beta1: Annotated[float, between(0, 0.999999)] = 0.9  # Decay of the mean of gradients, per update
    adam_beta2: Annotated[float, between(0, 0.999999)] = 0.999  # Decay of the mean of their squares, per update
    adam_epsilon: Annotated[float, at_least(1e-30)] = 1e-8  # Added to the root of that mean


@dataclass(frozen=True)
class MediaOptim(Optim):
    """AdamW and its learning rate in a run on images, videos or sound."""

    low_expert_lr: Annotated[float | None, Was()] = None  # Learning rate of the low-noise expert (default: --lr)


@dataclass(frozen=True)
class RewardGradientOptim(MediaOptim):
    """AdamW and its learning rate in a run on the gradient of a reward."""

    max_grad_norm: Annotated[float, Was(), at_least(1e-12)] = 0.1  # Norm down to which larger gradients are scaled


@dataclass(frozen=True)
class Memory:
    """Ways to save memory."""

    gradient_checkpointing: Annotated[bool, Was(), SHOWN] = False  # Recompute activations in the backward pass
    keep_products_gb: Annotated[float, Was(), at_least(0), MAY_CHANGE] = 0.0  # Memory of products not recomputed
    offload: Annotated[str, Was(), MAY_CHANGE] = (
        ""  # Parts offloaded to the host: encoder, engine, optimizer, activations, blocks
    )
    adam_8bit: bool = False  # Keep AdamW's moments in 8 bits, by torchao
    base_dtype: Annotated[BaseDtype, Was()] = "auto"  # Format of the frozen weights of blocks; auto is --dtype
    engine_sleep: Annotated[bool, Was(), MAY_CHANGE] = True  # Move an engine's own weights to the host during updates
    device_gb: Annotated[float, Was("device_memory_gb"), at_least(0), MAY_CHANGE, SHOWN] = (
        0.0  # Accelerator of a dry run's plan
    )


@dataclass(frozen=True)
class MediaMemory(Memory):
    """Ways to save memory in a run on images, videos or sound."""

    decode_batch_size: Annotated[int, Was(), at_least(0), MAY_CHANGE] = 0  # Samples decoded at a time; 0: 4 megapixels
    rollout_dtype: RolloutDtype = "auto"  # Format of the engine's own linear layers; auto is --dtype
    decode_tile: Annotated[int, at_least(0)] = 0  # Longest side of a decoded tile, in pixels; 0: whole
    text_cache_mb: Annotated[float, Was(), at_least(0), MAY_CHANGE] = 1024.0  # Most memory of a rank for encoded texts
    text_cache: Annotated[str, Was(), MAY_CHANGE] = ""  # Folder of encoded texts that runs may share (default: none)


@dataclass(frozen=True)
class Scorer:
    """Requests to reward servers."""

    token_file: Annotated[str, SECRET] = ""  # File with the token of the reward servers
    timeout_s: Annotated[float, between(1e-3, 1e6), MAY_CHANGE] = 120.0  # Longest wait for scores in seconds
    batch_size: Annotated[int, Was("score_batch_size"), at_least(0), MAY_CHANGE] = (
        0  # Most samples in a request; 0: any
    )
    proxy: Annotated[Literal["none", "env"], MAY_CHANGE] = "none"  # Proxy for other hosts; env: HTTP_PROXY
    on_failure: Annotated[OnFailure, Was(), MAY_CHANGE] = "raise"  # End the run, or leave out the samples or groups


@dataclass(frozen=True)
class ToolCalls:
    """A function that answers may call, whose results they go on with."""

    function: str = ""  # The function of a text, as python:FILE.py:FUNCTION; results are masked in the update
    marks: str = "<tool> </tool> <result> </result>"  # Texts around a call, and around its result

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """The texts of the marks.

        Raises:
            ValueError: they are not four, or the last ends as the second.
        """
        found = self.marks.split()
        if len(found) != 4 or found[3].endswith(found[1]):
            rule = "--tool.marks must be four texts, of which the last does not end as the second"
            raise ValueError(f"{rule}, got {self.marks!r}")
        return found[0], found[1], found[2], found[3]

    @property
    def file(self) -> Path:
        """The file of the function."""
        return Path(self.function.partition(":")[2].rpartition(":")[0])


@dataclass(frozen=True)
class TokenScorer(Scorer):
    """Requests of a run on text."""

    name: Annotated[str, Was("scorer"), MAY_CHANGE, SHOWN] = ""  # Scorer to start, which --reward calls scorer
    url: Annotated[str, SECRET, SHOWN] = ""  # URL of a server to use instead, or equal ones with commas

    @property
    def given(self) -> bool:
        """True if there is a scorer."""
        return bool(self.name or self.url)


@dataclass(frozen=True)
class MediaScorer(Scorer):
    """Requests of a run on images, videos or sound."""

    watch_url: Annotated[str, Was("watch_scorer_url"), SECRET] = ""  # URL of a second server, for evaluations only


@dataclass(frozen=True)
class ScoredScorer(MediaScorer):
    """Requests of a run whose samples a reward server grades."""

    name: Annotated[str, Was("scorer"), MAY_CHANGE, SHOWN] = ""  # Scorer to start, as "ocr --option reading=line"
    url: Annotated[str, SECRET, SHOWN] = ""  # URL of a reward server to use instead, or of equal ones, with commas
    sleep: Annotated[bool, MAY_CHANGE] = False  # Keep the scorer's weights on the host except while it scores

    @property
    def given(self) -> bool:
        """True if there is a scorer."""
        return bool(self.name or self.url)


@dataclass(frozen=True)
class Streams:
    """Video and sound that a model samples as one latent."""

    freeze_audio: Annotated[bool, Was()] = False  # Train nothing that acts on the sound only


@dataclass(frozen=True)
class JudgedStreams(Streams):
    """Video and sound that are graded apart."""

    reward_media: Annotated[str, Was()] = ""  # Parts that judge one medium only, as clap=audio,hpsv3=video
    sound_weight: Annotated[float | None, Was(), between(0, 1)] = (
        None  # Share of the sound in the loss (default: by size)
    )
