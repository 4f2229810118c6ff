"""Plan the step of recipes for real models; check their `# Planned:` and `# Verified:` lines, and docs/choosing.md.

    python scripts/plan_recipes.py APP/NAME
    python scripts/plan_recipes.py --write APP/NAME
    python scripts/plan_recipes.py --write                                     only the tables of the page

A plan is for the number of accelerators in that line, or else in the recipe's publication, with stand-ins for the
prompts: texts of 100 words, enough to fill their cache, references as large as the samples, and answers of maximum
length. The card is the smallest in CARDS with LEFT to spare, for memory that plans do not count. One table has a row
for each model and set of cards in the lines, the other the number of recipes at each level of verification. A line
that differs from the plan, or a table that differs from the lines, is an error, unless --write corrects it.
"""

import argparse
import importlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from leaderboard_page import fill
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.fields import build, change, flag_of
from omni_rl.settings.toml import flatten_tables, from_toml, load_recipes
from omni_rl.tools.plan import GB, RESERVED, Figures, measure
from omni_rollout.models import open_model
from omni_rollout.models.hub import released_models
from omni_rollout.models.tokens import open_token_model
from PIL import Image

RECIPES = Path(__file__).parents[1] / "recipes"
PAGE = RECIPES.parent / "docs" / "choosing.md"
CARDS = (16, 24, 32, 40, 48, 64, 80, 96, 141, 192)  # GB of memory of accelerators
LINE = re.compile(r"^# Planned: (\d+) x .*$", re.MULTILINE)
LEVELS = {  # start of a `# Verified:` line -> its meaning, in ascending order
    "one step at small widths": "the trainer takes one step with the recipe's settings, on the released "
    "configuration with fewer layers and smaller widths, random weights, and few small samples",
    "two steps at real size": "the same with all layers and widths of the release; "
    "[the page](evidence/real_size.md) has the cost",
    "trained": "trained here to a held-out score, on a small model",
    "curve published": "the same, with its curve in [docs/records](records); `python scripts/reproduce.py` compares a "
    "new run with it",
}
TEXT = " ".join(["a quiet street with wooden houses after the rain, seen from above"] * 8)  # 12 words each
NUM_PROMPTS = 2000


class Line(NamedTuple):
    """The plan of a recipe's step: accelerators, GB of each, GB used on one, the scorer's share, and TFLOP.

    host_gb: host memory, without libraries and checkpoints.
    """

    cards: int
    card_gb: int
    gb: float
    scorer_gb: float
    host_gb: float
    tflop: int

    def __str__(self) -> str:
        """Return the line of the recipe."""
        scorer = f", {self.scorer_gb} of it the scorer" if self.scorer_gb else ""
        work = f"{self.host_gb} GB of the host and {self.tflop:,} TFLOP"
        return f"# Planned: {self.cards} x {self.card_gb} GB. A step takes {self.gb} GB{scorer}, {work} per card"


