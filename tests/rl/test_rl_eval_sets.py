"""Evaluation sets: tables of a TOML file, refused by their numbers; the best of several samples and pass@k."""

import math
import tomllib
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from omni_rl.flow.evals import (
    HeldOut,
    date_evaluations,
    dates_by_prefix,
    eval_set_params,
    interleave_sets,
    pass_at_k,
    score_metrics,
    tag_metrics,
)
from omni_rl.report import Sample
from omni_rl.run.metrics import drop_stale_evaluations
from omni_rl.settings.args import without_secrets
from omni_rl.settings.eval_sets import EvalSet, MediaEvalSet, TokenEvalSet, check_sets
from omni_rl.settings.fields import build
from omni_rl.settings.toml import from_toml, to_toml
from omni_rollout import Params
from omni_rollout.tokens import TokenParams
from omni_train.prompts.files import PromptRecord, load_prompts

import train_gspo
import train_nft

TEXT = """
lr = 1e-4

[[eval.sets]]
name = "long"
prompts = "a.txt"
num_inference_steps = 20
guidance_scale = 2

[[eval.sets]]
name = "other"
prompts = "b.txt"
scorer_url = "http://a:1"
"""


def test_sets_are_tables_that_come_back_from_toml():
    args = build(train_nft.Args, from_toml(TEXT, train_nft.Args, "mine"))
    assert args.eval.sets[0] == MediaEvalSet("long", "a.txt", num_inference_steps=20, guidance_scale=2.0)
    assert args.eval.sets[1].scorer_url == "http://a:1"
    assert build(train_nft.Args, from_toml(to_toml(args), train_nft.Args, "mine")) == args
    assert tomllib.loads(to_toml(args))["eval"]["sets"][0]["name"] == "long"
    assert [own.scorer_url for own in without_secrets(args).eval.sets] == ["", "..."]
    assert to_toml(train_nft.Args()).count("sets =") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[[eval.sets]]\nname = 'a'\n[[eval.sets]]\npromts = 'b'",
            r"mine: eval\.sets\[2\]: unknown key 'promts'; did you mean 'prompts'",
        ),
        ("[[eval.sets]]\nheight = 'x'", r"mine: eval\.sets\[1\].height must be a whole number, got 'x'"),
        ("eval.sets = 'x'", r"mine: eval\.sets must be tables, each below a line of its own with two brackets"),
        ("[[eval.sets]]\ntop_p = 0.5", r"mine: eval\.sets\[1\]: unknown key 'top_p'"),
    ],
)
def test_a_mistake_in_a_table_names_its_number(text, words):
    with pytest.raises(ValueError, match=words):
        from_toml(text, train_nft.Args, "mine")
    if "top_p" in text:
        assert from_toml(text, train_gspo.Args, "mine")["eval.sets"][0].top_p == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "1"}, r"eval\.sets\[2\].name must be a letter, then letters, digits, _ and -, got '1'"),
        ({"name": "a"}, r"eval\.sets\[1\].name must be that of no other set, got 'a'"),
        ({"prompts": ""}, r"eval\.sets\[2\].prompts must be given"),
        ({"prompts": "a.json"}, r"eval\.sets\[2\].prompts: path must end in"),
        ({"samples_per_prompt": 0}, r"eval\.sets\[2\].samples_per_prompt must be >= 1, got 0"),
        ({"pass_threshold": math.nan}, r"eval\.sets\[2\].pass_threshold must be .* got nan"),
        ({"guidance_scale": -1.0}, r"eval\.sets\[2\].guidance_scale must be >= 0, got -1.0"),
        ({"scorer_url": "..."}, r"eval\.sets\[2\].scorer_url must be http"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused_by_its_number(change, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a cat\n")
    good = MediaEvalSet("a", "a.txt")
    check_sets([good, replace(good, name="b")], load_prompts)
    with pytest.raises(ValueError, match=f"^{words}"):
        check_sets([good, replace(good, **({"name": "b"} | change))], load_prompts)


def test_a_set_changes_what_it_names_and_no_more():
    run = Params(num_inference_steps=10, height=64, width=32, guidance={"true_cfg_scale": 4.0, "audio": 2.0})
    own = MediaEvalSet(num_inference_steps=20, height=32, true_cfg_scale=1.0, guidance="audio=3")
    assert eval_set_params(own, run) == replace(run, num_inference_steps=20, height=32, guidance={"audio": 3.0})
    assert eval_set_params(MediaEvalSet(), run) == run
    assert eval_set_params(TokenEvalSet(top_p=0.5), TokenParams(8, 0.9)) == TokenParams(8, 0.9, 0.5)


def test_pass_at_k_is_the_share_of_subsets_in_which_one_passes():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    for wrong in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="must be in"):
            pass_at_k(*wrong)


def test_the_metrics_of_several_samples_leave_out_those_without_a_score():
    nan = math.nan
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.0, nan, nan, 1.0, nan, nan, nan, nan, nan])
    held = HeldOut("long", [], Params(num_inference_steps=2, height=1, width=1), samples=4, threshold=1.0)
    found = score_metrics(held, rewards)
    assert found == pytest.approx(
        {
            "eval/long/abstained_ratio": 7 / 12,
            "eval/long/reward": 2.5 / 5,
            "eval/long/reward_stderr": (1 - 1.5 / 4) / 2,  # half the difference of two prompts' means
            "eval/long/best@4": 1.0,
            "eval/long/pass@1": (1 / 4 + 1) / 2,
            "eval/long/pass@2": 1 / 2,  # of the one prompt with so many scores
            "eval/long/pass@4": 1.0,
        }
    )
    assert list(score_metrics(replace(held, name="", samples=1, threshold=None), rewards)) == [
        "eval/abstained_ratio",
        "eval/reward",
        "eval/reward_stderr",
    ]
    assert score_metrics(replace(held, samples=1), torch.tensor([nan])) == {"eval/long/abstained_ratio": 1.0}


