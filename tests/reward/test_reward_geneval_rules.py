"""GenEval's rules on detections: known answers, those of the released evaluation, and another version of its rules."""

import cmath
import json
import random
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from omni_reward.scorers.geneval_rules import (
    COLORS,
    RELATIONS,
    Detection,
    Grades,
    grade,
    read_requirements,
    relations,
    select_detections,
)
from reward.reward_geneval_scenes import NAMES, SIDE, STEPS, Meta, Painted, scene, thing


def graded(painted: Painted, meta: Meta) -> Grades:
    return grade(list(painted), read_requirements(meta), painted.__getitem__)


@pytest.mark.parametrize("tag", ["single_object", "two_object", "counting", "colors", "position", "color_attr"])
def test_forty_scenes_of_each_kind_have_their_known_grades(tag: str) -> None:
    for seed in range(40):
        painted, meta, known = scene(random.Random(seed), tag, right=seed % 2 == 0)
        assert graded(painted, meta) == known, (seed, meta)


def test_four_hundred_crowds_have_the_answers_of_the_released_evaluation() -> None:
    """Its own functions gave them, for these boxes, confidences and colors; the first line has its commit."""
    _, *lines = Path(__file__).with_name("geneval_recorded.jsonl").read_text().splitlines()
    answers: Counter[bool] = Counter()
    for line in map(json.loads, lines):
        painted = {Detection(name, tuple(box), at): color for name, box, at, color in line["detections"]}
        assert graded(painted, line["meta"]).correct is line["correct"], line
        answers[line["correct"]] += 1
    assert sum(answers.values()) == 400
    assert min(answers.values()) >= 50


def reference(painted: Painted, meta: Meta) -> tuple[bool, bool, Fraction]:
    """The released arithmetic, from its description, in whole numbers and complex ones."""
    least = 0.9 if meta["tag"] == "counting" else 0.3
    include: list[Meta] = meta["include"]
    exclude: list[Meta] = meta["exclude"]
    seen = {n: sorted((d for d in painted if d.name == n), key=lambda d: d.confidence)[::-1] for n in NAMES}
    seen = {n: [d for d in them if d.confidence > least][:16] for n, them in seen.items()}

    def is_placed(a: Detection, b: Detection, relation: str) -> bool:
        (k, t, r, u), (m, v, s, w) = a.box, b.box
        way = complex(k + r - m - s, t + u - v - w) / 2
        slack = complex(r - k + s - m, u - t + w - v) / 10
        gap = complex(max(0, abs(way.real) - slack.real), max(0, abs(way.imag) - slack.imag))
        if gap.real < 1e-3 and gap.imag < 1e-3:
            return False
        x, y = STEPS[relation]
        length = gap.real if x else gap.imag
        toward = way.real * x + way.imag * y
        return toward > 0 and length > abs(way) / 2

    def judge(take_all: bool) -> tuple[bool, list[Fraction]]:
        fine: list[list[Detection] | None] = []
        points: list[Fraction] = []
        for item in include:
            count: int = item["count"]
            them = seen[str(item["class"])]
            them = them if take_all else them[:count]
            points.append(1 - Fraction(abs(count - len(them)), count))
            good = len(them) == count
            if not good and ("color" in item or "position" in item):
                points.append(Fraction(0))
            if good and "color" in item:
                same = Counter(painted[d] for d in them)[str(item["color"])]
                points.append(Fraction(same, count))
                good = same == count
            if good and "position" in item:
                relation, index = item["position"]
                others = fine[index]
                if others is None:
                    points.append(Fraction(0))
                    good = False
                else:
                    good = all(is_placed(a, b, relation) for a in them for b in others)
                    points += [Fraction(1)] if good else [Fraction(0), Fraction(1)]
            fine.append(them if good else None)
        return None not in fine, points

    strict, points = judge(take_all=True)
    over = [item for item in exclude if len(seen[str(item["class"])]) >= item["count"]]
    return judge(take_all=False)[0] and not over, strict, sum(points, Fraction(0)) / len(points)


