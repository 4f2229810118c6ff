"""Settings that trainers of token policies share. Imports no torch."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from omni_rl.settings.args import RunArgs, WindowArgs, load_records, num_ranks, num_samplers, read_prompts
from omni_rl.settings.eval_sets import ThoughtEval, TokenEval, check_sets
from omni_rl.settings.fields import MAY_CHANGE, SCORER_FLAG, SECRET, at_least, between, flag, require
from omni_rl.settings.groups import Lora, Scorer
from omni_rl.settings.rules import check_run, check_scored, check_window

if TYPE_CHECKING:
    from omni_reward.rules import Rules


@dataclass(frozen=True)
class TokenLora(Lora):
    """LoRA adapters of a language model."""

    target_parameters: str = ""  # Parameters of experts that get adapters too, as mlp.experts.down_proj, with commas


@dataclass(frozen=True)
class ToolCalls:
    """A function that answers can call; they continue after its result."""

    function: str = ""  # Function of a text, as python:FILE.py:FUNCTION; the update masks its results
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

    name: Annotated[str, SCORER_FLAG, MAY_CHANGE] = ""  # Scorer to start, the term scorer of --reward
    url: Annotated[str, SECRET] = ""  # URL of a running server to use instead, or several with commas

    @property
    def given(self) -> bool:
        """True if there is a scorer."""
        return bool(self.name or self.url)


@dataclass(frozen=True)
class TokenArgs(RunArgs):
    """Settings of a run on text."""

    OFFLOAD = "optimizer activations"
    RATES = (1e-6, 3e-6)

    # Model
    lora: TokenLora = TokenLora()  # Adapters

    # Sampling
    max_prompt_tokens: Annotated[int, at_least(0)] = 0  # Tokens of a prompt and its media, at most; 0 is any
    max_new_tokens: Annotated[int, between(1, 2**20)] = 1024  # Tokens of an answer, at most
    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of the rollout and of trained log-probs
    draw_ahead: Annotated[int, at_least(0)] = 0  # Updates by which a step is sampled in advance

    tool: ToolCalls = ToolCalls()  # A function that answers may call

    # Data
    group_size: Annotated[int, between(2, 65_536)] = 16  # Samples of each prompt
    eval: TokenEval = TokenEval()  # Held-out prompts, and what is done with them

    # Engine
    engine: Literal["transformers", "vllm"] = "transformers"  # Engine that samples, in the trainer's process
    gpu_memory_utilization: Annotated[float, between(1e-3, 1)] = 0.3  # Share of the device's memory for vllm

    # Scorer
    reward: str = ""  # Rules that grade answers, as in 'math + 0.1*format=PATTERN'; empty: exact, or scorer
    scorer: TokenScorer = TokenScorer()  # The reward server

    # Optimizer
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 3e-6 with LoRA, 1e-6 without
    tokens_per_batch: Annotated[int, at_least(0)] = 0  # Padded tokens per forward of the update, at most; 0 is any

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
    check_sets(args.eval.all_sets, lambda place: load_records(args, place))


@dataclass(frozen=True)
class ThinkingArgs(WindowArgs):
    """Settings of a run that writes a thought before each image."""

    RATES = (1e-5, 1e-4)

    # Optimizer
    lr: Annotated[float | None, between(0, 1)] = None  # Learning rate of AdamW; none: 1e-4 with LoRA, 1e-5 without

    # Sampling
    max_thought_tokens: Annotated[int, between(1, 65_536)] = 512  # Tokens of a thought, at most
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
