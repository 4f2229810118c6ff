"""Compares all algorithms on tiny-signs: trains each with three seeds, then writes docs/leaderboard.md and pictures.

    python scripts/leaderboard.py                        what is missing in runs/leaderboard, then data and page
    python scripts/leaderboard.py --only flowgrpo,nft    these algorithms
    python scripts/leaderboard.py --try                  two steps of each, in runs/leaderboard-try; nothing in docs/
    python scripts/leaderboard.py --page-only            page and pictures, from docs/leaderboard.jsonl
    python scripts/leaderboard.py --check                exit code 1 where they are not what it would write

Started again, it continues runs that were stopped and leaves finished ones as they are. All runs share one OCR
server, and each has one thread. A run's line is in docs/leaderboard.jsonl as soon as it has finished.
"""

import argparse
import importlib
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from leaderboard_page import JOBS, SEEDS, page
from leaderboard_plots import plots
from leaderboard_rows import Entry, Row, add_row, read_rows, same_images
from leaderboard_runs import ROOT, Job, carry_out, collect, images_of, is_finished, say, scorer

DOCS = ROOT / "docs"
DATA = DOCS / "leaderboard.jsonl"
TRIAL = "leaderboard-try"  # folder below runs/

ENTRIES = (
    Entry("flowgrpo", "FlowGRPO", "train_flowgrpo", "tiny-signs-flowgrpo", "flowgrpo.md"),
    Entry("flow-cps", "Flow-CPS", "train_flowgrpo", "tiny-signs-cps", "flow-cps.md"),
    Entry("flowgrpo-fast", "FlowGRPO-Fast", "train_flowgrpo", "tiny-signs-fast", "flowgrpo.md"),
    Entry("dancegrpo", "DanceGRPO", "train_flowgrpo", "tiny-signs-dancegrpo", "dancegrpo.md"),
    Entry("mixgrpo", "MixGRPO", "train_flowgrpo", "tiny-signs-mixgrpo", "mixgrpo.md"),
    Entry("mixgrpo-flash", "MixGRPO-Flash", "train_flowgrpo", "tiny-signs-mixgrpo-flash", "mixgrpo.md"),
    Entry("grpo-guard", "GRPO-Guard", "train_flowgrpo", "tiny-signs-grpo-guard", "grpo-guard.md"),
    Entry("flow-dppo", "Flow-DPPO", "train_flowgrpo", "tiny-signs-flow-dppo", "flow-dppo.md"),
    Entry("nft", "DiffusionNFT", "train_nft", "tiny-signs", "diffusion-nft.md"),
    Entry("awm", "AWM", "train_nft", "tiny-signs-awm", "awm.md"),
    Entry("dpo", "Diffusion-DPO", "train_dpo", "tiny-signs", "diffusion-dpo.md"),
    Entry("dpo-offline", "Diffusion-DPO, offline", "train_dpo", "tiny-signs-offline", "diffusion-dpo.md", offline=True),
    Entry("srpo", "SRPO", "train_srpo", "tiny-signs", "srpo.md", watched=True),
)

# 1. What there is to do


def preset(entry: Entry) -> Any:
    """The settings of the entry's preset, an Args of its trainer."""
    if str(ROOT / "apps") not in sys.path:
        sys.path.insert(0, str(ROOT / "apps"))
    presets = importlib.import_module(entry.app).PRESETS
    if entry.preset not in presets:
        raise ValueError(f"apps/{entry.app}.py must have the preset {entry.preset!r}, it has {', '.join(presets)}")
    return presets[entry.preset]


def plan(entries: Sequence[Entry], seeds: Sequence[int], *, trial: bool) -> list[Job]:
    """The runs to make, all algorithms with the first seed first.

    Raises:
        ValueError: a preset is missing, or the presets do not draw equally many images.
    """
    settings = {entry.name: preset(entry) for entry in {*entries, ENTRIES[0]}}
    if trial:
        settings = {name: replace(args, steps=2, eval_every=2) for name, args in settings.items()}
    images = 512 if trial else images_of(settings[ENTRIES[0].name])  # of a preference file: a step needs 32 pairs
    if not trial:
        same_images({e.name: images_of(settings[e.name]) for e in {*entries, ENTRIES[0]} if not e.offline})
    home = TRIAL if trial else "leaderboard"
    return [Job(entry, seed, settings[entry.name], images, home) for seed in seeds for entry in entries]


# 2. What is made from the data


def outputs() -> dict[Path, str]:
    """Every file that is made from the data, with its text."""
    rows = read_rows(DATA)
    pictures = {DOCS / "images" / name: picture for name, picture in plots(ENTRIES, rows).items()}
    return {DOCS / "leaderboard.md": page(ENTRIES, rows)} | pictures


def stale() -> list[str]:
    """The files that are not what would be written."""
    return [path.name for path, words in outputs().items() if not path.exists() or path.read_text("utf-8") != words]


# 3. The whole


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings that the command line, or `argv`, asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(e.name for e in ENTRIES), help="names of rows, commas between")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="commas between")
    parser.add_argument("--jobs", type=int, default=JOBS, help="runs at a time")
    parser.add_argument("--try", dest="trial", action="store_true", help="two steps of each row, nothing in docs/")
    parser.add_argument("--page-only", action="store_true", help="only write the page")
    parser.add_argument("--check", action="store_true", help="only compare the page with the data")
    args = parser.parse_args(argv)
    names = {entry.name for entry in ENTRIES}
    if unknown := set(args.only.split(",")) - names:
        parser.error(f"--only must be of {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
    if args.jobs < 1 or not all(seed.isdecimal() for seed in args.seeds.split(",")):
        parser.error("--jobs must be >= 1, --seeds whole numbers with commas between")
    return args


def measure(args: argparse.Namespace) -> None:
    """Makes the runs that are missing and writes their rows."""
    entries = [entry for entry in ENTRIES if entry.name in args.only.split(",")]
    if args.trial:
        shutil.rmtree(ROOT / "runs" / TRIAL, ignore_errors=True)
    jobs = plan(entries, [int(seed) for seed in args.seeds.split(",")], trial=args.trial)
    left = [job for job in jobs if not is_finished(job)]  # refuses folders with other runs before anything starts
    say(f"{len(jobs)} runs, {len(left)} of them to make, {args.jobs} at a time")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(1))  # so that what was started is ended, too
    failed = []
    with scorer() as server, closing(carry_out(jobs, server, at_a_time=args.jobs)) as runs:
        for job, problem in runs:
            try:
                if problem:
                    raise ValueError(problem)
                tell(row := collect(job))
                if not args.trial:
                    add_row(DATA, row, ENTRIES)
            except ValueError as exc:  # the others go on
                failed.append(job.name)
                say(f"{job.name} FAILED: {exc}")
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}; the same command makes these again")


def tell(row: Row) -> None:
    """The row in a line."""
    scores = " ".join(f"{e.score:.3f}" for e in row.evaluations)
    spent = f"{row.images} images, {row.forwards} forwards, {row.peak_memory_mb:.0f} MB, {row.wall_s:.0f} s"
    say(f"{row.name}-{row.seed}: {scores}, {spent}, ratio deviation {row.ratio_deviation}")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    args = parse(argv)
    try:
        if args.check:
            if files := stale():
                raise ValueError(f"not up to date: {', '.join(files)}: run python scripts/leaderboard.py --page-only")
            return 0
        if not args.page_only:
            measure(args)
        for path, words in outputs().items() if not args.trial else ():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words, "utf-8")
    except (ValueError, RuntimeError) as exc:
        print(f"leaderboard.py: error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
