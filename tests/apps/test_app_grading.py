"""Updates that begin with the groups whose scores are there, while others are being scored."""

import gc
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from apps.app_lives import TINY
from helpers import sampled
from omni_losses import group_advantages
from omni_reward import RewardError, Score
from omni_rl.flow.batches import groups_are_local, train_batches
from omni_rl.flow.sampling import sample
from omni_rl.flow.scoring import Rollout, gather_rewards
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import Prompt, Samples
from trainer_runs import place, recipe, tiny, train, train_on_ranks, unclocked

import train_flowgrpo
import train_nft

GROUPED = {"adv_std": "group", "group_size": 2, "prompts_per_step": 4, "train_steps": 2, "eval_every": 2}
FLOW = change(TINY, **GROUPED, save_every=9)
NFT = tiny(recipe(train_nft, "tiny-signs"), **GROUPED, name="run", batch_size=2, width=64, train_levels=2, lr=1e-3)


class Held(Future):
    """Scores that must have come by the time that they are waited for, or soon after."""

    def exception(self, timeout=20):
        return super().exception(timeout)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.txt").write_text('a blue sign that says "AB"\n')


def waiting(app, args, monkeypatch, train=train):
    """The numbers of a run that waits for all scores before it updates."""
    with monkeypatch.context() as patch:
        patch.setattr("omni_rl.flow.batches.groups_are_local", lambda *args: False)
        return unclocked(train(app, change(args, name="waiting")))


@pytest.mark.parametrize("name", sampled(["flowgrpo", "nft"], 1))
def test_a_batch_is_trained_on_while_later_ones_are_scored_and_no_bit_changes(name, monkeypatch, bright_url):
    """Only the first group is scored before the update; each backward pass lets the scores of one batch more come."""
    app, args = (train_flowgrpo, change(FLOW, num_minibatches=2)) if name == "flowgrpo" else (train_nft, NFT)
    args = change(args, scorer_url=bright_url)

    def held(run, *others, **options):
        rollout = sample(run, *others, **options)
        scored = [Held() for _ in rollout.pending]
        left = zip(scored, rollout.pending, strict=True)

        def come():
            for future, source in islice(left, 1):
                future.set_result(source.result())

        def backward(loss, *, of):
            loss.backward()
            come()

        come()
        run.policy.backward = backward
        return replace(rollout, pending=scored)

    expected = waiting(app, args, monkeypatch)
    monkeypatch.setattr(app, "sample", held)
    assert unclocked(train(app, args)) == expected


@pytest.mark.parametrize("name", sampled(["flowgrpo", "nft"], 1))
def test_samples_of_a_step_that_is_over_are_freed_without_a_garbage_collection(name, monkeypatch, bright_url):
    """Else they stay on the device until Python happens to look for cycles."""
    app, args = (train_flowgrpo, FLOW) if name == "flowgrpo" else (train_nft, NFT)
    steps, left = [], []

    def noted(run, *others, **options):
        left.append([batch() for batches in steps[:-1] for batch in batches if batch()])  # the last is being replaced
        rollout = sample(run, *others, **options)
        steps.append([weakref.ref(batch) for batch in rollout.batches])
        return rollout

    monkeypatch.setattr(app, "sample", noted)
    gc.disable()
    try:
        train(app, change(args, scorer_url=bright_url, train_steps=3, eval_every=3))
    finally:
        gc.enable()
    assert left == [[], [], []]
    assert all(steps)


def test_a_scorer_that_fails_for_the_last_batch_leaves_weights_untouched(monkeypatch, bright_url):
    """Sharded weights on two ranks, which go through the passes together; the run then continues bit for bit."""
    args = change(FLOW, scorer_url=bright_url)

    def failing(run, *others, **options):
        rollout = sample(run, *others, **options)
        if run.version == 1 and run.dist.rank == 1:
            rollout.pending[-1] = Future()
            rollout.pending[-1].set_exception(RewardError("gone"))
        return rollout

    with monkeypatch.context() as patch:
        patch.setattr(train_flowgrpo, "sample", failing)
        with pytest.raises(Exception, match="phase reward_wait: RewardError: scores of rank 1: gone"):
            train_on_ranks(train_flowgrpo, args)
    assert Path("runs/run/checkpoints/step-00000001").is_dir()
    expected = waiting(train_flowgrpo, args, monkeypatch, train_on_ranks)
    assert unclocked(train_on_ranks(train_flowgrpo, args)) == expected


@pytest.mark.parametrize("std", ["group", "none"])
def test_advantages_of_whole_groups_are_the_bits_of_those_over_all(std):
    """Batches of 3 across groups of 4, requests of 2: a batch waits up to the end of its last group."""
    torch.manual_seed(0)
    prompts = [Prompt("", group=i // 4, index=i, seed=i) for i in range(24)]
    scores = [Score(value) for value in torch.rand(24).tolist()]
    scores[2] = Score(None, abstained="unreadable")
    scores[9] = Score(None, abstained="lost", mask_group=True)
    batches = [Samples(tuple(prompts[i : i + 3]), {}, {}, 0) for i in range(0, 24, 3)]
    pending, step = [Held() for _ in range(12)], Step(0)
    rollout = Rollout(prompts, batches, pending, consecutive=4)
    rewards = gather_rewards(place(), batches, scores, rollout.groups)
    expected = group_advantages(rewards, rollout.groups, std=std)
    args = change(FLOW, adv_std=std, group_size=4, prompts_per_step=6)
    run = SimpleNamespace(args=args, dist=place(), phase=lambda name: nullcontext(), score_parts=())
    chosen = train_batches(run, step, rollout, run.args.advantages, weighted=True)
    for first, batch in zip(range(0, 24, 3), chosen, strict=True):
        end = -(-(first + 3) // 4) * 4
        for i in range(0, end, 2):
            if not pending[i // 2].done():
                pending[i // 2].set_result(scores[i : i + 2])
        assert torch.equal(batch.advantages, expected[first : first + 3])
        assert torch.equal(batch.weights, 1.0 - rewards[first : first + 3].isnan().float())
    assert not step.metrics
    step.finish_grading()
    assert step.metrics["reward/mean"] == pytest.approx(rewards.nanmean().item())
    step.metrics.clear()
    step.finish_grading()
    assert not step.metrics  # once


def test_only_whole_groups_that_depend_on_no_other_come_early():
    args = change(FLOW, group_size=4, batch_size=2)

    def comes_early(args, num_ranks, consecutive=1):
        dist = SimpleNamespace(world_size=num_ranks, context=1)
        return groups_are_local(args, args.advantages, dist, max(consecutive, args.data.batch_size))

    assert comes_early(args, 1)
    assert not comes_early(args, 2)  # half a group each
    assert comes_early(args, 2, consecutive=4)
    assert comes_early(change(args, batch_size=8), 2)
    assert not comes_early(change(args, batch_size=6), 2)
    assert not comes_early(change(args, adv_std="batch"), 1)
    assert not comes_early(change(args, reward_parts="ocr=1"), 1)
