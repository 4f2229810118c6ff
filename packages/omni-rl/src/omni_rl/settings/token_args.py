"""Settings shared by trainers of token policies. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from omni_train.prompts.chats import answer_text
from omni_train.prompts.files import PromptRecord

from omni_rl.settings.args import MediaArgs, RunArgs, load_records, num_ranks, read_prompts
from omni_rl.settings.eval_sets import ThoughtEval, TokenEval, check_sets
from omni_rl.settings.fields import Flat, prefix_errors, require
from omni_rl.settings.groups import ThinkingSampling, TokenData, TokenLora, TokenSampling, ToolCalls, Window
from omni_rl.settings.rules import check_run, check_scored, check_window

if TYPE_CHECKING:
    from omni_reward.rules import Rules


@dataclass(frozen=True)
class TokenArgs(RunArgs):
    """The groups and settings that every trainer on text lists."""

    RATES = (1e-6, 3e-6)

    lora: TokenLora
    data: Flat[TokenData]
    eval: TokenEval
    sampling: Flat[TokenSampling]
    tool: ToolCalls
    reward: str

    @property
    def rules(self) -> "Rules":
        """The rules of --reward, or the default rules."""
        from omni_reward.rules import SCORER, open_rules

        return open_rules(self.reward or (SCORER if self.scorer.is_set else "exact"), remote=True)


def check_tokens(args: TokenArgs) -> None:
    """Check all that `check_run` checks, the settings of `TokenArgs`, and the files of prompts.

    Raises:
        ValueError: as in `check_run`, or one of these checks fails.
    """
    from omni_reward.rules import SCORER

    check_run(args)
    samples, unit = args.data.prompts_per_step * args.data.group_size, args.data.batch_size * num_ranks()
    rule = f"--batch-size times ranks ({unit}) must divide a step's samples ({samples}), prompts times --group-size"
    require((samples % unit == 0, f"{rule}, got {args.data.batch_size}"))
    set_temperatures = [eval_set.temperature for eval_set in args.eval.sets if eval_set.temperature is not None]
    # vLLM raises lower ones to 0.01
    temperatures = [args.sampling.temperature, args.eval.temperature, *set_temperatures]
    require(
        (not args.lora.target_parameters or not args.sharding.experts,
         "--lora.target-parameters does not go with --sharding.experts"),
        (not args.lora.target_parameters or args.lora.init != "pissa",
         "--lora.target-parameters does not go with --lora.init pissa, which is for linear layers"),
        (not args.lora.target_parameters or not (args.lora.use_dora or args.lora.dtype == "float32"),
         "--lora.target-parameters does not go with --lora.use-dora or --lora.dtype, which are for linear layers"),
        (args.sampling.engine != "vllm" or not args.tool.function,
         "--tool.function needs --engine transformers, got --engine vllm"),
        (args.sampling.engine != "vllm" or find_spec("vllm"),
         "--engine vllm must be installed: pip install 'omni-rollout[vllm]', or for a CPU make install-vllm"),
        (args.sampling.engine != "vllm" or all(0.01 <= value <= 2 for value in temperatures),
         f"--temperature, --eval.temperature and those of eval must be from 0.01 to 2 for vllm, got {temperatures}"),
        (args.sampling.engine != "vllm" or args.policy.dtype != "float16",
         "--dtype float16 needs --engine transformers, got --engine vllm"),
        (args.sampling.engine != "vllm" or not args.memory.device_gb,
         "--memory.device-gb plans the embedded engine only, got --engine vllm"),
        (args.sampling.engine != "vllm" or args.memory.base_dtype == "auto",
         f"--memory.base-dtype {args.memory.base_dtype} needs the embedded engine, got --engine vllm"),
    )  # fmt: skip
    tool, _ = args.tool.function, args.tool.texts
    if tool:
        from omni_reward.scorers.user import PREFIX, check_user

        file = args.tool.file
        is_valid = tool.startswith(PREFIX) and file.suffix == ".py" and file.is_file()
        require((is_valid, f"--tool.function must be python:FILE.py:FUNCTION with a file that exists, got {tool}"))
        with prefix_errors("--tool.function: "):
            check_user(tool, "text")
    with prefix_errors("--reward: "):
        uses_scorer = SCORER in args.rules.reward.specs.values()
    require(
        (uses_scorer or not args.scorer.is_set, f"--reward must name {SCORER}, as --scorer does, got {args.reward}"),
        (args.scorer.is_set or not uses_scorer, f"--scorer or --scorer.url must be given for {SCORER} in --reward"),
    )
    read_prompts(args)
    check_sets(args.eval.all_sets, lambda place: load_records(args.data, place))


def check_answers(args: TokenArgs, keys: Sequence[str], *, name: str = "--prompts") -> None:
    """Raise ValueError unless each training prompt has an answer under each of the keys. name: the file's flag."""

    def check(record: PromptRecord) -> None:
        for key in keys:
            answer_text(record.meta.get(key), key, record.text)

    with prefix_errors(f"{name}: "):
        load_records(args.data, args.data.prompts, check)


@dataclass(frozen=True)
class ThinkingArgs(MediaArgs):
    """The groups and settings of a trainer that samples a thought before each image."""

    RATES = (1e-5, 1e-4)

    eval: ThoughtEval
    sampling: Flat[ThinkingSampling]
    window: Flat[Window]
    thought_reward: str

    @property
    def rules(self) -> "Rules | None":
        """The rules that grade thoughts, if any."""
        from omni_reward.rules import open_rules

        return open_rules(self.thought_reward) if self.thought_reward else None


def check_thinking(args: ThinkingArgs) -> None:
    """Check all that `check_scored` checks, the window, and the settings of `ThinkingArgs`.

    Raises:
        ValueError: as in `check_scored`, or one of these checks fails.
    """
    check_window(args.window, args.sampling)
    check_scored(args)
    with prefix_errors("--thought-reward: "):
        _ = args.rules
    require(
        (not args.sharding.rollout_ranks, "--sharding.rollout-ranks samples no thoughts"),
        (
            args.sampling.has_trained_engine,
            f"--engine must be diffusers, the only engine that writes thoughts, got {args.sampling.engine}",
        ),
        (not args.memory.device_gb, "--memory.device-gb does not plan thoughts, whose lengths are unknown"),
        (not args.policy.compile, "--compile does not go with thoughts, whose lengths differ from token to token"),
    )
