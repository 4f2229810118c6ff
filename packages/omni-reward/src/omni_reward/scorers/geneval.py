"""GenEval (Ghosh et al., arXiv 2310.11513): objects from Mask2Former, colors from CLIP, grades from geneval_rules.py.

    confidence = p(class | query) * mean of the mask's probabilities where they are above 1/2
    color      = argmax over COLORS of cos(CLIP(object), mean of CLIP(text) over three texts)

Both follow the published evaluation: the image's best 100 pairs of query and class count; a box encloses its mask; CLIP
sees the box, gray (#999999) outside of the mask. The published detector is mmdet's Mask2Former with Swin-S, trained on
COCO; DETECTOR is the same network with its authors' weights.

The published evaluation is evaluation/evaluate_images.py of github.com/djghosh13/geneval; masks and confidences
follow `instance_postprocess` of mmdet/models/seg_heads/panoptic_fusion_heads/maskformer_fusion_head.py of
github.com/open-mmlab/mmdetection, version 2.

Notation: N samples, H height, W width, h and w of the network's masks, Q queries, C classes, E size of an embedding.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize
from transformers import Mask2FormerConfig, Mask2FormerModel
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from omni_reward.media import Arrays, Meta
from omni_reward.scorers import neural
from omni_reward.scorers.clip import CLIP, Embedder, empty_clip, load_embedder
from omni_reward.scorers.geneval_rules import (
    COLORS,
    MIN_CONFIDENCE,
    OBJECTS,
    Detection,
    grade,
    read_requirements,
    select_detections,
)
from omni_reward.scorers.pixels import MAX_ASPECT, square_pixels
from omni_reward.wire import Score, Scorer

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
PUBLISHED: dict[str, dict[str, Any]] = {DETECTOR: {"num_labels": 80}}  # otherwise transformers' defaults
COCO_NAMES = {  # names in checkpoints -> GenEval's
    "mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard",
    "aeroplane": "airplane", "diningtable": "dining table", "motorbike": "motorcycle", "pottedplant": "potted plant",
    "sofa": "couch", "tvmonitor": "tv",
}  # fmt: skip
SIDE, LONGEST = 800, 1333 / 800  # shorter side of the detector's input, and the largest ratio of the longer side to it
MAX_DETECTIONS, BATCH_SIZE = 100, 4  # per image; images per batch
GRAY = 0x99
TEXTS = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
GRADES = ("partial", "strict", "correct")  # the fields of `geneval_rules.Grades`


@dataclass(frozen=True)
class Detector:
    """Mask2Former for instance segmentation.

    Args:
        model: transformers' Mask2FormerModel.
        head: maps the state of a query to the logits of C classes and of no object.
        names: names of the classes.
        processor: prepares the model's input from images.
    """

    model: Any
    head: nn.Linear
    names: tuple[str, ...]
    processor: Mask2FormerImageProcessorPil

    def detect(self, images: np.ndarray) -> list[Callable[[], list[Detection]]]:
        """Run the network on images [N, H, W, 3], uint8, RGB, and return a function per image that finds its objects.

        The function raises FloatingPointError if the network's outputs are not finite.
        """
        inputs = self.processor(list(images), input_data_format="channels_last", return_tensors="pt")
        pixels = inputs["pixel_values"].to(self.model.device, self.model.dtype)
        outputs = self.model(pixel_values=pixels, output_hidden_states=True)
        logits = self.head(outputs.transformer_decoder_intermediate_states[-1].transpose(0, 1))
        chances, masks = logits.float().softmax(dim=-1)[..., :-1], outputs.masks_queries_logits[-1]
        sizes = pixels.shape[-2:], images.shape[1:3]
        return [
            partial(find_objects, *prediction, *sizes, self.names) for prediction in zip(chances, masks, strict=True)
        ]


def find_objects(
    chances: Tensor, masks: Tensor, between: tuple[int, int], size: tuple[int, int], names: tuple[str, ...]
) -> list[Detection]:
    """Return the objects of an image above MIN_CONFIDENCE.

    Args:
        chances: probability of each class [Q, C].
        masks: logits [Q, h, w].
        between: (height, width) of the network's input, to which masks are resized first.
        size: (H, W) of the image.
        names: names of the classes.

    Raises:
        FloatingPointError: a number is not finite.
    """
    if not (chances.isfinite().all() and masks.isfinite().all()):
        raise FloatingPointError("the detector returned numbers that are not finite")
    best, places = chances.flatten().topk(min(MAX_DETECTIONS, chances.numel()))
    best, places = (
        best[is_confident := best > MIN_CONFIDENCE],
        places[is_confident],
    )  # a confidence is at most its class probability
    logits = masks[None, places // len(names)].float()
    for side in (between, size):
        logits = interpolate(logits, side, mode="bilinear", align_corners=False)
    inside = logits[0] > 0
    means = (logits[0].sigmoid() * inside).sum(dim=(1, 2)) / (inside.sum(dim=(1, 2)) + 1e-6)
    labels, confidences = (places % len(names)).tolist(), (best * means).tolist()
    detections = zip(labels, confidences, inside.cpu().numpy(), strict=True)
    return [
        Detection(names[i], bounding_box(mask), confidence, mask)
        for i, confidence, mask in detections
        if confidence > MIN_CONFIDENCE
    ]


def bounding_box(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the pixels of a mask [H, W] that is not empty."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def color_texts(clip: Embedder, name: str) -> Tensor:
    """Return the embedding [len(COLORS), E] of an object of this name in each color."""
    texts = [text.format(color=color, name=name) for color in COLORS for text in TEXTS]
    return normalize(clip.texts(texts).view(len(COLORS), len(TEXTS), -1).mean(dim=1), dim=-1)


def preprocess_images(images: Iterable[np.ndarray], side: int) -> Tensor:
    """Return CLIP's input [N, 3, side, side] as in open_clip, whose center crop is rounded as in torchvision."""
    return torch.from_numpy(square_pixels(images, side, halve=lambda rest: round(rest / 2)))


