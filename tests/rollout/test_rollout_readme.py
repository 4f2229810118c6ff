"""The example of the package's README runs."""

import re

from helpers import REPO


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    text = (REPO / "packages" / "omni-rollout" / "README.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    assert "torch.Size([4, 32, 96, 3]) torch.Size([4, 2, 16, 4, 12]) torch.Size([4, 2])" in capsys.readouterr().out
