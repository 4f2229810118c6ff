"""BAGEL that thinks before it generates an image (arXiv 2505.14683, section on generation with thinking).

The sequence is a request to think, the prompt, the thought and the image. <|im_start|> and <|im_end|> enclose each
text; the model itself ends a thought. The negative omits both the prompt and the thought.

Shapes: B samples, P tokens of the longest request with prompt, T tokens of the longest thought, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from omni_rollout.models.bagel import MARKS, Bagel
from omni_rollout.tokens import TokenTrajectory
from omni_rollout.types import Cond, Parts, Prompt, join

REQUEST = (  # as released
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> "
    "image here"
)


class BagelThoughts:
    """Unfinished thoughts with a KV cache. ids, words: from `ThinkingBagel.batch`."""

    def __init__(self, ids: Tensor, words: Tensor) -> None:
        from omni_rollout.models.bagel_net import KeyValues

        self.ids, self.words, self.kept = ids, words, KeyValues()

    def next_logits(self, net: nn.Module, tokens: Tensor | None) -> Tensor:
        """Return the logits [B, V] after the last sampled tokens [B], or None before the first ones."""
        if tokens is not None:
            self.ids = tokens[:, None]
            self.words = pad(self.words, [0, 1], value=True)
        logits: Tensor = net(input_ids=self.ids, attention_mask=self.words, kept=self.kept, only_last=True).logits
        return logits[:, 0]


class ThinkingBagel(Bagel):
    """BAGEL for one checkpoint, with its text head. Prompts have no references."""

    LORA_TARGETS: ClassVar[tuple[str, ...]] = (  # of image tokens as published, and the same of text tokens
        *Bagel.LORA_TARGETS,
        *(name.replace("_moe_gen", "") for name in Bagel.LORA_TARGETS),
    )
    IMAGES = range(1)
    suppressed: tuple[int, ...] = ()

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.tokenizer = self._load("tokenizer", "cpu", torch.float32)
        self.begin, self.end = self.tokenizer.convert_tokens_to_ids(list(MARKS[:2]))
        self.ends = (self.end,)

    def encode(self, parts: Parts, prompt: Prompt, *, negative: bool = False) -> Cond:
        """Encode as Bagel does, with the request to think before the text."""
        request = super().encode(parts, replace(prompt, text=REQUEST))
        encoded = super().encode(parts, prompt, negative=negative)
        return request | {name: torch.cat([request[name], encoded[name]]) for name in ("ids", "ids_mask")}

    def thought_inputs(self, ids: Tensor) -> Cond:
        """Return the tokens before a thought, `input_ids` [P], for the tokens of one prompt from `encode`."""
        return {"input_ids": pad(ids, [0, 1], value=self.begin)}

    def batch(self, encoded: Sequence[Cond], tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids [B, P + T] of left-padded prompts and thoughts [B, T], and their mask, False for padding."""
        device, length = tokens.device, max(len(item["input_ids"]) for item in encoded)
        rows = [(item["input_ids"], length - len(item["input_ids"])) for item in encoded]
        ids = torch.stack([pad(row, [left, 0], value=self.end) for row, left in rows]).to(device)
        words = torch.stack([pad(torch.ones_like(row), [left, 0]) for row, left in rows]).to(device)
        return torch.cat([ids, tokens.masked_fill(~mask, self.end)], dim=1), torch.cat([words.bool(), mask], dim=1)

    def inputs(self, encoded: Sequence[Cond], tokens: Tensor, mask: Tensor) -> Cond:
        """Return the net's inputs for prompts and thoughts [B, T], on the device of `tokens`."""
        ids, words = self.batch(encoded, tokens, mask)
        return {"input_ids": ids, "attention_mask": words}

    def predict(self, net: nn.Module, inputs: Cond) -> Tensor:
        """Return the output of the net's text head."""
        logits: Tensor = net(**inputs, use_cache=False).logits
        return logits

    def start(self, encoded: Sequence[Cond], device: torch.device) -> "BagelThoughts":
        """Return thoughts without any tokens yet."""
        empty = torch.empty(len(encoded), 0, dtype=torch.long, device=device)
        return BagelThoughts(*self.batch(encoded, empty, empty.bool()))

    def decode_text(self, tokens: Tensor) -> str:
        """Return the text of one thought, without marks."""
        text: Any = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return str(text)

    def with_thoughts(self, cond: Cond, thoughts: TokenTrajectory) -> Cond:
        """Return the image's conditioning: `cond` with the thoughts after the prompts. Missing end tokens are added.

        cond: from `encode`, with an axis B.
        """
        device, rows = cond["ids"].device, []
        for item, tokens, mask in zip(thoughts.encoded, thoughts.tokens, thoughts.mask, strict=True):
            thought = tokens[mask]
            ids = torch.cat([item["input_ids"], thought[thought != self.end], torch.tensor([self.end])]).to(device)
            rows.append({"ids": ids, "ids_mask": torch.ones(len(ids), dtype=torch.bool)})
        return cond | join(rows, dim=0, what="thoughts")

    def _class(self, part: str) -> Any:
        from omni_rollout.models.bagel_net import BagelThinker

        return BagelThinker if part == "transformer" else super()._class(part)