def test_the_mean_over_tags_weighs_each_tag_alike_whatever_its_number_of_prompts():
    nan = math.nan
    tags = ["colors", "counting", "colors", "counting", "colors", "place"]
    records = [PromptRecord(i, "a", meta={"tag": tag}) for i, tag in enumerate(tags)]
    held = HeldOut("own", records, Params(num_inference_steps=2, height=1, width=1), samples=2)
    values = torch.tensor([[1, 0], [1, 1], [0, 0], [nan, 0], [1, 1], [nan, nan]]).flatten()
    found = tag_metrics(held, "correct", values)
    assert found == pytest.approx(
        {"eval/own/correct/colors": 3 / 6, "eval/own/correct/counting": 2 / 3, "eval/own/correct/tags": 7 / 12}
    )
    assert tag_metrics(held, "correct", torch.full((12,), nan)) == {}
    assert tag_metrics(replace(held, records=[*records[:5], PromptRecord(5, "a")]), "correct", values) == {}


def test_the_report_shows_the_first_samples_of_every_set():
    sets = [(name, ([{}] * count, [Sample(f"p{i}", 0.5) for i in range(count)])) for name, count in (("", 3), ("b", 1))]
    media, rows = interleave_sets(sets)
    assert [row.prompt for row in rows] == ["p0", "b: p0", "p1", "p2"]
    assert len(media) == 4
    assert EvalSet().name == ""


def test_the_standard_error_is_the_spread_of_an_evaluation_over_other_prompts():
    """Samples of one prompt are alike: four of each say hardly more than one."""
    generator = torch.Generator().manual_seed(0)
    held = HeldOut("", [], Params(num_inference_steps=2, height=1, width=1), samples=4)
    prompts = torch.randn(2000, 50, 1, generator=generator)
    rewards = prompts + 0.1 * torch.randn(2000, 50, 4, generator=generator)
    found = [score_metrics(held, row.flatten()) for row in rewards]
    spread = rewards.flatten(1).mean(dim=1).std().item()
    assert sum(line["eval/reward_stderr"] for line in found) / len(found) == pytest.approx(spread, rel=0.05)
    assert "eval/reward_stderr" not in score_metrics(held, torch.ones(4))  # one prompt has no spread


def test_a_set_is_another_one_where_a_file_of_its_prompts_has_other_contents(tmp_path):
    file = tmp_path / "a.png"
    held = HeldOut("", [PromptRecord(0, "a", images=(file,))], Params(1, 8, 8))
    found = []
    for data in (b"one", b"one", b"two"):
        file.write_bytes(data)
        found.append(held.digest)
    assert found[0] == found[1] != found[2]


def test_curves_of_a_set_that_was_left_out_stay_when_the_settings_of_another_change():
    main, old = (HeldOut(name, [PromptRecord(0, "a")], Params(1, 8, 8)) for name in ("", "old"))
    first = date_evaluations([main, old], {}, 0)
    second = date_evaluations([replace(main, seed=1)], first, 3)
    lines = [
        {"step": 0, "eval/reward": 0.1, "eval/reward/red": 0.1, "eval/old/reward": 0.2, "policy/lr": 1.0},
        {"step": 3, "eval/reward": 0.3, "eval/reward/red": 0.3},
    ]
    assert drop_stale_evaluations(lines, dates_by_prefix(second)) == [
        {"step": 0, "eval/old/reward": 0.2, "policy/lr": 1.0},
        lines[1],
    ]
