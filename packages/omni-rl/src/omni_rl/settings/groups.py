"""Groups of settings that trainers list. Imports no torch.

A group is a prefix of flags and a table of a TOML file, unless a trainer lists it as `Flat`. The comment beside a field
is its help. An attribute without a type is not a setting: it is the value for trainers whose group lacks the setting.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from omni_rl.run.engines import ENGINES, RolloutDtype
from omni_rl.settings.fields import MAY_CHANGE, REQUIRED, SCORER_FLAG, SECRET, at_least, between

Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]
Dtype = Literal["float32", "bfloat16", "float16"]
Shard = Literal["auto", "none", "ddp", "fsdp2"]
Unshard = Literal["auto", "none", "rollout", "all"]
OnFailure = Literal["raise", "mask", "mask_group"]
BaseDtype = Literal["auto", "int8", "fp8", "nf4"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Tracking:
    """Trackers besides the report, and notifications."""

    to: Annotated[str, MAY_CHANGE] = "none"  # Trackers: tensorboard,wandb,trackio,swanlab,mlflow
    project: Annotated[str, MAY_CHANGE] = "omni-rl"  # Project name in the trackers
    notify: Annotated[str, MAY_CHANGE, SECRET] = ""  # Command that reads alarms and the end of the run on stdin


@dataclass(frozen=True)
class Run:
    """The run: its name, its length, its files."""

    name: Annotated[str, MAY_CHANGE] = "run"  # Name of the run; the same command resumes runs/NAME
    seed: Annotated[int, between(0, 2**63 - 1)] = 0  # Seed of all random numbers
    train_steps: Annotated[int, at_least(0)] = 300  # Training steps; each is one rollout and its updates
    save_every: Annotated[int, at_least(1), MAY_CHANGE] = 10  # Training steps between checkpoints
    keep_checkpoints: Annotated[int, at_least(1), MAY_CHANGE] = 2  # Number of newest checkpoints to keep
    checkpoint_url: Annotated[str, MAY_CHANGE] = ""  # URL for checkpoints, for machines without a shared disk
    async_save: Annotated[bool, MAY_CHANGE] = True  # Write checkpoints in the background, from a copy on the host
    tracking: Tracking = Tracking()  # Trackers that also get metrics and images
    profile: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Step to trace, phase by phase, counted from 1; 0: none
    hang_timeout_s: Annotated[float, between(1, 1e6), MAY_CHANGE] = 1800.0  # Timeout in seconds for a silent rank
    verbose: Annotated[bool, MAY_CHANGE] = False  # Also show warnings and progress bars of other libraries
    dry_run: Annotated[bool, MAY_CHANGE] = False  # Print the settings and the plan of a step, and exit


@dataclass(frozen=True)
class Policy:
    """The model, and how it computes."""

    model: Annotated[str, REQUIRED] = ""  # Folder or hub id of a diffusers pipeline
    dtype: Dtype = "float32"  # Data type of the frozen weights; trained weights are float32
    init_weights: str = ""  # Folder with trained weights to start from, a LoRA adapter or full weights
    ema_decay: Annotated[float, between(0, 0.99999)] = 0.0  # Decay of the moving average (EMA) of the weights; 0: off
    attention: Annotated[Attention, MAY_CHANGE] = "auto"  # Attention kernels, named as in torch
    deterministic: Annotated[bool, MAY_CHANGE] = True  # Use deterministic algorithms in backward passes


@dataclass(frozen=True)
class MediaPolicy(Policy):
    """The model of images, videos or sound, and how it computes."""

    train_experts: Literal["both", "high", "low"] = "both"  # Experts to train, if the model has two
    compile: Annotated[bool, MAY_CHANGE] = False  # Compile the blocks of the denoiser, for rollout and update


@dataclass(frozen=True)
class Data:
    """Prompts, and the number of samples per step and per forward."""

    prompts: Annotated[str, REQUIRED] = ""  # Training prompts: a file, a folder or a data set on the hub
    prompt_key: str = ""  # Key or column of the prompt; empty: prompt or messages
    media_root: Annotated[str, MAY_CHANGE] = ""  # Folder for media files, in addition to that of the prompts
    prompts_per_step: Annotated[int, at_least(1)] = 32  # Prompts in a training step, over all ranks
    group_size: Annotated[int, between(1, 65_536)] = 16  # Samples of each prompt
    batch_size: Annotated[int, between(1, 65_536)] = 16  # Samples per forward of a rank, in rollout and update
    num_minibatches: Annotated[int, at_least(1)] = 1  # Optimizer steps per rollout


@dataclass(frozen=True)
class GroupData(Data):
    """Prompts whose samples are compared with each other."""

    group_size: Annotated[int, between(2, 65_536)] = 16  # Samples of each prompt


@dataclass(frozen=True)
class TokenData(Data):
    """Prompts whose answers are packed."""

    tokens_per_batch: Annotated[int, at_least(0)] = 0  # Maximum padded tokens per forward of the update; 0: no limit


@dataclass(frozen=True)
class TokenGroupData(TokenData):
    """Prompts whose answers are compared with each other."""

    group_size: Annotated[int, between(2, 65_536)] = 16  # Samples of each prompt


@dataclass(frozen=True)
class Sampling:
    """Sampling of images, videos or sound."""

    draw_ahead = 0

    height: Annotated[int, between(1, 2**14)] = 512  # Height in pixels
    width: Annotated[int, between(1, 2**14)] = 512  # Width in pixels
    num_frames: Annotated[int, between(1, 2**14)] = 1  # Frames of a video; 1 for images
    frame_rate: Annotated[float, between(1e-3, 1e3)] = 24.0  # Frames per second of a video
    num_inference_steps: Annotated[int, between(2, 10_000)] = 10  # Denoising steps of a rollout
    guidance_scale: Annotated[float, between(0, 1e3)] = 1.0  # Guidance scale, if the pipeline has one; usually 1 is off
    true_cfg_scale: Annotated[float, between(1, 1e3)] = 1.0  # True CFG scale, if the pipeline has one; 1 is off
    guidance: str = ""  # Other guidance settings of the model's pipeline, as name=value,name=value
    engine: str = "diffusers"  # Sampling engine in the trainer's process: diffusers or vllm-omni

    @property
    def has_trained_engine(self) -> bool:
        """True if the engine samples with the net that is trained."""
        return not ENGINES[self.engine].library


@dataclass(frozen=True)
class RolloutSampling(Sampling):
    """Sampling of images, videos or sound to train on."""

    draw_ahead: Annotated[int, at_least(0)] = 0  # Number of updates by which sampling runs ahead of training


@dataclass(frozen=True)
class ThinkingSampling(RolloutSampling):
    """Sampling of thoughts and images to train on."""

    max_thought_tokens: Annotated[int, between(1, 65_536)] = 512  # Maximum tokens of a thought
    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of thoughts in a rollout


@dataclass(frozen=True)
class TokenSampling:
    """Sampling of answers."""

    draw_ahead = 0

    max_prompt_tokens: Annotated[int, at_least(0)] = 0  # Maximum tokens of a prompt and its media; 0: no limit
    max_new_tokens: Annotated[int, between(1, 2**20)] = 1024  # Maximum tokens of an answer
    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of the rollout and of the log-probs
    engine: Literal["transformers", "vllm"] = "transformers"  # Sampling engine in the trainer's process
    gpu_memory_utilization: Annotated[float, between(1e-3, 1)] = 0.3  # Fraction of the device's memory for vllm

    @property
    def has_trained_engine(self) -> bool:
        """True if the engine samples with the net that is trained."""
        return self.engine != "vllm"


@dataclass(frozen=True)
class TokenRolloutSampling(TokenSampling):
    """Sampling of answers to train on."""

    draw_ahead: Annotated[int, at_least(0)] = 0  # Number of updates by which sampling runs ahead of training


@dataclass(frozen=True)
class Window:
    """The stochastic steps of a rollout."""

    noise_level: Annotated[float, at_least(1e-6)] = 0.7  # Strength of the noise, as the step rule defines it
    window_size: int | None = None  # Number of stochastic steps in a rollout; none: all but the last
    window_low: Annotated[int, at_least(0)] = 0  # First step that may be stochastic
    window_high: int | None = None  # One past the last step that may be stochastic; none: the last step
    timestep_fraction: Annotated[float, between(1e-6, 1)] = 1.0  # Fraction of the stochastic steps trained per sample

    def steps(self, sampling: Sampling) -> tuple[int, int]:
        """Return the first step that may be stochastic, and one past the last."""
        return self.window_low, sampling.num_inference_steps - 1 if self.window_high is None else self.window_high


@dataclass(frozen=True)
class Advantages:
    """Comparison of the samples of a group."""

    reward_parts = ""

    adv_std: Literal["batch", "group", "none"] = "batch"  # Samples with the standard deviation that divides advantages
    adv_correction: Literal[0, 1] = 1  # The variance divides by n - correction (0: population, 1: sample)


@dataclass(frozen=True)
class JudgedAdvantages(Advantages):
    """Comparison of the samples of a group by one reward or several."""

    reward_parts: str = ""  # Parts of the score to normalize separately and add, such as ocr=0.7,jpeg=0.3


@dataclass(frozen=True)
class Sharding:
    """Distribution of the weights over ranks."""

    context_parallel, rollout_ranks = 1, 0

    mode: Annotated[Shard, MAY_CHANGE] = "auto"  # Replicas (ddp) or shards; auto: ddp for LoRA, else fsdp2
    size: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Ranks that share one copy of the weights in fsdp2; 0: all
    unshard: Annotated[Unshard, MAY_CHANGE] = "auto"  # Phases in which fsdp2 keeps the weights gathered
    experts: Annotated[bool, MAY_CHANGE] = False  # With fsdp2, keep each expert on one rank and send tokens to it


@dataclass(frozen=True)
class MediaSharding(Sharding):
    """Distribution of the weights and of each sample's tokens over ranks."""

    context_parallel: Annotated[int, at_least(1), MAY_CHANGE] = 1  # Consecutive ranks that compute each sample together


