"""All scorers: the media that they take, samples that do not mix, fewer bits, and what is refused or no score.

The rows are those of tests/reward/scorer_table.py. What a scorer's number is, its own file shows.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from omni_reward import Score
from omni_reward.scorers import SCORERS, load_scorer
from reward.scorer_table import MOUSE, REFERENCES, ROWS
from safetensors.torch import load_file, save_file
from torch import Tensor

NETWORKS = [name for name, row in ROWS.items() if "model" in row.needs]
WEIGHTS = [(name, weight) for name, row in ROWS.items() for weight in row.weights]


def values(name: str, folder: Path, rows: slice = slice(3), **options: str) -> list[float | None]:
    """Values of some of the row's three samples."""
    return [score.value for score in scores(name, folder, ROWS[name].given, rows, **options)]


def scores(
    name: str, folder: Path, media: Mapping[str, np.ndarray], rows: slice = slice(3), **options: str
) -> list[Score]:
    """Scores of some of three samples of media with the row's prompts."""
    row = ROWS[name]
    scorer = load_scorer(name, options=row.options(folder, **options))
    assert set(scorer.media) == set(row.media)
    assert options.get("dtype", "") in scorer.version
    meta: list[dict[str, object]] = [{"fps": 8.0, "sample_rate": 48_000} | MOUSE] * len(REFERENCES[rows])
    given = {kind: media[kind][rows] for kind in row.media}, list(row.prompts[rows]), meta
    return scorer(*given, *([REFERENCES[rows]] if scorer.references else []))


def test_the_table_has_all_scorers_but_two_that_need_other_programs() -> None:
    assert set(SCORERS) - set(ROWS) == {"imagebind", "vlm"}


@pytest.mark.parametrize("name", ROWS)
def test_a_scorer_takes_its_media_and_grades_each_sample_alone(name: str, tiny: Path) -> None:
    together = values(name, tiny)
    alone = [value for i in range(3) for value in values(name, tiny, slice(i, i + 1))]
    assert together == pytest.approx(alone, abs=1e-5)
    least = 1 if name == "geneval" else 3  # whose random detector finds no mouse
    assert len({round(value, 6) for value in alone}) >= least, "the inputs matter"


@pytest.mark.parametrize("name", NETWORKS)
def test_fewer_bits_are_near(name: str, tiny: Path) -> None:
    assert values(name, tiny, dtype="bfloat16") == pytest.approx(values(name, tiny), abs=0.1, rel=0.1)


@pytest.mark.parametrize("width", [200, 201])
@pytest.mark.parametrize("name", [name for name in NETWORKS if ROWS[name].media != ("audio",)])
def test_a_ribbon_has_no_score(name: str, width: int, tiny: Path) -> None:
    frame = np.zeros((3, 1, width, 3), np.uint8)
    found = scores(name, tiny, {"image": frame, "video": np.stack([frame] * 4, axis=1)})
    assert [score.value is None for score in found] == [width > 200] * 3
    assert all("aspect ratio above 200" in str(score.abstained) for score in found if score.value is None)


