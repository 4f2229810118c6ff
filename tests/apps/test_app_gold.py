"""Runs with a gold set: its score beside the reward's, the best weights and checkpoint, the stop, crashes and ranks."""

import copy
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import names
from omni_losses import gaussian_kl
from omni_reward import Score
from omni_reward.serving import serving_here
from omni_rl.flow import scoring
from omni_rl.flow.scoring import TrainBatch
from omni_rl.report.data import run_data
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import replay
from omni_train.files import load_metrics
from safetensors.torch import load_file
from trainer_runs import lone_run, recipe, rollout, tiny, train, train_on_ranks, unclocked, undocumented

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=4, batch_size=4, lr=1e-3, lr_decay=False, lora_rank=4, lora_alpha=8,
    save_every=100, keep_checkpoints=1, eval_every=1, eval_num_prompts=1, eval_gold_prompts="gold.txt",
)  # fmt: skip
SCORES = (0.4, 0.5, 0.9, 0.3, 0.2, 0.1, 0.1)  # of the gold set, evaluation by evaluation


@pytest.fixture
def gold_prompts(here):
    (here / "gold.txt").write_text('a red sign that says "GH"\na red sign that says "IJ"\n')


@contextmanager
def scripted(scores):
    """URL of a gold scorer whose evaluations have these means, whatever it sees: two samples of two prompts each."""
    count = iter(scores)
    with serving_here(lambda media, prompts, meta: [next(count) + 0.01 * ("IJ" in p) for p in prompts]) as url:
        yield url


def per_sample(scores):
    return [0.0, *(score for score in scores for _ in range(4))]  # after that of the canary


def settings(name, bright, gold, **changes):
    return change(TINY, name=name, scorer_url=bright, eval_gold_scorer_url=gold, **changes)


def best(name):
    return {k: v for file in Path(f"runs/{name}/best").rglob("*.safetensors") for k, v in load_file(file).items()}


def test_one_gold_prompt_is_too_few_to_tell_a_fall(here):
    (here / "gold.txt").write_text("a red sign\n")
    with pytest.raises(ValueError, match=r"--eval\.gold-prompts must have at least 2 prompts, got 1"):
        train(app, settings("one", "http://127.0.0.1:9", "http://127.0.0.1:7", train_steps=1))


def test_a_run_stops_when_the_gold_score_has_fallen_and_keeps_its_best(here, gold_prompts, bright_url, capfd):
    with scripted(per_sample(SCORES)) as gold:
        notify = {"tracking_notify": "tee -a 'what was told.txt'"}
        args = settings("run", bright_url, gold, train_steps=6, eval_stop_on="gold-falls:2", **notify)
        lines = train(app, args, report=True)
    assert [line["eval/gold/reward"] for line in lines] == pytest.approx([score + 0.005 for score in SCORES[:5]])
    shown = capfd.readouterr()
    assert (
        "--stop-on gold-falls:2: the gold score has fallen since step 2, whose weights are in runs/run/best"
        in shown.out
    )
    assert "stopped after step 4" in shown.out
    assert "ALARM after step 4: The gold score falls (" in shown.err
    told = Path("what was told.txt").read_text()
    starts = re.findall(r"^run: (ALARM after step 4: The gold score falls|--stop-on|stopped after step 4)", told, re.M)
    assert starts == ["ALARM after step 4: The gold score falls", "--stop-on", "stopped after step 4"]
    assert "tee" not in Path("runs/run/config.toml").read_text()  # a command may hold a token
    assert "The gold score falls" in [alarm["title"] for alarm in run_data(Path("runs/run"))["alarms"]]
    assert undocumented(lines) == {f"eval/gold/{name}" for name in ("abstained_ratio", "best@2")}  # NAME
    assert names(Path("runs/run/checkpoints")) == ["step-00000002", "step-00000004"]

    with scripted(per_sample(SCORES)) as gold:  # as far as its best, without any of this
        train(app, settings("short", bright_url, gold, train_steps=2))
    ours, theirs = best("run"), best("short")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    shutil.copy("gold.txt", "other.txt")
    with pytest.raises(ValueError, match="eval_gold_prompts was"):  # the best would mix scales
        train(app, settings("short", bright_url, gold, train_steps=3, eval_gold_prompts="other.txt"))
    Path("gold.txt").write_text('a red sign that says "MN"\na red sign that says "OP"\n')
    with pytest.raises(ValueError, match=r"gold\.txt has other contents than at the start"):
        train(app, settings("short", bright_url, gold, train_steps=3))


