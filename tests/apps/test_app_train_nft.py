"""The trainer of DiffusionNFT, AWM and DGPO: gradients, groups, levels, the old policy."""

import re
from concurrent.futures import Future

import pytest
import torch
from helpers import sampled
from omni_losses import awm_log_prob, old_policy_decay, velocity_error
from omni_reward import Score
from omni_rl.flow.batches import TrainBatch, train_batches
from omni_rl.flow.scoring import Rollout
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import Trajectory
from omni_sched import step_noise
from omni_train.lora import adapter, adapter_params
from trainer_runs import (
    assert_same_gradients,
    keep_gradients,
    lone_run,
    recipe,
    rollout,
    tiny,
    train,
)

import train_nft as app

TINY = tiny(recipe(app, "tiny-signs"), prompts_per_step=2, group_size=4, batch_size=4, train_levels=2)
LORA = {"lora_rank": 4, "lora_alpha": 8}


def points_of(run):
    """One rollout, graded by hand with one sample left out, and all its noised samples."""
    batches, _ = rollout(run, run.base_params)
    advantages, weights = torch.linspace(-1, 2, 8).view(2, 4), torch.ones(2, 4)
    advantages[1, 2] = weights[1, 2] = 0
    graded = [TrainBatch.of(*row) for row in zip(batches, advantages, weights, strict=True)]
    return graded, [point for batch in graded for point in app.noise_batch(run, Step(0), batch)]


def whole(points):
    """All points as one batch."""
    drawn = Trajectory.cat([at.batch.trajectory for at in points])
    advantages, weights = (torch.cat([getattr(at.batch, name) for at in points]) for name in ("advantages", "weights"))
    noised = (torch.cat([getattr(at, name) for at in points]) for name in ("noise", "sigma", "x_t"))
    return app.Noised(TrainBatch.of(drawn, advantages, weights), *noised)


def test_gradients_of_nft_are_one_pass_over_all_samples_and_levels(here):
    run = lone_run(change(TINY, sample_with="policy"))
    graded, points = points_of(run)
    kept = keep_gradients(run)
    app.update(run, Step(0), graded)
    at = whole(points)
    x0, batch = at.batch.trajectory.x0, at.batch
    velocity = app.predict(run, run.policy.net, at)
    # At velocity = old the loss has the gradient of A sigma^2 / (5 w) times the flow-matching error, w = mean |x - x0|.
    error = (velocity - (at.noise - x0)).flatten(1).square().mean(dim=1)
    width = (at.x_t - at.sigma.view(-1, 1, 1, 1) * velocity - x0).flatten(1).abs().mean(dim=1).detach()
    run.policy.net.zero_grad()
    (batch.weights * batch.advantages / 5 * 5 * at.sigma.square() / width * error).mean().backward()
    assert_same_gradients(kept[0], run.policy.params)


def test_gradients_of_awm_are_one_pass_over_all_samples_and_levels(here):
    run = lone_run(change(TINY, sample_with="policy", algo="awm"))
    graded, points = points_of(run)
    kept = keep_gradients(run)
    app.update(run, Step(0), graded)
    at = whole(points)
    log_prob = awm_log_prob(app.predict(run, run.policy.net, at), at.batch.trajectory.x0, at.noise, at.sigma)
    run.policy.net.zero_grad()
    (-at.batch.weights * at.batch.advantages * log_prob).mean().backward()  # at ratio 1
    assert_same_gradients(kept[0], run.policy.params)


def test_gradients_of_dgpo_are_one_pass_over_all_groups_and_levels(here):
    """At the first step reference, sampling policy and net are one: each group has weight 1/2."""
    run = lone_run(change(TINY, algo="dgpo", dgpo_reference="sampler", sample_with="policy"))
    graded, points = points_of(run)
    kept = keep_gradients(run)
    metrics = app.update(run, Step(0), graded)
    assert metrics["policy/group_weight"] == 0.5
    at = whole(points)
    error = velocity_error(app.predict(run, run.policy.net, at), at.batch.trajectory.x0, at.noise)
    run.policy.net.zero_grad()
    (0.5 * at.batch.advantages * error).mean().backward()
    assert_same_gradients(kept[0], run.policy.params)


def test_samples_of_a_group_share_noise_and_level_on_any_number_of_ranks(here):
    args = change(TINY, algo="dgpo", prompts_per_step=4)

    def noised(**place):
        run = lone_run(args, **place)
        batches, _ = rollout(run, run.base_params)
        graded = [TrainBatch.of(batch, torch.zeros(4)) for batch in batches]
        return [app.noise_batch(run, Step(0), batch) for batch in graded]

    of_groups = noised()
    for at in (at for points in of_groups for at in points):
        assert torch.equal(at.noise, at.noise[:1].expand_as(at.noise))
        assert len(at.sigma.unique()) == 1
    assert not torch.equal(of_groups[0][0].noise, of_groups[1][0].noise)
    by_rank = [noised(rank=rank, world_size=2) for rank in range(2)]
    for ours, theirs in zip(of_groups, [by_rank[0][0], by_rank[1][0], by_rank[0][1], by_rank[1][1]], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.noise, other.noise)
            assert torch.equal(one.sigma, other.sigma)


def test_dgpo_needs_whole_groups_in_a_batch(here):
    """The nearest size that is named is one that is then taken."""
    rule = r"^--batch-size times ranks \(3\) must divide .* whole groups of --group-size \(4\), got 3; nearest: (\d+)$"
    with pytest.raises(ValueError, match=rule) as caught:
        app.check_args(change(TINY, algo="dgpo", batch_size=3, scorer_url="http://x"))
    nearest = int(re.search(rule, str(caught.value))[1])
    app.check_args(change(TINY, algo="dgpo", batch_size=nearest, scorer_url="http://x"))


