"""The content of a report as plain data: thinned curves, images within a budget of bytes, alarms.

It comes from files and is not trusted, so it remains data until the page shows it as text.
"""

import base64
import math
import re
import reprlib
import tomllib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any
from urllib.parse import quote

from omni_train.files import load_metrics, parse_json, read_jsonl, read_regular

from omni_rl.report.folder import step_folders
from omni_rl.run.alarms import find_alarms
from omni_rl.run.metrics import CHARTS, METRICS, drop_stale_evaluations, stderr_name

MAX_POINTS = 400  # of a curve; longer ones show mean, minimum and maximum per interval of steps
MAX_BARS = 60  # in the chart of seconds per phase
MAX_GROUPS = 12  # groups whose best and worst samples are shown
EVAL_BYTES = 2_000_000  # budget for the images of evaluations in the page, over all runs
SAMPLE_BYTES = 600_000  # budget for the images of samples in the page
PLAYED = 6  # bytes of video and sound count one sixth, so that a page stays below 20 MB
MIN_EVALS, MIN_PROMPTS = 8, 4  # numbers that a page keeps if possible
MAX_TEXT = 400  # characters of a prompt, a reason, a detail
MAX_ANSWER = 2000  # characters of a sampled text
MAX_DETAILS = 6  # of a score
MEDIA_TYPES = {
    ".png": "image/png", ".webp": "image/webp", ".webm": "video/webm", ".flac": "audio/flac",
}  # fmt: skip
REMEDY = "Only the report needs it: move it away"
Kinds = Mapping[str, UnionType | type]
ROW: Kinds = {
    "prompt": str, "reward": int | float | None, "seed": int | None, "file": str | None, "size": list, "details": dict,
    "abstained": str | None, "references": list, "strip": str | None, "sound": str | None, "answer": str | None,
}  # fmt: skip
REFERENCE: Kinds = {"file": str, "size": list}
GROUP: Kinds = {"prompt": str, "rewards": list, "shown": list}
START: Kinds = {"command": str, "commit": str}
NOW: Kinds = {"text": str, "at": int | float}
Steps = Sequence[Mapping[str, float]]
Source = Callable[[Path], str]  # from a file to its URL in the page
Shown = tuple[Mapping[str, Path], Mapping[str, Any]]  # files and row of a sample


