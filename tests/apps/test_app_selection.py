"""From scores to what is trained on: advantages, the samples worth it, and the batches that they are put into."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omni_rl.flow.batches import TrainBatch, keep_samples, select
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import Params, Prompt, Trajectory, replay
from trainer_runs import (
    assert_same_gradients,
    keep_gradients,
    lone_run,
    place,
    recipe,
    rollout,
    tiny,
    train,
    train_on_ranks,
)

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs-flowgrpo"), prompts_per_step=2, group_size=8, batch_size=4, window_low=0, window_high=2,
    lr=1e-4, optim_lr_scheduler_type="constant", old_log_prob="recompute", ratio_tolerance=1e-5,
)  # fmt: skip


def numbered(numbers, height=16):
    """A batch whose samples are told apart by x0, which is their index in the step."""
    x = torch.zeros(len(numbers), 1, 1)
    return Trajectory(
        prompts=tuple(Prompt(str(n), group=n // 4, index=n, seed=n) for n in numbers),
        media={"image": torch.zeros(len(numbers), 1, 1, 3, dtype=torch.uint8)},
        rates={},
        weight_version=0,
        x=x,
        x_next=x,
        sde_steps=x[..., 0].long(),
        sigmas=torch.ones(2),
        rollout_log_prob=x[..., 0],
        rollout_mean=None,
        cond={},
        x0=torch.tensor(numbers, dtype=torch.float32)[:, None],
        params=Params(2, height, 16),
    )


def numbers_of(batches):
    """The samples [batches, B] that the batches hold."""
    return torch.stack([batch.trajectory.x0[:, 0] for batch in batches]).long()


def select_on_ranks(batches_by_rank, values, keep, num_minibatches):
    """What every rank trains on, each of which sees all ranks' numbers, as the collective would show them."""
    said, world_size, dropped = [], len(batches_by_rank), None if keep.all() else keep

    def select_all():
        return [
            select(place(rank, world_size), batches, values, dropped, num_minibatches=num_minibatches)
            for rank, batches in enumerate(batches_by_rank)
        ]

    with pytest.MonkeyPatch.context() as monkeypatch:
        name = "omni_rl.flow.batches.gather_json"
        monkeypatch.setattr(name, lambda dist, own: said.append(own) or [own] * world_size)
        select_all()
        monkeypatch.setattr(name, lambda dist, own: said[:world_size])
        return select_all()


