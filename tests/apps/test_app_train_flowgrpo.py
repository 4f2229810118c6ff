"""The FlowGRPO trainer: the gate, ranks, overlap, algorithms, learning, its command line."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CHECKPOINT, REPO
from omni_losses import group_advantages
from omni_reward import Score
from omni_rl.cli import base_config, to_toml
from omni_rollout.diffusers_engine import DiffusersEngine
from omni_rollout.models import qwen_image
from omni_train.data import PromptSampler
from omni_train.dist import Dist
from omni_train.log import load_metrics

import rollouts
import train_flowgrpo as app
from rollouts import Rollouts

TINY = replace(
    app.PRESETS["tiny-signs"],
    model=str(CHECKPOINT),
    prompts=str(REPO / "data" / "tiny-signs" / "train.txt"),
    eval_prompts=str(REPO / "data" / "tiny-signs" / "eval.txt"),
    algo="flowgrpo",
    noise_level=0.7,
    window_low=0,
    window_high=None,
    prompts_per_step=2,
    group_size=4,
    batch_size=4,
    lr=1e-4,
    lr_decay=False,
    ema_decay=0.0,
    shard="auto",
    num_steps=4,
    eval_num_steps=2,
    steps=2,
    eval_every=2,
)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """A working folder of its own, with few evaluation prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.txt").write_text("".join(f'a blue sign that says "{word}"\n' for word in ("AB", "CD", "EF")))
    return tmp_path


def train(bright_url, **changes):
    args = replace(TINY, scorer_url=bright_url, eval_prompts="eval.txt", **changes)
    app.check_args(args)
    app.main(args)
    return load_metrics(Path("runs") / args.name / "metrics.jsonl")


def launch(tmp_path, flags, ranks, name):
    """The trainer as a user starts it; the metrics of its run."""
    command = [sys.executable, str(REPO / "apps" / "train_flowgrpo.py")]
    if ranks > 1:
        runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*runner, *command[1:]]
    config = tmp_path / f"{name}.toml"
    config.write_text(to_toml(replace(TINY, name=name, eval_prompts="eval.txt", batch_size=2)))
    # One thread each: torchrun's own default, and sums in another order would be other numbers.
    subprocess.run(
        [*command, "--config", str(config), *flags], check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return load_metrics(tmp_path / "runs" / name / "metrics.jsonl")


@pytest.mark.timeout(600)
def test_one_and_two_ranks_draw_and_score_the_same_and_start_at_ratio_one(in_tmp, ocr_flags):
    runs = {
        "single": launch(in_tmp, ocr_flags, 1, "single"),
        "fsdp2": launch(in_tmp, [*ocr_flags, "--shard", "fsdp2"], 2, "fsdp2"),
        "ddp": launch(in_tmp, [*ocr_flags, "--shard", "ddp"], 2, "ddp"),
    }
    for name, lines in runs.items():
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0], name
        assert lines[0]["eval/reward"] == runs["single"][0]["eval/reward"]
        for key in ("reward/mean", "reward/min", "reward/max", "reward/group_std", "advantage/max"):
            assert lines[1][key] == runs["single"][1][key], (name, key)
        pictures = [(in_tmp / "runs" / run / "eval" / "000000.png").read_bytes() for run in ("fsdp2", "ddp")]
        assert pictures[0] == pictures[1]
        # After an update, sums over ranks have rounded in another order than sums over batches.
        assert lines[1]["policy/grad_norm"] == pytest.approx(runs["single"][1]["policy/grad_norm"], rel=1e-4)


@pytest.mark.timeout(600)
def test_the_published_preset_s_path_is_the_same_on_two_ranks(in_tmp, bright_url):
    """LoRA, guidance, a reference, two updates a step, checkpointing, a sliding window: all of it at once."""
    flags = ["--scorer-url", bright_url, "--lora-rank", "4", "--lora-alpha", "8", "--guidance-scale", "3"]
    flags += ["--kl-coef", "0.1", "--updates-per-step", "2", "--gradient-checkpointing", "--lr", "1e-2", "--steps", "1"]
    single = launch(in_tmp, flags, 1, "single")[1]
    double = launch(in_tmp, flags, 2, "double")[1]
    assert single["policy/first_ratio_max_dev"] == double["policy/first_ratio_max_dev"] == 0.0
    for key in ("policy/kl", "policy/grad_norm", "policy/ratio_std"):
        assert double[key] == pytest.approx(single[key], rel=1e-3) != 0, key


