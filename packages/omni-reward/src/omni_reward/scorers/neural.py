"""Devices, weights and batches of neural scorers.

Weights are read from safetensors, or from a PyTorch file with `weights_only=True`, which runs no code. A model is named
by a local folder or by a hub repository, which transformers downloads and caches.

Notation: N samples, H height, W width.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import get_session
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from omni_reward.files import read_file
from omni_reward.media import Arrays, Meta
from omni_reward.scorers.pixels import MAX_ASPECT
from omni_reward.wire import Score, Scorer, parse_json

BATCH_SIZE = 16
MAX_CONFIG_BYTES = 2**22
PROBE_S = 3.0  # longest wait for the hub
Weights = Mapping[str, Tensor]
Rate = Callable[[np.ndarray, list[str]], Tensor]
RateAny = Callable[[np.ndarray, list[str], Meta], Tensor]
Decline = Callable[[str], str | None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def image_scorer(
    rate: Rate, version: str, decline: Decline = lambda prompt: None, networks: Sequence[nn.Module] = ()
) -> Scorer:
    """Return a scorer of `image` from `rate(images, prompts)`, which returns scores [N]; see `network_scorer`."""
    rate_any: RateAny = lambda images, prompts, meta: rate(images, prompts)  # noqa: E731
    return network_scorer("image", rate_any, version, decline, networks=networks)


def network_scorer(
    kind: str,
    rate: RateAny,
    version: str,
    decline: Decline = lambda prompt: None,
    parts: Sequence[str] = (),
    networks: Sequence[nn.Module] = (),
) -> Scorer:
    """Return a scorer of images or videos from a network; it abstains above MAX_ASPECT.

    Args:
        kind: `image` or `video`.
        rate: returns scores [N], or [N, parts], for media [N, ...], uint8, RGB, N >= 1 prompts and their meta.
        version: version of the scorer.
        decline: returns why the network cannot read a prompt, or None if it can.
        parts: names of the summands of a score.
        networks: networks that can sleep.
    """

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        samples = media[kind]
        if max(samples.shape[-3:-1]) > MAX_ASPECT * min(samples.shape[-3:-1]):
            return [Score(None, abstained=f"the {kind} has an aspect ratio above {MAX_ASPECT}")] * len(prompts)
        reasons = [decline(prompt) for prompt in prompts]
        read = [i for i, reason in enumerate(reasons) if reason is None]
        with torch.inference_mode():
            rated = rate(samples[read], [prompts[i] for i in read], [meta[i] for i in read]) if read else torch.empty(0)
        rows = iter(rated.float().view(len(read), max(1, len(parts))).tolist())
        return [join(next(rows)) if reason is None else Score(None, abstained=reason) for reason in reasons]

    def join(row: list[float]) -> Score:
        return Score.of(sum(row), parts=dict(zip(parts, row, strict=True)) if parts else {})

    move = make_mover(*networks) if networks else None
    return Scorer(score, media=(kind,), batch_size=BATCH_SIZE, version=version, move=move)


def make_mover(*networks: nn.Module) -> Callable[[bool], None]:
    """Return a function that moves networks to the host when called with True, and back to their devices with False."""
    homes = [(network, next(network.parameters()).device) for network in networks]

    def move(asleep: bool) -> None:
        for network, device in homes:
            network.to("cpu" if asleep else device)
        if asleep and torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # for other processes

    return move


def pick_device(name: str | None, *, threads: int) -> torch.device:
    """Return the device of this name (by default the accelerator, else the CPU), and set the number of CPU threads.

    Raises:
        ValueError: threads is below 1, or the device does not exist.
    """
    if threads < 1:
        raise ValueError(f"threads must be >= 1, got {threads}")
    torch.set_num_threads(threads)
    if not name:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as exc:
        raise ValueError(f"device must be one that PyTorch has here, got {name!r}: {_first_line(exc)}") from exc


def pick_dtype(name: str) -> torch.dtype:
    """Return the floating-point type of this name.

    Raises:
        ValueError: scorers do not support it.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def load_model(
    kind: Any, name: str, dtype: torch.dtype, device: torch.device, *, config: Any = None, weights: Any = None
) -> Any:
    """Load a network of a transformers class for inference.

    Args:
        kind: the class.
        name: name of the model.
        dtype, device: dtype and device of its weights.
        config: configuration that replaces the model's.
        weights: tensors by name that replace the model's.

    Raises:
        ValueError: the model does not exist, has no safetensors, or its weights are not of this class.
    """
    kwargs = {"config": config, "state_dict": weights, "dtype": dtype, "use_safetensors": True}
    try:
        with _readable(name) as place:
            source = place if weights is None else None
            model, info = kind.from_pretrained(source, **kwargs, output_loading_info=True, trust_remote_code=False)
    except RuntimeError as exc:
        raise ValueError(f"{name} must hold the weights of a {kind.__name__}: {exc}") from exc
    if missing := sorted(info["missing_keys"]):  # transformers would initialize them randomly
        raise ValueError(f"{name} must hold all weights of a {kind.__name__}, missing {missing[:3]}")
    return model.to(device).eval().requires_grad_(False)


