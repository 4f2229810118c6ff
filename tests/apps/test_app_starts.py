"""What a run starts from and what it may not lose: given weights, a reference, a scorer that fails in an evaluation."""

from pathlib import Path

import pytest
from helpers import sampled
from omni_reward import RewardError
from omni_rl.flow.sampling import evaluate_set
from omni_rl.run.failures import BrokenRunError
from omni_rl.run.run import Run
from omni_rl.settings.fields import change
from trainer_runs import recipe, tiny, train

import train_dpo
import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=4, batch_size=4, lr=1e-3, optim_lr_scheduler_type="constant",
)  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.mark.parametrize("trained", sampled(["full", "lora"], 1))
def test_the_reference_is_the_policy_that_training_starts_from(here, bright_url, trained):
    """Also where that is another run's: the first pairs have no margin, and the first steps no KL."""
    trained = LORA if trained == "lora" else {}
    train(app, change(TINY, scorer_url=bright_url, name="first", **trained))
    start = {"scorer_url": bright_url, "init_weights": "runs/first/weights", "train_steps": 1, "eval_every": 1}
    pairs = tiny(recipe(train_dpo, "tiny-signs"), prompts_per_step=2, group_size=4, batch_size=4)
    assert train(train_dpo, change(pairs, name="pairs", **start, **trained))[1]["policy/margin"] == 0.0
    assert train(app, change(TINY, name="kl", kl_coef=0.1, **start, **trained))[1]["policy/kl"] == 0.0


def test_weights_that_changed_since_the_run_began_are_noticed(here, bright_url):
    train(app, change(TINY, scorer_url=bright_url, name="first", **LORA))
    args = change(TINY, scorer_url=bright_url, name="second", init_weights="runs/first/weights", save_every=1, **LORA)
    train(app, change(args, train_steps=1))
    train(app, change(TINY, scorer_url=bright_url, name="first", train_steps=4, **LORA))
    with pytest.raises(ValueError, match="a file of the weights has other contents"):
        train(app, args)


def test_a_scorer_lost_in_an_evaluation_saves_no_step_under_another_number(here, bright_url, monkeypatch):
    calls = []

    def lose(run: Run, held):
        calls.append(run.version)
        if run.version == 2:
            raise RewardError("the scorer is gone")
        return evaluate_set(run, held)

    unbroken = train(app, change(TINY, scorer_url=bright_url, name="unbroken", train_steps=4))
    monkeypatch.setattr(app, "evaluate_set", lose)
    with pytest.raises(BrokenRunError, match="phase eval: RewardError: the scorer is gone"):
        train(app, change(TINY, scorer_url=bright_url, name="broken", train_steps=4, save_every=1))
    assert calls == [0, 2]
    assert [path.name for path in sorted((here / "runs/broken/checkpoints").iterdir())][-1] == "step-00000002"
    monkeypatch.undo()
    monkeypatch.chdir(here)
    resumed = train(app, change(TINY, scorer_url=bright_url, name="broken", train_steps=4, save_every=1))
    for line, other in zip(unbroken, resumed, strict=True):
        assert line.get("policy/loss") == other.get("policy/loss")
        assert line.get("eval/reward") == other.get("eval/reward")


def test_a_scorer_lost_in_the_first_evaluation_leaves_no_checkpoint(here, bright_url, monkeypatch):
    def lose(run: Run, held):
        raise RewardError("the scorer is gone")

    monkeypatch.setattr(app, "evaluate_set", lose)
    for _ in range(2):
        with pytest.raises(BrokenRunError, match="phase eval: RewardError: the scorer is gone"):
            train(app, change(TINY, scorer_url=bright_url))
    assert not list((here / "runs").glob("*/checkpoints/*"))


@pytest.mark.parametrize("name", ["best", "weights"])
@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_what_a_run_replaces_must_be_a_folder_of_its_own(here, bright_url, name, kind):
    path = Path("runs/run") / name
    path.parent.mkdir(parents=True)
    (here / "other").mkdir()
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(here / ("other" if kind == "link" else "nothing"))
    with pytest.raises(ValueError, match=rf"^runs/run/{name} must be a folder and no link: move it away$"):
        train(app, change(TINY, scorer_url=bright_url, name="run"))
    assert path.is_symlink() or path.read_text() == "mine"


@pytest.mark.parametrize("name", ["a" * 5000, "b/" + "a" * 300, "/".join(["a" * 200] * 6), "\u00e4" * 128])
def test_a_name_that_no_disk_takes_is_refused_before_anything_is_looked_for(name):
    rule = r"^--name must have at most 255 bytes between slashes and 1,000 in all, got \d+$"
    with pytest.raises(ValueError, match=rule):
        app.check_args(change(TINY, scorer_url="http://127.0.0.1:9", name=name))
