"""The leaderboard's tables and images, made from docs/evidence/leaderboard*.jsonl, without the text around them."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]  # a line of the data, made by `leaderboard.collect`

INK = "#7d8590"  # color of text and lines, legible on white and on dark pages
matplotlib.rcParams |= {  # for all figures: reproducible bytes with one version, letters as text, no background
    "svg.hashsalt": "omni-rl", "svg.fonttype": "none", "savefig.transparent": True, "font.size": 9, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.3,
}  # fmt: skip


class Entry(NamedTuple):
    """An algorithm, measured with `python apps/APP.py --preset PRESET` and described in docs/algorithms/PAGE."""

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
    Entry("tempflow", "TempFlow-GRPO", "train_flowgrpo", "tiny-signs-tempflow", "tempflow.md"),
    Entry("nft", "DiffusionNFT", "train_nft", "tiny-signs", "diffusion-nft.md"),
    Entry("awm", "AWM", "train_nft", "tiny-signs-awm", "awm.md"),
    Entry("dgpo", "DGPO", "train_nft", "tiny-signs-dgpo", "dgpo.md"),
    Entry("dpo", "Diffusion-DPO", "train_dpo", "tiny-signs", "diffusion-dpo.md"),
    Entry("dpo-offline", "Diffusion-DPO, offline", "train_dpo", "tiny-signs-offline", "diffusion-dpo.md"),
    Entry("srpo", "SRPO", "train_srpo", "tiny-signs", "srpo.md"),
)

RATES = (0.5, 1.0, 2.0)  # multiples of a recipe's learning rate that are tried before the larger budget

# 1. The data


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a leaderboard.jsonl."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def key(row: Row) -> tuple[str, int, float]:
    """Return the name, the seed and the learning-rate multiple of a row."""
    return row["name"], row["seed"], row.get("rate", 1.0)


def order(row: Row) -> tuple[int, int, float]:
    """Return the sort key of a row in its file."""
    name, seed, rate = key(row)
    return [entry.name for entry in ENTRIES].index(name), seed, rate


def grade(row: Row) -> float:
    """Return the reward of the row's last evaluation: the mean of words and colors."""
    last = row["evaluations"][-1]
    return (last["score"] + last["color"]) / 2


def trials_of(tuning: Sequence[Row], entry: Entry) -> dict[float, Row]:
    """Return the trials of an algorithm by learning-rate multiple."""
    return {row["rate"]: row for row in tuning if row["name"] == entry.name}


def tuned_rate(tuning: Sequence[Row], entry: Entry) -> float | None:
    """Return the multiple with the best trial, the lowest if several are equal; None until all have been tried."""
    trials = trials_of(tuning, entry)
    return max(RATES, key=lambda rate: grade(trials[rate])) if trials.keys() >= set(RATES) else None


