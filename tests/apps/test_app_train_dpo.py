"""The trainer of Diffusion-DPO: pairs, gradients, preference files."""

import copy
import json
from concurrent.futures import Future
from dataclasses import replace

import build_preferences
import numpy as np
import pytest
import torch
from helpers import CHECKPOINT, REPO, sampled
from omni_reward import Score
from omni_rl.flow.scoring import Rollout
from omni_rl.media import preferences
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rl.settings.groups import Data, Sampling
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model
from omni_sched import step_noise
from omni_train.dist import deal
from omni_train.prompts.files import load_prompts
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import logsigmoid
from trainer_runs import (
    PROMPTS,
    assert_same_gradients,
    keep_gradients,
    lone_run,
    place,
    recipe,
    rollout,
    tiny,
    train,
    train_on_ranks,
)

import train_dpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), prompts_per_step=2, group_size=4, batch_size=4, levels_per_pair=2, dpo_beta=2000.0
)
LORA = {"lora_rank": 4, "lora_alpha": 8}
ABSTAINED = Score(None, abstained="unreadable")


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory, bright_url):
    """A preference file of six pairs, made by the script: latents, brighter ones preferred."""
    out = tmp_path_factory.mktemp("preferences") / "pairs"
    build(out, bright_url, "--num-prompts", "6")
    return out / "pairs.jsonl"


def build(out, url, *flags):
    """Runs the script; the number of pairs and of prompts."""
    common = [
        "--scorer-url",
        url,
        "--out",
        str(out),
        "--num-inference-steps",
        "3",
        "--group-size",
        "4",
        "--batch-size",
        "4",
    ]
    return build_preferences.build(build_preferences.parse([*common, *flags]))


