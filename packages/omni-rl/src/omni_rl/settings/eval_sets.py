"""Evaluation sets beside --eval-prompts: a table [[eval]] each, in a TOML file of settings. Imports no torch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from omni_train.prompts.files import RecordCheck, load_prompts

from omni_rl.settings.cli import FLOAT32_MAX, flag, require


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts whose metrics stand under their name: eval/NAME/reward. None is the run's own setting."""

    name: str = ""  # Name of the set, whose score is the metric eval/NAME/reward (required)
    prompts: str = ""  # File of prompts, .txt, .jsonl or .parquet (required)
    num_prompts: int = 0  # Number of prompts, the first ones of the file; 0 is all
    seed: int = 0  # Seed of what is drawn; a set and its seed give the same noise in every run
    samples_per_prompt: int | None = None  # Samples of each prompt (default: --eval-samples-per-prompt)
    pass_threshold: float | None = None  # Score from which on a sample passes (default: --pass-threshold)
    scorer_url: str = ""  # URL of a reward server that alone grades this set (default: what grades the run)


@dataclass(frozen=True)
class MediaEvalSet(EvalSet):
    """A set of a run that draws pictures, videos or sound."""

    num_inference_steps: int | None = None  # Denoising steps (default: --eval-num-inference-steps)
    height: int | None = None  # Height in pixels (default: --height)
    width: int | None = None  # Width in pixels (default: --width)
    guidance_scale: float | None = None  # As --guidance-scale, the default
    true_cfg_scale: float | None = None  # As --true-cfg-scale, the default
    guidance: str = ""  # Knobs to add to --guidance


@dataclass(frozen=True)
class TokenEvalSet(EvalSet):
    """A set of a run that draws text."""

    max_new_tokens: int | None = None  # Most tokens of an answer (default: --max-new-tokens)
    temperature: float | None = None  # Temperature (default: --eval-temperature)
    top_p: float | None = None  # As --eval-top-p, the default


BOUNDS = {  # setting -> least and greatest value
    "num_prompts": (0, 2**31 - 1), "seed": (0, 2**63 - 1), "samples_per_prompt": (1, 65_536),
    "pass_threshold": (-FLOAT32_MAX, FLOAT32_MAX), "num_inference_steps": (2, 10_000), "height": (1, 16_384),
    "width": (1, 16_384), "guidance_scale": (0, 1e3), "true_cfg_scale": (1, 1e3), "max_new_tokens": (1, 2**20),
    "temperature": (1e-3, 100), "top_p": (1e-3, 1),
}  # fmt: skip


def check_sets(
    sets: Sequence[EvalSet], check: Callable[[], RecordCheck | None] = lambda: None, *, media_root: str = ""
) -> None:
    """Raise ValueError for a set that cannot be evaluated, with its number, counted from 1.

    check: makes a check of a set's prompts. media_root: as `load_prompts`.
    """
    names = [own.name for own in sets]
    for number, own in enumerate(sets, start=1):
        at = f"eval[{number}]"
        require(
            (re.fullmatch(r"[A-Za-z][\w-]*", own.name, re.ASCII),
             f"{at}.name must be a letter, then letters, digits, _ and -, got {own.name!r}"),
            (names.count(own.name) == 1, f"{at}.name must be that of no other set, got {own.name!r}"),
            (own.prompts, f"{at}.prompts must be given"),
        )  # fmt: skip
        for name, (least, most) in BOUNDS.items():
            value = getattr(own, name, None)
            rule = f"{at}.{name} must be between {least:g} and {most:g}, got {value}"
            require((value is None or least <= value <= most, rule))
        check_urls(own.scorer_url, f"{at}.scorer_url")
        with flag(f"{at}.prompts: "):
            count = len(load_prompts(own.prompts, check=check(), media_root=media_root))
        rule = f"{at}.num_prompts must be at most {count}, those of {own.prompts}, got {own.num_prompts}"
        require((own.num_prompts <= count, rule))


def check_urls(urls: str, name: str) -> None:
    """Raises ValueError when one of the URLs, which commas separate, is not of the form `http(s)://host[:port][/path]`.

    name: the setting that holds them, as --scorer-url.
    """
    for url in filter(None, urls.split(",")):
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            is_url = False
        require((is_url, f"{name} must be http(s)://host[:port][/path], got {url!r}"))
