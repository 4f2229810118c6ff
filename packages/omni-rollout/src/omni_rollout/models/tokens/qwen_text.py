"""Qwen2.5 and Qwen3 (github.com/QwenLM/Qwen3): text in, text out. Both have the same layout."""

from pathlib import Path

from omni_rollout.models.tokens.transformers_model import TransformersModel


class QwenText(TransformersModel):
    """Qwen2.5 or Qwen3 for one checkpoint, with or without experts."""

    LORA_TARGETS = r"model\.layers\.\d+\.self_attn\.[qkvo]_proj"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        kind = self.config["architectures"][0].removesuffix("ForCausalLM")
        self.BLOCK_NAMES = (f"{kind}DecoderLayer",)  # the models differ only in names
