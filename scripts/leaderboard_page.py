"""The leaderboard's table and images, made from docs/evidence/leaderboard.jsonl; the text around them is not."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]  # a line of the data; `leaderboard.collect` makes one

matplotlib.rcParams |= {  # the same bytes whenever drawn with one version; letters as text
    "svg.hashsalt": "omni-rl", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb",
}  # fmt: skip


class Entry(NamedTuple):
    """An algorithm: `python apps/APP.py --preset PRESET` is measured, docs/algorithms/PAGE describes it."""

    name: str
    title: str
    app: str
    preset: str
    page: str


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
    Entry("dgpo", "DGPO", "train_nft", "tiny-signs-dgpo", "dgpo.md"),
    Entry("dpo", "Diffusion-DPO", "train_dpo", "tiny-signs", "diffusion-dpo.md"),
    Entry("dpo-offline", "Diffusion-DPO, offline", "train_dpo", "tiny-signs-offline", "diffusion-dpo.md"),
    Entry("srpo", "SRPO", "train_srpo", "tiny-signs", "srpo.md"),
)

# 1. The data


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a leaderboard.jsonl."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def by_algorithm(rows: Iterable[Row]) -> dict[Entry, list[Row]]:
    """Return each algorithm's rows, in the order of the table and of the seeds.

    Raises:
        ValueError: the rows cannot be compared.
    """
    rows = sorted(rows, key=lambda row: row["seed"])
    groups = {entry: [row for row in rows if row["name"] == entry.name] for entry in ENTRIES}
    keys = [(row["name"], row["seed"]) for row in rows]
    if len(set(keys)) < len(keys) or {name for name, _ in keys} - {entry.name for entry in ENTRIES}:
        raise ValueError(f"rows must be of algorithms in the table, each seed once, got {keys}")
    if len({row["images"] for row in rows}) > 1:
        told = "; ".join(f"{row['name']}-{row['seed']}: {row['images']}" for row in rows)
        raise ValueError(f"rows must have the same number of generated images, got {told}")
    for entry, group in groups.items():
        if len({tuple(e["step"] for e in row["evaluations"]) for row in group}) > 1:
            raise ValueError(f"{entry.name}: all seeds must have been evaluated after the same steps")
    return {entry: group for entry, group in groups.items() if group}


def scores(group: Sequence[Row], evaluation: int) -> list[float]:
    """Return the score of each seed in its first (0) or last (-1) evaluation."""
    return [row["evaluations"][evaluation]["score"] for row in group]


def ranked(groups: Mapping[Entry, Sequence[Row]]) -> list[tuple[Entry, Sequence[Row]]]:
    """Return the algorithms by their mean score after training, the best first."""
    return sorted(groups.items(), key=lambda item: -mean(scores(item[1], -1)))


def rising(group: Sequence[Row]) -> int:
    """Return the number of seeds in which training raised the score."""
    return sum(after > before for before, after in zip(scores(group, 0), scores(group, -1), strict=True))


def average(group: Sequence[Row], axis: str) -> tuple[list[float], list[float]]:
    """Return the means over the seeds of `images` or `forwards`, and of the score, at each evaluation."""
    points = list(zip(*(row["evaluations"] for row in group), strict=True))
    return [mean(e[axis] for e in at) for at in points], [mean(e["score"] for e in at) for at in points]


# 2. The page


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """Return the page with each block between its two comments, `<!-- NAME -->` and `<!-- end -->`."""
    for name, block in blocks.items():
        first, last = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(first)
        _, ended, after = rest.partition(last)
        if not found or not ended:
            raise ValueError(f"the page must have a block between {first.strip()} and {last}")
        page = f"{before}{first}\n{block}\n{last}{after}"
    return page


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    groups = by_algorithm(rows)
    commits = ", ".join(sorted({row["commit"][:12] + "+" * row["commit"].endswith("+") for row in rows}))
    torch, cores = (", ".join(sorted({str(row[name]) for row in rows})) for name in ("torch", "cores"))
    return {"results": f"Measured with torch {torch} on {cores} CPU cores, at commit {commits}.\n\n" + results(groups)}


def results(groups: Mapping[Entry, Sequence[Row]]) -> str:
    """Return a line per algorithm, best first: means over seeds, the median of times, the largest of the rest."""
    names = (
        "algorithm", "before", "after: mean [range]", "rises in", "forwards", "peak memory, MB", "wall time, min",
        "ratio deviation",
    )  # fmt: skip
    lines: list[Sequence[str]] = [names, ("---", *["---:"] * (len(names) - 1))]
    for entry, group in ranked(groups):
        after = scores(group, -1)
        deviations = [row["ratio_deviation"] for row in group if row["ratio_deviation"] is not None]
        lines.append((
            f"[{entry.title}](../algorithms/{entry.page})",
            f"{mean(scores(group, 0)):.3f}",
            f"**{mean(after):.3f}** [{min(after):.3f}, {max(after):.3f}]",
            f"{rising(group)} of {len(group)}",
            f"{mean(row['forwards'] for row in group):,.0f}",
            f"{max(row['peak_memory_mb'] for row in group):,.0f}",
            f"{median(row['wall_s'] for row in group) / 60:.1f}",
            f"{max(deviations):.2g}" if deviations else "",
        ))  # fmt: skip
    return markdown(lines)


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of these cells."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# 3. The pictures


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write leaderboard.svg, all algorithms against forwards, and algorithms/NAME.svg, each against images."""
    groups = by_algorithm(rows)
    (folder / "algorithms").mkdir(parents=True, exist_ok=True)
    every = [e["score"] for row in rows for e in row["evaluations"]]
    limits = (min(every) - 0.02, max(every) + 0.02)
    figure = Figure(figsize=(9.2, 4.7), layout="constrained")
    overview(figure.add_subplot(ylim=limits), groups)
    save(figure, folder / "leaderboard.svg", rows)
    for entry, group in groups.items():
        figure = Figure(figsize=(4.2, 2.6), layout="constrained")
        curves(figure.add_subplot(ylim=limits, title=f"{entry.title}: held-out OCR score"), group)
        save(figure, folder / "algorithms" / f"{entry.name}.svg", rows)


