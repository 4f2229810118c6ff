"""Settings that trainers of token policies share. Imports no torch."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

from omni_rl.settings.args import (
    RunArgs,
    WindowArgs,
    check_run,
    check_scored,
    check_window,
    num_ranks,
    num_samplers,
    read_prompts,
)
from omni_rl.settings.eval_sets import ThoughtEval, TokenEval, check_sets
from omni_rl.settings.fields import at_least, between, flag, require
from omni_rl.settings.groups import TokenLora, TokenScorer, ToolCalls

if TYPE_CHECKING:
    from omni_reward.rules import Rules


@dataclass(frozen=True)
class TokenArgs(RunArgs):
    """Settings of a run on text."""

    OFFLOAD = "optimizer activations"
    RATES = (1e-6, 3e-6)

    # Model
    lora: TokenLora = TokenLora()  # Adapters

    # Sampling
    max_prompt_tokens: Annotated[int, at_least(0)] = 0  # Most tokens of a prompt and its media; 0 is any
    max_new_tokens: Annotated[int, between(1, 2**20)] = 1024  # Most tokens of an answer
    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of the rollout and of trained log-probs
    draw_ahead: Annotated[int, at_least(0)] = 0  # Updates for which a step's samples wait while they are scored

    tool: ToolCalls = ToolCalls()  # A function that answers may call

    # Data
    group_size: Annotated[int, between(2, 65_536)] = 16  # Samples of each prompt
    eval: TokenEval = TokenEval()  # Held-out prompts, and what is done with them

    # Engine
    engine: Literal["transformers", "vllm"] = "transformers"  # Engine that samples, in the trainer's process
    gpu_memory_utilization: Annotated[float, between(1e-3, 1)] = 0.3  # Share of the device's memory for vllm

    # Scorer
    reward: str = ""  # Rules that grade answers, as in 'math + 0.1*format=PATTERN' (default: exact, or scorer)
    scorer: TokenScorer = TokenScorer()  # The reward server

    # Optimizer
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW (default: 3e-6 with LoRA, 1e-6 without)
    tokens_per_batch: Annotated[int, at_least(0)] = 0  # Most tokens of a forward in the update, with padding; 0 is any

    @property
    def has_trained_engine(self) -> bool:
        """True if the engine samples with the net that is trained."""
        return self.engine != "vllm"

    @property
    def rules(self) -> "Rules":
        """The rules of --reward, or their default."""
        from omni_reward.rules import SCORER, open_rules

        return open_rules(self.reward or (SCORER if self.scorer.given else "exact"), remote=True)


def check_tokens(args: TokenArgs) -> None:
    """Check what `check_run` does, the settings above, and the files of prompts.

    Raises:
        ValueError: as `check_run`.
    """
    from omni_reward.rules import SCORER

    check_run(args)
    samples, unit = args.prompts_per_step * args.group_size, args.batch_size * num_ranks()
    rule = f"--batch-size times ranks ({unit}) must divide a step's samples ({samples}), prompts times --group-size"
    require((samples % unit == 0, f"{rule}, got {args.batch_size}"))
    own = [held.temperature for held in args.eval.sets if held.temperature is not None]
    temperatures = [args.temperature, args.eval.temperature, *own]  # vLLM would draw with 0.01 for any below
    require(
        (not args.lora.target_parameters or not args.sharding.experts,
         "--lora.target-parameters does not go with --sharding.experts"),
        (not args.lora.target_parameters or args.lora.init != "pissa",
         "--lora.target-parameters does not go with --lora.init pissa, which is of linear layers"),
        (not args.lora.target_parameters or not (args.lora.use_dora or args.lora.dtype == "float32"),
         "--lora.target-parameters does not go with --lora.use-dora or --lora.dtype, which are of linear layers"),
        (args.engine != "vllm" or not args.tool.function,
         "--tool.function needs --engine transformers, got --engine vllm"),
        (args.engine != "vllm" or find_spec("vllm"),
         "--engine vllm must be installed: pip install 'omni-rollout[vllm]', or for a CPU make install-vllm"),
        (args.engine != "vllm" or all(0.01 <= value <= 2 for value in temperatures),
         f"--temperature, --eval.temperature and those of eval must be from 0.01 to 2 for vllm, got {temperatures}"),
        (args.engine != "vllm" or args.dtype != "float16",
         "--dtype float16 needs --engine transformers, got --engine vllm"),
        (args.engine != "vllm" or not args.memory.device_gb,
         "--memory.device-gb plans the embedded engine only, got --engine vllm"),
        (args.engine != "vllm" or args.memory.base_dtype == "auto",
         f"--memory.base-dtype {args.memory.base_dtype} needs the embedded engine, got --engine {args.engine}"),
    )  # fmt: skip
    tool, _ = args.tool.function, args.tool.texts
    if tool:
        from omni_reward.scorers.user import PREFIX, check_user

        file = args.tool.file
        is_whole = tool.startswith(PREFIX) and file.suffix == ".py" and file.is_file()
        require((is_whole, f"--tool.function must be python:FILE.py:FUNCTION with a file that exists, got {tool}"))
        with flag("--tool.function: "):
            check_user(tool, "text")
    with flag("--reward: "):
        asks = SCORER in args.rules.reward.specs.values()
    require(
        (asks or not args.scorer.given, f"--reward must name {SCORER}, as --scorer does, got {args.reward}"),
        (args.scorer.given or not asks, f"--scorer or --scorer.url must be given for {SCORER} in --reward"),
    )
    read_prompts(args)
    check_sets(args.eval.all_sets, media_root=args.media_root)


@dataclass(frozen=True)
class ThinkingArgs(WindowArgs):
    """Settings of a run that writes a thought before each image."""

    RATES = (1e-5, 1e-4)

    # Optimizer
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW (default: 1e-4 with LoRA, 1e-5 without)

    # Sampling
    max_thought_tokens: Annotated[int, between(1, 65_536)] = 512  # Most tokens of a thought
    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of a rollout's thoughts

    # Data
    eval: ThoughtEval = ThoughtEval()  # Held-out prompts, and what is done with them

    # Scorer
    thought_reward: str = ""  # Rules that grade thoughts, added to the image's score, as in '0.5*contains'

    @property
    def rules(self) -> "Rules | None":
        """The rules that grade thoughts, if any."""
        from omni_reward.rules import open_rules

        return open_rules(self.thought_reward) if self.thought_reward else None


def check_thinking(args: ThinkingArgs) -> None:
    """Check what `check_scored` does, the window, and the settings above.

    Raises:
        ValueError: as `check_scored`, or for these settings.
    """
    check_window(args)
    check_scored(args)
    with flag("--thought-reward: "):
        _ = args.rules
    require(
        (not num_samplers(args), "--sharding.rollout-ranks samples no thoughts"),
        (args.has_trained_engine, f"--engine must be diffusers, which alone writes thoughts, got {args.engine}"),
        (not args.memory.device_gb, "--memory.device-gb does not plan thoughts, whose lengths nobody knows"),
        (not args.compile, "--compile does not go with thoughts, whose lengths differ from token to token"),
    )