def by_algorithm(rows: Iterable[Row]) -> dict[Entry, list[Row]]:
    """Return each algorithm's rows, in the order of the table and the seeds.

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


def scores(group: Sequence[Row], evaluation: int, of: str = "score") -> list[float]:
    """Return the score, or the `color`, of each seed in its first (0) or last (-1) evaluation."""
    return [row["evaluations"][evaluation][of] for row in group]


def ranked(groups: Mapping[Entry, Sequence[Row]]) -> list[tuple[Entry, Sequence[Row]]]:
    """Return the algorithms by mean score after training, best first."""
    return sorted(groups.items(), key=lambda item: -mean(scores(item[1], -1)))


def rising(group: Sequence[Row]) -> int:
    """Return the number of seeds in which training raised the score."""
    return sum(after > before for before, after in zip(scores(group, 0), scores(group, -1), strict=True))


def average(group: Sequence[Row], axis: str) -> tuple[list[float], list[float]]:
    """Return the means over seeds of `images` or `forwards`, and of the score, at each evaluation."""
    points = list(zip(*(row["evaluations"] for row in group), strict=True))
    return [mean(e[axis] for e in at) for at in points], [mean(e["score"] for e in at) for at in points]


# 2. The page


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """Return the page with each block inserted between its two comments, `<!-- NAME -->` and `<!-- end -->`."""
    for name, block in blocks.items():
        first, last = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(first)
        _, ended, after = rest.partition(last)
        if not found or not ended:
            raise ValueError(f"the page must have a block between {first.strip()} and {last}")
        page = f"{before}{first}\n{block}\n{last}{after}"
    return page


def blocks(short: Sequence[Row], long: Sequence[Row], tuning: Sequence[Row]) -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    found = {"results": f"{measured(short)}\n\n{results(by_algorithm(short))}"}
    return found | {"larger": larger(by_algorithm(long), tuning), "tuning": tried(tuning)}


def measured(rows: Sequence[Row]) -> str:
    """Return the sentence that describes how these rows were measured."""
    commits = ", ".join(sorted({row["commit"][:12] + "+" * row["commit"].endswith("+") for row in rows}))
    torch, cores = (", ".join(sorted({str(row[name]) for row in rows})) for name in ("torch", "cores"))
    return f"Measured with torch {torch} on {cores} CPU cores, at commit {commits}."


def larger(groups: Mapping[Entry, Sequence[Row]], tuning: Sequence[Row]) -> str:
    """Return the finished and missing runs of the larger budget, and one line per algorithm, best words first."""
    runs, missing = sum(map(len, groups.values())), [entry.title for entry in ENTRIES if entry not in groups]
    told = f"{runs} runs of {len(groups)} of {len(ENTRIES)} rows are finished."
    told += f" **Not run yet:** {'; '.join(missing)}." if missing else ""
    if not groups:
        return told + "\n"
    names = (
        "algorithm",
        "seeds",
        "learning rate",
        "words before",
        "words after: mean [range]",
        "colors before, after",
        "forwards",
        "backward passes",
        "CPU seconds",
    )
    lines: list[Sequence[str]] = [names, ("---", *["---:"] * (len(names) - 1))]
    for entry, group in ranked(groups):
        after, colors = scores(group, -1), [mean(scores(group, at, "color")) for at in (0, -1)]
        tuned = tuned_rate(tuning, entry)
        rates = {f"{row['rate']:g}x{'' if row['rate'] == tuned else ', not tuned'}" for row in group}
        lines.append(
            (
                f"[{entry.title}](../algorithms/{entry.page})",
                f"{len(group)}",
                ", ".join(sorted(rates)),
                f"{mean(scores(group, 0)):.3f}",
                f"**{mean(after):.3f}** [{min(after):.3f}, {max(after):.3f}]",
                f"{colors[0]:.3f}, {colors[1]:.3f}",
                f"{mean(row['forwards'] for row in group):,.0f}",
                f"{mean(row['backwards'] for row in group):,.0f}",
                f"{mean(row['cpu_s'] for row in group):,.0f}",
            )
        )
    rows = [row for group in groups.values() for row in group]
    image = "![Held-out words against transformer forwards, 20,480 images a row](../images/leaderboard_20480.svg)"
    return f"{told} {measured(rows)}\n\n{markdown(lines)}\n{image}\n"


def tried(tuning: Sequence[Row]) -> str:
    """Return one line per algorithm with the words and colors of each trial, and the chosen multiple."""
    entries = [entry for entry in ENTRIES if trials_of(tuning, entry)]
    missing = [entry.title for entry in ENTRIES if tuned_rate(tuning, entry) is None]
    told = f"Not tuned yet: {'; '.join(missing)}.\n" if missing else "All rows are tuned.\n"
    if not entries:
        return told
    names = ("algorithm", *(f"{rate:g}x" for rate in RATES), "chosen")
    lines: list[Sequence[str]] = [names, ("---", *["---:"] * (len(names) - 1))]
    for entry in entries:
        trials, rate = trials_of(tuning, entry), tuned_rate(tuning, entry)
        ends = [trials[r]["evaluations"][-1] if r in trials else None for r in RATES]
        cells = [f"{end['score']:.3f}, {end['color']:.3f}" if end else "" for end in ends]
        lines.append((entry.title, *cells, f"{rate:g}x" if rate else "not yet"))
    return f"{told}\n{markdown(lines)}"


def results(groups: Mapping[Entry, Sequence[Row]]) -> str:
    """Return one line per algorithm, best first: means over seeds, the median time, and maxima of the rest."""
    names = (
        "algorithm",
        "before",
        "after: mean [range]",
        "rises in",
        "forwards",
        "peak memory, MB",
        "wall time, min",
        "ratio deviation",
    )
    lines: list[Sequence[str]] = [names, ("---", *["---:"] * (len(names) - 1))]
    for entry, group in ranked(groups):
        after = scores(group, -1)
        deviations = [row["ratio_deviation"] for row in group if row["ratio_deviation"] is not None]
        lines.append(
            (
                f"[{entry.title}](../algorithms/{entry.page})",
                f"{mean(scores(group, 0)):.3f}",
                f"**{mean(after):.3f}** [{min(after):.3f}, {max(after):.3f}]",
                f"{rising(group)} of {len(group)}",
                f"{mean(row['forwards'] for row in group):,.0f}",
                f"{max(row['peak_memory_mb'] for row in group):,.0f}",
                f"{median(row['wall_s'] for row in group) / 60:.1f}",
                f"{max(deviations):.2g}" if deviations else "",
            )
        )
    return markdown(lines)


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of these cells."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# 3. The images


def draw(rows: Sequence[Row], long: Sequence[Row], folder: Path) -> None:
    """Write an image per budget with all algorithms over forwards, and algorithms/NAME.svg, each over images."""
    groups = by_algorithm(rows)
    (folder / "algorithms").mkdir(parents=True, exist_ok=True)
    for own, name in ((rows, "leaderboard.svg"), (long, "leaderboard_20480.svg")):
        if own:
            figure = Figure(figsize=(9.2, 4.7), layout="constrained")
            overview(figure.add_subplot(ylim=limits(own)), by_algorithm(own))
            save(figure, folder / name, own)
    for entry, group in groups.items():
        figure = Figure(figsize=(4.2, 2.6), layout="constrained")
        curves(figure.add_subplot(ylim=limits(rows), title=f"{entry.title}: held-out OCR score"), group)
        save(figure, folder / "algorithms" / f"{entry.name}.svg", rows)


def limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the range of scores in an image."""
    every = [e["score"] for row in rows for e in row["evaluations"]]
    return min(every) - 0.02, max(every) + 0.02


