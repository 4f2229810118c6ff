"""GenEval's scorer: a tiny Mask2Former against transformers' own class and the published arithmetic written a second
way, colors against a second computation, a planted detector on drawn scenes, and failures that are none of them 0."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omni_reward import RewardClient, Score
from omni_reward.scorers import empty_networks, geneval, load_scorer, neural
from omni_reward.scorers.geneval_rules import COLORS, OBJECTS, Detection
from PIL import Image
from reward.reward_geneval_scenes import SIDE, scene, thing
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer, Mask2FormerForUniversalSegmentation
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.mask2former import modeling_mask2former
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 40, 56, 3), np.uint8)
META: dict[str, object] = {"tag": "colors", "include": [{"class": "computer mouse", "count": 1, "color": "red"}]}
CPU = torch.device("cpu")


def options(tiny: Path, **more: str) -> dict[str, str]:
    return {"detector": str(tiny / "mask2former"), "model": str(tiny / "clip"), "side": "64", "device": "cpu"} | more


def test_the_objects_are_the_published_file_of_names() -> None:
    """evaluation/object_names.txt of github.com/djghosh13/geneval, by git's id of its content."""
    data = "".join(f"{name}\n" for name in OBJECTS).encode()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    assert blob.hexdigest() == "f4822dd01d0d1d2598d5e0190c121204e55925f1"
    assert set(geneval.COCO_NAMES.values()) < set(OBJECTS)
    assert not set(geneval.COCO_NAMES) & set(OBJECTS)


