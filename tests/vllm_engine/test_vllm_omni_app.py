"""The FlowGRPO trainer with `--engine vllm-omni`: the same run as with the embedded engine, on one rank and on two."""

from pathlib import Path

import pytest
import torch.multiprocessing
from apps.conftest import bright_url as bright_url
from helpers import CHECKPOINT, REPO
from omni_rl.run.run import ROUNDING, Run
from omni_rl.settings.fields import change
from omni_train.files import load_metrics
from trainer_runs import PROMPTS, recipe, run_script, tiny, train_on_ranks, write_eval_prompts

import train_flowgrpo as app

# Imported here, so that the ranks, which are forked, have it: starting vLLM anew takes longer than the runs.
from omni_rollout.engines.vllm_omni import engine  # noqa: F401  # isort: skip

SETTINGS = {
    "prompts_per_step": 2, "group_size": 4, "batch_size": 2, "num_inference_steps": 4, "window_high": None,
}  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.fixture
def train(tmp_path, monkeypatch, bright_url):
    """`train(ranks, **settings)` is the metrics of a run."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)

    def run(ranks=1, **settings):
        args = tiny(recipe(app, "tiny-signs"), **SETTINGS, scorer_url=bright_url)
        return train_on_ranks(app, change(args, **settings), ranks=ranks)

    return run


@pytest.mark.parametrize(("ranks", "shard"), [(1, "none"), (2, "ddp"), (2, "fsdp2")])
def test_both_engines_make_the_same_run(train, ranks, shard):
    settings = {"ranks": ranks, "sharding_mode": "auto" if ranks == 1 else shard}
    embedded = train(name="embedded", **settings)
    ours = train(name="vllm-omni", engine="vllm-omni", **settings)
    assert embedded[0].keys() == ours[0].keys()
    assert embedded[1].keys() == ours[1].keys()  # the log is the same
    for line, expected in zip(ours, embedded, strict=True):
        for name in ("reward/mean", "reward/group_std", "eval/reward"):
            if name in expected:
                assert line[name] == pytest.approx(expected[name], abs=1e-4), name
    assert all(line["policy/first_ratio_max_dev"] <= 1e-5 for line in ours[1:])
    assert (ours[1]["perf/sync_mb"] == 0) == (shard != "fsdp2")
    assert all(line["policy/ratio_max_dev"] == 0 for line in ours[1:])  # it starts at the trainer's own log-probs


def test_both_engines_sample_a_step_ahead_with_the_same_weights(train):
    ahead = {"algo": "flowgrpo", "noise_level": 0.7, "draw_ahead": 1, "correction_level": "step", "lr": 1e-3}
    ends = {"train_steps": 3, "save_every": 3, "eval_every": 3}
    embedded = train(name="embedded", **ahead, **ends)
    ours = train(name="vllm-omni", engine="vllm-omni", **ahead, **ends)
    assert [line["policy/staleness"] for line in ours[1:]] == [0, 1, 1]
    for line, expected in zip(ours[1:], embedded[1:], strict=True):
        for name in ("reward/mean", "policy/rollout_gap", "policy/correction_abs_diff_max"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_a_sync_that_was_left_out_is_caught_whatever_the_learning_rate_and_the_dtype(train, monkeypatch, ranks, dtype):
    """At a recipe's learning rate the ratio of bfloat16 hides it for many steps: the weights' version does not."""

    def forget(run, version):
        run.version = version
        return 0

    monkeypatch.setattr(Run, "sync_weights", forget)  # the ranks are forked
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="samples with weights 0, the trainer has 1"):
        train(ranks=ranks, engine="vllm-omni", dtype=dtype, lr=1e-9, **LORA)


def test_lora_guidance_a_reference_and_two_updates(train):
    lines = train(engine="vllm-omni", true_cfg_scale=3.0, kl_coef=0.1, num_minibatches=2, lr=1e-2, **LORA)
    for line in lines[1:]:
        assert line["policy/first_ratio_max_dev"] <= 1e-5
        assert line["policy/ratio_max_dev"] > 1e-5  # the second update's ratio starts at the weights before the first
        assert line["perf/sync_mb"] > 0


def test_bfloat16_is_within_its_tolerance_and_can_be_corrected(train):
    lines = train(
        engine="vllm-omni", dtype="bfloat16", lr=1e-3, old_log_prob="correct",
        correction_low=0.9999, correction_high=1.0001, algo="flowgrpo", noise_level=0.7, **LORA,
    )  # fmt: skip
    for line in lines[1:]:
        assert 0 < line["policy/first_ratio_max_dev"] <= ROUNDING["bfloat16"]  # as docs/metrics.md has it
        assert line["policy/ratio_max_dev"] == 0  # ratios start at the trainer's own log-probs
        assert 0 < line["policy/correction_abs_diff_max"] <= ROUNDING["bfloat16"]
        assert 0 < line["policy/correction_outside_fraction"] <= 1


def test_a_quantized_rollout_is_corrected_and_ratios_start_at_the_trainer_s_own_log_probs(train):
    quantized = {"engine": "vllm-omni", "dtype": "bfloat16", "memory_rollout_dtype": "fp8"}
    lines = train(**quantized, algo="flowgrpo", noise_level=0.7, lr=1e-3, **LORA)
    for line in lines[1:]:
        assert 0 < line["policy/first_ratio_max_dev"] <= 2e-2
        assert line["policy/ratio_max_dev"] == 0
        assert 0 < line["policy/correction_abs_diff_max"] <= 2e-2
        assert line["perf/sync_mb"] > 0


@pytest.mark.parametrize(("ranks", "own"), [(1, ["--lora-rank", "4"]), (2, ["--shard", "fsdp2"])])
def test_the_page_by_hand_samples_with_it_too(tmp_path, monkeypatch, bright_url, ranks, own):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.txt").write_text('a blue sign that says "AB"\n' * 4)
    words = ["--model", str(CHECKPOINT), "--prompts", str(PROMPTS / "train.txt"), "--eval-prompts", "eval.txt"]
    words += ["--scorer-url", bright_url, "--prompts-per-step", "2", "--group-size", "4", "--batch-size", "2"]
    words += ["--num-inference-steps", "4", "--window-high", "3", "--train-steps", "2", "--lr", "1e-3", *own]
    page = REPO / "apps" / "flowgrpo_by_hand.py"
    run_script(page, [*words, "--name", "embedded"], ranks=ranks)
    run_script(page, [*words, "--name", "vllm-omni", "--vllm-omni"], ranks=ranks)
    embedded, ours = (load_metrics(Path("runs") / name / "metrics.jsonl") for name in ("embedded", "vllm-omni"))
    for name in ("reward/mean", "policy/grad_norm", "eval/reward"):
        expected = [line[name] for line in embedded if name in line]
        assert [line[name] for line in ours if name in line] == pytest.approx(expected, rel=1e-3), name
