"""The embedded engine: the contract, what it keeps, what it encodes, what a weight sync moves."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import CHECKPOINT
from omni_rollout import Params, Prompt, conditioning, sampler
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.testing import check_engine
from omni_sched import INITIAL_NOISE, cps_step, dance_step, sde_step, step_noise

PARAMS = Params(5, 32, 96, noise_level=0.7, sde_steps=(1, 2))
GUIDED = replace(PARAMS, guidance={"true_cfg_scale": 2.0})
PROMPTS = [Prompt(f'a red sign that says "{word}"', 0, i, seed=i) for i, word in enumerate(["AB", "K7QX", "AB"])]


@pytest.fixture
def model():
    return open_model(CHECKPOINT)


@pytest.fixture
def engine(model):
    return DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))


@pytest.fixture
def encoded(model, monkeypatch):
    """What was encoded, in order."""
    seen, encode = [], model.encode

    def note(parts, prompt, *, negative=False):
        seen.append((prompt.negative if negative else prompt.text, negative))
        return encode(parts, prompt, negative=negative)

    monkeypatch.setattr(model, "encode", note)
    return seen


@pytest.mark.parametrize("rule", [sde_step, cps_step, dance_step])
def test_the_engine_keeps_the_contract(engine, model, rule):
    check_engine(engine, model, replace(PARAMS, rule=rule, keep_mean=True))


def test_only_the_stochastic_steps_are_kept(engine):
    trajectory = engine.generate(PROMPTS, PARAMS)
    assert trajectory.x.shape == (3, 2, 16, 4, 12)
    assert trajectory.sde_steps.tolist() == [[1, 2]] * 3
    assert trajectory.rollout_mean is None
    without = engine.generate(PROMPTS, replace(PARAMS, sde_steps=()))
    assert without.x.shape == (3, 0, 16, 4, 12)
    assert without.rollout_log_prob.shape == (3, 0)


def test_noise_for_the_start_is_drawn_once_ahead_and_no_bit_depends_on_it(engine, monkeypatch):
    drawn = []
    monkeypatch.setattr(sampler, "step_noise", lambda *args: drawn.append(args[:2]) or step_noise(*args))
    others = [replace(prompt, seed=prompt.seed + 7) for prompt in PROMPTS]
    alike = [replace(prompt, initial_seed=5) for prompt in PROMPTS]
    found = [engine.prepare(ahead, PARAMS) or engine.generate(PROMPTS, PARAMS).x0 for ahead in (PROMPTS, others, alike)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert [seeds for seeds, step in drawn if step == INITIAL_NOISE] == [(0, 1, 2), (7, 8, 9), (0, 1, 2)]


def test_each_text_is_encoded_once(engine, encoded):
    engine.generate(PROMPTS, GUIDED)
    engine.generate(PROMPTS, GUIDED)
    assert sorted(encoded) == sorted({(p.text, False) for p in PROMPTS} | {("", True)})


def test_encoded_texts_are_bounded_by_their_bytes(engine, encoded):
    engine.generate(PROMPTS, PARAMS)
    short, long = (conditioning.num_bytes(cond) for _, cond in engine.sampler.condition._cached.values() if cond)
    engine.sampler.condition.max_bytes = short + long
    engine.generate(PROMPTS, PARAMS)
    assert len(encoded) == 2
    engine.generate([replace(PROMPTS[0], text='a red sign that says "CD"'), PROMPTS[1]], PARAMS)
    assert len(encoded) == 3  # the oldest went
    assert [prompt.text for prompt, cond in engine.sampler.condition._cached.values() if cond] == [
        encoded[1][0],
        encoded[2][0],
    ]
    engine.sampler.condition.max_bytes = 0
    engine.generate(PROMPTS, PARAMS)
    assert len(engine.sampler.condition._cached) == 1  # the newest stays


def test_samples_of_a_batch_share_the_sizes_of_their_references(engine):
    first, second = (replace(PROMPTS[i], images=(torch.zeros(8 * i + 8, 8, 3),)) for i in range(2))
    for other in (second, PROMPTS[1], replace(first, images=first.images * 2)):
        with pytest.raises(ValueError, match="prompts of one batch must have equally many images of equal sizes, got"):
            engine.generate([first, other], PARAMS)


def test_references_that_the_model_does_not_read_are_refused(engine):
    for extra in ({"images": (torch.zeros(8, 8, 3),)}, {"audio": torch.zeros(10, 1)}):
        with pytest.raises(ValueError, match=f"prompts of a QwenImagePipeline must have no {next(iter(extra))}"):
            engine.generate([replace(PROMPTS[0], **extra)], PARAMS)


def test_a_model_says_how_many_references_it_reads(engine, monkeypatch):
    for allowed, span in ((range(1, 2), "1"), (range(1, 4), "1 to 3")):
        monkeypatch.setattr(type(engine.sampler.model), "IMAGES", allowed)
        with pytest.raises(ValueError, match=f"prompts of a QwenImagePipeline must have {span} images, got 0"):
            engine.generate(PROMPTS, PARAMS)


def test_other_inputs_are_made_once_for_samples_that_share_them(engine, monkeypatch):
    """References are encoded once a group, and every sample has its own group's."""
    made = []

    def condition(self, parts, prompt, params):
        made.append(prompt.index)
        return {"level": prompt.images[0].float().mean()}

    monkeypatch.setattr(type(engine.sampler.model), "IMAGES", range(1, 2))
    monkeypatch.setattr(type(engine.sampler.model), "condition", condition)
    images = [torch.full((8, 8, 3), level, dtype=torch.uint8) for level in (3, 7)]
    prompts = [Prompt("a sign", group=i % 2, index=i, seed=i, images=(images[i % 2],)) for i in range(4)]
    assert engine.generate(prompts, PARAMS).cond["level"].tolist() == [3, 7, 3, 7]
    assert len(made) == 2


