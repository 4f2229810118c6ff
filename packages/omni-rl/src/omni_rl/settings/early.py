"""Checks of files and servers before torch is imported: the model's folder, changed settings, the scorer."""

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omni_train.checkpoint.index import Config, Saved, check_config, read_index, saved_steps, step_folder
from omni_train.files import files_digest, parse_json, probe_digest, read_linked
from omni_train.hub import pin_revision
from omni_train.prompts.splits import data_files

from omni_rl.settings.args import RunArgs, without_secrets
from omni_rl.settings.eval_sets import resolve_host
from omni_rl.settings.fields import MAY_CHANGE, SECRET, flag_of, flatten, marked_settings, prefix_errors, require

MAX_CONFIG_BYTES = 2**24
INDEXES = ("model_index.json", "modular_model_index.json")
NO_VOCABULARY = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"}
BYTE_TOKENIZER = "ByT5Tokenizer"  # has no vocabulary file
GOLD_DIGEST = "eval.gold_prompts_digest"
LOSS_SCALE = "loss_scale"
EVALS = "evals"
RUN_KEYS = ("gate", LOSS_SCALE, EVALS)  # keys that a run adds to its settings in a checkpoint


def check_model(place: str, *, reads_texts: bool = True) -> None:
    """Raise ValueError unless a model is a hub id or a folder with an index.

    reads_texts: True if the tokenizers in the folder must have their vocabularies.
    """
    folder = Path(place)
    if not folder.is_dir():
        hint = "diffusers' from_single_file and save_pretrained write the folder"
        rule = f"--model must be a folder in diffusers' layout or a hub id, got the file {place}: {hint}"
        require((not folder.is_file(), rule))
        is_id = place.count("/") == 1 and not folder.is_absolute() and not place.startswith(".")
        require((is_id, f"--model must be a folder or a hub id such as Qwen/Qwen-Image, found nothing at {place}"))
        return
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), folder / INDEXES[0])
    if not index.is_file():
        parent = Path(os.path.normpath(folder / ".."))
        rule = f"--model must be a whole pipeline, got {place}, a part of one: give {parent}"
        require((not any((parent / name).is_file() for name in INDEXES), rule))
    require((index.is_file() or (folder / "config.json").is_file(), f"--model is incomplete: {index} is missing"))
    for tokenizer in tokenizer_folders(index) if reads_texts and index.is_file() else ():
        files = sorted({path.name for path in tokenizer.glob("*")} - NO_VOCABULARY)
        rule = "must have the files of its vocabulary, such as tokenizer.json, or vocab.json and merges.txt"
        require((files, f"--model is incomplete: {tokenizer} {rule}"))


def tokenizer_folders(index: Path) -> Iterator[Path]:
    """Yield the folders of the tokenizers that an index names, or nothing if the index is damaged."""
    with suppress(OSError, ValueError, AttributeError, LookupError):  # reported when the model is opened
        for part, kind in parse_json(read_linked(index, MAX_CONFIG_BYTES)).items():
            if "tokenizer" in part and isinstance(kind, list) and kind[-1] not in (None, BYTE_TOKENIZER):
                yield index.parent / part


def check_sides(place: str, height: int, width: int) -> None:
    """Raise ValueError unless height and width are multiples of the model's unit in omni_rollout/models/sides.toml.

    The model makes all other checks when it is opened, and this one too if that file does not cover it.
    """
    package = Path(str(find_spec("omni_rollout").origin)).parent  # type: ignore[union-attr]
    sides = tomllib.loads((package / "models" / "sides.toml").read_text("utf-8"))
    for folder in (Path(place), package / "released" / place):
        unit = sides.get(place) or sides.get(read_model_class(folder), 1)
        for name, side in (("height", height), ("width", width)):
            nearest = max(1, round(side / unit)) * unit
            rule = f"--{name} must be a positive multiple of {unit} pixels, such as {nearest}, got {side}"
            require((side % unit == 0, rule))


def read_model_class(folder: Path) -> str:
    """Return the pipeline class or architecture of a checkpoint, or "" if its index is missing or damaged."""
    for name, key in (*((index, "_class_name") for index in INDEXES), ("config.json", "architectures")):
        with suppress(OSError, ValueError, TypeError, LookupError):  # reported when the model is opened
            value = parse_json(read_linked(folder / name, MAX_CONFIG_BYTES))[key]
            return str(value[0] if isinstance(value, list) else value)
    return ""


def check_reward(name: str, setting: str = "scorer") -> None:
    """Raise ValueError unless a reward, with or without options, names existing scorers."""
    if name:
        from omni_reward.scorers import check_scorer

        with prefix_errors(f"{flag_of(setting)}: "):
            check_scorer(split_options(name)[0])


def split_options(text: str) -> tuple[str, list[str]]:
    """Split a text such as "jpeg --option mode=incompressibility" into the scorer's name and its options."""
    name, *options = re.split(r"\s+--option[\s=]+", text)
    return name, options


