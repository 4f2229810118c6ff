"""Steps that are sampled some updates before their own, so that their scores come meanwhile: `--draw-ahead`."""

import json
import math
import os
import random
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from apps import app_lives as lives
from helpers import TEST_SEED, sampled
from omni_reward import RewardError
from omni_reward.serving import serving_in_thread
from omni_rl.flow.batches import TrainBatch
from omni_rl.run.alarms import Watch
from omni_rl.run.run import Run, Step
from omni_rl.settings.args import next_milestone
from omni_rl.settings.fields import build, change
from omni_rollout import replay
from records import record
from trainer_runs import (
    keep_gradients,
    lone_run,
    recipe,
    rollout,
    tiny,
    train,
    unclocked,
    undocumented,
    write_eval_prompts,
)
from trainer_table import cases, settings

import train_dpo
import train_flowgrpo
import train_gspo
import train_unigrpo

AHEAD = change(
    lives.TINY, draw_ahead=1, correction_level="step", group_size=2, batch_size=4, width=32, train_steps=5,
    save_every=3, eval_every=5, eval_first=False,
)  # fmt: skip
ENDS = {"train_steps": 3, "save_every": 3, "eval_every": 3, "eval_first": False, "draw_ahead": 1}
FRESH = {"correction_level": "step", "num_inner_epochs": 1, "num_minibatches": 1, "timestep_fraction": 1.0}
OWN = {"flowgrpo": FRESH | {"optim_lr_scheduler_type": "constant"}, "gspo": {"rounds": 1}}


def small(name, url, **changes):
    """Settings of a trainer for three steps, the second and the third of which are sampled one step ahead."""
    return settings(name, url, **(ENDS | {"group_size": 2} | OWN.get(name, {}) | changes))


@pytest.mark.parametrize("case", cases("samples a step ahead"))
def test_a_trainer_samples_a_step_ahead_and_logs_how_old_samples_are(here, bright_url, case):
    name = case[0]
    lines = train(*small(name, bright_url))
    steps = [line for line in lines if line["step"]]
    assert [line["policy/staleness"] for line in steps] == [0, 1, 1]
    assert all(line["policy/grad_norm"] > 0 for line in steps)
    assert undocumented(lines) == set()
    gaps = [line.get("policy/rollout_gap") for line in steps]
    if name in ("flowgrpo", "gspo", "unigrpo"):  # whose samples have log-probs
        assert gaps[0] < 1e-4 < min(gaps[1:])


def note_events(monkeypatch, app, events):
    """Note which step is sampled, and which is trained."""
    roll_out, update = app.roll_out, app.update

    def noted_roll_out(run, step):
        events.append(f"sample {step.number} by {step.version}")
        return roll_out(run, step)

    def noted_update(run, step, *others):
        events.append(f"train {step.number}")
        return update(run, step, *others)

    monkeypatch.setattr(app, "roll_out", noted_roll_out)
    monkeypatch.setattr(app, "update", noted_update)


ORDERS = {
    0: "s0 t0 s1 t1 s2 t2 s3 t3 s4 t4",
    1: "s0 s1 t0 s2 t1 t2 s3 s4 t3 t4",
    2: "s0 s1 s2 t0 t1 t2 s3 s4 t3 t4",
}


@pytest.mark.parametrize("ahead", sampled(ORDERS, 1))
def test_no_samples_wait_where_a_run_is_saved_or_evaluated(here, monkeypatch, bright_url, ahead):
    events = []
    note_events(monkeypatch, train_flowgrpo, events)
    train(train_flowgrpo, change(AHEAD, draw_ahead=ahead, scorer_url=bright_url))
    assert " ".join(event[0] + event.split()[1] for event in events) == ORDERS[ahead]


@pytest.mark.parametrize(("number", "end"), [(0, 3), (2, 3), (3, 5), (4, 5), (5, 6), (9, 10), (10, 11)])
def test_the_next_end_is_the_first_save_or_evaluation_or_the_last_step(number, end):
    assert next_milestone(change(AHEAD, train_steps=11), number) == end