def overview(axes: Axes, groups: Mapping[Entry, Sequence[Row]]) -> None:
    """Plot each algorithm's mean score over forwards, with the range of seeds; numbers refer to the legend."""
    for place, (entry, group) in enumerate(ranked(groups), start=1):
        (x, y), after, color = average(group, "forwards"), scores(group, -1), f"C{place % 10}"
        seen = [scores(group, at) for at in range(len(x))]
        label = f"{place}. {entry.title}: {mean(after):.3f} [{min(after):.3f}, {max(after):.3f}]"
        axes.plot(x, y, "--s" if place > 9 else "-o", color=color, markersize=4, label=label)
        axes.vlines(x, list(map(min, seen)), list(map(max, seen)), color=color, alpha=0.6)
        axes.annotate(str(place), (x[-1], y[-1]), (5, -3), textcoords="offset points", color=color, weight="bold")
    axes.set(xlabel="transformer forwards, evaluations left out", ylabel="held-out OCR score", xlim=(0, None))
    axes.figure.legend(loc="outside right center", title="after training: mean [range]", frameon=False)


def curves(axes: Axes, group: Sequence[Row]) -> None:
    """Plot each seed's score, pale, and their mean, over images; over forwards if all images are made beforehand."""
    evaluations = group[0]["evaluations"]
    axis = "forwards" if evaluations[0]["images"] == evaluations[-1]["images"] else "images"
    for row in group:
        axes.plot([e[axis] for e in row["evaluations"]], [e["score"] for e in row["evaluations"]], "C0", alpha=0.4)
    axes.plot(*average(group, axis), "C0-o", linewidth=2.5, label=f"mean of {len(group)} seeds")
    axes.set(xlabel={"forwards": "transformer forwards", "images": "generated images"}[axis], xlim=(0, None))
    axes.legend(loc="upper left", frameon=False)


def save(figure: Figure, path: Path, rows: Sequence[Row]) -> None:
    """Write an SVG whose metadata identify its data."""
    figure.savefig(path, metadata={"Date": None, "Description": digest(rows)})


def digest(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the rows in any order."""
    return hashlib.sha256("\n".join(sorted(json.dumps(row, sort_keys=True) for row in rows)).encode()).hexdigest()