def spoiled(name: str, tiny: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A folder of all checkpoints, of which the scorer's weights have changed."""
    path = shutil.copytree(tiny, target, copy_function=os.symlink) / ROWS[name].file
    is_safe = path.suffix == ".safetensors"
    content = load_file(path) if is_safe else torch.load(path, weights_only=True)
    change(content.get("state_dict", content))
    path.unlink()
    save_file(content, path, metadata={"format": "pt"}) if is_safe else torch.save(content, path)
    return target


@pytest.mark.parametrize(("name", "weight"), WEIGHTS)
def test_a_file_that_lacks_a_weight_is_refused(name: str, weight: str, tiny: Path, tmp_path: Path) -> None:
    folder = spoiled(name, tiny, tmp_path / "all", lambda weights: weights.pop(weight))
    with pytest.raises(ValueError, match=ROWS[name].weights[weight]):
        values(name, folder)


@pytest.mark.parametrize("name", dict(WEIGHTS))
def test_a_network_that_overflows_gives_no_score(name: str, tiny: Path, tmp_path: Path) -> None:
    weight = next(iter(ROWS[name].weights))
    folder = spoiled(name, tiny, tmp_path / "all", lambda weights: weights[weight].fill_(torch.nan))
    assert values(name, folder) == [None] * 3


BOX = "must be TOP,LEFT,BOTTOM,RIGHT"
URL = r"url must be http\(s\)://host"
FINITE = "timeout_s must be > 0 and finite, got"
REFUSED = [  # scorer, options, what is said of them
    ("clip", "dtype=int8", "dtype must be one of"),
    ("clip", "device=abacus", "device must be one that PyTorch has here, got 'abacus'"),
    ("clip", "modle=x", "options of clip must fit it: got an unexpected keyword argument 'modle'"),
    ("clip", "model=/no/such/folder", "a model must be a folder, or a repository of the hub"),
    ("flow", "measure=fast", "measure must be one of"),
    ("flow", "top=0", "top must be above 0"),
    ("flow", "top=a", "a number"),
    ("frames:video", "", "frames: must be followed by a scorer of images, got one of video"),
    ("frames:jpeg", "frames=best", "frames must be one of .*, got 'best'"),
    ("frames:jpeg", "every=0", "every must be >= 1, got 0"),
    ("frames:jpeg", "every=x", "every must be a whole number, got 'x'"),
    ("frames:jpeg", "mod=x", "options of jpeg must fit it"),
    ("frames:spam", "", "got 'spam'"),
    ("geneval", "grade=best", r"grade must be one of \['partial', 'strict', 'correct'\], got 'best'"),
    ("geneval", "side=31", "side must be >= 32, got 31"),
    ("geneval", "detector=/no/such/folder", "a model must be a folder, or a repository of the hub"),
    ("jpeg", "mode=size", "mode must be one of .*, got 'size'"),
    ("likeness", "measure=ssim", r"measure must be one of \['pixels', 'ground'\], got 'ssim'"),
    ("likeness", "zero_at=0", "zero_at must be above 0 and at most 1, got 0.0"),
    ("likeness", "zero_at=nan", "zero_at must be above 0 and at most 1, got nan"),
    ("likeness", "leave_out=0,0,1", f"leave_out {BOX} .*, got '0,0,1'"),
    ("likeness", "only=0.5,0,0.5,1", f"only {BOX}"),
    ("likeness", "only=0,0,a,1", f"only {BOX}"),
    ("likeness", "only=0,0,1,1 leave_out=0,0,1,1", "only must be empty with leave_out"),
    ("pitch", "zero_at=-1", "zero_at must be > 0, got -1"),
    ("video", "measure=beauty", "measure must be one of .*, got 'beauty'"),
    ("vlm", "task=beauty", r"task must be one of \['alignment', 'edit', 'edit_rating', 'ocr',"),
    ("vlm", "url=127.0.0.1:8000", URL),
    ("vlm", "url=file:///etc/passwd", URL),
    ("vlm", "url=http://", URL),
    ("vlm", "timeout_s=soon", "timeout_s must be a number, got 'soon'"),
    ("vlm", "timeout_s=0", f"{FINITE} 0.0"),
    ("vlm", "timeout_s=inf", f"{FINITE} inf"),
    ("vlm", "timeout_s=nan", f"{FINITE} nan"),
    ("vlm", "max_in_flight=0", "max_in_flight must be >= 1, got 0"),
    ("vlm", "max_in_flight=2.5", "max_in_flight must be a whole number, got '2.5'"),
    ("vlm", "seed=x", "seed must be a whole number, got 'x'"),
    ("vlm", "temperature=1", "got an unexpected keyword argument 'temperature'"),
    ("vlm", "token_file=empty", "token must be printable ASCII"),
]
ENDPOINT = {"url": "http://127.0.0.1:1/v1", "task": "ocr"}
MISSING = [("aesthetic", {}, "head"), ("hpsv3", {}, "instruction"), ("vlm", {}, "url"), ("vlm", {"url": "x"}, "task")]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_a_setting_that_does_not_fit_is_one_line(
    name: str, options: str, message: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    needed = ENDPOINT if name == "vlm" else ROWS[name].options(tiny) if name in ROWS else {}
    with pytest.raises(ValueError, match=message) as caught:
        load_scorer(name, options=needed | dict(each.split("=", 1) for each in options.split()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "given", "missing"), MISSING)
def test_a_setting_that_must_be_given_is_named(name: str, given: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=f"options of {name} must fit it: missing a required .*argument: '{missing}'"):
        load_scorer(name, options=given)