def color_of(clip: Embedder, texts: Callable[[str], Tensor], image: np.ndarray, detection: Detection) -> str:
    """Return the color of an object in an image [H, W, 3], uint8, RGB.

    Raises:
        FloatingPointError: a number is not finite.
    """
    assert detection.mask is not None
    left, top, right, bottom = map(int, detection.box)
    crop = np.where(detection.mask[..., None], image, np.uint8(GRAY))[top:bottom, left:right]
    likeness = (clip.images([crop]) @ texts(detection.name).T)[0]
    if not likeness.isfinite().all():
        raise FloatingPointError("the CLIP model returned numbers that are not finite")
    return COLORS[int(likeness.argmax())]


def judge(
    find: Callable[[], list[Detection]], meta: Mapping[str, object], color: Callable[[Detection], str], value: str
) -> Score:
    """Return the score of an image, or an abstention if its metadata or a network's numbers are invalid.

    Args:
        find: returns the image's objects.
        meta: metadata of its prompt.
        color: returns the color of an object.
        value: the grade that is the score, one of GRADES; all three are parts.
    """
    try:
        requirements = read_requirements(meta)
    except ValueError as exc:
        return Score(None, abstained=f"the prompt's metadata must be GenEval's: {exc}")
    colors: dict[Detection, str] = {}

    def cached_color(detection: Detection) -> str:
        if detection not in colors:
            colors[detection] = color(detection)
        return colors[detection]

    try:
        kept = select_detections(objects := find(), counting=requirements.counting)
        grades = asdict(grade(objects, requirements, cached_color))
    except FloatingPointError as exc:
        return Score(None, abstained=str(exc))
    details = {
        "found": {name: len(group) for name, group in kept.items() if group},
        "colors": [f"{color} {detection.name}" for detection, color in colors.items()],
    }
    parts = {name: float(number) for name, number in grades.items()}
    return Score(parts[value], parts=parts, details=details)


