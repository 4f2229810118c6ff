"""The package's README and its public surface."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

README = Path(__file__).parents[2] / "packages" / "omni-losses" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def run(word: str) -> dict[str, Any]:
    """What the one example that imports a name leaves behind; every example stands alone."""
    torch.manual_seed(0)
    (code,) = [code for code in EXAMPLES if re.search(rf"^from omni_losses import .*\b{word}\b", code, re.MULTILINE)]
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    return names


def test_advantages(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("group_advantages")
    assert names["advantages"][2:].tolist() == [0.0, 0.0]
    assert names["keep"].tolist() == [0, 1, 2, 3]
    assert names["both"][2] > 0 > names["both"][3]
    assert "0.5" in capsys.readouterr().out


def test_one_denoising_step(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("flow_dppo_loss")
    assert names["mean"].grad.abs().sum() > 0
    assert "ratio_max_dev=0.0e+00" in capsys.readouterr().out


def test_correction() -> None:
    names = run("rollout_weights")
    assert names["weights"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert names["first_step"].loss.item() == -0.5


def test_the_forward_process() -> None:
    names = run("diffusion_nft_loss")
    assert names["velocity"].grad.abs().sum() > 0
    assert names["decay"] == pytest.approx(0.12)


def test_pairs() -> None:
    names = run("best_worst_pairs")
    assert (names["win"], names["lose"]) == (1, 3)
    assert names["velocity"].grad.abs().sum() > 0


def test_tokens() -> None:
    names = run("gspo_loss")
    assert (names["log_prob"].grad[1, 2:] == 0).all()
    assert names["gspo"].metrics["tokens_mean"] == 3.5
    assert names["advantages"].tolist() == [0.0, -1.0]  # the first one's five tokens are as many as there may be
    assert names["dapo"].loss.item() == pytest.approx(2 / 7)  # two tokens of seven, with advantage -1
    assert names["cispo"].loss.requires_grad


def test_gradients_of_a_reward_and_of_a_teacher() -> None:
    names = run("srpo_loss")
    assert names["velocity"].grad.abs().sum() > 0
    assert names["distilled"].loss > 0
