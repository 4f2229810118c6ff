"""ImageReward on a tiny checkpoint in its published form, against the network written out under those names."""

import json
import shutil
from pathlib import Path

import build_tiny_scorers
import numpy as np
import pytest
import torch
from omni_reward.scorers import load_scorer
from omni_reward.scorers.pixels import square_pixels
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear
from transformers import BertTokenizer

PROMPTS = ["a cat", "two dogs under a tree", "x" * 60]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 40, 56, 3), np.uint8)
NUM_TEXT_HEADS = 4


def attend(q: Tensor, k: Tensor, v: Tensor, num_heads: int, hidden: Tensor | None = None) -> Tensor:
    """Attention over [N, T, C]; what is hidden, [N, T], gets no weight."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


class Reference:
    """The network from the papers' descriptions: a pre-norm ViT, and BERT with a look at the image in every layer."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def lin(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def see(self, pixels: Tensor) -> Tensor:
        at = "blip.visual_encoder."
        w = self.weights
        patches = conv2d(pixels, w[f"{at}patch_embed.proj.weight"], w[f"{at}patch_embed.proj.bias"], stride=16)
        x = torch.cat([w[f"{at}cls_token"].expand(len(pixels), -1, -1), patches.flatten(2).transpose(1, 2)], dim=1)
        x = x + w[f"{at}pos_embed"]
        for i in range(build_tiny_scorers.LAYERS):
            block = f"{at}blocks.{i}."
            qkv = self.lin(self.norm(x, f"{block}norm1", 1e-6), f"{block}attn.qkv").chunk(3, dim=-1)
            x = x + self.lin(attend(*qkv, num_heads=x.shape[-1] // 64), f"{block}attn.proj")
            x = x + self.lin(gelu(self.lin(self.norm(x, f"{block}norm2", 1e-6), f"{block}mlp.fc1")), f"{block}mlp.fc2")
        return self.norm(x, f"{at}norm", 1e-6)

    def attention(self, h: Tensor, other: Tensor, at: str, hidden: Tensor | None = None) -> Tensor:
        q, k, v = (
            self.lin(h, f"{at}.self.query"),
            self.lin(other, f"{at}.self.key"),
            self.lin(other, f"{at}.self.value"),
        )
        out = self.lin(attend(q, k, v, NUM_TEXT_HEADS, hidden), f"{at}.output.dense")
        return self.norm(h + out, f"{at}.output.LayerNorm", 1e-12)

    def read(self, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        at = "blip.text_encoder."
        words = self.weights[f"{at}embeddings.word_embeddings.weight"][ids]
        places = self.weights[f"{at}embeddings.position_embeddings.weight"][: ids.shape[1]]
        h = self.norm(words + places, f"{at}embeddings.LayerNorm", 1e-12)
        for i in range(build_tiny_scorers.LAYERS):
            layer = f"{at}encoder.layer.{i}."
            h = self.attention(h, h, f"{layer}attention", mask == 0)
            h = self.attention(h, image, f"{layer}crossattention")
            out = self.lin(gelu(self.lin(h, f"{layer}intermediate.dense")), f"{layer}output.dense")
            h = self.norm(h + out, f"{layer}output.LayerNorm", 1e-12)
        return h

    def score(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.read(ids, mask, self.see(pixels))[:, 0]
        for place in (0, 2, 4, 6, 7):
            x = self.lin(x, f"mlp.layers.{place}")
        return (x[:, 0] - 0.16717362830052426) / 1.0333394966054072


def options(tiny: Path, model: Path | None = None) -> dict[str, str]:
    return {"model": str(model or tiny / "imagereward"), "tokenizer": str(tiny / "bert")}


def test_the_score_is_that_of_the_network_written_out(tiny: Path) -> None:
    weights = torch.load(tiny / "imagereward" / "ImageReward.pt", weights_only=True)
    tokens = BertTokenizer.from_pretrained(tiny / "bert")(PROMPTS, padding=True, truncation=True, max_length=35)
    ids, mask = torch.tensor(tokens["input_ids"]), torch.tensor(tokens["attention_mask"])
    assert ids.shape == (3, 35)
    assert not mask.all()
    wanted = Reference(weights).score(torch.from_numpy(square_pixels(IMAGES, 32)), ids, mask)
    found = load_scorer("imagereward", options=options(tiny))({"image": IMAGES}, PROMPTS, [{}] * 3)
    assert [score.value for score in found] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert wanted.std() > 0.01  # the inputs matter


def test_both_the_image_and_the_prompt_matter(tiny: Path) -> None:
    scorer = load_scorer("imagereward", options=options(tiny))
    images = IMAGES[[0, 0, 1]]
    same, other_prompt, other_image = (s.value for s in scorer({"image": images}, ["a", "b", "a"], [{}] * 3))
    assert len({round(value, 3) for value in (same, other_prompt, other_image)}) == 3


def copy(tiny: Path, target: Path) -> tuple[Path, dict[str, Tensor]]:
    shutil.copytree(tiny / "imagereward", target)
    return target, torch.load(target / "ImageReward.pt", weights_only=True)


def test_safetensors_are_taken_first(tiny: Path, tmp_path: Path) -> None:
    folder, weights = copy(tiny, tmp_path / "model")
    weights["mlp.layers.7.bias"] += 1.0333394966054072
    save_file(weights, folder / "ImageReward.safetensors")
    (folder / "ImageReward.pt").write_bytes(b"")
    plain, safe = (
        load_scorer("imagereward", options=given)({"image": IMAGES[:1]}, ["a"], [{}])[0].value
        for given in (options(tiny), options(tiny, folder))
    )
    assert safe == pytest.approx(plain + 1, abs=1e-5)


def test_weights_of_something_else_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder, _ = copy(tiny, tmp_path / "model")
    torch.save({"a": torch.zeros(1)}, folder / "ImageReward.pt")
    with pytest.raises(ValueError, match=r"the weights must be ImageReward's, got the names \['a'\]"):
        load_scorer("imagereward", options=options(tiny, folder))


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a model must be a folder.*med_config.json"):
        load_scorer("imagereward", options={"model": str(tmp_path)})


def test_settings_name_what_the_weights_do_not_tell(tiny: Path, tmp_path: Path) -> None:
    folder, _ = copy(tiny, tmp_path / "model")
    settings = json.loads((folder / "med_config.json").read_text())
    (folder / "med_config.json").write_text(json.dumps(settings | {"num_attention_heads": 2}))
    one, other = (
        load_scorer("imagereward", options=given)({"image": IMAGES[:1]}, ["a cat"], [{}])[0].value
        for given in (options(tiny), options(tiny, folder))
    )
    assert abs(one - other) > 1e-4