@pytest.mark.parametrize(("batch_size", "group_size"), [(2, 4), (4, 4), (8, 4), (4, 2)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_draws_whole_groups(batch_size, group_size, world_size):
    prompts = [Prompt("a sign", group=i // group_size, index=i, seed=i) for i in range(16)]
    by_rank = []
    for rank in range(world_size):
        batches = list(deal(prompts, place(rank, world_size), batch_size, consecutive=group_size))
        assert {len(batch) for batch in batches} == {batch_size}
        by_rank.append([prompt for batch in batches for prompt in batch])
        assert [p.group for p in by_rank[-1]] == sorted(p.group for p in by_rank[-1])
    assert sorted(p.seed for drawn in by_rank for p in drawn) == list(range(16))
    groups = [{p.group for p in drawn} for drawn in by_rank]
    assert sum(map(len, groups)) == len(set().union(*groups))  # no group is on two ranks


def choose(args, values):
    """The pairs of one rollout whose samples score these values, None being no score."""
    run, step = lone_run(args), Step(0)
    run.policy.reference_net = copy.deepcopy(run.policy.net).requires_grad_(False)
    batches, prompts = rollout(run, run.base_params, consecutive=args.data.group_size)
    scores = [ABSTAINED if v is None else Score(v) for v in values]
    future = Future()
    future.set_result(scores)
    (pairs,) = app.choose_pairs(run, step, Rollout(prompts, batches, [future]))
    return run, torch.cat([b.x0 for b in batches]), pairs, step


def test_best_and_worst_are_a_pair_and_no_score_is_in_none():
    _, x0, pairs, step = choose(TINY, [0.3, 0.9, None, 0.1, 0.5, 0.5, None, 0.7])
    assert pairs.places == [0, 1]
    assert torch.equal(pairs.win, x0[[1, 7]])
    assert torch.equal(pairs.lose, x0[[3, 4]])
    assert step.metrics["reward/mean"] == pytest.approx(0.5)
    assert step.metrics["reward/abstained_ratio"] == 0.25
    _, x0, pairs, step = choose(change(TINY, batch_size=2), [0.4] * 4 + [None, 0.0, 1.0, None])
    assert pairs.places == [1]  # four alike teach nothing
    assert torch.equal(pairs.win, x0[6:7])
    assert step.metrics["reward/zero_variance_ratio"] == 0.5
    with pytest.raises(RuntimeError, match="no score for any of 8 samples: unreadable"):
        choose(TINY, [None] * 8)


def test_a_step_without_pairs_leaves_the_weights_alone():
    run, _, pairs, step = choose(TINY, [0.5] * 8)
    before = [p.detach().clone() for p in run.policy.params]
    assert app.update(run, step, [pairs]) == {"policy/skipped_updates": 1}
    assert step.metrics["policy/pairs"] == 0
    assert not step.has_signal
    assert all(map(torch.equal, before, run.policy.params))


def test_gradients_are_one_pass_over_all_pairs_and_levels():
    """Three pairs, in batches of two that are filled up, of a policy that has moved away from its reference."""
    args = change(TINY, prompts_per_step=3, group_size=4, dpo_beta=50.0)
    run, _, pairs, _ = choose(args, [0.1, 0.2, 0.3, 0.0, 0.9, 0.8, 0.7, 0.6, 0.1, 0.9, 0.5, 0.5])
    torch.manual_seed(0)
    with torch.no_grad():
        for p in run.policy.params:
            p.add_(0.01 * torch.randn_like(p))
    kept = keep_gradients(run)
    metrics = app.update(run, Step(0), [pairs])
    normal = step_noise(pairs.seeds, args.sampling.num_inference_steps + 2, (2,))

    def errors(net, x0, k):
        noise = step_noise(pairs.seeds, args.sampling.num_inference_steps + k, x0.shape[1:])
        sigma = torch.sigmoid(normal[:, k])
        x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1))
        velocity = run.model.predict_velocity(net, x, sigma, pairs.cond, run.base_params)
        return (velocity - noise + x0).flatten(1).square().mean(dim=1)

    with torch.no_grad():
        old = [[errors(run.policy.reference_net, x0, k) for x0 in (pairs.win, pairs.lose)] for k in range(2)]
    new = [[errors(run.policy.net, x0, k) for x0 in (pairs.win, pairs.lose)] for k in range(2)]
    margins = torch.cat([25 * ((o[0] - n[0]) - (o[1] - n[1])) for o, n in zip(old, new, strict=True)])
    run.policy.net.zero_grad()
    loss = -logsigmoid(margins).mean()
    loss.backward()
    assert_same_gradients(kept[0], run.policy.params, rtol=2e-3, atol=1e-5)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["policy/margin"] == pytest.approx(margins.mean().item(), rel=1e-3)
    assert metrics["policy/accuracy"] == pytest.approx((margins > 0).float().mean().item())


def test_the_loss_is_without_the_guidance_that_the_samples_were_drawn_with():
    run = lone_run(change(TINY, true_cfg_scale=3.0))
    assert run.model.is_guided(run.base_params)
    assert not run.model.is_guided(run.model.unguided(run.base_params))


def test_each_update_has_its_own_prompts_and_is_the_mean_over_their_pairs():
    """Four prompts in two updates: two pairs in the first, one in the second, whose other group is a tie."""
    args = change(TINY, prompts_per_step=4, num_minibatches=2, levels_per_pair=1, group_size=2)
    run, _, pairs, _ = choose(args, [0.1, 0.2, 0.3, 0.0, 0.5, 0.5, 0.9, 0.8])
    kept = keep_gradients(run)
    app.update(run, Step(0), [pairs])
    assert len(kept) == 2
    run.args = change(args, num_minibatches=1)
    for gradients, rows in zip(kept[:2], ([0, 1], [2]), strict=True):
        chosen = replace(
            pairs,
            win=pairs.win[rows],
            lose=pairs.lose[rows],
            seeds=[pairs.seeds[i] for i in rows],
            cond={name: tensor[rows] for name, tensor in pairs.cond.items()},
            places=[0] * len(rows),
        )
        app.update(run, Step(0), [chosen])
        for ours, theirs in zip(gradients, kept[-1], strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_rank_without_pairs_keeps_step_with_the_others(here, bright_url):
    """Offline, one pair a step: the second rank has none."""
    write_pairs(here, 3)
    args = change(TINY, preferences="pairs.jsonl", prompts_per_step=1, group_size=2, levels_per_pair=1, lr=1e-3)
    single = train(app, change(args, name="single"))
    double = train_on_ranks(app, change(args, name="double", sharding_mode="fsdp2"))
    for key in ("policy/grad_norm", "policy/loss", "policy/margin", "policy/pairs"):
        assert double[2][key] == pytest.approx(single[2][key], rel=1e-3, abs=1e-6), key


def write_pairs(folder, count, *, size=(16, 4, 12)):
    """A preference file of random latents."""
    torch.manual_seed(1)
    lines = []
    for i in range(count):
        for side in ("win", "lose"):
            save_file({"x0": torch.randn(*size)}, folder / f"{i}-{side}.safetensors")
        files = {side: f"{i}-{side}.safetensors" for side in ("win", "lose")}
        line = {"prompt": f'a blue sign that says "{"ABCDEF"[i]}"'} | files
        lines.append(json.dumps(line) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder / "pairs.jsonl"


@pytest.mark.parametrize("kind", sampled(["lora", "full"], 1))
def test_offline_training_lowers_the_loss_of_a_fixed_set(here, pairs_file, kind):
    lora = LORA | {"lr": 3e-3} if kind == "lora" else {"lr": 1e-4}
    args = change(
        recipe(app, "tiny-signs-offline"), model=str(CHECKPOINT), prompts=str(PROMPTS / "train.txt"),
        eval_prompts="eval.txt", prompts_per_step=6, preferences=str(pairs_file), levels_per_pair=4,
        eval_num_inference_steps=2, train_steps=10, eval_every=10, sharding_mode="auto", scorer_name="", **lora,
    )  # fmt: skip
    lines = train(app, args, report=True)
    assert lines[1]["policy/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["policy/loss"] < 0.5
    assert lines[-1]["policy/accuracy"] > 0.8
    assert lines[1]["policy/pairs"] == 6
    # Without a scorer the pictures are drawn, and none is graded.
    assert lines[-1]["eval/abstained_ratio"] == 1.0
    assert "eval/reward" not in lines[-1]
    assert (here / "runs" / args.run.name / "eval" / "000010.png").exists()
    assert (here / "runs" / args.run.name / "weights").is_dir()


def test_a_run_on_pairs_continues_with_the_command_that_began_it(here, pairs_file):
    args = change(TINY, preferences=str(pairs_file), group_size=2, prompts_per_step=2, train_steps=1)
    train(app, args)
    with pytest.raises(ValueError, match=r"dpo_beta was 2000\.0, is 5\.0"):
        train(app, change(args, dpo_beta=5.0))
    assert [line["step"] for line in train(app, change(args, train_steps=2))] == [0, 1, 2]


def test_the_script_keeps_the_best_and_the_worst_of_each_prompt(pairs_file, tmp_path, bright_url):
    records = load_prompts(pairs_file)
    assert len(records) == 6
    assert [r.text for r in records] == [r.text for r in load_prompts(REPO / "data" / "tiny-signs" / "train.txt")[:6]]
    assert all(r.meta["win_score"] > r.meta["lose_score"] for r in records)
    preferences.check_preferences(pairs_file, Data(), Sampling(height=32, width=96))
    assert build(tmp_path / "images", bright_url, "--num-prompts", "2", "--save", "images") == (2, 2)
    preferences.check_preferences(tmp_path / "images" / "pairs.jsonl", Data(), Sampling(height=32, width=96))
    model, params = open_model(CHECKPOINT), Params(3, 32, 96)
    parts = model.load(device="cpu", dtype=torch.float32)
    pictures = load_prompts(tmp_path / "images" / "pairs.jsonl")
    for picture, latent in zip(pictures, records, strict=False):
        assert picture.meta["win_score"] == latent.meta["win_score"]
        level = np.asarray(Image.open(tmp_path / "images" / picture.meta["win"])).mean() / 255
        assert level == pytest.approx(latent.meta["win_score"], abs=1e-4)
        exact = preferences.read_latent(model, parts, pairs_file.parent / latent.meta["win"], params)
        coded = preferences.read_latent(model, parts, tmp_path / "images" / picture.meta["win"], params)
        redrawn, drawn = (model.decode(parts, x0[None], {}, params)[0]["image"] for x0 in (coded, exact))
        assert (redrawn - drawn).abs().mean() < 0.05  # the code is another, the picture the same


def picture(path, *, height=32, width=96):
    """A picture of that size, in the format of its suffix."""
    Image.new("RGB", (width, height), "red").save(path)
    return path


def test_a_mistake_in_a_preference_file_is_named_before_the_model_is_loaded(here):
    save_file({"x0": torch.zeros(16, 4, 12)}, here / "w.safetensors")
    (here / "cut.SAFETENSORS").write_bytes((here / "w.safetensors").read_bytes()[:-8])
    for suffix in ("png", "jpg", "webp"):
        whole = picture(here / f"whole.{suffix}").read_bytes()
        (here / f"cut.{suffix}").write_bytes(whole[:-2])
    picture(here / "small.png", height=16)
    (here / "text.png").write_text("no picture")
    (here.parent / "outside.safetensors").write_bytes((here / "w.safetensors").read_bytes())

    def fault(**sides):
        (here / "pairs.jsonl").write_text(json.dumps({"prompt": "x", "win": "w.safetensors"} | sides) + "\n")
        with pytest.raises(ValueError, match=r"^--preferences: pairs.jsonl, pair 1, ") as caught:
            train(app, change(TINY, preferences="pairs.jsonl", group_size=2, prompts_per_step=1))
        assert not (here / "runs").exists()
        return str(caught.value)

    assert '"lose": must name a file with a suffix of' in fault()
    assert '"win": must name a file with a suffix of' in fault(win="w.txt", lose="w.safetensors")
    assert "must name a file that exists, got gone.png" in fault(lose="gone.png")
    outside = "must name a file in the folder of the preference file"
    assert outside in fault(lose="../outside.safetensors")
    assert outside in fault(lose=str(here.parent / "outside.safetensors"))
    assert "cut.SAFETENSORS is no whole safetensors file" in fault(lose="cut.SAFETENSORS")
    for file, words in (("cut.png", "is cut short"), ("cut.jpg", "is cut short"), ("cut.webp", "is no whole .webp")):
        assert f"{file} {words}" in fault(lose=file)
    assert "small.png must be an image of 96 x 32 pixels, got an image of 96 x 16 pixels" in fault(lose="small.png")
    assert "text.png is no PNG image" in fault(lose="text.png")


def test_a_sample_of_another_size_or_without_a_latent_is_refused(tmp_path):
    model, params = open_model(CHECKPOINT), Params(3, 32, 96)
    save_file({"x0": torch.zeros(16, 4, 8)}, tmp_path / "small.safetensors")
    save_file({"x": torch.zeros(16, 4, 12)}, tmp_path / "other.SAFETENSORS")
    with pytest.raises(ValueError, match=r"small.safetensors must be a sample of latent shape \(16, 4, 12\), got"):
        preferences.read_latent(model, None, tmp_path / "small.safetensors", params)
    with pytest.raises(ValueError, match=r"other.SAFETENSORS must hold a tensor x0, has \['x'\]"):
        preferences.read_latent(model, None, tmp_path / "other.SAFETENSORS", params)


def test_the_documented_line_is_one_that_is_accepted(here):
    text = (REPO / "docs" / "preferences.md").read_text()
    line = json.loads(text.split("```json\n")[1].split("\n")[0])
    for side in ("win", "lose"):
        (here / line[side]).parent.mkdir(exist_ok=True)
        save_file({"x0": torch.zeros(16, 4, 12)}, here / line[side])
    (here / "pairs.jsonl").write_text(json.dumps(line))
    preferences.check_preferences(here / "pairs.jsonl", Data(), Sampling(height=32, width=96))