def kill_in_update(app, number):
    """Before a life: the rank kills itself as it is about to train on that step."""

    def before(rank):
        update = app.update

        def killed(run, step, *others):
            if step.number == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(run, step, *others)

        app.update = killed

    return before


def outcome(home):
    """The log without what a clock has to say, and the bytes of the last checkpoint and the exported weights."""
    lines = [json.loads(line) for line in (home / "runs/run/metrics.jsonl").read_text().splitlines()]
    files = [*home.glob("runs/run/checkpoints/step-00000005/*.safetensors"), *home.glob("runs/run/weights/**/*.safe*")]
    assert len(files) >= 2
    return unclocked(lines), {path.relative_to(home): path.read_bytes() for path in files}


LIVES = {  # trainer, ranks, settings
    "flowgrpo": ("flowgrpo", 1, {}),
    "flowgrpo with LoRA": ("flowgrpo", 1, {"lora_rank": 2, "lora_alpha": 4, "lr": 1e-2, "ema_decay": 0.9}),
    "flowgrpo on 2 ranks": ("flowgrpo", 2, {"sharding_mode": "fsdp2"}),
    "nft": ("nft", 1, {"old_schedule": "linear"}),
    "dpo": ("dpo", 1, {}),
    "gspo": ("gspo", 1, {}),
    "unigrpo": ("unigrpo", 1, {}),
}


@pytest.mark.parametrize("kind", sampled(LIVES, 1))
def test_a_run_that_is_killed_at_any_step_ends_as_one_that_was_not(tmp_path, monkeypatch, bright_url, kind):
    """At two steps, which TEST_SEED draws."""
    name, ranks, changes = LIVES[kind]
    found = []
    for folder, deaths in (("peace", ()), ("killed", sorted(random.Random(TEST_SEED).sample(range(5), 2)))):
        home = tmp_path / folder
        home.mkdir()
        monkeypatch.chdir(home)
        write_eval_prompts(home)
        app, args = small(name, bright_url, train_steps=5, eval_every=5, **changes)
        for number in deaths:
            life = lives.train(home, args, trainer=app, ranks=ranks, before=kill_in_update(app, number))
            assert -signal.SIGKILL in life.wait()
        life = lives.train(home, args, trainer=app, ranks=ranks)
        assert life.wait() == [0] * ranks, life.text()
        found.append(outcome(home))
    assert found[0] == found[1]
    assert [line["policy/staleness"] for line in found[0][0] if line["step"]] == [0, 1, 1, 0, 1]


def test_a_run_that_is_told_to_stop_trains_on_what_it_has_and_saves(here, monkeypatch, bright_url, capsys):
    events = []
    note_events(monkeypatch, train_flowgrpo, events)
    update = train_flowgrpo.update

    def stopped(run, step, *others):
        if step.number == 1 and run.session.num_done < 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(run, step, *others)

    monkeypatch.setattr(train_flowgrpo, "update", stopped)
    args = change(AHEAD, scorer_url=bright_url, save_every=9, eval_every=9, draw_ahead=2)
    lines = train(train_flowgrpo, args)
    assert " ".join(event[0] + event.split()[1] for event in events) == "s0 s1 s2 t0 s3 t1 t2 t3"
    assert lines[-1]["step"] == 4
    assert Path("runs/run/checkpoints/step-00000004").is_dir()
    assert "stopped after step 4" in capsys.readouterr().out
    assert [line["step"] for line in train(train_flowgrpo, args)] == [*range(6)]
    assert events[-2:] == ["sample 4 by 4", "train 4"]


class Patient:
    """A scorer that answers for a step's samples only once the next step is sampled."""

    def __init__(self):
        self.sampled = [threading.Event() for _ in range(4)]
        self.asked = 0

    def __call__(self, media, prompts, meta):
        number, self.asked = self.asked - 1, self.asked + 1  # after the canary a request for each step
        if 0 <= number < 2 and not self.sampled[number + 1].wait(30):
            raise RuntimeError("the next step is not sampled")
        return [float(image.mean()) / 255 for image in media["image"]]


