"""Build a folder with random weights from a released model's configuration included in omni-rollout.

    python scripts/released_folder.py --out models/sd35 stabilityai/stable-diffusion-3.5-medium

By default it is reduced by one rule: fewer layers, narrower layers, a smaller vocabulary, and a sixteenth of the image
sizes where a size is a token (HunyuanImage-3.0). Each part keeps two heads of the released size, and two layers of a
net or four of an encoder. Every other field is the released one: guidance embeddings, query and key norms, position
axes, patches, latent channels and their statistics, schedules. With `--whole`, only text encoders lose layers, down to
`--encoder-layers`. Weights are in bfloat16; tokenizers have one token per letter.
"""

import argparse
import inspect
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tiny_models import (
    BagelFolder,
    HunyuanImageFolder,
    build_chat_tokenizer,
    build_clip_tokenizer,
    build_gemma_tokenizer,
    build_hunyuan_tokenizer,
    build_qwen_tokenizer,
    build_t5_tokenizer,
    draw_weights,
)

HEADS, LAYERS, ENCODER_LAYERS, EXPERTS, CHANNELS = 2, 2, 4, 16, 32  # CHANNELS: of the narrowest layer of a VAE
SMALLER = 16  # for HunyuanImage-3.0, whose tokens name the sizes of its images
SHARD_SIZE = "2GB"  # maximum size of weight files
HEAD_COUNTS = (  # the first one present is used
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "encoder_attention_heads",
    "video_connector_num_attention_heads",
)
OTHER_HEAD_COUNTS = ("audio_num_attention_heads", "audio_connector_num_attention_heads", "n_kv_heads")
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "d_model", "d_ff", "dim", "ffn_dim", "embed_dim",
          "caption_projection_dim", "projection_dim", "added_kv_proj_dim", "cross_attention_dim", "encoder_ffn_dim",
          "audio_cross_attention_dim", "video_hidden_dim", "audio_hidden_dim", "patch_embed_hidden_dim",
          "downsample_hidden_size", "cross_attention_hidden_size", "text_intermediate_size")  # fmt: skip
DEPTHS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "num_refiner_layers", "num_hidden_layers",
          "num_decoder_layers", "depth", "encoder_layers")  # fmt: skip
LAYER_NUMBERS = ("dual_attention_layers", "deepstack_visual_indexes", "fullatt_block_indexes")
CHANNEL_COUNTS = ("block_out_channels", "decoder_block_out_channels", "base_dim", "decoder_base_dim",
                  "encoder_channels", "hidden_channels", "bwe_hidden_channels")  # fmt: skip
