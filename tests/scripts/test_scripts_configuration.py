"""docs/configuration.md has every setting of every trainer, and is up to date."""

import importlib
import subprocess
import sys

import configuration
import pytest
from helpers import REPO
from omni_rl.settings.args import MediaArgs
from omni_rl.settings.fields import leaves

TRAINERS = sorted(path.stem for path in (REPO / "apps").glob("train_*.py"))


def test_the_page_is_up_to_date():
    command = [sys.executable, str(REPO / "scripts" / "configuration.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_a_page_that_is_not_up_to_date_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(configuration, "ROOT", tmp_path)
    monkeypatch.setattr(configuration, "PAGE", tmp_path / "configuration.md")
    monkeypatch.setattr(sys, "argv", ["configuration.py", "--check"])
    (tmp_path / "apps").mkdir()
    (tmp_path / "apps" / "train_x.py").write_text('"""X.\n"""\nclass Args:\n    lr: float = 1.0  # Rate\n\nx = 1\n')
    assert configuration.main() == 1
    assert "configuration.md is not up to date" in capsys.readouterr().err
    (tmp_path / "configuration.md").write_text(configuration.page())
    assert configuration.main() == 0


@pytest.mark.parametrize("trainer", TRAINERS)
def test_settings_are_those_of_the_dataclass(trainer):
    args = importlib.import_module(trainer).Args
    read = configuration.settings((REPO / "apps" / f"{trainer}.py").read_text())
    assert [setting.name for setting in read] == list(leaves(args))
    for setting, field in zip(read, leaves(args).values(), strict=True):
        words = {True: "on", False: "off", "None": "none", "": "", (): ""}
        told = str(field.default).removeprefix(f"{REPO}/")
        assert setting.default in (words.get(field.default), words.get(told), f"`{told}`"), setting
        assert len(setting.meaning) > 3, setting


def test_a_row_has_the_default_the_other_words_and_the_comment_with_its_bars():
    source = (
        "class Args:\n    # Run\n    a: int | None = None  # One |x|\n"
        '    b: Literal["t", "u", "v"] = "u"  # Two # fmt: skip\n    c: Literal["u"] = "u"  # Three\n'
    )
    first, second, third = configuration.settings(source)
    assert first.row() == r"| `a` | none | One \|x\| |"
    assert second.row() == "| `b` | `u` or `t`, `v` | Two |"
    assert third.row() == "| `c` | `u` | Three |"


def test_what_all_trainers_share_comes_from_their_base_and_may_be_told_otherwise():
    shared = configuration.settings("class Args(MediaArgs):\n    # Run\n    lr: float = 1.0  # Another rate\n")
    plain = configuration.settings("class Args(MediaArgs):\n    pass\n")
    assert [setting.name for setting in shared] == list(leaves(MediaArgs))
    assert [a.name for a, b in zip(shared, plain, strict=True) if a != b] == ["lr"]
    titles = {"tracking", "Run", "Model", "Data", "Sampling", "Engine", "Scorer", "Optimizer"}
    assert {setting.group for setting in plain} == titles
