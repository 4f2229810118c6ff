"""Settings as TOML, in recipes, files and the folders of runs. Imports nothing heavy."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omni_train.hub import check_named, is_from_hub, local_file

from omni_rl.settings.fields import flag_of, leaves, prefix_errors, require, strip_metadata, values_of

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
EQUIVALENTS = {  # equivalents of other projects' names
    "--prompt-key": "prompt-column caption-column dataset-text-field",
    "--lr": "learning-rate", "--kl-coef": "beta kl-beta", "--dpo-beta": "beta", "--nft-beta": "beta",
    "--clip-range": "clip-eps", "--noise-level": "eta", "--group-size": "num-generations num-image-per-prompt",
    "--batch-size": "train-batch-size per-device-train-batch-size", "--same-start-noise": "share-noise",
    "--num-minibatches": "updates-per-step gradient-accumulation-steps", "--filter-groups": "drop-zero-signal",
    "--true-cfg-scale with Qwen-Image": "cfg cfg-scale", "--guidance-scale with other models": "cfg cfg-scale",
    "--height and --width": "resolution image-size", "--name, as the run writes to runs/NAME": "output-dir run-name",
    "--tracking.to": "report-to", "--tracking.to wandb": "wandb", "--tracking.to tensorboard": "tensorboard",
    "--train-steps": "steps max-steps max-train-steps epochs num-epochs num-train-epochs", "--lora.rank": "lora-r",
    "--save-every": "save-steps checkpointing-steps", "--keep-checkpoints": "save-total-limit checkpoints-total-limit",
    "--eval.every": "eval-steps validation-steps", "--prompts": "dataset-name train-data-dir train-files",
    "--lora.exclude": "exclude-modules", "--lora.use-rslora": "rslora use-rslora", "--lora.init": "init-lora-weights",
    "--lora.use-dora": "dora use-dora", "--lora.dtype": "lora-dtype autocast-adapter-dtype",
    "--num-inference-steps": "num-steps", "--dtype": "precision mixed-precision", "--dtype bfloat16": "bf16",
    "--dtype float16": "fp16", "--optim.lr-scheduler-type": "lr-scheduler", "--optim.warmup-steps": "lr-warmup-steps",
    "--optim.weight-decay": "adam-weight-decay", "--optim.adam-epsilon": "adam-eps",
    "--num-inner-epochs": "num-iterations ppo-epochs", "--num-iterations": "num-inner-epochs ppo-epochs",
    "--model": "model-path pretrained-model-name-or-path", "--init-weights": "weights", "--best-worst-n": "best-of-n",
    "the same command again, which continues the run": "resume resume-from-checkpoint",
    "omni-rl train NAME --nproc-per-node N": "gpus num-gpus num-processes nproc-per-node",
    "torchrun, as docs/machines.md shows": "nnodes node-rank rdzv-endpoint master-addr master-port num-machines",
    "omni-rl push runs/NAME OWNER/NAME after the run": "push-to-hub hub-model-id hub-repo-id hub-strategy",
    "omni-rl train nft": "nft awm", "omni-rl train dpo": "dpo", "omni-rl train srpo": "srpo",
    "omni-rl train gspo": "gspo", "omni-rl train distill": "opd", "omni-rl train unigrpo": "unigrpo",
    "omni-rl train dpo_tokens": "dpo-tokens", "omni-rl train sft_tokens": "sft sft-tokens",
    "omni-rl train distill_tokens": "gkd distill-tokens",
}  # fmt: skip
UNSUPPORTED_FLAGS = {  # flags of other programs that are missing here, with the reason
    "device": "it is the machine's accelerator, or else its CPU; CUDA_VISIBLE_DEVICES chooses among several",
    "use-8bit-adam": "moments of 8 bits move single weights too far: --memory.offload optimizer keeps them on the host",
    "target-parameters": "diffusers opens no adapters of parameters: name linear layers by --lora.targets",
    "rollout-dtype": "only vLLM-Omni, which samples images, videos and sound, takes other bits than --dtype",
    "tensor-parallel-size": "each rank has a whole engine; --sharding.context-parallel has ranks share samples",
    "step-execution": "all samples of a rollout begin together, so that no step has requests of another",
}  # fmt: skip


def load_recipes(app: str) -> dict[str, str]:
    """Return the recipes of a program, as TOML texts by name."""
    folder = files("omni_rl") / "recipes" / app
    if not folder.is_dir():
        return {}
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return {name: (folder / f"{name}.toml").read_text("utf-8") for name in names}


def from_files(cls: type, preset: str, path: str, presets: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a preset, overridden by those of a TOML file; "" for none.

    Raises:
        ValueError: the preset does not exist, or the file cannot be read or has settings that do not fit.
    """
    values: dict[str, Any] = {}
    if preset:
        if preset not in presets:
            hint = suggest(preset, presets)
            raise ValueError(f"--preset must name a recipe, which --list-presets lists, got {preset!r}{hint}")
        settings = from_toml(presets[preset], cls, f"--preset {preset}")
        values |= {name: resolve_place(value) for name, value in settings.items()}
    if path:
        with prefix_errors("--config: "):
            check_named(path, (".toml",) if is_from_hub(path) else ())
            file = local_file(path)
        try:
            settings = from_toml(file.read_text(encoding="utf-8"), cls, path)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as exc:
            raise ValueError(f"--config must be a readable TOML file, got {path}: {exc}") from exc
        if is_from_hub(path):
            check_hub_config(settings, path)
        values |= settings
    return values