def check_unchanged(args: RunArgs) -> None:
    """Raise ValueError if settings or files differ from those of the checkpoint that the run resumes from."""
    folder, model = Path("runs") / args.run.name / "checkpoints", Path(args.policy.model)
    for step in saved_steps(folder)[-1:]:
        try:
            saved = read_index(step_folder(folder, step))
        except (OSError, ValueError):  # a damaged checkpoint: reported when it is opened
            return
        current = flatten(without_secrets(args)) | file_digests(args, model if model.is_dir() else None)
        check_same(args, saved, current, ignore=saved.config.keys() - current.keys())


def check_same(args: RunArgs, saved: Saved, current: Config, *, ignore: Collection[str] = ()) -> None:
    """Raise ValueError if a run resumes with different settings or files, except those that may change."""
    planned_steps, has_schedule = (
        saved.config.get("train_steps", args.run.train_steps),
        args.optim.lr_scheduler_type != "constant",
    )
    kind = f"--optim.lr-scheduler-type {args.optim.lr_scheduler_type}"
    rule = f"--train-steps must be {planned_steps}, as {kind} ends with the last step: to train longer, give the run "
    rule += f"another --name and its weights as --init-weights runs/{args.run.name}/weights, got {args.run.train_steps}"
    require((not has_schedule or planned_steps == args.run.train_steps, rule))
    changeable = {*marked_settings(type(args), MAY_CHANGE, SECRET)}
    if args.sampling.draw_ahead:  # no samples are pending at a save or an evaluation
        changeable -= {"save_every", "eval.every"}
    check_config(saved, current, ignore=(*changeable, *ignore, "train_steps", "scorer", *RUN_KEYS))


def file_digests(args: RunArgs, model: Path | None) -> dict[str, str]:
    """Return digests of the files of prompts and weights. model: its folder, or None if it is not downloaded yet."""
    files = data_files(args.data.prompts)
    prompts = {"prompts": pin_revision(args.data.prompts, files[0]), "prompts_digest": files_digest(files)}
    if args.eval.gold_prompts:
        prompts[GOLD_DIGEST] = files_digest(data_files(args.eval.gold_prompts))
    start = sorted(Path(args.policy.init_weights).rglob("*.safetensors")) if args.policy.init_weights else []
    weights = {"weights_digest": weights_digest(args.policy.model, model, start)} if model else {}
    return prompts | weights


def weights_digest(place: str, folder: Path, others: Sequence[Path] = ()) -> str:
    """Return a digest of a model's weights and of other files.

    A hub model is identified by its commit, because some of its files may be downloaded later.

    place: the model's folder or hub id. folder: the folder with its files.
    """
    if Path(place).is_dir():
        return probe_digest([*sorted(folder.rglob("*.safetensors")), *others])
    return f"{folder.name} {probe_digest(others)}"


def check_servers_respond(settings: Mapping[str, Any]) -> None:
    """Check, on the first rank of a machine, the reward servers and the hub model in settings returned by `values_of`.

    Raises:
        ValueError: a scorer's URL is not a reward server, or this user cannot get the model from the hub.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for name in ("scorer.url", "scorer.watch_url", "eval.gold_scorer_url"):
            check_scorer_responds(settings, name)
        check_hub_model(settings.get("model", ""))


def check_scorer_responds(settings: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the URLs of a setting are reward servers. A busy server is not an error."""
    from omni_reward import RewardClient, RewardError
    from omni_reward.errors import RewardTimeoutError
    from omni_reward.files import read_token

    with prefix_errors("--scorer.token-file: "):
        token = read_token(settings.get("scorer.token_file"))
    proxy = settings.get("scorer.proxy", "none")
    for url in filter(None, resolve_host(settings.get(name, "")).split(",")):
        try:
            with (
                prefix_errors(f"{flag_of(name)}: "),
                RewardClient(url, token=token, timeout_s=5.0, proxy=proxy) as client,
            ):
                client.info()
        except RewardTimeoutError:
            pass
        except RewardError as exc:
            raise ValueError(f"{flag_of(name)} must be a reward server that answers: {exc}") from exc


def check_hub_model(model: str) -> None:
    """Raise ValueError for a hub id that is not in the local cache and cannot be downloaded."""
    if not model or Path(model).is_dir():
        return
    from httpx import HTTPError
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError

    try:
        if any(isinstance(try_to_load_from_cache(model, name), str) for name in (*INDEXES, "config.json")):
            return
        if HfApi().model_info(model, timeout=3.0).gated:
            HfApi().auth_check(model)
    except (HTTPError, OSError, ValueError) as exc:
        reason = " ".join(str(exc).split()).rstrip(".")
        hint = f"Fetch it where there is a network, with `hf download {model}`, or give a folder"
        if isinstance(exc, GatedRepoError):
            hint = f"Accept its license at https://huggingface.co/{model}, then `hf auth login`, or set HF_TOKEN"
        rule = "--model must be a folder or a hub id that can be fetched"
        raise ValueError(f"{rule}, got {model}: {reason}. {hint}") from exc