@pytest.mark.parametrize(("height", "width", "resized"), [(512, 512, (800, 800)), (90, 160, (768, 1344))])
def test_the_detector_s_input_is_mmdet_s_by_pillow(
    tiny: Path, height: int, width: int, resized: tuple[int, int]
) -> None:
    """The shorter side 800 or the longer 1333, up to multiples of 32, bilinear, normalized by ImageNet's numbers."""
    image = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    detector = geneval.load_detector(str(tiny / "mask2former"), geneval.SIDE, CPU, torch.float32)
    [found] = detector.processor([image], input_data_format="channels_last", return_tensors="pt")["pixel_values"]
    large = Image.fromarray(image).resize(resized[::-1], Image.Resampling.BILINEAR)
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    wanted = ((np.asarray(large, np.float64) - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)


def resampling(n_out: int, n_in: int) -> np.ndarray:
    """The matrix of linear interpolation between the centers of cells."""
    places = np.clip((np.arange(n_out) + 0.5) * n_in / n_out - 0.5, 0, None)
    low = np.minimum(places.astype(int), n_in - 1)
    matrix = np.zeros((n_out, n_in))
    matrix[np.arange(n_out), low] += 1 - (places - low)
    matrix[np.arange(n_out), np.minimum(low + 1, n_in - 1)] += places - low
    return matrix


def second_version(logits: np.ndarray, masks: np.ndarray) -> list[tuple[str, tuple[float, ...], float]]:
    """mmdet's objects of an image of IMAGES: each query's classes as candidates, in numpy's float64."""
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances = (chances / chances.sum(axis=1, keepdims=True))[:, :-1]
    candidates = sorted(((p, q, c) for q, row in enumerate(chances) for c, p in enumerate(row)), reverse=True)[:100]
    found = []
    (height, width), (high, wide) = IMAGES.shape[1:3], (64, 96)
    rows = resampling(height, high) @ resampling(high, masks.shape[1])
    columns = resampling(width, wide) @ resampling(wide, masks.shape[2])
    for chance, query, label in candidates:
        mask = rows @ masks[query] @ columns.T
        inside = mask > 0
        mean = (inside / (1 + np.exp(-mask))).sum() / (inside.sum() + 1e-6)
        if chance * mean > 0.3:
            y, x = np.nonzero(inside)
            found.append((OBJECTS[label], (x.min(), y.min(), x.max() + 1, y.max() + 1), chance * mean))
    return found


def test_objects_are_those_of_transformers_own_class_and_of_the_published_arithmetic(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class asks for scipy, which only its loss uses."""
    monkeypatch.setattr(modeling_mask2former, "requires_backends", lambda *_: None)
    library = Mask2FormerForUniversalSegmentation.from_pretrained(tiny / "mask2former").eval()
    processor = Mask2FormerImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 106})
    inputs = processor(list(IMAGES), input_data_format="channels_last", return_tensors="pt")
    detector = geneval.load_detector(str(tiny / "mask2former"), 64, CPU, torch.float32)
    with torch.inference_mode():
        out = library(**inputs)
        found = [find() for find in detector.detect(IMAGES)]
    assert out.masks_queries_logits.shape[-2:] == (16, 24)
    total = 0
    for objects, logits, masks in zip(found, out.class_queries_logits, out.masks_queries_logits, strict=True):
        wanted = second_version(logits.double().numpy(), masks.double().numpy())
        assert [(each.name, each.box) for each in objects] == [(name, box) for name, box, _ in wanted]
        assert [each.confidence for each in objects] == pytest.approx([each[2] for each in wanted], abs=1e-5)
        total += len(objects)
    assert total >= 5


def test_a_query_has_several_classes_a_small_mask_a_low_confidence_and_an_empty_one_none() -> None:
    chances = torch.tensor([[0.55, 0.4, 0.0], [0.99, 0.0, 0.0], [0.9, 0.0, 0.0]])
    masks = torch.full((3, 8, 8), -9.0)
    masks[0, 2:4, 1:7] = 9.0
    masks[1, 0, 0] = 0.1  # sure of the class, not of the mask
    found = geneval.find_objects(chances, masks, (8, 8), (8, 8), ("cow", "dog", "cat"))
    assert [(each.name, each.box) for each in found] == [
        ("cow", (0.0, 0.0, 1.0, 1.0)),
        ("cow", (1.0, 2.0, 7.0, 4.0)),
        ("dog", (1.0, 2.0, 7.0, 4.0)),
    ]
    sure = 1 / (1 + math.exp(-9))
    wanted = [0.99 / (1 + math.exp(-0.1)), 0.55 * sure, 0.4 * sure]
    assert [each.confidence for each in found] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("rest", "before"), [(0, 0), (1, 0), (3, 2), (4, 2), (5, 2), (7, 4)])
def test_a_crop_is_open_clip_s(rest: int, before: int) -> None:
    """torchvision's middle: half of what is cut comes before it, and of halves the even number."""
    image = np.random.default_rng(3).integers(0, 256, (32, 32 + rest, 3), np.uint8)
    processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    for own, middle in ((image, image[:, before : before + 32]), (image.transpose(1, 0, 2), None)):
        cut = own[before : before + 32] if middle is None else middle
        wanted = processor([Image.fromarray(np.ascontiguousarray(cut))], return_tensors="pt").pixel_values
        torch.testing.assert_close(
            geneval.preprocess_images([np.ascontiguousarray(own)], 32), wanted, atol=1e-6, rtol=0
        )


def test_the_model_of_colors_sees_open_clip_s_crops_and_all_networks_sleep(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    grader, mover = geneval.build_scorer, neural.make_mover
    monkeypatch.setattr(geneval, "build_scorer", lambda *given: loaded.extend(given[:2]) or grader(*given))
    monkeypatch.setattr(neural, "make_mover", lambda *networks: loaded.append(networks) or mover(*networks))
    assert load_scorer("geneval", options=options(tiny)).move is not None
    detector, clip, networks = loaded
    assert clip.preprocess is geneval.preprocess_images
    assert networks == (detector.model, detector.head, clip.model)


@torch.inference_mode()
def test_a_color_is_the_nearest_text_to_the_object_on_gray(tiny: Path) -> None:
    """By transformers' own processor and model, with Pillow's composite and crop; several objects and all colors."""
    model, tokenizer = CLIPModel.from_pretrained(tiny / "clip").eval(), CLIPTokenizer.from_pretrained(tiny / "clip")
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    clip = geneval.load_embedder(str(tiny / "clip"), str(tiny / "clip"), device="cpu", dtype="float32", threads=1)
    rng = np.random.default_rng(2)
    seen = set()
    for _ in range(12):
        paint = np.ones((40, 56, 1)) * rng.integers(0, 256, 3) + rng.normal(0, 20, (40, 56, 3))
        image = paint.clip(0, 255).astype(np.uint8)
        mask = np.zeros((40, 56), bool)
        top, left = rng.integers(0, 20, 2)
        mask[top : top + 18, left : left + 25] = rng.random((18, 25)) < 0.8
        own = Detection("tv remote", geneval.bounding_box(mask), 0.9, mask)
        blank = Image.new("RGB", (56, 40), "#999")
        cut = Image.composite(Image.fromarray(image), blank, Image.fromarray(mask)).crop(own.box)
        pixels = processor([cut], return_tensors="pt").pixel_values
        features = model.get_image_features(pixel_values=pixels).pooler_output[0]
        nearest = []
        for color in COLORS:
            texts = [f"a photo of a {color} tv remote", f"a photo of a {color}-colored tv remote"]
            rows = [model.get_text_features(**tokenizer([text], truncation=True, max_length=20, return_tensors="pt"))
                    .pooler_output[0] for text in (*texts, f"a photo of a {color} object")]  # fmt: skip
            mean = torch.stack([row / row.norm() for row in rows]).mean(dim=0)
            nearest.append(float(features @ mean / mean.norm()))
        mine = geneval.color_of(clip, lambda name: geneval.color_texts(clip, name), image, own)
        assert mine == COLORS[int(np.argmax(nearest))], nearest
        seen.add(mine)
    assert len(seen) >= 2


RGB = {
    "red": (220, 20, 20), "orange": (250, 140, 10), "yellow": (250, 240, 20), "green": (20, 160, 40),
    "blue": (20, 40, 220), "purple": (120, 20, 150), "pink": (255, 150, 190), "brown": (110, 60, 20),
    "black": (0, 0, 0), "white": (255, 255, 255),
}  # fmt: skip
SMALL = SIDE // 4


class PlantedNet:
    """In place of Mask2Former: a query for each object of a scene, with its class and box."""

    device, dtype = CPU, torch.float32

    def __init__(self, things: Sequence[Detection]) -> None:
        self.things = things

    def __call__(self, pixel_values: Tensor, output_hidden_states: bool) -> Any:
        [_, _, height, width] = pixel_values.shape
        chances = torch.zeros(len(self.things), 1, len(OBJECTS) + 1)
        masks = torch.full((1, len(self.things), height, width), -99.0)
        for i, own in enumerate(self.things):
            left, top, right, bottom = (round(max(0, side) / 4) for side in own.box)
            chances[i, 0, OBJECTS.index(own.name)], chances[i, 0, -1] = own.confidence, 1 - own.confidence
            masks[0, i, top:bottom, left:right] = 99
        return SimpleNamespace(transformer_decoder_intermediate_states=[chances.log()], masks_queries_logits=[masks])


class PlantedClip:
    """In place of CLIP: an image's color is that of its middle, a text's the one that it names."""

    def images(self, images: Sequence[np.ndarray]) -> Tensor:
        rows = [[-float(np.abs(np.subtract(image[len(image) // 2, image.shape[1] // 2], RGB[color], dtype=float)).sum())
                 for color in COLORS] for image in images]  # fmt: skip
        return torch.tensor(rows)

    def texts(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[float(f" {color}" in text) for color in COLORS] for text in texts])


@pytest.mark.parametrize("tag", ["single_object", "two_object", "counting", "colors", "position", "color_attr"])
def test_a_planted_detector_gives_drawn_scenes_their_known_grades(tag: str) -> None:
    """Forty scenes of each kind; the colors are read from the pixels."""
    processor = Mask2FormerImageProcessorPil(size={"shortest_edge": SMALL, "longest_edge": SMALL})
    for seed in range(40):
        painted, meta, known = scene(random.Random(seed), tag, right=seed % 2 == 0)
        image = np.full((1, SMALL, SMALL, 3), 200, np.uint8)
        for own in sorted(painted, key=lambda each: each.confidence):
            left, top, right, bottom = (round(max(0, side) / 4) for side in own.box)
            image[0, top:bottom, left:right] = RGB[painted[own]]
        net, head = PlantedNet(list(painted)), torch.nn.Identity()
        detector = geneval.Detector(net, head, OBJECTS, processor)  # type: ignore[arg-type]
        scorer = geneval.build_scorer(detector, PlantedClip(), "partial", "planted")  # type: ignore[arg-type]
        [score] = scorer({"image": image}, ["a photo"], [meta])
        wanted = {"correct": known.correct, "strict": known.strict, "partial": pytest.approx(known.partial)}
        assert score.parts == wanted, (seed, meta, score)
        assert score.value == score.parts["partial"]


def test_it_is_served_with_the_metadata_of_each_prompt(tiny: Path, serve: Callable[..., str]) -> None:
    scorer = load_scorer("geneval", options=options(tiny))
    metas: list[dict[str, object]] = [
        META,
        {"tag": "counting", "include": [{"class": "cow", "count": 1}]},
        {"tag": "x"},
    ]
    with RewardClient(serve(scorer)) as client:
        served = client.submit({"image": IMAGES}, ["a", "b", "c"], metas).result()
    assert served == scorer({"image": IMAGES}, ["a", "b", "c"], metas)
    assert served[1].value == 0
    assert served[2].value is None
    assert scorer.version == "mask2former 64 clip partial float32"


@pytest.mark.parametrize(("grade", "value"), [("correct", 1.0), ("strict", 0.0), ("partial", 2 / 3)])
def test_the_option_says_which_grade_is_the_score(tiny: Path, grade: str, value: float) -> None:
    """Of two cows and a dog for one of each; the details tell what was found, and the colors that were asked for."""
    found = [thing(name) for name in ("cow", "cow", "dog")]
    wish = [{"class": "cow", "count": 1}, {"class": "dog", "count": 1, "color": "red"}]
    score = geneval.judge(lambda: found, {"tag": "colors", "include": wish}, lambda each: "red", grade)
    assert score.value == pytest.approx(value)
    assert score.parts == {"correct": 1, "strict": 0, "partial": pytest.approx(2 / 3)}
    assert score.details == {"found": {"cow": 2, "dog": 1}, "colors": ["red dog"]}
    assert load_scorer("geneval", options=options(tiny, grade=grade)).version.split()[-2] == grade


def test_a_score_does_not_depend_on_the_rest_of_its_batch(tiny: Path) -> None:
    scorer = load_scorer("geneval", options=options(tiny))
    together = scorer({"image": IMAGES}, ["a"] * 3, [META] * 3)
    assert together == [scorer({"image": IMAGES[i : i + 1]}, ["a"], [META])[0] for i in range(3)]


def test_a_folder_s_configuration_makes_the_networks_of_its_weights(tiny: Path) -> None:
    both = {"detector": str(tiny / "mask2former"), "model": str(tiny / "clip")}
    [empty] = empty_networks("geneval", "meta", both).values()
    detector = geneval.load_detector(str(tiny / "mask2former"), 64, CPU, torch.float32)
    clip = CLIPModel.from_pretrained(tiny / "clip")
    count = sum(weight.numel() for net in (detector.model, clip) for weight in net.parameters())
    assert sum(weight.numel() for weight in empty.network.parameters()) == count


def spoil(folder: Path, target: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> str:
    """A copy of a checkpoint with other weights or another configuration."""
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(weights, config)
    target.mkdir()
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def test_numbers_that_are_not_finite_are_no_grade(tiny: Path, tmp_path: Path) -> None:
    def break_head(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        weights["class_predictor.bias"][0] = math.nan

    def break_masks(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        weights["model.pixel_level_module.decoder.mask_projection.bias"][0] = math.nan

    for name, change in (("head", break_head), ("masks", break_masks)):
        broken = spoil(tiny / "mask2former", tmp_path / name, change)
        scores = load_scorer("geneval", options=options(tiny, detector=broken))(
            {"image": IMAGES}, ["a"] * 3, [META] * 3
        )
        assert scores == [Score(None, abstained="the detector returned numbers that are not finite")] * 3
    mask = np.ones((4, 4), bool)
    clip = SimpleNamespace(images=lambda crops: torch.full((1, len(COLORS)), math.nan))
    with pytest.raises(FloatingPointError, match="the CLIP model returned numbers that are not finite"):
        geneval.color_of(clip, lambda name: torch.eye(len(COLORS)), np.zeros((4, 4, 3), np.uint8),  # type: ignore[arg-type]
                         Detection("cow", (0, 0, 4, 4), 0.9, mask))  # fmt: skip


def test_a_ribbon_and_metadata_of_others_abstain(tiny: Path) -> None:
    scorer = load_scorer("geneval", options=options(tiny))
    [ribbon] = scorer({"image": np.zeros((1, 1, 201, 3), np.uint8)}, ["a"], [META])
    assert ribbon == Score(None, abstained="the image has an aspect ratio above 200")
    unknown = {"tag": "colors", "include": [{"class": "unicorn", "count": 1}]}
    reason = "the prompt's metadata must be GenEval's: include"
    for meta, rest in (
        ({}, " must be a list"),
        (unknown, "[0].class must be one of GenEval's 80 objects, got 'unicorn'"),
    ):
        [score] = scorer({"image": IMAGES[:1]}, ["a"], [meta])
        assert score.abstained is not None
        assert score.abstained.startswith(reason + rest)


def test_a_detector_of_other_objects_or_without_its_head_is_refused(tiny: Path, tmp_path: Path) -> None:
    def rename(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["id2label"]["63"] = "portable computer"

    def behead(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        del weights["class_predictor.weight"]

    other = spoil(tiny / "mask2former", tmp_path / "other", rename)
    with pytest.raises(ValueError, match=r"detector must know GenEval's 80 objects, but .*other lacks \['laptop'\]"):
        load_scorer("geneval", options=options(tiny, detector=other))
    headless = spoil(tiny / "mask2former", tmp_path / "headless", behead)
    with pytest.raises(ValueError, match="headless must hold the class_predictor of a Mask2Former"):
        load_scorer("geneval", options=options(tiny, detector=headless))