def test_scores_that_take_long_come_while_the_next_step_is_sampled(here, monkeypatch):
    scorer, roll_out = Patient(), train_flowgrpo.roll_out

    def told(run, step):
        rollout = roll_out(run, step)
        scorer.sampled[step.number].set()
        return rollout

    monkeypatch.setattr(train_flowgrpo, "roll_out", told)
    with serving_in_thread(scorer) as url:
        app, args = small("flowgrpo", url, batch_size=4)
        lines = train(app, args)
    assert [line["reward/abstained_ratio"] for line in lines if line["step"]] == [0, 0, 0]


def test_samples_that_are_older_than_they_may_be_are_an_error_that_names_the_step(here, monkeypatch, bright_url):
    monkeypatch.setattr(Run, "sync", lambda run, step, version=None: None)
    app, args = small("flowgrpo", bright_url, train_steps=4, save_every=9, eval_every=9)
    with pytest.raises(RuntimeError, match=r"step 3: samples must be at most 1 updates old, .* got 2: a sync is miss"):
        train(app, args)
    with pytest.raises(RuntimeError, match=r"step 2: samples must be at most 0 updates old, .* got 1: a sync is miss"):
        train(app, change(args, draw_ahead=0, name="other"))


def test_a_scorer_that_fails_for_a_step_ends_the_run_with_the_steps_before_it(here, monkeypatch, bright_url):
    """The step after it is sampled already; the run continues with other samples of both."""
    app, args = small("flowgrpo", bright_url, train_steps=4, save_every=9, eval_every=9)
    sample = app.sample

    def failing(run, *others, **options):
        rollout = sample(run, *others, **options)
        if run.version == 1 and run.session.num_done < 0:
            rollout.pending[-1] = Future()
            rollout.pending[-1].set_exception(RewardError("gone"))
        return rollout

    monkeypatch.setattr(app, "sample", failing)
    with pytest.raises(RuntimeError, match="phase reward_wait: RewardError: scores of rank 0: gone"):
        train(app, args)
    assert Path("runs/run/checkpoints/step-00000002").is_dir()
    steps = [line for line in train(app, args) if line["step"]]
    assert [line["policy/staleness"] for line in steps] == [0, 1, 0, 1]


