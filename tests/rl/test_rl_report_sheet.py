"""Contact sheets: every picture in its place with its label; one writer for all that an evaluation leaves."""

import json
import runpy
import sys

import numpy as np
import pytest
from helpers import REPO
from omni_rl.media.write import contact_sheet, score_label
from omni_rl.report import Sample, write_eval
from picture import GAP, LINE
from PIL import Image
from rl.report_runs import images, samples, write_run

MARGIN, LABEL = 4, 16


@pytest.mark.parametrize(("width", "factor"), [(96, 2), (300, 1), (10, 19)])
def test_every_picture_stands_in_its_place_whole(width, factor):
    pictures = images(5, 8, width)
    sheet = np.asarray(contact_sheet(pictures, [""] * 5, columns=3))
    down, right = 8 * factor + MARGIN + LABEL, width * factor + MARGIN
    assert sheet.shape == (2 * down + MARGIN, 3 * right + MARGIN, 3)
    for i, picture in enumerate(pictures):
        y, x = MARGIN + i // 3 * down, MARGIN + i % 3 * right
        cell = sheet[y : y + 8 * factor, x : x + width * factor]
        np.testing.assert_array_equal(cell, picture.repeat(factor, axis=0).repeat(factor, axis=1))


def test_a_label_is_drawn_and_a_glyph_that_the_font_lacks_is_no_box():
    def drawn(label):
        return contact_sheet(images(1, 8), [label]).tobytes()

    assert drawn("") != drawn("SIGN")
    assert drawn("\uff33IGN") == drawn("SIGN")  # a full-width letter
    assert drawn("\u4e00") == drawn("\u0416") == drawn("?")


def test_a_label_tells_what_was_wanted_what_was_read_and_the_score():
    assert score_label(0.756, {"target": "CAT", "read": "COT"}) == "CAT -> COT   0.76"
    assert score_label(0.5, {"target": "CAT"}) == "CAT ->    0.50"
    assert score_label(0.5, {"read": "COT"}) == "0.50"
    assert [score_label(score, {}) for score in (3.1e-7, 0.012, 100.01, 0.0)] == ["3.1e-07", "0.012", "100.01", "0.00"]
    assert score_label(None, {"target": "CAT", "read": "COT"}) == "no score"


def test_an_evaluation_leaves_a_sheet_of_more_pictures_than_it_keeps_one_by_one(tmp_path):
    pictures, rows = images(70, 8, 8, seed=1), samples([0.5] * 69 + [None])
    write_eval(tmp_path, 80, pictures, rows)
    assert len(json.loads((tmp_path / "eval" / "000080" / "rows.json").read_text())) == 16
    sheet = np.asarray(Image.open(tmp_path / "eval" / "000080.png"))
    whole = contact_sheet(pictures[:64], ["SIGN -> SIGN   0.50"] * 64)
    np.testing.assert_array_equal(sheet, np.asarray(whole))


def test_the_pictures_of_the_readme_are_those_that_the_evaluations_kept(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["picture.py", str(run), str(tmp_path / "out")])
    runpy.run_path(str(REPO / "scripts" / "picture.py"), run_name="__main__")
    drawn, x = np.asarray(Image.open(tmp_path / "out" / "before_after.png").convert("RGB")), 3 * LINE
    for seed, y in ((0, 0), (12, 64 + GAP)):
        picture = images(3, seed=seed)[0].repeat(2, axis=0).repeat(2, axis=1)
        np.testing.assert_array_equal(drawn[y : y + 64, x : x + 192], picture)
    write_eval(tmp_path / "new", 0, images(1), [Sample("a cat", 0.5)])
    monkeypatch.setattr(sys, "argv", ["picture.py", str(tmp_path / "new"), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(REPO / "scripts" / "picture.py"), run_name="__main__")


def test_pictures_of_several_sizes_stand_side_by_side_at_one_scale():
    pictures = [images(1, 8, 32)[0], images(1, 16, 8, seed=1)[0]]
    sheet = np.asarray(contact_sheet(pictures, ["", ""]))
    assert sheet.shape == (MARGIN + 16 * 6 + MARGIN + LABEL, MARGIN + 2 * (32 * 6 + MARGIN), 3)
    for picture, x in zip(pictures, (MARGIN, MARGIN + 32 * 6 + MARGIN), strict=True):
        large = picture.repeat(6, axis=0).repeat(6, axis=1)
        np.testing.assert_array_equal(sheet[MARGIN : MARGIN + large.shape[0], x : x + large.shape[1]], large)
