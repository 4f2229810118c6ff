"""A scorer that goes away while the trainer runs: it comes back, or is gone for good."""

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from apps.app_lives import TINY
from helpers import sampled
from omni_reward.serving import serving
from omni_rl.run import loop
from omni_rl.run.world import World
from omni_rl.settings.fields import change
from omni_train.files import load_metrics
from trainer_runs import train, unclocked

import train_flowgrpo as app

SCORER = """
def score(media, prompts, meta):
    return [float(image.mean()) / 255 for image in media["image"]]
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """`server()` starts a reward server on a port that stays the same; all are stopped at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.txt").write_text('a blue sign that says "AB"\n')
    (tmp_path / "bright.py").write_text(SCORER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:

        def start():
            serving_there = serving(f"python:{tmp_path}/bright.py:score", "--port", str(port))
            return stack.enter_context(serving_there).process

        start.url = f"http://127.0.0.1:{port}"
        yield start


def settings(server, **changes):
    """Of a run with two requests a step, and checkpoints only where a test wants them."""
    return change(TINY, batch_size=4, scorer_url=server.url, **changes)


def lose_at(monkeypatch, process, step, then=lambda: None):
    """Kills the server when the trainer comes to `step`, and calls `then` a moment later."""
    sample = app.sample

    def sample_without_scorer(run, *args, **options):
        if run.version == step and process.poll() is None:
            process.kill()
            process.wait()
            threading.Timer(1.0, then).start()
        return sample(run, *args, **options)

    monkeypatch.setattr(app, "sample", sample_without_scorer)


def test_a_scorer_that_comes_back_is_waited_for(server, monkeypatch):
    lose_at(monkeypatch, server(), step=1, then=server)
    lines = train(app, settings(server, train_steps=3, eval_every=3, scorer_timeout_s=60.0))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["reward/abstained_ratio"] == 0 for line in lines[1:])


def test_what_a_lost_scorer_did_not_score_is_masked_when_told(server, monkeypatch):
    lose_at(monkeypatch, server(), step=1, then=server)
    # Both requests of step 1 fail, and by step 2 the server is back.
    args = settings(server, train_steps=3, eval_every=3, scorer_timeout_s=0.8, scorer_on_failure="mask_group")
    sample = app.sample

    def sample_later(run, *args, **options):
        time.sleep(4 * (run.version == 2))
        return sample(run, *args, **options)

    monkeypatch.setattr(app, "sample", sample_later)
    lines = train(app, args)
    assert [line.get("reward/abstained_ratio") for line in lines] == [None, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("adv_std", sampled(["batch", "group"], 1))
def test_a_scorer_gone_for_good_ends_the_run_with_a_checkpoint_and_an_error(server, monkeypatch, tmp_path, adv_std):
    """Before an update, and in one that has begun by group."""
    process = server()
    lose_at(monkeypatch, process, step=2)
    args = settings(server, train_steps=4, eval_every=4, save_every=9, scorer_timeout_s=2.0, adv_std=adv_std)
    with pytest.raises(RuntimeError, match=r"phase reward_wait: RewardError: scores of rank 0: .*refused"):
        app.main(args, World.join(args))
    assert Path("runs/run/checkpoints/step-00000002").is_dir()  # though save_every has not come round
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    server()
    lines = train(app, change(args, scorer_timeout_s=60.0))
    assert [line["step"] for line in lines] == list(range(5))


def test_a_scorer_lost_in_an_evaluation_costs_no_steps_and_the_run_goes_on_with_it(server, monkeypatch):
    args = settings(server, train_steps=3, eval_every=2, save_every=9, scorer_timeout_s=2.0)
    process, hold_out = server(), loop.evaluate_held_out

    def hold_out_without_scorer(run, done, *others):
        if done == 2:
            process.kill()
            process.wait()
        return hold_out(run, done, *others)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate_held_out", hold_out_without_scorer)
        with pytest.raises(RuntimeError, match=r"phase eval: RewardError: "):
            app.main(args, World.join(args))
    assert Path("runs/run/checkpoints/step-00000002").is_dir()
    (*_, broken) = load_metrics("runs/run/metrics.jsonl")
    assert broken["step"] == 2
    assert not {name for name in broken if name.startswith("eval/")}
    server()
    lines = train(app, change(args, scorer_timeout_s=60.0))
    peace = train(app, change(args, name="peace", scorer_timeout_s=60.0))
    assert unclocked(lines) == unclocked(peace)
    assert lines[2]["perf/forwards"] == peace[2]["perf/forwards"] > 0
