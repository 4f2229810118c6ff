"""What language models have in common whose checkpoint is transformers': files, texts, padding, loading, saving.

Shapes: B samples, P tokens of the longest prompt, T of the longest answer.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from omni_rollout.files import read_json, safetensors_files, safetensors_shapes
from omni_rollout.models.diffusers_model import local_folder
from omni_rollout.types import Cond, Prompt

PARTS = {
    "images": "image",
    "video": "video",
    "audio": "audio",
}  # what a prompt may hold -> how a chat template names it
MEDIA = ("pixel_values", "pixel_values_videos", "input_features")  # what towers take


class TransformersModel:
    """The half of a TokenModel that the checkpoint's files decide; a subclass adds media.

    PLACES: entries of config.json, tokens that stand for media or enclose them in a prompt, and are in no answer.
    GROWS: entries of `encode` that are padded behind, along their last axis, before they are joined.
    """

    BLOCK_NAMES: tuple[str, ...]
    LORA_TARGETS: str
    FROZEN: ClassVar[tuple[str, ...]] = ()
    MEDIA: ClassVar[tuple[str, ...]] = ()
    PLACES: ClassVar[tuple[str, ...]] = ()
    GROWS: ClassVar[tuple[str, ...]] = ()
    sample_rate: int = 0
    prefix: str = ""
    boundary: float = 0.0
    dtype = torch.float32

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        self.path, self.folder = str(path), local_folder(path)
        self.config = self.read_config()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError, TypeError) as exc:
            raise ValueError(f"model is incomplete: {self.folder} has no tokenizer: {exc}") from exc
        template = self.folder / "chat_template.json"  # where releases of models with media have it
        if self.tokenizer.chat_template is None and template.is_file():
            self.tokenizer.chat_template = read_json(template)["chat_template"]
        self.suppressed = tuple(int(self.config[name]) for name in self.PLACES)
        said = self.folder / "generation_config.json"
        ends = read_json(said).get("eos_token_id", []) if said.is_file() else []
        ends = [self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
        self.ends = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
        if not self.ends:
            raise ValueError(f"model must have a token that ends answers, {self.folder} names none")

    def read_config(self) -> dict[str, Any]:
        """The configuration of the net."""
        return read_json(self.folder / "config.json")

    @property
    def nets(self) -> Mapping[str, str]:
        """The net itself, whose name is empty."""
        return {"": "."}

    def check_files(self) -> None:
        """Raises ValueError unless the weights are there and whole; of a hub id they are fetched when they are read."""
        if Path(self.path).is_dir():
            safetensors_shapes(safetensors_files(self.folder))

    def net_class(self) -> Any:
        """The class of the net."""
        import transformers

        return getattr(transformers, self.config["architectures"][0])

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The net with the checkpoint's weights, frozen, in eval mode.

        Raises:
            ValueError: the weights do not fit the configuration.
        """
        local_folder(self.path, "*.safetensors", "*.json")
        net, told = self.net_class().from_pretrained(
            self.folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
        lacking = sorted({*told["missing_keys"], *(str(key) for key in told["mismatched_keys"])})
        if lacking:
            raise ValueError(f"model is incomplete: {self.folder} lacks {len(lacking)} weights, such as {lacking[0]}")
        loaded: nn.Module = net.requires_grad_(False).eval().to(device)
        return loaded

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """The net on the meta device, for names and shapes."""
        cls = self.net_class()
        with torch.device("meta"):
            net: nn.Module = cls._from_config(self.net_config(), attn_implementation="sdpa")
        return net.requires_grad_(False).eval()

    def net_config(self) -> Any:
        """The configuration as the net's class takes it."""
        return self.net_class().config_class.from_pretrained(self.folder)

    def encode(self, prompt: Prompt) -> Cond:
        """One prompt: `input_ids` [P], and the tensors of its media under the net's own names.

        Raises:
            ValueError: media that the model does not take, or a text with tokens that stand for media.
        """
        kinds = [kind for name, kind in PARTS.items() if getattr(prompt, name) not in (None, ())]
        for kind in kinds:
            if kind not in self.MEDIA:
                have = " and ".join(self.MEDIA) or "text alone"
                raise ValueError(f"prompts of a {type(self).__name__} must hold {have}, got {kind}")
        media, places = self.encode_media(prompt)
        text = prompt.text
        if self.tokenizer.chat_template is not None:
            chat = prompt.meta.get("messages") or self.chat_of(prompt, kinds)
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        elif "messages" in prompt.meta:
            raise ValueError(f"messages need a chat template, and {self.folder} has none")
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if (found := sum(i in places for i in ids)) != sum(map(len, places.values())):
            raise ValueError(f"a prompt must have a place for each of its media, got {found} in {text!r:.80}")
        counts = {token: iter(sizes) for token, sizes in places.items()}
        spread = [token for token in ids for _ in range(next(counts[token]) if token in counts else 1)]
        return {"input_ids": torch.tensor(spread), **media}

    def chat_of(self, prompt: Prompt, kinds: Sequence[str]) -> list[dict[str, object]]:
        """The messages of a prompt that has none: the system's, if any, and the user's with media before the text."""
        said: list[dict[str, str]] = [{"type": kind} for kind in kinds if kind != "image"]
        said = [{"type": "image"}] * len(prompt.images) + said + [{"type": "text", "text": prompt.text}]
        chat: list[dict[str, object]] = [{"role": "user", "content": said if kinds else prompt.text}]
        if system := prompt.meta.get("system"):
            chat.insert(0, {"role": "system", "content": str(system)})
        return chat

    def encode_media(self, prompt: Prompt) -> tuple[Cond, dict[int, list[int]]]:
        """The tensors of a prompt's media; and by the token that stands for one, how many each takes."""
        return {}, {token: [] for token in self.suppressed}

    def inputs(self, encoded: Sequence[Cond], tokens: Tensor, mask: Tensor) -> Cond:
        """What the net is called with: prompts, padded on their left, and answers [B, T], on the device of `tokens`."""
        device, length = tokens.device, max(len(each["input_ids"]) for each in encoded)
        rows = [(each["input_ids"], length - len(each["input_ids"])) for each in encoded]
        ids = torch.stack([pad(row, [left, 0], value=self.ends[0]) for row, left in rows]).to(device)
        given = torch.stack([pad(torch.ones_like(row), [left, 0]) for row, left in rows]).to(device)
        together = {
            "input_ids": torch.cat([ids, tokens.masked_fill(~mask, self.ends[0])], dim=1),
            "attention_mask": torch.cat([given, mask.long()], dim=1),
        }
        for name in dict.fromkeys(name for each in encoded for name in each if name != "input_ids"):
            parts = [each[name] for each in encoded if name in each]
            if name in self.GROWS:
                longest = max(part.shape[-1] for part in parts)
                parts = [pad(part, [0, longest - part.shape[-1]]) for part in parts]
            together[name] = torch.cat(parts).to(device, self.dtype if name in MEDIA else None)
        return together | self.positions(together)

    def positions(self, inputs: Cond) -> Cond:
        """The places of tokens, as transformers' generation has them."""
        places = inputs["attention_mask"].cumsum(dim=1) - 1
        return {"position_ids": places.masked_fill(inputs["attention_mask"] == 0, 1)}

    def decode(self, tokens: Tensor) -> str:
        """The text of one answer, without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def save(self, net: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes full weights, by the net's names, where transformers opens them, with all else of the checkpoint."""
        empty: Any = self.empty_net()
        empty.save_pretrained(folder, state_dict=dict(weights))
        self.finish(folder)

    def finish(self, folder: Path) -> None:
        """Puts what is not trained beside exported weights: tokenizer, processors, templates, how to generate."""
        (folder / "generation_config.json").unlink(missing_ok=True)  # a default one, with fewer ends
        for file in self.folder.iterdir():
            is_small = file.suffix in (".json", ".txt", ".jinja", ".model") and "safetensors" not in file.name
            if is_small and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
