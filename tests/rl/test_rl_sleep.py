"""Scorers asleep beside the trainer: awake only while no rank samples or updates, with the same scores and weights."""

import multiprocessing

import pytest
import torch
from helpers import in_turn
from omni_reward import RewardError, Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.flow.scorers import SleepingScorer, connect
from omni_rl.flow.scoring import collect
from omni_rl.run.run import Run
from omni_rl.settings.fields import change
from omni_rl.tools import plan
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_train.prompts.files import PromptRecord
from trainer_runs import exported, place, recipe, tiny, train, train_on_ranks, unclocked, write_eval_prompts

import train_flowgrpo


def brightness(media, prompts, meta):
    return media["image"].mean(axis=(1, 2, 3), dtype=float).tolist()


class Napping:
    """A scorer that notes where its weights are, for all processes, and how often they came back."""

    def __init__(self):
        self.is_asleep, self.wakes = multiprocessing.Value("b", 0), 0
        self.fails = None  # True at moves to the host, False at moves back

    def score(self, media, prompts, meta):
        assert not self.is_asleep.value
        return brightness(media, prompts, meta)

    def move(self, asleep):
        if self.fails is asleep:
            raise MemoryError
        self.is_asleep.value, self.wakes = asleep, self.wakes + (not asleep)


@pytest.fixture
def napping(tmp_path):
    """A scorer, its URL and the file with its token."""
    scorer, token = Napping(), tmp_path / "token"
    token.write_text("s3cret")
    with serving_in_thread(Scorer(scorer.score, move=scorer.move), token="s3cret") as url:
        yield scorer, {"scorer_url": url, "scorer_token_file": str(token), "scorer_sleep": True}


def settings(tmp_path, monkeypatch, **changes):
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    small = {"prompts_per_step": 4, "group_size": 4, "batch_size": 4, "adv_std": "group", "window_high": 2}
    return tiny(recipe(train_flowgrpo, "tiny-signs"), **(small | changes))


@pytest.fixture
def watched(monkeypatch, napping):
    """Fails where a rank samples or updates while the scorer is awake."""
    scorer, _ = napping
    generate, step = DiffusersEngine.generate, Run.optimizer_step

    def sample(*given):
        assert scorer.is_asleep.value
        return generate(*given)

    def update(*given, **how):
        assert scorer.is_asleep.value
        return step(*given, **how)

    monkeypatch.setattr(DiffusersEngine, "generate", sample)
    monkeypatch.setattr(Run, "optimizer_step", update)


@pytest.mark.usefixtures("watched")
def test_a_run_with_a_sleeping_scorer_trains_as_without_and_shares_no_moment(tmp_path, monkeypatch, napping):
    scorer, flags = napping
    asleep = unclocked(train(train_flowgrpo, settings(tmp_path, monkeypatch, name="asleep", **flags)))
    assert scorer.wakes == 2 + 2  # in two steps and two evaluations
    assert scorer.is_asleep.value
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with serving_in_thread(brightness) as url:
        plain = unclocked(train(train_flowgrpo, settings(tmp_path, monkeypatch, name="awake", scorer_url=url)))
    assert asleep == plain
    ours, theirs = exported("asleep"), exported("awake")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("watched")
def test_no_rank_samples_while_the_scorer_of_another_is_awake(tmp_path, monkeypatch, napping):
    scorer, flags = napping
    args = settings(tmp_path, monkeypatch, name="two", train_steps=1, eval_every=1, **flags)
    lines = train_on_ranks(train_flowgrpo, args)
    assert scorer.wakes >= 3
    assert scorer.is_asleep.value
    one = train(train_flowgrpo, change(args, name="one"))
    assert lines[1]["reward/mean"] == one[1]["reward/mean"]


