"""Every trainer learns, trains on two ranks as on one, continues to the bit, and names mistakes.

The rows are those of tests/trainer_table.py.
"""

import importlib
import json
import random
import shlex
from pathlib import Path

import pytest
import tiny_signs
import torch
from apps import app_lives as lives
from helpers import CHECKPOINT, names, sampled
from model_rows import built
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from trainer_runs import (
    assert_same_weights,
    cli,
    evaluate,
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
    assert two[-1].get("eval/reward") == pytest.approx(one[-1].get("eval/reward"), rel=2e-3, abs=1e-4)
    assert_same_weights("one", "two")


# Going on


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases("continues to the bit from what it saved"))
def test_a_run_that_lost_its_last_step_ends_bit_for_bit_as_before_and_its_weights_score_alike_anywhere(
    here, bright_url, case
):
    """The last checkpoint goes, as if a kill had come before it. All that is logged is documented.

    The held-out score before, during and after is that of an evaluation alone, which saves nothing. Another run
    begins with the last one.
    """
    name, weights, _ = case
    app, args = settings(name, bright_url, weights, eval_every=1, save_every=1)
    whole, left = train(app, args), exported()
    assert undocumented(whole) == set()
    assert not any("policy/staleness" in line for line in whole)  # as nothing is sampled ahead
    assert left
    lose_step("run", 2)
    score = "eval/watch" if app.__name__ == "train_srpo" else "eval/reward"
    assert evaluate(app, args)[score] == pytest.approx(whole[1][score], abs=1e-6)
    assert unclocked(train(app, args)) == unclocked(whole)
    again = exported()
    assert again.keys() == left.keys()
    assert all(torch.equal(again[name], left[name]) for name in left)
    is_model = weights == "all weights" and TRAINERS[name].model.startswith("qwen")
    start = {"model" if is_model else "init_weights": "runs/run/weights"}
    (other,) = train(app, change(args, name="other", train_steps=0, **start))
    assert other[score] == pytest.approx(whole[2][score], abs=1e-6)
    for given, step in (({}, 0), (start, 2)):  # the second in place of the first
        alone = evaluate(app, change(args, name="alone", **given))
        assert alone[score] == pytest.approx(whole[step][score], abs=1e-6)
    assert names(Path("runs/alone")) == ["eval-000000"]
    assert not Path("runs/alone/eval-000000/weights").exists()


def test_blocks_on_the_host_change_no_bit_and_continue(here, bright_url):
    app, args = settings("flowgrpo", bright_url, "LoRA", eval_every=1, save_every=1)
    there, weights = train(app, args), exported()
    lose_step("run", 2)  # the setting may change
    for name in ("run", "streamed"):
        streamed = train(app, change(args, name=name, memory_offload="blocks"))
        assert unclocked(streamed) == unclocked(there)
        assert all(torch.equal(tensor, weights[key]) for key, tensor in exported(name).items())


# Mistakes

