"""Every trainer learns, trains on two ranks as on one, goes on bit for bit, and names mistakes: one table of them.

Each row is a trainer with settings; TEST_SEED draws some of the rows that are alike.
"""

import importlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_preferences
import build_tiny_models
import pytest
import tiny_signs
import torch
from diffusers import QwenImageTransformer2DModel
from helpers import CHECKPOINT, REPO, TEST_SEED, sampled
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import change
from omni_train.dist import init_distributed
from omni_train.weights.full import save_weights
from PIL import Image
from trainer_runs import (
    PROMPTS,
    cli,
    exported,
    lose_step,
    recipe,
    shallow,
    tiny,
    train,
    train_on_ranks,
    unclocked,
    undocumented,
    write_teacher,
)

LORA = {"lora_rank": 4, "lora_alpha": 8}
SIGNS = {"prompts_per_step": 2, "group_size": 4, "batch_size": 4}
READER = {"reward_model": str(REPO / "checkpoints" / "tiny-signs-reader"), "group_size": 1, "prompts_per_step": 8}
GRPO = {
    "algo": "flowgrpo",
    "noise_level": 0.7,
    "window_low": 0,
    "window_high": None,
    "optim_lr_scheduler_type": "constant",
}
TOKENS = {
    "prompts_per_step": 2, "group_size": 4, "batch_size": 4, "max_new_tokens": 5, "eval_every": 2, "lr": 1e-3,
    "reward": "regex",
}  # fmt: skip
TEXT_APPS = ("train_gspo", "train_sft_tokens", "train_dpo_tokens", "train_distill_tokens")
THOUGHTS = {
    "prompts_per_step": 2, "group_size": 2, "batch_size": 2, "height": 32, "width": 48, "num_inference_steps": 3,
    "eval_num_inference_steps": 2, "max_thought_tokens": 4, "eval_every": 2, "lr": 1e-3, "thought_reward": "0.5*regex",
}  # fmt: skip
OF_TRAINER = {
    "train_flowgrpo": SIGNS | GRPO, "train_nft": SIGNS | {"train_levels": 2},
    "train_dpo": SIGNS | {"levels_per_pair": 2}, "train_srpo": SIGNS | READER,
    "train_distill": {"prompts_per_step": 4, "batch_size": 2, "train_high": None, "lr": 1e-3},
    "train_sft": {"prompts_per_step": 4, "group_size": 1, "batch_size": 2},
    "train_gspo": TOKENS, "train_unigrpo": THOUGHTS,
    "train_sft_tokens": TOKENS | {"group_size": 1, "prompts_per_step": 4},
    "train_dpo_tokens": TOKENS, "train_distill_tokens": TOKENS | {"group_size": 2, "prompts_per_step": 4},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A trainer's run: its module, changes of its settings, whether it reads a preference file or a teacher."""

    app: str
    changes: dict[str, Any]
    pairs: bool = False
    teacher: bool = False


def settings(row, url):
    """The settings of a row in the working folder, where files that it reads are written."""
    app = importlib.import_module(row.app)
    changes = {"name": "run", **OF_TRAINER[row.app], **row.changes}
    if row.app in ("train_flowgrpo", "train_nft", "train_dpo", "train_unigrpo"):
        changes["scorer_url"] = url
    if row.pairs:
        flags = {"scorer-url": url, "out": "pairs", "num-prompts": "6", "num-inference-steps": "3", "group-size": "4"}
        flags |= {"model": str(CHECKPOINT), "prompts": str(PROMPTS / "train.txt")}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        build_preferences.build(build_preferences.parse([*words, "--batch-size", "4"]))
        changes |= {"preferences": "pairs/pairs.jsonl", "group_size": 2}
    if row.app == "train_sft":
        Image.new("RGB", (96, 32), "white").save("white.png")
        lines = [{"prompt": f'a blue sign that says "{i}"', "sample": "white.png"} for i in range(8)]
        Path("samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        changes |= {"prompts": "samples.jsonl", "scorer_url": url}
    if row.teacher:
        net = QwenImageTransformer2DModel.from_pretrained(shallow() / "transformer")
        torch.manual_seed(0)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.03 * torch.randn_like(p))
        save_weights(net, Path("one"), init_distributed())
        changes["teachers"] = "one=one"
    if row.app in (*TEXT_APPS, "train_unigrpo"):
        kind = "bagel" if row.app == "train_unigrpo" else "qwen3-omni" if row.app == "train_gspo" else "qwen3"
        for name, count in (("train", 8), ("eval", 2)):
            given = {"completion": "ab", "chosen": "abc", "rejected": "z"}
            lines = [{"prompt": f"say {i}", "pattern": "[a-m]", **given} for i in range(count)]
            Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        places = {"prompts": "train.jsonl", "eval_prompts": "eval.jsonl"}
        model = build_tiny_models.tiny_checkpoint(kind, REPO / ".pytest_cache" / "tiny-models")
        if row.app == "train_distill_tokens":
            changes["teacher"] = write_teacher(model)
        if row.pairs:
            changes |= {"preferences": places.pop("prompts"), "group_size": 2}
        return app, change(app.Args(), model=str(model), **places, **({"train_steps": 2} | changes))
    return app, tiny(recipe(app, "tiny-signs"), **changes)


# Learning

LEARNS = {
    "flowgrpo": (Row("train_flowgrpo", {"lr": 3e-4, "group_size": 8, "batch_size": 8}), 12, 0.02),
    "nft": (Row("train_nft", {"lr": 3e-4, "group_size": 8, "batch_size": 8}), 10, 0.02),
    "awm": (Row("train_nft", {"algo": "awm", "lr": 3e-4, "group_size": 8, "batch_size": 8}), 10, 0.02),
    "dpo": (
        Row("train_dpo", {"lr": 3e-4, "group_size": 8, "batch_size": 8, "prompts_per_step": 4, "levels_per_pair": 4,
                          "dpo_beta": 2000.0}), 10, 0.02,
    ),
    "sft": (Row("train_sft", {"lr": 3e-4, "prompts_per_step": 8, "batch_size": 8}), 10, 0.02),
    "srpo": (
        Row("train_srpo", {"lr": 2e-4, "num_inference_steps": 6, "eval_num_inference_steps": 6, "batch_size": 16,
                           "prompts_per_step": 16}), 24, 0.15,
    ),
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sampled(LEARNS, 1))
def test_training_raises_a_reward_that_can_be_raised(here, bright_url, request, name):
    """SRPO's is the reader's, whose gradient makes signs that OCR, another network that only watches, reads better."""
    row, steps, least = LEARNS[name]
    app, args = settings(row, bright_url)
    if name == "srpo":
        rng = random.Random(3)
        drawn = [tiny_signs.draw_prompt(rng, evaluation=True)[0] for _ in range(32)]
        Path("eval.txt").write_text("".join(f"{prompt}\n" for prompt in drawn))
        ocr_flags = request.getfixturevalue("ocr_flags")
        watch = {"scorer_watch_url": ocr_flags[1], "scorer_token_file": ocr_flags[3]}
        args = change(args, model=str(CHECKPOINT), **watch)  # two blocks draw no sign that can be read
    lines = train(app, change(args, train_steps=steps, eval_every=steps))
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
    "policy/first_ratio_max_dev",
    "reward/mean",
    "reward/min",
    "reward/max",
    "reward/group_std",
    "advantage/max",
    "policy/old_decay",
    "policy/pairs",
)
DPO = {"lr": 1e-3, "prompts_per_step": 4}
RANKS = {  # how its weights are spread over two ranks, and what the gradients' norms may differ by
    "flowgrpo lora ddp": (
        Row("train_flowgrpo", LORA | {"kl_coef": 0.1, "num_minibatches": 2, "memory_gradient_checkpointing": True,
                                      "timestep_fraction": 0.7,
                                      "lr": 1e-2,
                                      "true_cfg_scale": 3.0, "train_steps": 1, "batch_size": 2}), 1e-3,
    ),
    "nft lora ddp": (Row("train_nft", LORA | {"kl_coef": 0.1, "batch_size": 2, "lr": 1e-3}), 1e-3),
    "nft lora fsdp2": (Row("train_nft", LORA | {"kl_coef": 0.1, "batch_size": 2, "lr": 1e-3}), 1e-3),
    "nft awm fsdp2": (Row("train_nft", {"algo": "awm", "old_schedule": "linear", "batch_size": 2, "lr": 1e-3}), 1e-3),
    "dpo full fsdp2": (Row("train_dpo", DPO | {"batch_size": 2, "dpo_beta": 100.0}), 1e-3),
    "dpo lora ddp": (Row("train_dpo", DPO | LORA | {"num_minibatches": 2}), 1e-3),
    "dpo lora fsdp2": (Row("train_dpo", DPO | LORA | {"num_minibatches": 2}), 1e-3),
    "srpo full fsdp2": (Row("train_srpo", {"lr": 1e-3}), 1e-3),
    "srpo lora ddp": (Row("train_srpo", {"lr": 1e-3} | LORA), 1e-3),
    "sft full fsdp2": (Row("train_sft", {"lr": 1e-3, "batch_size": 1, "num_minibatches": 2}), 1e-3),
    "sft lora ddp": (Row("train_sft", LORA | {"lr": 1e-3, "batch_size": 1, "group_size": 2}), 1e-3),
    "sft of texts lora ddp": (Row("train_sft_tokens", LORA | {"batch_size": 2, "num_minibatches": 2}), 1e-3),
    "sft of texts full fsdp2": (Row("train_sft_tokens", {"batch_size": 2}), 1e-3),
    "dpo of texts full fsdp2": (Row("train_dpo_tokens", {"prompts_per_step": 4}), 1e-3),
    "dpo of texts lora ddp": (Row("train_dpo_tokens", {**LORA, "lr": 1e-2, "batch_size": 2}, pairs=True), 1e-3),
    "distill of texts full fsdp2": (Row("train_distill_tokens", {"batch_size": 2}), 1e-3),
    "distill of texts lora ddp": (Row("train_distill_tokens", LORA | {"batch_size": 2, "divergence": "jsd"}), 1e-3),
    "distill full fsdp2": (Row("train_distill", {"algo": "opd", "num_minibatches": 2}, teacher=True), 1e-2),
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sampled(RANKS, 1))
def test_one_and_two_ranks_train_on_the_same_numbers(here, bright_url, name):
    row, rel = RANKS[name]
    app, args = settings(row, bright_url)
    single = train(app, change(args, name="single"))
    size = 1 if row.teacher else args.data.batch_size
    double = train_on_ranks(app, change(args, name="double", sharding_mode=name.split()[-1], batch_size=size))
    assert double[0].get("eval/reward") == single[0].get("eval/reward")
    assert {key: double[1].get(key) for key in EXACT} == {key: single[1].get(key) for key in EXACT}
    for line in (
        (1,) if row.app in ("train_dpo", "train_dpo_tokens", "train_flowgrpo") else (1, 2)
    ):  # after an update, sums have rounded in another order
        assert double[line]["policy/loss"] == pytest.approx(single[line]["policy/loss"], rel=1e-3, abs=1e-6), line
        norms = [lines[line]["policy/grad_norm"] for lines in (double, single)]
        assert norms[0] == pytest.approx(norms[1], rel=rel, abs=1e-6), line


