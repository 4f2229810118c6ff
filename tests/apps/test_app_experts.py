"""Two experts of one model: levels on one side of their boundary, one of them trained at a time, exports of each."""

import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_rl.flow.experts import clamp_to_side, restrict_to_expert
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rl.tools import plan
from omni_rollout import Prompt, replay
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_sched import INITIAL_NOISE, step_noise
from omni_train.dist import init_distributed
from omni_train.lora import adapter_params, add_lora
from omni_train.weights.full import load_weights, save_weights, weight_folders
from trainer_runs import lose_step, recipe, tiny, train, train_on_ranks

import train_distill
import train_dpo
import train_flowgrpo
import train_nft

ROW = ROWS["wan22"]
BOUNDARY = 0.875
SIZES = {
    "prompts_per_step": 2,
    "group_size": 4,
    "batch_size": 4,
    "lr": 1e-2,
    "optim_lr_scheduler_type": "constant",
    "num_frames": 5,
}
LORA = {"lora_rank": 4, "lora_alpha": 8}


def settings(app, urls, **changes):
    """Small settings of the trainer for the model with two experts: of three steps one is the first expert's."""
    own = {
        train_flowgrpo: {"window_low": 0, "window_high": None, "noise_level": 0.7},
        train_nft: {"train_levels": 1},
        train_dpo: {},
        train_distill: {},
    }[app]
    places = {"model": str(ROW.checkpoint()), "scorer_url": urls["video"], "optim_weight_decay": 0.0}
    return tiny(recipe(app, "tiny-signs"), **(SIZES | own | places | changes))


def moved(folder, model):
    """How far each expert's weights are from the checkpoint's, for those that the folder has: the largest."""
    net = model.load_net(device="cpu", dtype=torch.float32)
    before = {name: p.clone() for name, p in net.named_parameters()}
    for expert, home in weight_folders(folder, model.nets).items():
        load_weights(net.get_submodule(expert), home)
    change = {name: (p - before[name]).abs().max().item() for name, p in net.named_parameters()}
    return {
        expert: max(size for name, size in change.items() if name.startswith(f"{expert}.")) for expert in model.nets
    }


def draws(trained, cut):
    """Places on one side of the cut in many steps: a row each."""
    own = SimpleNamespace(run=SimpleNamespace(seed=0), policy=SimpleNamespace(train_experts="one"))
    run = SimpleNamespace(args=own, trained=dict.fromkeys(trained))
    places = (torch.arange(100).double() + 0.5) / 100
    return torch.stack([restrict_to_expert(run, Step(number), places, cut, 0) for number in range(2000)])


@pytest.mark.parametrize("cut", [0.3, 0.75])
def test_places_are_on_one_side_of_the_cut_and_uniform_over_the_steps(cut):
    rows = draws(["high", "low"], cut)
    before = (rows < cut).all(dim=1)
    assert torch.equal(before, ~(rows >= cut).all(dim=1))
    error = math.sqrt(cut * (1 - cut) / 2000)
    assert before.float().mean().item() == pytest.approx(cut, abs=4 * error)
    for edge in (0.1, 0.5, 0.9):
        assert (rows < edge).float().mean().item() == pytest.approx(edge, abs=5 * error)


def test_a_cut_out_of_range_leaves_the_places_and_the_expert_that_is_trained_has_all():
    whole = (torch.arange(100).double() + 0.5) / 100
    for cut in (-0.5, 0.0, 1.0, 1.5):
        assert torch.equal(draws(["high", "low"], cut)[0], whole)
    assert (draws(["high"], 0.3) < 0.3).all()
    assert (draws(["low"], 0.3) >= 0.3).all()
    with pytest.raises(ValueError, match="--train-experts one takes none of the noise levels"):
        draws(["high"], 0.0)


def test_levels_are_clamped_to_the_boundary_of_their_side():
    run = SimpleNamespace(model=SimpleNamespace(boundary=BOUNDARY))
    sigma = torch.tensor([0.5, 0.875, 0.95])
    assert (clamp_to_side(run, sigma, torch.tensor(0.9)) >= BOUNDARY).all()
    assert (clamp_to_side(run, sigma, torch.tensor(0.8)) < BOUNDARY).all()