def world(rank, world_size):
    """A run that can sample, as one of `world_size` ranks, without the others and without a scorer."""
    model = qwen_image.load(CHECKPOINT)
    dist = Dist(rank=rank, world_size=world_size, local_rank=0, device=torch.device("cpu"), mesh=None)
    client = SimpleNamespace(submit=lambda media, prompts, meta: None)
    return SimpleNamespace(
        args=replace(TINY, batch_size=2, old_log_prob="rollout"),
        sampler=PromptSampler(TINY.prompts, prompts_per_step=2, seed=0),
        on=Rollouts(dist, DiffusersEngine(qwen_image, model), client, 2),
    )


def test_trajectories_do_not_depend_on_the_number_of_ranks():
    alone, _ = app.rollout(world(0, 1), step=3)
    first, second = (app.rollout(world(rank, 2), step=3)[0] for rank in range(2))
    assert len(alone) == 2 * len(first) == 2 * len(second) == 4
    for a, b in zip(alone, [first[0], second[0], first[1], second[1]], strict=True):  # dealt in turn
        assert a.prompts == b.prompts
        for name in ("x", "x_next", "rollout_log_prob", "x0", "media"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_a_batch_is_with_the_scorer_before_the_next_is_drawn():
    run, events = world(0, 1), []
    generate = run.on.engine.generate
    run.on.engine.generate = lambda prompts, params: events.append("draw") or generate(prompts, params)
    run.on.client.submit = lambda media, prompts, meta: events.append("submit")
    app.rollout(run, step=0)
    assert events == ["draw", "submit"] * 4


@pytest.mark.parametrize("algo", sorted(app.ALGOS))
def test_every_algorithm_trains_and_starts_at_ratio_one(in_tmp, bright_url, algo):
    lines = train(bright_url, algo=algo, noise_level=0.5, window_size=2)
    assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0]
    assert all(line["policy/grad_norm"] > 0 for line in lines[1:])
    assert (in_tmp / "runs" / "tiny-signs" / "weights" / "transformer" / "diffusion_pytorch_model.safetensors").exists()


def test_training_raises_a_reward_that_can_be_raised(in_tmp, bright_url):
    lines = train(bright_url, steps=12, eval_every=12, lr=3e-4, group_size=8, batch_size=8)
    assert lines[-1]["eval/reward"] > lines[0]["eval/reward"] + 0.02


def test_lora_with_a_reference_and_several_updates(in_tmp, bright_url):
    lines = train(
        bright_url,
        lora_rank=4,
        lora_alpha=8,
        kl_coef=0.1,
        updates_per_step=2,
        lr=1e-2,
        gradient_checkpointing=True,
    )
    assert lines[1]["policy/first_ratio_max_dev"] == 0.0
    assert lines[1]["policy/ratio_max_dev"] > 0  # the second update sees weights that have moved
    assert lines[1]["policy/kl"] > 0
    assert (in_tmp / "runs" / "tiny-signs" / "weights" / "pytorch_lora_weights.safetensors").exists()


def test_guidance_keeps_the_ratio_at_one(in_tmp, bright_url):
    assert train(bright_url, guidance_scale=3.0, steps=1)[1]["policy/first_ratio_max_dev"] == 0.0


def test_the_gate_stops_a_run_whose_weights_changed_behind_the_engine(in_tmp, bright_url, monkeypatch):
    rollout = app.rollout

    def rollout_then_change(run, step):
        result = rollout(run, step)
        with torch.no_grad():
            run.params[0].add_(1e-3)
        return result

    monkeypatch.setattr(app, "rollout", rollout_then_change)
    with pytest.raises(RuntimeError, match=r"step 0: before the first update the ratio must be 1 within 0.0, but is"):
        train(bright_url)


def test_a_finished_run_started_again_has_nothing_to_do(in_tmp, bright_url, capsys):
    before = train(bright_url, steps=1, eval_every=1)
    assert train(bright_url, steps=1, eval_every=1) == before
    assert capsys.readouterr().out.count("held-out score") == 2


def test_a_run_with_other_settings_is_refused(in_tmp, bright_url):
    train(bright_url, steps=0)
    with pytest.raises(ValueError, match=r"differing keys|lr"):
        train(bright_url, steps=0, lr=5e-4)


def test_what_fills_up_the_evaluation_is_not_counted(in_tmp, bright_url):
    """Three prompts in batches of four and of one: the fourth of the first is a repetition."""
    padded = train(bright_url, steps=0, name="padded")
    exact = train(bright_url, steps=0, name="exact", batch_size=1)
    assert padded[0]["eval/reward"] == pytest.approx(exact[0]["eval/reward"], abs=1e-5)