def test_the_best_is_the_same_after_a_crash_and_its_checkpoint_continues(here, gold_prompts, bright_url):
    with scripted(per_sample(SCORES)) as gold:
        lines = train(app, settings("whole", bright_url, gold, train_steps=5))
    assert names(Path("runs/whole/checkpoints")) == ["step-00000002", "step-00000005"]

    with scripted(per_sample(SCORES)) as gold:  # the checkpoint of the best is what was lost
        train(app, settings("torn", bright_url, gold, train_steps=3))
    for step in (2, 3):
        shutil.rmtree(f"runs/torn/checkpoints/step-{step:08}", ignore_errors=True)
    shutil.copytree("runs/whole/checkpoints/step-00000002", "runs/torn/checkpoints/step-00000002")
    with scripted([0.0, *per_sample(SCORES)[13:]]) as gold:
        again = train(app, settings("torn", bright_url, gold, train_steps=5))
    assert unclocked(again) == unclocked(lines)  # with drift from samples of the first life
    assert names(Path("runs/torn/checkpoints")) == ["step-00000002", "step-00000005"]
    ours, theirs = best("torn"), best("whole")
    assert all(ours[name].equal(theirs[name]) for name in theirs)

    shutil.rmtree("runs/whole/checkpoints/step-00000005")  # back to the best
    with scripted([0.0, *per_sample(SCORES)[13:]]) as gold:
        back = train(app, settings("whole", bright_url, gold, train_steps=5))
    assert unclocked(back) == unclocked(lines)


