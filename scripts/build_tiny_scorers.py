"""Write tiny checkpoints with random weights, in the format of the published ones, for every scorer with a network.

    python scripts/build_tiny_scorers.py /somewhere

They test that loading and scoring work, here and in your own environment; their scores have no meaning. Folders and
files: `clap`, `clip` (for clip, pickscore, aesthetic, geneval, and the base of hpsv2), `mask2former`, `aesthetic.pth`,
`hpsv2`, `imagereward`, `bert`, `hpsv3`, `videoalign`, `qwen2-vl`, `editreward`, `qwen2.5-vl`, `instruction.txt` and
`instruction-of-videoalign.txt`.
"""

import argparse
import json
import string
from pathlib import Path
from typing import Any

import torch
from omni_reward.scorers.geneval import COCO_NAMES
from omni_reward.scorers.geneval_rules import OBJECTS
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import (
    BertTokenizer,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLModel,
    RobertaTokenizer,
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
CHAT_TOKENS += ["<|video_pad|>"]
REWARD_TOKEN = "<|Reward|>"
VIDEOALIGN = "checkpoint-11352/model.pth"
VISION, TEXT, LAYERS = 128, 48, 2  # widths and depth of the tiny ImageReward


def write_all(folder: Path) -> None:
    """Write every checkpoint into a folder, always with the same weights."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    write_clap(folder / "clap")
    write_clip(folder / "clip")
    write_mask2former(folder / "mask2former")
    torch.save(random_weights(head_shapes("layers.", 16)), folder / "aesthetic.pth")
    write_hpsv2(folder / "hpsv2")
    write_imagereward(folder / "imagereward")
    write_bert_tokenizer(folder / "bert")
    write_hpsv3(folder / "hpsv3", folder / "qwen2-vl")
    write_videoalign(folder / "videoalign", folder / "qwen2-vl")
    write_editreward(folder / "editreward", folder / "qwen2.5-vl")
    marks = "\n".join(f"<|{part}_reward|>" for part in ("VQ", "MQ", "TA"))
    (folder / "instruction-of-videoalign.txt").write_text(f"Grade this: {{text_prompt}}\n{marks}\n")
    (folder / "instruction.txt").write_text(f"How good is this? {{text_prompt}}\nRating: {REWARD_TOKEN}\n")


def write_clip(folder: Path) -> None:
    """Write a CLIPModel for 32 x 32 images with patches of 8, and a byte tokenizer."""
    words = ["<|startoftext|>", "<|endoftext|>", *BYTES, *(f"{byte}</w>" for byte in BYTES)]
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": len(words), "max_position_embeddings": 20, "bos_token_id": 0, "eos_token_id": 1}
    vision = sizes | {"image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    spread(model)
    model.save_pretrained(folder)
    CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[]).save_pretrained(folder)


def write_mask2former(folder: Path) -> None:
    """Write a Mask2Former for instances with COCO's names; some of its 12 queries are sure of a class."""
    swin: dict[str, Any] = {"model_type": "swin", "embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4}
    swin |= {"window_size": 4, "out_features": [f"stage{i}" for i in range(1, 5)]}
    sizes: dict[str, Any] = {
        "feature_size": 32,
        "mask_feature_size": 16,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 32,
    }
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32}
    labels = dict(enumerate({there: here for here, there in COCO_NAMES.items()}.get(name, name) for name in OBJECTS))
    config: Any = Mask2FormerConfig(backbone_config=swin, num_queries=12, id2label=labels, **sizes)
    config.architectures = ["Mask2FormerForUniversalSegmentation"]
    model = Mask2FormerModel(config)
    spread(model)
    weights = {f"model.{name}": weight.contiguous() for name, weight in model.state_dict().items()}
    head = random_weights(linear_shapes("class_predictor", len(labels) + 1, 32))
    config.save_pretrained(folder)
    save_file(weights | {name: 3 * weight for name, weight in head.items()}, folder / "model.safetensors")


def write_hpsv2(folder: Path) -> None:
    """Write HPS_v2.1_compressed.pt with open_clip's names and the sizes of `write_clip`."""
    shapes: dict[str, tuple[int, ...]] = {"positional_embedding": (20, 24), "text_projection": (24, 16)}
    shapes |= {"token_embedding.weight": (2 + 2 * len(BYTES), 24), "visual.class_embedding": (24,)}
    shapes |= {"visual.conv1.weight": (24, 3, 8, 8), "visual.positional_embedding": (17, 24), "visual.proj": (24, 16)}
    for name in ("ln_final", "visual.ln_pre", "visual.ln_post"):
        shapes |= linear_shapes(name, 24)
    for layer in (f"{tower}transformer.resblocks.{i}" for tower in ("", "visual.") for i in range(2)):
        shapes |= linear_shapes(f"{layer}.ln_1", 24) | linear_shapes(f"{layer}.ln_2", 24)
        shapes |= {f"{layer}.attn.in_proj_weight": (72, 24), f"{layer}.attn.in_proj_bias": (72,)}
        shapes |= linear_shapes(f"{layer}.attn.out_proj", 24, 24)
        shapes |= linear_shapes(f"{layer}.mlp.c_fc", 48, 24) | linear_shapes(f"{layer}.mlp.c_proj", 24, 48)
    folder.mkdir(exist_ok=True)
    weights = random_weights(shapes) | {"logit_scale": torch.tensor(4.6)}
    torch.save({"epoch": 1, "state_dict": weights}, folder / "HPS_v2.1_compressed.pt")


def write_clap(folder: Path) -> None:
    """Write a ClapModel with 64 bands, its feature extractor with 1 s of audio instead of 10, and a byte tokenizer."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *BYTES]
    text = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"vocab_size": len(words), "max_position_embeddings": 22, "projection_dim": 16}
    audio = {"spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 8, "depths": [1, 1], "hidden_size": 16}
    audio |= {"num_attention_heads": [2, 2], "window_size": 4, "projection_dim": 16, "num_classes": 4}
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16))
    spread(model)
    model.save_pretrained(folder)
    ClapFeatureExtractor(feature_size=16, max_length_s=1, truncation="rand_trunc").save_pretrained(folder)
    RobertaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[]).save_pretrained(folder)


def write_imagereward(folder: Path) -> None:
    """Write weights with the names of BLIP's code, in ImageReward.pt and med_config.json."""
    settings = {
        **{"vocab_size": 100, "hidden_size": TEXT, "intermediate_size": 2 * TEXT, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "max_position_embeddings": 40, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
        **{"pad_token_id": 0, "encoder_width": VISION, "add_cross_attention": True},
    }
    shapes = vision_shapes("blip.visual_encoder.") | text_shapes("blip.text_encoder.")
    weights = random_weights(shapes | head_shapes("mlp.layers.", TEXT))
    weights["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    weights["blip.text_proj.weight"] = torch.zeros(8, TEXT)  # present but unused
    folder.mkdir(exist_ok=True)
    torch.save(weights, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(settings))


def write_bert_tokenizer(folder: Path) -> None:
    """Write BERT's tokenizer with letters as words."""
    letters = string.ascii_lowercase + string.digits
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)


def write_qwen2_vl(folder: Path, kind: Any = Qwen2VLConfig) -> tuple[Any, Any]:
    """Write the tokenizer and settings of a Qwen2-VL, or of a Qwen2.5-VL with `kind` Qwen2_5_VLConfig."""
    words = {byte: i for i, byte in enumerate(BYTES)}
    tokenizer: Any = Qwen2Tokenizer(vocab=words, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": CHAT_TOKENS})
    tokenizer.save_pretrained(folder)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    text: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "rope_parameters": rope}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(words) + 20}
    text |= {"bos_token_id": None, "eos_token_id": None}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 16, "num_heads": 2}
    if kind is Qwen2VLConfig:
        vision |= {"embed_dim": 16, "mlp_ratio": 2}
    else:
        vision |= {"intermediate_size": 32, "out_hidden_size": 16, "fullatt_block_indexes": [1]}
    image_id, video_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    config: Any = kind(text_config=text, vision_config=vision, image_token_id=image_id, video_token_id=video_id)
    config.save_pretrained(folder)
    return tokenizer, config