def test_every_logged_name_is_documented(in_tmp, bright_url):
    documented = (REPO / "docs" / "metrics.md").read_text()
    phases = ("rollout", "reward_wait", "update", "sync", "eval", "save", "step")
    for name in {name for line in train(bright_url) for name in line} - {"step"}:
        kind, _, rest = name.partition("/")
        if kind == "time":
            assert rest.removesuffix("_s").removesuffix("_ms_per_image") in phases, name
        else:
            assert f"`{name}`" in documented, name


def test_gradients_are_the_mean_over_all_samples_and_kept_steps(monkeypatch):
    """What reaches the optimizer equals one autograd pass over everything at once."""
    run = world(0, 1)
    run.args = replace(run.args, updates_per_step=1, ratio_tolerance=0.0)
    run.net = run.on.engine.net.requires_grad_(True)
    run.params, run.optimizer, run.mode = list(run.net.parameters()), None, "none"
    batches, _ = app.rollout(run, step=0)
    advantages = torch.linspace(-1, 1, 8).view(4, 2)
    seen = []
    result = SimpleNamespace(grad_norm=1.0, skipped=False)

    def keep_gradients(*args, **kwargs):
        seen.append([None if p.grad is None else p.grad.clone() for p in run.params])
        return result

    monkeypatch.setattr(app, "optimizer_step", keep_gradients)
    app.update(run, 0, batches, advantages, None)
    run.net.zero_grad()
    losses = [
        -advantages[i] * app.rescore(run, batch, k)[0].log_prob
        for i, batch in enumerate(batches)
        for k in range(batch.x.shape[1])
    ]
    torch.stack(losses).mean().backward()  # at ratio 1 the loss has the gradient of -A log p
    pairs = [(ours, p.grad) for ours, p in zip(seen[0], run.params, strict=True) if ours is not None]
    assert len(pairs) > 0.9 * len(run.params)  # the last block's text stream leads nowhere, and has no gradient
    for ours, whole in pairs:
        torch.testing.assert_close(ours, whole, rtol=1e-3, atol=1e-7)


def test_samples_without_a_score_take_no_part():
    dist = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)
    run = SimpleNamespace(
        args=replace(TINY, prompts_per_step=2, group_size=2, batch_size=4), on=Rollouts(dist, None, None, 4)
    )
    scores = [Score(0.5), Score(None, abstained="unreadable"), Score(0.0), Score(1.0)]
    advantages, keep, metrics = app.grade(run, scores)
    assert keep is None
    assert advantages.shape == (4,)
    assert advantages[:2].tolist() == [0.0, 0.0]
    assert advantages[3] == -advantages[2] > 0
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/abstained_ratio"] == 0.5  # a group with a single score has nothing to compare it with
    broken = [Score(None, abstained="broken")] * 4
    with pytest.raises(RuntimeError, match="no score for any of 4 samples: broken"):
        app.grade(run, broken)
    run.args = replace(run.args, on_failure="mask")
    assert app.grade(run, broken)[0].tolist() == [0.0] * 4
    run.args = replace(run.args, drop_zero_signal=True)
    assert app.grade(run, scores)[1].tolist() == [False, False, True, True]
    assert app.grade(run, broken)[1].tolist() == [False] * 4


def test_a_group_is_left_out_whole_when_the_client_says_so():
    dist = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)
    on = Rollouts(dist, None, None, 6)
    lost = Score(None, abstained="the server was gone", mask_group=True)
    scores = [Score(0.1), Score(0.2), lost, Score(0.3), Score(None, abstained="unreadable"), Score(0.5)]
    rewards = rollouts.gather_rewards(on, scores, group_size=3)
    assert rewards.isnan().tolist() == [True, True, True, False, True, False]
    assert rollouts.gather_rewards(on, scores).isnan().tolist() == [False, False, True, False, True, False]


def test_parts_of_the_score_are_normalized_one_by_one():
    """A part in hundreds and one in hundredths count alike."""
    dist = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)
    changes = {"group_size": 4, "prompts_per_step": 1, "batch_size": 4, "adv_std": "group"}
    args = replace(TINY, reward_parts="kB=-1,match=1", **changes)
    run = SimpleNamespace(args=args, on=Rollouts(dist, None, None, 4))
    scores = [Score(0.0, parts={"kB": 100.0 * i, "match": 0.01 * j}) for i, j in ((0, 0), (1, 1), (2, 2), (3, 4))]
    one_by_one = [group_advantages(torch.tensor(x), torch.zeros(4, dtype=torch.long), std="group")
                  for x in ([0.0, 100.0, 200.0, 300.0], [0.0, 0.01, 0.02, 0.04])]  # fmt: skip
    torch.testing.assert_close(app.grade(run, scores)[0], one_by_one[1] - one_by_one[0])
    run.args = replace(args, reward_parts="kB=1,sharp=1")
    with pytest.raises(RuntimeError, match=r"must name a part 'sharp' in its scores, it names \['kB', 'match'\]"):
        app.grade(run, scores)
    for wrong in ("kB", "kB=x", "kB=1,kB=2", "=1", "kB=nan"):
        with pytest.raises(ValueError, match="--reward-parts must be NAME=NUMBER"):
            app.check_args(replace(args, scorer_url="http://x", reward_parts=wrong))