@dataclass(frozen=True)
class RolloutSharding(MediaSharding):
    """Distribution of the weights, of each sample's tokens, and of sampling and training over ranks."""

    rollout_ranks: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Number of ranks that only sample, the last ones


@dataclass(frozen=True)
class Lora:
    """LoRA adapters."""

    target_parameters = ""

    rank: Annotated[int, between(0, 65_536)] = 0  # Rank of the adapters; 0 trains all weights of the denoiser
    alpha: Annotated[int, at_least(0)] = 0  # The scale is alpha / rank; 0: a scale of about 2
    use_rslora: bool = False  # Use the scale alpha / sqrt(rank)
    use_dora: bool = False  # Also train the norm of each row of a changed weight
    dtype: Literal["auto", "float32"] = "auto"  # Data type of the adapters' computations; auto is --dtype
    targets: str = ""  # Layers that get adapters, separated by commas; empty: the model's own list
    exclude: str = ""  # Layers to exclude, separated by commas
    init: Literal["default", "gaussian", "pissa"] = "default"  # Initial A: random; pissa: A and B from W


@dataclass(frozen=True)
class Optim:
    """AdamW and its learning rate."""

    lr_scheduler_type: Schedule = "constant"  # Schedule of lr: constant, or falling to 0
    warmup_steps: Annotated[int, at_least(0)] = 0  # Training steps over which the learning rate rises
    weight_decay: Annotated[float, between(0, 1e3)] = 1e-4  # Weight decay of AdamW
    max_grad_norm: Annotated[float, at_least(1e-12)] = 1.0  # Gradient norm above which gradients are clipped
    adam_beta1: Annotated[float, between(0, 0.999999)] = 0.9  # Decay of the mean of gradients, per update
    adam_beta2: Annotated[float, between(0, 0.999999)] = 0.999  # Decay of the mean of squared gradients, per update
    adam_epsilon: Annotated[float, at_least(1e-30)] = 1e-8  # Epsilon of AdamW, added to the denominator


