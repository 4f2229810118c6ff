"""The pictures of the leaderboard, as SVG: all algorithms against transformer forwards, and each against images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean

from leaderboard_rows import Entry, Group, Row, grouped

COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa3377", "#b8860b", "#3aa6dd", "#555555")
TICK = 0.05  # of scores
INK, FAINT, PAPER = "#1f2937", "#e5e7eb", "#ffffff"  # on paper of its own, as the page around may be light or dark


def plots(entries: Sequence[Entry], rows: Sequence[Row]) -> dict[str, str]:
    """File names and pictures; none without rows."""
    groups = grouped(entries, rows)
    if not groups:
        return {}
    scores = score_range(groups)
    one_by_one = {f"algorithms/{group.entry.name}.svg": curve(group, scores) for group in groups}
    return {"leaderboard.svg": overview(entries, groups)} | one_by_one


@dataclass(frozen=True)
class Axes:
    """A rectangle of the picture and the numbers at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    x_max: float
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """Where a number of the horizontal axis stands."""
        return round(self.left + value / self.x_max * (self.right - self.left), 1)

    def y(self, score: float) -> float:
        """Where a score stands."""
        low, high = self.y_range
        return round(self.bottom - (score - low) / (high - low) * (self.bottom - self.top), 1)

    def grid(self, label: str) -> str:
        """Lines with their numbers, and what the horizontal axis is."""
        low, high = self.y_range
        parts = []
        for score in (low + TICK * i for i in range(round((high - low) / TICK) + 1)):
            y = self.y(score)
            parts += [
                f'<line x1="{self.left}" x2="{self.right}" y1="{y}" y2="{y}" stroke="{FAINT}"/>',
                text(self.left - 6, y + 4, f"{score:.2f}", anchor="end"),
            ]
        step = nice_step(self.x_max)
        for i in range(int(self.x_max / step) + 1):
            x = self.x(i * step)
            parts += [
                f'<line x1="{x}" x2="{x}" y1="{self.bottom}" y2="{self.bottom + 4}" stroke="{INK}"/>',
                text(x, self.bottom + 18, f"{i * step:,.0f}", anchor="middle"),
            ]
        parts.append(f'<line x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}" stroke="{INK}"/>')
        parts.append(text((self.left + self.right) / 2, self.bottom + 36, label, anchor="middle"))
        return "".join(parts)

    def line(self, points: Sequence[tuple[float, float]], **style: object) -> str:
        """A polyline through (number, score)."""
        told = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)
        return f'<polyline points="{told}" fill="none" stroke-linejoin="round"{attributes(style)}/>'


def attributes(style: dict[str, object]) -> str:
    """A style as attributes of an element: stroke_width=2 is stroke-width="2"."""
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items() if value)


def text(x: float, y: float, words: str, *, anchor: str = "start", color: str = INK, weight: str = "") -> str:
    """Words in the picture."""
    style = attributes({"font_weight": weight})
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{style}>{escape(words)}</text>'


def marker(x: float, y: float, color: str, *, hollow: bool) -> str:
    """The point of an evaluation: a disc, or a square with paper in it."""
    if hollow:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{PAPER}" stroke="{color}"/>'
    return f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def nice_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, of which 3 to 7 fit below the largest number."""
    power = 10 ** math.floor(math.log10(largest / 3))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= largest / 3)


def score_range(groups: Sequence[Group]) -> tuple[float, float]:
    """The ticks below and above all scores."""
    scores = [e.score for group in groups for row in group.rows for e in row.evaluations]
    low, high = math.floor(min(scores) / TICK), math.ceil(max(scores) / TICK)
    return low * TICK, max(high, low + 1) * TICK


def overview(entries: Sequence[Entry], groups: Sequence[Group]) -> str:
    """The score of all algorithms against transformer forwards; a legend ranks them, and lines end with their rank."""
    width, height = 920, 470
    furthest = max(row.forwards for group in groups for row in group.rows)
    axes = Axes(46, 40, 560, height - 50, 1.04 * furthest, score_range(groups))
    parts = [text(46, 24, "held-out OCR score", weight="bold"), axes.grid("transformer forwards, evaluations left out")]
    taken: list[tuple[float, float]] = []
    for place, group in enumerate(sorted(groups, key=lambda group: -mean(group.after()))):
        index = entries.index(group.entry)
        color, hollow = COLORS[index % len(COLORS)], bool(index // len(COLORS) % 2)
        points, after = group.average("forwards"), group.after()
        x, y = axes.x(points[-1][0]), 52 + 26 * place
        ends = f'<line x1="{x}" x2="{x}" y1="{axes.y(min(after))}" y2="{axes.y(max(after))}" stroke="{color}"/>'
        style = {"stroke": color, "stroke_width": 2, "stroke_dasharray": "6 3" if hollow else ""}
        told = f"{mean(after):.3f} [{min(after):.3f}, {max(after):.3f}]"
        parts += [
            f"<g>{ends}{axes.line(points, **style)}",
            *(marker(axes.x(at), axes.y(score), color, hollow=hollow) for at, score in points[1:]),
            f'<line x1="590" x2="622" y1="{y - 4}" y2="{y - 4}"{attributes(style)}/>',
            marker(606, y - 4, color, hollow=hollow) + text(630, y, f"{place + 1}. {group.entry.title}"),
            text(x + 6, beside(taken, x, axes.y(mean(after))) + 4, str(place + 1), color=color, weight="bold"),
            text(910, y, told, anchor="end") + "</g>",
        ]
    parts.append(text(910, 24, "after training: mean [range]", anchor="end", weight="bold"))
    return svg(width, height, "Held-out score of all algorithms against transformer forwards", parts)


def beside(taken: list[tuple[float, float]], x: float, y: float) -> float:
    """The height of a label at (x, y), moved down until it covers no earlier one, which come from above."""
    while any(abs(x - other) < 20 and abs(y - there) < 11 for other, there in taken):
        y += 1
    taken.append((x, y))
    return y


def curve(group: Group, y_range: tuple[float, float]) -> str:
    """The score of one algorithm against generated images, of forwards where all images are drawn beforehand."""
    evaluations = group.rows[0].evaluations
    drawn_before = evaluations[0].images == evaluations[-1].images
    axis, label = ("forwards", "transformer forwards") if drawn_before else ("images", "generated images")
    largest = max(getattr(row.evaluations[-1], axis) for row in group.rows)
    axes = Axes(42, 36, 402, 210, 1.04 * largest, y_range)
    parts = [text(42, 22, f"{group.entry.title}: held-out OCR score", weight="bold"), axes.grid(label)]
    for row in group.rows:
        points = [(getattr(e, axis), e.score) for e in row.evaluations]
        parts.append(axes.line(points, stroke=COLORS[0], stroke_width=1.2, stroke_opacity=0.45))
    average = group.average(axis)
    parts.append(axes.line(average, stroke=COLORS[0], stroke_width=2.5))
    parts += [marker(axes.x(x), axes.y(score), COLORS[0], hollow=False) for x, score in average]
    seeds = f"bold: mean of {len(group.rows)} seeds" if len(group.rows) > 1 else "1 seed"
    parts.append(text(402, 22, seeds, anchor="end"))
    return svg(420, 256, f"Held-out score of {group.entry.title}, {len(group.rows)} seeds", parts)