# Going on

OLD = {"lr": 1e-2, "old_schedule": "linear", "num_minibatches": 2, "old_every": 3, "ema_decay": 0.9, "kl_coef": 0.1}
RESUMED = {
    "flowgrpo": (
        Row(
            "train_flowgrpo",
            {
                "num_minibatches": 2,
                "kl_coef": 0.1,
                "memory_gradient_checkpointing": True,
                "num_inner_epochs": 2,
                "timestep_fraction": 0.7,
                "optim_lr_scheduler_type": "cosine",
                "optim_adam_beta1": 0.8,
                "optim_adam_beta2": 0.99,
            },
        ),
        2,
    ),
    "nft": (Row("train_nft", OLD), 3),
    "awm": (Row("train_nft", OLD | {"algo": "awm", "old_kl_coef": 0.1, "num_inner_epochs": 2}), 3),
    "dgpo": (Row("train_nft", OLD | {"algo": "dgpo", "clip_range": 0.01, "num_inner_epochs": 2}), 3),
    "dpo": (Row("train_dpo", {"lr": 1e-3, "dpo_beta": 100.0}, pairs=True), 2),
    "dpo online": (Row("train_dpo", {"lr": 1e-3, "num_minibatches": 2}), 2),
    "srpo": (Row("train_srpo", {"num_minibatches": 2, "ema_decay": 0.9}), 2),
    "distill": (Row("train_distill", {"algo": "opd", "num_minibatches": 2}, teacher=True), 2),
    "sft": (Row("train_sft", {"ema_decay": 0.9, "num_minibatches": 2, "lr": 1e-3}), 2),
    "gspo": (Row("train_gspo", {"ema_decay": 0.5, "algo": "dapo", "num_minibatches": 2, "num_iterations": 2}), 2),
    "sft of texts": (Row("train_sft_tokens", {"ema_decay": 0.9, "num_minibatches": 2}), 2),
    "dpo of texts": (Row("train_dpo_tokens", {"num_minibatches": 2}, pairs=True), 2),
    "dpo of texts online": (Row("train_dpo_tokens", {"num_minibatches": 2}), 2),
    "distill of texts": (Row("train_distill_tokens", {"num_minibatches": 2}), 2),
    "distill on given texts": (
        Row("train_distill_tokens", {"group_size": 1, "completion_key": "completion", "divergence": "forward"}),
        2,
    ),
    "unigrpo": (Row("train_unigrpo", {"ema_decay": 0.5, "memory_gradient_checkpointing": True, "kl_coef": 0.1}), 2),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sampled(RESUMED, 1))
def test_a_run_that_lost_its_last_step_ends_bit_for_bit_as_before_and_logs_documented_names(here, bright_url, name):
    """With all weights or an adapter, as TEST_SEED says; the last checkpoint goes, as if a kill had come before it."""
    row, steps = RESUMED[name]
    app, args = settings(row, bright_url)
    is_full = row.teacher or row.app == "train_gspo" or random.Random(f"{TEST_SEED} {name}").random() < 0.5
    adapter = {} if is_full else LORA
    watch = {"scorer_watch_url": bright_url} if name == "srpo" else {}
    args = change(args, train_steps=steps, eval_every=1, save_every=1, **adapter, **watch)
    whole, weights = train(app, args), exported()
    assert undocumented(whole) == set()
    assert weights
    lose_step("run", steps)
    assert unclocked(train(app, args)) == unclocked(whole)
    again = exported()
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_blocks_on_the_host_change_no_bit_and_continue(here, bright_url):
    recomputed = LORA | {"kl_coef": 0.1, "memory_gradient_checkpointing": True, "eval_every": 1, "save_every": 1}
    app, args = settings(Row("train_flowgrpo", recomputed), bright_url)
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
