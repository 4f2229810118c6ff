"""Replayed routes: the experts of sampling, whatever the router has become; and how evenly experts are loaded."""

import math

import pytest
import torch
from model_rows import ROWS
from omni_rollout import Params, Prompt, Trajectory, replay
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.models.routing import ExpertLoad, Routing, find_routing, replay_routes

torch.set_num_threads(1)
PARAMS = Params(4, 32, 96, guidance_scale=5.0, noise_level=0.7, sde_steps=(1, 2))
TEXTS = ("a cat", "a dog on a sign", "x")


def prompts(*texts):
    return [Prompt(text, 0, i, seed=i) for i, text in enumerate(texts)]


@pytest.fixture
def drawn():
    """A model and an engine that keep routes, samples, and all that routers choose from then on."""
    model = open_model(ROWS["hunyuan-image"].checkpoint())
    engine = DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32))
    routing, chosen = find_routing(engine.net), []
    model, engine = replay_routes(model, engine, routing)
    trajectory = engine.generate(prompts(*TEXTS), PARAMS)
    routing.register_forward_hook(lambda module, args, out: chosen.append(out))
    return model, engine, trajectory, chosen


def test_a_step_is_replayed_bit_for_bit(drawn):
    model, engine, trajectory, _ = drawn
    for k in range(2):
        assert torch.equal(replay(model, engine.net, trajectory, k).log_prob, trajectory.rollout_log_prob[:, k])


def test_the_update_takes_the_experts_of_sampling_when_the_router_would_choose_others(drawn):
    model, engine, trajectory, chosen = drawn
    for layer in engine.net.model.layers:
        layer.mlp.gate.wg.weight.data.neg_()  # the best become the worst
    for k in range(2):
        replay(model, engine.net, trajectory, k)
        text, image = (each.chunk(2) for each in chosen.pop())
        for side, own, other in zip(("", "negative_"), text, image, strict=True):
            assert torch.equal(own, trajectory.cond[f"{side}text_routes"])
            assert torch.equal(other, trajectory.cond[f"{side}routes"][:, k])
    others = {name: tensor for name, tensor in trajectory.cond.items() if "route" not in name}
    model.predict_velocity(engine.net, trajectory.x[:, 0], trajectory.sigma(0), others, PARAMS)
    assert not torch.equal(chosen[0][1].chunk(2)[0], trajectory.cond["routes"][:, 0])


def test_routes_are_bytes_and_go_with_their_samples_into_other_batches(drawn):
    _, engine, trajectory, _ = drawn
    assert trajectory.cond["routes"].shape == (3, 2, 4 + 2 * 6, 3, 2)
    assert trajectory.cond["text_routes"].shape == (3, 1 + len(TEXTS[1]), 3, 2)
    assert {t.dtype for name, t in trajectory.cond.items() if name.endswith("routes")} == {torch.uint8}
    again = Trajectory.cat([engine.generate(prompts("a longer text than others"), PARAMS), trajectory.select([0, 2])])
    alone = again.select([2]).trim()
    assert alone.cond["text_routes"].shape[1] == 1 + len(TEXTS[2])
    assert torch.equal(alone.cond["routes"], trajectory.cond["routes"][2:])


def test_samples_without_stochastic_steps_have_no_routes(drawn):
    _, engine, _, _ = drawn
    assert not [name for name in engine.generate(prompts("x"), Params(2, 32, 96)).cond if "route" in name]


@torch.no_grad()
def test_the_load_of_experts_is_that_of_their_counts():
    routing = Routing(4)
    load = ExpertLoad(4)
    routing.register_forward_hook(load.count)
    assert load.metrics() == {}
    text = torch.zeros(1, 2, 1, 2, dtype=torch.uint8)  # two tokens, of which each goes to expert 0 twice
    others = torch.tensor([0, 1, 0, 1], dtype=torch.uint8).view(1, 2, 1, 2)
    routing(text, others)
    assert load.metrics() == pytest.approx(
        {
            "rollout/experts_busiest": 4 * 6 / 8,
            "rollout/experts_entropy": (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4),
            "rollout/experts_idle": 0.5,
        }
    )
    load.clear()
    assert load.metrics() == {}
    with torch.enable_grad():
        routing(text, others)
    assert load.metrics() == {}  # of sampling alone
    reference = ExpertLoad(4, counts=lambda: False)
    routing.register_forward_hook(reference.count)
    routing(text, others)
    assert reference.metrics() == {}


def test_more_experts_than_a_byte_can_tell_are_refused():
    with pytest.raises(ValueError, match="num_experts must be <= 256"):
        Routing(257)
