"""Every trainer with every model: on one rank and two, stopped and continued, exported.

Each pair of a trainer and a model is a test; TEST_SEED draws those that are not marked slow. The other tests of the
trainers train Qwen-Image.
"""

import shutil

import numpy as np
import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_reward import Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.media.images import read_image
from omni_rl.settings.fields import change
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.weights.full import load_weights, weight_folders
from row_runs import ALGORITHMS, settings
from safetensors.torch import load_file, save_file
from trainer_runs import exported, lose_step, train, train_on_ranks

import train_flowgrpo
import train_srpo

LORA = {"lora_rank": 4, "lora_alpha": 8}
LONGER = {"group_size": 4, "train_steps": 1, "eval_every": 1, "num_inference_steps": 3, "window_size": None}
APPS = ("flowgrpo", "nft", "dpo", "srpo")
MODELS = [name for name in ROWS if name != "qwen-image"]
SOUND = [name for name in MODELS if not ROWS[name].has_size]  # of which SRPO's rewards see nothing
DRAWN = {app: [name for name in MODELS if app != "srpo" or name not in SOUND] for app in APPS}
TRAINED = sampled([f"{app} {model} {kind}" for app in APPS for model in DRAWN[app] for kind in ("full", "lora")], 1)
BAGELS = [name for name in MODELS if name.startswith("bagel")]
WEIGHTS = sampled([f"{kind} {model}" for kind in ("full", "lora") for model in MODELS], 1)
STOCK = sampled([f"{kind} {model}" for kind in ("full", "lora") for model in MODELS if ROWS[model].stock], 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", TRAINED)
def test_every_trainer_trains_every_model_on_one_rank_and_two(here, bright_urls, case):
    """All weights sharded, or LoRA copied to both ranks; the rewards are the same on any number of them."""
    algorithm, model, kind = case.split()
    app, changes, mode = ALGORITHMS[algorithm][0], *(({}, "fsdp2") if kind == "full" else (LORA, "ddp"))
    args = settings(model, algorithm, here, bright_urls, **changes)
    one = train(app, change(args, name="one"))
    two = train_on_ranks(app, change(args, name="two", sharding_mode=mode, batch_size=args.data.batch_size // 2))
    assert all(line["policy/grad_norm"] > 0 for line in one[1:])
    assert one[1]["reward/mean"] == pytest.approx(two[1]["reward/mean"], rel=1e-3)
    assert one[1]["policy/grad_norm"] == pytest.approx(two[1]["policy/grad_norm"], rel=2e-2)
    if app is train_flowgrpo:
        assert {line["policy/first_ratio_max_dev"] for line in (*one[1:], *two[1:])} == {0.0}


def test_replayed_routes_train_and_the_load_of_experts_is_that_of_sampling(here, bright_urls):
    """A reference passes the experts too, in the update; it moves no number of the load."""
    args = settings("hunyuan-image", "flowgrpo", here, bright_urls, **LONGER)
    plain = train(train_flowgrpo, change(args, name="plain"))[1]
    args = change(args, name="replayed", route_replay=True, best_worst_n=2, kl_coef=0.1, **LORA)
    line = train(train_flowgrpo, args)[1]
    assert line["policy/first_ratio_max_dev"] <= 1e-5
    assert line["policy/grad_norm"] > 0
    assert {name: line[name] for name in line if "experts" in name} == {n: plain[n] for n in plain if "experts" in n}
    assert line["rollout/experts_entropy"] > 0


def test_experts_stay_on_their_ranks_in_all_of_a_run(here, bright_urls):
    """They sample, train by recomputed blocks and are exported as on one rank."""
    args = settings("hunyuan-image", "flowgrpo", here, bright_urls, **LONGER)
    args = change(args, memory_gradient_checkpointing=True)
    one = train(train_flowgrpo, change(args, name="one"))[1]
    args = change(args, name="two", batch_size=2, sharding_mode="fsdp2", sharding_experts=True)
    two = train_on_ranks(train_flowgrpo, args)[1]
    assert two["policy/first_ratio_max_dev"] == 0
    for name in ("reward/mean", "policy/grad_norm", "eval/reward"):
        assert two[name] == pytest.approx(one[name], rel=1e-3), name
    weights, others = exported("one"), exported("two")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"--sharding.experts does not go with --compile"):
        train_flowgrpo.check_args(change(args, compile=True, dry_run=True, memory_device_gb=1.0))


def test_a_scorer_of_edits_sees_the_references_of_each_sample(here):
    """From the start on, when it is tried with those of the first evaluation prompt."""
    seen = []

    def score(media, prompts, meta, references):
        for sample, own in zip(meta, references, strict=True):
            assert [p.tolist() for p in own] == [read_image(here / name).tolist() for name in sample["images"]]
        seen.append([sample["images"] for sample in meta])
        return [float(image.mean()) for image in media["image"]]

    with serving_in_thread(Scorer(score, references=True)) as url:
        args = settings("qwen-image-edit-plus", "flowgrpo", here, {"image": url}, train_steps=1, scorer_watch_url=url)
        train(train_flowgrpo, args)
    assert seen[0] == seen[1] == [["0-0.png", "0-1.png"]] * 2  # of the scorer and of the one that watches
    assert {len(batch) for batch in seen[2:]} == {2, 4}  # an evaluation has two prompts


@pytest.mark.parametrize("case", WEIGHTS)
def test_sharded_runs_that_were_stopped_end_bit_for_bit_where_others_do(here, bright_urls, case):
    kind, model = case.split()
    changes = LORA if kind == "lora" else {}
    args = settings(model, "flowgrpo", here, bright_urls, save_every=1, sharding_mode="fsdp2", batch_size=2, **changes)
    found = []
    for _ in range(2):
        lines = train_on_ranks(train_flowgrpo, args)
        files = sorted((here / "runs" / args.run.name / "weights").rglob("*.safetensors"))
        told = [[line.get(key) for key in ("reward/mean", "policy/loss", "policy/grad_norm")] for line in lines]
        found.append((told, {file.parent.name: file.read_bytes() for file in files}))
        lose_step(args.run.name, args.run.train_steps)
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize("case", STOCK)
def test_the_stock_pipeline_opens_the_export_and_draws_our_image(here, bright_urls, case):
    kind, name = case.split()
    row, changes = ROWS[name], LORA if kind == "lora" else {}
    args = settings(name, "flowgrpo", here, bright_urls, lr=1e-2, **changes)
    train(train_flowgrpo, args)
    weights, model = here / "runs" / args.run.name / "weights", open_model(row.checkpoint())
    prompt = Prompt('a blue sign that says "AB"', group=0, index=0, seed=5, images=row.references(0))
    noise = step_noise([prompt.seed], INITIAL_NOISE, model.latent_shape(row.unguided))
    pipe = row.stock_pipeline(model.folder, torch.float32)

    def stock():
        drawn = row.draw_stock(pipe, [prompt], row.unguided, noise)[0]
        return drawn.movedim(-3 if drawn.dim() > 2 else -2, -1).numpy()  # of sound there are channels and points

    untrained = stock()
    parts = model.load(device="cpu", dtype=torch.float32)
    for expert, home in weight_folders(weights, model.nets).items():
        part = model.nets[expert]
        if kind == "lora":
            pipe.load_lora_weights(str(home), **({} if part == "transformer" else {f"load_into_{part}": True}))
        else:
            setattr(pipe, part, type(pipe.transformer).from_pretrained(home, subfolder="transformer"))
        load_weights(parts.net.get_submodule(expert), home)
    trained = stock()
    drawn = DiffusersEngine(model, parts).generate([prompt], row.unguided)
    ours = model.decode(parts, drawn.x0, drawn.cond, row.unguided)[0][model.MEDIA[0]][0].numpy()
    change = np.abs(trained - untrained).max()
    assert change > 1e-3  # there is something to see
    assert np.abs(trained - ours).max() < change / 100


@pytest.mark.parametrize("case", sampled([f"{kind} {name}" for kind in ("full", "lora") for name in BAGELS], 1))
def test_an_export_of_bagel_has_the_names_of_the_released_file_and_draws_our_image_there(here, bright_urls, case):
    kind, name = case.split()
    folder, row = here / "model", ROWS[name]
    shutil.copytree(row.checkpoint(), folder)
    changes = LORA if kind == "lora" else {}
    args = settings(name, "flowgrpo", here, bright_urls, lr=1e-2, save_every=1, **changes)
    args = change(args, model=str(folder), train_steps=1)
    train(train_flowgrpo, args)
    weights = here / "runs" / args.run.name / "weights"
    prompt = Prompt('a blue sign that says "AB"', 0, 0, seed=5, images=row.references(0))

    def draw(trained=None):
        model = open_model(folder)
        parts = model.load(device="cpu", dtype=torch.float32)
        if trained is not None:
            load_weights(parts.net, trained)
        return DiffusersEngine(model, parts).generate([prompt], row.guided).x0

    untrained, ours = draw(), draw(weights)
    released = load_file(folder / "ema.safetensors")
    exported = load_file(next(weights.rglob("*.safetensors")))
    if kind == "lora":
        names = {name.removeprefix("transformer.").partition(".lora_")[0] for name in exported}
        factors = {name: [exported[f"transformer.{name}.lora_{k}.weight"] for k in "BA"] for name in names}
        exported = {f"{name}.weight": released[f"{name}.weight"] + up @ down for name, (up, down) in factors.items()}
        assert all("_moe_gen" in name for name in exported)
    assert exported.keys() < released.keys()
    (folder / "ema.safetensors").unlink()
    save_file(released | exported, folder / "ema.safetensors")
    assert (untrained - ours).abs().max() > 1e-2  # there is something to see
    torch.testing.assert_close(draw(), ours, rtol=0, atol=1e-4 if kind == "lora" else 0)
    with pytest.raises(ValueError, match="a file of the weights has other"):  # no run goes on with other weights
        train(train_flowgrpo, change(args, train_steps=2))


def test_models_of_sound_are_refused_by_srpo(here, bright_urls):
    with pytest.raises(ValueError, match="--model must generate images or videos, which the rewards of SRPO see"):
        train(train_srpo, settings(SOUND[0], "srpo", here, bright_urls))
