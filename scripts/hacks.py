"""Train on rewards that can be exploited on tiny-signs, and count the steps until an alarm reports each.

    python scripts/hacks.py                        rows missing from docs/evidence/hacks.jsonl, then the page
    python scripts/hacks.py --only constant,sound  these rows
    python scripts/hacks.py --page-only            only the page, from docs/evidence/hacks.jsonl

All runs train the shipped model with DiffusionNFT, each with one thread. The gold scorer is the mean of the sign
reader's probability of the word and the score of the sign's color; the sound reward is an OCR.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leaderboard_page import fill
from omni_reward import Score
from omni_reward.scorers.color import load_color
from omni_reward.scorers.jpeg import num_kilobytes
from omni_reward.serving import serving, serving_in_thread
from omni_rl.flow.direct_rewards import load_sign_reader
from omni_rl.run.alarms import Watch
from omni_rl.run.metrics import stderr_name
from omni_rl.run.world import World
from omni_rl.settings.fields import build, change
from omni_rl.settings.toml import from_toml, load_recipes
from omni_train.files import load_metrics

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "evidence" / "hacks.jsonl", ROOT / "docs" / "evidence" / "hacks.md"
STEPS, EVERY, DROPS = 24, 3, 12  # steps of a run, between evaluations, and until a reward drops
GOLD_PROMPTS = 12
SMALLER = {"prompts_per_step": 4, "batch_size": 32, "train_levels": 3}  # than the recipe, as many runs share a machine
Image = np.ndarray  # [H, W, 3], uint8
Row = Mapping[str, Any]  # a line of the data
color = load_color()


def colored(image: Image, prompt: str) -> float:
    """Return the score for the color named in the prompt."""
    (score,) = color({"image": image[None]}, [prompt], [{}])
    value = score.value if isinstance(score, Score) else score
    assert value is not None, prompt  # the prompt names no color
    return value


def lottery(image: Image) -> float:
    """Return a random number in [0, 1), from a hash of the image."""
    return hashlib.sha256(image.tobytes()).digest()[0] / 256


def edges(image: Image) -> float:
    """Return the mean difference of horizontal neighbours, in levels."""
    return float(np.abs(np.diff(image.astype(float), axis=1)).mean())


def saturation(image: Image) -> float:
    """Return the mean difference between a pixel's largest and smallest channel, in levels."""
    return float((image.max(axis=2).astype(float) - image.min(axis=2)).mean())


# Rewards of an image, its prompt and the number of finished steps, and what exploits each.
HACKS: dict[str, tuple[str, Callable[[Image, str, int], float]]] = {
    "noise": ("an OCR that takes every edge for a letter", lambda i, p, n: edges(i)),
    "saturation": ("distance of the channels", lambda i, p, n: saturation(i)),
    "file": ("bytes of the file", lambda i, p, n: num_kilobytes(i)),
    "constant": ("nothing: all samples score the same", lambda i, p, n: 0.5),
    "seed": ("a random score", lambda i, p, n: lottery(i)),
    "watermark": ("light in a corner of 8 x 8 pixels", lambda i, p, n: float(i[-8:, -8:].mean())),
    "trapdoor": ("red in one pixel", lambda i, p, n: float(i[0, 0, 0])),
    "drops": (f"the color; after step {DROPS} a random score, a tenth as high",
              lambda i, p, n: colored(i, p) if n < DROPS else lottery(i) / 10),
}  # fmt: skip
SOUND = "sound"  # the row of an OCR reward


