"""Every trainer learns, trains on two ranks as on one, continues to the bit, and names mistakes.

The rows are those of tests/trainer_table.py.
"""

import importlib
import random
from pathlib import Path

import pytest
import tiny_signs
import torch
from helpers import CHECKPOINT, REPO, sampled
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import change
from trainer_runs import (
    assert_same_weights,
    cli,
    exported,
    lose_step,
    recipe,
    tiny,
    train,
    train_on_ranks,
    unclocked,
    undocumented,
)
from trainer_table import GRPO, PLACES, READER, TRAINERS, cases, settings, write_pairs

# Learning

SIGNS = {"name": "run", "prompts_per_step": 2, "group_size": 8, "batch_size": 8, "lr": 3e-4}
LEARNS = {  # trainer, settings, steps, by how much the score rises at least
    "flowgrpo": ("train_flowgrpo", GRPO | {"optim_lr_scheduler_type": "constant"}, 12, 0.02),
    "nft": ("train_nft", {"train_levels": 2}, 10, 0.02),
    "awm": ("train_nft", {"algo": "awm", "train_levels": 2}, 10, 0.02),
    "dpo": ("train_dpo", {"prompts_per_step": 4, "levels_per_pair": 4, "dpo_beta": 2000.0}, 10, 0.02),
    "sft": ("train_sft", {"prompts": "pairs.jsonl", "prompts_per_step": 8, "group_size": 1}, 14, 0.02),
    "srpo": (
        "train_srpo", READER | {"model": str(CHECKPOINT), "lr": 2e-4, "num_inference_steps": 6, "batch_size": 16,
                                "eval_num_inference_steps": 6, "prompts_per_step": 16}, 24, 0.15,
    ),  # two blocks draw no sign that can be read
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sampled(LEARNS, 1))
def test_training_raises_a_reward_that_can_be_raised(here, bright_url, request, name):
    """SRPO's is the reader's, whose gradient makes signs that OCR, another network that only watches, reads better."""
    module, own, steps, least = LEARNS[name]
    scorer = {"scorer_url": bright_url}
    if name == "srpo":
        rng = random.Random(3)
        drawn = [tiny_signs.draw_prompt(rng, evaluation=True)[0] for _ in range(32)]
        Path("eval.txt").write_text("".join(f"{prompt}\n" for prompt in drawn))
        ocr_flags = request.getfixturevalue("ocr_flags")
        scorer = {"scorer_watch_url": ocr_flags[1], "scorer_token_file": ocr_flags[3]}
    write_pairs()
    app = importlib.import_module(module)
    args = tiny(recipe(app, "tiny-signs"), **(SIGNS | own | scorer), train_steps=steps, eval_every=steps)
    lines = train(app, args)
    assert lines[-1]["eval/reward"] > lines[0]["eval/reward"] + least
    if name == "srpo":
        assert lines[-1]["eval/watch"] > lines[0]["eval/watch"] + 0.05
    if name == "dpo":
        assert lines[1]["policy/margin"] == 0.0  # at first policy and reference are one
    assert exported()
    secrets = {bright_url, args.scorer.token_file} - {""}
    assert not any(secret in Path("runs/run/config.toml").read_text() for secret in secrets)


# Ranks

EXACT = (
    "reward/mean",
    "reward/min",
    "reward/max",
    "reward/group_std",
    "advantage/max",
    "policy/old_decay",
    "policy/pairs",
)
CLOSE = {
    *("policy/loss", "policy/grad_norm", "policy/entropy", "policy/approx_kl", "policy/clip_fraction"),
    *("policy/ratio_mean", "policy/tokens_mean", "answer/tokens_mean", "thought/tokens_mean"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases("trains on two ranks as on one"))
def test_a_trainer_trains_on_two_ranks_as_on_one(here, bright_url, monkeypatch, case):
    """The first step has the same rewards; losses, gradients, weights and scores agree but for sums in another order.

    Logits of texts are made for three tokens at a time, and once more in the backward pass.
    """
    monkeypatch.setattr("omni_rollout.tokens.MAX_LOGITS", 3 * 266)
    name, weights, place = case
    app, args = settings(name, bright_url, weights)
    one = train(app, change(args, name="one"))
    two = train_on_ranks(app, change(args, name="two", **PLACES[place]))
    ratios = [
        line["policy/first_ratio_max_dev"] for line in (*one[1:], *two[1:]) if "policy/first_ratio_max_dev" in line
    ]
    assert ratios == [0] * len(ratios)
    assert ratios or name not in ("flowgrpo", "gspo", "unigrpo")
    assert two[0].get("eval/reward") == one[0].get("eval/reward")
    assert {key: two[1].get(key) for key in EXACT} == {key: one[1].get(key) for key in EXACT}
    assert one[1]["policy/grad_norm"] > 0
    for key in one[1].keys() & CLOSE:
        assert two[1][key] == pytest.approx(one[1][key], rel=1e-3, abs=1e-6), key
    assert two[-1].get("eval/reward") == pytest.approx(one[-1].get("eval/reward"), rel=2e-3)
    assert_same_weights("one", "two")


# Going on


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases("continues to the bit from what it saved"))
def test_a_run_that_lost_its_last_step_ends_bit_for_bit_as_before_and_another_begins_with_its_score(
    here, bright_url, case
):
    """The last checkpoint goes, as if a kill had come before it. All that is logged is documented."""
    name, weights, _ = case
    app, args = settings(name, bright_url, weights, eval_every=1, save_every=1)
    whole, left = train(app, args), exported()
    assert undocumented(whole) == set()
    assert not any("policy/staleness" in line for line in whole)  # as nothing is sampled ahead
    assert left
    lose_step("run", 2)
    assert unclocked(train(app, args)) == unclocked(whole)
    again = exported()
    assert again.keys() == left.keys()
    assert all(torch.equal(again[name], left[name]) for name in left)
    is_model = weights == "all weights" and TRAINERS[name].model.startswith("qwen")
    start = {"model" if is_model else "init_weights": "runs/run/weights"}
    (other,) = train(app, change(args, name="other", train_steps=0, **start))
    score = "eval/watch" if app.__name__ == "train_srpo" else "eval/reward"
    assert other[score] == pytest.approx(whole[-1][score], abs=1e-6)


