"""Devices, weights and batches of the scorers with a network.

Weights are read from safetensors, or from a PyTorch file with `weights_only=True`, which takes tensors and runs
nothing. A name of a model is a folder of this machine, or else one on the hub, which transformers fetches and keeps.

Letters: N samples, H height, W width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from omni_reward.media import Arrays, Meta
from omni_reward.scorers.pixels import MAX_ASPECT
from omni_reward.wire import Score, Scorer

BATCH_SIZE = 16
Weights = Mapping[str, Tensor]
Rate = Callable[[np.ndarray, list[str]], Tensor]
RateAny = Callable[[np.ndarray, list[str], Meta], Tensor]
Decline = Callable[[str], str | None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def image_scorer(rate: Rate, version: str, decline: Decline = lambda prompt: None) -> Scorer:
    """Scorer for `image` of a network: `rate(images, prompts)` are the scores [N]; the rest as of `network_scorer`."""
    return network_scorer("image", lambda images, prompts, meta: rate(images, prompts), version, decline)


def network_scorer(
    kind: str, rate: RateAny, version: str, decline: Decline = lambda prompt: None, parts: Sequence[str] = ()
) -> Scorer:
    """Scorer for pictures or videos of a network, which abstains on those that are too long for it.

    Args:
        kind: `image` or `video`.
        rate: scores [N] of media [N, ...], uint8, RGB, N prompts and their meta, N at least 1; with parts, [N, parts].
        version: as of a Scorer.
        decline: reason for which the network cannot read a prompt; None where it can.
        parts: names of what a score is the sum of.
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

    return Scorer(score, media=(kind,), batch_size=BATCH_SIZE, version=version)


def pick_device(name: str | None, *, threads: int) -> torch.device:
    """The device of that name, or the accelerator where there is one and the CPU where not, with so many threads.

    Raises:
        ValueError: threads is below 1, or there is no such device.
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
    """The floating-point type of that name.

    Raises:
        ValueError: it is none that scorers compute in.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def load_model(
    kind: Any, name: str, dtype: torch.dtype, device: torch.device, *, config: Any = None, weights: Any = None
) -> Any:
    """Network of a class of transformers, ready to score.

    Args:
        kind: the class.
        name: name of the model.
        dtype, device: what its weights are brought to.
        config: settings of the network, where they are not the model's own.
        weights: its weights, tensors by name, where they are not the model's own.

    Raises:
        ValueError: there is no such model, or not as safetensors, or its weights are not those of this class.
    """
    source = name if weights is None else None
    given = {"config": config, "state_dict": weights, "dtype": dtype, "use_safetensors": True}
    try:
        with _readable(name):
            model, info = kind.from_pretrained(source, **given, output_loading_info=True, trust_remote_code=False)
    except RuntimeError as exc:
        raise ValueError(f"{name} must hold the weights of a {kind.__name__}: {exc}") from exc
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random ones
        raise ValueError(f"{name} must hold all weights of a {kind.__name__}, but not {missing[:3]}")
    return model.to(device).eval().requires_grad_(False)


def load_part(kind: Any, name: str) -> Any:
    """Settings or tokenizer of a model, of a class of transformers.

    Raises:
        ValueError: there is no such model, or it takes code of its own to read it.
    """
    with _readable(name):
        return kind.from_pretrained(name, trust_remote_code=False)


def find_file(name: str, file: str) -> Path:
    """Path of a file of a model.

    Raises:
        ValueError: there is none.
    """
    with _readable(name):
        return Path(str(cached_file(name, file)))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name in a .safetensors file, or in a PyTorch file that holds nothing else.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    weights = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError(f"{path} must hold tensors by name and nothing else")
    return weights


def below(prefix: str, weights: Weights) -> dict[str, Tensor]:
    """The weights whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def short_name(name: str) -> str:
    """Name of a model without the folders above it on this machine."""
    return Path(name).name if Path(name).exists() else name


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        rule = "a model must be a folder, or a name on the hub that can be fetched or is kept here"
        raise ValueError(f"{rule}, got {name!r}: {_first_line(exc)}") from exc
    except ValueError as exc:  # transformers asks for code of the folder's own, which never runs here
        raise ValueError(f"a model must load without code of its own, got {name!r}: {_first_line(exc)}") from exc


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0]
