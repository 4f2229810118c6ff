"""Base of language models with transformers' checkpoints: files, texts, padding, loading, saving.

Shapes: B samples, P tokens of the longest prompt, T tokens of the longest answer.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from omni_rollout.files import check_counts, read_json, safetensors_bytes, safetensors_files, safetensors_slices
from omni_rollout.models.hub import local_folder
from omni_rollout.models.parts import RELEASED, UNUSABLE, checked_build, one_line, open_tokenizer
from omni_rollout.types import Cond, Prompt

# Field of a prompt's media -> name in chat templates.
PARTS = {"images": "image", "video": "video", "audio": "audio"}
MEDIA = ("pixel_values", "pixel_values_videos", "input_features")  # inputs of towers

MAX_RENDERED = 2**20  # characters that a chat template may add to a chat


class TransformersModel:
    """The part of a TokenModel that depends on the checkpoint's files; a subclass adds media.

    PLACES: entries of config.json with the tokens of media placeholders and their marks, which no answer may contain.
    GROWS: entries of `encode` that are padded at the end of their last axis before concatenation.
    """

    BLOCK_NAMES: tuple[str, ...]
    EXPERT_NAMES: ClassVar[tuple[str, ...]] = ()
    LORA_TARGETS: str
    FROZEN: ClassVar[tuple[str, ...]] = ()
    MEDIA: ClassVar[tuple[str, ...]] = ()
    PLACES: ClassVar[tuple[str, ...]] = ()
    GROWS: ClassVar[tuple[str, ...]] = ()
    sample_rate: int = 0
    prefix: str = ""
    boundary: float = 0.0
    reads_weights: bool = True
    reading: Callable[[str, int], AbstractContextManager[None]] = staticmethod(lambda part, size: nullcontext())
    dtype = torch.float32

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        self.path, self.folder = str(path), local_folder(path)
        self.file = self.folder / "config.json"
        self.config = self.read_config()
        self.net_config()  # checked before the tokenizer also reads it
        self.tokenizer: Any = open_tokenizer(AutoTokenizer, self.folder)
        template = self.folder / "chat_template.json"  # in released models with media
        if self.tokenizer.chat_template is None and template.is_file():
            self.tokenizer.chat_template = read_json(template).get("chat_template")
        self.suppressed = tuple(_token(self.file, name, self.config.get(name)) for name in self.PLACES)
        file = self.folder / "generation_config.json"
        ends = read_json(file).get("eos_token_id", []) if file.is_file() else []
        ends = [self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
        self.ends = tuple(dict.fromkeys(_token(file, "eos_token_id", end) for end in ends if end is not None))
        if not self.ends:
            raise ValueError(f"model must have a token that ends answers, {self.folder} names none")

    def read_config(self) -> dict[str, Any]:
        """Return the net's configuration."""
        return read_json(self.file)

    @property
    def nets(self) -> Mapping[str, str]:
        """The single net, whose name is empty."""
        return {"": "."}

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the checkpoint's weights, according to its configuration; float32 if that has none."""
        dtype: torch.dtype | None = self.net_config().dtype
        return dtype or torch.float32

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Tokens by their texts."""
        return dict(self.tokenizer.get_vocab())

    def check_files(self) -> None:
        """Raise ValueError unless all files are complete and consistent; no weights are read.

        The weights of a hub id are checked by `load_net`.
        """
        with _silence_transformers():
            is_whole = Path(self.path).is_dir() and self.reads_weights and RELEASED not in self.folder.parents
            net: Any = self._read(torch.float32, values=False) if is_whole else self.empty_net()
        size, highest = net.get_input_embeddings().num_embeddings, max(self.tokenizer.get_vocab().values())
        if (token := max(highest, *self.suppressed, *self.ends)) >= size:
            raise ValueError(f"model is damaged: {self.folder} has tokens up to {token}, its vocab_size is {size}")
        if self.tokenizer.chat_template is not None:
            chat = self.build_chat(Prompt("Hi.", group=0, index=0, seed=0), ())
            special = json.dumps(self.tokenizer.special_tokens_map)
            check_template(self.folder, self.tokenizer.get_chat_template(), json.dumps(chat), special)

    def net_class(self) -> Any:
        """Return the class of the net."""
        import transformers

        return getattr(transformers, self.config["architectures"][0])

    def load_net(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Return the net with the checkpoint's weights, frozen, in eval mode.

        Raises:
            ValueError: the weights do not fit the configuration, or are not finite.
        """
        if not self.reads_weights:
            return self._make(torch.device(device), dtype)
        local_folder(self.path, "*.safetensors", "*.json")
        with self.reading("weights", self.weight_bytes()):
            net = self._read(dtype, values=True).requires_grad_(False).eval().to(device)
        for name, weight in net.named_parameters():
            if not (weight.sum().isfinite() or weight.isfinite().all()):  # a fast check first
                raise ValueError(f"model is damaged: {name} of {self.folder} is not finite")
        return net

    def weight_bytes(self) -> int:
        """Return the size of the weight files, except those of a hub id that are not yet fetched."""
        return safetensors_bytes(self.folder, "model") if self.reads_weights else 0

    def _read(self, dtype: torch.dtype, *, values: bool) -> nn.Module:
        """Return the net with all weights of the files, or if not `values`, on the meta device with only their shapes.

        transformers opens no files itself: it might choose others, even pickles.
        """
        cls = self.net_class()
        with (
            safetensors_slices(safetensors_files(self.folder, "model")) as slices,
            checked_build(self.file, cls.__name__),
        ):
            selected = {name: part for name, part in slices.items() if name.startswith(self.prefix)}
            net, info = cls.from_pretrained(
                None,
                config=self.net_config(),
                state_dict=selected
                if values
                else {n: torch.empty(p.get_shape(), device="meta") for n, p in selected.items()},
                device_map=None if values else "meta",
                dtype=dtype,
                attn_implementation="sdpa",
                ignore_mismatched_sizes=True,  # so that they are reported below
                output_loading_info=True,
                trust_remote_code=False,
            )
        if missing := info["missing_keys"]:
            raise ValueError(f"model is incomplete: {self.folder} lacks {len(missing)} weights, such as {min(missing)}")
        if surplus := info["unexpected_keys"]:
            summary = f"{len(surplus)} weights that its configuration lacks, such as {min(surplus)}"
            raise ValueError(f"model is damaged: {self.folder} has {summary}")
        for name, actual, shape in info["mismatched_keys"]:
            detail = f"{tuple(actual)}, its configuration says {tuple(shape)}"
            raise ValueError(f"model is damaged: {name} of {self.folder} has the shape {detail}")
        loaded: nn.Module = net
        return loaded

    def empty_net(self, *, buffers: bool = False) -> nn.Module:
        """Return the net on the meta device, for names and shapes. buffers: True to materialize the buffers."""
        from accelerate import init_empty_weights

        return self._make(init_empty_weights(False) if buffers else torch.device("meta"), torch.float32)

    def _make(self, place: AbstractContextManager[Any], dtype: torch.dtype) -> nn.Module:
        """Return the net, frozen, with uninitialized weights in that place."""
        from transformers.initialization import no_init_weights

        cls = self.net_class()
        with checked_build(self.file, cls.__name__), place, no_init_weights():
            net: Any = cls._from_config(self.net_config(), attn_implementation="sdpa", dtype=dtype)
        net.tie_weights()
        frozen: nn.Module = net.requires_grad_(False).eval()
        return frozen

    def net_config(self) -> Any:
        """Return the configuration for the net's class."""
        content, cls = read_json(self.file), self.net_class()
        check_counts(content, self.file)
        if "quantization_config" in content:
            raise ValueError(f"model must not be quantized, {self.file} has a quantization_config")
        with checked_build(self.file, cls.__name__):
            return self.parse_config(content)

    def parse_config(self, content: dict[str, Any]) -> Any:
        """Return the configuration for a file's object."""
        return self.net_class().config_class.from_dict(content)

    def encode(self, prompt: Prompt) -> Cond:
        """Return a prompt's `input_ids` [P] and the tensors of its media under the net's names.

        Raises:
            ValueError: the model does not support the media, or the text contains media placeholders.
        """
        kinds = [kind for name, kind in PARTS.items() if getattr(prompt, name) not in (None, ())]
        for kind in kinds:
            if kind not in self.MEDIA:
                expected = " and ".join(self.MEDIA) or "only text"
                raise ValueError(f"prompts of a {type(self).__name__} must hold {expected}, got {kind}")
        media, places = self.encode_media(prompt)
        text = prompt.text
        if self.tokenizer.chat_template is not None:
            chat = prompt.meta.get("messages") or self.build_chat(prompt, kinds)
            text = self._render(chat)
        elif "messages" in prompt.meta:
            raise ValueError(f"messages need a chat template, and {self.folder} has none")
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if (count := sum(i in places for i in ids)) != sum(map(len, places.values())):
            raise ValueError(f"a prompt must have a place for each of its media, got {count} in {text!r:.80}")
        counts = {token: iter(sizes) for token, sizes in places.items()}
        spread = [token for token in ids for _ in range(next(counts[token]) if token in counts else 1)]
        return {"input_ids": torch.tensor(spread), **media}

    def _render(self, chat: object) -> str:
        """Return a chat rendered with the checkpoint's template."""
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, *UNUSABLE) as exc:
            raise ValueError(f"messages must fit the chat template of {self.folder}, got {one_line(exc)}") from exc
        if len(text) > (limit := MAX_RENDERED + 2 * len(repr(chat))):
            raise ValueError(f"the chat template of {self.folder} must write at most {limit} letters, got {len(text)}")
        return text

    def build_chat(self, prompt: Prompt, kinds: Sequence[str]) -> list[dict[str, object]]:
        """Return messages for a prompt without them: the system's, if any, and the user's with media first."""
        content: list[dict[str, str]] = [{"type": kind} for kind in kinds if kind != "image"]
        content = [{"type": "image"}] * len(prompt.images) + content + [{"type": "text", "text": prompt.text}]
        chat: list[dict[str, object]] = [{"role": "user", "content": content if kinds else prompt.text}]
        if system := prompt.meta.get("system"):
            chat.insert(0, {"role": "system", "content": str(system)})
        return chat

    def encode_media(self, prompt: Prompt) -> tuple[Cond, dict[int, list[int]]]:
        """Return the tensors of a prompt's media, and the number of tokens of each medium by placeholder."""
        return {}, {token: [] for token in self.suppressed}

    def inputs(self, encoded: Sequence[Cond], tokens: Tensor, mask: Tensor) -> Cond:
        """Return the net's inputs for left-padded prompts and answers [B, T], on the device of `tokens`."""
        device, length = tokens.device, max(len(item["input_ids"]) for item in encoded)
        rows = [(item["input_ids"], length - len(item["input_ids"])) for item in encoded]
        ids = torch.stack([pad(row, [left, 0], value=self.ends[0]) for row, left in rows]).to(device)
        prompt_mask = torch.stack([pad(torch.ones_like(row), [left, 0]) for row, left in rows]).to(device)
        batch = {
            "input_ids": torch.cat([ids, tokens.masked_fill(~mask, self.ends[0])], dim=1),
            "attention_mask": torch.cat([prompt_mask, mask.long()], dim=1),
        }
        for name in dict.fromkeys(name for item in encoded for name in item if name != "input_ids"):
            parts = [item[name] for item in encoded if name in item]
            if name in self.GROWS:
                longest = max(part.shape[-1] for part in parts)
                parts = [pad(part, [0, longest - part.shape[-1]]) for part in parts]
            batch[name] = torch.cat(parts).to(device, self.dtype if name in MEDIA else None)
        return batch | self.positions(batch)

    def predict(self, net: nn.Module, inputs: Cond) -> Tensor:
        """Return the output of the net's head."""
        logits: Tensor = net(**inputs, use_cache=False).logits
        return logits

    def positions(self, inputs: Cond) -> Cond:
        """Return the token positions, as in transformers' generation."""
        places = inputs["attention_mask"].cumsum(dim=1) - 1
        return {"position_ids": places.masked_fill(inputs["attention_mask"] == 0, 1)}

    def decode(self, tokens: Tensor) -> str:
        """Return the text of one answer, without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text in an answer, without end and media tokens, which the text must not contain."""
        left_out = {*self.ends, *self.suppressed}
        return [token for token in self.tokenizer(text, add_special_tokens=False).input_ids if token not in left_out]

    def save(self, net: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write full weights, under the net's names, in transformers' layout, with the checkpoint's other files."""
        empty: Any = self.empty_net()
        empty.save_pretrained(folder, state_dict=dict(weights))
        self.finish(folder)

    def finish(self, folder: Path) -> None:
        """Add tokenizer, processors, templates and generation settings to exported weights."""
        (folder / "generation_config.json").unlink(missing_ok=True)  # the library's default, with fewer end tokens
        for file in self.folder.iterdir():
            is_small = file.suffix in (".json", ".txt", ".jinja", ".model") and "safetensors" not in file.name
            if is_small and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _token(file: Path, name: str, value: object) -> int:
    """Return an entry of a file if it is a token.

    Raises:
        ValueError: the entry is not a token.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} of {file} must be a token, got {value!r:.80}")
    return value


@cache
def check_template(folder: Path, template: str, chat: str, special: str) -> None:
    """Raise ValueError if a chat template fails, or takes too much time or memory, for a chat of one word.

    It is rendered in a separate process, which limits both. chat, special: inputs of `rendering` in JSON.
    """
    request = f'{{"conversations": [{chat}], "chat_template": {json.dumps(template)}, "special": {special}}}'
    script = Path(__file__).with_name("rendering.py")
    result = subprocess.run([sys.executable, "-P", script], input=request, capture_output=True, text=True)
    if result.returncode:
        why = result.stderr.strip().rpartition("\n")[2] if result.returncode > 0 else "it took longer"
        rule = "must render a chat of one word within 10 s and 2 GB"
        raise ValueError(f"model is damaged: the chat template of {folder} {rule}, got {why:.300}")


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Silence transformers in the `with` block; errors are raised instead."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