def test_the_best_comes_back_from_a_url_into_an_empty_folder(here, gold_prompts, bright_url, monkeypatch):
    with scripted(per_sample(SCORES)) as gold:
        args = settings("run", bright_url, gold, train_steps=3, checkpoint_url=f"file://{here}/store")
        train(app, args)
        wanted = best("run")
        monkeypatch.chdir((here / "elsewhere").mkdir() or here / "elsewhere")
        shutil.copy(here / "gold.txt", "gold.txt")
        shutil.copy(here / "eval.txt", "eval.txt")
    with scripted([0.0, *per_sample(SCORES)[17:]]) as gold:
        train(app, change(args, train_steps=4, eval_gold_scorer_url=gold))
    found = best("run")
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
    assert names(here / "store") == ["step-00000002", "step-00000004"]  # that of the best is kept
    assert [line["step"] for line in load_metrics("runs/run/metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_the_reward_is_compared_with_the_gold_score_on_any_number_of_ranks(here, gold_prompts, bright_url):
    def dark(media, prompts, meta):
        return [-float(image.mean()) for image in media["image"]]

    with serving_here(dark, name="dark") as gold:
        one = train(app, settings("one", bright_url, gold))
        two = train_on_ranks(app, settings("two", bright_url, gold, batch_size=2))
    for line in (one[0], one[-1]):
        assert line["eval/gold/rank_correlation"] == pytest.approx(-1.0)  # what is brighter is worse
        assert line["eval/gold/reward"] == pytest.approx(-255 * line["eval/gold/proxy"], rel=1e-4)
    assert one[0]["eval/gold/drift"] == 0.0 < one[-1]["eval/gold/drift"]
    assert {n: v for n, v in two[0].items() if "gold" in n} == pytest.approx(
        {n: v for n, v in one[0].items() if "gold" in n}, abs=1e-3
    )
    assert two[-1]["eval/gold/drift"] > 0.0
    assert not Path("runs/two/best").exists()  # the model as it was given is the best


def test_a_run_starts_a_server_for_the_gold_scorer_too(here, gold_prompts):
    args = change(TINY, scorer_name="jpeg", eval_gold_scorer="jpeg --option mode=incompressibility", train_steps=1)
    lines = train(app, args)
    assert lines[0]["eval/gold/reward"] == pytest.approx(-lines[0]["eval/gold/proxy"])
    assert load_metrics("runs/tiny-signs/metrics.jsonl") == lines


GATED = change(
    TINY, eval_gold_prompts="", kl_coef=0.5, prompts_per_step=4, num_inference_steps=4, eval_every=2, lr=1e-2,
    gate_parts="mean", gate_share=0.25,
)  # fmt: skip


def darkest(media, prompts, meta):
    """A score that rises with the level of one corner, whose part is the mean level of the image."""
    return [Score(float(i[0, 0].mean()), parts={"mean": float(i.mean())}) for i in media["image"]]


def test_the_kl_is_of_samples_that_the_reward_overrates(here):
    with serving_here(darkest, name="corner") as url:
        message = r"--gate-parts must name parts of the scores, got 'main'; this scorer has mean$"
        with pytest.raises(ValueError, match=message):
            train(app, change(GATED, name="unknown", scorer_url=url, gate_parts="mean,main"))
        assert not Path("runs/unknown").exists()  # nothing was sampled
        gated = train(app, change(GATED, name="gated", scorer_url=url))
        plain = train(app, change(GATED, name="plain", scorer_url=url, gate_parts=""))
    assert 0 < gated[1]["reward/overrated_ratio"] <= 0.25
    assert "reward/overrated_ratio" not in plain[1]
    assert gated[1]["policy/kl"] == plain[1]["policy/kl"] == 0.0  # the policy is the reference still
    assert 0 < gated[2]["policy/kl"] != plain[2]["policy/kl"] > 0
    assert undocumented(gated) == {"eval/mean"}  # PART
    with pytest.raises(ValueError, match=r"^--gate-parts needs --kl-coef > 0$"):
        app.check_args(change(GATED, scorer_url="http://a:1", kl_coef=0.0))


def test_a_batch_weighs_its_kl_by_the_gate(here):
    run = lone_run(GATED)
    (batch, *_), _ = rollout(run, app.params_at(run, Step(0)))
    net, other = run.policy.net, copy.deepcopy(run.policy.net)
    with torch.no_grad():
        next(p for p in other.parameters() if p.ndim == 2).mul_(1.5)
    run.policy.reference_net = other
    now, reference = replay(run.model, net, batch, 0), replay(run.model, other, batch, 0)
    each = gaussian_kl(now.mean, reference.mean, now.std)
    weights = torch.tensor([0.0, 4.0, 0.0, 0.0])
    found = app.kl_to_reference(run, replace(TrainBatch.of(batch, torch.zeros(4)), kl_weights=weights), 0, now)
    torch.testing.assert_close(found, each[1])
    torch.testing.assert_close(app.kl_to_reference(run, TrainBatch.of(batch, torch.zeros(4)), 0, now), each.mean())


@pytest.mark.parametrize("every", [1, 2])
def test_the_kl_is_the_mean_over_the_overrated_of_the_samples_that_are_trained_on(here, monkeypatch, every):
    run = lone_run(GATED)
    batches, _ = rollout(run, app.params_at(run, Step(0)))
    rewards = torch.arange(sum(len(batch) for batch in batches)).float()
    keep = rewards % every == 0
    monkeypatch.setattr(scoring, "gather_parts", lambda *given: rewards.flip(0)[:, None])
    chosen = [TrainBatch.of(batch, torch.zeros(len(batch))) for batch in batches]
    own = SimpleNamespace(batches=batches, scored=batches, scores=[])
    gated = scoring.gate_kl(run, Step(0), own, rewards, keep if every > 1 else None, chosen, "mean", 0.5)
    weights = torch.cat([batch.kl_weights for batch in gated])
    assert set(weights.tolist()) == {0.0, weights.max().item()}
    assert (weights * keep).sum() == keep.sum()
