"""Conditioning of prompts: each distinct text and image is encoded once and cached in memory and in files.

A file's folder is named after the encoder: the bits of all frozen modules, their configuration, the code that runs them
and the device. The file is named after its input. A file that is found was therefore computed by the same arithmetic.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import omni_rollout
from omni_rollout.model import Model
from omni_rollout.types import Cond, Params, Parts, Prompt, join

CONFIGURATION = (".json", ".txt", ".model", ".jinja")
Entries = Iterable[tuple[str, bytes | Tensor]]
Encode = Callable[[Prompt, str, bool, dict[str, float]], Cond]  # prompt, text, is it negative, TEXT_OPTIONS


@dataclass(frozen=True)
class TextCache:
    """Settings of the cache of encoded texts and references.

    max_mb: limit on the device, besides the newest entry, which stays. 1024 hold 270 of Qwen-Image's longest texts.
    folder: folder of encoded texts, shared with other processes and later runs; empty for none.
    """

    max_mb: float = 1024
    folder: str = ""


TEXT_CACHE = TextCache()


class Conditioner:
    """Cached conditioning of prompts by the parts that `model.load` returns.

    Call it to get a batch's conditioning.
    """

    def __init__(self, model: Model, parts: Parts, texts: TextCache = TEXT_CACHE) -> None:
        self.model, self.parts = model, parts
        self.max_bytes = texts.max_mb * 2**20
        self.encode: Encode = lambda p, text, negative, options: model.encode(parts, p, negative=negative, **options)
        if texts.folder:
            self.encode = TextFiles(model, parts, texts.folder, self.encode).encode
        self._cached: dict[object, tuple[Prompt, Cond]] = {}  # the prompt keeps alive the images whose ids are keys

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], params: Params) -> Cond:
        """Return the conditioning of a batch."""
        cond = join([self._encode(prompt, params) for prompt in prompts], dim=0, what="encode")
        if self.model.is_guided(params):
            negative = join([self._encode(prompt, params, negative=True) for prompt in prompts], dim=0, what="encode")
            cond |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        fixed = repr(replace(params, sde_steps=(), decode=True))  # these have no effect here
        others = [self._encode_once(partial(self.model.condition, self.parts, p, params), p, fixed) for p in prompts]
        return cond | join(others, dim=0, what="condition")

    def _encode(self, prompt: Prompt, params: Params, *, negative: bool = False) -> Cond:
        text = (prompt.negative or self.model.NEGATES_TEXT * prompt.text) if negative else prompt.text
        options = {name: params.guidance.get(name, self.model.OPTIONS[name]) for name in self.model.TEXT_OPTIONS}
        make = partial(self.encode, prompt, text, negative, options)
        return self._encode_once(make, prompt, negative, text, *options.items())

    def _encode_once(self, make: Callable[[], Cond], prompt: Prompt, *facts: object) -> Cond:
        """Return the cached result of `make` for these facts and the prompt's images.

        The newest entry is kept, and as many earlier ones as `max_bytes` allows.
        """
        key = (*facts, *map(id, prompt.images))
        if key not in self._cached:
            self._cached[key] = prompt, make()
            while len(self._cached) > 1 and sum(num_bytes(kept) for _, kept in self._cached.values()) > self.max_bytes:
                self._cached.pop(next(iter(self._cached)))
        return self._cached[key][1]


def num_bytes(cond: Cond) -> int:
    """Return the memory that the tensors keep alive, including the storage that they view."""
    return sum(tensor.untyped_storage().nbytes() for tensor in cond.values())


class TextFiles:
    """Encoded texts in a folder, as one safetensors file per text.

    Any number of processes may share the folder, because files are written atomically. A damaged file is reported and
    replaced.
    """

    def __init__(self, model: Model, parts: Parts, folder: str, encode: Encode) -> None:
        self._encode = encode
        modules = {name: part for name, part in sorted(vars(parts).items()) if isinstance(part, nn.Module)}
        self.device = next(tensor.device for module in modules.values() for tensor in module.parameters())
        self.folder = Path(folder) / _digest(_encoder_entries(model, modules, self.device))
        self.folder.mkdir(parents=True, exist_ok=True)

    def encode(self, prompt: Prompt, text: str, negative: bool, options: dict[str, float]) -> Cond:
        """Return the conditioning from its file, or encode it and write the file."""
        entries: list[tuple[str, bytes | Tensor]] = [(f"text {negative}", text.encode())]
        entries += [("image", image) for image in prompt.images]
        entries += [(name, repr(float(value)).encode()) for name, value in sorted(options.items())]
        file = self.folder / f"{_digest(entries)}.safetensors"
        stored = _read(file)
        if stored is not None:
            return {n: tensor if n.endswith("_mask") else tensor.to(self.device) for n, tensor in stored.items()}
        cond = self._encode(prompt, text, negative, options)
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in cond.items()}
        temporary = file.with_suffix(f".{uuid4().hex}")
        save_file(tensors, temporary, metadata={"digest": _digest(sorted(tensors.items()))})
        temporary.replace(file)
        return cond


def _read(file: Path) -> Cond | None:
    """Return the tensors of a file, or None if it does not exist or is damaged, which is reported."""
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            cond = {name: stored.get_tensor(name) for name in sorted(stored.keys())}
            if (stored.metadata() or {}).get("digest") == _digest(cond.items()):
                return cond
    except SafetensorError:
        pass
    print(f"{file} is damaged: its text is encoded again", file=sys.stderr, flush=True)
    return None


def _encoder_entries(model: Model, modules: dict[str, nn.Module], device: torch.device) -> Entries:
    """Yield everything that determines an encoded text, except the text itself."""
    versions = omni_rollout.__version__, torch.__version__, version("transformers")
    yield "facts", json.dumps([device.type, *versions]).encode()
    for cls in model.__class__.__mro__[:-1]:
        yield cls.__name__, Path(inspect.getfile(cls)).read_bytes()
    for file in sorted(file for file in model.folder.rglob("*") if file.suffix in CONFIGURATION):
        yield file.relative_to(model.folder).as_posix(), file.read_bytes()
    for name, module in modules.items():
        if name != "net":
            yield from module.state_dict(prefix=f"{name}.").items()


def _digest(entries: Entries) -> str:
    """Return the SHA-256, in hexadecimal digits, of named bytes and tensors in order."""
    digest = hashlib.sha256()
    for name, content in entries:
        if isinstance(content, Tensor):
            digest.update(f"{name} {content.dtype} {tuple(content.shape)} ".encode())
            digest.update(content.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()