@dataclass(frozen=True)
class MediaOptim(Optim):
    """AdamW and its learning rate in a run on images, videos or sound."""

    low_expert_lr: float | None = None  # Learning rate of the low-noise expert; none: --lr


@dataclass(frozen=True)
class Memory:
    """Ways to save memory. OFFLOAD: the parts that `offload` may name, from the fastest to the slowest to copy."""

    OFFLOAD = "optimizer activations"

    gradient_checkpointing: bool = False  # Recompute activations in the backward pass
    keep_products_gb: Annotated[float, at_least(0), MAY_CHANGE] = 0.0  # GB of matrix products not to recompute
    offload: Annotated[str, MAY_CHANGE] = ""  # Parts to offload: encoder, engine, optimizer, activations, blocks
    base_dtype: BaseDtype = "auto"  # Format of the blocks' frozen weights; auto is --dtype
    engine_sleep: Annotated[bool, MAY_CHANGE] = True  # Move an engine's own weights to the host during updates
    device_gb: Annotated[float, at_least(0), MAY_CHANGE] = 0.0  # Device memory in GB for the plan of a dry run


@dataclass(frozen=True)
class MediaMemory(Memory):
    """Ways to save memory in a run on images, videos or sound."""

    OFFLOAD = "encoder engine optimizer activations blocks"

    decode_batch_size: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Samples decoded at once; 0: 4 megapixels
    rollout_dtype: RolloutDtype = "auto"  # Format of the engine's own linear layers; auto is --dtype
    decode_tile: Annotated[int, at_least(0)] = 0  # Longest side of a decoded tile in pixels; 0: no tiles
    text_cache_mb: Annotated[float, at_least(0), MAY_CHANGE] = 1024.0  # MB per rank for encoded texts
    text_cache: Annotated[str, MAY_CHANGE] = ""  # Folder for encoded texts, shared by runs; empty: none


