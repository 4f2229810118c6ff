"""Contact sheets: every picture in its place with its label; one writer for all that an evaluation leaves."""

import json
import runpy
import sys

import numpy as np
import pytest
from helpers import REPO
from omni_rl.report import Sample, write_eval
from omni_rl.report.sheet import contact_sheet, score_label
from PIL import Image
from rl.report_runs import PROMPTS, RATES, images, samples, write_run

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


def test_pictures_of_several_sizes_stand_side_by_side_at_one_scale():
    pictures = [images(1, 8, 32)[0], images(1, 16, 8, seed=1)[0]]
    sheet = np.asarray(contact_sheet(pictures, ["", ""]))
    assert sheet.shape == (MARGIN + 16 * 6 + MARGIN + LABEL, MARGIN + 2 * (32 * 6 + MARGIN), 3)
    for picture, x in zip(pictures, (MARGIN, MARGIN + 32 * 6 + MARGIN), strict=True):
        large = picture.repeat(6, axis=0).repeat(6, axis=1)
        np.testing.assert_array_equal(sheet[MARGIN : MARGIN + large.shape[0], x : x + large.shape[1]], large)


def test_large_pictures_are_reduced_to_the_side_that_is_asked_for():
    pictures = np.full((2, 100, 400, 3), [200, 40, 90], dtype=np.uint8)
    sheet = np.asarray(contact_sheet(pictures, ["", ""], max_side=80))
    assert sheet.shape == (MARGIN + 20 + MARGIN + LABEL, MARGIN + 2 * (80 + MARGIN), 3)
    assert (sheet[MARGIN : MARGIN + 20, MARGIN : MARGIN + 80] == [200, 40, 90]).all()


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
    drawn, x = np.asarray(Image.open(tmp_path / "out" / "before_after.png")), MARGIN + 3
    for seed, y in ((0, MARGIN + 3), (12, MARGIN + 3 + 64 + 2 * 3)):
        picture = images(3, seed=seed)[0].repeat(2, axis=0).repeat(2, axis=1)
        np.testing.assert_array_equal(drawn[y : y + 64, x : x + 192], picture)
    write_eval(tmp_path / "new", 0, images(1), [Sample("a cat", 0.5)])
    monkeypatch.setattr(sys, "argv", ["picture.py", str(tmp_path / "new"), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(REPO / "scripts" / "picture.py"), run_name="__main__")


def test_the_picture_of_edits_has_each_reference_beside_the_edit_before_and_the_edit_after(tmp_path, monkeypatch):
    run, reference = write_run(tmp_path / "run"), images(1, seed=99)[0]
    Image.fromarray(reference).save(tmp_path / "reference.png")
    lines = [{"prompt": prompt, "images": "reference.png"} for prompt in PROMPTS]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--references", str(tmp_path / "eval.jsonl")]
    monkeypatch.setattr(sys, "argv", ["picture.py", str(run), str(tmp_path / "out"), *flags])
    runpy.run_path(str(REPO / "scripts" / "picture.py"), run_name="__main__")
    drawn, y, apart = np.asarray(Image.open(tmp_path / "out" / "edits.png")), MARGIN + 3, 2 * 96 + 6
    for i, image in enumerate((reference, images(3, seed=0)[0], images(3, seed=12)[0])):
        x = MARGIN + 3 + i * apart
        np.testing.assert_array_equal(drawn[y : y + 64, x : x + 192], image.repeat(2, axis=0).repeat(2, axis=1))


def test_the_picture_of_videos_has_frames_before_above_those_after(tmp_path, monkeypatch):
    run, shades = tmp_path / "run", (40, 200)
    for step, shade in zip((0, 12), shades, strict=True):
        film = np.full((9, 32, 96, 3), shade, np.uint8)
        write_eval(run, step, [{"video": film}] * 2, [Sample("a sign", shade / 200, 0, i, rates=RATES) for i in (0, 1)])
    monkeypatch.setattr(sys, "argv", ["picture.py", str(run), str(tmp_path / "out"), "--videos"])
    runpy.run_path(str(REPO / "scripts" / "picture.py"), run_name="__main__")
    drawn, apart = np.asarray(Image.open(tmp_path / "out" / "videos.png")).astype(int), 32 + 2 * 3
    for i, shade in enumerate(shades):
        y = MARGIN + 3 + i * apart
        for x in (MARGIN + 3, drawn.shape[1] // 2 + MARGIN):
            assert abs(drawn[y + 4 : y + 28, x + 4 : x + 92] - shade).max() < 4


def test_a_run_of_pictures_has_no_picture_of_videos(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["picture.py", str(write_run(tmp_path / "run")), str(tmp_path / "out"), "--videos"]
    )
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(REPO / "scripts" / "picture.py"), run_name="__main__")
    assert "must hold evaluations of videos" in capsys.readouterr().err
