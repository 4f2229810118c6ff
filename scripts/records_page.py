"""Compare the records of docs/records with published scores: the table of docs/reproduce.md, one image per recipe.

    python scripts/records_page.py            writes both
    python scripts/records_page.py --check    lists the files that are not up to date; the exit code is then 1

docs/records/published.toml has the published scores, with their sources.
"""

import hashlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leaderboard_page import INK, fill, markdown
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
Records = Mapping[str, Mapping[str, Any]]  # by file name


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a folder by file name."""
    return {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in sorted(folder.glob("*.json"))
        if path.stem != "schema"
    }


def table(records: Records, published: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row per record and per recipe with only published scores, then the images."""
    lines = [("recipe", "published", "record", "score", "hours", "peak memory, MB", "ranks", "commit"), ["---"] * 8]
    for recipe in sorted({*published, *(record["recipe"] for record in records.values())}):
        told = published.get(recipe, {})
        known = f"{told['scores'][0]} to {told['scores'][-1]}: {told['source']}" if told else "nothing"
        own = [(name, record) for name, record in records.items() if record["recipe"] == recipe]
        lines += [
            (
                f"`{recipe}`",
                known,
                f"[{name}](records/{name}.json)",
                " to ".join(f"{curve_of(record, told)[i][1]:.3f}" for i in (0, -1)),
                f"{record['hours']:.2f}",
                f"{record['memory_mb']['perf/peak_memory_mb']:,.0f}",
                f"{record['ranks']} x {record['device_name'] or record['device']}",
                re.sub(r"(?<=^.{12})[^+]*", "", record["commit"]),
            )
            for name, record in own
        ] or [(f"`{recipe}`", known, "none yet", *[""] * 5)]
    shown = dict.fromkeys(record["recipe"] for record in records.values())
    return markdown(lines) + "".join(f"\n![Records of {name}](images/records/{picture(name)})\n" for name in shown)


def pictures(records: Records, published: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return an SVG for each recipe with a record, by file name; published scores are dashed."""
    found: dict[str, str] = {}
    for recipe in sorted({record["recipe"] for record in records.values()}):
        figure, own = (
            Figure(figsize=(6, 3), layout="constrained"),
            [r for r in records.values() if r["recipe"] == recipe],
        )
        axes = figure.subplots()
        for record in own:
            axes.plot(
                *zip(*curve_of(record, published.get(recipe, {})), strict=True),
                marker="o",
                label=f"record, {record['started'][:10]}",
            )
        if told := published.get(recipe):
            last = max(curve_of(record, told)[-1][0] for record in own)
            axes.plot(
                told.get("steps", [0, last]), told["scores"], "--", color=INK, label=f"published: {told['source']}"
            )
        axes.set(xlabel="training steps", ylabel="held-out score", title=recipe)
        axes.legend(frameon=False)
        figure.savefig(file := io.StringIO(), format="svg", metadata={"Date": None})
        found[picture(recipe)] = f"{file.getvalue()}<!-- {digest(own, told)} -->\n"
    return found


def curve_of(record: Mapping[str, Any], told: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the steps and scores of a record to compare with the published ones."""
    curve: list[tuple[int, float]] = record["curves"][told.get("curve", "eval/reward")]
    return curve


def picture(recipe: str) -> str:
    """Return the file name of a recipe's image."""
    return f"{recipe.replace('/', '-')}.svg"


def digest(*data: object) -> str:
    """Return the SHA-256 of an image's data; the image's bytes depend on the version of matplotlib."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def mark(text: str) -> str:
    """Return the digest in an image, or the whole text of a page."""
    found = re.search("<!-- ([0-9a-f]{64}) -->", text)
    return found[1] if found else text


def main(*, check: bool) -> int:
    """Write the files that differ, or with `check` list them; return the exit code."""
    records, published = (
        read_records(DOCS / "records"),
        tomllib.loads((DOCS / "records" / "published.toml").read_text("utf-8")),
    )
    page = DOCS / "reproduce.md"
    files = {page: fill(page.read_text("utf-8"), {"records": table(records, published)})}
    files |= {DOCS / "images" / "records" / name: text for name, text in pictures(records, published).items()}
    stale = [path for path, text in files.items() if not path.exists() or mark(path.read_text("utf-8")) != mark(text)]
    for path in stale:
        print(f"{'stale' if check else 'wrote'} {path.relative_to(DOCS)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], "utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