def overview(axes: Axes, groups: Mapping[Entry, Sequence[Row]]) -> None:
    """Plot each algorithm's mean score over forwards, with the range at the end; numbers are places in the legend."""
    for place, (entry, group) in enumerate(ranked(groups), start=1):
        (x, y), after, color = average(group, "forwards"), scores(group, -1), f"C{place % 10}"
        label = f"{place}. {entry.title}: {mean(after):.3f} [{min(after):.3f}, {max(after):.3f}]"
        axes.plot(x, y, "--s" if place > 9 else "-o", color=color, markersize=4, label=label)
        axes.vlines(x[-1], min(after), max(after), color=color)
        axes.annotate(str(place), (x[-1], y[-1]), (5, -3), textcoords="offset points", color=color, weight="bold")
    axes.set(xlabel="transformer forwards, evaluations left out", ylabel="held-out OCR score", xlim=(0, None))
    axes.figure.legend(loc="outside right center", title="after training: mean [range]", frameon=False)


def curves(axes: Axes, group: Sequence[Row]) -> None:
    """Plot each seed's score, pale, and their mean over images; over forwards if all images come beforehand."""
    evaluations = group[0]["evaluations"]
    axis = "forwards" if evaluations[0]["images"] == evaluations[-1]["images"] else "images"
    for row in group:
        axes.plot([e[axis] for e in row["evaluations"]], [e["score"] for e in row["evaluations"]], "C0", alpha=0.4)
    axes.plot(*average(group, axis), "C0-o", linewidth=2.5, label=f"mean of {len(group)} seeds")
    axes.set(xlabel={"forwards": "transformer forwards", "images": "generated images"}[axis], xlim=(0, None))
    axes.legend(loc="upper left", frameon=False)


def save(figure: Figure, path: Path, rows: Sequence[Row]) -> None:
    """Write an SVG that says of which data it is."""
    figure.savefig(path, metadata={"Date": None, "Description": digest(rows)})


def digest(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the rows in any order."""
    return hashlib.sha256("\n".join(sorted(json.dumps(row, sort_keys=True) for row in rows)).encode()).hexdigest()