PLANNED = "--dry-run --memory.device-gb 1"
ALONE = ".* training step, and --eval.only takes none"
TOOL = "--tool.function must be python:FILE.py:FUNCTION "
MARKS = "--tool.marks must be four texts, and the last must not end with the second, got "
MISTAKES = {  # row -> flags -> what is said of them
    "flowgrpo": {
        "--scorer.url x": r"--scorer.url must be http\(s\)://host\[:port\]\[/path\], got 'x'",
        "--eval.only --profile 1": f"--profile{ALONE}",
        f"--eval.only {PLANNED}": f"--memory.device-gb{ALONE}",
        "--route-replay": "--route-replay needs a model that is a mixture of experts",
    },
    "nft": {
        "--scorer.url=": "--scorer must name a reward, as ocr, or --scorer.url a reward server",
        "--algo grpo": "--algo must be one of 'nft', 'awm'",
        "--num-minibatches 3": "--num-minibatches must divide a rank's batches",
        "--train-low 3": r"--train-low and --train-high must bound steps of the rollout \(3\)",
        "--train-levels 4": "--train-levels must be from 1 to the 3 trained steps, got 4",
    },
    "dpo": {
        "--scorer.url=": "--scorer must name a reward, --scorer.url a reward server, or --preferences a file of pairs",
        "--batch-size 5": "--batch-size must be even, as a pair is two samples, got 5",
        "--batch-size 6": "one must divide the other, got 6 and 4",
        "--preferences README.md": "--preferences: path must end in .txt, .parquet, .jsonl, .csv or .tsv",
        "--preferences x.jsonl": "--preferences: path must be a file that can be read, got x.jsonl",
    },
    "srpo": {
        "--num-minibatches 3": r"batches times the steps trained of each \(4 x 1\), got 3; nearest: 2",
        "--level-high 1": "--level-high must be at least 0.001 above --level-low, and <= 0.999, got 0.2 and 1",
        "--level-low 0.95": "--level-high must be at least 0.001 above --level-low, and <= 0.999, got 0.95 and 0.95",
        "--positive-words ,": "--positive-words must hold a word, got ','",
        "--width 64": "--reward sign-reader reads images of 32 x 96, got --height 32 and --width 64",
        "--reward hps": "--reward must be one of 'sign-reader', 'clip'",
        "--reward-model .": r"reader\.safetensors",
        "--scorer.url http://x": "unknown flag --scorer.url",
    },
    "distill": {
        "--teachers runs/x": "--teachers must be NAME=FOLDER with commas between, each name once, got 'runs/x'",
        "--teachers a=.,a=.": r"each name once, got 'a=\.,a=\.'",
        "--teachers a=nowhere": "--teachers: a must be a folder of weights, got nowhere",
        "--train-high 3": r"steps of the student \(0 to 2 with opd\), got 0 and 3",
        "--algo opd-cps --noise-level 2": "--noise-level must be <= 1 for opd-cps",
        "--scorer.url nowhere": r"--scorer.url must be http\(s\)://host\[:port\]\[/path\], got 'nowhere'",
        "--teacher-guidance-scale 3": "--teacher-guidance-scale must be 1 .*, whose guidance is --teacher-true-cfg-sc",
        "--prompts one.jsonl": '--prompts: "teacher" must be one of --teachers, got .*one',
        "--prompts ones.jsonl": '--prompts: "teacher" must be one of --teachers, got .*one',
    },
    "sft": {
        "--prompts eval.txt": 'eval.txt, sample 1, "sample": must name a file with a suffix of',
        "--prompts x.jsonl": "--prompts: path must be a file that can be read, got x.jsonl",
        "--prompts gone.jsonl": 'sample 1, "sample": must name a file that exists, got gone.png',
        "--prompts out.jsonl": 'sample 1, "sample": must name a file in the folder of the preference file',
        "--prompts size.jsonl": "must be an image of 96 x 64 pixels, got an image of 96",
        "--levels normal": "--levels must be one of 'logit-normal', 'uniform'",
        "--logit-std 0": "--logit-std must be >= 0.001, got 0.0",
    },
    "gspo": {
        "--reward scorer": "--scorer.url must be given for scorer in --reward",
        "--scorer.url http://a:1": "--reward must name scorer, as --scorer does, got regex",
        "--scorer.url a:1": r"--scorer.url must be http\(s\)://host",
        "--model bert": "--model must be .* bert holds a 'BertModel'",
        "--reward exact": 'line 1: must have the key "answer", which --reward exact requires',
        "--reward ocr": "--reward: must be one of exact, ",
        "--max-prompt-tokens 4": "line 1: must have at most --max-prompt-tokens 4 tokens, got 2",
        "--overlong-tokens 6": r"--overlong-tokens must be <= --max-new-tokens \(5\), got 6",
        "--init-weights .": "--init-weights: must be the folder of an adapter",
        "--sharding.experts": "--sharding.experts needs --sharding.mode fsdp2, and --sharding.size 0",
        f"--model qwen3 --sharding.experts --sharding.mode fsdp2 {PLANNED}": "--sharding.experts: experts must be of a "
        "model whose experts can be sharded, got Qwen3ForCausalLM",
        "--tool.function gone.py:look": f"{TOOL}.*, got gone.py:look",
        "--tool.function python:gone.py:look": f"{TOOL}with a file that exists",
        "--tool.function python:tool.py:seek": "--tool.function: tool.py must have a function 'seek'",
        "--tool.function python:tool.py:look --engine vllm": "--tool.function needs --engine transformers",
        "--tool.marks 'a b c'": MARKS,
        "--tool.marks 'a b c ab'": MARKS,
        "--model qwen3 --prompts seen.jsonl": "line 1: prompts of a QwenText must hold only text, got image",
    },
    "sft of texts": {
        "--prompts plain.jsonl": '--prompts: plain.jsonl, line 1: "completion" must be a text that is not empty',
        "--group-size 2": "--group-size must be <= 1, got 2",
        "--num-minibatches 9": "--num-minibatches must be <= --prompts-per-step, got 9",
        "--max-new-tokens 2": '--prompts: .*line 1: "completion" must have at most --max-new-tokens 2 tokens',
    },
    "dpo of texts": {
        "--preferences plain.jsonl --group-size 2": '--preferences: plain.jsonl, line 1: "chosen" must be a text',
        "--preferences train.jsonl --group-size 4": "--group-size must be 2 with --preferences",
        "--preferences train.jsonl --group-size 2 --draw-ahead 1": "--draw-ahead must be 0 with --preferences",
        "--group-size 8": r"--batch-size must hold whole groups of --group-size \(8\), got 4",
    },
    "distill of texts": {
        "--teacher=": "--teacher must be given",
        "--completion-key completion": "--group-size must be 1 with --completion-key",
    },
    "unigrpo": {
        "--model signs": "--model must be .* 'QwenImagePipeline'",
        "--thought-reward ocr": "--thought-reward: must be one of exact, ",
        "--thought-reward exact": 'line 1: must have the key "answer", which --thought-reward exact requires',
        "--engine vllm-omni": "--engine vllm-omni must be installed: ",
        PLANNED: "--memory.device-gb does not plan thoughts",
        "--compile": "--compile does not go with thoughts",
        "--prompts told.jsonl": 'must not have the key "thought"',
    },
}
FAULTY = {  # what their files hold, besides a prompt and a pattern
    "plain": {}, "told": {"thought": "red"}, "seen": {"images": "white.png"}, "one": {"teacher": "one"},
    "ones": {"teacher": ["one"]}, "gone": {"sample": "gone.png"}, "out": {"win": "../white.png"},
    "size": {"sample": "white.png", "height": 64, "width": 96},
}  # fmt: skip


@pytest.mark.parametrize(("name", "flags"), [(name, flags) for name, own in MISTAKES.items() for flags in own])
def test_a_mistake_is_one_line_before_weights_are_read(here, bright_url, name, flags):
    app, args = settings(name, bright_url)
    write_pairs()
    for file, own in FAULTY.items():
        Path(f"{file}.jsonl").write_text((json.dumps({"prompt": "a", "pattern": "a"} | own) + "\n") * 8)
    Path("tool.py").write_text("def look(text): ...\n")
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"architectures": ["BertModel"]}')
    Path("qwen3").symlink_to(built("qwen3")())
    Path("signs").symlink_to(CHECKPOINT)
    Path("tiny.toml").write_text(to_toml(args))
    lives.assert_refused(here, shlex.split(flags), MISTAKES[name][flags], trainer=app)
    assert not Path("runs").exists()


@pytest.mark.parametrize("app", sampled(sorted({row.app for row in TRAINERS.values()}), 1))
def test_the_program_ends_so_too(app):
    printed = cli(importlib.import_module(app), "--lr=-1")
    assert printed == (2, f"{app}.py: error: --lr must be >= 0, got -1.0\n")
