"""The report as a self-contained HTML file that loads nothing from the network or disk.

Data from files is JSON without `<` in a script element that browsers do not run. The page's script reads it and inserts
it as text; a content security policy blocks all other scripts.
"""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from omni_train.files import write_atomically

from omni_rl.report.data import charts, run_data


def write_report(folder: str | Path) -> Path:
    """Write `folder`/report.html from the run folder, and return its path.

    Raises:
        ValueError: `folder` has no metrics, or a file in it cannot be read.
    """
    path = Path(folder) / "report.html"
    write_atomically(path, page([run_data(Path(folder))]))
    return path


def write_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page that compares the curves, images and settings of several runs.

    Raises:
        ValueError: there are fewer than two folders, two have the same name, or one cannot be read.
    """
    runs = [run_data(Path(folder), num_runs=len(folders)) for folder in folders]
    names = [run["name"] for run in runs]
    if len(set(names)) < max(2, len(names)):
        raise ValueError(f"folders must be two or more of different names, got {names}")
    write_atomically(path, page(runs))
    return Path(path)


def page(runs: Sequence[Mapping[str, Any]], *, live: bool = False) -> str:
    """Return the HTML of a page of one or several runs.

    live: True if a server generates it on request and serves the images.
    """
    title = " and ".join(run["name"] for run in runs)
    data = {"runs": runs, "charts": charts(runs), "live": live}
    return _document(title, data, "page.js", "'self' data:" if live else "data:")


def list_page(title: str) -> str:
    """Return the HTML of a page that requests the list of runs from its server."""
    return _document(title, {"title": title}, "list.js", "data:", connect="'self'")


def _document(title: str, data: object, script_name: str, media: str, connect: str = "'none'") -> str:
    resources = files("omni_rl.report")
    style = resources.joinpath("page.css").read_text(encoding="utf-8")
    names = ("charts.js", "words.js", script_name)
    script = "".join(resources.joinpath(name).read_text(encoding="utf-8") for name in names)
    parts = {
        "policy": f"default-src 'none'; img-src {media}; media-src {media}; connect-src {connect}; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "title": html.escape(title),
        "style": style,
        "data": embed(data),
        "script": script,
    }
    template = resources.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)  # one pass: parts are not searched


def embed(data: object) -> str:
    """Return JSON that is safe in a script element, because it cannot end the element or begin another."""
    text = json.dumps(_stringify_non_finite(data), allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _stringify_non_finite(value: Any) -> Any:
    """Return the value with non-finite numbers as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _stringify_non_finite(item) for name, item in value.items()}
    return [_stringify_non_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
