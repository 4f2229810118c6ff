"""The data of the leaderboard: docs/leaderboard.jsonl, a line for each run that scripts/leaderboard.py has made."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any


@dataclass(frozen=True)
class Entry:
    """An algorithm: `python apps/APP.py --preset PRESET` is what was measured, docs/algorithms/PAGE describes it."""

    name: str
    title: str
    app: str
    preset: str
    page: str
    watched: bool = False  # trains on a reward of its own; the common scorer only watches its evaluations
    offline: bool = False  # trains on a preference file, whose samples are the row's images


@dataclass(frozen=True)
class Evaluation:
    """A held-out score, and what had been spent on generated images and transformer forwards until then."""

    step: int
    score: float
    images: int
    forwards: int


@dataclass(frozen=True)
class Row:
    """A run.

    settings: what its preset sets beyond the trainer's defaults. ratio_deviation: None where there is no ratio. commit:
    ends in + where files differed from it. cores: of the machine.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    evaluations: list[Evaluation]
    images: int
    forwards: int
    peak_memory_mb: float
    wall_s: float
    ratio_deviation: float | None
    torch: str
    commit: str
    cores: int


@dataclass(frozen=True)
class Group:
    """An algorithm with its runs, in the order of their seeds."""

    entry: Entry
    rows: list[Row]

    def before(self) -> float:
        """The mean score before training."""
        return mean(row.evaluations[0].score for row in self.rows)

    def after(self) -> list[float]:
        """The score of each seed after training."""
        return [row.evaluations[-1].score for row in self.rows]

    def num_rising(self) -> int:
        """Seeds in which training raised the score."""
        return sum(row.evaluations[-1].score > row.evaluations[0].score for row in self.rows)

    def average(self, axis: str) -> list[tuple[float, float]]:
        """For each evaluation the mean over seeds of images or forwards, and of the score."""
        points = zip(*(row.evaluations for row in self.rows), strict=True)
        return [(mean(getattr(e, axis) for e in at), mean(e.score for e in at)) for at in points]


def read_rows(path: Path) -> list[Row]:
    """The rows of a leaderboard.jsonl; none if there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    rows = []
    for line in filter(None, lines):
        values = json.loads(line)
        rows.append(Row(**values | {"evaluations": [Evaluation(**e) for e in values["evaluations"]]}))
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows, one JSON object a line, at once or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows), "utf-8")
    temporary.replace(path)


def add_row(path: Path, row: Row, entries: Sequence[Entry]) -> None:
    """Puts a row in the place of an earlier one of the same algorithm and seed; rows are in the order of the table."""
    order = [entry.name for entry in entries]
    others = [r for r in read_rows(path) if (r.name, r.seed) != (row.name, row.seed)]
    write_rows(path, sorted([*others, row], key=lambda r: (order.index(r.name), r.seed)))


def grouped(entries: Sequence[Entry], rows: Sequence[Row]) -> list[Group]:
    """The rows by algorithm, in the order of the table; algorithms without a row are left out.

    Raises:
        ValueError: the rows cannot be compared.
    """
    keys = [(row.name, row.seed) for row in rows]
    if wrong := sorted({key for key in keys if keys.count(key) > 1 or key[0] not in {e.name for e in entries}}):
        raise ValueError(f"rows must be of algorithms in the table, once each, got {wrong}")
    same_images({f"{row.name}, seed {row.seed}": row.images for row in rows})
    groups = [Group(e, sorted((r for r in rows if r.name == e.name), key=lambda r: r.seed)) for e in entries]
    groups = [group for group in groups if group.rows]
    for group in groups:
        if len({tuple(e.step for e in row.evaluations) for row in group.rows}) > 1:
            raise ValueError(f"{group.entry.name}: all seeds must have been evaluated after the same steps")
    return groups


def same_images(counts: dict[str, int]) -> None:
    """Raises ValueError unless all counts of generated images are one number."""
    if len(set(counts.values())) > 1:
        told = "; ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"all rows must have the same number of generated images, got {told}")
