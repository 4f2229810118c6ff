"""Runs with a gold set: its score beside the reward's, the best weights and checkpoint, the stop, crashes and ranks."""

import os
import re
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import names
from omni_reward.serving import serving_in_thread
from omni_rl.report.data import run_data
from omni_rl.settings.fields import change
from omni_train import lock
from omni_train.files import load_metrics
from safetensors.torch import load_file
from trainer_runs import recipe, tiny, train, train_on_ranks, unclocked, undocumented

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=4, batch_size=4, lr=1e-3, optim_lr_scheduler_type="constant", lora_rank=4, lora_alpha=8,
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
    with serving_in_thread(lambda media, prompts, meta: [next(count) + 0.01 * ("IJ" in p) for p in prompts]) as url:
        yield url


def per_sample(scores):
    return [0.0, 0.0, *(score for score in scores for _ in range(4))]  # after those of the canaries


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
        "--eval.stop-on gold-falls:2: the gold score has fallen since step 2, whose weights are in runs/run/best"
        in shown.out
    )
    assert "stopped after step 4" in shown.out
    assert "ALARM after step 4: The gold score falls (" in shown.err
    told = Path("what was told.txt").read_text()
    starts = re.findall(
        r"^run: (ALARM after step 4: The gold score falls|--eval.stop-on|stopped after step 4)", told, re.M
    )
    assert starts == ["ALARM after step 4: The gold score falls", "--eval.stop-on", "stopped after step 4"]
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
    with pytest.raises(ValueError, match=r"eval\.gold_prompts was"):  # the best would mix scales
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


def test_a_run_that_lost_its_folder_goes_on_from_a_url_with_the_metrics_of_one_that_did_not(
    here, gold_prompts, bright_url, monkeypatch
):
    monkeypatch.setattr(lock, "LEASE_S", 5.0)  # until the URL of a run that was killed is free
    monkeypatch.setattr(lock, "RENEWAL_S", 1.0)
    with scripted(per_sample(SCORES)) as gold:
        lines = train(app, settings("whole", bright_url, gold, train_steps=4))
    assert lines[-1]["eval/gold/drift"] > 0
    url = {"checkpoint_url": f"file://{here}/store", "save_every": 2, "async_save": False}

    def dies_after_three_steps(media, prompts, meta):
        scores = [next(count) for _ in prompts]
        if SCORES[3] in scores:
            os.kill(os.getpid(), signal.SIGKILL)
        return [score + 0.01 * ("IJ" in p) for score, p in zip(scores, prompts, strict=True)]

    child = os.fork()
    if child == 0:
        count = iter(per_sample(SCORES))
        with serving_in_thread(dies_after_three_steps) as gold:
            train(app, settings("torn", bright_url, gold, train_steps=4, **url))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    shutil.rmtree("runs/torn")
    with scripted([0.0, 0.0, *per_sample(SCORES)[14:]]) as gold:
        again = train(app, settings("torn", bright_url, gold, train_steps=4, **url))
    assert unclocked(again) == unclocked(lines)


def test_gold_scores_of_other_settings_are_not_compared(here, gold_prompts, bright_url):
    """Neither is the best of the first ones kept, nor do they make a fall."""
    with scripted(per_sample(SCORES)) as gold:
        train(app, settings("run", bright_url, gold, train_steps=2))
    own = {"eval_num_inference_steps": 3, "eval_stop_on": "gold-falls:1"}
    with scripted([0.0, 0.0, *per_sample(SCORES[3:])[2:]]) as gold:
        lines = train(app, settings("run", bright_url, gold, train_steps=4, **own))
    assert [line.get("eval/gold/settings_since") for line in lines] == [None, None, None, 3, 3]
    assert lines[3]["eval/gold/drift"] == 0.0
    assert names(Path("runs/run/checkpoints")) == ["step-00000003", "step-00000004"]


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

    with serving_in_thread(dark, name="dark") as gold:
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
