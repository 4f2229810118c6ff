"""A plan's peak against the bytes that the emulated accelerator has counted."""

import importlib
import json
from dataclasses import replace

import pytest
from build_tiny_scorers import write_clip
from emulated import emulated_runs as runs
from emulated.npu import build
from helpers import sampled
from omni_rl.settings import fields
from omni_rl.settings.groups import ScoredScorer
from omni_rl.tools import plan
from records import record

HOST = {"memory_gradient_checkpointing": True, "memory_offload": "encoder,engine,optimizer,activations"}
CASES = {name: runs.CASES[name] for name in ("flowgrpo full", "flowgrpo LoRA", "nft LoRA")}
for bits in ("int8", "fp8", "nf4"):
    lora = runs.CASES["flowgrpo LoRA"]
    CASES[bits] = replace(lora, settings=lora.settings | HOST | {"memory_base_dtype": bits})
context = runs.CASES["flowgrpo full, fsdp2, context"]  # so large that half of the tokens save 11 % of the peak
CASES["context"] = replace(context, settings=context.settings | {"width": 192, "height": 128})

CASES = {name: replace(case, settings=case.settings | {"memory_text_cache_mb": 0.0}) for name, case in CASES.items()}
DATA = f"{record.REPO}/data/tiny-beeps"  # whose prompts are alike, as those of a plan
BEEPS = {"prompts": f"{DATA}/train.jsonl", "eval_prompts": f"{DATA}/eval.jsonl", "reward": "exact", "max_new_tokens": 2}
BEEPS |= {"model": f"{record.REPO}/checkpoints/tiny-beeps-qwen3-omni"}
CASES |= {
    "gspo full": runs.tokens(**BEEPS),
    "gspo LoRA": runs.tokens(**record.LORA, **BEEPS, memory_gradient_checkpointing=True, kl_coef=0.1),
}


@pytest.mark.parametrize("name", sampled(CASES, 1))
def test_a_plan_tells_the_peak_of_a_run(tmp_path, monkeypatch, fresh, name):
    build()
    case, folder = CASES[name], tmp_path / "npu"
    with record.scoring() as url:
        fresh(runs.run, case, folder, url, lives=(4,), before=runs.load_like_cuda)  # of which at least one has a signal
        settings = record.flags(case, record.REPO, url)
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    app = importlib.import_module(case.app)
    monkeypatch.chdir(folder)
    planned = plan.measure(
        app.main, fields.change(app.Args(), **settings, dry_run=True, memory_device_gb=1.0), case.ranks
    )
    assert planned.peak / 2**20 == pytest.approx(max(line.get("perf/peak_memory_mb", 0) for line in lines), rel=0.05)


@pytest.mark.parametrize("name", sampled(["qwen3", "qwen3-omni"], 1))
def test_a_plan_tells_the_peak_of_long_answers_from_their_ends(alone, name):
    build()
    counted, planned = alone(runs.answers_peaks, name, 200)
    assert planned == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("scorer", sampled(["pickscore", "0.5*pickscore + 0.5*clip"], 1))
def test_a_plan_tells_the_peak_of_a_scorer(tmp_path, alone, scorer):
    build()
    write_clip(tmp_path / "clip")
    names = ["pickscore.", "clip."] if "+" in scorer else [""]
    options = {f"{name}{key}": str(tmp_path / "clip") for name in names for key in ("model", "tokenizer")}
    asked = " --option ".join([scorer, *(f"{key}={value}" for key, value in options.items())])
    planned = plan.scorer_bytes(ScoredScorer(name=asked), 1)
    assert planned.total() == pytest.approx(alone(runs.scorer_peak, scorer, options), rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["as it is", "recomputed", "offloaded"])
def test_a_plan_of_a_net_of_57_million_weights_tells_its_peak(alone, variant):
    build()
    counted, planned = alone(runs.peaks, variant)
    assert planned == pytest.approx(counted, rel=0.01)
