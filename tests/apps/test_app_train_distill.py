"""The trainer of distillation: what teachers want, and several of them."""

import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from helpers import sampled
from omni_rl.run.world import World
from omni_rl.settings.fields import change
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_train.dist import init_distributed
from omni_train.lora import adapter_params, add_lora
from omni_train.weights.full import save_weights
from trainer_runs import lone_run, recipe, rollout, shallow, tiny, train, undocumented

import train_distill as app

TINY = tiny(
    recipe(app, "tiny-signs"), prompts_per_step=4, batch_size=2, train_high=None, lr=1e-3, optim_weight_decay=0.0
)
LORA = {"lora_rank": 4, "lora_alpha": 8}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def write_teacher(folder, seed, **lora):
    """Weights, or an adapter, beside those of the checkpoint; the folder as --teachers has it."""
    net = QwenImageTransformer2DModel.from_pretrained(shallow() / "transformer")
    torch.manual_seed(seed)
    if lora:
        add_lora(net, ["to_q", "to_k", "to_v", "to_out.0"], rank=lora["lora_rank"], alpha=lora["lora_alpha"], seed=seed)
    with torch.no_grad():
        for p in adapter_params(net, "default") if lora else net.parameters():
            p.add_(0.03 * torch.randn_like(p))
    save_weights(net, folder, init_distributed())
    return str(folder)


def drawn(run, args):
    """A batch of the student's, and its first step."""
    (batch, *_), _ = rollout(run, app.student_params(args, run.base_params))
    return batch, app.latents_at(batch, 0)


# What the student learns


@pytest.mark.parametrize("algo", sampled(app.ALGOS, 1))
def test_a_student_that_is_its_teacher_has_nothing_to_learn(here, algo):
    """Teacher and student are one function at one shape: the loss is 0 to the last bit, and so is its gradient."""
    lines = train(app, change(TINY, algo=algo, teacher_substeps=1, **LORA))
    assert [line["policy/loss"] for line in lines[1:]] == [0.0, 0.0]
    assert [line["policy/grad_norm"] for line in lines[1:]] == [0.0, 0.0]
    assert "eval/reward" not in lines[-1]
    assert undocumented(lines) == set()


def test_a_teacher_ends_where_many_short_steps_of_its_own_end():
    """With the velocity a x of a linear flow, n Euler steps from x multiply it by (1 + a dt / n)^n."""
    a, x = 0.7, torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    model = SimpleNamespace(predict_velocity=lambda net, x, *_: a * x, is_guided=lambda params: False)

    @contextmanager
    def reference():
        yield None

    for n in (1, 3, 50):
        args = change(TINY, teacher_substeps=n)
        run = SimpleNamespace(args=args, model=model, policy=SimpleNamespace(reference=reference))
        at = app.Latents(
            x, x, torch.full((3,), 0.9), torch.full((3,), 0.4), SimpleNamespace(guidance={}, guidance_scale=1)
        )
        at = replace(at, params=app.Params(3, 32, 96))
        velocity = app.teacher_velocity(run, app.INITIAL, {}, at)
        torch.testing.assert_close(x - 0.5 * velocity, x * (1 - 0.5 * a / n) ** n)


@pytest.mark.parametrize("algo", sorted(app.ALGOS))
def test_each_trained_step_begins_where_the_one_before_ended(algo):
    args = change(TINY, algo=algo)
    run = lone_run(args)
    batch, at = drawn(run, args)
    assert torch.equal(at.sigma, batch.sigmas[:1].expand(2))
    for i in range(*app.trained_steps(args)):
        assert torch.equal(at.x, app.latents_at(batch, i).x)
        at = app.latents_at(batch, i)
        if algo == "opd-ode":
            with torch.no_grad():
                velocity = run.model.predict_velocity(run.policy.net, at.x, at.sigma, batch.cond, at.params)
            moved = at.x + (at.sigma_next - at.sigma)[0] * velocity
            torch.testing.assert_close(at.x_next, moved, rtol=0, atol=1e-6)
        at = replace(at, x=at.x_next)
    assert torch.equal(at.x, batch.x0) == (algo == "opd-ode")


