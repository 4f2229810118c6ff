"""From scores to what is trained on: advantages, the samples worth it, and the batches that they are put into."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omni_rollout import Prompt, Trajectory
from omni_sched import sde_step
from trainer_runs import (
    assert_same_gradients,
    keep_gradients,
    lone_rank,
    tiny,
    train,
    train_on_ranks,
    write_eval_prompts,
)

import grading
import rollouts
import train_flowgrpo as app

TINY = tiny(
    app.PRESETS["tiny-signs-flowgrpo"], prompts_per_step=2, group_size=8, batch_size=4, window_low=0, window_high=2,
    lr=1e-4, lr_decay=False, old_log_prob="recompute", ratio_tolerance=1e-5,
)  # fmt: skip


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """A working folder of its own, with few evaluation prompts."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    return tmp_path


def numbered(numbers):
    """A batch whose samples are told apart by x0."""
    x = torch.zeros(len(numbers), 1, 1)
    prompts = tuple(Prompt(str(n), n // 4, n) for n in numbers)
    x0, media = torch.tensor(numbers, dtype=torch.float32)[:, None], torch.zeros(len(numbers), 3, 1, 1)
    return Trajectory(x, x, x[..., 0].long(), torch.ones(2), x[..., 0], None, {}, x0, media, prompts, 0)


def place(rank, world_size, size):
    dist = SimpleNamespace(rank=rank, world_size=world_size)
    return SimpleNamespace(dist=dist, batch_size=size)


@settings(deadline=None, max_examples=60)
@given(
    keep=st.lists(st.booleans(), min_size=24, max_size=24),
    world_size=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 2, 4]),
    updates=st.sampled_from([1, 2]),
)
def test_the_mean_over_all_places_of_an_update_is_the_mean_over_what_is_kept(keep, world_size, size, updates):
    assume(24 // size // world_size % updates == 0)
    keep = torch.tensor(keep)
    everyone = torch.arange(24).view(-1, world_size, size)  # dealt to the ranks in turn
    values, lengths, totals, seen = torch.randn(24), set(), [0.0] * updates, [[] for _ in range(updates)]
    for rank in range(world_size):
        batches = [numbered(row) for row in everyone[:, rank].tolist()]
        on = place(rank, world_size, size)
        new, own, weights = grading.to_train(on, batches, values, keep, updates=updates)
        lengths.add(len(new))
        numbers = torch.stack([batch.x0[:, 0] for batch in new]).long()
        assert torch.equal(own, values[numbers])
        weights = torch.ones_like(own) if weights is None else weights
        assert torch.equal(weights > 0, keep[numbers])
        for update, part in enumerate(numbers.chunk(updates)):
            share = weights.chunk(updates)[update]
            seen[update] += part[share > 0].tolist()
            totals[update] += (share * values[part]).mean().item() / world_size
    blocks = torch.arange(24).chunk(updates)  # whatever the number of ranks
    for block, numbers, total in zip(blocks, seen, totals, strict=True):
        assert sorted(numbers) == block[keep[block]].tolist()  # each once
        assert total == pytest.approx(values[block][keep[block]].mean().item() if numbers else 0.0, abs=1e-5)
    counts = keep.view(updates, -1, world_size, size).sum(dim=(1, 3))
    assert lengths == {updates * max(1, -(-int(counts.max()) // size))}  # as few as possible, on every rank


def test_what_fills_up_is_spread_over_the_batches():
    keep = torch.tensor([True] * 6 + [False] * 6)
    batches = [numbered(range(i, i + 4)) for i in (0, 4, 8)]
    _, _, weights = grading.to_train(place(0, 1, 4), batches, torch.zeros(12), keep, updates=1)
    assert (weights > 0).sum(dim=1).tolist() == [3, 3]


def test_everything_is_taken_as_it_was_drawn_when_nothing_is_left_out():
    batches, values = [numbered(range(4)), numbered(range(4, 8))], torch.randn(16)
    new, own, weights = grading.to_train(place(1, 2, 4), batches, values, None, updates=1)
    assert new is batches
    assert weights is None
    assert torch.equal(own, values.view(2, 2, 4)[:, 1])


def test_a_batch_carries_no_more_padding_than_its_longest_text_needs():
    """Samples 1 and 4 of texts with 2 and 3 tokens come from batches that were padded to 5."""
    lengths = [5, 2, 4, 5, 3, 1, 1, 1]
    batches = []
    for start in (0, 4):
        mask = torch.arange(5) < torch.tensor(lengths[start : start + 4])[:, None]
        cond = {"embeds": mask[..., None] * torch.ones(4, 5, 2), "mask": mask}
        batches.append(replace(numbered(range(start, start + 4)), cond=cond))
    chosen = grading.pick(batches, torch.tensor([1, 4]))
    assert chosen.x0[:, 0].tolist() == [1, 4]
    assert chosen.cond["embeds"].shape == (2, 3, 2)
    assert chosen.cond["mask"].tolist() == [[True, True, False], [True, True, True]]


def test_the_best_and_the_worst_of_a_group_are_worth_it_and_samples_without_a_score_are_not():
    rewards = torch.tensor([0.1, 0.9, 0.5, 0.4, 0.2, 0.2, 0.2, torch.nan])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    values = torch.nan_to_num(rewards - 0.3)

    def worth(**options):
        return grading.worth_training(values, rewards, groups, **options).int().tolist()

    assert worth(best=2, drop_zero_signal=True) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert worth(best=0, drop_zero_signal=True) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert worth(best=2, drop_zero_signal=False)[:4] == [1, 1, 0, 0]
    assert sum(worth(best=2, drop_zero_signal=False)[4:7]) == 2
    assert worth(best=2, drop_zero_signal=False)[7] == 0


def test_weights_multiply_and_tempflow_s_are_the_noise_of_the_step():
    std, first, second = torch.tensor([0.2, 0.4]), torch.tensor([1.0, 0.5]), torch.tensor([2.0, 3.0])
    assert grading.weigh("equal", std, None, None) is None
    torch.testing.assert_close(grading.weigh("equal", std, first, None), first)
    torch.testing.assert_close(grading.weigh("equal", std, first, second), torch.tensor([2.0, 1.5]))
    torch.testing.assert_close(grading.weigh("tempflow", std, first, None), torch.tensor([0.45, 0.45]))


def test_training_on_some_is_training_on_all_with_the_others_advantages_zero(monkeypatch):
    """The gradient over the kept samples alone is that over all, scaled by how many there are of each."""
    kept = keep_gradients(app, monkeypatch)
    run = lone_rank(TINY, rollouts)
    batches, _ = app.rollout(run, step=0)
    advantages = torch.linspace(-1, 1, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    groups = torch.arange(16) // 8
    keep = grading.worth_training(advantages, advantages, groups, best=4, drop_zero_signal=False)
    some, own, weights = grading.to_train(run.on, batches, advantages, keep, updates=1)
    assert len(some) == 2
    assert len(batches) == 4
    app.update(run, 0, some, own, weights)
    app.update(run, 0, batches, grading.own(run.on, advantages * keep), None)
    for part, whole in zip(run.params, kept[1], strict=True):
        part.grad = None if whole is None else whole * 16 / 8
    assert_same_gradients(kept[0], run.params)


def test_tempflow_trains_with_the_weight_of_the_noise(monkeypatch):
    """With one trained step, whose noise is the same for all samples, the gradient is that without, times 2.25 std."""
    kept = keep_gradients(app, monkeypatch)
    run = lone_rank(replace(TINY, window_high=1), rollouts)
    batches, _ = app.rollout(run, step=0)
    advantages = torch.linspace(-1, 1, 16).view(4, 4)
    app.update(run, 0, batches, advantages, None)
    run.args = replace(run.args, step_weights="tempflow")
    app.update(run, 0, batches, advantages, None)
    first = batches[0]
    move = sde_step(first.x[:, 0], first.x[:, 0], first.sigma(0), first.sigma_next(0), noise_level=0.4, noise=first.x0)
    for part, equal in zip(run.params, kept[0], strict=True):
        part.grad = None if equal is None else equal * 2.25 * move.std[0]
    assert_same_gradients(kept[1], run.params)


@pytest.mark.timeout(600)
def test_best_of_n_is_the_same_on_two_ranks_and_trains_fewer_samples(in_tmp, bright_url):
    args = replace(
        TINY, scorer_url=bright_url, best_of_n=2, steps=1, eval_every=1, share_noise=True, window_low=1,
        old_log_prob="auto", ratio_tolerance=None,
    )  # fmt: skip
    single = train(app, replace(args, name="single"))[1]
    double = train_on_ranks(app, replace(args, name="double"))[1]
    assert single["reward/trained_ratio"] == double["reward/trained_ratio"] == 0.25
    # Four batches of 4 of one group: 1 sample till the window, 4 in its one step and in the last. Then 4 samples once.
    assert single["perf/forwards"] == 4 * (1 + 4 + 4) + 4
    assert double["perf/forwards"] == single["perf/forwards"] + 4  # a batch on each rank, half of it of weight 0
    assert 0 <= single["policy/first_ratio_max_dev"] <= 1e-5
    assert double["policy/grad_norm"] == pytest.approx(single["policy/grad_norm"], rel=1e-3)


def test_forwards_are_counted_with_and_without_the_short_cuts(in_tmp, bright_url):
    """Rollout plus update: 16 samples, 3 steps, 1 of them trained; guidance doubles, a short cut saves."""
    args = replace(
        TINY, scorer_url=bright_url, steps=1, eval_every=1, window_high=1, num_steps=5, old_log_prob="auto",
        ratio_tolerance=None,
    )  # fmt: skip
    forwards = {
        name: train(app, replace(args, name=name, **changes))[1]["perf/forwards"]
        for name, changes in {
            "plain": {},
            "guided": {"guidance_scale": 2.0},
            "flash": {"flash_ratio": 0.5},
            "fast": {"window_low": 2, "window_high": 3, "share_noise": True, "batch_size": 8},
        }.items()
    }
    assert forwards == {"plain": 16 * 6, "guided": 2 * 16 * 6, "flash": 16 * 4, "fast": 2 * 2 + 16 * 3 + 16}


@pytest.mark.parametrize("name", sorted(app.PRESETS))
def test_every_preset_is_whole(name):
    preset = app.PRESETS[name]
    assert preset.name == name
    app.check_args(replace(preset, scorer_url="http://127.0.0.1:1", shard="auto", dtype="float32"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_of_n": 3}, r"--best-of-n must be even and <= --group-size \(8\), got 3"),
        ({"best_of_n": 10}, r"--best-of-n must be even and <= --group-size \(8\), got 10"),
        ({"best_of_n": -2}, "--best-of-n must be >= 0, got -2"),
        ({"flash_ratio": 0.0}, r"--flash-ratio must be in \(0, 1\], got 0.0"),
        ({"drop_zero_signal": True, "old_log_prob": "correct"}, "--old-log-prob correct does not go with"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        app.check_args(replace(TINY, scorer_url="http://127.0.0.1:1", **changes))