VAE_DEPTHS = ("layers_per_block", "decoder_layers_per_block", "num_res_blocks", "encoder_transformer_depths")
READS = {  # class of a net -> field -> the encoders whose widths add up to it
    "SD3Transformer2DModel": {
        "joint_attention_dim": ["text_encoder_3"],
        "pooled_projection_dim": ["text_encoder", "text_encoder_2"],
    },
    "FluxTransformer2DModel": {"joint_attention_dim": ["text_encoder_2"], "pooled_projection_dim": ["text_encoder"]},
    "Flux2Transformer2DModel": {"joint_attention_dim": ["text_encoder"] * 3},
    "QwenImageTransformer2DModel": {"joint_attention_dim": ["text_encoder"]},
    "QwenImage21Transformer2DModel": {"context_in_dim": ["text_encoder"]},
    "Flux3Transformer2DModel": {"joint_attention_dim": ["text_encoder"] * 8},
    "Krea2Transformer2DModel": {"text_hidden_dim": ["text_encoder"]},
    "ZImageTransformer2DModel": {"cap_feat_dim": ["text_encoder"]},
    "WanTransformer3DModel": {"text_dim": ["text_encoder"], "image_dim": ["image_encoder"]},
    "LTX2VideoTransformer3DModel": {"caption_channels": ["text_encoder"]},
    "LTX2TextConnectors": {"caption_channels": ["text_encoder"]},
    "HunyuanVideo15Transformer3DModel": {
        "text_embed_dim": ["text_encoder"],
        "text_embed_2_dim": ["text_encoder_2"],
        "image_embed_dim": ["image_encoder"],
    },
    "StableAudio3DiTModel": {"cond_token_dim": ["text_encoder"], "global_cond_dim": ["text_encoder"]},
    "StableAudio3DurationEmbedder": {"output_dim": ["text_encoder"]},
}
NAMED_TOKENS = {  # field -> its token in Qwen's chats
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "audio_token_id": "<|audio_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}


@dataclass(frozen=True)
class Cut:
    """The part of a released model to keep. is_whole: True for everything except layers of encoders."""

    is_whole: bool = False
    encoder_layers: int = ENCODER_LAYERS

    def net(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a net or a connector."""
        return dict(config) if self.is_whole else narrow(config, LAYERS)

    def encoder(self, config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
        """Return the configuration of an encoder, with the special tokens of the tokenizer."""
        cut = shallow(config, self.encoder_layers) if self.is_whole else narrow(config, self.encoder_layers)
        return with_words(with_towers(cut), tokenizer, None if self.is_whole else len(tokenizer))

    def vae(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a VAE or a vocoder."""
        return dict(config) if self.is_whole else thin(config)


def narrow(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the configuration of a transformer and its parts with `layers` layers and HEADS heads of the same size.

    Widths shrink with the number of heads. Keys and values have fewer heads if they do in the release.
    """
    heads = next((config[name] for name in HEAD_COUNTS if isinstance(config.get(name), int)), HEADS)

    def width(value: Any) -> Any:
        if isinstance(value, list):
            return [width(each) for each in value[:layers]]
        return value and max(8, value * min(HEADS, heads) // heads // 8 * 8)

    cut: dict[str, Any] = {}
    for name, value in shallow(config, layers).items():
        if isinstance(value, Mapping):
            cut[name] = narrow(config[name], layers)
        elif name in WIDTHS:
            cut[name] = width(value)
        elif name in HEAD_COUNTS + OTHER_HEAD_COUNTS:
            cut[name] = min(value, HEADS)
        elif name == "num_key_value_heads":
            cut[name] = HEADS // 2 if value < heads else min(value, HEADS)
        elif name == "num_experts":
            cut[name] = min(value, EXPERTS)
        else:
            cut[name] = (
                value[:layers] if name in ("moe_topk", "num_shared_expert") and isinstance(value, list) else value
            )
    return cut


def shallow(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration with at most `layers` layers, evenly spaced from the first to the last one."""
    depth = next((config[name] for name in DEPTHS if name in config), 1)
    cut: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            cut[name] = shallow(value, layers)
        elif name in DEPTHS:
            cut[name] = min(value, layers)
        elif name in LAYER_NUMBERS and value and depth > layers:
            cut[name] = sorted({index * (layers - 1) // (depth - 1) for index in value})
        elif name not in ("layer_types", "id2label", "label2id"):  # layer types follow from the number of layers
            cut[name] = value
    return cut


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a VAE whose narrowest layer has CHANNELS channels, with one layer per resolution."""

    def flat(value: Any) -> list[int]:
        return list(value) if isinstance(value, list | tuple) else [value] if value else []

    least = min((min(flat(config[name])) for name in CHANNEL_COUNTS if flat(config.get(name))), default=CHANNELS)

    def channels(value: int) -> int:
        return max(8, value * CHANNELS // least // 8 * 8)

    cut: dict[str, Any] = dict(config)
    for name, value in config.items():
        if name in CHANNEL_COUNTS and value:
            cut[name] = [channels(each) for each in value] if isinstance(value, list | tuple) else channels(value)
        if name in VAE_DEPTHS:
            cut[name] = [1 for _ in value] if isinstance(value, list | tuple) else 1
    return cut


def with_towers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a language model whose towers output the width of its text model."""
    width, joined = width_of(config), dict(config)
    for tower, field in (("vision_config", "out_hidden_size"), ("audio_config", "output_dim")):
        if field in joined.get(tower, {}):
            joined[tower] = {**joined[tower], field: width}
    return joined


def with_words(config: Mapping[str, Any], tokenizer: Any, words: int | None) -> dict[str, Any]:
    """Return a configuration with the special tokens of the tokenizer and, if not None, `words` as vocabulary size."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    ids |= {name: known[token] for name, token in NAMED_TOKENS.items() if token in known}
    own = {name: ids[name] for name in config if name in ids}
    own |= {name: 1 for name in config if str(name).endswith("_token_index")}  # of images, which no text contains
    own |= {"vocab_size": words} if words and "vocab_size" in config else {}
    parts = {name: with_words(value, tokenizer, words) for name, value in config.items() if isinstance(value, Mapping)}
    return {**config, **own, **parts}


def width_of(config: Mapping[str, Any]) -> int:
    """Return the width of an encoder's output."""
    texts = config.get("text_config") or config.get("encoder") or config
    return int(texts.get("d_model") or texts.get("hidden_size") or 0)


def build(name: str, folder: Path, cut: Cut = Cut()) -> None:
    """Write the folder of a released model, by hub id; its weights depend only on the configuration."""
    from omni_rollout.models import INDEXES
    from omni_rollout.models.hub import released_models

    released = released_models()[name]
    if indexes := [released / name for name in INDEXES if (released / name).exists()]:
        build_pipeline(indexes[0], folder, cut)
    else:
        architecture = read(released / "config.json")["architectures"][0]
        OTHERS[architecture](released, folder, cut)


def read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def build_pipeline(file: Path, folder: Path, cut: Cut) -> None:
    """Write the pipeline of an index part by part, so that only one part at a time is in memory."""
    from omni_rollout.models import open_model

    released, index = file.parent, read(file)
    parts = {name: kind for name, kind in index.items() if isinstance(kind, list) and isinstance(kind[0], str)}
    shutil.copytree(released, folder, dirs_exist_ok=True)
    states = getattr(type(open_model(released)), "LAYERS", (0,))  # encoder states that the model reads
    cut = Cut(cut.is_whole, max(cut.encoder_layers, max(states) + 1))
    tokenizers, configs = {}, dict[str, dict[str, Any]]()
    for part, (_, kind) in parts.items():
        if kind in TOKENIZERS:
            tokenizers[part] = tokenizer = TOKENIZERS[kind]()
            tokenizer.save_pretrained(folder / part)
    for part in sorted(parts, key=lambda part: "encoder" not in part):  # the other parts need their widths
        library, kind = parts[part]
        if kind in TOKENIZERS or part in ("scheduler", "guider") or "process" in part or part == "feature_extractor":
            continue
        config = full_config(library, kind, read(released / part / "config.json"))
        if "encoder" in part:
            tokenizer = tokenizers.get(part.replace("text_encoder", "tokenizer")) or next(iter(tokenizers.values()))
            config = cut.encoder(config, tokenizer)
        elif part in ("vae", "audio_vae", "vocoder"):
            config = cut.vae(config)
        else:
            config = cut.net(config)
        for field, encoders in READS.get(kind, {}).items():
            if all(each in configs for each in encoders):
                config[field] = sum(width_of(configs[each]) for each in encoders)
        if kind == "LTX2TextConnectors":  # reads all states of the encoder
            config["text_proj_in_factor"] = configs["text_encoder"]["text_config"]["num_hidden_layers"] + 1
        configs[part] = config
        save_part(library, kind, config, folder / part)


def class_of(library: str, kind: str) -> Any:
    """Return the class of a part, as named in model_index.json."""
    import diffusers
    import diffusers.pipelines
    import transformers

    modules = {"diffusers": diffusers, "transformers": transformers}
    return getattr(modules.get(library) or getattr(diffusers.pipelines, library), kind)


def full_config(library: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration completed with the defaults of its class."""
    known = class_of(library, kind)
    if library == "transformers":
        found: dict[str, Any] = known.config_class(**config).to_dict()
        return found
    defaults = {name: each.default for name, each in inspect.signature(known.__init__).parameters.items()}
    del defaults["self"]
    return defaults | {name: value for name, value in config.items() if not name.startswith("_")}


def save_part(library: str, kind: str, config: Mapping[str, Any], folder: Path) -> None:
    """Write a part with random weights in bfloat16."""
    import torch

    known = class_of(library, kind)
    given = known.config_class.from_dict(config) if library == "transformers" else None
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = known(given) if given else known(**config)
    finally:
        torch.set_default_dtype(default)
    fill(module.to(torch.bfloat16))  # including position tables
    module.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def fill(module: Any) -> None:
    """Fill a module with random weights, and buffers that a release would fill: statistics, and spectral bases."""
    from torch.nn.init import normal_, uniform_

    draw_weights(module)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            normal_(buffer)
        elif name.endswith("running_var"):
            uniform_(buffer, 0.5, 2.0)
        elif buffer.is_floating_point() and buffer.dim() > 1 and not buffer.any():
            uniform_(buffer, 0, 0.1)


def build_bagel(released: Path, folder: Path, cut: Cut) -> None:
    """Write BAGEL in the layout of its release."""
    tokenizer = build_qwen_tokenizer()
    texts = cut.encoder(read(released / "llm_config.json"), tokenizer)
    seen = cut.encoder(read(released / "vit_config.json"), tokenizer)
    BagelFolder(texts, seen, cut.vae(read(released / "ae.json"))).save_pretrained(folder)


def build_hunyuan_image(released: Path, folder: Path, cut: Cut) -> None:
    """Write HunyuanImage-3.0 in the layout of its release."""
    whole = read(released / "config.json")
    config = cut.encoder(whole, build_hunyuan_tokenizer()) | {"vae": cut.vae(whole["vae"])}
    config["image_base_size"] //= 1 if cut.is_whole else SMALLER
    HunyuanImageFolder(config, read(released / "generation_config.json")).save_pretrained(folder)


def build_language_model(released: Path, folder: Path, cut: Cut) -> None:
    """Write a language model with its tokenizer."""
    tokenizer = build_chat_tokenizer()
    config = read(released / "config.json")
    kind = config["architectures"][0]
    config = config.get("thinker_config", config)
    kind = "Qwen3OmniMoeThinkerForConditionalGeneration" if "omni" in kind.lower() else kind
    config = cut.encoder(full_config("transformers", kind, config), tokenizer)
    shutil.copytree(released, folder, dirs_exist_ok=True)
    save_part("transformers", kind, config, folder)
    tokenizer.save_pretrained(folder)


OTHERS = {
    "BagelForConditionalGeneration": build_bagel,
    "HunyuanImage3ForCausalMM": build_hunyuan_image,
    "Qwen2ForCausalLM": build_language_model,
    "Qwen3ForCausalLM": build_language_model,
    "Qwen3OmniMoeForConditionalGeneration": build_language_model,
}


def byte_tokenizer() -> Any:
    """Return ByT5's tokenizer, which has no files."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


TOKENIZERS = {
    "CLIPTokenizer": build_clip_tokenizer,
    "T5Tokenizer": build_t5_tokenizer,
    "Qwen2Tokenizer": build_qwen_tokenizer,
    "PixtralProcessor": build_qwen_tokenizer,  # only its text half is included
    "Qwen3VLProcessor": build_chat_tokenizer,
    "GemmaTokenizer": build_gemma_tokenizer,
    "ByT5Tokenizer": byte_tokenizer,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="hub id of the released model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--whole", action="store_true", help="keep all widths, and all layers except the encoders'")
    parser.add_argument("--encoder-layers", type=int, default=ENCODER_LAYERS, help="layers of each encoder to keep")
    settings = parser.parse_args()
    build(settings.name, settings.out, Cut(settings.whole, settings.encoder_layers))
    print(settings.out)