def write_hpsv3(folder: Path, base: Path) -> None:
    """Write HPSv3.safetensors with its published names, and the settings and tokenizer of its base, a Qwen2-VL."""
    tokenizer, config = write_qwen2_vl(base)
    config.text_config.vocab_size = len(tokenizer) + 1  # HPSv3 has one more token, and no unused ones
    model = Qwen2VLModel(config)
    spread(model)
    weights = {name.replace("language_model.", "model."): weight for name, weight in model.state_dict().items()}
    weights["lm_head.weight"] = torch.zeros(config.text_config.vocab_size, 16)
    sizes = [(0, 16, 10), (3, 10, 6), (5, 6, 2)]
    weights |= random_weights({f"rm_head.{i}.weight": (n_out, n_in) for i, n_in, n_out in sizes})
    weights |= random_weights({f"rm_head.{i}.bias": (n_out,) for i, _, n_out in sizes})
    folder.mkdir(exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "HPSv3.safetensors")


def write_editreward(folder: Path, base: Path) -> None:
    """Write model.safetensors with its published names, and the settings and tokenizer of its base, a Qwen2.5-VL."""
    tokenizer, config = write_qwen2_vl(base, Qwen2_5_VLConfig)
    config.text_config.vocab_size = len(tokenizer) + 1
    model = Qwen2_5_VLModel(config)
    spread(model)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    weights["lm_head.weight"] = torch.zeros(config.text_config.vocab_size, 16)
    sizes = [(0, 16, 10), (3, 10, 6), (5, 6, 2)]
    for head in ("rm_heads.head_0", "rm_heads.head_1"):
        weights |= random_weights({f"{head}.{i}.weight": (n_out, n_in) for i, n_in, n_out in sizes})
        weights |= random_weights({f"{head}.{i}.bias": (n_out,) for i, _, n_out in sizes})
    folder.mkdir(exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def write_videoalign(folder: Path, base: Path) -> None:
    """Write checkpoint-11352/model.pth with its published names, LoRA on the text attention, and its settings."""
    tokenizer, config = write_qwen2_vl(base)
    config.text_config.vocab_size = len(tokenizer) + 3
    model = Qwen2VLModel(config)
    spread(model)
    weights = {name.replace("language_model.", "model."): weight for name, weight in model.state_dict().items()}
    weights["rm_head.weight"] = torch.randn(1, 16)
    for name in [name for name in weights if "self_attn." in name]:
        layer, kind = name.rsplit(".", 1)
        weights[f"{layer}.base_layer.{kind}"] = weights.pop(name)
        if kind == "weight":
            out, width = model.state_dict()[name.replace("model.", "language_model.", 1)].shape
            weights |= random_weights({f"{layer}.lora_A.default.weight": (4, width)})
            weights |= random_weights({f"{layer}.lora_B.default.weight": (out, 4)})
    (folder / "checkpoint-11352").mkdir(parents=True)
    torch.save({f"base_model.model.{n}": w.contiguous() for n, w in weights.items()}, folder / VIDEOALIGN)
    scale = {f"{part}_{name}": value for part in ("VQ", "MQ", "TA") for name, value in (("mean", 0.5), ("std", 2.0))}
    settings = {"data_config": {"fps": 2.0, "max_frame_pixels": 200704}, "inference_config": scale | {"TA_std": 4.0}}
    settings["peft_lora_config"] = {"lora_r": 4, "lora_alpha": 8}
    (folder / "model_config.json").write_text(json.dumps(settings))


def head_shapes(prefix: str, num_features: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of five linear layers, dropout after the first three, as in LAION's and ImageReward's heads."""
    sizes = [(0, num_features, 12), (2, 12, 10), (4, 10, 8), (6, 8, 4), (7, 4, 1)]
    shapes: dict[str, tuple[int, ...]] = {}
    for place, n_in, n_out in sizes:
        shapes |= {f"{prefix}{place}.weight": (n_out, n_in), f"{prefix}{place}.bias": (n_out,)}
    return shapes


def vision_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of BLIP's vision transformer for 32 x 32 images with patches of 16."""
    shapes = {"cls_token": (1, 1, VISION), "pos_embed": (1, 5, VISION), "patch_embed.proj.weight": (VISION, 3, 16, 16)}
    shapes |= {"patch_embed.proj.bias": (VISION,)} | linear_shapes("norm", VISION)
    for i in range(LAYERS):
        for name, n_in, n_out in (("attn.qkv", 1, 3), ("attn.proj", 1, 1), ("mlp.fc1", 1, 2), ("mlp.fc2", 2, 1)):
            shapes |= linear_shapes(f"blocks.{i}.{name}", n_out * VISION, n_in * VISION)
        shapes |= linear_shapes(f"blocks.{i}.norm1", VISION) | linear_shapes(f"blocks.{i}.norm2", VISION)
    return {prefix + name: shape for name, shape in shapes.items()}


def text_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of BERT with cross-attention to the image's tokens."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (100, TEXT),
        "embeddings.position_embeddings.weight": (40, TEXT),
    }
    shapes |= linear_shapes("embeddings.LayerNorm", TEXT)
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        for kind, width in (("attention", TEXT), ("crossattention", VISION)):
            for name, n_in in (("query", TEXT), ("key", width), ("value", width)):
                shapes |= linear_shapes(f"{layer}.{kind}.self.{name}", TEXT, n_in)
            shapes |= linear_shapes(f"{layer}.{kind}.output.dense", TEXT, TEXT)
            shapes |= linear_shapes(f"{layer}.{kind}.output.LayerNorm", TEXT)
        shapes |= linear_shapes(f"{layer}.intermediate.dense", 2 * TEXT, TEXT)
        shapes |= linear_shapes(f"{layer}.output.dense", TEXT, 2 * TEXT) | linear_shapes(
            f"{layer}.output.LayerNorm", TEXT
        )
    return {prefix + name: shape for name, shape in shapes.items()}


def linear_shapes(name: str, num_out: int, *num_in: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a weight and a bias; without num_in, those of a normalization layer."""
    return {f"{name}.weight": (num_out, *num_in), f"{name}.bias": (num_out,)}


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return random weights at a scale that preserves signals; those of normalization layers are around 1."""
    return {
        name: torch.randn(shape) / max(1, torch.Size(shape[1:]).numel()) ** 0.5 if len(shape) > 1 else near(name, shape)
        for name, shape in shapes.items()
    }


def near(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a random vector, around 1 for a weight and around 0 for a bias."""
    return (1.0 if name.endswith("weight") else 0.0) + 0.2 * torch.randn(shape)


def spread(model: nn.Module) -> None:
    """Sample a network's weights wider than its initialization, which gives all inputs nearly the same score."""
    drawn = random_weights({name: tuple(weight.shape) for name, weight in model.named_parameters()})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim:  # CLIP's scale is a scalar and stays
                weight.copy_(drawn[name])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes tiny checkpoints with random weights for the scorers.")
    parser.add_argument("folder", type=Path)
    write_all(parser.parse_args().folder)