def test_blocks_on_the_host_change_no_bit_and_continue(here, bright_url):
    app, args = settings("flowgrpo", bright_url, "LoRA", eval_every=1, save_every=1)
    there, weights = train(app, args), exported()
    lose_step("run", 2)  # the setting may change
    for name in ("run", "streamed"):
        streamed = train(app, change(args, name=name, memory_offload="blocks"))
        assert unclocked(streamed) == unclocked(there)
        assert all(torch.equal(tensor, weights[key]) for key, tensor in exported(name).items())


# Mistakes

SCORED = "--scorer.url http://x"
MISTAKES = {
    "train_flowgrpo": {
        "--scorer.url x": "--scorer.url must be http(s)://host[:port][/path], got 'x'",
    },
    "train_nft": {
        "--scorer=": "--scorer must name a reward, as ocr, or --scorer.url a reward server",
        "--algo grpo": "--algo must be one of 'nft', 'awm'",
        f"{SCORED} --num-minibatches 3": "--num-minibatches must divide a rank's batches",
        f"{SCORED} --train-low 10": "--train-low and --train-high must bound steps of the rollout (10)",
        f"{SCORED} --train-levels 11": "--train-levels must be from 1 to the 10 trained steps, got 11",
    },
    "train_dpo": {
        "--scorer=": "--scorer must name a reward, --scorer.url a reward server, or --preferences a file of pairs",
        f"{SCORED} --batch-size 5": "--batch-size must be even, as a pair is two samples, got 5",
        f"{SCORED} --batch-size 6": "one must divide the other, got 6 and 8",
        "--preferences README.md": "--preferences: path must end in .txt, .parquet, .jsonl, .csv or .tsv",
        "--preferences x.jsonl": "path must be a file that can be read, got x.jsonl",
    },
    "train_srpo": {
        "--num-minibatches 3": "batches times the steps trained of each (2 x 1), got 3; nearest: 2",
        "--level-high 1": "--level-high must be at least 0.001 above --level-low, and <= 0.999, got 0.2 and 1",
        "--level-low 0.95": "--level-high must be at least 0.001 above --level-low, and <= 0.999, got 0.95 and 0.95",
        "--positive-words ,": "--positive-words must hold a word, got ','",
        "--width 64": "--reward sign-reader reads images of 32 x 96, got --height 32 and --width 64",
        "--reward hps": "--reward must be one of 'sign-reader', 'clip'",
        "--scorer.url http://x": "unknown flag --scorer.url",
    },
    "train_distill": {
        "--teachers runs/x": "--teachers must be NAME=FOLDER with commas between, each name once, got 'runs/x'",
        "--teachers a=docs,a=docs": "each name once, got 'a=docs,a=docs'",
        "--teachers a=nowhere": "--teachers: a must be a folder of weights, got nowhere",
        "--algo opd --train-high 4": "steps of the student (0 to 3 with opd), got 0 and 4",
        "--algo opd-cps --noise-level 2": "--noise-level must be <= 1 for opd-cps",
        "--scorer.url nowhere": "--scorer.url must be http(s)://host[:port][/path], got 'nowhere'",
    },
    "train_sft": {
        "--prompts data/tiny-signs/train.txt": 'data/tiny-signs/train.txt, sample 1, "sample": must name a file',
        "--prompts x.jsonl": "path must be a file that can be read, got x.jsonl",
        "--levels normal": "--levels must be one of 'logit-normal', 'uniform'",
        "--logit-std 0": "--logit-std must be >= 0.001, got 0.0",
    },
}
CASES = [(app, flags) for app, cases in MISTAKES.items() for flags in cases]


@pytest.mark.parametrize(("app", "flags"), CASES)
def test_a_mistake_on_the_command_line_ends_with_code_2_and_one_line(app, flags, monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    module = importlib.import_module(app)
    with pytest.raises(SystemExit, match=r"^2$"):
        parse_cli(module.Args, module.check_args, ["--preset", "tiny-signs", "--verbose", *flags.split()], app=app)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert MISTAKES[app][flags] in err


@pytest.mark.parametrize("app", sampled(MISTAKES, 1))
def test_the_program_ends_so_too(app):
    flags, message = next(iter(MISTAKES[app].items()))
    code, printed = cli(importlib.import_module(app), "--preset", "tiny-signs", *flags.split())
    assert (code, printed.count("\n")) == (2, 1)
    assert message in printed
