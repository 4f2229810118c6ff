"""`omni-rl prompts edit` writes prompts with references from a folder of images, or from tables of data sets."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omni_rl.media.images import AllOrNone, image_size, read_image
from omni_rl.tools import prompts
from omni_train.prompts.files import PromptRecord, load_prompts
from PIL import Image
from train.test_train_own_data import parquet as parquet


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def draw(path: Path, shade: int, size: tuple[int, int] = (64, 48)) -> Path:
    """Write an image of one shade; size: width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 0, 0)).save(path)
    return path


def shade_of(record: PromptRecord) -> list[int]:
    return [int(read_image(path)[0, 0, 0]) for path in record.images]


def written(folder: str = "data/edit") -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Training and test prompts, as a run reads them."""
    train, test = (load_prompts(Path(folder, f"{name}.jsonl"), check=AllOrNone()) for name in ("train", "test"))
    assert {path for r in train for path in r.images}.isdisjoint(path for r in test for path in r.images)
    return train, test


def write(words: str) -> None:
    prompts.main(["edit", *words.split()])


def refusal(capsys: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit, match=r"^2$"):
        write(words)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_folder_of_images_with_a_text_beside_each(capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(12):
        draw(Path(f"mine/{i:02}.png"), 10 * i)
        Path(f"mine/{i:02}.txt").write_text(f"make it {i}\n")
    write("--images mine")
    train, test = written()
    assert (len(train), len(test)) == (11, 1)
    for record in train + test:
        [shade] = shade_of(record)
        assert record.text == f"make it {shade // 10}"
    assert "data/edit/train.jsonl  11 prompts with images of mine\n" in capsys.readouterr().out


def test_a_folder_of_images_with_lines_for_each_of_them() -> None:
    for i in range(4):
        draw(Path(f"mine/{i}.jpg"), 60 * i)
    Path("what.txt").write_text("make it night\nadd snow\n")
    write("--images mine --instructions what.txt --num-test 1 --to data/own")
    train, test = written("data/own")
    assert [r.text for r in test] == ["make it night", "add snow"]
    assert (len(train), len({r.images for r in train}), len({r.images for r in test})) == (6, 3, 1)


def test_a_folder_of_images_with_metadata_as_the_datasets_library_has_it() -> None:
    rows = [{"file_name": f"pictures/{i}.png", "instruction": f"make it {i}", "tag": "counting"} for i in range(3)]
    for i in range(3):
        draw(Path(f"mine/pictures/{i}.png"), i)
    Path("mine/metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write("--images mine")
    train, test = written()
    assert sorted(r.text for r in train + test) == ["make it 0", "make it 1", "make it 2"]
    for record in train + test:
        assert record.text == f"make it {shade_of(record)[0]}"
        assert record.meta["tag"] == "counting", "scorers get the other columns"


def test_two_tables_whose_paths_are_below_images_and_which_have_several_references() -> None:
    for name, shades in (("train", (1, 2)), ("test", (3, 4))):
        for shade in shades:
            draw(Path(f"theirs/images/{name}/{shade}.png"), shade)
        line = {"prompt": f"join {name}", "image": [f"{name}/{shade}.png" for shade in shades], "height": 7, "width": 7}
        Path(f"theirs/{name}.jsonl").write_text(json.dumps(line) + "\n")
    write("--images theirs/train.jsonl --test-images theirs/test.jsonl")
    [train], [test] = written()
    assert (train.text, shade_of(train)) == ("join train", [1, 2])
    assert (test.text, shade_of(test)) == ("join test", [3, 4])
    assert train.size is None, "columns of a size are the image's, not the sample's"


def test_a_parquet_file_with_images_as_bytes_before_and_after_the_edit(
    parquet: Callable[[Path, list[dict[str, object]]], None],
) -> None:
    rows: list[dict[str, object]] = []
    for i in range(3):
        before, after = (draw(Path(f"{name}{i}.png"), shade).read_bytes() for name, shade in (("a", i), ("b", 200 + i)))
        image = {"bytes": before, "path": None}
        rows.append({"source_img": image, "instruction": f"make it {i}", "target_img": {"bytes": after, "path": None}})
    Path("set").mkdir()
    parquet(Path("set/train-00000-of-00001.parquet"), rows)
    write("--images set")
    train, test = written()
    assert sorted((r.text, shade_of(r)[0]) for r in train + test) == [(f"make it {i}", i) for i in range(3)]
    assert all("target_img" not in r.meta for r in train + test)
    assert len([*Path("cache").rglob("*.png")]) == 3, "images after the edit are not kept"


def test_keys_of_other_names_are_named() -> None:
    for i in range(2):
        draw(Path(f"{i}.png"), i)
    Path("x.csv").write_text("before,wish,prompt\n0.png,make it 0,no\n1.png,make it 1,no\n")
    write("--images x.csv --image-key before --prompt-key wish --num-test 1")
    train, test = written()
    assert sorted((r.text, shade_of(r)[0]) for r in train + test) == [("make it 0", 0), ("make it 1", 1)]


def test_images_are_cropped_in_the_middle_to_one_size() -> None:
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 40:80] = 255
    Path("mine").mkdir()
    Image.fromarray(pixels).save("mine/wide.png")
    draw(Path("mine/tall.png"), 9, (40, 90))
    Path("what.txt").write_text("make it night\n")
    write("--images mine --instructions what.txt --height 32 --width 32")
    sizes = {image_size(path) for each in written() for record in each for path in record.images}
    assert sizes == {(32, 32)}
    [wide] = [p for p in Path("data/edit/images").iterdir() if read_image(p)[16, 16, 1] == 255]
    assert (read_image(wide)[:, 2:-2] == 255).all(), "the middle third of the width"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"--images must be a folder, a table or a data set with images to edit, got None"),
        ("--images none", r"path must end in .*, got none"),
        ("--images mine", r"mine/0\.png must have its instruction in 0\.txt, or --instructions must name a file"),
        ("--images mine --instructions what.txt --num-test 2", r"--num-test must be 1 to 1, fewer than the .*, got 2"),
        ("--images mine --instructions what.txt --height 8", r"--height and --width must both .*, got 8 and None"),
        ("--images mine --instructions empty.txt", r"must hold at least one prompt, empty\.txt is empty"),
        ("--images what.txt", r"--images must be a folder of images or a table with columns, got what\.txt"),
        ("--images a.jsonl", r"a\.jsonl, line 1: must have one of the keys images, .*, got the keys \['x'\]: --im"),
        ("--images a.jsonl --image-key y", r"line 1: must have the key 'y', as --image-key says, got the keys \['x'\]"),
        ("--images b.jsonl", r"b\.jsonl, line 2: must name a file that exists .*gone\.png"),
        ("--images c.jsonl", r"c\.jsonl, line 1: not valid JSON"),
        ("--images d.jsonl", r'd\.jsonl, line 1: "prompt" must be a text, got 3'),
        ("--images b.jsonl --instructions what.txt", r"--instructions must be left out for tables, as b\.jsonl has"),
        ("--images b.jsonl --test-images b.jsonl --num-test 1", r"--num-test must be left out beside --test-images"),
        ("--images broken --instructions what.txt", r"broken/0\.png: .*no PNG image"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(2):
        draw(Path(f"mine/{i}.png"), i)
    Path("broken").mkdir()
    Path("broken/0.png").write_bytes(b"no image")
    Path("what.txt").write_text("make it night\n")
    Path("empty.txt").write_text("\n")
    Path("a.jsonl").write_text('{"x": 1}\n')
    Path("b.jsonl").write_text('{"prompt": "p", "image": "mine/0.png"}\n{"prompt": "p", "image": "gone.png"}\n')
    Path("c.jsonl").write_text("{\n")
    Path("d.jsonl").write_text('{"prompt": 3, "image": "mine/0.png"}\n')
    err = refusal(capsys, words)
    assert re.search(message, err), err
    assert not Path("data").exists()


def test_files_that_are_there_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        draw(Path(f"mine/{i}.png"), i)
    Path("what.txt").write_text("make it night\n")
    Path("data/edit").mkdir(parents=True)
    Path("data/edit/test.jsonl").write_text("mine")
    err = refusal(capsys, "--images mine --instructions what.txt")
    assert "data/edit/test.jsonl must not exist yet: move it away, or give another --to" in err
    assert [*Path("data/edit").iterdir()] == [Path("data/edit/test.jsonl")]
