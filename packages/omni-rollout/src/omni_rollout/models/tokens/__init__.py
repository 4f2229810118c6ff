"""One file per language model, independent of algorithms."""

from collections.abc import Callable
from pathlib import Path

from omni_rollout.files import read_json
from omni_rollout.models.hub import local_folder
from omni_rollout.models.tokens.qwen2_5_vl import Qwen25VL
from omni_rollout.models.tokens.qwen3_omni import Qwen3Omni
from omni_rollout.models.tokens.qwen_text import QwenText
from omni_rollout.tokens import TokenModel

# The architecture of config.json -> the model's class. A new model is a new line.
TOKEN_MODELS: dict[str, Callable[[str | Path], TokenModel]] = {
    "Qwen2ForCausalLM": QwenText,
    "Qwen3ForCausalLM": QwenText,
    "Qwen3MoeForCausalLM": QwenText,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "Qwen3OmniMoeForConditionalGeneration": Qwen3Omni,
    "Qwen3OmniMoeThinkerForConditionalGeneration": Qwen3Omni,
}


def open_token_model(path: str | Path) -> TokenModel:
    """Return the language model of a checkpoint, which is a folder or a hub id. No weights are read.

    Raises:
        ValueError: the folder does not exist, holds another model, or has a damaged configuration file.
    """
    folder = local_folder(path)
    architectures = read_json(folder / "config.json").get("architectures")
    kind = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(kind, str) or kind not in TOKEN_MODELS:
        actual = architectures if kind is None else kind
        raise ValueError(f"model must be the folder of a {' or '.join(TOKEN_MODELS)}, {folder} holds a {actual!r:.80}")
    return TOKEN_MODELS[kind](path)