GRPO = tiny(
    recipe(train_flowgrpo, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None,
    prompts_per_step=2, group_size=4, batch_size=4, lr=1e-4, num_inference_steps=4, num_minibatches=2,
    draw_ahead=1, correction_level="step", correction_low=0.9995, correction_high=1.0005,
)  # fmt: skip


def stale(run, number=1):
    """A run's batches of a step, with advantages of both signs, and the step; its weights have moved since."""
    batches = rollout(run, train_flowgrpo.step_params(run, Step(number)), number=number)[0]
    with torch.no_grad():
        for param in run.policy.params:
            param.mul_(1.003)
    advantages = torch.linspace(-1.5, 2, 8).view(2, 4)
    graded = [TrainBatch.of(batch, own) for batch, own in zip(batches, advantages, strict=True)]
    return graded, Step(number, version=number - 1)


def test_old_samples_are_weighed_step_by_step_with_no_forward_more(monkeypatch):
    """The first minibatch has its old log-probs and weights from its own forwards, as plain autograd does."""
    run, forwards = lone_run(GRPO), []
    batches, step = stale(run)
    first, params = batches[0], run.policy.params
    expected, factors = torch.zeros(()), []
    for k in range(first.trajectory.num_kept):
        log_prob = replay(run.model, run.policy.net, first.trajectory, k).log_prob
        factors.append((log_prob.detach() - first.trajectory.rollout_log_prob[:, k]).exp())
        expected = expected - (factors[-1].clamp(0.9995, 1.0005) * first.advantages * log_prob).mean()
    (expected / first.trajectory.num_kept).backward()
    assert (torch.stack(factors) - 1).abs().max() > 5e-4 > (torch.stack(factors) - 1).abs().min()  # some are cut
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    run.policy.optimizer.zero_grad(set_to_none=True)

    def counted(model, net, trajectory, k):
        forwards.append((trajectory is first.trajectory, k))
        return replay(model, net, trajectory, k)

    monkeypatch.setattr(train_flowgrpo, "replay", counted)
    kept = keep_gradients(run)
    metrics = train_flowgrpo.update(run, step, batches)
    assert "policy/first_ratio_max_dev" not in step.metrics
    assert metrics["policy/correction_outside_fraction"] > 0
    assert metrics["policy/rollout_gap"] > 1e-4
    assert [k for is_first, k in forwards if is_first] == [0, 1, 2]
    assert [k for is_first, k in forwards if not is_first] == [0, 1, 2] * 2  # a later minibatch needs them beforehand
    for ours, whole in zip(kept[0], grads, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, whole, rtol=1e-3, atol=1e-6)


SAMPLED = torch.tensor([[-1.0, -2.0, -3.0]])  # log-probs of tokens, the last of which is filled up
MASK, NOW = torch.tensor([[True, True, False]]), SAMPLED + torch.tensor([[3.0, 0.5, 7.0]]).log()


def test_thoughts_of_older_weights_are_weighed_token_by_token(monkeypatch):
    """By 3, cut to 2, and by a half, in a mean over two tokens of one thought."""
    monkeypatch.setattr(train_unigrpo, "get_thoughts", lambda drawn: SimpleNamespace(rollout_log_prob=SAMPLED))
    weights = train_unigrpo.thought_weights(SimpleNamespace(log_prob=NOW), None, MASK)
    assert weights[MASK].tolist() == pytest.approx([1.0, 0.25])


def test_images_after_thoughts_of_older_weights_are_weighed_step_by_step():
    drawn = SimpleNamespace(rollout_log_prob=torch.tensor([[-1.0, -5.0], [-1.0, -5.0]]))
    weights, metrics = train_unigrpo.step_weights(torch.tensor([-1.005, -0.9]), drawn, 0)
    assert weights.tolist() == pytest.approx([math.exp(-0.005), 1.01])
    assert metrics["rollout_gap"].item() == pytest.approx(math.exp(0.1) - 1)


@pytest.mark.parametrize(
    ("algo", "ahead", "expected"),
    [("grpo", 1, [2.0, 0.5]), ("gspo", 1, 1.5), ("grpo", 0, 1.0), ("gspo", 0, 1.0)],
)
def test_answers_of_older_weights_are_weighed_as_those_of_another_engine(algo, ahead, expected):
    """By token, or for gspo by the product of an answer's tokens."""
    args = train_gspo.resolve_auto(build(train_gspo.Args, {"algo": algo, "draw_ahead": ahead}))
    batch = SimpleNamespace(trajectory=SimpleNamespace(rollout_log_prob=SAMPLED), weights=torch.ones(1))
    weights, _ = train_gspo.correction_weights(args, batch, NOW, MASK)
    assert (weights[MASK].tolist() if weights.ndim == 2 else weights.item()) == pytest.approx(expected)


def test_where_versions_agree_the_ratio_must_be_one():
    run = lone_run(GRPO)
    batches, step = stale(run)
    with pytest.raises(RuntimeError, match="before the first update the ratio must be 1"):
        train_flowgrpo.update(run, Step(step.number), batches)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"scorer_name": "ocr", "scorer_url": "", "scorer_sleep": True}, "--draw-ahead must be 0 with --scorer.sleep"),
        ({"old_log_prob": "rollout"}, "--old-log-prob rollout does not go with --draw-ahead"),
        (
            {"algo": "flowgrpo-cps"},
            "the default with --draw-ahead or --memory.rollout-dtype, does not go with flowgrpo-cps",
        ),
        ({"correction_level": "trajectory", "filter_groups": True}, "needs --correction.level step for"),
        ({"draw_ahead": -1}, "--draw-ahead must be >= 0, got -1"),
        ({"draw_ahead": 3}, "--draw-ahead must be < --save-every and --eval.every, .* got 3"),
    ],
)
def test_what_does_not_go_with_steps_ahead_is_refused(here, bright_url, changes, fault):
    args = change(AHEAD, scorer_url=bright_url)
    with pytest.raises(ValueError, match=fault):
        train_flowgrpo.check_args(change(args, **changes))
    train_flowgrpo.check_args(args)