def resolve_place(value: object) -> object:
    """Return a recipe's value, or the path in this package of a file that is missing in the working folder."""
    if isinstance(value, str) and value.startswith(("checkpoints/", "data/")) and not Path(value).exists():
        shipped = Path(str(files("omni_rl") / "shipped" / value))
        return str(shipped) if shipped.exists() else value
    return value


def from_toml(text: str, cls: type, place: str) -> dict[str, Any]:
    """Return the settings in a TOML text by the names of `leaves`. place: name of the text in messages.

    Raises:
        ValueError: the text is not TOML, or has an unknown key or table, or a value of the wrong type.
    """
    settings, values = leaves(cls), dict[str, Any]()
    groups = sorted({name.partition(".")[0] for name in settings if "." in name})
    for name, value in flatten_tables(tomllib.loads(text)).items():
        group = name.rpartition(".")[0]
        if group and group not in groups:
            raise ValueError(f"{place}: [{group}] is a table, but only {', '.join(groups) or 'eval'} are")
        if name not in settings:
            raise ValueError(f"{place}: unknown key {name!r}{suggest(name, settings)}")
        kind = strip_metadata(settings[name].type)
        values[name] = (read_tables if get_origin(kind) is tuple else coerce)(kind, value, f"{place}: {name}")
    return values


def flatten_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a TOML text by name, such as correction.low for low in [correction]."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        values |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return values


def read_tables(wanted: Any, value: object, place: str) -> tuple[object, ...]:
    """Return the tables [[key]] as dataclasses of the wanted kind. place: their name in messages.

    Raises:
        ValueError: the value is not a list of tables, or a table has an unknown key or a value of the wrong type.
    """
    cls, kinds = get_args(wanted)[0], get_type_hints(get_args(wanted)[0])
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ValueError(f"{place} must be tables, each below a line of its own with two brackets, got {value!r:.80}")
    for number, row in enumerate(value, start=1):
        for key in row.keys() - kinds.keys():
            raise ValueError(f"{place}[{number}]: unknown key {key!r}{suggest(key, kinds)}")
    return tuple(
        cls(**{key: coerce(kinds[key], item, f"{place}[{number}].{key}") for key, item in row.items()})
        for number, row in enumerate(value, start=1)
    )


def to_toml(config: Any) -> str:
    """Return the dataclass as TOML, one key per line, without keys that are None."""
    tables, rows = {"": ""}, ""
    for name, value in values_of(config).items():
        group, _, key = name.rpartition(".")
        if isinstance(value, tuple):
            rows += "".join(f"\n[[{name}]]\n{to_toml(row)}" for row in value)
        elif value is not None:
            head = f"\n[{group}]\n" * bool(group)
            tables[group] = f"{tables.get(group, head)}{key} = {json.dumps(value, ensure_ascii=False)}\n"
    return ("".join(tables.values()) + rows).replace("\x7f", "\\u007f")  # JSON does not escape DEL, TOML does


def check_hub_config(values: Mapping[str, Any], path: str) -> None:
    """Check that settings of a file from the hub choose no server, secret, media root or Python code.

    Raises:
        ValueError: a setting does.
    """
    for row in [*map(vars, values.get("eval.sets", ())), values]:
        for key, value in row.items():
            is_place = key.endswith(("scorer_url", "scorer.url", "watch_url", "token_file", "media_root"))
            forbidden = "://" if key in ("scorer.name", "eval.gold_scorer") and "://" in value else "python:"
            setting = f"a {key}" if is_place else f"{forbidden} in {key}"
            rule = f"must not name {setting}: give the flag, or a copy of the file that you have read"
            is_allowed = not value if is_place else forbidden not in str(value)
            require((is_allowed, f"--config {path} {rule}, got {value!r}"))


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name, beginning with "; ", or "" if no name is close.

    For a name in REFUSED it is the reason. Otherwise the order is: the equivalent of another project's name, a very
    close known name, the first known name that contains this one, the closest known name.
    """
    names, word = list(known), flag_of(name.lstrip("-")).lstrip("-")
    flags = {flag_of(candidate.lstrip("-")) for candidate in names}
    last_part = word.rpartition(".")[2]
    if last_part in UNSUPPORTED_FLAGS and not any(candidate.endswith(f".{last_part}") for candidate in flags):
        return f"; {UNSUPPORTED_FLAGS[last_part]}"
    equivalents = [candidate for candidate, words in EQUIVALENTS.items() if word in words.split()]
    if equivalents := [
        candidate for candidate in equivalents if candidate[:2] != "--" or candidate.split()[0].strip(",") in flags
    ]:
        return f"; use {' or '.join(equivalents)}"
    containing = [candidate for candidate in names if name in candidate and len(name) > 3]
    closest, close = (get_close_matches(name, names, n=1, cutoff=cutoff) for cutoff in (0.9, 0.7))
    matches = closest or containing or close
    return f"; did you mean {matches[0]!r}?" if matches else ""


def coerce(target: Any, value: object, place: str) -> object:
    """Return the value as the wanted type; an integer may stand for a float, and the word none for None.

    Raises:
        ValueError: the value has another type; the message begins with `place`.
    """
    if get_origin(target) is Literal:
        if value not in get_args(target):
            hint = suggest(str(value), [str(choice) for choice in get_args(target)])
            raise ValueError(f"{place} must be one of {', '.join(map(repr, get_args(target)))}, got {value!r}{hint}")
        return value
    kinds = get_args(target) or (target,)  # the members of a union such as int | None
    if type(None) in kinds and value in ("none", "None"):
        return None
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{place} must be {KINDS[kinds[0]]}, got {value!r}")
    return value
