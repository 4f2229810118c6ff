"""Classifier-free guidance without padding, masks and waiting, in the models whose texts differ in length."""

from dataclasses import replace

import pytest
import torch
from model_rows import NEGATIVE, ROWS
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)

TEXTS = ['a blue sign that says "K7QXYZ", in the rain, on a beach', "x"]


QWEN = ["qwen-image", "qwen-image-edit-plus"]


@pytest.fixture(scope="module", params=[*QWEN, "z-image"])
def case(request):
    """A model's row, its engine, and samples of two prompts, four of each."""
    row = ROWS[request.param]
    model = open_model(row.checkpoint())
    prompts = [
        Prompt(text, 0, i, seed=i, negative=NEGATIVE, images=row.references(0)) for text in TEXTS for i in range(4)
    ]
    return row, model, DiffusersEngine(model, model.load(device="cpu", dtype=torch.float32)), prompts


def inputs(case, prompts):
    row, model, engine, _ = case
    cond = engine.generate(prompts, replace(row.guided, num_inference_steps=2)).cond
    x = torch.randn(len(prompts), *model.latent_shape(row.guided), generator=torch.Generator().manual_seed(0))
    return x, torch.full((len(prompts),), 0.7), cond


def num_flops(model, net, *args):
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.predict_velocity(net, *args)
    return counter.get_total_flops()


def test_a_batch_of_one_prompt_computes_what_its_samples_and_their_negatives_need_alone(case):
    row, model, engine, prompts = case
    executed = num_flops(model, engine.net, *inputs(case, prompts[:4]), row.guided)
    x, sigma, cond = inputs(case, prompts[:1])
    texts = {name: tensor for name, tensor in cond.items() if not name.startswith("negative_")}
    negatives = texts | {n.removeprefix("negative_"): t for n, t in cond.items() if n.startswith("negative_")}
    alone = [num_flops(model, engine.net, x, sigma, half, model.unguided(row.guided)) for half in (texts, negatives)]
    assert executed == 4 * sum(alone)


@pytest.mark.parametrize("case", QWEN, indirect=True)
def test_a_mask_is_passed_where_a_batch_has_texts_of_unequal_length_alone(case):
    row, model, engine, prompts = case
    masks = []

    def note(net, args, kwargs):
        masks.append(kwargs["encoder_hidden_states_mask"])

    handle = engine.net.register_forward_pre_hook(note, with_kwargs=True)
    x, sigma, cond = inputs(case, prompts[3:5])
    for rows, lengths in (([0], [None]), ([0, 1], [cond["embeds_mask"].sum(dim=1).tolist()])):
        masks.clear()
        model.predict_velocity(engine.net, x[rows], sigma[rows], {n: t[rows] for n, t in cond.items()}, row.guided)
        found = [None if mask is None else mask.sum(dim=1).tolist() for mask in masks]
        assert found == [*lengths, None]  # negatives are alike
    handle.remove()


def test_no_forward_waits_for_the_device(case):
    """A tensor without data has no value that the host could ask for."""
    row, model, _, prompts = case
    x, sigma, cond = inputs(case, prompts[:4])
    net = model.empty_net()
    cond = {name: tensor if name.endswith("_mask") else tensor.to("meta") for name, tensor in cond.items()}
    with torch.no_grad():
        velocity = model.predict_velocity(net.to("meta"), x.to("meta"), sigma.to("meta"), cond, row.guided)
    assert velocity.is_meta
    assert velocity.shape == x.shape
