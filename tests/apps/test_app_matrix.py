"""Every algorithm trains every model: two steps of all weights on a small checkpoint, guided, in this process.

Each pair of a model and an algorithm is a test. Every algorithm trains one of the models, each another, which TEST_SEED
draws. `scripts/model_table.py` runs all of them and writes docs/evidence/models.md.
"""

import json
import math
import random
import shutil
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from helpers import REPO, TEST_SEED, sampled, ulps
from model_rows import ROWS
from omni_rollout.models import open_model
from omni_train.weights.full import homes, saved_files
from PIL import Image
from safetensors.torch import load_file, save_file
from trainer_runs import recipe, tiny, train

import train_distill
import train_dpo
import train_flowgrpo
import train_nft
import train_sft
import train_srpo

SIZES = {"prompts_per_step": 2, "group_size": 2, "batch_size": 4, "num_inference_steps": 2, "lr": 1e-3}
EXACT = {"lr_decay": False, "weight_decay": 0.0}  # weights without a gradient stay as they are
WINDOW = {"window_size": 1, "window_low": 0, "window_high": None, "noise_level": 0.7}
READER = str(REPO / "checkpoints" / "tiny-signs-reader")
ALGORITHMS = {  # name -> its trainer and what its settings have beyond SIZES
    **{algo: (train_flowgrpo, WINDOW | {"algo": algo}) for algo in train_flowgrpo.ALGOS},
    **{algo: (train_nft, {"algo": algo, "train_levels": 2}) for algo in train_nft.ALGOS},
    "dpo": (train_dpo, {"levels_per_pair": 2}),
    "dpo offline": (train_dpo, {"levels_per_pair": 2, "preferences": "pairs.jsonl"}),
    "srpo": (train_srpo, {"reward_model": READER, "group_size": 1, "batch_size": 2}),
    "sft": (train_sft, {"prompts": "pairs.jsonl"}),
    "distill": (train_distill, {"teacher_substeps": 2, "train_low": 0, "train_high": None}),
}
CELLS = [
    f"{model}: {algorithm}"
    for model, row in ROWS.items()
    for algorithm in ALGORITHMS
    if row.has_size or algorithm != "srpo"  # whose rewards hear nothing
]
DRAWN = random.Random(TEST_SEED).sample([model for model, row in ROWS.items() if row.has_size], len(ALGORITHMS))
ALWAYS = [f"{model}: {algorithm}" for model, algorithm in zip(DRAWN, ALGORITHMS, strict=True)]


@lru_cache(maxsize=1)  # cells of one model come one after the other
def untrained(model):
    """The weights of a checkpoint by name."""
    return dict(open_model(model).load_net(device="cpu", dtype=torch.float32).named_parameters())


def write_inputs(folder, num_images, latents=None):
    """Prompts, and pairs of pictures of them, or of latents of a shape; each with that many references."""
    drawn = random.Random(0)
    for name, height in (("win", 32), ("lose", 32), ("reference", 64)):
        Image.frombytes("RGB", (96, height), drawn.randbytes(96 * height * 3)).save(folder / f"{name}.png")
    texts = [f'a blue sign that says "{word}"' for word in ("AB", "CDEF")]
    records = [{"prompt": text, "images": ["reference.png"] * num_images} for text in texts]
    ending = "safetensors" if latents else "png"
    pairs = [record | {side: f"{side}.{ending}" for side in ("win", "lose")} for record in records]
    for side in ("win", "lose") if latents else ():
        save_file({"x0": torch.randn(latents)}, folder / f"{side}.safetensors")
    for name, lines in (("prompts", records), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("cell", sampled(CELLS, 1, always=ALWAYS))
def test_an_algorithm_trains_a_model(cell, tmp_path, monkeypatch, bright_urls, record_property):
    name, algorithm = cell.split(": ")
    (app, changes), row = ALGORITHMS[algorithm], ROWS[name]
    model = row.checkpoint()
    monkeypatch.chdir(tmp_path)
    opened = open_model(model)
    sizes = {"height": 32, "width": 96, "num_frames": row.guided.num_frames}
    shape = opened.latent_shape(replace(row.guided, **sizes))
    write_inputs(tmp_path, len(row.images), None if "image" in opened.MEDIA else shape)
    places = {"model": str(model), "prompts": "prompts.jsonl", "eval_prompts": "prompts.jsonl"}
    scorer = {} if app is train_srpo else {"scorer_url": bright_urls[opened.MEDIA[0]]}
    knobs = ",".join(f"{knob}={value}" for knob, value in row.guided.guidance.items())
    guided = {"guidance_scale": row.guided.guidance_scale, "guidance": knobs}
    args = tiny(recipe(app, "tiny-signs"), **(SIZES | sizes | EXACT | places | scorer | guided | changes))

    lines = train(app, args)[1:]
    assert len(lines) == 2
    assert all(line["policy/grad_norm"] > 0 and math.isfinite(line["policy/loss"]) for line in lines)
    if app is train_flowgrpo:
        assert [line["policy/first_ratio_max_dev"] for line in lines] == [0.0, 0.0]
    if app is train_dpo:
        # The policy is the reference still. Frozen and trained weights may pass other matrix products, which round
        # the four errors otherwise, of which dpo_beta / 2 reaches the loss.
        assert lines[0]["policy/loss"] == pytest.approx(math.log(2), abs=args.dpo_beta / 2 * ulps(4, 2.0))
    before, after = untrained(model), {}
    for expert, home in homes(tmp_path / "runs" / args.name / "weights", opened.nets).items():
        [file] = saved_files(home)
        after |= {f"{expert}.{weight}".lstrip("."): value for weight, value in load_file(file).items()}
    idle = tuple(f"{e}." for e in opened.nets if not any(line.get(f"policy/forwards_{e}", 1) for line in lines))
    assert len(idle) < len(opened.nets)
    idle += row.unseen if app is train_srpo else ()  # whose reward sees no more than the pictures
    left = {weight for weight, value in before.items() if torch.equal(after[weight], value)}
    assert left == row.without_gradient | {weight for weight in before if idle and weight.startswith(idle)}
    record_property("trained", cell)
    shutil.rmtree(tmp_path / "runs")  # 10 MB