def test_each_stratum_of_the_schedule_gives_one_level(here):
    args = change(TINY, num_inference_steps=6, train_levels=2, train_low=1, train_high=5)
    run = lone_run(args)
    (batch, other), _ = rollout(run, run.base_params)
    ones = torch.ones(4)
    points = app.noise_batch(run, Step(0), TrainBatch.of(batch, ones))
    for at, strata in zip(points, (batch.sigmas[1:3], batch.sigmas[3:5]), strict=True):
        assert all(sigma in strata for sigma in at.sigma)
        level = at.sigma.view(-1, 1, 1, 1)
        torch.testing.assert_close(at.x_t, (1 - level) * batch.x0 + level * at.noise)
    run.args = change(args, train_levels=4)
    all_levels = app.noise_batch(run, Step(0), TrainBatch.of(other, ones))
    assert [at.sigma.tolist() for at in all_levels] == [[sigma.item()] * 4 for sigma in batch.sigmas[1:5]]
    noises = torch.stack([at.noise for at in all_levels])
    used = torch.stack([step_noise([p.seed for p in other.prompts], k, batch.x0.shape[1:]) for k in range(-1, 6)])
    for noise in noises:
        assert not any(torch.equal(noise, earlier) for earlier in used)  # the rollout's own is not used again
    assert len({noise.sum().item() for noise in noises}) == 4


def test_samples_without_a_score_take_no_part(here):
    run = lone_run(change(TINY, group_size=2))
    batches, prompts = rollout(run, run.base_params)
    scores = [Score(0.5), Score(0.25), Score(0.0), Score(1.0)]

    def grade(scores):
        step = Step(0)
        future = Future()
        future.set_result(scores)
        chosen = train_batches(run, step, Rollout(prompts, batches, [future], 2), run.args.advantages, weighted=True)
        step.finish_grading()
        return chosen, step

    (batch,), step = grade([*scores[:2], Score(None, abstained="unreadable"), scores[3]])
    assert batch.weights.tolist() == [1, 1, 0, 0]  # one sample alone is no group either
    assert step.metrics["reward/abstained_ratio"] == 0.5
    (batch,), step = grade(scores)
    assert batch.weights.min() == 1
    assert batch.advantages[3] == -batch.advantages[2] > 0
    assert step.has_signal
    with pytest.raises(RuntimeError, match="no score for any of 4 samples: broken"):
        grade([Score(None, abstained="broken")] * 4)
    assert not grade([Score(0.5)] * 4)[1].has_signal


@pytest.mark.parametrize("kind", sampled(["lora", "full"], 1))
def test_the_old_policy_samples_and_follows_as_its_schedule_says(here, bright_url, monkeypatch, kind):
    lora = LORA if kind == "lora" else {}
    args = change(
        TINY, scorer_url=bright_url, lr=1e-2, train_steps=4, eval_every=4, old_schedule="linear", num_minibatches=2,
        old_every=2, old_decay_max=0.005, **lora,
    )  # fmt: skip
    trained, kept, images = [], [], []
    refresh, sample = app.refresh_old, app.sample

    def values(tensors):
        return torch.cat([t.detach().flatten() for t in tensors]).clone()

    def old_values(run):
        return values(adapter_params(run.policy.net, "old") if lora else [old for _, old in run.policy.old.pairs()])

    def refresh_and_keep(run, step):
        if not kept:
            kept.append(old_values(run))
        decay = refresh(run, step)
        trained.append(values(adapter_params(run.policy.net, "default") if lora else run.policy.params))
        kept.append(old_values(run))
        return decay

    def sample_twice(run, prompts, params):
        """Once as the old policy, which the trainer has put in place, and once as the trained one."""
        drawn = sample(run, prompts, params)
        first = drawn.batches[0]
        with run.policy.use_old() if not lora else adapter(run.policy.net, "default"):  # exchanges the two again
            images.append((first.x0, run.engine.generate(first.prompts, params).x0))
        return drawn

    monkeypatch.setattr(app, "refresh_old", refresh_and_keep)
    monkeypatch.setattr(app, "sample", sample_twice)
    lines = train(app, args)
    # Refreshed after steps 2 and 4, that is after 4 and 8 optimizer steps, and never keeps more than 0.005.
    decays = [1.0, old_policy_decay(4, schedule="linear"), 1.0, 0.005]
    assert decays[1] == 0.004
    assert [line["policy/old_decay"] for line in lines[1:]] == decays
    for before, after, policy, decay in zip(kept, kept[1:], trained, decays, strict=False):
        torch.testing.assert_close(after, decay * before + (1 - decay) * policy)
    same = [torch.equal(old, policy) for old, policy in images]
    assert same == [True, False, False, False]  # after step 2 the old one is the trained one but for 0.4 %
    assert lines[1]["policy/old_deviation"] > 0  # in the second update of the first step


def test_awm_starts_at_ratio_one_with_either_sampler_and_holds_to_both_policies(here, bright_url):
    for sample_with in ("old", "policy"):
        args = change(
            TINY, scorer_url=bright_url, name=sample_with, algo="awm", sample_with=sample_with, lr=1e-2,
            kl_coef=0.1, old_kl_coef=0.1, old_schedule="linear", **LORA,
        )  # fmt: skip
        first, second = train(app, args)[1:]
        assert (
            first["policy/ratio_max_dev"]
            == first["policy/reference_velocity_kl"]
            == first["policy/old_velocity_kl"]
            == 0.0
        )
        assert second["policy/reference_velocity_kl"] > 0
        if sample_with == "policy":
            assert second["policy/ratio_max_dev"] == 0.0  # what the update starts from has drawn the samples
