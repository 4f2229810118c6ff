"""Write prompts for editing models from a user's images: `omni-rl prompts edit --images FOLDER` writes data/edit/.

The images are in a folder, each with its instruction in a text file of the same name, or combined with each line of
`--instructions`. Alternatively, images and instructions are columns of a table, as in data sets of edits: a .jsonl,
.csv, .tsv or .parquet file, a folder of these, or a data set on the hub. Images are copied.
"""

import hashlib
import json
import shutil
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omni_train.files import write_atomically
from omni_train.prompts.files import load_prompts, read_rows
from omni_train.prompts.splits import TABLES, data_files
from PIL import Image, ImageOps

from omni_rl.media.images import SUFFIXES, AllOrNone, image_size, read_pixels
from omni_rl.settings.fields import require
from omni_rl.settings.printing import Parser

IMAGE_KEYS = (  # columns, in the order of the search
    *("images", "image", "file_name", "input_image", "source_image", "original_image", "source_img", "src_img"),
    "input_image_raw",
)
PROMPT_KEYS = ("prompt", "instruction", "edit_prompt", "edit", "input_prompt", "caption", "text")
OWN_KEYS = ("prompt", "messages", "images", "audio", "video", "height", "width")  # keys that columns may not set
MAX_TEST, TEST_SHARE = 64, 10  # held-out images: at most 64, one of every 10


@dataclass(frozen=True)
class Edit:
    """An instruction with its images, and the other keys of the line, for scorers."""

    prompt: str
    images: tuple[Path, ...]
    meta: dict[str, object] = field(default_factory=dict)


def add_flags(parser: Parser) -> None:
    """Add the flags of `omni-rl prompts edit`."""
    group = parser.add_argument_group("edit", "prompts with reference images, written from your images")
    add = group.add_argument
    add("--images", metavar="PLACE", help="folder of images, or a table or data set with a column of images")
    add("--test-images", metavar="PLACE", help="the same for test.jsonl; by default some of --images are held out")
    add("--instructions", type=Path, metavar="FILE.txt", help="instructions, one per line, for each image of a folder")
    add("--num-test", type=int, metavar="N", help=f"images to hold out; default: a tenth, at most {MAX_TEST}")
    add("--image-key", default="", metavar="KEY", help=f"column of the images; default: the first of {IMAGE_KEYS}")
    add("--prompt-key", default="", metavar="KEY", help=f"column of the instructions; default: one of {PROMPT_KEYS}")
    add("--height", type=int, metavar="PIXELS", help="height to crop each image to, at its center; default: its own")
    add("--width", type=int, metavar="PIXELS", help="width, likewise")


def write_edits(args: Namespace, folder: Path) -> list[Path]:
    """Write train.jsonl, test.jsonl and images/ to a folder; return both files.

    Raises:
        ValueError: a flag is invalid, a file exists already, or an image or a line cannot be used.
        OSError: a file cannot be written.
    """
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    sides = (args.height, args.width)
    require(
        (args.images, f"--images must be a folder, a table or a data set with images to edit, got {args.images!r}"),
        (sides == (None, None) or all(side and side > 0 for side in sides),
         f"--height and --width must both be pixels or neither be given, got {args.height} and {args.width}"),
        (not (args.test_images and args.num_test is not None), "--num-test must be left out beside --test-images"),
        *((not file.exists(), f"{file} must not exist yet: move it away, or give another --to") for file in files),
    )  # fmt: skip
    train = read_edits(args.images, args)
    test = read_edits(args.test_images, args) if args.test_images else []
    if not test:
        train, test = split_edits(train, args.num_test)
    size = None if args.height is None else (args.height, args.width)
    for file, edits in zip(files, (train, test), strict=True):
        lines = [edit_line(edit, folder, size) for edit in edits]
        write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
        load_prompts(file, check=AllOrNone())
    return files


def read_edits(place: str, args: Namespace) -> list[Edit]:
    """Return the edits from a folder of images, or from the rows of tables. Raises ValueError as in `write_edits`."""
    folder = Path(place)
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    images = [path for path in names if path.suffix.lower() in SUFFIXES]
    if images and not any(path.suffix in TABLES for path in names):
        return [*folder_edits(images, args.instructions)]
    require((args.instructions is None, f"--instructions must be left out for tables, as {place} has its own"))
    files = data_files(place)
    require((files[0].suffix in TABLES, f"--images must be a folder of images or a table with columns, got {place}"))
    return [edit for path in files for edit in table_edits(path, args.image_key, args.prompt_key)]


