"""Settings of evaluations, and of sets besides --eval.prompts, each a table [[eval.sets]]. Imports no torch."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from omni_rl.settings.fields import (
    MAY_CHANGE,
    NO_FLAG,
    REQUIRED,
    SECRET,
    at_least,
    between,
    check_bounds,
    prefix_errors,
    require,
)

GOLD = "gold"  # name of the set whose prompts and scorer are not used in training


@dataclass(frozen=True)
class EvalSet:
    """A set of held-out prompts with metrics such as eval/NAME/reward. None: the run's setting."""

    name: Annotated[str, REQUIRED] = ""  # Name of the set; its score is the metric eval/NAME/reward
    prompts: Annotated[str, REQUIRED] = ""  # Prompts, in the format of --prompts
    num_prompts: Annotated[int, at_least(0)] = 0  # Maximum number of prompts, the first ones; 0 is all
    seed: Annotated[int, between(0, 2**63 - 1)] = 0  # Seed of the noise, the same in every run
    samples_per_prompt: Annotated[int | None, between(1, 65_536)] = None  # Samples per prompt (default: the run's)
    pass_threshold: float | None = None  # Lowest score that passes (default: the run's)
    scorer_url: Annotated[str, SECRET] = ""  # URL of a reward server for this set (default: the run's)


@dataclass(frozen=True)
class MediaEvalSet(EvalSet):
    """An evaluation set of a run on images, videos or sound."""

    num_inference_steps: Annotated[int | None, between(2, 10_000)] = None  # Denoising steps (default: the run's)
    height: Annotated[int | None, between(1, 2**14)] = None  # Height in pixels (default: the run's)
    width: Annotated[int | None, between(1, 2**14)] = None  # Width in pixels (default: the run's)
    guidance_scale: Annotated[float | None, between(0, 1000)] = None  # Guidance scale (default: --guidance-scale)
    true_cfg_scale: Annotated[float | None, between(1, 1000)] = None  # True CFG scale (default: --true-cfg-scale)
    guidance: str = ""  # Settings to add to --guidance


@dataclass(frozen=True)
class TokenEvalSet(EvalSet):
    """An evaluation set of a run on text."""

    max_new_tokens: Annotated[int | None, between(1, 2**20)] = None  # Maximum tokens of an answer (default: the run's)
    temperature: Annotated[float | None, between(1e-3, 100)] = None  # Temperature (default: --eval.temperature)
    top_p: Annotated[float | None, between(1e-3, 1)] = None  # Probability mass (default: --eval.top-p)


@dataclass(frozen=True)
class Eval:
    """Evaluations on held-out prompts."""

    prompts: Annotated[str, REQUIRED, MAY_CHANGE] = ""  # Evaluation prompts, in the format of --prompts
    every: Annotated[int, at_least(1), MAY_CHANGE] = 50  # Training steps between evaluations
    first: Annotated[bool, MAY_CHANGE] = True  # Evaluate before the first training step too
    num_prompts: Annotated[int, at_least(0), MAY_CHANGE] = 0  # Maximum number of prompts, the first ones; 0 is all
    only: Annotated[bool, MAY_CHANGE] = False  # Evaluate the weights on all sets, write eval-STEP, and stop
    samples_per_prompt: Annotated[int, between(1, 65_536), MAY_CHANGE] = 1  # Samples per prompt, for eval/best@n
    pass_threshold: Annotated[float | None, MAY_CHANGE] = None  # Lowest score that passes, for eval/pass@k
    sets: Annotated[tuple[EvalSet, ...], NO_FLAG, MAY_CHANGE] = ()  # More sets, each a table [[eval.sets]]
    gold_prompts: str = ""  # Prompts of the gold set, not used in training
    gold_scorer: str = ""  # Scorer to start for the gold set, in the format of --scorer
    gold_scorer_url: Annotated[str, SECRET] = ""  # URL of a running reward server to use instead
    stop_on: Annotated[str, MAY_CHANGE] = ""  # gold-falls:K stops after K evaluations below the best

    @property
    def all_sets(self) -> tuple[EvalSet, ...]:
        """The sets of the tables and the gold set, if there is one, with at least two samples per prompt."""
        samples, url = max(2, self.samples_per_prompt), self.gold_scorer_url
        gold = EvalSet(GOLD, self.gold_prompts, samples_per_prompt=samples, scorer_url=url)
        return (*self.sets, gold) if self.gold_prompts else self.sets

    @property
    def stop_after(self) -> int:
        """The K of --eval.stop-on gold-falls:K, or 0 without it."""
        return int(self.stop_on.rpartition(":")[2] or 0)