def test_a_sync_with_the_trainers_own_module_moves_nothing(engine):
    net = engine.net
    before = {name: p.data_ptr() for name, p in net.named_parameters()}
    engine.load_weights(net.named_parameters(), version=3)
    assert engine.net is net
    assert (engine.shares_weights, engine.is_exact, engine.moved_bytes) == (True, True, 0)
    assert {name: p.data_ptr() for name, p in engine.net.named_parameters()} == before
    with torch.no_grad():
        next(net.parameters()).add_(1.0)  # what the trainer changes, the engine has
    assert torch.equal(next(engine.net.parameters()), next(net.parameters()))
    assert engine.generate(PROMPTS, PARAMS).weight_version == 3


def test_a_sync_from_another_module_copies(engine):
    trained = copy.deepcopy(engine.net)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    stale = engine.generate(PROMPTS, PARAMS)
    engine.load_weights(trained.named_parameters(), version=1)
    assert engine.moved_bytes == sum(p.nbytes for p in trained.parameters())
    assert all(torch.equal(a, b) for a, b in zip(engine.net.parameters(), trained.parameters(), strict=True))
    assert not torch.equal(engine.generate(PROMPTS, PARAMS).x0, stale.x0)


@pytest.mark.parametrize("name", ["no_such_weight", "proj_out.bias"])
def test_a_weight_that_does_not_fit_is_refused(engine, name):
    with pytest.raises(ValueError, match=f"tensors must fit the net, got {name}"):
        engine.load_weights([(name, torch.zeros(3))], version=1)


def test_a_size_or_a_knob_that_the_model_lacks_is_refused_before_anything_is_drawn(engine, encoded):
    for change in ({"height": 40}, {"guidance_scale": 4.0}, {"guidance": {"cfg": 2.0}}, {"num_frames": 5}):
        with pytest.raises(ValueError, match=f"^{next(iter(change))} "):
            engine.generate(PROMPTS, replace(PARAMS, **change))
    assert encoded == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_same_seeds_are_the_same_images_in_batches_of_any_size(engine, size):
    """Noise is the same to the bit; the model rounds otherwise at another shape, by less than an 8-bit level."""
    words = ["ABCD", "K", "HJ", "EF2", "7"]
    prompts = [Prompt(f'a red sign that says "{word}"', 0, i, i) for i, word in enumerate(words)]
    whole = engine.generate(prompts, PARAMS).media["image"]
    parts = [engine.generate(prompts[i : i + size], PARAMS).media["image"] for i in range(0, len(prompts), size)]
    difference = (torch.cat(parts).int() - whole.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    assert size < 5 or difference.max() == 0
