"""The gold set: rank correlation, distances from the first samples, the rule that says a score falls, its settings."""

import math
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from omni_losses import ranks
from omni_rl.flow.evals import HeldOut
from omni_rl.flow.gold import gold_metrics, rank_correlation
from omni_rl.run.alarms import find_alarms
from omni_rl.run.evaluation import best_step
from omni_rl.run.metrics import GOLD_REWARD, MAX_DRIFT, MIN_CORRELATION, MIN_DIVERSITY, is_below_best
from omni_rl.settings.args import without_secrets
from omni_rl.settings.eval_sets import EvalSet, MediaEval, check_gold
from omni_rl.settings.fields import flatten
from omni_rl.settings.saved import GOLD_DIGEST, check_same
from omni_rollout import Params, Prompt
from omni_train.checkpoint.index import Saved
from trainer_runs import place

import train_nft

PARAMS = Params(num_inference_steps=4, height=32, width=96)


def test_rank_correlation_is_spearmans_closed_form_where_no_scores_tie():
    """1 - 6 sum(d^2) / (n (n^2 - 1)), for all orders of five."""
    first = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6])
    for order in permutations(range(5)):
        squares = sum((a - b) ** 2 for a, b in enumerate(order))
        expected = 1 - 6 * squares / (5 * 24)
        assert rank_correlation(first, torch.tensor(order).float() ** 3) == pytest.approx(expected, abs=1e-6)


def test_equal_scores_share_the_mean_of_their_ranks():
    """Ranks 1, 2.5, 2.5, 4 and 3, 1.5, 4, 1.5 have Pearson's correlation 0."""
    assert ranks(torch.tensor([0.0, 5.0, 5.0, 9.0])).tolist() == [0.0, 1.5, 1.5, 3.0]
    places = torch.tensor([[1, 2.5, 2.5, 4], [3, 1.5, 4, 1.5]])
    expected = torch.corrcoef(places)[0, 1].item()
    assert rank_correlation(torch.tensor([0.0, 5, 5, 9]), torch.tensor([2.0, 1, 3, 1])) == pytest.approx(expected)


def test_samples_without_a_score_and_scores_that_are_all_the_same_rank_nothing():
    nan = math.nan
    assert rank_correlation(torch.tensor([1.0, 2, nan, 3]), torch.tensor([1.0, 2, 9, nan])) == pytest.approx(1.0)
    assert math.isnan(rank_correlation(torch.ones(4), torch.arange(4.0)))
    assert math.isnan(rank_correlation(torch.tensor([1.0, nan]), torch.tensor([nan, 1.0])))


