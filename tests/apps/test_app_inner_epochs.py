"""Passes over one rollout: PPO as a plain loop has it, with old log-probs of before the first update."""

import copy
from itertools import pairwise

import pytest
import torch
from omni_losses import diffusion_nft_loss, reward_probability
from omni_rl.flow.batches import TrainBatch, subsample_steps
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import replay
from trainer_runs import lone_run, recipe, rollout, tiny

import train_flowgrpo
import train_nft

GRPO = tiny(
    recipe(train_flowgrpo, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None,
    prompts_per_step=2, group_size=4, batch_size=4, lr=1e-4, num_inference_steps=4, num_minibatches=2,
    optim_lr_scheduler_type="constant", num_inner_epochs=3, clip_range=1e-2, optim_weight_decay=0.0,
)  # fmt: skip
NFT = tiny(
    recipe(train_nft, "tiny-signs"), prompts_per_step=2, group_size=4, batch_size=4, lr=1e-4, train_levels=2,
    num_minibatches=2, num_inner_epochs=3, sample_with="policy", optim_weight_decay=0.0,
)  # fmt: skip


def graded(batches):
    """The batches with advantages of both signs."""
    advantages = torch.linspace(-1.5, 2, 8).view(2, 4)
    return [TrainBatch.of(batch, own) for batch, own in zip(batches, advantages, strict=True)]


def plain_steps(run, net, losses_of):
    """Train a net as a plain loop does. losses_of: of the forwards of a minibatch, whose mean is a step's."""
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=run.args.lr, weight_decay=0.0)
    for minibatch in run.minibatches(Step(0), epochs=run.args.num_inner_epochs):
        losses = losses_of(minibatch)
        (sum(losses) / len(losses)).backward()
        torch.nn.utils.clip_grad_norm_(params, run.args.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def assert_moved_alike(run, net, start):
    moved = [(ours.detach() - was, theirs.detach() - was)
             for ours, theirs, was in zip(run.policy.params, net.parameters(), start, strict=True)]  # fmt: skip
    assert max(theirs.abs().max() for _, theirs in moved) > 3e-4  # of six steps of AdamW by 1e-4
    for ours, theirs in moved:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=5e-6)


@pytest.mark.parametrize("source", ["rollout", "recompute"])
def test_inner_epochs_of_flowgrpo_are_a_plain_loop_of_ppo(source):
    run = lone_run(change(GRPO, old_log_prob=source, ratio_tolerance=0.0))
    batches = rollout(run, train_flowgrpo.step_params(run, Step(0)))[0]
    chosen, net, step = graded(batches), copy.deepcopy(run.policy.net), Step(0)
    start = [p.detach().clone() for p in run.policy.params]
    metrics = train_flowgrpo.update(run, step, chosen)
    assert step.metrics["policy/first_ratio_max_dev"] == 0
    assert metrics["policy/clip_fraction"] > 0  # later epochs leave the range
    assert metrics["policy/skipped_updates"] == 0  # as one would be whose samples all do
    with torch.no_grad():
        old = [[replay(run.model, net, b, k).log_prob for k in range(b.num_kept)] for b in batches]

    def losses_of(minibatch):
        batch, advantages = batches[minibatch], chosen[minibatch].advantages
        ratios = [(replay(run.model, net, batch, k).log_prob - before).exp() for k, before in enumerate(old[minibatch])]
        return [-torch.minimum(r * advantages, r.clamp(0.99, 1.01) * advantages).mean() for r in ratios]

    plain_steps(run, net, losses_of)
    assert_moved_alike(run, net, start)


def test_inner_epochs_of_nft_keep_the_velocities_of_before_the_first_update(here):
    run = lone_run(NFT)
    batches = rollout(run, run.base_params)[0]
    chosen, net = graded(batches), copy.deepcopy(run.policy.net)
    start = [p.detach().clone() for p in run.policy.params]
    points = [at for batch in chosen for at in train_nft.noise_batch(run, Step(0), batch)]
    train_nft.update(run, Step(0), chosen)
    with torch.no_grad():
        old = [train_nft.predict(run, net, at) for at in points]

    def losses_of(minibatch):
        return [
            diffusion_nft_loss(
                train_nft.predict(run, net, at), old[i], at.batch.trajectory.x0, at.x_t, at.sigma,
                reward_probability(at.batch.advantages), nft_beta=run.args.nft_beta,
            ).loss
            for i, at in enumerate(points)
            if i // 2 == minibatch
        ]  # fmt: skip

    plain_steps(run, net, losses_of)
    assert_moved_alike(run, net, start)


def test_each_inner_epoch_has_all_minibatches_in_an_order_of_its_own():
    run = lone_run(change(GRPO, prompts_per_step=16, batch_size=8, num_minibatches=8))
    orders = [run.minibatches(Step(number), epochs=5) for number in (0, 0, 1)]
    epochs = [tuple(orders[0][i : i + 8]) for i in range(0, 40, 8)]
    assert epochs[0] == tuple(range(8))
    assert all(sorted(own) == [*range(8)] for own in epochs)
    assert len({*epochs}) == 5
    assert orders[0] == orders[1] != orders[2]
    other = lone_run(change(GRPO, prompts_per_step=16, batch_size=4, num_minibatches=8), rank=1, world_size=2)
    assert other.minibatches(Step(0), epochs=5) == orders[0]
    assert run.minibatches(Step(0), epochs=1) == [*range(8)]


def test_each_sample_trains_on_steps_of_its_own_whatever_its_batch():
    args = change(GRPO, num_inference_steps=9, prompts_per_step=4)  # of 8 stochastic steps
    run = lone_run(args)
    batches = rollout(run, train_flowgrpo.step_params(run, Step(0)))[0]
    some = [subsample_steps(batch, 0.5) for batch in batches]
    steps = torch.cat([batch.sde_steps for batch in some])
    assert steps.shape == (16, 4)
    assert all(a < b for row in steps.tolist() for a, b in pairwise(row))
    assert len({tuple(row) for row in steps.tolist()}) > 8  # of 70 choices
    counts = steps.flatten().bincount(minlength=8)
    assert counts.min() >= 2  # of 8 expected
    again = rollout(lone_run(change(args, batch_size=8)), train_flowgrpo.step_params(run, Step(0)))[0]
    assert torch.equal(torch.cat([subsample_steps(batch, 0.5).sde_steps for batch in again]), steps)
    batch, whole = some[1], batches[1]
    for row, places in enumerate(batch.sde_steps.tolist()):
        assert torch.equal(batch.x[row], whole.x[row, places])
        assert torch.equal(batch.x_next[row], whole.x_next[row, places])
        assert torch.equal(batch.rollout_log_prob[row], whole.rollout_log_prob[row, places])
    for k in range(batch.num_kept):  # levels differ within a forward, and no bit of the ratio does
        assert torch.equal(replay(run.model, run.policy.net, batch, k).log_prob, batch.rollout_log_prob[:, k])
    assert subsample_steps(whole, 0.01).num_kept == 1
    assert subsample_steps(whole, 1.0).sde_steps.tolist() == whole.sde_steps.tolist()