def charts(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of the runs, each with {name: label} of its lines; the first includes evaluation sets."""
    lines = [{row.name: row.label for row in METRICS if row.chart == chart.title} for chart in CHARTS]
    names = sorted({name for run in runs for name in run["curves"] if re.fullmatch("eval/.+/reward", name)})
    lines[0] |= {name: f"held-out, {name.split('/')[1]}" for name in names}
    return [asdict(chart) | {"lines": chart_lines} for chart, chart_lines in zip(CHARTS, lines, strict=True)]


def _inline(file: Path) -> str:
    return f"data:{MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(read_regular(file)).decode()}"


def outline(folder: Path, steps: Steps) -> dict[str, Any]:
    """Return the progress, the settings, the starts and the current activity of a run.

    Raises:
        ValueError: one of its files cannot be read.
    """
    config = read_config(folder)
    total = config.get("train_steps")
    seconds = [value for _, value in metric_points(steps, "time/step_s")]
    recent = seconds[-20:]
    return {
        "name": folder.resolve().name,
        "step": int(steps[-1]["step"]) if steps else 0,
        "total": total if isinstance(total, int) and total < 2**53 else None,
        "seconds": sum(seconds),
        "pace_s": sum(recent) / len(recent) if recent else None,  # includes evaluations, for the remaining time
        "logged_at": (folder / "metrics.jsonl").stat().st_mtime,
        "config": config,
        "starts": _entries(folder / "versions.jsonl", START),
        "now": read_now(folder),
    }


def run_data(folder: Path, *, num_runs: int = 1, link: str | None = None) -> dict[str, Any]:
    """Return the data of a run in a page of `num_runs` runs.

    link: address of the folder, from which the page loads all images; None: some images are embedded in the page.

    Raises:
        ValueError: `folder` has no metrics, or a file in it cannot be read.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl")
    steps = drop_stale_evaluations(load_metrics(path))
    run_outline = outline(folder, steps)
    trained = [seconds for step, seconds in metric_points(steps, "time/step_s") if step]

    def url_of(file: Path) -> str:
        return f"{link}/{quote(file.relative_to(folder).as_posix())}"

    source, share = (_inline, 1.0) if link is None else (url_of, math.inf)
    return {
        **run_outline,
        "step_s": median(trained) if trained else None,  # not affected by the few evaluations and saves
        "curves": {name: points for name in shown_names(steps) if (points := curve(steps, name))["x"]},
        "phases": phases(steps),
        "alarms": [asdict(alarm) for alarm in find_alarms(steps)],
        **evaluations(folder, run_outline["step"], share * EVAL_BYTES / num_runs, source),
        "groups": groups(folder, run_outline["step"], share * SAMPLE_BYTES, source) if num_runs == 1 else [],
    }


def shown_names(steps: Steps) -> list[str]:
    """Return the metrics that are plotted as curves, sorted. A time is plotted only if it has a chart."""
    charted = {row.name for row in METRICS if row.chart} | {"time/step_s"}
    logged = {name for step in steps for name in step} - {"step"}
    metrics = logged - set(map(stderr_name, logged))
    return sorted(name for name in metrics if name in charted or not name.startswith("time/"))


def curve(steps: Steps, name: str, limit: int = MAX_POINTS) -> dict[str, list[float]]:
    """Return the points x, y of a metric, with a band if it has standard errors.

    Above `limit` points, return means and bounds of intervals instead, `limit` equal parts of the steps with x in the
    middle. Non-finite values are left out.
    """
    points = metric_points(steps, name)
    if len(points) <= limit:
        errors = dict(metric_points(steps, stderr_name(name)))
        return {"x": [x for x, _ in points], "y": [_round_value(y) for _, y in points]} | (
            band([(y, errors.get(x, 0.0)) for x, y in points]) if errors else {}
        )
    parts = _intervals(points, limit)
    values = [[y for _, y in part] for part in parts]
    return {
        "x": [(part[0][0] + part[-1][0]) / 2 for part in parts],
        "y": [_round_value(sum(ys) / len(ys)) for ys in values],
        "low": [_round_value(min(ys)) for ys in values],
        "high": [_round_value(max(ys)) for ys in values],
    }


def band(values: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the standard errors of pairs (value, error), and bounds one error below and above each value."""
    return {
        "error": [_round_value(error) for _, error in values],
        "low": [_round_value(value - error) for value, error in values],
        "high": [_round_value(value + error) for value, error in values],
    }


def metric_points(steps: Steps, name: str) -> list[tuple[float, float]]:
    """Return (step, value) for each step at which a metric is finite."""
    return [(step["step"], step[name]) for step in steps if math.isfinite(step.get(name, math.nan))]


def phases(steps: Steps, limit: int = MAX_BARS) -> dict[str, Any]:
    """Return mean seconds per step of each phase, and of the rest of the step, in at most `limit` intervals."""
    timed = [(step["step"], step) for step in steps if math.isfinite(step.get("time/step_s", math.nan))]
    by_num_phases = sorted((step for _, step in timed), key=len, reverse=True)  # its phases are in order of execution
    timings = dict.fromkeys(
        name for step in by_num_phases for name in step if name.startswith("time/") and name.endswith("_s")
    )
    names = [name for name in timings if name != "time/step_s"]
    parts = _intervals(timed, limit) if timed else []

    def mean(part: list[tuple[float, Mapping[str, float]]], name: str) -> float:
        return sum(value for _, step in part if math.isfinite(value := step.get(name, 0.0))) / len(part)

    bars = [{name: mean(part, name) for name in names} for part in parts]
    remaining = [max(0.0, mean(part, "time/step_s") - sum(bar.values())) for part, bar in zip(parts, bars, strict=True)]
    seconds = {name[5:-2].replace("_", " "): [_round_value(bar[name]) for bar in bars] for name in names}
    return {
        "from": [part[0][0] for part in parts],
        "to": [part[-1][0] for part in parts],
        "seconds": seconds | {"rest": [_round_value(value) for value in remaining]},
    }


def evaluations(folder: Path, last: int, budget: float, source: Source = _inline) -> dict[str, Any]:
    """Return the prompts of the last evaluation and their samples at each evaluation, within `budget` bytes.

    Steps after `last` are left out, because a resumed run will reach them again.
    """
    stored: list[tuple[int, dict[Any, Shown]]] = []
    references: dict[Any, list[Shown]] = {}
    for step, path in step_folders(folder / "eval", last):
        rows = _entries(path / "rows.json", ROW)
        stored.append((step, {(row["prompt"], row["seed"]): (_files(path, row), row) for row in rows}))
        references = {(row["prompt"], row["seed"]): _references(path, row) for row in rows}
    kept_evals, keys = stored, list(references)

    def total_size() -> int:
        shown = [rows[key] for _, rows in kept_evals for key in keys if key in rows]
        return sum(_size(files) for files, _ in (*shown, *(reference for key in keys for reference in references[key])))

    while keys and total_size() > budget:
        count = len(kept_evals) - 1
        if count >= MIN_EVALS or (len(keys) <= MIN_PROMPTS and count > 1):  # the first, the last and some between
            kept_evals = [stored[round(i * (len(stored) - 1) / (count - 1))] for i in range(count)]
        else:
            keys = keys[:-1]
    evals = [
        {"step": step, "pictures": [_picture(*rows[key], source) if key in rows else None for key in keys]}
        for step, rows in kept_evals
    ]
    prompts = [
        {
            "text": key[0][:MAX_TEXT],
            "seed": key[1],
            "references": [_drawing(*reference, source) for reference in references[key]],
        }
        for key in keys
    ]
    return {"prompts": prompts, "evals": evals}


def groups(folder: Path, last: int, budget: float, source: Source = _inline) -> list[dict[str, Any]]:
    """Return best and worst samples of the latest groups up to step `last`, latest first, within `budget` bytes."""
    shown: list[dict[str, Any]] = []
    for step, path in reversed(step_folders(folder / "samples", last)):
        for group in _entries(path / "groups.json", GROUP):
            rows = [_check_entry(row, ROW, path / "groups.json") for row in group["shown"]]
            files = [_files(path, row) for row in rows]
            references = _references(path, rows[0]) if rows else []
            budget -= sum(map(_size, [*files, *(files_of_sample for files_of_sample, _ in references)]))
            if budget < 0 or len(shown) == MAX_GROUPS:
                return shown
            pictures = [
                _picture(files_of_sample, row, source) for files_of_sample, row in zip(files, rows, strict=True)
            ]
            rewards = [_score(reward) for reward in group["rewards"]]
            entry = {"step": step, "prompt": group["prompt"][:MAX_TEXT], "rewards": rewards, "shown": pictures}
            shown.append(entry | {"references": [_drawing(*reference, source) for reference in references]})
    return shown


def _intervals(points: Sequence[tuple[float, Any]], count: int) -> list[list[tuple[float, Any]]]:
    """Split points (x, ...) into `count` equal intervals of x, without empty ones, or single points if they fit."""
    if len(points) <= count:
        return [[point] for point in points]
    first, last = points[0][0], points[-1][0]
    parts: list[list[tuple[float, Any]]] = [[] for _ in range(count)]
    for point in points:
        parts[min(count - 1, int((point[0] - first) / (last - first) * count))].append(point)
    return [part for part in parts if part]


def _picture(files: Mapping[str, Path], row: Mapping[str, Any], source: Source) -> dict[str, Any]:
    details = {name[:60]: _text(value) for name, value in list(row["details"].items())[:MAX_DETAILS]}
    answer = {"answer": _text(row["answer"], MAX_ANSWER)} if row.get("answer") is not None else {}
    abstained = row["abstained"] and _text(row["abstained"])
    score = {"reward": _score(row["reward"]), "details": details, "abstained": abstained}
    return _drawing(files, row, source) | answer | score


def _drawing(files: Mapping[str, Path], row: Mapping[str, Any], source: Source) -> dict[str, Any]:
    sources = {name: source(file) for name, file in files.items()}
    return {"src": sources.pop("file", None), "size": row["size"], "details": {}, **sources}


def _references(folder: Path, row: Mapping[str, Any]) -> list[Shown]:
    """Return the references of a sample."""
    entries = [_check_entry(entry, REFERENCE, folder) for entry in row["references"]]
    return [(_files(folder, entry), entry) for entry in entries]


def _text(value: object, max_length: int = MAX_TEXT) -> str:
    """Return a number with five significant digits, or a text normalized to printable characters."""
    if isinstance(value, float):
        return f"{value:.5g}"
    text = unicodedata.normalize("NFKC", str(value)[:max_length])
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)


def _score(value: object) -> float | None:
    return _round_value(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _round_value(value: float) -> float:
    """Round to five significant digits, more than a screen can show."""
    return float(f"{value:.5g}")


def _files(folder: Path, row: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of a sample: image or video, the strip of a video's frames, the sound."""
    files = {name: folder / Path(row[name]).name for name in ("file", "strip", "sound") if row.get(name)}
    for file in files.values():  # names contain no folder
        if file.suffix not in MEDIA_TYPES:
            raise ValueError(f"{file} must be one of the kinds {', '.join(MEDIA_TYPES)}")
    return files


def _size(files: Mapping[str, Path]) -> int:
    """Return the size in the page: base64 takes 4/3 of the file; video and sound count less."""
    plays = ("sound", "file") if "strip" in files else ("sound",)
    return sum(file.stat().st_size * 4 // 3 // (PLAYED if name in plays else 1) for name, file in files.items())


def _entries(path: Path, kinds: Kinds) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, or of a file of JSON lines, which may be missing.

    Raises:
        ValueError: an object does not have the form written by `omni_rl.report.folder`.
    """
    if path.suffix == ".jsonl":
        lines = read_jsonl(path) if path.exists() else []
        return [_check_entry(entry, kinds, f"{path}, line {n}") for n, entry in enumerate(lines, start=1)]
    entries = _parse_file(path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must be a list, got {type(entries).__name__}. {REMEDY}")
    return [_check_entry(entry, kinds, f"{path}, entry {n}") for n, entry in enumerate(entries, start=1)]


def _parse_file(path: Path) -> Any:
    """Return the value of a JSON file."""
    try:
        return parse_json(read_regular(path))
    except ValueError as exc:
        raise ValueError(f"{path}: not valid JSON ({exc}). {REMEDY}") from exc


def _check_entry(entry: object, kinds: Kinds, place: object) -> dict[str, Any]:
    """Return the entry after checking that it is an object with a value of the right type for each name."""
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: must be an object, got {type(entry).__name__}. {REMEDY}")
    for name, kind in kinds.items():
        if not isinstance(entry.get(name), kind):
            raise ValueError(f"{place}: {name} is {reprlib.repr(entry.get(name))}. {REMEDY}")
    return entry


def read_now(folder: Path) -> dict[str, Any] | None:
    """Return the current activity of a run, `text`, and its time `at`, if the run is active or was killed.

    Raises:
        ValueError: the file does not have the form written by `omni_rl.report.folder.write_now`.
    """
    path = folder / "now.json"
    try:
        entry = _check_entry(_parse_file(path), NOW, path)
    except FileNotFoundError:  # the run may have ended meanwhile
        return None
    return {"text": _text(entry["text"]), "at": entry["at"]}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings of a run, empty without config.toml.

    Raises:
        ValueError: the file is not valid TOML.
    """
    path = folder / "config.toml"
    try:
        return tomllib.loads(read_regular(path).decode()) if path.exists() else {}
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path}: not valid TOML: {exc}") from exc