def test_a_second_scorer_is_asked_in_evaluations_only(in_tmp, bright_url):
    lines = train(bright_url, watch_scorer_url=bright_url)
    assert [line.get("eval/watch") for line in lines] == [line.get("eval/reward") for line in lines]
    assert "watch_scorer_url" in (in_tmp / "runs" / "tiny-signs" / "config.toml").read_text()
    assert bright_url not in (in_tmp / "runs" / "tiny-signs" / "config.toml").read_text()


def run_cli(*flags):
    script = str(REPO / "apps" / "train_flowgrpo.py")
    return subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, cwd=REPO)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lrr", "1"], "--lr"),
        (["--algo", "ppo"], "flowgrpo"),
        (["--preset", "tiny-sings"], "did you mean 'tiny-signs'?"),
        (["--preset"], "--preset needs a value"),
        (["--config", "no-such-file.toml"], "--config must be a readable TOML file, got no-such-file.toml"),
        ([], "--scorer-url must be the URL of a reward server"),
        (["--scorer-url", "http://x", "--group-size", "1"], "--group-size must be >= 2"),
        (["--scorer-url", "http://x", "--batch-size", "7"], "--batch-size times ranks (7) must divide"),
        (["--scorer-url", "http://x", "--updates-per-step", "3"], "--updates-per-step must divide a rank's batches"),
        (["--scorer-url", "http://x", "--kl-coef", "0.1"], "--kl-coef needs --lora-rank > 0"),
        (["--scorer-url", "http://x", "--dtype", "bfloat16"], "--dtype bfloat16 needs --lora-rank > 0"),
        (["--scorer-url", "http://x", "--algo", "mixgrpo"], "--window-size must be set for mixgrpo"),
        (["--scorer-url", "http://x", "--algo", "flowgrpo-cps", "--noise-level", "1.2"], "--noise-level must be <= 1"),
        (["--scorer-url", "http://x", "--guidance-scale", "0.5"], "--guidance-scale must be >= 1, got 0.5"),
        (["--scorer-url", "http://x", "--lr", "nan"], "--lr must be >= 0, got nan"),
        (["--scorer-url", "http://x", "--ema-decay", "1"], "--ema-decay must be < 1"),
        (["--scorer-url", "http://x", "--shard", "fsdp2"], "--shard fsdp2 does not fit 1 ranks"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_code_2(flags, message):
    result = run_cli(*flags)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_a_run_can_be_repeated_from_its_own_config(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(replace(TINY, window_size=3, name='a "quoted" name')))
    assert base_config(app.Args(), {}, path=str(path)) == replace(TINY, window_size=3, name='a "quoted" name')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr = 1.0", "unknown key 'lrr'; did you mean 'lr'"),
        ('lr = "fast"', "lr must be a number, got 'fast'"),
        ('algo = "ppo"', "algo must be one of 'flowgrpo', .*, got 'ppo'"),
        ('window_size = "two"', "window_size must be a whole number, got 'two'"),
        ("steps = true", "steps must be a whole number, got True"),
    ],
)
def test_a_mistake_in_a_config_file_is_named(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        base_config(app.Args(), {}, path=str(path))


def test_the_published_preset_is_the_published_one():
    preset = app.PRESETS["qwen-image-ocr-lora"]
    assert (preset.height, preset.width, preset.num_steps, preset.guidance_scale) == (512, 512, 10, 4.0)
    assert (preset.group_size, preset.prompts_per_step, preset.lr, preset.lora_rank) == (16, 32, 3e-4, 64)
    assert (preset.window_size, preset.window_low, preset.window_high, preset.clip_range) == (2, 0, 5, 1e-5)
    assert (preset.noise_level, preset.updates_per_step, preset.lora_alpha, preset.weight_decay) == (1.2, 2, 128, 1e-4)


def test_evaluation_words_are_not_trained_on():
    def words(path):
        return {line.split('"')[1] for line in Path(path).read_text().splitlines()}

    assert not words(TINY.prompts) & words(TINY.eval_prompts)