def main() -> int:
    """Plan the recipes of the command line; the exit code is 1 if a line or the page is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", metavar="APP/NAME", help="trainer and recipe, all of one card by default")
    parser.add_argument("--write", action="store_true", help="write lines to the recipes, and the tables to the page")
    given = parser.parse_args()
    code = 0
    for recipe in given.recipes:
        app, name = recipe.split("/")
        text = load_recipes(app)[name]
        line = planned_line(plan_of(app, name, ranks_of(text)), ranks_of(text))
        print(f"{recipe}: {line}", flush=True)
        if given.write:
            (RECIPES / app / f"{name}.toml").write_text(with_line(text, str(line)), "utf-8")
        elif line != read_line(text):
            code = 1
    page = page_with_table()
    if given.write:
        PAGE.write_text(page, "utf-8")
    elif page != PAGE.read_text("utf-8"):
        print(f"{PAGE.name} has another table than the lines: python scripts/plan_recipes.py --write")
        code = 1
    return code


def plan_of(app: str, name: str, ranks: int) -> Figures:
    """Return the costs of a recipe's step on one of `ranks` ranks."""
    module = importlib.import_module(app)
    args = build(module.Args, from_toml(load_recipes(app)[name], module.Args, name))
    is_media = isinstance(args, MediaArgs)
    least_images = open_model(released_models()[args.policy.model]).IMAGES.start if is_media else 0
    count = max(least_images, '"images"' in load_recipes(app)[name])  # for an editor that also works without images
    os.environ["WORLD_SIZE"] = str(ranks)
    with TemporaryDirectory() as folder, chdir(folder):
        if is_media:
            Image.new("RGB", (args.sampling.width, args.sampling.height)).save("reference.png")
        row = {"prompt": f'{TEXT} "Rain"', "images": ["reference.png"] * count, "answer": "Rain"}
        if not is_media:
            model = open_token_model(released_models()[args.policy.model])
            longest = " a" * ((args.sampling.max_new_tokens - 1) // len(model.tokenize(" a")))
            row |= dict.fromkeys(("completion", "chosen", "rejected"), longest)
        Path("prompts.jsonl").write_text(f"{json.dumps(row)}\n" * NUM_PROMPTS)
        files = {"prompts": "prompts.jsonl", "eval_prompts": "prompts.jsonl"}
        files |= {"preferences": "prompts.jsonl"} if getattr(args, "preferences", "") else {}
        is_auto = args.sharding.mode == "fsdp2" and args.sharding.unshard == "auto"
        least = {"sharding.unshard": "none"} if is_auto else {}  # a larger card gathers more at once
        args = change(args, dry_run=True, memory_device_gb=float(CARDS[-1]), **files, **least)
        module.check_args(args)
        return measure(module.main, args, ranks)


def ranks_of(text: str) -> int:
    """Return the number of accelerators for which a recipe is planned, or was published."""
    found = LINE.search(text) or re.search(r"published for (\d+) accelerator", text.replace("\n# ", " "))
    if found is None:
        raise ValueError("a recipe must say for how many accelerators it is, as `# Planned: 1 x`")
    return int(found[1])


def planned_line(plan: Figures, ranks: int) -> Line:
    """Return the line for a recipe, with the smallest card that fits the step."""
    gb = next((card for card in CARDS if plan.peak <= (1 - RESERVED) * card * GB), None)
    if gb is None:
        raise ValueError(f"a step must fit {(1 - RESERVED) * CARDS[-1]:.1f} GB, takes {plan.peak / GB:.1f}")
    tflop = plan.flops.total() / plan.num_steps / 1e12
    peak, scorer, host = (round(each / GB, 1) for each in (plan.peak, plan.scorer.total(), plan.host))
    return Line(ranks, gb, peak, scorer, host, round(tflop))


def read_line(text: str) -> Line | None:
    """Return the plan in a recipe's text, or None if there is none."""
    taken = r"([\d.]+) GB(?:, ([\d.]+) of it the scorer)?, ([\d.]+) GB of the host and ([\d,]+) TFLOP per card"
    if not (found := re.search(rf"^# Planned: (\d+) x (\d+) GB\. A step takes {taken}$", text, re.MULTILINE)):
        return None
    cards, card_gb, gb, scorer_gb, host_gb, tflop = found.groups()
    work = int(tflop.replace(",", ""))
    return Line(int(cards), int(card_gb), float(gb), float(scorer_gb or 0), float(host_gb), work)


def with_line(text: str, line: str) -> str:
    """Return the text of a recipe with this line after the line of its verification."""
    bare = LINE.sub("", text).replace("\n\n# ", "\n# ", 1) if LINE.search(text) else text
    return re.sub(r"^(# Verified: .*)$", rf"\1\n{line}", bare, count=1, flags=re.MULTILINE)


def page_with_table() -> str:
    """Return the page, with a row for each model and set of cards: the first recipe planned for them."""
    rows: dict[tuple[str, int, int], str] = {}
    for path in sorted(RECIPES.glob("*/*.toml")):
        text = path.read_text("utf-8")
        if line := read_line(text):
            values = flatten_tables(tomllib.loads(text))
            key = values["model"].partition("/")[2], line.cards, line.card_gb
            command = f"{path.parent.name.removeprefix('train_')} --preset {path.stem}"
            taken = f"{line.gb} | {line.host_gb} | {line.tflop:,}"
            rows.setdefault(key, f"`{command}` | {memory_of(values)} | {taken}")
    order = sorted(rows, key=lambda key: (key[0].lower(), key[1] * key[2]))
    table = [f"| {model} | {cards} x {gb} GB | {rows[model, cards, gb]} |" for model, cards, gb in order]
    heads = ("model", "cards", "`omni-rl train`", "memory settings", "GB", "host GB", "TFLOP")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *table]
    return fill(PAGE.read_text("utf-8"), {"planned": "\n".join(lines) + "\n", "verified": levels()})


def levels() -> str:
    """Return the table of verification levels, with the number of recipes at each level."""
    found = [level_of(path.read_text("utf-8")) for path in RECIPES.glob("*/*.toml")]
    rows = [f"| {level} | {found.count(level)} | {meaning} |" for level, meaning in LEVELS.items()]
    return "\n".join(["| level | recipes | meaning |", "|---|---|---|", *rows]) + "\n"


def level_of(text: str) -> str:
    """Return a recipe's level of verification, a key of LEVELS."""
    [line] = re.findall(r"^# Verified: (.*)$", text, re.MULTILINE)
    return next(level for level in LEVELS if line.startswith(level))


def memory_of(values: Mapping[str, object]) -> str:
    """Return a recipe's memory and sharding settings as flags, those of memory without their group."""
    own = {flag_of(name): value for name, value in values.items() if name.startswith(("memory.", "sharding."))}
    flags = [name if value is True else f"{name} {value}" for name, value in own.items()]
    return ", ".join(f"`{flag.replace('--memory.', '')}`" for flag in flags)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "apps"))
    sys.exit(main())
