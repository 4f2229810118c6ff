"""The loop of docs/api.md is the trainer's own: the same weights, to the bit."""

import re
from pathlib import Path

from helpers import REPO
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from trainer_runs import exported, recipe, tiny, train

import train_flowgrpo as app

FLAGS = '["--preset", "tiny-signs", "--name", "mine"]'


def test_the_loop_of_the_page_trains_as_the_trainer_does(here, bright_url, capfd):
    args = tiny(
        recipe(app, "tiny-signs"), name="mine", scorer_url=bright_url, window_low=0, window_high=None,
        prompts_per_step=2, group_size=4, batch_size=4, train_steps=2,
    )  # fmt: skip
    Path("mine.toml").write_text(to_toml(args))
    (code,) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "api.md").read_text(), re.DOTALL)
    assert code.count(FLAGS) == 1
    exec(code.replace(FLAGS, '["--config", "mine.toml"]'), {})
    printed = re.findall(r"^(0\.\d+) -?[\d.e-]+$", capfd.readouterr().out, re.MULTILINE)
    lines = train(app, change(args, name="theirs"))
    assert [float(reward) for reward in printed] == [line["reward/mean"] for line in lines[1:]]
    ours, theirs = exported("mine"), exported("theirs")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