GOES = {  # trainer, settings
    "best and worst": ("flowgrpo", {"best_worst_n": 2}),
    "some steps": ("flowgrpo", {"timestep_fraction": 0.5}),
    "trust region": ("flowgrpo", {"algo": "flow-dppo"}),
    "no density": ("flowgrpo", {"algo": "flowgrpo-cps", "old_log_prob": "recompute"}),
    "common starts": ("flowgrpo", {"same_start_noise": True, "adv_std": "group"}),
    "epochs": ("flowgrpo", {"num_inner_epochs": 2, "num_minibatches": 2, "batch_size": 2, "clip_range": 1e-2}),
    "whole trajectories": ("flowgrpo", {"correction_level": "trajectory"}),
    "sampled with the policy": ("nft", {"algo": "awm", "sample_with": "policy"}),
    "one round": ("gspo", {"algo": "dapo", "rounds": 1}),
}


@pytest.mark.parametrize("case", sampled(GOES, 1))
def test_what_goes_with_steps_ahead_trains(here, bright_url, case):
    name, changes = GOES[case]
    app, args = small(name, bright_url, **({"group_size": 4, "batch_size": 4, "train_steps": 2} | changes))
    last = train(app, args)[-1]
    assert last["policy/staleness"] == 1
    assert last["policy/grad_norm"] > 0


def test_rounds_that_wait_for_scores_are_not_sampled_ahead(here):
    _, args = small("gspo", "", algo="dapo", rounds=2)
    with pytest.raises(ValueError, match=r"--draw-ahead must be 0 with --rounds 2, which waits for scores .* got 1"):
        train_gspo.check_args(args)
    train_gspo.check_args(change(args, rounds=1))


def test_the_gap_of_samples_of_older_weights_raises_no_alarm():
    lines = [{"step": n, "policy/rollout_gap": 2.0, "policy/staleness": float(n % 2)} for n in range(1, 11)]
    watch = Watch()
    assert [line["step"] for line in lines if watch(line)] == [10]  # the fifth of fresh samples


def test_pairs_of_a_file_are_not_sampled_ahead(here):
    record.write_data(here)
    args = tiny(
        recipe(train_dpo, "tiny-signs-offline"), preferences="pairs.jsonl", width=64, prompts_per_step=4, draw_ahead=1
    )
    with pytest.raises(ValueError, match="--draw-ahead must be 0 with --preferences"):
        train_dpo.check_args(args)


def test_importance_weights_are_of_steps_where_steps_are_sampled_ahead():
    levels = [build(train_flowgrpo.Args, {"draw_ahead": ahead}).correction.level for ahead in (0, 1)]
    assert levels == ["trajectory", "step"]


def test_where_saves_and_evaluations_fall_may_not_change(here, bright_url):
    """Samples of other steps would be older."""
    for name, ahead in (("ahead", 1), ("now", 0)):
        args = change(AHEAD, scorer_url=bright_url, name=name, draw_ahead=ahead, train_steps=2, save_every=2)
        train(train_flowgrpo, args)
        for setting, changes in {"save_every": {"save_every": 3}, "eval.every": {"eval_every": 4}}.items():
            if ahead:
                with pytest.raises(ValueError, match=f"with other settings: {setting} was"):
                    train(train_flowgrpo, change(args, **changes))
            else:
                train(train_flowgrpo, change(args, **changes))
