"""Scorers that compare the samples of a prompt: a group is whole wherever it is drawn, and its scores are the same."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from helpers import sampled
from hypothesis import given
from hypothesis import strategies as st
from omni_reward import RewardClient, Score, Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.flow.evals import HeldOut
from omni_rl.flow.sampling import evaluate_set, expand_groups, fill_batches, sample, step_prompts
from omni_rl.flow.scorers import abstaining_scorer, connect
from omni_rl.flow.scoring import collect, submit_groups
from omni_rl.run.media import check_groups
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import Prompt, Samples
from omni_train.dist import deal
from omni_train.prompts.files import PromptRecord
from trainer_runs import lone_run, place, recipe, tiny, train, train_on_ranks, unclocked, write_eval_prompts

import train_flowgrpo


def above(media, prompts, meta):
    """The share of the others of a call that each image is brighter than, which depends on who is in the call."""
    means = media["image"].mean(axis=(1, 2, 3), dtype=float)
    assert len(set(prompts)) == 1
    if len(means) < 2:
        return [Score(None, abstained="there is nothing to compare with")]
    return [Score(float((mean > means).sum() / (len(means) - 1)), parts={"mean": float(mean)}) for mean in means]


@pytest.fixture
def url():
    with serving_in_thread(Scorer(above, groups=True)) as url:
        yield url


def settings(tmp_path, monkeypatch, **changes):
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    small = {"prompts_per_step": 4, "group_size": 4, "batch_size": 4, "eval_samples_per_prompt": 2, "adv_std": "group"}
    return tiny(recipe(train_flowgrpo, "tiny-signs"), **(small | changes))


class Counts:
    """A scorer of groups that notes what each request holds, and how many batches there were by then."""

    kinds, takes_references, takes_groups, busy_s = ("image",), False, True, 0.0

    def __init__(self):
        self.asked, self.num_batches = [], 0

    def submit(self, media, prompts, meta, references=None, groups=None):
        self.asked.append((self.num_batches, groups, [int(image[0, 0, 0]) for image in media["image"]]))
        future = Future()
        future.set_result([Score(0.0)] * len(prompts))
        return future

    def close(self):
        pass


def drawn(first, group_size, count):
    """Samples whose pixels are their index in the step."""
    own = tuple(Prompt("p", i // group_size, i, i) for i in range(first, first + count))
    images = torch.stack([torch.full((2, 2, 3), p.index, dtype=torch.uint8) for p in own])
    return Samples(own, {"image": images}, {}, 0)


@pytest.mark.parametrize(
    ("group_size", "sizes", "most", "requests"),
    [
        (4, [4], 0, [4]),
        (4, [8], 0, [8]),
        (4, [8], 4, [4, 4]),
        (4, [8], 7, [4, 4]),
        (4, [8], 2, [4, 4]),  # a group is never cut
        (4, [2, 2], 0, [4]),
        (4, [1, 1, 1, 1], 2, [4]),
    ],
)
def test_requests_hold_whole_groups_of_one_batch_or_several(group_size, sizes, most, requests):
    scorer, starts = Counts(), np.cumsum([0, *sizes])
    batches = [drawn(int(a), group_size, n) for a, n in zip(starts, sizes, strict=False)]
    asked = [submit_groups(scorer, batches[: end + 1], group_size, most) for end in range(len(batches))]
    pending = asked[-1]
    assert not any(asked[:-1])  # before the group is whole
    assert [len(future.result()) for future in pending] == requests
    assert [index for _, _, own in scorer.asked for index in own] == list(range(sum(sizes)))
    assert [g for _, groups, _ in scorer.asked for g in groups] == [i // group_size for i in range(sum(sizes))]


TIMES = {2: [2, 4, 6, 8], 4: [1, 2, 3, 4], 8: [1, 2]}  # by the size of a batch


@pytest.mark.parametrize("batch_size", sampled(TIMES, 1))
def test_a_group_is_asked_about_as_soon_as_its_last_batch_is_there(tmp_path, monkeypatch, batch_size):
    run = lone_run(settings(tmp_path, monkeypatch, batch_size=batch_size))
    run.scorer, generate = Counts(), run.engine.generate

    def count(own, params):
        run.scorer.num_batches += 1
        return generate(own, params)

    monkeypatch.setattr(run.engine, "generate", count)
    sample(run, step_prompts(run, Step(0)), run.base_params)
    assert [number for number, *_ in run.scorer.asked] == TIMES[batch_size]


@pytest.mark.parametrize("batch_size", sampled(TIMES, 1))
def test_one_rank_and_two_give_each_sample_the_same_score(tmp_path, monkeypatch, url, batch_size):
    args = settings(tmp_path, monkeypatch, batch_size=batch_size)

    def scores(world_size):
        found = {}
        for rank in range(world_size):
            run = lone_run(args, rank=rank, world_size=world_size)
            with RewardClient(url) as run.scorer:
                rollout = sample(run, step_prompts(run, Step(0)), run.base_params)
                own = collect(place(), rollout.pending)
            places = [prompt.index for batch in rollout.batches for prompt in batch.prompts]
            found |= dict(zip(places, own, strict=True))
        return [found[index] for index in range(16)]

    alone = scores(1)
    assert scores(2) == alone
    values = np.array([score.value for score in alone]).reshape(4, 4)
    assert np.sort(values, axis=1) == pytest.approx(np.tile([0, 1 / 3, 2 / 3, 1], (4, 1)))


def test_training_on_two_ranks_logs_the_rewards_of_one(tmp_path, monkeypatch, url):
    args = settings(tmp_path, monkeypatch, batch_size=2, scorer_url=url, train_steps=1, eval_every=1, window_high=2)
    one = unclocked(train(train_flowgrpo, args))
    two = unclocked(train_on_ranks(train_flowgrpo, change(args, name="two")))
    for own, when in (("eval/", 0), ("reward/", 1)):  # of one policy, before the update
        scores = {name: value for name, value in one[when].items() if name.startswith(own)}
        assert scores == {name: two[when][name] for name in scores}
    assert one[0]["eval/reward"] == 0.5  # of any two, one is brighter
    assert one[0]["eval/mean"] > 1
    assert one[1]["reward/mean"] == pytest.approx(0.5)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("batch_size", "samples"), [(2, 2), (4, 2), (2, 4), (3, 6)])
def test_an_evaluation_fills_up_with_whole_groups(batch_size, samples, num_ranks):
    records = [PromptRecord(text=str(i), index=i) for i in range(3)]
    prompts = expand_groups(records, samples, seed=0, step=-1)
    filled = fill_batches(prompts, batch_size, num_ranks, group=samples)
    assert [p for p in filled if p.index < len(prompts)] == prompts
    assert sorted(p.index for p in filled) == list(range(len(filled)))
    for rank in range(num_ranks):
        own = [p for batch in deal(filled, place(rank, num_ranks), batch_size, consecutive=samples) for p in batch]
        groups = [own[i : i + samples] for i in range(0, len(own), samples)]
        assert len(own) * num_ranks == len(filled)
        assert all(len({(p.group, p.text) for p in group}) == 1 for group in groups)
        assert len({group[0].group for group in groups}) == len(groups)


@given(num_prompts=st.integers(1, 9), samples=st.sampled_from([2, 4]), num_ranks=st.integers(1, 5))
def test_an_evaluation_of_few_prompts_cuts_no_group(num_prompts, samples, num_ranks):
    records = [PromptRecord(text=str(i), index=i) for i in range(num_prompts)]
    size = HeldOut("", records, None, samples=samples).batch_size(8, num_ranks)
    filled = fill_batches(expand_groups(records, samples, seed=0, step=-1), size, num_ranks, group=samples)
    for rank in range(num_ranks):
        own = [p.group for batch in deal(filled, place(rank, num_ranks), size, consecutive=samples) for p in batch]
        assert len(own) * num_ranks == len(filled)
        assert own == [group for group in own[::samples] for _ in range(samples)]


def test_a_second_scorer_of_evaluations_may_compare_too(tmp_path, monkeypatch, url):
    run = lone_run(settings(tmp_path, monkeypatch, batch_size=2))
    run.scorer = abstaining_scorer()
    with RewardClient(url) as watch:
        held = HeldOut("", run.held_out[0].records, run.base_params, samples=4, watch=watch)
        metrics, _ = evaluate_set(run, held)
    assert metrics["eval/watch"] == pytest.approx(0.5)


def test_two_canaries_are_compared_before_the_start(tmp_path, monkeypatch, url):
    args = settings(tmp_path, monkeypatch)
    client, version = connect(url, args.scorer, place(), PromptRecord(text="a", index=0), ("image",))
    assert client.takes_groups
    assert version == "test"
    assert client.scorer == {"scorer": "test", "scorer_version": ""}  # which its replies must name
    client.close()
    message = "--scorer.url must be a scorer of single answers, this one compares those of a group"
    lone = Scorer(lambda media, prompts, meta: [0.0] * len(prompts), media=("text",), groups=True)
    with serving_in_thread(lone) as texts, pytest.raises(ValueError, match=message):
        connect(texts, args.scorer, place(), PromptRecord(text="a", index=0), ("text",))


@pytest.mark.parametrize(
    ("changes", "ranks", "whole", "message"),
    [
        ({"batch_size": 3}, 1, {"--group-size": 4}, "--group-size and --batch-size: one must divide .* 4 and 3"),
        ({"batch_size": 2}, 3, {"--group-size": 4}, "whole groups and batches, 12 samples or a multiple, .* make 16"),
        ({"batch_size": 8}, 4, {"--group-size": 4}, "whole groups and batches, 32 samples or a multiple, .* make 16"),
        ({}, 1, {"--eval.samples-per-prompt": 1}, "--eval.samples-per-prompt must be at least 2 .* got 1"),
        ({}, 1, {"eval.sets[1].samples_per_prompt": 3}, r"sets\[1\].samples_per_prompt and --batch-size: .* 3 and 4"),
        ({}, 2, {"--group-size": 4, "--eval.samples-per-prompt": 8}, None),
        ({"batch_size": 3}, 1, {}, None),
    ],
)  # fmt: skip
def test_groups_that_ranks_or_batches_would_cut_are_refused_by_name(
    tmp_path, monkeypatch, changes, ranks, whole, message
):
    args = settings(tmp_path, monkeypatch, **changes)
    if message is None:
        check_groups(args, ranks, whole)
        return
    with pytest.raises(ValueError, match=message):
        check_groups(args, ranks, whole)


def test_a_run_says_before_its_start_that_an_evaluation_has_nothing_to_compare(tmp_path, monkeypatch, url):
    args = settings(tmp_path, monkeypatch, scorer_url=url, eval_samples_per_prompt=1, window_high=2)
    with pytest.raises(ValueError, match=r"--eval\.samples-per-prompt must be at least 2"):
        train(train_flowgrpo, args)
