"""Make the README's figures of a run: images for the same prompts and seeds before and after, and score curves.

python scripts/picture.py runs/demo docs/images --seeds runs/seed1 runs/seed2
python scripts/picture.py runs/tiny-signs docs/images --other runs/tiny-signs-vllm-omni
python scripts/picture.py runs/tiny-signs-edit docs/images --references data/tiny-edit/eval.jsonl
python scripts/picture.py runs/RUN docs/images --videos

With --seeds, the curve has a band from the lowest to the highest held-out score of all these runs. With --other, it
also writes engines.svg: the curves of both runs, with the other run's wide and pale behind the first's. With
--references, the prompt file of a run that edits signs, it only writes edits.png: references, and their edits before
and after. With --videos, for a run with videos, it only writes videos.png: their frames before and after.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from leaderboard_page import INK
from matplotlib.figure import Figure
from omni_reward.scorers.text import target_text
from omni_rl.media.write import replace_missing_glyphs, score_label
from omni_rl.report.folder import step_folders
from omni_train.files import load_metrics
from omni_train.prompts.files import load_prompts
from PIL import Image, ImageDraw, ImageFont

CURVES = {  # metric -> label, color
    "reward/mean": ("reward of the training samples", "C7"),
    "eval/reward": ("held-out score", "C2"),
    "eval/ocr": ("held-out words", "C1"),
    "eval/color": ("held-out colors", "C0"),
}
GAP, LINE = 6, 20  # pixels between images, and of a line of text


def before_and_after(run: Path, *, count: int = 12, columns: int = 3, videos: bool = False) -> Image.Image:
    """Return images of the first and, below them, of the last evaluation, with the text read or the score of both.

    videos: True for frames of videos.

    Raises:
        ValueError: there are fewer than two evaluations, or none with videos.
    """
    first, last = (json.loads((folder / "rows.json").read_text())[:count] for folder in ends(run))
    kind, scale = ("strip", 1) if videos else ("file", 2)
    if not all(kind in row for row in first + last):
        raise ValueError(f"{run} must hold evaluations of {'videos' if videos else 'pictures'}, it holds others")
    pairs, labels = [], []
    for rows in zip(first, last, strict=True):
        files = [folder / row[kind] for folder, row in zip(ends(run), rows, strict=True)]
        pairs.append([[enlarged(file, scale)] for file in files])
        before, after = (row["details"].get("read", score_label(row["reward"], {})) or "nothing" for row in rows)
        labels.append(f"{rows[0]['details'].get('target', rows[0]['prompt'])}: {before}, then {after}")
    return clear_sheet(pairs, labels, columns=columns, rows=("before", "after"))


def edits(run: Path, prompts: Path, *, count: int = 12) -> Image.Image:
    """Return references with their edits in the first and last evaluation; below them, the word and both scores."""
    first, last = (json.loads((folder / "rows.json").read_text())[:count] for folder in ends(run))
    places = {record.text: record.images[0] for record in load_prompts(prompts)}
    triples, labels = [], []
    for before, after in zip(first, last, strict=True):
        files = (places[before["prompt"]], ends(run)[0] / before["file"], ends(run)[1] / after["file"])
        triples.append([[enlarged(file) for file in files]])
        scores = ", then ".join(score_label(row["reward"], {}) for row in (before, after))
        labels.append(f"{target_text(before['prompt'])}: {scores}")
    return clear_sheet(triples, labels, columns=2, tops=("given", "before", "after"))


def enlarged(file: Path, scale: int = 2) -> Image.Image:
    """Return an enlarged image in which each pixel is a square."""
    image = Image.open(file).convert("RGB")
    return image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST)


def clear_sheet(
    cells: Sequence[Sequence[Sequence[Image.Image]]],
    labels: Sequence[str],
    *,
    columns: int,
    rows: Sequence[str] = (),
    tops: Sequence[str] = (),
) -> Image.Image:
    """Return one image with a transparent background, with all cells in rows of `columns`, each with its label below.

    cells: rows of images of one size. rows: words next to the rows of a cell. tops: words above its columns.
    """
    image, font = cells[0][0][0], ImageFont.load_default(size=13)
    step_x, step_y = image.width + GAP, image.height + GAP
    left, top = (LINE * 3 if rows else 0), (LINE if tops else 0)
    width, height = len(cells[0][0]) * step_x + GAP, len(cells[0]) * step_y + LINE + GAP
    sheet = Image.new("RGBA", (left + columns * width - 2 * GAP, top + -(-len(cells) // columns) * height), INK + "00")
    draw = ImageDraw.Draw(sheet)
    for at, (cell, label) in enumerate(zip(cells, labels, strict=True)):
        x, y = left + at % columns * width, top + at // columns * height
        for i, row in enumerate(cell):
            if rows and at % columns == 0:
                draw.text((left - GAP, y + i * step_y + image.height / 2), rows[i], INK, font, anchor="rm")
            for j, each in enumerate(row):
                sheet.paste(each, (x + j * step_x, y + i * step_y))
                if tops and at < columns:
                    draw.text((x + j * step_x + image.width / 2, LINE / 2), tops[j], INK, font, anchor="mm")
        draw.text((x, y + len(cell) * step_y - GAP / 2), replace_missing_glyphs(label), INK, font)
    return sheet


def ends(run: Path) -> tuple[Path, Path]:
    """Return the folders of the first and the last evaluation.

    Raises:
        ValueError: there are fewer than two.
    """
    stored = step_folders(run / "eval")
    if len(stored) < 2:
        raise ValueError(f"{run} must hold two evaluations or more, it holds {len(stored)}")
    return stored[0][1], stored[-1][1]


def curve(run: Path, path: Path, *, seeds: Sequence[Path] = (), other: Path | None = None) -> None:
    """Write an SVG of held-out scores and training reward over the steps.

    seeds: further runs; a band spans the held-out scores of all of them. other: a run whose curve is wide and pale
    behind the first one's.
    """
    figure = Figure(figsize=(6.4, 3), layout="constrained")
    axes = figure.add_subplot(ylim=(0, 1.05), xlabel="training steps")
    shown = [name for name in CURVES if points(run, name)[0]]
    if "eval/ocr" in shown:
        shown.remove("eval/reward")  # it is the mean of both parts
    for name in shown:
        label, color = CURVES[name]
        if other:
            axes.plot(*points(other, name), color, linewidth=6, alpha=0.25)
        steps, values = points(run, name)
        axes.plot(steps, values, color, linewidth=1, label=label)
        if seeds and name.startswith("eval/"):
            for seed in seeds:
                if (found := points(seed, name)[0]) != steps:
                    raise ValueError(
                        f"--seeds must be runs evaluated alike: {name} is {told(steps, run)}, {told(found, seed)}"
                    )
            table = [values, *(points(seed, name)[1] for seed in seeds)]
            axes.fill_between(steps, np.min(table, axis=0), np.max(table, axis=0), color=color, alpha=0.3, linewidth=0)
        if name in ("eval/ocr", "eval/reward"):
            for step, score in zip(steps, values, strict=True):
                axes.annotate(f"{score:.2f}", (step, score), (0, -12), textcoords="offset points", ha="center")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def told(steps: Sequence[float], run: Path) -> str:
    """Return the steps of a run that have a score, for a message."""
    return f"at steps {', '.join(f'{step:g}' for step in steps) or 'none'} in {run}"


def points(run: Path, name: str) -> tuple[list[float], list[float]]:
    """Return the steps of a run at which a metric was logged, and its values."""
    lines = [line for line in load_metrics(run / "metrics.jsonl") if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=Path, nargs="+", default=())
    parser.add_argument("--other", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--references", type=Path)
    kind.add_argument("--videos", action="store_true")
    args = parser.parse_args()
    try:
        draw(args)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


def draw(args: argparse.Namespace) -> None:
    """Write the figures selected on the command line."""
    if args.references:
        name, picture = "edits", edits(args.run, args.references)
    elif args.videos:
        name, picture = "videos", before_and_after(args.run, count=8, columns=2, videos=True)
    else:
        name, picture = "before_after", before_and_after(args.run)
    args.out.mkdir(parents=True, exist_ok=True)
    picture.save(args.out / f"{name}.png", optimize=True)
    if name != "before_after":
        return
    curve(args.run, args.out / "curve.svg", seeds=args.seeds)
    if args.other:
        curve(args.run, args.out / "engines.svg", other=args.other)


if __name__ == "__main__":
    main()
