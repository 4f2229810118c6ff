"""The trainer of policies over tokens on vLLM itself, an engine after the other: a process has one at a time."""

import json
from pathlib import Path

import pytest
from omni_rl.settings.fields import build
from trainer_runs import train, undocumented
from vllm_models import build_qwen3

import train_gspo as app


@pytest.mark.parametrize(("algo", "correction"), [("gspo", "auto"), ("grpo", "token_mask"), ("cispo", "off")])
def test_a_trainer_samples_with_vllm_and_logs_the_gap(algo, correction, tmp_path, monkeypatch):
    """Its weights reach vLLM after each update: a stale engine's gap would grow with the steps."""
    build_qwen3(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"prompt": "say", "pattern": "[a-zA-Z]"}) + "\n"
    Path("train.jsonl").write_text(line * 4)
    settings = {
        "model": str(tmp_path / "model"), "prompts": "train.jsonl", "eval.prompts": "train.jsonl", "eval.every": 3,
        "prompts_per_step": 2, "group_size": 4, "batch_size": 4, "max_prompt_tokens": 48, "max_new_tokens": 8,
        "train_steps": 3, "lr": 1e-2, "reward": "regex", "lora.rank": 2, "engine": "vllm",
        "gpu_memory_utilization": 0.1, "algo": algo, "rollout_correction": correction,
    }  # fmt: skip
    args = build(app.Args, settings)
    app.check_args(args)
    lines = train(app, args)[1:]
    assert len(lines) == 3
    for line in lines:
        assert line["policy/first_ratio_max_dev"] == 0
        assert 0 < line["policy/rollout_gap"] < 1e-4
        assert 0 < line["policy/correction_abs_diff_mean"] <= line["policy/correction_abs_diff_max"] < 1e-4
        assert line["policy/correction_weight_mean"] == pytest.approx(1, abs=1e-3)
        assert line["perf/sync_mb"] > 0
    assert lines[-1]["policy/grad_norm"] > 0
    assert undocumented(lines) == set()