@settings(deadline=None, max_examples=60)
@given(
    keep=st.lists(st.booleans(), min_size=24, max_size=24),
    world_size=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 2, 4]),
    updates=st.sampled_from([1, 2]),
    seed=st.integers(0, 3),
    heights=st.lists(st.sampled_from([16, 32, 48]), min_size=24, max_size=24),
)
def test_the_mean_over_all_places_of_an_update_is_the_mean_over_what_is_kept(
    keep, world_size, size, updates, seed, heights
):
    """However the samples were dealt to the ranks, in turn (seed 0) or in any other order, and whatever their sizes."""
    assume(24 // size // world_size % updates == 0)
    keep = torch.tensor(keep)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(24)
    everyone = order.view(-1, world_size, size)
    values, totals, seen = torch.randn(24), [0.0] * updates, [[] for _ in range(updates)]
    tall = torch.tensor(heights)[: len(everyone) * world_size].view(-1, world_size)
    batches_by_rank = [
        [numbered(*batch) for batch in zip(everyone[:, rank].tolist(), tall[:, rank].tolist(), strict=True)]
        for rank in range(world_size)
    ]
    lengths = set()
    for new in select_on_ranks(batches_by_rank, values, keep, updates):
        lengths.add(len(new))
        numbers = numbers_of(new)
        assert torch.equal(torch.stack([batch.advantages for batch in new]), values[numbers])
        weights = torch.stack([torch.ones(size) if b.weights is None else b.weights for b in new])
        assert torch.equal(weights > 0, keep[numbers])
        for update, part in enumerate(numbers.chunk(updates)):
            share = weights.chunk(updates)[update]
            seen[update] += part[share > 0].tolist()
            totals[update] += (share * values[part]).mean().item() / world_size
    blocks = everyone.chunk(updates)  # a minibatch has the same share of every rank's batches
    for block, numbers, total in zip(blocks, seen, totals, strict=True):
        wanted = block.flatten()[keep[block.flatten()]]
        assert sorted(numbers) == sorted(wanted.tolist())  # each once
        assert total == pytest.approx(values[wanted].mean().item() if numbers else 0.0, abs=1e-5)
    counts = torch.stack([(keep[everyone].sum(dim=2) * (tall == height)) for height in (16, 32, 48)])
    counts = counts.view(3, updates, -1, world_size).sum(dim=2)  # [sizes, updates, ranks]
    most = int((counts / size).ceil().sum(dim=0).max())
    assert lengths == {len(everyone) if keep.all() else updates * max(1, most)}  # as few as possible, on every rank


def test_what_fills_up_is_spread_over_the_batches():
    keep = torch.tensor([True] * 6 + [False] * 6)
    batches = [numbered(list(range(i, i + 4))) for i in (0, 4, 8)]
    chosen = select(place(), batches, torch.zeros(12), keep)
    assert [int((batch.weights > 0).sum()) for batch in chosen] == [3, 3]


def test_everything_is_taken_as_it_was_drawn_when_nothing_is_left_out():
    batches, values = [numbered([4, 5, 6, 7]), numbered([12, 13, 14, 15])], torch.randn(16)
    chosen = select(place(1, 2), batches, values, None)
    assert [batch.trajectory for batch in chosen] == batches
    assert [batch.weights for batch in chosen] == [None, None]
    assert torch.equal(torch.cat([batch.advantages for batch in chosen]), values.view(2, 2, 4)[:, 1].flatten())


def test_a_batch_carries_no_more_padding_than_its_longest_text_needs():
    """Samples 1 and 4 of texts with 2 and 3 tokens come from batches that were padded to 5."""
    lengths = [5, 2, 4, 5, 3, 1, 1, 1]
    batches = []
    for start in (0, 4):
        mask = torch.arange(5) < torch.tensor(lengths[start : start + 4])[:, None]
        cond = {"embeds": mask[..., None] * torch.ones(4, 5, 2), "embeds_mask": mask}
        batches.append(replace(numbered(list(range(start, start + 4))), cond=cond))
    keep = torch.isin(torch.arange(8), torch.tensor([1, 4]))
    (chosen,) = select(place(), batches, torch.zeros(8), keep)
    rows = chosen.weights > 0
    assert chosen.trajectory.x0[rows, 0].tolist() == [1, 4]
    longest = max(lengths[int(n)] for n in chosen.trajectory.x0[:, 0])
    assert chosen.trajectory.cond["embeds"].shape == (4, longest, 2)
    assert chosen.trajectory.cond["embeds_mask"][rows].sum(dim=1).tolist() == [2, 3]


def test_the_best_and_the_worst_of_a_group_are_worth_it_and_samples_without_a_score_are_not():
    rewards = torch.tensor([0.1, 0.9, 0.5, 0.4, 0.2, 0.2, 0.2, torch.nan])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    values = torch.nan_to_num(rewards - 0.3)

    def kept(best_worst, drop_silent_groups):
        options = {"best_worst": best_worst, "drop_silent_groups": drop_silent_groups}
        return keep_samples(values, rewards, groups, **options).int().tolist()

    assert kept(2, True) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert kept(0, True) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert kept(2, False)[:4] == [1, 1, 0, 0]
    assert sum(kept(2, False)[4:7]) == 2
    assert kept(2, False)[7] == 0


def test_weights_multiply_and_tempflow_s_are_the_noise_of_the_step():
    std, first, second = torch.tensor([0.2, 0.4]), torch.tensor([1.0, 0.5]), torch.tensor([2.0, 3.0])
    batch = TrainBatch.of(numbered([0, 1]), torch.zeros(2))
    assert app.step_weights(TINY, batch, 0, std, None) is None
    torch.testing.assert_close(app.step_weights(TINY, batch, 0, std, first), first)
    batch = TrainBatch.of(batch.trajectory, batch.advantages, second)
    torch.testing.assert_close(app.step_weights(TINY, batch, 0, std, first), torch.tensor([2.0, 1.5]))
    tempflow = change(TINY, algo="tempflow")
    torch.testing.assert_close(app.step_weights(tempflow, batch, 0, std, None), torch.tensor([0.9, 2.7]))


def test_training_on_some_is_training_on_all_with_the_others_advantages_zero():
    """The gradient over the kept samples alone is that over all, scaled by how many there are of each."""
    run = lone_run(TINY)
    kept = keep_gradients(run)
    batches, _ = rollout(run, app.step_params(run, Step(0)))
    advantages = torch.linspace(-1, 1, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    groups = torch.arange(16) // 8
    keep = keep_samples(advantages, advantages, groups, best_worst=4, drop_silent_groups=False)
    some = select(run.dist, batches, advantages, keep)
    assert len(some) == 2
    assert len(batches) == 4
    app.update(run, Step(0), some)
    app.update(run, Step(0), select(run.dist, batches, advantages * keep, None))
    for part, whole in zip(run.policy.params, kept[1], strict=True):
        part.grad = None if whole is None else whole * 16 / 8
    assert_same_gradients(kept[0], run.policy.params)


@pytest.mark.timeout(600)
def test_best_and_worst_of_n_is_the_same_on_two_ranks_and_trains_fewer_samples(here, bright_url):
    args = change(
        TINY, scorer_url=bright_url, best_worst_n=2, train_steps=1, eval_every=1, same_start_noise=True, window_low=1,
        old_log_prob="auto", ratio_tolerance=None,
    )  # fmt: skip
    single = train(app, change(args, name="single"))[1]
    double = train_on_ranks(app, change(args, name="double"))[1]
    assert single["reward/trained_ratio"] == double["reward/trained_ratio"] == 0.25
    # Two batches of 4 of a group: 1 sample till the window, 4 of each in its one step and in the last. Then 4 once.
    assert single["perf/forwards"] == 2 * (1 + 2 * (4 + 4)) + 4
    assert double["perf/forwards"] == single["perf/forwards"] + 4  # a batch on each rank, half of it of weight 0
    assert 0 <= single["policy/first_ratio_max_dev"] <= 1e-5
    assert double["policy/grad_norm"] == pytest.approx(single["policy/grad_norm"], rel=1e-3)


def test_forwards_are_counted_with_and_without_the_short_cuts(here, bright_url):
    """Rollout plus update: 16 samples, 3 steps, 1 of them trained; guidance doubles, a short cut saves."""
    args = change(
        TINY, scorer_url=bright_url, train_steps=1, eval_every=1, window_high=1, num_inference_steps=5,
        old_log_prob="auto", ratio_tolerance=None,
    )  # fmt: skip
    lines = {
        name: train(app, change(args, name=name, **changes))[1]
        for name, changes in {
            "plain": {},
            "guided": {"true_cfg_scale": 2.0},
            "compressed": {"algo": "mixgrpo-flash", "window_size": 1},
            "fast": {"window_low": 2, "window_high": 3, "same_start_noise": True, "batch_size": 8},
        }.items()
    }
    forwards = {name: line["perf/forwards"] for name, line in lines.items()}
    assert forwards == {"plain": 16 * 6, "guided": 2 * 16 * 6, "compressed": 16 * 4, "fast": 2 * 2 + 16 * 3 + 16}
    backwards = {name: line["perf/backwards"] for name, line in lines.items()}
    assert backwards == {"plain": 16, "guided": 2 * 16, "compressed": 16, "fast": 16}
    assert all(line["perf/cpu_s"] > 0 for line in lines.values())


def test_an_update_takes_a_share_of_the_steps_where_there_are_fewer_batches_than_updates():
    """A batch of 16 with two kept steps: the two updates have a step of all samples each, at the batch's own shape."""
    run = lone_run(change(TINY, batch_size=16, num_minibatches=2, old_log_prob="rollout", ratio_tolerance=0.0))
    kept = keep_gradients(run)
    batches, _ = rollout(run, app.step_params(run, Step(0)))
    advantages = torch.linspace(-1, 1, 16)
    halves = select(run.dist, batches, advantages, None, num_minibatches=2)
    assert [half.trajectory.sde_steps[0].tolist() for half in halves] == [[0], [1]]
    step = Step(0)
    metrics = app.update(run, step, halves) | step.metrics
    assert metrics["policy/first_ratio_max_dev"] == metrics["policy/ratio_max_dev"] == 0.0
    for k, ours in enumerate(kept):
        for part in run.policy.params:
            part.grad = None
        (-advantages * replay(run.model, run.policy.net, batches[0], k).log_prob).mean().backward()
        assert_same_gradients(ours, run.policy.params)


@pytest.mark.parametrize(("count", "updates"), [(1, 1), (1, 2), (1, 4), (2, 4), (3, 2), (3, 12), (4, 2), (6, 4)])
def test_every_step_of_every_sample_is_in_one_update_and_the_updates_are_equal(count, updates):
    batches = [numbered([2 * i, 2 * i + 1]) for i in range(count)]
    steps = torch.arange(4).expand(2, 4)
    batches = [replace(b, x=steps, x_next=steps, sde_steps=steps, rollout_log_prob=steps.float()) for b in batches]
    chosen = select(place(), batches, torch.zeros(2 * count), None, num_minibatches=updates)
    size = len(chosen) // updates
    seen = [
        sorted(
            (n, s)
            for b in chosen[i : i + size]
            for n in b.trajectory.indices.tolist()
            for s in b.trajectory.sde_steps[0].tolist()
        )
        for i in range(0, len(chosen), size)
    ]
    assert len(seen) == updates
    assert {len(part) for part in seen} == {2 * count * 4 // updates}
    assert sorted(pair for part in seen for pair in part) == [(n, s) for n in range(2 * count) for s in range(4)]


def test_no_forward_is_added_by_more_updates(here, bright_url):
    """Old log-probs are the rollout's also where samples may be left out, as long as none was."""
    args = change(TINY, scorer_url=bright_url, train_steps=1, eval_every=1, old_log_prob="auto", ratio_tolerance=None)
    forwards = {
        name: train(app, change(args, name=name, **changes))[1]["perf/forwards"]
        for name, changes in {
            "two of a batch": {"num_minibatches": 2, "batch_size": 16},
            "two, none left out": {"num_minibatches": 2, "filter_groups": True},
        }.items()
    }
    assert set(forwards.values()) == {16 * (3 + 2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_worst_n": 3}, r"--best-worst-n must be even and <= --group-size \(8\), got 3"),
        ({"best_worst_n": 10}, r"--best-worst-n must be even and <= --group-size \(8\), got 10"),
        ({"best_worst_n": -2}, "--best-worst-n must be >= 0, got -2"),
        (
            {"old_log_prob": "rollout", "ratio_tolerance": 4e-3, "clip_range": 1e-2},
            r"--ratio-tolerance must be <= a third of --clip-range \(0.01\) where .* got 0.004",
        ),
        ({"old_log_prob": "auto", "ratio_tolerance": 1e-3, "clip_range": 1e-5}, "--ratio-tolerance must be <= a third"),
        (
            {"filter_groups": True, "old_log_prob": "correct"},
            "--old-log-prob correct needs --correction.level step for",
        ),
        (
            {"algo": "flowgrpo-cps", "old_log_prob": "correct"},
            "--old-log-prob correct does not go with flowgrpo-cps, whose log-prob is no density",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(here, changes, message):
    with pytest.raises(ValueError, match=message):
        app.check_args(change(TINY, scorer_url="http://127.0.0.1:1", **changes))