@dataclass(frozen=True)
class Scorer:
    """Requests to reward servers."""

    name = url = watch_url = ""
    sleep = False

    token_file: Annotated[str, SECRET] = ""  # File with the token of the reward servers
    timeout_s: Annotated[float, between(1e-3, 1e6), MAY_CHANGE] = 120.0  # Timeout in seconds for scores
    batch_size: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Maximum samples per request; 0: no limit
    proxy: Annotated[Literal["none", "env"], MAY_CHANGE] = "none"  # Proxy for other hosts; env: HTTP_PROXY
    on_failure: Annotated[OnFailure, MAY_CHANGE] = "raise"  # End the run, or drop the samples or their groups

    @property
    def is_set(self) -> bool:
        """True if there is a scorer."""
        return bool(self.name or self.url)

    @property
    def flag(self) -> str:
        """The flag of the scorer: --scorer if the run starts its server, else --scorer.url."""
        return "--scorer" if self.name else "--scorer.url"


@dataclass(frozen=True)
class MediaScorer(Scorer):
    """Requests of a run on images, videos or sound."""

    watch_url: Annotated[str, SECRET] = ""  # URL of a second server, for evaluations only


@dataclass(frozen=True)
class ScoredScorer(MediaScorer):
    """Requests of a run whose samples a reward server grades."""

    name: Annotated[str, SCORER_FLAG, MAY_CHANGE] = ""  # Scorer to start, such as "ocr --option reading=line"
    url: Annotated[str, SECRET] = ""  # URLs, separated by commas, of running reward servers to use instead
    sleep: Annotated[bool, MAY_CHANGE] = False  # Offload the scorer's weights except while it scores


@dataclass(frozen=True)
class Streams:
    """Video and sound sampled as one latent."""

    reward_media = ""

    freeze_audio: bool = False  # Freeze the weights that act only on the sound

    @property
    def has_separate_losses(self) -> bool:
        """True if frames and sound have separate losses."""
        return False


@dataclass(frozen=True)
class JudgedStreams(Streams):
    """Video and sound that are graded separately."""

    reward_media: str = ""  # Parts of the score that grade one medium, such as clap=audio,hpsv3=video
    sound_weight: Annotated[float | None, between(0, 1)] = None  # Weight of the sound in the loss; none: by size

    @property
    def has_separate_losses(self) -> bool:
        """True if frames and sound have separate losses."""
        return bool(self.reward_media) or self.sound_weight is not None


@dataclass(frozen=True)
class TokenLora(Lora):
    """LoRA adapters of a language model."""

    target_parameters: str = ""  # Expert parameters with adapters, such as mlp.experts.down_proj, separated by commas


@dataclass(frozen=True)
class ToolCalls:
    """A function that answers can call, to continue with its result."""

    function: str = ""  # Function of a text: python:FILE.py:FUNCTION; its results are masked in the update
    marks: str = "<tool> </tool> <result> </result>"  # Texts around a call, and around its result

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """The texts of the marks.

        Raises:
            ValueError: there are not four, or the last ends with the second.
        """
        marks = self.marks.split()
        if len(marks) != 4 or marks[3].endswith(marks[1]):
            rule = "--tool.marks must be four texts, and the last must not end with the second"
            raise ValueError(f"{rule}, got {self.marks!r}")
        return marks[0], marks[1], marks[2], marks[3]

    @property
    def file(self) -> Path:
        """The file of the function."""
        return Path(self.function.partition(":")[2].rpartition(":")[0])


@dataclass(frozen=True)
class TokenScorer(Scorer):
    """Requests of a run on text."""

    name: Annotated[str, SCORER_FLAG, MAY_CHANGE] = ""  # Scorer to start, for the term scorer of --reward
    url: Annotated[str, SECRET] = ""  # URLs, separated by commas, of running servers to use instead