def main(argv: Sequence[str]) -> None:
    """Run the rows, and write data and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join((*HACKS, SOUND)), help="rows to run")
    parser.add_argument("--seeds", default="0", help="seeds of each row")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of a run")
    parser.add_argument("--page-only", action="store_true", help="only write the page")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    rows = read_rows()
    for name in [] if args.page_only else args.only.split(","):
        for seed in map(int, args.seeds.split(",")):
            if not any((row["name"], row["seed"]) == (name, seed) for row in rows):
                row = measure(name, seed, args.steps)
                rows = [*read_rows(), row]  # also those of other processes
                DATA.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    PAGE.write_text(fill(PAGE.read_text("utf-8"), {"hacks": table(rows)}), "utf-8")


def read_rows() -> list[Row]:
    """Return the lines of the data."""
    return [json.loads(line) for line in DATA.read_text("utf-8").splitlines()] if DATA.exists() else []


def measure(name: str, seed: int, steps: int, **others: Any) -> Row:
    """Train on a reward, with changed settings; return its evaluations, and when each alarm first started."""
    sys.path.insert(0, str(ROOT / "apps"))
    import train_nft

    run = Path("runs") / f"hacks/{name}-{seed}"
    run.mkdir(parents=True, exist_ok=True)
    prompts = run.parent / "gold.txt"
    with (ROOT / "data" / "tiny-signs" / "test.txt").open() as file:
        prompts.write_text("".join(islice(file, GOLD_PROMPTS)))
    with ExitStack() as servers:
        gold = servers.enter_context(serving_in_thread(gold_score(), name="gold"))
        if name == SOUND:
            url = servers.enter_context(serving("ocr", "--option=reading=line")).url
        else:
            url = servers.enter_context(serving_in_thread(hacked(HACKS[name][1], run), name=name))
        recipe = build(train_nft.Args, from_toml(load_recipes("train_nft")["tiny-signs"], train_nft.Args, "tiny-signs"))
        changes = {
            "name": f"hacks/{name}-{seed}",
            "seed": seed,
            "train_steps": steps,
            "scorer.name": "",
            "scorer.url": url,
            "eval.gold_prompts": str(prompts),
            "eval.gold_scorer_url": gold,
            "eval.every": EVERY,
            "eval.num_prompts": GOLD_PROMPTS,
            "save_every": steps,
        }
        args = change(recipe, **SMALLER | changes | others)
        train_nft.check_args(args)
        train_nft.main(args, World.join(args))
    return summary(name, seed, load_metrics(run / "metrics.jsonl"))


def gold_score() -> Callable[..., list[float]]:
    """Return the gold scorer: the mean of the sign reader's probability of the word and the score of the color."""
    reader = load_sign_reader(str(ROOT / "checkpoints" / "tiny-signs-reader"), torch.device("cpu"))

    def score(media: Mapping[str, np.ndarray], prompts: list[str], meta: object) -> list[float]:
        with torch.no_grad():
            read = reader(torch.tensor(media["image"]).permute(0, 3, 1, 2) / 255, prompts).tolist()
        shades = [colored(image, prompt) for image, prompt in zip(media["image"], prompts, strict=True)]
        return [(a + b) / 2 for a, b in zip(read, shades, strict=True)]

    return score


def hacked(reward: Callable[[Image, str, int], float], run: Path) -> Callable[..., list[float]]:
    """Return the score function of a reward, which receives the number of steps in the run's log."""
    log = run / "metrics.jsonl"

    def score(media: Mapping[str, np.ndarray], prompts: list[str], meta: object) -> list[float]:
        done = log.read_bytes().count(b"\n") - 1 if log.exists() else 0
        return [reward(image, prompt, done) for image, prompt in zip(media["image"], prompts, strict=True)]

    return score


def summary(name: str, seed: int, lines: Sequence[Mapping[str, float]]) -> Row:
    """Return a line of the data."""
    watch, began = Watch(), dict[str, int]()
    for line in lines:
        for alarm in watch(line):
            began.setdefault(alarm.title, alarm.step)
    names = ["eval/reward", stderr_name("eval/gold/reward"), *(n for n in lines[0] if n.startswith("eval/gold/"))]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "name": name,
        "seed": seed,
        "commit": commit.stdout.strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "steps": int(lines[-1]["step"]),
        "alarms": began,
        "evaluations": [
            {"step": line["step"]} | {n: round(line[n], 4) for n in names if n in line}
            for line in lines
            if "eval/gold/reward" in line
        ],
    }


def table(rows: Sequence[Row]) -> str:
    """Return the table of the page."""
    titles = "reward|what it rewards|seed|reward, first and last|gold|rank correlation|drift|noticed after|alarms"
    lines = [f"|{titles}|", "|---" * (titles.count("|") + 1) + "|"]
    for row in rows:
        ends = row["evaluations"][0], row["evaluations"][-1]
        cells = [
            ", ".join(f"{end[name]:.3g}" if name in end else "none" for end in ends)
            for name in ("eval/reward", "eval/gold/reward", "eval/gold/rank_correlation")
        ]
        fooled = HACKS[row["name"]][0] if row["name"] in HACKS else "not exploitable: an OCR"
        began = sorted((step, title) for title, step in row["alarms"].items())
        alarms = "; ".join(f"{step}: {title}" for step, title in began) or "none"
        drift, noticed = f"{ends[1]['eval/gold/drift']:.2f}", began[0][0] if began else "never"
        lines.append(f"| {' | '.join(map(str, (row['name'], fooled, row['seed'], *cells, drift, noticed, alarms)))} |")
    made = sorted({f"{row['commit']} on {row['date']}, {row['steps']} steps" for row in rows})
    return "\n".join([*lines, "", f"Run at {'; '.join(made)}.", ""])


if __name__ == "__main__":
    main(sys.argv[1:])