def test_a_window_may_cross_the_boundary_and_the_ratio_is_exactly_one_on_both_sides():
    model = open_model(ROW.checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    prompts = [Prompt(f"a sign, {i}", 0, i, seed=i) for i in range(2)]
    params = replace(ROW.guided, noise_level=0.7, sde_steps=(1, 2, 3))
    drawn = engine.generate(prompts, params)
    assert (drawn.sigmas[1:4] >= BOUNDARY).tolist() == [True, True, False]
    engine.net.requires_grad_(True)
    for k, expert in enumerate(("high", "high", "low")):
        engine.net.zero_grad()
        step = replay(model, engine.net, drawn, k)
        assert torch.equal(step.log_prob, drawn.rollout_log_prob[:, k])
        step.log_prob.sum().backward()
        assert {name.split(".")[0] for name, p in engine.net.named_parameters() if p.grad is not None} == {expert}


def test_a_batch_on_both_sides_of_the_boundary_is_refused():
    model = open_model(ROW.checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    cond = engine.condition([Prompt("a", 0, i, seed=i) for i in range(2)], ROW.unguided)
    x = torch.zeros(2, *model.latent_shape(ROW.unguided))
    for levels in ([0.875, 1.0], [0.874, 0.1]):
        model.predict_velocity(engine.net, x, torch.tensor(levels), cond, ROW.unguided)
    with pytest.raises(ValueError, match=r"must be on one side of the experts' boundary, 0.875, got \[0.875, 0.5\]"):
        model.predict_velocity(engine.net, x, torch.tensor([0.875, 0.5]), cond, ROW.unguided)


@pytest.mark.timeout(600)
def test_updates_of_one_expert_alone_are_resumed_bit_for_bit_and_open_in_the_stock_pipeline(here, bright_urls):
    """Sharded over two ranks, with LoRA: each step's one level is one expert's."""
    args = settings(train_nft, bright_urls, **LORA, train_steps=3, eval_every=3, save_every=1, batch_size=2)
    args = change(args, sharding_mode="fsdp2", num_inference_steps=2, eval_num_inference_steps=4)
    unbroken = train_on_ranks(train_nft, args)
    folder = shutil.copytree(here / "runs" / args.run.name / "weights", here / "unbroken")
    lose_step(args.run.name, 3)
    again = train_on_ranks(train_nft, args)
    trained = [(line["policy/forwards_high"] > 0, line["policy/forwards_low"] > 0) for line in unbroken[1:]]
    assert {(True, False), (False, True)} == set(trained)
    for line, other in zip(unbroken, again, strict=True):
        for key in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/forwards_high"):
            assert line.get(key) == other.get(key), (line["step"], key)
    folders = [folder, here / "runs" / args.run.name / "weights"]
    files = [sorted(folder.rglob("*.safetensors")) for folder in folders]
    assert [file.parent.name for file in files[0]] == ["high", "low"]
    assert [a.read_bytes() for a in files[0]] == [b.read_bytes() for b in files[1]]
    check_stock(folders[0])


def check_stock(folder):
    """The stock pipeline draws with the adapters of a folder what we do."""
    model = open_model(ROW.checkpoint())
    prompt = Prompt('a blue sign that says "AB"', group=0, index=0, seed=5)
    noise = step_noise([prompt.seed], INITIAL_NOISE, model.latent_shape(ROW.guided))
    pipe, parts = ROW.stock_pipeline(model.folder, torch.float32), model.load(device="cpu", dtype=torch.float32)
    drawn = [ROW.draw_stock(pipe, [prompt], ROW.guided, noise)[0]]
    for expert, home in weight_folders(folder, model.nets).items():
        option = {"high": {}, "low": {"load_into_transformer_2": True}}[expert]
        pipe.load_lora_weights(str(home), **option)
        load_weights(parts.net.get_submodule(expert), home)
        drawn.append(ROW.draw_stock(pipe, [prompt], ROW.guided, noise)[0])
    samples = DiffusersEngine(model, parts).generate([prompt], ROW.guided)
    ours = model.decode(parts, samples.x0, samples.cond, ROW.guided)[0]["video"][0].movedim(-1, -3)
    changes = [np.abs((a - b).numpy()).max() for a, b in pairwise(drawn)]
    assert min(changes) > 1e-3  # each expert's adapter is to be seen
    assert np.abs((drawn[-1] - ours).numpy()).max() < min(changes) / 20


def test_experts_have_learning_rates_of_their_own(here, bright_urls):
    """The first step of Adam moves a weight by its learning rate."""
    args = settings(train_flowgrpo, bright_urls, train_steps=1, eval_every=1, optim_low_expert_lr=1e-4)
    assert [line["policy/forwards_high"] for line in train(train_flowgrpo, args)[1:]] == [2.0]
    far = moved(here / "runs" / args.run.name / "weights", open_model(args.policy.model))
    assert far == {"high": pytest.approx(1e-2, rel=0.01), "low": pytest.approx(1e-4, rel=0.01)}


@pytest.mark.parametrize(
    "case", sampled([f"{expert} {kind}" for expert in ("high", "low") for kind in ("full", "lora")], 1)
)
def test_one_expert_alone_is_trained_and_exported_and_a_run_starts_from_it(here, bright_urls, case):
    expert, lora = case.split()[0], case.endswith("lora")
    steps = {"train_low": 0, "train_high": 1} if expert == "high" else {"train_low": 1}
    changes = {"train_experts": expert, "train_steps": 1, "eval_every": 1} | (LORA if lora else {})
    args = settings(train_nft, bright_urls, **changes, **steps)
    (line,) = train(train_nft, args)[1:]
    other = "low" if expert == "high" else "high"
    assert line[f"policy/forwards_{expert}"] > 0
    assert line[f"policy/forwards_{other}"] == 0
    weights, model = here / "runs" / args.run.name / "weights", open_model(args.policy.model)
    assert [path.name for path in weights.iterdir()] == [expert]
    if not lora:
        assert [size > 0 for size in moved(weights, model).values()] == [name == expert for name in model.nets]
    again = settings(train_dpo, bright_urls, **changes, name="again", init_weights=str(weights))
    train(train_dpo, again)
    assert (Path("runs") / "again" / "weights" / expert).is_dir()


def test_steps_of_an_expert_that_is_not_trained_are_refused(here, bright_urls):
    for app, expert, said in (
        (train_flowgrpo, "high", "high takes steps 0 to 0 of 3, got trained steps 0 to 1"),
        (train_nft, "low", "low takes steps 1 to 2 of 3, got trained steps 0 to 2"),
    ):
        with pytest.raises(ValueError, match=f"--train-experts {said}"):
            train(app, settings(app, bright_urls, train_experts=expert))
    for changes, said in (
        ({"train_experts": "high"}, "--train-experts must be both for this model, got high"),
        ({"optim_low_expert_lr": 1e-4}, "--optim.low-expert-lr needs two experts that are trained"),
    ):
        single = str(ROWS["wan21"].checkpoint())
        with pytest.raises(ValueError, match=said):
            train(train_flowgrpo, settings(train_flowgrpo, bright_urls, **changes, model=single))


def test_a_teacher_of_both_experts_teaches_the_one_that_is_trained(here):
    model = open_model(ROW.checkpoint())
    net = model.load_net(device="cpu", dtype=torch.float32)
    add_lora(net, model.LORA_TARGETS, rank=4, alpha=8, seed=1)
    with torch.no_grad():
        for p in adapter_params(net, "default"):
            p.add_(0.03)
    for expert, part in model.nets.items():
        for folder in ("both", f"only-{expert}"):
            save_weights(net.get_submodule(expert), here / folder / expert, init_distributed(), into=part)
    args = settings(train_distill, {"video": ""}, **LORA, train_steps=1, train_experts="low", train_low=1)
    assert train(train_distill, change(args, teachers=f"one={here / 'both'}"))[1]["policy/loss"] > 0
    with pytest.raises(ValueError, match=r"--teachers: one: .*only-high must have weights of low, which is trained"):
        train(train_distill, change(args, name="other", teachers=f"one={here / 'only-high'}"))


def test_a_plan_of_a_step_runs_both_experts(here):
    """There is more to save, by weights and moments, than with one of them."""
    peaks = []
    for changes in ({}, {"train_experts": "high", "window_high": 1}):
        args = settings(
            train_flowgrpo, {"video": ""}, dry_run=True, memory_device_gb=1.0, memory_text_cache_mb=0, **changes
        )
        planned = plan.measure(train_flowgrpo.main, args, 1)
        assert planned.flops["update"] > 0
        peaks.append(planned.peaks["save"])
    assert peaks[0] > 1.2 * peaks[1]
