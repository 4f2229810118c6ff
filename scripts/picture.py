"""Draw the README's pictures of a run: the same prompts and seeds before and after, and the curve of the scores.

python scripts/picture.py runs/tiny-signs docs/images [--other runs/tiny-signs-vllm-omni]
python scripts/picture.py runs/tiny-signs-edit docs/images --references data/tiny-edit/eval.jsonl
python scripts/picture.py runs/RUN docs/images --videos

With --other also engines.svg: the curves of both runs, the other one's wide and pale under the first one's. With
--references, the prompts file of a run that edits signs, only edits.png: references, and their edits before and after.
With --videos, of a run that draws videos, only videos.png: their frames before and after.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from omni_reward.scorers.text import target_text
from omni_rl.report.folder import step_folders
from omni_rl.report.sheet import contact_sheet, score_label
from omni_train.data import load_prompts
from omni_train.files import load_metrics
from PIL import Image, ImageDraw, ImageFont

CURVES = {"reward/mean": ("reward of the training samples", "C7"), "eval/reward": ("held-out OCR score", "C1")}
matplotlib.rcParams |= {"svg.hashsalt": "omni-rl", "svg.fonttype": "none", "font.size": 9}


def before_and_after(run: Path) -> Image.Image:
    """The pictures that the first and the last evaluation have kept, one sheet above the other."""
    sheets = [sheet_of(folder) for folder in ends(run)]
    title = 28
    picture = Image.new("RGB", (sheets[0].width, sum(sheet.height + title for sheet in sheets)), "white")
    draw, font, y = ImageDraw.Draw(picture), ImageFont.load_default(size=18), 0
    for name, sheet in zip(("before", "after"), sheets, strict=True):
        draw.text((6, y + 4), name, font=font, fill="black")
        picture.paste(sheet, (0, y + title))
        y += sheet.height + title
    return picture


def edits(run: Path, prompts: Path, *, count: int = 12) -> Image.Image:
    """Triples of a reference and its edits by the first and the last evaluation; below, the word and both scores."""
    first, last = (json.loads((folder / "rows.json").read_text())[:count] for folder in ends(run))
    places = {record.text: record.images[0] for record in load_prompts(prompts)}
    triples, labels = [], []
    for before, after in zip(first, last, strict=True):
        files = (places[before["prompt"]], ends(run)[0] / before["file"], ends(run)[1] / after["file"])
        triples.append(np.concatenate([framed(np.asarray(Image.open(file).convert("RGB"))) for file in files], axis=1))
        scores = " -> ".join(score_label(row["reward"], {}) for row in (before, after))
        labels.append(f"{target_text(before['prompt'])}   {scores}")
    return contact_sheet(triples, labels, columns=2)


def videos(run: Path, *, count: int = 8) -> Image.Image:
    """Frames of videos of the first evaluation, and of the last one below them; then the prompt and both scores.

    Raises:
        ValueError: the run did not draw videos.
    """
    pairs, labels = [], []
    first, last = (json.loads((folder / "rows.json").read_text())[:count] for folder in ends(run))
    if not all("strip" in row for row in first + last):
        raise ValueError(f"{run} must hold evaluations of videos, it holds others")
    for before, after in zip(first, last, strict=True):
        files = (ends(run)[0] / before["strip"], ends(run)[1] / after["strip"])
        pairs.append(np.concatenate([framed(np.asarray(Image.open(file).convert("RGB")), scale=1) for file in files]))
        scores = " -> ".join(score_label(row["reward"], {}) for row in (before, after))
        labels.append(f"{before['prompt']}   {scores}")
    return contact_sheet(pairs, labels, columns=2)


def framed(image: np.ndarray, *, scale: int = 2, margin: int = 3) -> np.ndarray:
    """An image, uint8 [H, W, 3], enlarged and with a white margin."""
    large = image.repeat(scale, axis=0).repeat(scale, axis=1)
    return np.pad(large, ((margin, margin), (margin, margin), (0, 0)), constant_values=255)


def ends(run: Path) -> tuple[Path, Path]:
    """The folders of the first and the last evaluation.

    Raises:
        ValueError: there are not two.
    """
    stored = step_folders(run / "eval")
    if len(stored) < 2:
        raise ValueError(f"{run} must hold two evaluations or more, it holds {len(stored)}")
    return stored[0][1], stored[-1][1]


def sheet_of(evaluation: Path) -> Image.Image:
    """A contact sheet of an evaluation's pictures, with their scores."""
    rows = json.loads((evaluation / "rows.json").read_text())
    images = [np.asarray(Image.open(evaluation / row["file"]).convert("RGB")) for row in rows]
    return contact_sheet(images, [score_label(row["reward"], row["details"]) for row in rows])


def curve(run: Path, path: Path, other: Path | None = None) -> None:
    """Write an SVG of held-out score and training reward over the steps; the other run lies below, wide and pale."""
    figure = Figure(figsize=(6.4, 3), layout="constrained")
    axes = figure.add_subplot(ylim=(0, 1), xlabel="training steps")
    if other:
        for name, (_, color) in CURVES.items():
            axes.plot(*points(other, name), color, linewidth=6, alpha=0.25)
    for name, (label, color) in CURVES.items():
        axes.plot(*points(run, name), color, linewidth=1, label=label)
    for step, score in zip(*points(run, "eval/reward"), strict=True):
        axes.annotate(f"{score:.2f}", (step, score), (0, 6), textcoords="offset points", ha="center")
    axes.legend(loc="upper left", frameon=False, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def points(run: Path, name: str) -> tuple[list[float], list[float]]:
    """The steps of a run at which a metric was logged, and its values."""
    lines = [line for line in load_metrics(run / "metrics.jsonl") if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--other", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--references", type=Path)
    kind.add_argument("--videos", action="store_true")
    args = parser.parse_args()
    try:
        if args.references:
            name, picture = "edits", edits(args.run, args.references)
        elif args.videos:
            name, picture = "videos", videos(args.run)
        else:
            name, picture = "before_after", before_and_after(args.run)
    except ValueError as exc:
        parser.error(str(exc))
    args.out.mkdir(parents=True, exist_ok=True)
    picture.save(args.out / f"{name}.png", optimize=True)
    if name != "before_after":
        return
    curve(args.run, args.out / "curve.svg")
    if args.other:
        curve(args.run, args.out / "engines.svg", args.other)


if __name__ == "__main__":
    main()
