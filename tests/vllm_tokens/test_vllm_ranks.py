"""The trainer on two ranks with sharded weights, an engine of vLLM's in each."""

import json
import subprocess
import sys
from pathlib import Path

from vllm_models import build_qwen3

APP = Path(__file__).parents[2] / "apps" / "train_gspo.py"
SETTINGS = (
    "--model model --prompts train.jsonl --eval.prompts train.jsonl --prompts-per-step 2 --group-size 4 --batch-size 2 "
    "--max-prompt-tokens 48 --max-new-tokens 8 --train-steps 2 --eval.every 2 --lr 1e-2 --reward regex --lora.rank 0 "
    "--sharding.mode fsdp2 --engine vllm --gpu-memory-utilization 0.05 --algo grpo --name run"
)


def test_two_ranks_with_sharded_weights_sample_what_they_score(tmp_path):
    build_qwen3(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text((json.dumps({"prompt": "say", "pattern": "[a-zA-Z]"}) + "\n") * 4)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(APP)]
    done = subprocess.run([*start, *SETTINGS.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    logged = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "policy/rollout_gap" in line]
    assert len(steps) == 2
    assert all(line["policy/rollout_gap"] <= 1e-5 for line in steps)
