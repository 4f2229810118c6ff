"""CLIP, PickScore and LAION's aesthetic score on tiny checkpoints, against transformers' own path and arithmetic."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ulps
from omni_reward import RewardClient
from omni_reward.scorers import load_scorer
from omni_reward.scorers.heads import build_head
from omni_reward.scorers.neural import read_weights
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

PROMPTS = ["a cat", "two dogs under a tree", "!"]
META: list[dict[str, object]] = [{}, {}, {}]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 40, 56, 3), np.uint8)


@torch.inference_mode()
def reference(tiny: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Embeddings of IMAGES and PROMPTS, and the scale, as transformers' own processor and forward give them."""
    model = CLIPModel.from_pretrained(tiny / "clip").eval()
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})(
        list(IMAGES), return_tensors="pt", input_data_format="channels_last"
    )
    tokens = CLIPTokenizer.from_pretrained(tiny / "clip")(PROMPTS, padding=True, truncation=True, max_length=20)
    out = model(**pixels, **tokens.convert_to_tensors("pt"))
    torch.testing.assert_close(out.logits_per_image, out.image_embeds @ out.text_embeds.T * model.logit_scale.exp())
    return out.image_embeds, out.text_embeds, float(model.logit_scale.exp())


def values(name: str, options: dict[str, str], images: np.ndarray = IMAGES) -> list[float]:
    scores = load_scorer(name, options=options)({"image": images}, PROMPTS, META)
    assert all(score.value is not None for score in scores)
    return [score.value for score in scores]


def test_clip_is_the_cosine(tiny: Path) -> None:
    images, texts, _ = reference(tiny)
    found = values("clip", {"model": str(tiny / "clip"), "device": "cpu"})
    assert found == pytest.approx((images * texts).sum(-1).tolist(), abs=1e-5)
    assert np.ptp(found) > 0.05  # the inputs matter


def test_pickscore_is_the_scaled_cosine(tiny: Path) -> None:
    images, texts, scale = reference(tiny)
    assert scale == pytest.approx(1 / 0.07, rel=1e-3)
    found = values("pickscore", {"model": str(tiny / "clip"), "tokenizer": str(tiny / "clip")})
    assert found == pytest.approx((scale * (images * texts).sum(-1)).tolist(), abs=1e-4)


def test_aesthetic_is_a_chain_of_products_of_the_image_alone(tiny: Path) -> None:
    x, _, _ = reference(tiny)
    head = torch.load(tiny / "aesthetic.pth", weights_only=True)
    for place in (0, 2, 4, 6, 7):
        x = x @ head[f"layers.{place}.weight"].T + head[f"layers.{place}.bias"]
    options = {"model": str(tiny / "clip"), "head": str(tiny / "aesthetic.pth")}
    assert values("aesthetic", options) == pytest.approx(x[:, 0].tolist(), abs=1e-4)
    scorer = load_scorer("aesthetic", options=options)
    assert scorer({"image": IMAGES}, ["x", "y", "z"], META) == scorer({"image": IMAGES}, PROMPTS, META)


def test_safetensors_of_the_head_do_as_well(tiny: Path, tmp_path: Path) -> None:
    save_file(torch.load(tiny / "aesthetic.pth", weights_only=True), tmp_path / "head.safetensors")
    heads = tiny / "aesthetic.pth", tmp_path / "head.safetensors"
    plain, safe = (values("aesthetic", {"model": str(tiny / "clip"), "head": str(head)}) for head in heads)
    assert plain == safe


def test_a_long_prompt_is_cut(tiny: Path) -> None:
    scorer = load_scorer("clip", options={"model": str(tiny / "clip")})
    long, cut = scorer({"image": IMAGES[[0, 0]]}, ["a " * 500, "a " * 18], [{}, {}])
    assert long.value == pytest.approx(cut.value, abs=ulps(32))


def test_it_is_served(tiny: Path, serve: Callable[..., str]) -> None:
    scorer = load_scorer("clip", options={"model": str(tiny / "clip")})
    with RewardClient(serve(scorer)) as client:
        served = client.submit({"image": IMAGES}, PROMPTS).result()
    assert [score.value for score in served] == [score.value for score in scorer({"image": IMAGES}, PROMPTS, META)]
    assert (scorer.batch_size, scorer.version) == (16, "clip float32")


def spoil(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of a checkpoint of which one thing has changed."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(target / "model.safetensors")
    if "widen" in changes:
        weights[str(changes["widen"])] = torch.zeros(3, 3)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_checkpoint_of_other_shapes_is_refused(tiny: Path, tmp_path: Path) -> None:
    model = spoil(tiny / "clip", tmp_path / "a", widen="visual_projection.weight")
    with pytest.raises(ValueError, match="must hold the weights of a CLIPModel"):
        load_scorer("clip", options={"model": str(model)})


def test_pickled_weights_of_a_model_are_not_read(tiny: Path, tmp_path: Path) -> None:
    model = spoil(tiny / "clip", tmp_path / "a")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="a model must be a folder"):
        load_scorer("clip", options={"model": str(model)})


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("trapped",))


def test_a_head_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"layers.0.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(pickle.UnpicklingError):
        read_weights(tmp_path / "trap.pth")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"a": 3}, {"a": {"b": torch.zeros(1)}}])
def test_a_file_of_something_else_than_tensors_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="must hold only tensors by name"):
        read_weights(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "a weight and a bias for each position"),
        ({"0.weight": (1, 4)}, "a weight and a bias for each position"),
        ({"0.weight": (1, 4), "0.bias": (1,), "x": (1,)}, "a weight and a bias for each position"),
        ({"0.weight": (1, 5), "0.bias": (1,)}, r"must map 4 numbers to 1, got layers of the shapes \[\(1, 5\)\]"),
        ({"0.weight": (2, 4), "0.bias": (2,)}, "must map 4 numbers to 1"),
        ({"0.weight": (1, 4), "0.bias": (2,)}, "must map 4 numbers to 1"),
        ({"0.weight": (3, 4), "0.bias": (3,), "2.weight": (1, 2), "2.bias": (1,)}, "must map 4 numbers to 1"),
        ({"0.weight": (4,), "0.bias": (1,)}, "must map 4 numbers to 1"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(weights: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head({name: torch.zeros(shape) for name, shape in weights.items()}, 4, 1, has_relu=False)


def test_the_places_of_a_head_are_numbers_and_not_words() -> None:
    weights = {"10.weight": torch.tensor([[3.0]]), "10.bias": torch.zeros(1)}
    weights |= {"2.weight": torch.tensor([[2.0]]), "2.bias": torch.ones(1)}
    assert build_head(weights, 1, 1, has_relu=False)(torch.tensor([[-5.0]])).item() == 3 * (2 * -5 + 1)
    assert build_head(weights, 1, 1, has_relu=True)(torch.tensor([[-5.0]])).item() == 0


def test_threads_below_one_are_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="threads must be >= 1, got 0"):
        load_scorer("clip", threads=0, options={"model": str(tiny / "clip")})


def test_a_model_without_a_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    with pytest.raises(ValueError):
        load_scorer("clip", options={"model": str(tiny / "clip"), "tokenizer": str(tmp_path)})


def test_a_folder_s_own_code_never_runs_and_nobody_is_asked(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="a model must load without remote code, got") as caught:
        load_scorer("clip", options={"model": str(tiny / "clip"), "tokenizer": str(tmp_path)})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