class Empty(NamedTuple):
    """A scorer's network with uninitialized weights, for measuring its memory on a device.

    call: runs the network on as many samples as the scorer takes at once.
    """

    network: nn.Module
    call: Callable[[], object]


def empty_model(kind: Any, config: Any, dtype: str, device: str) -> Any:
    """Return a network of a transformers class on a device, with uninitialized weights.

    Raises:
        ValueError: scorers do not support the dtype.
    """
    with torch.device("meta"):
        model = kind(config)
    return model.to(pick_dtype(dtype)).to_empty(device=device).eval().requires_grad_(False)


def load_config(kind: Any, name: str, published: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a model's configuration; for published models, no file is read.

    Raises:
        ValueError: the model does not exist.
    """
    return kind(**published[name]) if name in published else load_part(kind, name)


def load_part(kind: Any, name: str) -> Any:
    """Load a model's configuration, tokenizer or feature extractor by its transformers class.

    Raises:
        ValueError: the model does not exist, or needs remote code.
    """
    with _readable(name) as place:
        return kind.from_pretrained(place, trust_remote_code=False)


def find_file(name: str, file: str) -> Path:
    """Return the path of a file of a model.

    Raises:
        ValueError: the file does not exist.
    """
    with _readable(name) as place:
        return Path(str(cached_file(place, file)))


def read_config(name: str, file: str, entries: Sequence[str]) -> dict[str, Any]:
    """Return entries of a model's JSON file by name; a dot separates the name from that of the outer object.

    Raises:
        ValueError: the file does not exist or is not JSON, or an entry is missing.
    """
    content, values = parse_json(read_file(find_file(name, file), MAX_CONFIG_BYTES), f"{file} of {name}"), {}
    for entry in entries:
        try:
            values[entry] = reduce(getitem, entry.split("."), content)
        except (LookupError, TypeError) as exc:
            raise ValueError(f"{file} of {name} must have the entry {entry}") from exc
    return values


def find_weights(name: str) -> dict[str, Tensor]:
    """Read a model's weights from model.safetensors or, without it, from pytorch_model.bin, without running code.

    Raises:
        ValueError: the model has neither, or the file has objects other than tensors.
    """
    try:
        return read_weights(find_file(name, "model.safetensors"))
    except ValueError:
        return read_weights(find_file(name, "pytorch_model.bin"))


def read_weights(path: Path, *, key: str = "") -> dict[str, Tensor]:
    """Read tensors by name from a .safetensors file, or from a PyTorch file that holds only tensors.

    key: that of the dictionary of tensors in a PyTorch file; by default the file is the dictionary.

    Raises:
        ValueError: the file holds other objects.
        OSError: the file cannot be read.
    """
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    weights = torch.load(path, map_location="cpu", weights_only=True)
    if key and isinstance(weights, dict):
        weights = weights.get(key)
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError(f"{path} must hold only tensors by name")
    return weights


def strip_prefix(prefix: str, weights: Weights) -> dict[str, Tensor]:
    """Return the weights whose names start with the prefix, without the prefix."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def short_name(name: str) -> str:
    """Return a model's name without local parent folders."""
    return Path(name).name if Path(name).exists() else name


@contextmanager
def _readable(name: str) -> Iterator[str]:
    """Report an error of the `with` block, which reads a model from the yielded name or folder.

    If the hub cannot be reached, this is the model's folder in the cache.
    """
    is_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and not Path(name).is_dir()
    fault = hub_fault() if is_id else ""
    try:
        yield snapshot_download(name, allow_patterns="config.json", local_files_only=True) if fault else name
    except OSError as exc:
        rule = "a model must be a folder, or a repository of the hub that can be downloaded or is cached"
        raise ValueError(f"{rule}, got {name!r}: {fault or _first_line(exc)}") from exc
    except ValueError as exc:  # transformers requires remote code, which is never run
        raise ValueError(f"a model must load without remote code, got {name!r}: {_first_line(exc)}") from exc


@cache
def hub_fault() -> str:
    """Return why the hub cannot be reached, or "" if it answers; probed once, for at most PROBE_S."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    answer: Future[int] = Future()

    def ask() -> None:
        try:
            answer.set_result(get_session().head(constants.ENDPOINT, timeout=PROBE_S).status_code)
        except Exception as exc:  # from any HTTP client of the library
            answer.set_exception(exc)

    Thread(target=ask, daemon=True).start()  # DNS lookup has no timeout
    try:
        fault = answer.exception(timeout=PROBE_S)
    except TimeoutError:
        return f"{constants.ENDPOINT} does not answer within {PROBE_S:g} s"
    if fault:
        return f"{constants.ENDPOINT} cannot be reached, {type(fault).__name__}: {_first_line(fault)}"
    return f"{constants.ENDPOINT} answers with status {answer.result()}" if answer.result() >= 500 else ""


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0]
