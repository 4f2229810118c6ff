"""The FlowGRPO trainer with `--engine vllm-omni`: the same run as with the embedded engine, on one rank and on two."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import rollouts
import torch
import torch.multiprocessing
from apps.conftest import bright_url as bright_url
from helpers import CHECKPOINT, REPO
from omni_train.log import load_metrics

import train_flowgrpo as app

# Imported here, so that the ranks, which are forked, have it: starting vLLM anew takes longer than the runs.
from omni_rollout import vllm_omni_engine  # noqa: F401  # isort: skip
from omni_rollout.vllm_omni_models import qwen_image  # noqa: F401  # isort: skip

TINY = replace(
    app.PRESETS["tiny-signs"],
    model=str(CHECKPOINT),
    prompts=str(REPO / "data" / "tiny-signs" / "train.txt"),
    eval_prompts="eval.txt",
    prompts_per_step=2,
    group_size=4,
    batch_size=2,
    num_steps=4,
    window_high=None,
    eval_num_steps=2,
    steps=2,
    eval_every=2,
    shard="auto",
)


def _rank_main(rank, args, world_size, port, change):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if world_size == 1:
        del os.environ["RANK"]
    change()
    app.check_args(args)
    app.main(args)
    os._exit(0)  # a forked process must not run pytest's endings


@pytest.fixture
def train(tmp_path, monkeypatch, bright_url):
    """`train(ranks, **settings)` is the metrics of a run; `change` is called in each rank before it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.txt").write_text("".join(f'a blue sign that says "{word}"\n' for word in ("AB", "CD", "EF")))

    def run(ranks=1, change=lambda: None, **settings):
        args = replace(TINY, scorer_url=bright_url, **settings)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(
            _rank_main, args=(args, ranks, port, change), nprocs=ranks, start_method="fork"
        )
        return load_metrics(Path("runs") / args.name / "metrics.jsonl")

    return run


@pytest.mark.parametrize(("ranks", "shard"), [(1, "none"), (2, "ddp"), (2, "fsdp2")])
def test_both_engines_make_the_same_run(train, ranks, shard):
    settings = {"ranks": ranks, "shard": "auto" if ranks == 1 else shard}
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
    assert 'old_log_prob = "recompute"' in Path("runs/vllm-omni/config.toml").read_text()
    assert 'old_log_prob = "rollout"' in Path("runs/embedded/config.toml").read_text()


@pytest.mark.parametrize(("ranks", "dtype", "lr"), [(1, "float32", 3e-4), (2, "float32", 3e-4), (1, "bfloat16", 1e-3)])
def test_a_stale_engine_is_caught(train, ranks, dtype, lr):
    def forget_to_sync():
        rollouts.sync = lambda engine, net, *, version: 0

    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="step 1: before the first update the ratio"):
        train(
            ranks=ranks, change=forget_to_sync, engine="vllm-omni", dtype=dtype, lora_rank=32, lora_alpha=128, lr=lr,
            algo="flowgrpo", noise_level=0.7,
        )  # fmt: skip


def test_lora_guidance_a_reference_and_two_updates(train):
    lines = train(
        engine="vllm-omni", lora_rank=4, lora_alpha=8, guidance_scale=3.0, kl_coef=0.1, updates_per_step=2, lr=1e-2
    )
    for line in lines[1:]:
        assert line["policy/first_ratio_max_dev"] <= 1e-5
        assert line["policy/ratio_max_dev"] > 1e-5  # the second update's ratio starts at the weights before the first
        assert line["perf/sync_mb"] > 0


def test_bfloat16_is_within_its_tolerance_and_can_be_corrected(train):
    lines = train(
        engine="vllm-omni", dtype="bfloat16", lora_rank=4, lora_alpha=8, lr=1e-3, old_log_prob="correct",
        correction_low=0.9999, correction_high=1.0001, algo="flowgrpo", noise_level=0.7,
    )  # fmt: skip
    for line in lines[1:]:
        assert 0 < line["policy/first_ratio_max_dev"] <= 2e-3
        assert line["policy/ratio_max_dev"] == 0  # ratios start at the trainer's own log-probs
        assert 0 < line["policy/correction_abs_diff_max"] <= 2e-3
        assert 0 < line["policy/correction_outside_fraction"] <= 1
