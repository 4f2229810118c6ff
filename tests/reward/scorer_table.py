"""The table of scorers: what each takes, what it needs, and a weight of its network.

A setting that is a path is one in the folder of all tiny checkpoints, the fixture `tiny`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from omni_reward.media import References
from reward.reward_helpers import draw_sign

RNG = np.random.default_rng(0)
MEDIA: dict[str, np.ndarray] = {
    "image": RNG.integers(0, 256, (3, 40, 56, 3), np.uint8),
    "video": RNG.integers(0, 256, (3, 9, 40, 56, 3), np.uint8),
    "audio": (0.3 * RNG.standard_normal((3, 54_000, 2))).astype(np.float32),
}
SIGNS = np.stack([draw_sign(word) for word in ("AB", "AX", "KM")])
REFERENCES: References = [(RNG.integers(0, 256, (*size, 3), np.uint8),) for size in ((40, 56), (64, 32), (300, 280))]
MOUSE: dict[str, object] = {"tag": "colors", "include": [{"class": "computer mouse", "count": 1, "color": "red"}]}


@dataclass(frozen=True)
class Row:
    """A scorer: its kinds of media, settings, prompts, and for a network a file and what is said without a weight."""

    media: tuple[str, ...] = ("image",)
    needs: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[str, ...] = ("a cat", "two dogs under a {tree}", "caf\u00e9")
    given: Mapping[str, np.ndarray] = field(default_factory=lambda: MEDIA)

    def options(self, folder: Path, **more: str) -> dict[str, str]:
        """Settings with paths in a folder of checkpoints."""
        return {
            name: str(folder / each) if (folder / each).exists() else each for name, each in self.needs.items()
        } | more


LACKS = "must hold all weights of a {}, missing "
ROWS = {
    "aesthetic": Row(needs={"model": "clip", "head": "aesthetic.pth"}, file="aesthetic.pth",
                     weights={"layers.7.bias": "a weight and a bias for each position"}),
    "clap": Row(("audio",), {"model": "clap"}, "clap/model.safetensors",
                {"audio_projection.linear2.weight": LACKS.format("ClapModel")}),
    "clip": Row(needs={"model": "clip"}, file="clip/model.safetensors",
                weights={"visual_projection.weight": LACKS.format("CLIPModel") + r"\['visual_projection.weight'\]"}),
    "color": Row(prompts=("a red cat", "a blue dog", "a green boat")),
    "editreward": Row(
        needs={"model": "editreward", "base": "qwen2.5-vl", "following": "instruction.txt",
               "quality": "instruction.txt", "dtype": "float32"},
        file="editreward/model.safetensors",
        weights={"model.visual.merger.ln_q.weight": LACKS.format("Qwen2_5_VLModel"),
                 "rm_heads.head_1.3.bias": "a head must have a weight and a bias"},
    ),
    "flow": Row(("video",)),
    "geneval": Row(needs={"detector": "mask2former", "model": "clip", "side": "64"}),
    "hpsv2": Row(needs={"model": "hpsv2", "base": "clip"}, file="hpsv2/HPS_v2.1_compressed.pt",
                 weights={"visual.proj": LACKS.format("CLIPModel") + r"\['visual_projection"}),
    "hpsv3": Row(
        needs={"model": "hpsv3", "base": "qwen2-vl", "instruction": "instruction.txt", "dtype": "float32"},
        file="hpsv3/HPSv3.safetensors",
        weights={"visual.merger.ln_q.bias": LACKS.format("Qwen2VLModel"),
                 "model.layers.1.mlp.up_proj.weight": LACKS.format("Qwen2VLModel"),
                 "model.embed_tokens.weight": "must hold an embedding of each token",
                 "rm_head.3.bias": "a head must have a weight and a bias"},
    ),
    "imagereward": Row(
        needs={"model": "imagereward", "tokenizer": "bert"}, file="imagereward/ImageReward.pt",
        weights={"blip.visual_encoder.blocks.1.mlp.fc2.bias": "the weights must be ImageReward's",
                 "blip.text_encoder.encoder.layer.0.crossattention.self.key.weight": "must be ImageReward's"},
    ),
    "jpeg": Row(),
    "likeness": Row(),
    "ocr": Row(needs={"reading": "line"}, prompts=('a sign that says "AB"',) * 3, given={"image": SIGNS}),
    "pickscore": Row(needs={"model": "clip", "tokenizer": "clip"}, file="clip/model.safetensors",
                     weights={"logit_scale": LACKS.format("CLIPModel") + r"\['logit_scale'\]"}),
    "pitch": Row(("audio",), {"zero_at": "12000"}, prompts=("300 Hz", "A4", "5000 Hz")),
    "sync": Row(("audio", "video")),
    "video": Row(("video",)),
    "videoalign": Row(
        ("video",),
        {"model": "videoalign", "base": "qwen2-vl", "instruction": "instruction-of-videoalign.txt", "dtype": "float32"},
        "videoalign/checkpoint-11352/model.pth",
        {"base_model.model.rm_head.weight": "the weights must be VideoAlign's, with rm_head.weight, got "},
    ),
}  # fmt: skip
