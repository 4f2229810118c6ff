"""Frames and sound of a sample apart: worked examples, and the limits in which they are one."""

import math
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from omni_losses import diffusion_nft_loss, grpo_loss, multi_reward_advantages, reward_probability
from omni_reward import Score
from omni_rl.flow.batches import TrainBatch
from omni_rl.flow.scoring import Rollout, part_advantages
from omni_rl.flow.streams import loss_over_streams, stream_weights
from omni_rl.settings.fields import change, check_bounds
from omni_rl.settings.rules import check_scored
from omni_rollout import Prompt
from omni_sched import StreamStep, sde_step
from trainer_runs import place

import train_nft

SIZES = (6, 2)
CLIP = partial(grpo_loss, clip_range=1e-3)


def latents(seed, batch=4):
    return torch.randn(batch, sum(SIZES), generator=torch.Generator().manual_seed(seed))


def step(velocity, rule=sde_step):
    return rule(velocity, latents(1), 0.7, 0.5, noise_level=0.7, x_next=latents(2))


def test_with_shares_by_elements_and_one_advantage_the_gradient_is_that_of_the_loss_of_all():
    found = []
    for rule, loss in ((sde_step, CLIP), (StreamStep(sde_step, SIZES), loss_over_streams(CLIP, (0.75, 0.25)))):
        velocity = latents(0).requires_grad_()
        now = step(velocity, rule).log_prob
        loss(now, now.detach(), torch.tensor([1.0, -2.0, 0.5, 3.0]), weights=None).loss.backward()
        found.append(velocity.grad)
    torch.testing.assert_close(*found)
    assert found[0].any()


def test_each_advantage_moves_its_own_stream_by_its_share():
    """At ratio 1 the gradient is -1/B sum_m s_m A_m times that of the stream's log-probability."""
    velocity, advantages = latents(0).requires_grad_(), torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [0.0, 0.0]])
    now = step(velocity, StreamStep(sde_step, SIZES)).log_prob
    loss_over_streams(CLIP, (0.4, 0.6))(now, now.detach(), advantages, weights=None).loss.backward()
    other = latents(0).requires_grad_()
    expected = (step(other, StreamStep(sde_step, SIZES)).log_prob * advantages * torch.tensor([0.4, 0.6])).sum() / -4
    expected.backward()
    torch.testing.assert_close(velocity.grad, other.grad)
    assert not velocity.grad[0, 6:].any()
    assert not velocity.grad[1, :6].any()


def test_a_ratio_is_clipped_stream_by_stream():
    now = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).requires_grad_()  # the frames of the first are far past the bound
    out = loss_over_streams(CLIP, (0.5, 0.5))(now, torch.zeros(2, 2), torch.ones(2), weights=None)
    assert out.metrics["ratio_max_dev"].item() == pytest.approx(math.e - 1)  # of the frames, whatever their share
    out.loss.backward()
    assert now.grad.tolist() == [[0.0, -0.25], [-0.25, -0.25]]


def at(advantages, x0=None):
    batch = TrainBatch.of(SimpleNamespace(x0=latents(3) if x0 is None else x0), advantages)
    return train_nft.Noised(batch, latents(4), torch.full((4,), 0.6), latents(5))


def test_nft_moves_a_stream_by_its_own_advantage_and_weighs_both_losses(monkeypatch):
    monkeypatch.setattr(train_nft, "replace", lambda thing, **new: type(thing)(**(vars(thing) | new)))
    args, old = change(train_nft.Args(), nft_beta=0.5), latents(6)
    advantages = torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 2.0], [0.0, 0.0]])
    velocity = old.clone().requires_grad_()
    out = train_nft.loss_by_stream(SIZES, (0.75, 0.25), train_nft.nft_loss)(
        args, velocity, {"sampler": old}, at(advantages)
    )
    out.loss.backward()
    assert not velocity.grad[:, :6].any()  # advantage 0 is half good and half bad
    assert velocity.grad[:3, 6:].any(dim=1).all()
    point = at(advantages)
    expected = sum(
        share
        * diffusion_nft_loss(
            old[:, part],
            old[:, part],
            point.batch.trajectory.x0[:, part],
            point.x_t[:, part],
            point.sigma,
            reward_probability(advantages[:, m]),
            nft_beta=0.5,
        ).loss
        for m, (share, part) in enumerate(((0.75, slice(0, 6)), (0.25, slice(6, 8))))
    )
    torch.testing.assert_close(out.loss, expected)


def run(**settings):
    """The settings of a run, and the sizes of its streams."""
    return SimpleNamespace(args=change(train_nft.Args(), **settings), streams={"video": 6, "audio": 2})


def test_a_reward_of_one_medium_enters_its_advantage_alone_and_one_of_both_enters_both():
    values = torch.tensor([[1.0, 5.0, 2.0], [2.0, 3.0, 2.5], [3.0, 0.0, 1.0], [6.0, 4.0, 0.0]])
    scores = [Score(0.0, parts=dict(zip("abc", row, strict=True))) for row in values.tolist()]
    groups, rewards = torch.tensor([0, 0, 1, 1]), torch.zeros(4)
    future = Future()
    future.set_result(scores)
    prompts = [Prompt("", i // 2, i, i) for i in range(4)]
    rollout = Rollout(prompts, [SimpleNamespace(prompts=prompts)], [future])
    parts = {"reward_parts": "a=1,b=2,c=0.5"}
    apart = part_advantages(run(**parts).args.advantages, "a=video,b=audio", place(), rollout, rewards)
    for column, weights in zip(apart.unbind(dim=1), ([1, 0, 0.5], [0, 2, 0.5]), strict=True):
        torch.testing.assert_close(column, multi_reward_advantages(values, groups, weights, std="batch"))
    whole = part_advantages(run(**parts).args.advantages, "", place(), rollout, rewards)
    assert torch.equal(whole, multi_reward_advantages(values, groups, [1, 2, 0.5], std="batch"))


def test_the_share_of_the_sound_is_that_of_its_elements_unless_it_is_set():
    assert stream_weights([6, 2], None) == (0.75, 0.25)
    assert stream_weights([6, 2], 0.5) == (0.5, 0.5)
    assert not run().args.streams.has_separate_losses


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"streams_reward_media": "a=audio"},
            "--streams.reward-media must name parts in --reward-parts, got a=audio",
        ),
        (
            {"reward_parts": "a=1", "streams_reward_media": "a"},
            "--streams.reward-media must be PART=MEDIUM with commas between, .* got 'a'",
        ),
        (
            {"reward_parts": "a=1", "streams_reward_media": "a=image"},
            "--streams.reward-media must name video or audio, got image",
        ),
        ({"streams_sound_weight": 1.5}, r"--streams.sound-weight must be <= 1, got 1.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    check = check_bounds if "streams_sound_weight" in settings else check_scored
    with pytest.raises(ValueError, match=said):
        check(change(train_nft.Args(), **settings))
