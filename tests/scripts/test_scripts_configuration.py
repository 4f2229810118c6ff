"""docs/configuration.md has every setting of every trainer, and is up to date."""

import importlib

import configuration
import pytest
from helpers import REPO
from omni_rl.settings.fields import leaves, values_of

TRAINERS = sorted(path.stem for path in (REPO / "apps").glob("train_*.py"))


def test_the_page_is_up_to_date():
    assert configuration.PAGE.read_text("utf-8") == configuration.page()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_settings_are_those_of_the_dataclass(trainer):
    args = importlib.import_module(trainer).Args
    read = configuration.settings((REPO / "apps" / f"{trainer}.py").read_text())
    assert sorted(setting.name for setting in read) == sorted(leaves(args))
    for setting in read:
        default = values_of(args)[setting.name]
        words = {True: "on", False: "off", "None": "none", "": "", (): ""}
        told = str(default).removeprefix(f"{REPO}/")
        assert setting.default in (words.get(default), words.get(told), f"`{told}`"), setting
        assert len(setting.meaning) > 3, setting