def crowd(rng: random.Random) -> tuple[Painted, Meta]:
    """Any objects at any place, and any wish."""
    names = rng.sample(NAMES, 2)
    include: list[Meta] = []
    for i, name in enumerate(names[: rng.randint(1, 2)]):
        include.append({"class": name, "count": rng.choice((1, 1, 2, 3))})
        if rng.random() < 0.4:
            include[-1]["color"] = rng.choice(COLORS[:2])
        if i and rng.random() < 0.7:
            include[-1]["position"] = [rng.choice(RELATIONS), 0]
    exclude = [{"class": rng.choice(names), "count": rng.randint(1, 4)}] if rng.random() < 0.3 else []
    painted = {}
    for name in names:
        for _ in range(rng.choice((0, 1, 1, 2, 3, 18))):
            where = rng.uniform(0, SIDE), rng.uniform(0, SIDE), rng.uniform(1, 250), rng.choice((0.2, 0.6, 0.97))
            painted[thing(name, *where[:3], where[3] + rng.uniform(0, 0.02))] = rng.choice(COLORS[:2])
    return painted, {"tag": rng.choice(("counting", "position")), "include": include, "exclude": exclude}


def test_a_thousand_crowds_are_graded_as_by_the_released_arithmetic() -> None:
    rng = random.Random(0)
    outcomes: Counter[tuple[bool, ...]] = Counter()
    for _ in range(1000):
        painted, meta = crowd(rng)
        mine = graded(painted, meta)
        correct, strict, partial = reference(painted, meta)
        assert (mine.correct, mine.strict, mine.partial) == (correct, strict, pytest.approx(float(partial))), meta
        outcomes[correct, strict] += 1
    assert all(outcomes[pair] >= 5 for pair in product((True, False), repeat=2)), outcomes


def test_more_objects_are_correct_but_not_strict_unless_they_are_excluded() -> None:
    painted = {thing("cow", x): "red" for x in (100, 300)}
    meta: Meta = {"tag": "single_object", "include": [{"class": "cow", "count": 1}]}
    assert graded(painted, meta) == Grades(correct=True, strict=False, partial=0)
    assert not graded(painted, meta | {"exclude": [{"class": "cow", "count": 2}]}).correct


def test_counting_needs_the_higher_confidence_and_sixteen_count() -> None:
    crowd = [thing("cow", confidence=x) for x in (0.3, 0.31, 0.9, 0.91)]
    assert [each.confidence for each in select_detections(crowd, counting=False)["cow"]] == [0.91, 0.9, 0.31]
    assert [each.confidence for each in select_detections(crowd, counting=True)["cow"]] == [0.91]
    assert len(select_detections([thing("cow")] * 20, counting=True)["cow"]) == 16


@pytest.mark.parametrize("degrees", range(0, 360, 15))
def test_a_relation_holds_within_sixty_degrees_of_its_direction(degrees: int) -> None:
    """Boxes without size, so that on a diagonal two relations hold."""
    away = cmath.rect(100, cmath.pi * (degrees + 1) / 180)
    found = relations((away.real, away.imag, away.real, away.imag), (0, 0, 0, 0))
    angles = {name: abs(cmath.phase(away / complex(*step))) for name, step in STEPS.items()}
    assert found == {name for name, angle in angles.items() if angle < cmath.pi / 3}


def test_large_boxes_with_near_centers_have_no_relation() -> None:
    assert relations((0, 0, 100, 100), (19, 19, 119, 119)) == set()
    assert relations((0, 0, 100, 100), (39, 0, 139, 100)) == set()  # (39 - 20) / 39 < 1 / 2
    assert relations((0, 0, 100, 100), (41, 0, 141, 100)) == {"left of"}


COW = {"class": "cow", "count": 1}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"tag": "colors"}, "include must be a list of objects, got None"),
        ({"tag": "colors", "include": []}, "include must have at least one object"),
        ({"include": [COW]}, "tag must be a text, got None"),
        ({"tag": "colors", "include": ["cow"]}, r"include\[0\] must be an object, got 'cow'"),
        (
            {"tag": "colors", "include": [{"count": 1}]},
            r"include\[0\].class must be one of GenEval's 80 objects, got None",
        ),
        ({"tag": "colors", "include": [{**COW, "count": 0}]}, r"include\[0\].count must be a whole number >= 1, got 0"),
        ({"tag": "colors", "include": [{**COW, "color": "teal"}]}, r"include\[0\].color must be one of .* got 'teal'"),
        ({"tag": "x", "include": [{**COW, "position": ["above", 0]}]}, r"include\[0\].position must be one of"),
        ({"tag": "x", "include": [COW, {**COW, "position": ["near", 0]}]}, r"include\[1\].position must be one of"),
        ({"tag": "x", "include": [COW], "exclude": [{**COW, "count": True}]}, r"exclude\[0\].count must be a whole"),
    ],
)
def test_metadata_that_break_a_rule_are_refused(meta: Meta, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_requirements(meta)