def test_a_guided_teacher_wants_what_guidance_gives():
    """The student has no negative prompt, so the teacher's is encoded for it."""
    args = change(TINY, teacher_substeps=1, teacher_true_cfg_scale=3.0)
    run = lone_run(args)
    run.policy.reference = lambda: pretend(run.policy.net)
    batch, at = drawn(run, args)
    assert not any(name.startswith("negative") for name in batch.cond)
    guided = replace(at.params, guidance={"true_cfg_scale": 3.0})
    cond = run.engine.condition(batch.prompts, guided)
    with torch.no_grad():
        wanted = run.model.predict_velocity(run.policy.net, at.x, at.sigma, cond, guided)
        plain = run.model.predict_velocity(run.policy.net, at.x, at.sigma, batch.cond, at.params)
    found = app.teacher_velocity(run, app.INITIAL, app.teacher_cond(run, batch), at)
    assert torch.equal(found, wanted)
    assert (wanted - plain).abs().max() > 0.01


def test_a_sleeping_engine_is_not_asked_what_a_guided_teacher_sees(here, monkeypatch):
    asleep, condition = [], DiffusersEngine.condition

    def awake(engine, prompts, params):
        assert not asleep
        return condition(engine, prompts, params)

    monkeypatch.setattr(DiffusersEngine, "sleep", lambda engine: asleep.append(True))
    monkeypatch.setattr(DiffusersEngine, "wake", lambda engine: asleep.clear())
    monkeypatch.setattr(DiffusersEngine, "condition", awake)
    args = change(TINY, teacher_substeps=1, teacher_true_cfg_scale=3.0, memory_offload="engine", train_steps=1)
    assert train(app, args)[-1]["policy/loss"] > 0


@contextmanager
def pretend(net):
    """A policy before training that is the net itself."""
    yield net


def test_a_sample_learns_from_the_teacher_that_its_prompt_names():
    prompts = [
        Prompt(text="a", group=i, index=i, seed=i, meta=meta)
        for i, meta in enumerate([{"teacher": "one"}, {}, {"teacher": "two"}])
    ]
    batch = SimpleNamespace(prompts=prompts)
    assert app.teacher_shares(batch, "one", 2).tolist() == [1.0, 0.5, 0.0]
    assert app.teacher_shares(batch, "two", 2).tolist() == [0.0, 0.5, 1.0]


# Whole runs


@pytest.mark.parametrize("kind", sampled(["full", "lora"], 1))
def test_a_student_comes_nearer_to_its_teachers(here, kind):
    lora = {} if kind == "full" else LORA | {"lora_targets": "to_q,to_k,to_v,to_out.0"}
    teachers = ",".join(
        f"{name}={write_teacher(here / name, seed, **lora)}" for seed, name in enumerate(("one", "two"))
    )
    args = change(TINY, teachers=teachers, teacher_substeps=2, train_steps=5, eval_every=5, lr=3e-3, **lora)
    losses = [line["policy/loss"] for line in train(app, args)[1:]]
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2])


def test_a_plan_counts_the_weights_of_teachers(here, capsys):
    frozen = []
    teacher = write_teacher(here / "one", 0)
    for teachers in ("", f"one={teacher},two={teacher}"):
        app.main(change(TINY, teachers=teachers, dry_run=True), World.join(TINY))
        frozen.append(float(re.search(r"per rank: (\d+) MB frozen", capsys.readouterr().out)[1]))
    assert frozen[1] == pytest.approx(2 * frozen[0], abs=1)  # without teachers it is the model before training


def test_another_teacher_under_the_same_name_is_no_continuation(here):
    args = change(TINY, teachers=f"one={write_teacher(here / 'one', 0)}", train_steps=1)
    train(app, args)
    write_teacher(here / "one", 1)
    with pytest.raises(ValueError, match=r"with other settings: one=\S+one has other contents than at the start"):
        train(app, change(args, train_steps=2))
