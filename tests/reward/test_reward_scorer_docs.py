"""The page about scorers and the scripts that start them name what there is, and what they show runs."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omni_reward import Scorer
from omni_reward.scorers import SCORERS
from omni_reward.scorers.aesthetic import load_aesthetic
from omni_reward.scorers.clap import load_clap
from omni_reward.scorers.clip import load_clip, load_pickscore
from omni_reward.scorers.editreward import load_editreward
from omni_reward.scorers.geneval import load_geneval
from omni_reward.scorers.hpsv2 import load_hpsv2
from omni_reward.scorers.hpsv3 import load_hpsv3
from omni_reward.scorers.imagebind import load_imagebind
from omni_reward.scorers.imagereward import load_imagereward
from omni_reward.scorers.videoalign import load_videoalign

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scorers.md").read_text()
SCRIPTS = sorted(path for path in (ROOT / "scripts/scorers").glob("*.py") if path.stem in SCORERS)
NETWORKS: dict[str, Callable[..., Scorer]] = {
    "aesthetic": load_aesthetic,
    "clap": load_clap,
    "clip": load_clip,
    "editreward": load_editreward,
    "geneval": load_geneval,
    "hpsv2": load_hpsv2,
    "hpsv3": load_hpsv3,
    "imagebind": load_imagebind,
    "imagereward": load_imagereward,
    "pickscore": load_pickscore,
    "videoalign": load_videoalign,
}


def script_settings(path: Path) -> dict[str, Any]:
    """The metadata at the top of a script, read as its specification (PEP 723) says."""
    [block] = re.findall(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", path.read_text())
    lines = block[0].splitlines()
    return tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


def test_the_python_of_the_page_runs() -> None:
    parts, own, others, groups = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(parts, names)
    assert names["table"].shape == (3, 2)
    assert torch.isfinite(names["advantages"]).all()
    exec(own, names)
    assert names["brightness"]({"image": np.full((2, 4, 4, 3), 51)}, [], []).tolist() == [0.2, 0.2]
    exec(others, names)
    video = np.zeros((2, 3, 4, 4, 3), np.uint8)
    video[1, 1] = 51  # there and back
    for name, kind, values, wanted in (
        ("moving", "video", video, [0, 0.2]),
        ("loud", "audio", np.full((2, 9, 2), 0.5, np.float32), [0.5, 0.5]),
        ("brief", "text", np.array(["ab", "a"]), [-2, -1]),
    ):
        scorer = names[name]
        found = [score.value for score in scorer({kind: values}, ["a"] * 2, [{}] * 2)]
        assert (scorer.media, found) == ((kind,), wanted)
    exec(groups, names)
    images = np.stack([np.full((4, 4, 3), value) for value in (9, 7, 8)])
    assert [score.value for score in names["brightest"]({"image": images}, ["a"] * 3, [{}] * 3)] == [1, 0, 0.5]


def test_every_network_has_a_script() -> None:
    assert [path.stem for path in SCRIPTS] == sorted(NETWORKS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_asks_for_its_own_scorer_and_no_other(path: Path) -> None:
    settings = script_settings(path)
    assert settings["dependencies"] == [f"omni-reward[server,{path.stem}]"]
    source = settings["tool"]["uv"]["sources"]["omni-reward"]["path"]
    assert (path.parent / source / "pyproject.toml").is_file()
    assert f'"--scorer", "{path.stem}"' in path.read_text()
    assert f"scripts/scorers/{path.name}" in path.read_text()


def test_a_script_is_the_server() -> None:
    command = [sys.executable, str(SCRIPTS[0]), "--port", "70000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "omni_reward.server: error: --port must be 0 to 65535, got 70000\n"
