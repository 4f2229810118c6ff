"""Drawn scenes of objects with their grades under GenEval's rules, which follow from how a scene is drawn."""

import random
from typing import Any

from omni_reward.scorers.geneval_rules import COLORS, RELATIONS, Detection, Grades

SIDE = 512
NAMES = ("bench", "cow", "cup", "dog", "kite")
STEPS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
Meta = dict[str, Any]
Painted = dict[Detection, str]  # a scene's objects and their colors


def thing(name: str, x: float = 256, y: float = 256, side: float = 60, confidence: float = 0.95) -> Detection:
    return Detection(name, (x - side / 2, y - side / 2, x + side / 2, y + side / 2), confidence)


def at(rng: random.Random, name: str, x: float, y: float) -> Detection:
    return thing(name, x + rng.uniform(-15, 15), y + rng.uniform(-15, 15), rng.uniform(40, 80), rng.uniform(0.91, 1))


def scene(rng: random.Random, tag: str, right: bool) -> tuple[Painted, Meta, Grades]:
    """Return a scene with its metadata and grades."""
    first, second = rng.sample(NAMES, 2)
    red, blue, other = rng.sample(COLORS, 3)
    include: list[Meta] = [{"class": first, "count": 1}]
    exclude: list[Meta] = []
    painted: Painted = {at(rng, first, 256, 256): red}
    partial = 1.0
    if tag == "single_object" and not right:
        painted, partial = {at(rng, second, 256, 256): red}, 0.0
    elif tag == "two_object":
        include.append({"class": second, "count": 1})
        painted |= {at(rng, second, 400, 400): blue} if right else {}
        partial = 1.0 if right else 0.5
    elif tag == "counting":
        count = rng.randint(2, 4)
        include, exclude = [{"class": first, "count": count}], [{"class": first, "count": count + 1}]
        number = count if right else count + rng.choice((-1, 1))
        painted = {at(rng, first, 100 * i, 256): red for i in range(number)}
        partial = 1.0 if right else 1 - 1 / count
    elif tag == "colors":
        include[0]["color"] = red if right else other
        partial = 1.0 if right else 0.5
    elif tag == "color_attr":
        include = [{"class": first, "count": 1, "color": red}, {"class": second, "count": 1, "color": blue}]
        painted[at(rng, second, 400, 400)] = blue if right else other
        partial = 1.0 if right else 0.75
    elif tag == "position":
        relation = rng.choice(RELATIONS)
        x, y = STEPS[relation]
        away = 200 if right else -200
        include.append({"class": second, "count": 1, "position": [relation, 0]})
        painted[at(rng, second, 256 + away * x, 256 + away * y)] = blue
        partial = 1.0 if right else 0.75
    painted |= {thing(name, confidence=rng.uniform(0, 0.29)): red for name in NAMES}  # too faint to count
    meta = {"tag": tag, "include": include, "exclude": exclude}
    return painted, meta, Grades(correct=right, strict=right, partial=partial)
