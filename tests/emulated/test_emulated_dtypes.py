"""Every model takes a training step in float16 on an accelerator without bfloat16; each net with all weights too."""

import pytest
from apps.conftest import bright_url as bright_url
from apps.conftest import bright_urls as bright_urls
from emulated import emulated_runs as runs
from emulated.npu import build
from helpers import sampled
from model_rows import ROWS
from row_runs import KINDS, ONE_STEP, assert_clean, assert_trained, run_alone, settings

NETS = "qwen-image bagel hunyuan-image qwen-image21 flux2-dev sd35-medium z-image flux-dev wan21 ltx23 hunyuan-video15"
WHOLE = (*NETS.split(), "stable-audio3")
CASES = [(name, kind) for name in ROWS for kind in KINDS if kind == "LoRA" or name in WHOLE]


@pytest.mark.parametrize("case", sampled(CASES, 3))
def test_every_model_takes_a_step_in_float16(case, tmp_path, bright_urls, fresh):
    name, kind = case
    build()
    args = settings(name, "flowgrpo", tmp_path, bright_urls, **ONE_STEP, **KINDS[kind], dtype="float16")
    lines, text = fresh(run_alone, "train_flowgrpo", args, tmp_path, before=runs.load_without_bfloat16)
    assert "on npu" in text
    assert_clean(lines, text)
    assert lines[1]["perf/rollout_tflops"] > 0 == lines[1]["policy/first_ratio_max_dev"]
    assert lines[1]["policy/loss_scale"] > 0
    assert_trained(name, kind, tmp_path, lines)
