"""References and pairs: whole picture files of one size, or an error before anything is loaded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omni_rl.media.images import AllOrNone, image_size, read_image, reference_sizes
from omni_train.prompts.files import load_prompts
from PIL import Image

EXIF_ORIENTATION = 0x0112


@pytest.fixture
def picture(tmp_path):
    """Writes a picture of that name and size, whose pixels differ from each other, and returns its path."""

    def write(name, width=24, height=16, **options):
        pixels = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
        Image.fromarray(pixels).save(tmp_path / name, **options)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.JPEG", "a.webp"])
def test_the_size_is_that_of_the_pixels(picture, name):
    path = picture(name)
    assert image_size(path) == (24, 16)
    assert read_image(path).shape == (16, 24, 3)
    assert read_image(path).dtype == torch.uint8


def test_pixels_are_those_that_were_saved_and_a_picture_is_read_once(picture):
    path = picture("a.png")
    assert np.array_equal(read_image(path), np.array(Image.open(path)))
    assert read_image(path) is read_image(path)


def test_a_name_means_another_picture_in_another_folder(tmp_path, monkeypatch):
    for folder, size in (("one", (8, 8)), ("other", (16, 8))):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Image.new("RGB", size).save("a.png")
        assert read_image(Path("a.png")).shape == (size[1], size[0], 3)


def test_transparent_and_grey_pictures_have_three_channels(tmp_path):
    Image.new("LA", (8, 4)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").shape == (4, 8, 3)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_photograph_is_turned_upright(picture, orientation):
    """As its camera says in EXIF."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    path = picture("a.png", exif=exif)
    turns = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]
    assert np.array_equal(read_image(path), np.rot90(np.array(Image.open(path)), turns))
    assert image_size(path) == (read_image(path).shape[1], read_image(path).shape[0])


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_a_file_that_is_cut_short_or_something_else_is_named(picture, tmp_path, name):
    path = picture(name, 64, 64)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{name} is (cut short|no \w+ image)"):
        image_size(path)
    path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=rf"{name} is no \w+ image"):
        image_size(path)


def test_a_pointer_of_git_lfs_in_place_of_a_picture_is_told_as_one(tmp_path):
    (path := tmp_path / "a.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(
        ValueError, match=r"a\.png must be the file itself, got its pointer of Git LFS: `git lfs pull` f"
    ):
        image_size(path)


def test_a_huge_picture_is_refused_before_its_pixels_are_read(picture, monkeypatch):
    path = picture("a.png")
    monkeypatch.setattr("omni_rl.media.images.MAX_PIXELS", 383)
    monkeypatch.setattr("PIL.Image.Image.load", None)
    for read in (image_size, read_image):
        with pytest.raises(ValueError, match=r"a\.png must have at most 383 pixels, got 24 x 16"):
            read(path)


@pytest.mark.parametrize("name", ["gone.png", "a.gif", "folder.png"])
def test_a_file_that_is_not_there_or_of_another_kind_is_named(tmp_path, name):
    Image.new("RGB", (8, 4)).save(tmp_path / "a.gif")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=rf"must name a file that exists and ends in one of .*, got .*{name}"):
        image_size(tmp_path / name)


def test_prompts_of_a_file_have_references_of_any_number_and_size_or_none_has_any(picture, tmp_path):
    picture("a.png"), picture("small.png", 8, 8)
    prompts = tmp_path / "prompts.jsonl"
    fine = '{"prompt": "x", "images": "a.png"}\n{"prompt": "y", "images": ["small.png", "a.png"]}\n'
    prompts.write_text(fine)
    assert [reference_sizes(r) for r in load_prompts(prompts, check=AllOrNone())] == [[(16, 24)], [(8, 8), (16, 24)]]
    prompts.write_text(f'{fine}{{"prompt": "z"}}\n')
    rule = 'line 3: "images" must be in all lines of a file or in none, the first has 1, got 0'
    with pytest.raises(ValueError, match=rule):
        load_prompts(prompts, check=AllOrNone())


@pytest.mark.parametrize("key", ["audio", "video"])
def test_a_medium_that_no_model_of_pictures_reads_is_refused(tmp_path, key):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "x", "{key}": "a.bin"}}')
    with pytest.raises(ValueError, match=f'line 1: "{key}" must be left out: only models that answer in text take it'):
        load_prompts(tmp_path / "a.jsonl", check=AllOrNone())


def test_a_chat_of_several_messages_is_no_prompt_of_a_picture(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert load_prompts(prompts, check=AllOrNone())[0].text == "x"
    prompts.write_text('{"messages": [{"role": "system", "content": "y"}, {"role": "user", "content": "x"}]}')
    with pytest.raises(ValueError, match=r"line 1: messages must hold one message of the user; .*, got system, user"):
        load_prompts(prompts, check=AllOrNone())
