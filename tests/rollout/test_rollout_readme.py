"""The example of the package's README runs, and what it tells to install is enough for plain pip."""

import re
import tomllib

import pytest
from helpers import REPO
from packaging.requirements import Requirement

PAGES = [*REPO.glob("packages/*/README.md"), *REPO.glob("docs/*.md"), REPO / "README.md"]
INSTALLS = sorted(
    {line.strip() for page in PAGES for line in re.findall(r"pip install [^`\n]*", page.read_text("utf-8"))}
)


def test_the_example_draws_replays_and_trains(monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    text = (REPO / "packages" / "omni-rollout" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(code.splitlines()) <= 34
    exec(code, {})
    shapes, before, after = capsys.readouterr().out.splitlines()[-3:]
    assert shapes == "images (2, 32, 96, 3) kept steps (2, 2, 16, 4, 12)"
    assert before == "ratio [1.0, 1.0]"
    liked, disliked = map(float, re.findall(r"\d+\.\d+", after))
    assert liked > 1 > disliked


@pytest.mark.parametrize("line", [line for line in INSTALLS if "./packages/" in line and "./packages/*" not in line])
def test_a_line_that_installs_a_folder_names_the_folders_that_it_stands_on(line):
    named = set(re.findall(r"\./packages/([\w-]+)", line))
    for name in named:
        project = tomllib.loads((REPO / "packages" / name / "pyproject.toml").read_text("utf-8"))["project"]
        needed = {Requirement(text).name for text in project["dependencies"]}
        assert {sibling for sibling in needed if sibling.startswith("omni-")} <= named, line
