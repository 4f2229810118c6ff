"""The FlowGRPO trainer: ranks, overlap, kernels, speed, gradients, samples without a score, parts of the score."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from helpers import sampled
from omni_losses import group_advantages
from omni_reward import Score
from omni_rl.flow.batches import TrainBatch, keep_samples, train_batches
from omni_rl.flow.sampling import sample, step_prompts
from omni_rl.flow.scorers import abstaining_scorer
from omni_rl.flow.scoring import gather_rewards, group_indices, step_advantages
from omni_rl.run import start
from omni_rl.run.run import Step
from omni_rl.settings.fields import change
from omni_rollout import Prompt, Samples, replay
from omni_train.files import read_jsonl
from trainer_runs import (
    CHECKPOINT,
    assert_same_gradients,
    exported,
    keep_gradients,
    lone_run,
    place,
    recipe,
    rollout,
    scored,
    tiny,
    train_on_ranks,
    undocumented,
)
from trainer_runs import train as train_with
from trainer_table import WEIGHTS

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=4, batch_size=4, lr=1e-4, optim_lr_scheduler_type="constant", num_inference_steps=4,
)  # fmt: skip


def train(bright_url, **changes):
    return train_with(app, change(TINY, scorer_url=bright_url, **changes))


def test_trajectories_do_not_depend_on_the_number_of_ranks():
    args = change(TINY, batch_size=2)
    run = lone_run(args)
    params = app.step_params(run, Step(3))
    alone, _ = rollout(run, params, number=3)
    first, second = (rollout(lone_run(args, rank=r, world_size=2), params, number=3)[0] for r in range(2))
    assert len(alone) == 2 * len(first) == 2 * len(second) == 4
    for a, b in zip(alone, [first[0], second[0], first[1], second[1]], strict=True):  # dealt in turn
        assert a.prompts == b.prompts
        assert torch.equal(a.media["image"], b.media["image"])
        for name in ("x", "x_next", "rollout_log_prob", "x0"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_a_batch_is_with_the_scorer_before_the_next_is_drawn():
    run, events = lone_run(change(TINY, batch_size=2)), []
    generate = run.engine.generate
    run.engine.generate = lambda prompts, params: events.append("draw") or generate(prompts, params)
    run.scorer.submit = lambda *samples: events.append("submit")
    sample(run, step_prompts(run, Step(0)), app.step_params(run, Step(0)))
    assert events == ["draw", "submit"] * 4


def test_the_next_batch_is_prepared_before_the_host_waits_for_this_one(monkeypatch):
    run, events = lone_run(change(TINY, batch_size=2)), []
    monkeypatch.setattr(run.engine, "prepare", lambda prompts, params: events.append(prompts[0].index))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: events.append("wait") or tensor)
    sample(run, step_prompts(run, Step(0)), app.step_params(run, Step(0)), scorer=abstaining_scorer())
    assert events == [2, "wait", 4, "wait", 6, "wait", "wait"]


def test_an_engine_with_other_weights_than_the_last_sync_s_is_found():
    run = lone_run(TINY)
    run.version = 1
    with pytest.raises(RuntimeError, match="the engine samples with weights 0, the trainer has 1"):
        rollout(run, app.step_params(run, Step(0)))


def test_attention_is_chosen_for_both_phases_and_written_down(here, bright_url):
    lines = train(bright_url, attention="math", train_steps=1)
    assert lines[1]["policy/first_ratio_max_dev"] == 0.0
    (start,) = read_jsonl(Path("runs/tiny-signs/versions.jsonl"))
    assert start["attention"] == "MATH"
    with pytest.raises(ValueError, match=r"^--attention must have kernels that run in float32 on cpu, got cudnn: No "):
        train(bright_url, attention="cudnn", name="refused")


@pytest.mark.timeout(900)
def test_compiled_blocks_keep_the_ratio_at_one(here, bright_url):
    """By torch's own compiler, over a recomputed block, with what a LoRA run in bfloat16 rounds.

    One block and texts of one length need two graphs; others are captured in test_train_compiled.py.
    """
    shutil.copytree(CHECKPOINT, "model")
    net = QwenImageTransformer2DModel.from_pretrained(CHECKPOINT / "transformer", num_layers=1)
    net.save_pretrained("model/transformer")
    Path("prompts.txt").write_text('a blue sign that says "AB"\na blue sign that says "AC"\n')
    lora = {"lora_rank": 4, "lora_alpha": 8, "dtype": "bfloat16", "lr": 1e-2}
    places = {"model": "model", "prompts": "prompts.txt", "eval_prompts": "prompts.txt"}
    lines = train(
        bright_url, compile=True, memory_gradient_checkpointing=True, memory_keep_products_gb=0.002, **lora, **places
    )
    assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0]
    assert all(line["policy/grad_norm"] > 0 for line in lines[1:])


@pytest.mark.parametrize("kind", sampled(["PiSSA", "DoRA"], 1))
def test_an_adapter_begins_as_the_reference(here, bright_url, kind):
    line = train(bright_url, kl_coef=0.1, train_steps=1, eval_first=False, **WEIGHTS[kind])[1]
    assert line["policy/first_ratio_max_dev"] == 0
    assert line["policy/kl"] == 0
    assert line["policy/grad_norm"] > 0
    sides = {name.rpartition(".lora_")[2]: min(tensor.shape) for name, tensor in exported("tiny-signs").items()}
    assert sides["A.weight"] == (8 if kind == "PiSSA" else 4)  # PiSSA's twice the rank
    assert ("magnitude_vector.weight" in sides) == (kind == "DoRA")


@pytest.mark.slow
@pytest.mark.timeout(1400)
@pytest.mark.parametrize(
    "settings",
    [
        {"sharding_mode": "fsdp2"},
        {"sharding_mode": "ddp", "lora_rank": 4, "lora_alpha": 8, "kl_coef": 0.1, "num_minibatches": 2},
    ],
    ids=["fsdp2", "ddp"],
)
def test_compiled_blocks_keep_the_ratio_at_one_on_two_ranks(here, bright_url, settings):
    """All weights, or LoRA with a reference and two updates; with guidance, in bfloat16."""
    args = change(TINY, scorer_url=bright_url, batch_size=2, true_cfg_scale=3.0, dtype="bfloat16", **settings)
    lines = train_on_ranks(app, change(args, compile=True))
    assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0]


def test_a_profiled_step_leaves_a_trace_of_each_phase_and_the_same_numbers(here, bright_url):
    plain = train(bright_url, name="plain")
    lines = train(bright_url, name="profiled", profile=1)
    traces = {path.name.split(".")[0] for path in Path("runs/profiled/trace").iterdir()}
    assert traces == {f"000001-{phase}" for phase in ("rollout", "reward_wait", "update", "sync", "save")}
    for ours, theirs in zip(lines, plain, strict=True):
        for name in ("eval/reward", "policy/loss", "policy/grad_norm"):
            assert ours.get(name) == theirs.get(name)


def test_the_speed_of_each_phase_with_a_net_is_logged(here, bright_url, monkeypatch):
    """As operations that do not depend on the speed: an update is three forwards, but for what leads nowhere."""
    monkeypatch.setattr(start, "peak_tflops", lambda device: 0.5)
    first, *lines = train_with(app, change(TINY, model=str(CHECKPOINT), scorer_url=bright_url), flops=True)
    assert undocumented(lines) == set()
    assert "perf/rollout_tflops" not in first
    for line in lines:
        tflop = {phase: line[f"perf/{phase}_tflops"] * line[f"time/{phase}_s"] for phase in ("rollout", "update")}
        assert tflop["update"] / tflop["rollout"] == pytest.approx(3 * 3 / 4, rel=0.1)  # 3 of 4 steps are trained
        for phase in tflop:
            assert line[f"perf/{phase}_mfu"] == pytest.approx(line[f"perf/{phase}_tflops"] / 0.5)


def test_a_finished_run_started_again_has_nothing_to_do(here, bright_url, capsys):
    before = train(bright_url, train_steps=1, eval_every=1)
    assert train(bright_url, train_steps=1, eval_every=1) == before
    assert capsys.readouterr().out.count("held-out score") == 2


def test_what_fills_up_the_evaluation_is_not_counted(here, bright_url):
    """Three prompts in batches of four and of one: the fourth of the first is a repetition."""
    padded = train(bright_url, train_steps=0, name="padded")
    exact = train(bright_url, train_steps=0, name="exact", batch_size=1)
    assert padded[0]["eval/reward"] == pytest.approx(exact[0]["eval/reward"], abs=1e-5)


def test_gradients_are_the_mean_over_all_samples_and_kept_steps():
    """What reaches the optimizer equals one autograd pass over everything at once."""
    run = lone_run(change(TINY, batch_size=2))
    kept = keep_gradients(run)
    batches, _ = rollout(run, app.step_params(run, Step(0)))
    advantages = torch.linspace(-1, 1, 8).view(4, 2)
    chosen = [TrainBatch.of(b, a) for b, a in zip(batches, advantages, strict=True)]
    app.update(run, Step(0), chosen)
    losses = [
        -advantages[i] * replay(run.model, run.policy.net, batch, k).log_prob
        for i, batch in enumerate(batches)
        for k in range(batch.num_kept)
    ]
    torch.stack(losses).mean().backward()  # at ratio 1 the loss has the gradient of -A log p
    assert_same_gradients(kept[0], run.policy.params, atol=1e-7)


def samples_of(count, group_size):
    """Samples of which only the prompts matter."""
    prompts = tuple(Prompt("", group=i // group_size, index=i, seed=i) for i in range(count))
    return Samples(prompts, {}, {}, 0)


def grade(args, scores):
    """The batches that the trainer makes of the scores of one, and the step with its metrics."""
    run, batch, step = lone_run(args), samples_of(len(scores), args.data.group_size), Step(0)
    batches = train_batches(run, step, scored(batch.prompts, [batch], scores), args.advantages)
    step.finish_grading()
    return batches, step


def kept(args, scores):
    """The samples that are trained on where groups whose samples score alike are left out."""
    batch = samples_of(len(scores), args.data.group_size)
    rollout = scored(batch.prompts, [batch], scores)
    found = step_advantages(lone_run(args), Step(0), rollout, args.advantages)
    return keep_samples(*found, rollout.groups, best_worst=0, drop_silent_groups=True).tolist()


@pytest.mark.parametrize("std", ["batch", "group", "none"])
@pytest.mark.parametrize("unit", [1.0, 1e-4, 1e-6, 1e-9])
def test_the_share_that_an_epsilon_takes_of_advantages_is_logged(std, unit):
    """eps / (deviation + eps), which is the same for both groups here; nothing where nothing divides."""
    args = change(TINY, prompts_per_step=2, group_size=2, batch_size=4, adv_std=std)
    scores = [Score(unit * value) for value in (0.0, 1.0, 1.0, 0.0)]
    _, step = grade(args, scores)
    deviation = unit * (0.5**0.5 if std == "group" else (1 / 3) ** 0.5)
    wanted = 0.0 if std == "none" else 1e-4 / (deviation + 1e-4)
    assert step.metrics["advantage/eps_share"] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_samples_without_a_score_take_no_part():
    args = change(TINY, prompts_per_step=2, group_size=2, batch_size=4)
    scores = [Score(0.5), Score(None, abstained="unreadable"), Score(0.0), Score(1.0)]
    [batch], step = grade(args, scores)
    advantages = batch.advantages
    assert batch.weights is None
    assert batch.is_as_sampled
    assert step.has_signal
    assert advantages.shape == (4,)
    assert advantages[:2].tolist() == [0.0, 0.0]
    assert advantages[3] == -advantages[2] > 0
    assert step.metrics["reward/mean"] == pytest.approx(0.5)
    assert step.metrics["reward/abstained_ratio"] == 0.5  # a single score of a group is compared with nothing
    broken = [Score(None, abstained="broken")] * 4
    with pytest.raises(RuntimeError, match="no score for any of 4 samples: broken"):
        grade(args, broken)
    args = change(args, scorer_on_failure="mask")
    [batch], step = grade(args, broken)
    assert batch.advantages.tolist() == [0.0] * 4
    assert not step.has_signal
    assert kept(args, scores) == [False, False, True, True]
    assert kept(args, broken) == [False] * 4


def test_a_step_without_a_signal_moves_no_weight(here, bright_url, monkeypatch, capsys):
    """After a step that filled Adam's momentum, a reward that says nothing leaves the weights where they are."""
    seen, choose = [], app.train_batches

    def silence(run, step, *args, **options):
        seen.append([p.detach().clone() for p in run.policy.params])
        batches = choose(run, step, *args, **options)
        step.has_signal = not step.number
        if step.number:
            return [TrainBatch.of(batch.trajectory, torch.zeros_like(batch.advantages)) for batch in batches]
        return batches

    monkeypatch.setattr(app, "train_batches", silence)
    lines = train(bright_url, train_steps=3, optim_weight_decay=0.1)
    assert [line["policy/skipped_updates"] for line in lines[1:]] == [0, 1, 1]
    assert any(not torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert capsys.readouterr().out.count("no sample has a signal") == 2


def test_a_group_is_left_out_whole_when_the_client_says_so():
    lost = Score(None, abstained="the server was gone", mask_group=True)
    scores = [Score(0.1), Score(0.2), lost, Score(0.3), Score(None, abstained="unreadable"), Score(0.5)]
    batch = samples_of(6, 3)
    rewards = gather_rewards(place(), [batch], scores, group_indices(batch.prompts))
    assert rewards.isnan().tolist() == [True, True, True, False, True, False]
    alone = gather_rewards(place(), [batch], scores, torch.arange(6))
    assert alone.isnan().tolist() == [False, False, True, False, True, False]


def test_parts_of_the_score_are_normalized_one_by_one():
    """A part in hundreds and one in hundredths count alike."""
    args = change(TINY, reward_parts="kB=-1,match=1", group_size=4, prompts_per_step=1, batch_size=4, adv_std="group")
    scores = [Score(0.0, parts={"kB": 100.0 * i, "match": 0.01 * j}) for i, j in ((0, 0), (1, 1), (2, 2), (3, 4))]
    one_by_one = [
        group_advantages(torch.tensor(x), torch.zeros(4, dtype=torch.long), std="group")
        for x in ([0.0, 100.0, 200.0, 300.0], [0.0, 0.01, 0.02, 0.04])
    ]
    [batch], _ = grade(args, scores)
    torch.testing.assert_close(batch.advantages, one_by_one[1] - one_by_one[0])
    with pytest.raises(RuntimeError, match=r"must name a part 'sharp' in its scores, it names \['kB', 'match'\]"):
        grade(change(args, reward_parts="kB=1,sharp=1"), scores)


def test_a_second_scorer_is_asked_in_evaluations_only(here, bright_url):
    lines = train(bright_url, scorer_watch_url=bright_url)
    assert [line.get("eval/watch") for line in lines] == [line.get("eval/reward") for line in lines]
    assert "watch_url" in (here / "runs" / "tiny-signs" / "config.toml").read_text()
    assert bright_url not in (here / "runs" / "tiny-signs" / "config.toml").read_text()
