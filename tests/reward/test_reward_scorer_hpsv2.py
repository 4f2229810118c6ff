"""HPSv2.1 on a tiny checkpoint of open_clip's layout, against that network and its resizing written out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omni_reward.scorers import load_scorer
from omni_reward.scorers.hpsv2 import clean_text, padded_pixels, rename_weights
from omni_reward.scorers.neural import read_weights
from torch import Tensor, nn
from torch.nn.functional import layer_norm, multi_head_attention_forward, normalize
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

PROMPTS = ["a cat", "two dogs under a tree", "!"]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 40, 56, 3), np.uint8)
FILE = "HPS_v2.1_compressed.pt"


def options(tiny: Path) -> dict[str, str]:
    return {"model": str(tiny / "hpsv2"), "base": str(tiny / "clip"), "device": "cpu"}


def blocks(weights: dict[str, Tensor], prefix: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """open_clip's residual blocks of two heads on x [T, N, D]."""
    for i in range(2):
        own = {name.removeprefix(f"{prefix}{i}."): weight for name, weight in weights.items()}
        y = layer_norm(x, (24,), own["ln_1.weight"], own["ln_1.bias"])
        both = own["attn.in_proj_weight"], own["attn.in_proj_bias"]
        out = own["attn.out_proj.weight"], own["attn.out_proj.bias"]
        x = x + multi_head_attention_forward(y, y, y, 24, 2, *both, None, None, False, 0.0, *out, attn_mask=mask)[0]
        y = layer_norm(x, (24,), own["ln_2.weight"], own["ln_2.bias"]) @ own["mlp.c_fc.weight"].T
        y = y + own["mlp.c_fc.bias"]
        x = x + (y * (1.702 * y).sigmoid()) @ own["mlp.c_proj.weight"].T + own["mlp.c_proj.bias"]
    return x


@torch.inference_mode()
def reference(tiny: Path) -> list[float]:
    """The diagonal of the table of cosines that open_clip's network gives."""
    w = torch.load(tiny / "hpsv2" / FILE, weights_only=True)["state_dict"]
    x = nn.functional.conv2d(padded_pixels(IMAGES, 32), w["visual.conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    x = torch.cat([w["visual.class_embedding"].expand(3, 1, 24), x], dim=1) + w["visual.positional_embedding"]
    x = layer_norm(x, (24,), w["visual.ln_pre.weight"], w["visual.ln_pre.bias"]).transpose(0, 1)
    x = blocks(w, "visual.transformer.resblocks.", x, None)[0]
    images = layer_norm(x, (24,), w["visual.ln_post.weight"], w["visual.ln_post.bias"]) @ w["visual.proj"]
    tokenize = CLIPTokenizer.from_pretrained(tiny / "clip")
    tokens = torch.zeros(3, 20, dtype=torch.int64)  # open_clip fills up with zeros
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        ids = tokenize(prompt, truncation=True, max_length=20).input_ids
        row[: len(ids)] = torch.tensor(ids)
    x = (w["token_embedding.weight"][tokens] + w["positional_embedding"]).transpose(0, 1)
    x = blocks(w, "transformer.resblocks.", x, torch.full((20, 20), -torch.inf).triu(1)).transpose(0, 1)
    x = layer_norm(x, (24,), w["ln_final.weight"], w["ln_final.bias"])
    texts = x[torch.arange(3), (tokens == 1).int().argmax(dim=1)] @ w["text_projection"]
    return (normalize(images, dim=-1) @ normalize(texts, dim=-1).T).diagonal().tolist()


def test_it_is_the_cosine_of_open_clip_s_network(tiny: Path) -> None:
    scorer = load_scorer("hpsv2", options=options(tiny))
    found = [score.value for score in scorer({"image": IMAGES}, PROMPTS, [{}] * 3)]
    assert found == pytest.approx(reference(tiny), abs=1e-5)
    assert np.ptp(found) > 0.05  # the inputs matter
    assert scorer.version == f"{FILE} float32"


def test_every_weight_has_one_name_of_transformers(tiny: Path) -> None:
    weights = read_weights(tiny / "hpsv2" / FILE, key="state_dict")
    renamed = rename_weights(weights)
    network = CLIPModel(CLIPConfig.from_pretrained(tiny / "clip"))
    assert {name: weight.shape for name, weight in renamed.items()} == {
        name: weight.shape for name, weight in network.named_parameters()
    }
    assert sum(weight.numel() for weight in renamed.values()) == sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize(("height", "width", "seen"), [(64, 48, (32, 24)), (48, 64, (24, 32)), (20, 20, (32, 32))])
def test_an_image_is_seen_whole_with_black_around(height: int, width: int, seen: tuple[int, int]) -> None:
    white = np.full((1, height, width, 3), 255, np.uint8)
    black = padded_pixels(np.zeros_like(white), 32)[0, :, 0, 0]
    pixels = padded_pixels(white, 32)[0]
    is_black = (pixels == black[:, None, None]).all(dim=0)
    top, left = (32 - seen[0]) // 2, (32 - seen[1]) // 2
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[top : top + seen[0], left : left + seen[1]] = True
    assert torch.equal(~is_black, inside)
    spread = [1 / std for std in (0.26862954, 0.26130258, 0.27577711)]
    assert (pixels[:, 16, 16] - black).tolist() == pytest.approx(spread, rel=1e-5)


def test_resizing_keeps_fractions_and_overshoots_as_floats_do() -> None:
    edge = np.zeros((1, 64, 64, 3), np.uint8)
    edge[:, :, 31:] = 255
    black, white = (padded_pixels(np.full((1, 32, 32, 3), value, np.uint8), 32)[0, 0, 0, 0] for value in (0, 255))
    row = padded_pixels(edge, 32)[0, 0, 16]
    shares = ((row - black) / (white - black)).tolist()
    # Keys' kernel of a = -0.5 stretched by 2, on pixel centers at -1.75 to 1.75 in steps of 0.5
    taps = np.array([keys(own) for own in np.arange(-1.75, 2, 0.5)])
    source = (np.arange(64) >= 31).astype(float)
    wanted = [float(taps / taps.sum() @ source[2 * i - 3 : 2 * i + 5]) for i in range(2, 30)]
    assert shares[2:30] == pytest.approx(wanted, abs=1e-6)
    assert max(wanted) > 1.01
    assert min(wanted) < -0.01


def keys(x: float) -> float:
    """The cubic convolution kernel with a = -0.5 (Keys, 1981)."""
    x = abs(x)
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x <= 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def test_a_prompt_is_cleaned_before_it_is_tokenized() -> None:
    assert clean_text(" caf\u00c3\u00a9 &amp;amp; tea ") == "caf\u00e9 & tea"


def test_a_file_of_another_layout_is_refused(tiny: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": {"layers.0.weight": torch.zeros(2)}}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"weights must be those of an open_clip model, got 'layers.0.weight'"):
        load_scorer("hpsv2", options=options(tiny) | {"model": str(tmp_path)})
    torch.save({"layers.0.weight": torch.zeros(2)}, tmp_path / FILE)
    with pytest.raises(ValueError, match="must hold only tensors by name"):
        load_scorer("hpsv2", options=options(tiny) | {"model": str(tmp_path)})
