"""The trainer of supervised fine-tuning: its noise levels, loss and gradient, the samples that it reads, results."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from helpers import CHECKPOINT, REPO, sampled, ulps
from model_rows import ROWS
from omni_losses import velocity_error
from omni_reward import Scorer
from omni_reward.serving import serving_in_thread
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import Params
from omni_rollout.models import open_model
from omni_sched import add_noise, step_noise
from omni_train.dist import local_device
from omni_train.prompts.sampler import sample_seed
from PIL import Image
from safetensors.torch import save_file
from trainer_runs import assert_same_gradients, exported, keep_gradients, lone_run, recipe, tiny, train

import train_dpo
import train_nft
import train_sft as app

TINY = tiny(
    recipe(app, "tiny-signs"), prompts="samples.jsonl", prompts_per_step=2, group_size=2, batch_size=2, lr=1e-3,
)  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 8}


def write_samples(folder, *, key="sample", count=4, level=255):
    """Images of one brightness, and the file that names them; all prompts begin alike."""
    Image.new("RGB", (96, 32), (level,) * 3).save(folder / "image.png")
    lines = [{"prompt": f'a blue sign that says "A{i}"', key: "image.png"} for i in range(count)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def samples(here):
    write_samples(here)
    return here


# Noise levels


def apart(samples, others):
    """The largest distance between two empirical distributions, that of Kolmogorov and Smirnov."""
    both = torch.cat([samples, others]).sort().values
    shares = (torch.searchsorted(own.sort().values, both, right=True) / len(own) for own in (samples, others))
    return (next(shares) - next(shares)).abs().max().item()


def at(quantiles, **changes):
    """Noise levels at quantiles on a schedule of diffusers."""
    args = change(TINY, level_shift=3.0, **changes)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return app.level_at(args, torch.cat([scheduler.sigmas[:1000], torch.zeros(1)]), quantiles)


def test_uniform_levels_are_those_of_diffusers_training_scripts():
    """These index the scheduler's table by the whole thousandths of a uniform number."""
    places = torch.arange(1000) / 1000.0
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    expected = scheduler.sigmas[(places * scheduler.config.num_train_timesteps).round().long()]
    torch.testing.assert_close(at(places.double(), levels="uniform"), expected, rtol=0, atol=ulps(4))
    table = app.shift_sigmas(app.linear_sigmas(app.TRAIN_LEVELS), 3.0)
    torch.testing.assert_close(table[:-1], scheduler.sigmas[:1000], rtol=0, atol=ulps(4))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5)])
def test_logit_normal_levels_have_the_distribution_of_diffusers(mean, std):
    """diffusers counts its places from noise, so its mean has the other sign."""
    quantiles = (torch.arange(4000).double() + 0.5) / 4000
    places = compute_density_for_timestep_sampling(
        "logit_normal", 20_000, logit_mean=-mean, logit_std=std, generator=torch.Generator().manual_seed(0)
    )
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas[(places * 1000).long()]
    ours = at(quantiles, logit_mean=mean, logit_std=std)
    assert apart(ours, theirs) < 2 / math.sqrt(4000)
    assert (ours.diff() < 0).all()


def test_a_logit_normal_level_is_the_closed_form_of_its_paper():
    quantiles = torch.tensor([0.01, 0.3, 0.5, 0.9]).double()
    s = torch.sigmoid(0.4 + 1.3 * torch.special.ndtri(1 - quantiles))
    linear = torch.tensor([1.0, 0.0])
    found = app.level_at(change(TINY, logit_mean=0.4, logit_std=1.3), linear, quantiles)
    torch.testing.assert_close(found, s.float(), rtol=0, atol=ulps(4))


@pytest.mark.parametrize("model", sampled(sorted(ROWS), 1))
def test_levels_are_on_the_schedule_that_the_model_samples_with(model):
    params, opened = ROWS[model].unguided, open_model(ROWS[model].checkpoint())
    schedule = opened.sigmas(params)
    places = torch.arange(len(schedule)).double() / (len(schedule) - 1)
    found = app.level_at(change(TINY, levels="uniform"), schedule, places)
    torch.testing.assert_close(found, schedule, rtol=0, atol=ulps(1))