def load_detector(name: str, side: int, device: torch.device, dtype: torch.dtype) -> Detector:
    """Load a detector by name.

    Raises:
        ValueError: side is below 32, the model cannot be read, or an object of GenEval is missing.
    """
    if side < 32:
        raise ValueError(f"side must be >= 32, got {side}")
    model = neural.load_model(Mask2FormerModel, name, dtype, device)
    weights = neural.strip_prefix("class_predictor.", neural.read_weights(neural.find_file(name, "model.safetensors")))
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    names = tuple(COCO_NAMES.get(label, label) for label in labels)
    if missing := [required for required in OBJECTS if required not in names]:
        raise ValueError(f"detector must know GenEval's {len(OBJECTS)} objects, but {name} lacks {missing[:3]}")
    head = nn.Linear(model.config.hidden_dim, len(names) + 1)
    try:
        head.load_state_dict(weights)
    except RuntimeError as exc:
        raise ValueError(f"{name} must hold the class_predictor of a Mask2Former: {exc}") from exc
    processor = Mask2FormerImageProcessorPil(size={"shortest_edge": side, "longest_edge": int(side * LONGEST)})
    return Detector(model, head.to(device, dtype).eval().requires_grad_(False), names, processor)


def empty_geneval(
    device: str, *, detector: str = DETECTOR, model: str = CLIP, side: int | str = SIDE, dtype: str = "float32"
) -> neural.Empty:
    """Return the networks of `load_geneval` with uninitialized weights.

    Raises:
        ValueError: an argument is invalid, or a model's configuration cannot be read.
    """
    config = neural.load_config(Mask2FormerConfig, detector, PUBLISHED)
    network = neural.empty_model(Mask2FormerModel, config, dtype, device)
    clip = empty_clip(device, model=model, dtype=dtype)

    def call() -> None:
        pixels = torch.zeros(BATCH_SIZE, 3, int(side), int(side))
        network(pixel_values=pixels.to(device, network.dtype))
        clip.call()

    return neural.Empty(nn.ModuleList([network, clip.network]), call)


def load_geneval(
    *,
    detector: str = DETECTOR,
    model: str = CLIP,
    tokenizer: str | None = None,
    grade: str = "partial",
    side: int = SIDE,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
) -> Scorer:
    """Load the scorer of `image` [N, H, W, 3], uint8, RGB, by the metadata of GenEval's prompts.

    Args:
        detector: name of a Mask2Former for instance segmentation with GenEval's objects.
        model, tokenizer, device, dtype, threads: as in `omni_reward.scorers.clip.load_clip`; the model is for colors.
        grade: which grade is the score, one of GRADES; all three are parts.
        side: pixels of the shorter side of the detector's input.

    Raises:
        ValueError: an argument is invalid, or a model cannot be read.
    """
    if grade not in GRADES:
        raise ValueError(f"grade must be one of {list(GRADES)}, got {grade!r}")
    where = neural.pick_device(device, threads=threads)
    finder = load_detector(detector, side, where, neural.pick_dtype(dtype))
    clip = replace(
        load_embedder(model, tokenizer or model, device=device, dtype=dtype, threads=threads),
        preprocess=preprocess_images,
    )
    version = f"{neural.short_name(detector)} {side} {neural.short_name(model)} {grade} {dtype}"
    return replace(
        build_scorer(finder, clip, grade, version), move=neural.make_mover(finder.model, finder.head, clip.model)
    )


def build_scorer(detector: Detector, clip: Embedder, grade: str, version: str) -> Scorer:
    """Return the scorer of `load_geneval` from two loaded models."""
    color = partial(color_of, clip, cache(partial(color_texts, clip)))

    def score(media: Arrays, prompts: list[str], meta: Meta) -> list[Score]:
        images = media["image"]
        if max(images.shape[1:3]) > MAX_ASPECT * min(images.shape[1:3]):
            return [Score(None, abstained=f"the image has an aspect ratio above {MAX_ASPECT}")] * len(prompts)
        with torch.inference_mode():
            rows = zip(images, detector.detect(images), meta, strict=True)
            return [judge(find, entry, partial(color, image), grade) for image, find, entry in rows]

    return Scorer(score, batch_size=BATCH_SIZE, version=version)
