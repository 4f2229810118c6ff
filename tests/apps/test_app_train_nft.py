"""The trainer of DiffusionNFT and AWM: gradients, the old policy, ranks, learning, resuming, its command line."""

from dataclasses import replace

import pytest
import rollouts
import runs
import torch
from omni_losses import awm_log_prob, old_policy_decay
from omni_reward import Score
from omni_rl.cli import base_config, to_toml
from omni_rollout.models import qwen_image
from omni_rollout.types import pad_alike
from omni_sched import step_noise
from omni_train.lora import adapter_params
from trainer_runs import (
    assert_same_gradients,
    cli,
    keep_gradients,
    lone_rank,
    tiny,
    train,
    train_on_ranks,
    undocumented,
    write_eval_prompts,
)

import train_nft as app

TINY = tiny(app.PRESETS["tiny-signs"], prompts_per_step=2, group_size=4, batch_size=4, train_levels=2)
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder of its own, with few evaluation prompts."""
    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    return tmp_path


@pytest.mark.parametrize("algo", sorted(app.ALGOS))
def test_training_raises_a_reward_that_can_be_raised(here, bright_url, algo):
    args = replace(TINY, scorer_url=bright_url, algo=algo, group_size=8, batch_size=8, lr=3e-4, steps=10, eval_every=10)
    lines = train(app, args)
    assert lines[-1]["eval/reward"] > lines[0]["eval/reward"] + 0.02
    assert (here / "runs" / args.name / "weights" / "transformer" / "diffusion_pytorch_model.safetensors").exists()


def points_of(run):
    """One rollout, graded by hand with one sample left out, and all its noised samples."""
    batches, _ = app.rollout(run, step=0)
    advantages, weights = torch.linspace(-1, 2, 8).view(2, 4), torch.ones(2, 4)
    advantages[1, 2] = weights[1, 2] = 0
    points = [p for i, b in enumerate(batches) for p in app.noise_afresh(run.args, b, advantages[i], weights[i])]
    return batches, advantages, weights, points


def whole(points):
    """All points as one batch."""
    names = ("x0", "noise", "sigma", "x_t", "advantages", "weights")
    joined = {name: torch.cat([getattr(at, name) for at in points]) for name in names}
    cond = {name: torch.cat(pad_alike([at.cond[name] for at in points], dim=1)) for name in points[0].cond}
    return app.Noised(cond=cond, **joined)


def test_gradients_of_nft_are_one_pass_over_all_samples_and_levels(here, monkeypatch):
    run = lone_rank(replace(TINY, sample_with="policy"), rollouts)
    batches, advantages, weights, points = points_of(run)
    kept = keep_gradients(app, monkeypatch)
    app.update(run, 0, batches, advantages, weights)
    at = whole(points)
    velocity = qwen_image.predict_velocity(run.net, at.x_t, at.sigma, at.cond)
    # At velocity = old the loss has the gradient of A sigma^2 / (5 w) times the flow-matching error, w = mean |x - x0|.
    error = (velocity - (at.noise - at.x0)).flatten(1).square().mean(dim=1)
    width = (at.x_t - at.sigma.view(-1, 1, 1, 1) * velocity - at.x0).flatten(1).abs().mean(dim=1).detach()
    run.net.zero_grad()
    (at.weights * at.advantages / 5 * 5 * at.sigma.square() / width * error).mean().backward()
    assert_same_gradients(kept[0], run.params)


def test_gradients_of_awm_are_one_pass_over_all_samples_and_levels(here, monkeypatch):
    run = lone_rank(replace(TINY, sample_with="policy", algo="awm"), rollouts)
    batches, advantages, weights, points = points_of(run)
    kept = keep_gradients(app, monkeypatch)
    app.update(run, 0, batches, advantages, weights)
    at = whole(points)
    velocity = qwen_image.predict_velocity(run.net, at.x_t, at.sigma, at.cond)
    log_prob = awm_log_prob(velocity, at.x0, at.noise, at.sigma)
    run.net.zero_grad()
    (-at.weights * at.advantages * log_prob).mean().backward()  # at ratio 1
    assert_same_gradients(kept[0], run.params)


def test_each_stratum_of_the_schedule_gives_one_level(here):
    args = replace(TINY, num_steps=6, train_levels=2, train_low=1, train_high=5)
    run = lone_rank(args, rollouts)
    (batch, other), _ = app.rollout(run, step=0)
    ones = torch.ones(4)
    points = app.noise_afresh(args, batch, ones, ones)
    for at, strata in zip(points, (batch.sigmas[1:3], batch.sigmas[3:5]), strict=True):
        assert all(sigma in strata for sigma in at.sigma)
        level = at.sigma.view(-1, 1, 1, 1)
        torch.testing.assert_close(at.x_t, (1 - level) * batch.x0 + level * at.noise)
    all_levels = app.noise_afresh(replace(args, train_levels=4), other, ones, ones)
    assert [at.sigma.tolist() for at in all_levels] == [[sigma.item()] * 4 for sigma in batch.sigmas[1:5]]
    noises = torch.stack([at.noise for at in all_levels])
    used = torch.stack([step_noise([p.seed for p in other.prompts], k, batch.x0.shape[1:]) for k in range(-1, 6)])
    for noise in noises:
        assert not any(torch.equal(noise, earlier) for earlier in used)  # the rollout's own is not used again
    assert len({noise.sum().item() for noise in noises}) == 4


def test_samples_without_a_score_take_no_part(here):
    run = lone_rank(replace(TINY, group_size=2), rollouts)
    scores = [Score(0.5), Score(0.25), Score(0.0), Score(1.0)]
    _, weights, metrics = app.grade(run, [*scores[:2], Score(None, abstained="unreadable"), scores[3]])
    assert weights.tolist() == [[1, 1, 0, 0]]  # one sample alone is no group either
    assert metrics["reward/abstained_ratio"] == 0.5
    advantages, weights, _ = app.grade(run, scores)
    assert weights.min() == 1
    assert advantages[0, 3] == -advantages[0, 2] > 0
    with pytest.raises(RuntimeError, match="no score for any of 4 samples: broken"):
        app.grade(run, [Score(None, abstained="broken")] * 4)


@pytest.mark.parametrize("lora", [LORA, {}], ids=["lora", "full"])
def test_the_old_policy_samples_and_follows_as_its_schedule_says(here, bright_url, monkeypatch, lora):
    args = replace(
        TINY, scorer_url=bright_url, lr=1e-2, steps=4, eval_every=4, old_schedule="linear", updates_per_step=2,
        old_every=2, old_decay_max=0.005, **lora,
    )  # fmt: skip
    trained, kept, images = [], [], []
    refresh, rollout = app.refresh_old, app.rollout

    def values(tensors):
        return torch.cat([t.detach().flatten() for t in tensors]).clone()

    def refresh_and_keep(run, step):
        if not kept:
            kept.append(values(adapter_params(run.net, "old") if lora else [old for _, old in run.copy.pairs()]))
        decay = refresh(run, step)
        trained.append(values(adapter_params(run.net, "default") if lora else run.params))
        kept.append(values(adapter_params(run.net, "old") if lora else [old for _, old in run.copy.pairs()]))
        return decay

    def rollout_twice(run, step):
        """Once as the old policy, which the trainer has put in place, and once as the trained one."""
        batches, pending = rollout(run, step)
        with app.old_policy(run) if not lora else app.adapter(run.net, "default"):  # exchanges the two again
            images.append((batches[0].x0, run.on.engine.generate(batches[0].prompts, params(run)).x0))
        return batches, pending

    def params(run):
        return app.SamplingParams(run.args.num_steps, run.args.height, run.args.width)

    monkeypatch.setattr(app, "refresh_old", refresh_and_keep)
    monkeypatch.setattr(app, "rollout", rollout_twice)
    lines = train(app, args)
    # Refreshed after steps 2 and 4, that is after 4 and 8 optimizer steps, and never keeps more than 0.005.
    decays = [1.0, old_policy_decay(4, schedule="linear"), 1.0, 0.005]
    assert decays[1] == 0.004
    assert [line["policy/old_decay"] for line in lines[1:]] == decays
    for before, after, policy, decay in zip(kept, kept[1:], trained, decays, strict=False):
        torch.testing.assert_close(after, decay * before + (1 - decay) * policy)
    same = [torch.equal(old, policy) for old, policy in images]
    assert same == [True, False, False, False]  # after step 2 the old one is the trained one but for 0.4 %
    assert lines[1]["policy/old_deviation"] > 0  # in the second update of the first step


def test_awm_starts_at_ratio_one_with_either_sampler_and_holds_to_both_policies(here, bright_url):
    for sample_with in ("old", "policy"):
        args = replace(
            TINY, scorer_url=bright_url, name=sample_with, algo="awm", sample_with=sample_with, lr=1e-2,
            kl_coef=0.1, old_kl_coef=0.1, old_schedule="linear", **LORA,
        )  # fmt: skip
        first, second = train(app, args)[1:]
        assert (
            first["policy/ratio_max_dev"]
            == first["policy/reference_velocity_kl"]
            == first["policy/old_velocity_kl"]
            == 0.0
        )
        assert second["policy/reference_velocity_kl"] > 0
        if sample_with == "policy":
            assert second["policy/ratio_max_dev"] == 0.0  # what the update starts from has drawn the samples


@pytest.mark.parametrize(
    ("changes", "modes"),
    [(LORA | {"kl_coef": 0.1}, ("ddp", "fsdp2")), ({"algo": "awm", "old_schedule": "linear"}, ("fsdp2",))],
    ids=["nft-lora", "awm-full"],
)
def test_one_and_two_ranks_train_on_the_same_numbers(here, bright_url, changes, modes):
    args = replace(TINY, scorer_url=bright_url, batch_size=2, lr=1e-3, **changes)
    single = train(app, replace(args, name="single"))
    for mode in modes:
        double = train_on_ranks(app, replace(args, name=mode, shard=mode))
        assert double[0]["eval/reward"] == single[0]["eval/reward"]
        for key in ("reward/mean", "reward/min", "reward/max", "advantage/max", "policy/old_decay"):
            assert double[1][key] == single[1][key], (mode, key)
        # After an update, sums over ranks have rounded in another order than sums over batches.
        for line in (1, 2):
            for key in ("policy/grad_norm", "policy/loss"):
                assert double[line][key] == pytest.approx(single[line][key], rel=1e-3, abs=1e-6), (mode, line, key)


@pytest.mark.parametrize("lora", [LORA, {}], ids=["lora", "full"])
def test_the_old_policy_survives_a_stop(here, bright_url, lora):
    args = replace(
        TINY, scorer_url=bright_url, lr=1e-2, old_schedule="linear", updates_per_step=2, save_every=1, steps=4,
        old_every=3, ema_decay=0.9, **lora,
    )  # fmt: skip
    unbroken = train(app, replace(args, name="unbroken"))
    train(app, replace(args, name="broken", steps=2))
    resumed = train(app, replace(args, name="broken"))
    for line, other in zip(unbroken, resumed, strict=True):
        for key in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/old_deviation", "eval/reward"):
            assert line.get(key) == other.get(key), (line["step"], key)


def test_every_logged_name_is_documented(here, bright_url):
    args = replace(TINY, scorer_url=bright_url, kl_coef=0.1, old_kl_coef=0.1, **LORA)
    for algo in app.ALGOS:
        assert undocumented(train(app, replace(args, name=algo, algo=algo))) == set()


def test_the_plan_counts_the_forwards_of_an_update(here, monkeypatch):
    args = replace(TINY, algo="awm", updates_per_step=2, sample_with="policy", old_kl_coef=0.1)
    run = lone_rank(args, rollouts)
    run.copy = runs.Snapshot(run.params)
    count = [0]
    run.net.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    keep_gradients(app, monkeypatch)
    batches, _ = app.rollout(run, step=0)
    planned = app.num_forwards(args)
    assert count[0] == planned["rollout"]
    app.update(run, 0, batches, torch.ones(2, 4), torch.ones(2, 4))
    assert count[0] == sum(planned.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--scorer-url must be the URL of a reward server"),
        (["--algo", "grpo"], "nft"),
        (["--scorer-url", "http://x", "--batch-size", "7"], "--batch-size times ranks (7) must divide"),
        (["--scorer-url", "http://x", "--updates-per-step", "3"], "--updates-per-step must divide a rank's batches"),
        (["--scorer-url", "http://x", "--train-low", "10"], "--train-low and --train-high must bound steps"),
        (
            ["--scorer-url", "http://x", "--train-levels", "11"],
            "--train-levels must be from 1 to the number",
        ),
        (["--scorer-url", "http://x", "--kl-coef", "0.1"], "--kl-coef needs --lora-rank > 0"),
        (["--scorer-url", "http://x", "--nft-beta", "0"], "--nft-beta must be >= 1e-12, got 0.0"),
        (["--scorer-url", "http://x", "--old-decay-max", "1.5"], "--old-decay-max must be <= 1"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_code_2(flags, message):
    code, printed = cli(app, *flags)
    assert code == 2, printed
    assert message in printed
    assert "Traceback" not in printed


def test_presets_are_the_published_ones_and_can_be_repeated_from_a_file(tmp_path):
    for name, preset in app.PRESETS.items():
        app.check_args(replace(preset, scorer_url="http://x", shard="none"))
        (tmp_path / f"{name}.toml").write_text(to_toml(preset))
        assert base_config(app.Args(), {}, path=str(tmp_path / f"{name}.toml")) == preset
    nft, awm, verl = (app.PRESETS[name] for name in ("nft-ocr", "awm-ocr", "qwen-image-ocr-lora"))
    assert (nft.prompts_per_step, nft.group_size, nft.num_steps, nft.nft_beta, nft.kl_coef) == (48, 24, 10, 0.1, 1e-4)
    assert (nft.old_schedule, nft.updates_per_step, nft.lr, nft.lora_rank) == ("delayed_linear", 2, 3e-4, 32)
    assert (awm.num_steps, awm.train_levels, awm.weighting, awm.clip_range, awm.lr) == (14, 6, "ghuber", 1.0, 3e-4)
    assert (verl.prompts_per_step, verl.group_size, verl.old_every, verl.nft_beta) == (24, 16, 2, 0.1)