def test_levels_of_two_experts_are_on_one_side_and_over_the_steps_those_of_one(samples):
    """Both experts at their share of the levels: all steps together have the distribution that one net has."""
    args = change(TINY, level_shift=2.0)
    model = SimpleNamespace(boundary=0.6, sigmas=None)
    run = SimpleNamespace(args=args, model=model, trained={"high": "", "low": ""})
    steps = [app.noise_levels(run, Step(n), [sample_seed(0, n, i, 0) for i in range(4)], None) for n in range(600)]
    assert all((own >= 0.6).all() or (own < 0.6).all() for own in steps)
    quantiles = (torch.arange(4000).double() + 0.5) / 4000
    single = app.level_at(args, app.shift_sigmas(app.linear_sigmas(1000), 2.0), quantiles)
    share = sum((own >= 0.6).all().item() for own in steps) / len(steps)
    expected = (single >= 0.6).double().mean().item()
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 600))
    assert apart(torch.stack([own[0] for own in steps]), single) < 2 / math.sqrt(600)
    run.trained = {"low": ""}
    assert max(app.noise_levels(run, Step(n), [n], None).item() for n in range(50)) < 0.6


# The loss


def test_the_loss_is_that_of_diffusers_training_scripts_with_its_gradient():
    """Their loss of SD3 without weights: the mean over elements, then samples, of weighting * (pred - target)^2."""
    generator = torch.Generator().manual_seed(0)
    x0, noise, velocity = (torch.randn(3, 4, 2, 5, generator=generator) for _ in range(3))
    sigma = torch.tensor([0.2, 0.5, 1.0])
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    timesteps = scheduler.timesteps[(1000 * (1 - sigma)).round().long()]
    noised = scheduler.scale_noise(x0, timesteps, noise)
    torch.testing.assert_close(add_noise(x0, noise, sigma), noised, rtol=0, atol=ulps(8))
    ours, theirs = (velocity.clone().requires_grad_() for _ in range(2))
    loss = velocity_error(ours, x0, noise).mean()
    weighting = compute_loss_weighting_for_sd3("none", sigma)[:, None, None, None]
    expected = torch.mean((weighting * (theirs - (noise - x0)) ** 2).reshape(3, -1), 1).mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_step_has_the_gradient_of_the_mean_over_samples_and_levels(samples, num_minibatches):
    """Beside it the same, written out: one sample at a time, with noise and levels of its seed."""
    args = change(TINY, level_shift=2.0, num_minibatches=num_minibatches)
    run = lone_run(args)
    kept = keep_gradients(run)
    metrics = app.update(run, Step(0), app.read_batches(run, Step(0)))
    records, params, losses = run.prompts.at(0), run.base_params, []
    for record in records:
        pixels = torch.full((1, 32, 96, 3), 255, dtype=torch.uint8)
        x0 = run.model.encode_media(run.engine.parts, {"image": pixels}, params)
        for i in range(2):
            seed = sample_seed(args.run.seed, 0, record.index, i)
            place = torch.sigmoid(step_noise([seed], 0, (1,))[0, 0].double()) * 1000
            low, high = (2 * s / (1 + s) for s in (1 - math.floor(place) / 1000, 1 - math.ceil(place) / 1000))
            sigma = low + (place - math.floor(place)).item() * (high - low)
            noise = step_noise([seed], 1, x0.shape[1:])
            [prompt] = app.step_prompts(SimpleNamespace(args=change(args, group_size=1), prompts=SimpleNamespace(
                at=lambda _, own=record: [own])), Step(0))  # fmt: skip
            cond = run.engine.condition([prompt], params)
            x_t, level = (1 - sigma) * x0 + sigma * noise, torch.tensor([sigma], dtype=torch.float32)
            velocity = run.model.predict_velocity(run.policy.net, x_t, level, cond, params)
            losses.append(((velocity - noise + x0) ** 2).mean())
    assert metrics["policy/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    size = len(losses) // num_minibatches
    for first, gradients in zip(range(0, len(losses), size), kept, strict=True):
        run.policy.optimizer.zero_grad()
        torch.stack(losses[first : first + size]).mean().backward(retain_graph=True)
        assert_same_gradients(gradients, run.policy.params)


# Samples


def test_a_latent_and_the_image_that_it_is_the_code_of_train_alike(samples):
    """So does the preferred side of a pair."""
    lines = [train(app, change(TINY, name="image"))]
    model, params = open_model(CHECKPOINT), Params(3, 32, 96)
    parts = model.load(device=local_device(), dtype=torch.float32)
    image = torch.full((1, 32, 96, 3), 255, dtype=torch.uint8)
    latent = model.encode_media(parts, {"image": image}, params)[0].cpu().contiguous()
    save_file({"x0": latent}, samples / "x.safetensors")
    text = (samples / "samples.jsonl").read_text()
    for name, old, new in (("latent", "image.png", "x.safetensors"), ("pair", '"sample"', '"lose": "", "win"')):
        (samples / "samples.jsonl").write_text(text.replace(old, new))
        lines.append(train(app, change(TINY, name=name)))
    losses = [[line["policy/loss"] for line in own[1:]] for own in lines]
    assert losses[0] == losses[1] == losses[2]


# Whole runs


@pytest.mark.parametrize("kind", sampled(["full", "lora"], 1))
def test_it_learns_what_it_is_shown_without_a_scorer_and_other_trainers_start_from_it(samples, bright_url, kind):
    lora = {} if kind == "full" else LORA
    lr = 3e-4 if kind == "full" else 1e-2
    args = change(
        TINY, name="first", levels="uniform", group_size=4, batch_size=4, train_steps=12, eval_every=12, lr=lr
    )
    lines = train(app, change(args, **lora), report=True)
    losses = [line["policy/loss"] for line in lines[1:]]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert lines[-1]["eval/abstained_ratio"] == 1.0  # images are sampled, and none is scored
    assert (samples / "runs" / "first" / "eval" / "000012.png").exists()
    assert exported("first")
    start = {"scorer_url": bright_url, "train_steps": 1, "prompts_per_step": 2, "group_size": 4, "batch_size": 4} | lora
    rewards = []
    for other, own in ((train_dpo, {"init_weights": ""}), (train_dpo, {}), (train_nft, {"train_levels": 2})):
        changes = start | {"name": f"{len(rewards)}", "init_weights": "runs/first/weights"} | own
        rewards.append(train(other, tiny(recipe(other, "tiny-signs"), **changes))[0]["eval/reward"])
    base, *started = rewards
    assert started[0] == started[1] > base + 0.01


def test_a_scorer_may_compare_samples_of_evaluations_where_training_samples_none(samples):
    def first_is_best(media, prompts, meta):
        return [float(i == 0) for i in range(len(prompts))]

    with serving_in_thread(Scorer(first_is_best, groups=True)) as url:
        alone = change(TINY, group_size=1, batch_size=1, train_steps=1, eval_every=1, scorer_url=url)
        (before, _) = train(app, change(alone, name="pairs", eval_samples_per_prompt=2))
        with pytest.raises(ValueError, match=r"^--eval\.samples-per-prompt must be at least 2 where a scorer compares"):
            train(app, change(alone, name="single"))
    assert before["eval/reward"] == 0.5
    assert before["eval/best@2"] == 1.0


def test_the_script_writes_the_signs_that_the_recipe_names(tmp_path, monkeypatch):
    import tiny_signs

    tiny_signs.write_samples(tmp_path / "signs", REPO / "data" / "tiny-signs" / "eval.txt")
    args = recipe(app, "tiny-signs")
    monkeypatch.chdir(REPO)
    app.check_args(change(args, prompts=str(tmp_path / "signs" / "samples.jsonl")))
    lines = (tmp_path / "signs" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == (
        REPO / "data/tiny-signs/eval.txt"
    ).read_text().splitlines()
