"""The conditioning of prompts by their texts and images, of which each is encoded once and cached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from omni_rollout.model import Model
from omni_rollout.types import Cond, Params, Parts, Prompt, join


@dataclass(frozen=True)
class TextCache:
    """Settings of the cache of encoded texts and references.

    max_mb: on the device, beside the newest, which always stays: 1024 are 270 of Qwen-Image's longest texts. folder: of
    files with the texts, which other processes and later runs find; empty for none.
    """

    max_mb: float = 1024
    folder: str = ""


TEXT_CACHE = TextCache()


class Conditioner:
    """A model's conditioning of prompts by the parts that `model.load` returns, cached.

    Calling it gives a batch's conditioning: each distinct text and all distinct images are encoded once.
    """

    def __init__(self, model: Model, parts: Parts, texts: TextCache = TEXT_CACHE) -> None:
        self.model, self.parts = model, parts
        self.max_bytes = texts.max_mb * 2**20
        self.encode: Callable[..., Cond] = lambda prompt, **how: model.encode(parts, prompt, **how)
        if texts.folder:
            from omni_rollout.text_files import TextFiles

            self.encode = TextFiles(model, parts, texts.folder).encode
        self._cached: dict[object, tuple[Prompt, Cond]] = {}  # the prompt keeps its images alive: the key has their ids

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], params: Params) -> Cond:
        cond = join([self._encode(prompt, params) for prompt in prompts], dim=0, what="encode")
        if self.model.is_guided(params):
            negative = join([self._encode(prompt, params, negative=True) for prompt in prompts], dim=0, what="encode")
            cond |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        fixed = repr(replace(params, sde_steps=()))  # which steps are kept changes nothing here
        others = [self._once(partial(self.model.condition, self.parts, p, params), p, fixed) for p in prompts]
        return cond | join(others, dim=0, what="condition")

    def _encode(self, prompt: Prompt, params: Params, *, negative: bool = False) -> Cond:
        text = (prompt.negative or self.model.NEGATES_TEXT * prompt.text) if negative else prompt.text
        options = {name: params.guidance.get(name, self.model.OPTIONS[name]) for name in self.model.TEXT_OPTIONS}
        encode = partial(self.encode, prompt, negative=negative, **options)
        return self._once(encode, prompt, negative, text, *options.items())

    def _once(self, make: Callable[[], Cond], prompt: Prompt, *facts: object) -> Cond:
        """Return what `make` returned for these facts and the prompt's images, which is cached.

        The newest is kept, and as many before it as `max_bytes` hold.
        """
        key = (*facts, *map(id, prompt.images))
        if key not in self._cached:
            self._cached[key] = prompt, make()
            while len(self._cached) > 1 and sum(num_bytes(kept) for _, kept in self._cached.values()) > self.max_bytes:
                self._cached.pop(next(iter(self._cached)))
        return self._cached[key][1]


def num_bytes(cond: Cond) -> int:
    """Return the memory that the tensors keep alive, which are views of more."""
    return sum(tensor.untyped_storage().nbytes() for tensor in cond.values())
