"""Encoded texts on disk, for later runs and other ranks: a safetensors file for each.

The folder of a file is named after the encoder: the bits of all frozen parts, their configuration, the code that runs
them and its device. The file is named after what was encoded. So whatever is found has been made alike.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from omni_rollout.model import Model
from omni_rollout.types import Cond, Parts, Prompt

CONFIGURATION = (".json", ".txt", ".model", ".jinja")
LIBRARIES = ("omni-rollout", "torch", "transformers")
Entries = Iterable[tuple[str, bytes | Tensor]]


class TextFiles:
    """The conditioning of texts, from files below `folder` where it is there, or else from the model, and kept there.

    Any number of processes may share the folder: a file appears whole. One that is damaged is named and made anew.
    """

    def __init__(self, model: Model, parts: Parts, folder: str | Path) -> None:
        self.model, self.parts = model, parts
        modules = {name: part for name, part in sorted(vars(parts).items()) if isinstance(part, nn.Module)}
        self.device = next(tensor.device for module in modules.values() for tensor in module.parameters())
        self.folder = Path(folder) / _digest(_what_encodes(model, modules, self.device))
        self.folder.mkdir(parents=True, exist_ok=True)

    def encode(self, prompt: Prompt, *, negative: bool = False, **options: float) -> Cond:
        """One sample's conditioning by its text and images, as `Model.encode` has it."""
        others: list[tuple[str, bytes | Tensor]] = [("image", image) for image in prompt.images]
        others += [(name, repr(float(value)).encode()) for name, value in sorted(options.items())]
        text = (prompt.negative or self.model.NEGATES_TEXT * prompt.text) if negative else prompt.text
        file = self.folder / f"{_digest([(f'text {negative}', text.encode()), *others])}.safetensors"
        found = _read(file)
        if found is not None:
            return {n: tensor if n.endswith("_mask") else tensor.to(self.device) for n, tensor in found.items()}
        cond = self.model.encode(self.parts, prompt, negative=negative, **options)
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in cond.items()}
        temporary = file.with_suffix(f".{uuid4().hex}")
        save_file(tensors, temporary, metadata={"digest": _digest(sorted(tensors.items()))})
        temporary.replace(file)
        return cond


def _read(file: Path) -> Cond | None:
    """The tensors of a file; None where there is none, or a damaged one, which is named."""
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


def _what_encodes(model: Model, modules: dict[str, nn.Module], device: torch.device) -> Entries:
    """All that the bits of an encoded text depend on besides the text."""
    yield "facts", json.dumps([device.type, *(version(name) for name in LIBRARIES)]).encode()
    for cls in model.__class__.__mro__[:-1]:
        yield cls.__name__, Path(inspect.getfile(cls)).read_bytes()
    for file in sorted(file for file in model.folder.rglob("*") if file.suffix in CONFIGURATION):
        yield file.relative_to(model.folder).as_posix(), file.read_bytes()
    for name, module in modules.items():
        if name != "net":
            yield from module.state_dict(prefix=f"{name}.").items()


def _digest(entries: Entries) -> str:
    """SHA-256, in hexadecimal digits, of named bytes and tensors in their order."""
    digest = hashlib.sha256()
    for name, content in entries:
        if isinstance(content, Tensor):
            digest.update(f"{name} {content.dtype} {tuple(content.shape)} ".encode())
            digest.update(content.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()
