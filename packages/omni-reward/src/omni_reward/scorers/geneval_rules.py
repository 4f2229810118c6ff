"""GenEval's rules (Ghosh et al., arXiv 2310.11513): whether the detected objects match a prompt.

A detection counts if its confidence is above 0.3 (0.9 for prompts that count objects) and it is among the 16 most
confident ones of its class. There are three grades:

    correct    the published evaluation: enough objects, the most confident ones with the right color and position
    strict     as in flow_grpo's server: the exact number of objects, all of them with the right color and position
    partial    the reward that flow_grpo trains with: the mean over the parts of the strict rule

Each object of the prompt is a part of `partial`: 1 - |wanted - found| / wanted, which is negative above twice the
wanted number. Its color is another part, the share of the objects that have it, and so is its position. If the number
is wrong, color and position are one part of 0. A wrong position is two parts, 0 and 1, as in the released code: two
objects in the wrong places have 3 / 4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_CONFIDENCE = 0.3
MIN_CONFIDENCE_COUNTING = 0.9
MAX_OBJECTS = 16  # of a class
OVERLAP = 0.1  # share of both objects' sizes by which their centers must differ
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
OBJECTS = (  # GenEval's names of COCO's classes, in COCO's order
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
RELATIONS = ("left of", "right of", "above", "below")

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Detection:
    """A detected object.

    Args:
        name: name of its class.
        box: left, top, right and bottom, in pixels.
        confidence: in [0, 1].
        mask: True for its pixels, [H, W]; None if the detector returns only boxes.
    """

    name: str
    box: Box
    confidence: float
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class ObjectSpec:
    """Object that a prompt asks for or excludes.

    Args:
        name: name of its class.
        count: number of objects wanted; for an excluded object, the smallest number that is wrong.
        color: one of COLORS, or None for any.
        relation: one of RELATIONS to the object `target`, or None for any place.
        target: index of an earlier object.
    """

    name: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = 0


@dataclass(frozen=True)
class Requirements:
    """A prompt's objects: all of `include`, none of `exclude`; `counting` requires the higher confidence."""

    include: tuple[ObjectSpec, ...]
    exclude: tuple[ObjectSpec, ...] = ()
    counting: bool = False


@dataclass(frozen=True)
class Grades:
    """The three grades of an image."""

    correct: bool
    strict: bool
    partial: float


def read_requirements(meta: Mapping[str, object]) -> Requirements:
    """Return the wish in a prompt's metadata, which has GenEval's keys: tag, include, exclude.

    Raises:
        ValueError: a key is missing or invalid.
    """
    include = _read_list("include", meta.get("include"))
    if not include:
        raise ValueError(f"include must have at least one object, got {meta.get('include')!r:.80}")
    exclude = _read_list("exclude", meta.get("exclude", []))
    if not isinstance(tag := meta.get("tag"), str):
        raise ValueError(f"tag must be a text, got {tag!r:.80}")
    return Requirements(include, exclude, counting=tag == "counting")


def _read_list(key: str, value: object) -> tuple[ObjectSpec, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{key} must be a list of objects, got {value!r:.80}")
    return tuple(_read_spec(f"{key}[{i}]", item, i) for i, item in enumerate(value))


def _read_spec(where: str, value: object, index: int) -> ObjectSpec:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, got {value!r:.80}")
    name, count, color = value.get("class"), value.get("count"), value.get("color")
    if not isinstance(name, str) or name not in OBJECTS:
        raise ValueError(f"{where}.class must be one of GenEval's {len(OBJECTS)} objects, got {name!r:.80}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{where}.count must be a whole number >= 1, got {count!r:.80}")
    if color is not None and color not in COLORS:
        raise ValueError(f"{where}.color must be one of {list(COLORS)}, got {color!r:.80}")
    if (position := value.get("position")) is None:
        return ObjectSpec(name, count, color)
    match position:
        case [str(relation), int(target)] if relation in RELATIONS and 0 <= target < index:
            return ObjectSpec(name, count, color, relation, target)
    rule = f"one of {list(RELATIONS)} and the index of an earlier object"
    raise ValueError(f"{where}.position must be {rule}, got {position!r:.80}")


def grade(detections: Sequence[Detection], requirements: Requirements, color_of: Callable[[Detection], str]) -> Grades:
    """Return the grades of an image.

    Args:
        detections: the image's detections, in any order and with any confidence.
        requirements: what its prompt asks for.
        color_of: returns the color of an object; called only for objects that should have one.
    """
    kept = select_detections(detections, counting=requirements.counting)
    excluded = any(len(kept.get(other.name, ())) >= other.count for other in requirements.exclude)
    enough = _parts(kept, requirements, color_of, exact=False)
    exact = _parts(kept, requirements, color_of, exact=True)
    return Grades(correct=min(enough) == 1 and not excluded, strict=min(exact) == 1, partial=sum(exact) / len(exact))


def select_detections(detections: Sequence[Detection], *, counting: bool) -> dict[str, list[Detection]]:
    """Return the detections that count, by class, the most confident first."""
    threshold = MIN_CONFIDENCE_COUNTING if counting else MIN_CONFIDENCE
    kept: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.confidence):
        same = kept.setdefault(detection.name, [])
        if detection.confidence > threshold and len(same) < MAX_OBJECTS:
            same.append(detection)
    return kept


def _parts(
    detections: Mapping[str, Sequence[Detection]],
    requirements: Requirements,
    color_of: Callable[[Detection], str],
    *,
    exact: bool,
) -> list[float]:
    """Return the parts of `partial`, each 1 if it is right; if the image is wrong, at least one is below 1.

    Args:
        exact: True if surplus objects are wrong too; else only the most confident ones are taken.
    """
    parts: list[float] = []
    groups: list[Sequence[Detection]] = []  # objects for each wanted one; empty if they are wrong
    for spec in requirements.include:
        group = detections.get(spec.name, ())
        group = group if exact else group[: spec.count]
        item_parts = [1 - abs(spec.count - len(group)) / spec.count]
        if item_parts[0] < 1:
            item_parts += [0.0] * (spec.color is not None or spec.relation is not None)
        elif spec.color is not None:
            item_parts.append(sum(color_of(detection) == spec.color for detection in group) / spec.count)
        if min(item_parts) == 1 and spec.relation is not None:
            item_parts += _position_parts(group, groups[spec.target], spec.relation)
        groups.append(group if min(item_parts) == 1 else ())
        parts += item_parts
    return parts


def _position_parts(group: Sequence[Detection], targets: Sequence[Detection], relation: str) -> list[float]:
    if not targets:
        return [0.0]
    holds = all(relation in relations(detection.box, target.box) for detection in group for target in targets)
    return [1.0] if holds else [0.0, 1.0]


def relations(box: Box, target: Box) -> set[str]:
    """Return the RELATIONS of a box to another: none if they are too close to each other, two on a diagonal.

    The offset of the centers is shortened along each axis by OVERLAP times both sizes, then compared with half of its
    original length.
    """
    low, high = np.array([box[:2], target[:2]]), np.array([box[2:], target[2:]])
    offset = np.subtract(*(low + high) / 2)  # right and down
    short = np.maximum(np.abs(offset) - OVERLAP * (high - low).sum(axis=0), 0)
    if (short < 1e-3).all():
        return set()
    right, down = np.sign(offset) * short / np.hypot(*offset)
    sides = zip(RELATIONS, (-right, right, -down, down), strict=True)
    return {relation for relation, share in sides if share > 0.5}
