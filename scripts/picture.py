"""Draws what the README shows of a run: the same prompts and seeds before and after, and the curve of the scores.

python scripts/picture.py runs/tiny-signs docs/images [--other runs/tiny-signs-vllm-omni]

With --other also engines.svg: the curves of both runs, the other one's wide and pale under the first one's.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from omni_rl.report.folder import step_folders
from omni_rl.report.sheet import contact_sheet, score_label
from omni_train.log import load_metrics
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, MARGIN = 640, 300, 44


def before_and_after(run: Path) -> Image.Image:
    """The pictures that the first and the last evaluation have kept, one sheet above the other."""
    stored = step_folders(run / "eval")
    if len(stored) < 2:
        raise ValueError(f"{run} must hold two evaluations or more, it holds {len(stored)}")
    sheets = [sheet_of(folder) for _, folder in (stored[0], stored[-1])]
    title = 28
    picture = Image.new("RGB", (sheets[0].width, sum(sheet.height + title for sheet in sheets)), "white")
    draw, font, y = ImageDraw.Draw(picture), ImageFont.load_default(size=18), 0
    for name, sheet in zip(("before", "after"), sheets, strict=True):
        draw.text((6, y + 4), name, font=font, fill="black")
        picture.paste(sheet, (0, y + title))
        y += sheet.height + title
    return picture


def sheet_of(evaluation: Path) -> Image.Image:
    """A contact sheet of an evaluation's pictures, with their scores."""
    rows = json.loads((evaluation / "rows.json").read_text())
    images = [np.asarray(Image.open(evaluation / row["file"]).convert("RGB")) for row in rows]
    return contact_sheet(np.stack(images), [score_label(row["reward"], row["details"]) for row in rows])


def curve(run: Path, other: Path | None = None) -> str:
    """An SVG of the held-out score and of the training reward over the steps; `other` lies under it, wide and pale."""
    steps = load_metrics(run / "metrics.jsonl")
    below = load_metrics(other / "metrics.jsonl") if other else []
    last = max(step["step"] for step in steps)

    def place(step: float, score: float) -> str:
        x = MARGIN + step / last * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - MARGIN - score * (HEIGHT - 2 * MARGIN):.1f}"

    def line(name: str, color: str, width: float, steps: list[dict[str, float]] = steps) -> str:
        points = [place(s["step"], s[name]) for s in steps if name in s]
        return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    held_out = [(s["step"], s["eval/reward"]) for s in steps if "eval/reward" in s]
    grid = "".join(
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 6}" y="{y + 4}" text-anchor="end">{score:.1f}</text>'
        for score in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        for y in [HEIGHT - MARGIN - score * (HEIGHT - 2 * MARGIN)]
    )
    dots = "".join(
        f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="4" fill="#c2410c"/>'
        f'<text x="{p.split(",")[0]}" y="{float(p.split(",")[1]) - 10:.1f}" text-anchor="middle">{score:.2f}</text>'
        for step, score in held_out
        for p in [place(step, score)]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{grid}'
        f"{line('reward/mean', '#cbd5e1', 5, below)}{line('eval/reward', '#fdba74', 8, below)}"
        f"{line('reward/mean', '#64748b', 1)}{line('eval/reward', '#c2410c', 2)}{dots}"
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">training steps (0 to {last:.0f})</text>'
        f'<text x="{MARGIN}" y="24"><tspan fill="#c2410c">held-out OCR score</tspan>'
        f'<tspan fill="#64748b" dx="16">reward of the training samples</tspan></text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--other", type=Path)
    args = parser.parse_args()
    try:
        picture = before_and_after(args.run)
    except ValueError as exc:
        parser.error(str(exc))
    args.out.mkdir(parents=True, exist_ok=True)
    picture.save(args.out / "before_after.png", optimize=True)
    (args.out / "curve.svg").write_text(curve(args.run))
    if args.other:
        (args.out / "engines.svg").write_text(curve(args.run, args.other))


if __name__ == "__main__":
    main()