def folder_edits(images: Sequence[Path], instructions: Path | None) -> Iterator[Edit]:
    """Yield the edits of images with the lines of a common file, or with each image's own text file."""
    shared_lines = text_lines(instructions) if instructions else []
    for image in images:
        check_image(image, str(image))
        text_file = image.with_suffix(".txt")
        if not shared_lines and not text_file.is_file():
            raise ValueError(
                f"{image} must have its instruction in {text_file.name}, or --instructions must name a file"
            )
        yield from (Edit(line, (image,)) for line in shared_lines or text_lines(text_file))


def table_edits(path: Path, image_key: str, prompt_key: str) -> Iterator[Edit]:
    """Yield the edits of a table's rows. Paths are relative to its folder, or to images/ in it."""
    for place, row in read_rows(path, {image_key} if image_key else {*IMAGE_KEYS}):
        found_image = pick_key(row, image_key, IMAGE_KEYS, place, "--image-key")
        found_prompt = pick_key(row, prompt_key, PROMPT_KEYS, place, "--prompt-key")
        prompt, value = row.pop(found_prompt), row.pop(found_image)
        paths = value if isinstance(value, list) else [value]
        names = [name for name in paths if isinstance(name, str)]
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{place}: "{found_prompt}" must be a text, got {prompt!r:.80}')
        if not names or names != paths:
            raise ValueError(f'{place}: "{found_image}" must be a path, a list of paths or bytes, got {value!r:.80}')
        folders = (path.parent, path.parent / "images")
        images = tuple(
            next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)
            for name in names
        )
        for image in images:
            check_image(image, place)
        yield Edit(prompt, images, {key: column_value for key, column_value in row.items() if key not in OWN_KEYS})


def pick_key(row: dict[str, object], wanted: str, names: Collection[str], place: str, flag: str) -> str:
    """Return the wanted key of a row, or the first of `names` in the row."""
    for name in (wanted,) if wanted else names:
        if name in row:
            return name
    rule = (
        f"must have the key {wanted!r}, as {flag} says" if wanted else f"must have one of the keys {', '.join(names)}"
    )
    raise ValueError(f"{place}: {rule}, got the keys {sorted(row)}: {flag} names another one")


def check_image(path: Path, place: str) -> None:
    """Raise ValueError for a file that is not a complete image."""
    try:
        image_size(path)
    except ValueError as exc:
        raise ValueError(f"{place}: {exc}") from exc


def text_lines(path: Path) -> list[str]:
    """Return the lines of a text file, at least one."""
    return [record.text for record in load_prompts(path)]


def split_edits(edits: Sequence[Edit], num_test: int | None) -> tuple[list[Edit], list[Edit]]:
    """Return the training and test edits, which share no image. Evenly spaced images are held out.

    Raises:
        ValueError: there are too few images.
    """
    order = [*dict.fromkeys(image for edit in edits for image in edit.images)]
    num_held_out = min(MAX_TEST, max(1, len(order) // TEST_SHARE)) if num_test is None else num_test
    if not 1 <= num_held_out < len(order):
        raise ValueError(
            f"--num-test must be 1 to {len(order) - 1}, fewer than the {len(order)} images, got {num_held_out}"
        )
    held_out = {order[i * len(order) // num_held_out] for i in range(num_held_out)}
    test = [edit for edit in edits if not held_out.isdisjoint(edit.images)]
    test_images = {image for edit in test for image in edit.images}
    train = [edit for edit in edits if test_images.isdisjoint(edit.images)]
    if not train:
        raise ValueError("--images must have images that no other line shares, so that some can be held out")
    return train, test


def edit_line(edit: Edit, folder: Path, size: tuple[int, int] | None) -> str:
    """Return the line of an edit after copying its images to the folder, cropped and resized to (height, width)."""
    names = [copy_image(image, folder / "images", size).relative_to(folder).as_posix() for image in edit.images]
    return json.dumps({"prompt": edit.prompt, "images": names} | edit.meta, ensure_ascii=False)


def copy_image(image: Path, folder: Path, size: tuple[int, int] | None) -> Path:
    """Copy an image to a file named after its content and size, and return its path."""
    digest = hashlib.sha256(image.read_bytes()).hexdigest()[:16]
    ending = image.suffix.lower() if size is None else f"-{size[0]}x{size[1]}.png"
    copy = folder / f"{digest}{ending}"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = copy.with_name(f".{copy.name}.part")
        if size is None:
            shutil.copyfile(image, part)
        else:
            fitted = ImageOps.fit(Image.fromarray(read_pixels(image)), size[::-1], Image.Resampling.BICUBIC)
            fitted.save(part, format="PNG")
        part.replace(copy)
    return copy