def test_scores_are_asked_for_when_one_is_read_and_failures_are_no_scores(tmp_path, monkeypatch, napping, capsys):
    scorer, flags = napping
    args = settings(tmp_path, monkeypatch, **flags)
    sleeping, _ = connect(args.scorer.url, args.scorer, place(), PromptRecord(text="a", index=0), ("image",))
    assert isinstance(sleeping, SleepingScorer)
    assert scorer.is_asleep.value  # after the canary
    media = {"image": torch.full((2, 4, 4, 3), 7, dtype=torch.uint8).numpy()}
    pending = [sleeping.submit(media, ["a", "b"], [{}, {}]) for _ in range(2)]
    assert scorer.is_asleep.value
    assert not any(future.done() for future in pending)
    assert [score.value for score in collect(place(), pending)] == [7.0] * 4
    assert scorer.is_asleep.value
    bad = [sleeping.submit(media, ["a", "b"], [{}]), sleeping.submit(media, ["a", "b"], [{}, {}])]
    with pytest.raises(RewardError, match="scores of rank 0: meta must hold one object per prompt"):
        collect(place(), bad)
    scorer.fails = True
    kept = collect(place(), [sleeping.submit(media, ["a", "b"], [{}, {}])])
    assert [score.value for score in kept] == [7.0, 7.0]  # they were there before the server failed to sleep
    assert "--scorer.sleep: POST" in capsys.readouterr().err
    scorer.fails = False
    with pytest.raises(RewardError, match=r"scores of rank 0: POST .*/score: 500 scorer_failed"):
        collect(place(), [sleeping.submit(media, ["a", "b"], [{}, {}])])
    scorer.fails = None
    assert len(collect(place(), [sleeping.submit(media, ["a", "b"], [{}, {}])])) == 2
    sleeping.close()


def test_a_scorer_that_cannot_sleep_and_settings_that_do_not_fit_are_refused_by_name(tmp_path, monkeypatch, napping):
    _, flags = napping
    args = settings(tmp_path, monkeypatch, **flags)
    with serving_in_thread(brightness, token="s3cret") as url:
        with pytest.raises(
            ValueError, match=r"--scorer\.sleep needs a scorer whose weights can move to the host, test"
        ):
            connect(url, args.scorer, place(), PromptRecord(text="a", index=0), ("image",))
        client, _ = connect(
            url, args.scorer, place(), PromptRecord(text="a", index=0), ("image",), name="--scorer.watch-url"
        )
        client.close()  # only the run's own scorer sleeps
    with pytest.raises(ValueError, match=r"--scorer\.sleep needs --scorer\.token-file beside --scorer\.url"):
        train_flowgrpo.check_args(settings(tmp_path, monkeypatch, scorer_url="http://a:1", scorer_sleep=True))


@in_turn(0, 3)
def test_a_plan_adds_the_scorer_to_the_wait_for_scores_only_where_it_sleeps(tmp_path, monkeypatch):
    args = settings(tmp_path, monkeypatch, dry_run=True, memory_device_gb=1e3)
    own = {"scorer_name": "pickscore"}
    bare, beside, asleep = (
        plan.measure(
            train_flowgrpo.main, settings(tmp_path, monkeypatch, dry_run=True, memory_device_gb=1e3, **more), 1
        )
        for more in ({}, own, own | {"scorer_sleep": True})
    )
    assert args.memory.device_gb == 1e3
    size = asleep.scorer.total()
    assert size == beside.scorer.total() > 4e9
    for phase in ("load", "rollout", "update", "save"):
        assert asleep.peaks[phase] == pytest.approx(bare.peaks[phase], rel=1e-3)
        assert beside.peaks[phase] == pytest.approx(bare.peaks[phase] + size, rel=1e-3)
    at_rest = asleep.peaks["reward_wait"] - size
    assert 0 < at_rest < bare.peak
    assert asleep.peak == max(bare.peak, at_rest + size) < beside.peak
    assert (
        f"of the wait for scores, {asleep.peaks['reward_wait'] / 1e9:.3g}, the scorer's, GB: 4.21" in asleep.describe()
    )