@dataclass(frozen=True)
class MediaEval(Eval):
    """Evaluations of a run on images, videos or sound."""

    num_inference_steps: Annotated[int, between(2, 10_000), MAY_CHANGE] = 10  # Denoising steps of an evaluation
    sets: Annotated[tuple[MediaEvalSet, ...], NO_FLAG, MAY_CHANGE] = ()  # More sets, each a table [[eval.sets]]


@dataclass(frozen=True)
class TokenEval(Eval):
    """Evaluations of a run on text."""

    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of an evaluation
    top_p: Annotated[float, between(1e-3, 1)] = 0.7  # Probability mass that evaluations sample from
    sets: Annotated[tuple[TokenEvalSet, ...], NO_FLAG, MAY_CHANGE] = ()  # More sets, each a table [[eval.sets]]


@dataclass(frozen=True)
class ThoughtEval(MediaEval):
    """Evaluations of a run on images with thoughts."""

    temperature: Annotated[float, between(1e-3, 100)] = 1.0  # Temperature of thoughts in an evaluation
    top_p: Annotated[float, between(1e-3, 1)] = 0.7  # Probability mass that evaluations sample from


def check_gold(args: Eval, training: Sequence[str]) -> None:
    """Raise ValueError for settings of the gold set that do not fit. training: prompts and scorer of training."""
    scorer = args.gold_scorer or args.gold_scorer_url
    require(
        (bool(args.gold_prompts) == bool(scorer),
         "--eval.gold-prompts must be given with --eval.gold-scorer or --eval.gold-scorer-url, and they with it"),
        (not {args.gold_prompts, args.gold_scorer, args.gold_scorer_url}.intersection(filter(None, training)),
         "--eval.gold-prompts and --eval.gold-scorer must differ from those of training, got "
         f"{args.gold_prompts} and {args.gold_scorer or 'the URL'}"),
        (re.fullmatch(r"(gold-falls:[1-9]\d{0,8})?", args.stop_on, re.ASCII),
         f"--eval.stop-on must be gold-falls:K with K from 1, got {args.stop_on!r}"),
        (scorer or not args.stop_on, f"--eval.stop-on {args.stop_on} needs --eval.gold-prompts"),
        (all(eval_set.name != GOLD for eval_set in args.sets),
         "eval.sets must not be named gold, as --eval.gold-prompts is"),
    )  # fmt: skip


def setting_name(eval_set: EvalSet, number: int, name: str) -> str:
    """Return the name in messages of a set's setting: eval.sets[NUMBER].NAME, or the flag for the gold set."""
    return f"--eval.gold-{name.replace('_', '-')}" if eval_set.name == GOLD else f"eval.sets[{number}].{name}"


def check_sets(sets: Sequence[EvalSet], load: Callable[[str], object]) -> None:
    """Raise ValueError with the number, from 1, of a set that cannot be evaluated. load: reads its prompts."""
    names = [eval_set.name for eval_set in sets]
    for number, eval_set in enumerate(sets, start=1):
        place = f"eval.sets[{number}]"
        is_valid_name = re.fullmatch(r"[A-Za-z][\w-]*", eval_set.name, re.ASCII)
        require(
            (is_valid_name, f"{place}.name must be a letter, then letters, digits, _ and -, got {eval_set.name!r}"),
            (names.count(eval_set.name) == 1, f"{place}.name must be that of no other set, got {eval_set.name!r}"),
            (eval_set.prompts, f"{place}.prompts must be given"),
        )
        check_bounds(eval_set, place)
        check_urls(eval_set.scorer_url, setting_name(eval_set, number, "scorer_url"))
        with prefix_errors(f"{setting_name(eval_set, number, 'prompts')}: "):
            load(eval_set.prompts)


MACHINE_URL = re.compile(r"{host}|{node}|//(localhost|127\.|\[::1\])")  # in URLs of a machine's own servers


def resolve_host(urls: str) -> str:
    """Replace {host} in URLs by the name of this machine, and {node} by its number in the run."""
    return urls.replace("{host}", socket.gethostname()).replace("{node}", os.environ.get("GROUP_RANK", "0"))


def check_urls(urls: str, name: str) -> None:
    """Raise ValueError if one of the comma-separated URLs is not of the form `http(s)://host[:port][/path]`.

    name: the setting that holds them, such as --scorer.url.
    """
    for url in filter(None, urls.split(",")):
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is not a number
            is_url = False
        require((is_url, f"{name} must be http(s)://host[:port][/path], got {url!r}"))