def judged(latents, kept, *, samples=2, prompt="a"):
    """What the gold set's metrics are of these latents [N, ...], two samples of each prompt."""
    prompts = [Prompt(f"{prompt}{i // samples}", group=i // samples, index=i, seed=i) for i in range(len(latents))]
    batch = SimpleNamespace(x0=latents, indices=torch.arange(len(latents)))
    run = SimpleNamespace(dist=place(), session=SimpleNamespace(checkpoints=SimpleNamespace(kept=kept)))
    held = HeldOut("gold", [], PARAMS, samples=samples)
    scores = torch.arange(float(len(latents)))
    return gold_metrics(run, held, prompts, [batch], scores, scores)


def test_distances_are_those_of_random_samples_at_first_and_move_with_the_latents():
    noise, kept = torch.Generator().manual_seed(0), {}
    first, other = torch.randn(2, 64, 16, 8, 8, generator=noise)
    found = judged(first, kept)
    assert found["eval/gold/drift"] == 0.0
    assert found["eval/gold/diversity"] == pytest.approx(1.0, abs=0.05)  # as samples of a prompt are random ones here
    assert found["eval/gold/rank_correlation"] == pytest.approx(1.0)
    assert judged(other, kept)["eval/gold/drift"] == pytest.approx(1.0, abs=0.05)
    half = judged(first + 0.5 * (other - first), kept)
    assert half["eval/gold/drift"] == pytest.approx(0.5, abs=0.03)
    one_each = first[::2].repeat_interleave(2, dim=0)
    assert judged(one_each, kept)["eval/gold/diversity"] == 0.0
    assert judged(other, kept, prompt="b")["eval/gold/drift"] == 0.0  # another set begins anew
    assert judged(first, kept, prompt="b")["eval/gold/drift"] > 0.9
    same = torch.ones(64, 16, 8, 8)  # nothing to measure by
    assert set(judged(same, kept, prompt="c")) == {"eval/gold/rank_correlation"}
    assert set(judged(first, kept, prompt="c")) == {"eval/gold/rank_correlation"}


def test_samples_that_are_not_finite_are_no_first_ones():
    kept, latents = {}, torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(0))
    assert math.isnan(judged(latents / 0, kept)["eval/gold/drift"])
    assert not kept  # a checkpoint must be finite
    assert judged(latents, kept)["eval/gold/drift"] == 0.0
    (rows,) = kept.values()
    assert rows.dtype == torch.float32
    assert judged(latents * math.nan, kept)["eval/gold/rank_correlation"] == pytest.approx(1.0)
    assert judged(2 * latents, kept)["eval/gold/drift"] > 0


@pytest.mark.parametrize(
    ("scores", "count", "expected"),
    [
        ([0.5, 0.6, 0.5], 1, True),
        ([0.5, 0.6, 0.56], 1, False),  # within two standard errors
        ([0.5, 0.6, 0.5, 0.5], 2, True),
        ([0.5, 0.6, 0.5, 0.58], 2, False),
        ([0.6, 0.5, 0.5], 3, False),  # nothing before
        ([0.6], 1, False),
        ([0.6, 0.5, 0.4, 0.3], 3, True),
        ([0.1, 0.2, 0.3, 0.4], 2, False),
    ],
)
def test_a_score_falls_where_all_of_the_last_are_below_the_best_by_more_than_two_errors(scores, count, expected):
    assert is_below_best(scores, [0.025] * len(scores), count) == expected


def test_the_best_is_the_first_of_equal_ones():
    assert best_step([]) is None
    assert best_step([{"step": 0.0, "eval/reward": 1.0}]) is None
    lines = [{"step": step, GOLD_REWARD: score} for step, score in ((0, 0.1), (5, 0.9), (10, 0.9), (15, 0.2))]
    assert best_step(lines) == 5


def alarms(*lines):
    return [alarm.title for alarm in find_alarms([{"step": float(n)} | line for n, line in enumerate(lines)])]


def test_each_alarm_holds_after_its_window():
    falling = [{"eval/gold/reward": score, "eval/gold/reward_stderr": 0.01} for score in (0.5, 0.6, 0.5, 0.5)]
    assert alarms(*falling) == ["The gold score falls"]
    assert alarms(*falling[:-1]) == []
    low, high = MIN_CORRELATION - 0.1, MIN_CORRELATION + 0.1
    title = "The reward ranks samples unlike the gold scorer"
    assert alarms(*({"eval/gold/rank_correlation": value} for value in (high, low, low))) == [title]
    assert alarms(*({"eval/gold/rank_correlation": value} for value in (low, high, low))) == []
    less = MIN_DIVERSITY / 2
    assert alarms(*({"eval/gold/diversity": v} for v in (0.8, 0.7 * less, 0.7 * less))) == [
        "The samples of a prompt become similar"
    ]
    assert alarms(*({"eval/gold/diversity": v} for v in (0.8, 0.7 * less, 0.8))) == []
    far = MAX_DRIFT + 0.1
    assert alarms(*({"eval/gold/drift": v} for v in (0.0, far, far))) == ["The samples are far from the first ones"]
    assert alarms(*({"eval/gold/drift": v} for v in (0.0, far, 0.9))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gold_prompts": "a.txt"}, "--eval.gold-prompts must be given with --eval.gold-scorer or"),
        ({"gold_scorer": "ocr"}, "--eval.gold-prompts must be given with --eval.gold-scorer or"),
        (
            {"gold_prompts": "train.txt", "gold_scorer": "ocr"},
            "must differ from those of training, got train.txt and ocr",
        ),
        ({"gold_prompts": "a.txt", "gold_scorer": "jpeg"}, "must differ from those of training, got a.txt and jpeg"),
        ({"stop_on": "gold-falls:2"}, "--eval.stop-on gold-falls:2 needs --eval.gold-prompts"),
        ({"stop_on": "gold-falls:0"}, "--eval.stop-on must be gold-falls:K with K from 1, got 'gold-falls:0'"),
        ({"stop_on": "reward-falls:1"}, "--eval.stop-on must be gold-falls:K with K from 1, got 'reward-falls:1'"),
        ({"sets": (EvalSet("gold", "a.txt"),)}, "eval.sets must not be named gold"),
    ],
)
def test_settings_that_do_not_fit_together_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        check_gold(MediaEval(**changes), ["train.txt", "jpeg", ""])


def test_a_gold_set_is_one_more_set_with_samples_to_compare():
    own = MediaEval(gold_prompts="a.txt", gold_scorer="ocr", stop_on="gold-falls:12", sets=(EvalSet("b", "b.txt"),))
    check_gold(own, ["train.txt", "jpeg", ""])
    assert [(each.name, each.samples_per_prompt) for each in own.all_sets] == [("b", None), ("gold", 2)]
    assert (own.stop_after, MediaEval().stop_after, MediaEval().all_sets) == (12, 0, ())
    args = train_nft.Args(eval=MediaEval(gold_prompts="a.txt", gold_scorer_url="http://key@a:1", samples_per_prompt=4))
    assert args.eval.all_sets[0].samples_per_prompt == 4
    assert without_secrets(args).eval.gold_scorer_url == ""


def test_a_run_does_not_continue_on_gold_prompts_of_other_contents(tmp_path):
    (tmp_path / "gold.txt").write_text("a\nb\n")
    args = train_nft.Args(eval=MediaEval(gold_prompts=str(tmp_path / "gold.txt"), gold_scorer_url="http://127.0.0.1:7"))
    now = flatten(without_secrets(args)) | {GOLD_DIGEST: "0" * 64}
    check_same(args, Saved(3, now, {}, 1, {}, {}), now)
    with pytest.raises(ValueError, match=r"gold\.txt has other contents than at the start"):
        check_same(args, Saved(3, now | {GOLD_DIGEST: "1" * 64}, {}, 1, {}, {}), now)
